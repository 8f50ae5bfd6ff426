"""Plans as explicit kernels: equal numbers, and no byte more than what the compiler's own program sends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import propagate
from spmd.errors import SpmdError
from spmd.inspect import collectives
from tests.propagation.frozen import compare, run
from tests.propagation.programs import PLAIN, drawn, mlp, struct

NAMED = {one.name: one for one in PLAIN}
FROZEN = [
    "mlp",
    "mlp_gradient",
    "fsdp",
    "fsdp_gradient",
    "mlp_sorted",
    "normed_over_devices",
    "softmax_over_devices",
    "attention",
    "attention_gradient",
    "total",
    "readme_mlp",
    "readme_mlp_gradient",
    "column_and_row_gradient",
    "rms_norm_gradient",
]


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_program_has_the_numbers_and_sends_no_more(mesh, name):
    sent, auto = compare(NAMED[name], mesh)
    assert sent <= auto
    if name in ("readme_mlp", "fsdp_gradient", "normed_over_devices"):
        assert sent < auto


@pytest.mark.parametrize("seed", (3, 7, 10, 13))
def test_programs_that_are_drawn(mesh, seed):
    compare(drawn(seed), mesh)


def test_whole_numbers_are_divided_towards_zero(mesh):
    fn = lambda x: (x // 3, jax.lax.rem(x, 3), x % 3, jax.lax.div(x, 2), x >> 1, x << 2, x ^ 3)
    frozen = run(propagate(fn, struct(mesh, "b/dp d", "int32")).freeze("frozen"), mesh)
    x = np.arange(-512, 0, dtype="int32").reshape(16, 32) // np.int32(7)
    for want, have in zip(fn(x), frozen(x), strict=True):
        assert np.array_equal(want, have)


def test_the_text_is_the_kernel(mesh):
    args = [struct(mesh, one) for one in ("b/dp d", "d f/tp", "f/tp d")]
    text = propagate(lambda x, w, v: jnp.tanh(x @ w) @ v, *args, layouts="b d, d f, f d").freeze("block")
    assert text == (
        '@spmd.kernel("b/dp d, d f/tp, f/tp d -> b/dp d", mesh=mesh)\n'
        "def block(x, w, v):\n"
        '    v1 = spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")\n'
        '    return spmd.einsum(jnp.tanh(v1), v, "b/dp f/tp, f/tp d -> b/dp d")\n'
    )
    values = [np.ones(x.shape, x.dtype) for x in args]
    np.testing.assert_allclose(run(text, mesh, "block").reference(*values), run(text, mesh, "block")(*values))


def test_a_kernel_in_auto_mode_is_frozen_with_its_names(mesh):
    @spmd.kernel("b/dp s/tp d, d/dp f/tp -> b/dp s f/tp", mesh=mesh)
    def project(x, w):
        return jnp.tanh(spmd.einsum(x, w, "b/dp s/tp d, d/dp f/tp -> b/dp s f/tp"))

    @spmd.kernel("b/dp s/tp d, d/dp f/tp -> b/dp s f/tp", mesh=mesh)
    def gathered(x, w):
        x = spmd.all_gather(x, "b/dp s/tp d -> b/dp s d")
        w = spmd.all_gather(w, "d/dp f/tp -> d f/tp")
        return jnp.tanh(spmd.einsum(x, w, "b/dp s d, d f/tp -> b/dp s f/tp"))

    args = struct(mesh, "b/dp s/tp d"), struct(mesh, "d/dp f/tp")
    text = propagate(gathered.auto, *args).freeze("frozen")
    assert 'spmd.all_gather(x, "b/dp s/tp d -> b/dp s d")' in text
    assert collectives(run(text, mesh), *args).counts == collectives(gathered, *args).counts
    with pytest.raises(SpmdError):
        project.trace(*args)  # a gather that nobody wrote


@pytest.mark.parametrize(
    "fn, layouts, told",
    [
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x.at[1].set(0.0), x), ("b/dp d",), "that dp divides"),
        (lambda x: jnp.fft.fft(x).real, ("b/dp d",), "an operation fft"),
        (lambda x: jnp.cumsum(x, 0), ("b/dp d",), "cumsum works along a dimension that dp divides"),
        (lambda t, ids: t[ids], ("v/tp d", "n"), "a lookup along a dimension that tp divides"),
    ],
)
def test_what_is_not_written_yet(mesh, fn, layouts, told):
    kinds = ("float32", "int32")
    args = [struct(mesh, one, kind) for one, kind in zip(layouts, kinds, strict=False)]
    with pytest.raises(SpmdError, match=told):
        propagate(fn, *args).freeze()


def test_parameters_have_names_of_python(mesh):
    params = {"in": struct(mesh, "d f/tp"), "out": struct(mesh, "f/tp d")}
    plan = propagate(lambda params, x: mlp(x, params["in"], params["out"]), params, struct(mesh, "b/dp d"))
    assert "def f(params_in, params_out, x):" in plan.freeze("f")
