"""`zeros`, `ones`, `full`, `iota`: values, JAX's types, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd import from_function
from spmd.fft import fftfreq, rfftfreq
from spmd.language import Size
from spmd.modes import MODES
from spmd.ops import full, iota, linspace, ones, zeros
from tests import simulator
from tests.ops.harness import close, frame, make_mesh, run
from tests.sampler import Sampler, rare, seeds, share

MESH = {"dp": 2, "tp": 4}


def made(make, out: str, mode: str = "explicit", mesh=MESH):
    """What a body without operands makes."""
    return run(lambda _: make(), mesh, ["scalar"], out, mode)(jnp.zeros(()))


@pytest.mark.parametrize("mode", MODES)
def test_values_and_dtypes(mode: str) -> None:
    close(made(lambda: zeros("b/dp d", b=4, d=3), "b/dp d", mode), jnp.zeros((4, 3)))
    close(made(lambda: ones("b/dp d/tp", jnp.int32, b=4, d=8), "b/dp d/tp", mode), jnp.ones((4, 8), jnp.int32))
    close(made(lambda: full("d/tp/dp", 2.5, d=8), "d/tp/dp", mode), jnp.full(8, 2.5))
    close(made(lambda: full("(h k)/tp", -1, jnp.bfloat16, h=4, k=2), "(h k)/tp", mode), jnp.full(8, -1, jnp.bfloat16))
    close(made(lambda: zeros("scalar"), "scalar", mode), jnp.zeros(()))


@pytest.mark.parametrize("x64", share([False, True]))
@pytest.mark.parametrize("mode", MODES)
@rare
def test_dtypes_are_those_of_jax(mode: str, x64: bool) -> None:
    pairs = {
        "zeros": (lambda: zeros("b/dp", b=4), lambda: jnp.zeros(4)),
        "ones": (lambda: ones("b/dp", b=4), lambda: jnp.ones(4)),
        "full": (lambda: full("b/dp", 2.5, b=4), lambda: jnp.full(4, 2.5)),
        "full of integers": (lambda: full("b/dp", 2, b=4), lambda: jnp.full(4, 2)),
        "linspace": (lambda: linspace(0, 1, "b/dp", b=4), lambda: jnp.linspace(0, 1, 4)),
        "linspace of bfloat16": (
            lambda: linspace(jnp.bfloat16(0), 1.0, "b/dp", b=4),
            lambda: jnp.linspace(jnp.bfloat16(0), 1.0, 4),
        ),
        "from_function": (lambda: from_function(lambda i: i.astype(float), "b/dp", b=4), lambda: jnp.arange(4.0)),
        "fftfreq": (lambda: fftfreq("b/dp", b=4), lambda: jnp.fft.fftfreq(4)),
        "rfftfreq": (lambda: rfftfreq("b/dp", 6), lambda: jnp.fft.rfftfreq(6)),
        "iota, int32 always": (lambda: iota("b/dp", b=4), lambda: jnp.arange(4, dtype=jnp.int32)),
    }
    with jax.enable_x64(x64):
        for name, (ours, jaxs) in pairs.items():
            found, wanted = made(ours, "b/dp", mode), jaxs()
            assert (found.dtype, found.weak_type) == (wanted.dtype, wanted.weak_type), name
            np.testing.assert_array_equal(found, wanted, err_msg=name)


def test_sizes_come_from_the_frame() -> None:
    with frame(MESH, bound=(("b", Size(6, "argument x")),)).enter():
        assert zeros("b/dp 3").shape == (6, 3)


@pytest.mark.parametrize(
    ("layout", "to", "axes"),
    [("b/dp d", None, {"dp"}), ("d {U:tp}", None, {"tp"}), ("d", None, set()), ("d", "varying", {"dp", "tp"})],
)
def test_jax_types(layout: str, to: str | None, axes: set[str]) -> None:
    seen = []

    def body(x):
        y = zeros(layout, to=to, d=8, **({"b": 4} if "b" in layout else {}))
        seen.append(set(jax.typeof(y).manual_axis_type.varying))
        return x

    jax.shard_map(body, mesh=make_mesh(MESH), in_specs=P(), out_specs=P())(jnp.zeros(()))
    assert seen == [axes]


def test_a_carry_of_a_loop_has_the_right_type() -> None:
    def body(x):  # t b
        return jax.lax.scan(lambda total, row: (total + row, None), zeros("b/dp", b=4), x)[0]

    close(run(body, MESH, ["t b/dp"], "b/dp")(jnp.ones((3, 4))), jnp.full(4, 3.0))


def test_the_value_may_be_traced_and_has_a_gradient() -> None:
    for mode in ("explicit", "reference"):
        fn = run(lambda v: full("n/tp", v, n=8), MESH, ["scalar"], "n/tp", mode)
        value, grad = jax.value_and_grad(lambda v, fn=fn: (fn(v) * jnp.arange(8.0)).sum())(jnp.asarray(2.0))
        assert (value, grad) == (56.0, 28.0)


@pytest.mark.parametrize("seed", seeds(3))
def test_iota_is_the_global_position(seed: int) -> None:
    sampler = Sampler(seed)
    mesh = sampler.mesh()
    layout = sampler.layout("s", mesh)
    sizes = sampler.sizes("s", mesh, [layout])
    blocks = simulator.iota(layout, mesh, sizes["s"])
    mapped = jax.shard_map(
        lambda _: iota(layout, **sizes),
        mesh=make_mesh(mesh),
        in_specs=P(),
        out_specs=P(simulator.read(layout).axes(0) or None),
    )
    found = simulator.blocks_of(jax.jit(mapped)(jnp.zeros(())), make_mesh(mesh))
    assert all(np.array_equal(found[device], blocks[device]) for device in blocks)
    assert made(lambda: iota(layout, **sizes), layout, "reference", mesh).tolist() == list(range(sizes["s"]))


@pytest.mark.parametrize("mode", MODES)
def test_iota_of_several_dimensions(mode: str) -> None:
    found = made(lambda: iota("b/dp [s/tp] 2", jnp.float32, b=4, s=8), "b/dp s/tp 2", mode)
    close(found, jnp.broadcast_to(jnp.arange(8.0)[None, :, None], (4, 8, 2)))
    close(made(lambda: iota("(c l)/tp", c=8, l=2), "(c l)/tp", mode), jnp.arange(16))


def test_iota_of_a_composite_whose_factors_are_all_divided() -> None:
    mapped = jax.shard_map(
        lambda _: iota("(b/dp s/tp)", b=4, s=8), mesh=make_mesh(MESH), in_specs=P(), out_specs=P(("dp", "tp"))
    )
    blocks = simulator.scatter(np.arange(32), "(b/dp s/tp)", MESH, {"b": 4, "s": 8})
    found = simulator.blocks_of(jax.jit(mapped)(jnp.zeros(())), make_mesh(MESH))
    assert all(np.array_equal(found[device], blocks[device]) for device in blocks)
