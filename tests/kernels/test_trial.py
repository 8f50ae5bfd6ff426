"""What numbers say of a kernel at its first call, where types suspect something."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd

BIG = jax.ShapeDtypeStruct((4096, 8192), "float32")


KERNEL = spmd.kernel("b/dp d/tp -> b/dp")


def norms(x: Any) -> Any:
    return jnp.sqrt(lax.psum((x * x).sum(1), "tp"))


def wrong(x: Any) -> Any:
    return lax.psum(jnp.sqrt((x * x).sum(1)), "tp")


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 4}, {"dp": 128, "tp": 8}])
def test_large_arrays_and_meshes_are_made_small(sizes: dict[str, int]) -> None:
    """Names get small sizes, and axes of many devices fewer: numbers are there at once."""
    mesh = spmd.make_mesh(**sizes, abstract=True)
    assert spmd.check(KERNEL(norms).on(mesh), BIG).verdict.kind in ("proved", "tested")
    assert spmd.check(KERNEL(wrong).on(mesh), BIG)


def test_sizes_that_a_body_needs_are_kept() -> None:
    def body(x):
        return norms(x.reshape(x.shape[0], -1, 3).sum(2))  # columns by threes

    mesh, x = spmd.make_mesh(dp=2, tp=4), jax.ShapeDtypeStruct((8, 24), "float32")
    assert not spmd.check(KERNEL(body).on(mesh), x)
    fixed = lambda x: norms(x) if x.shape == (4, 6) else 1 / 0
    assert "it fails on mesh dp=1, tp=1 at tests/kernels/test_trial.py:" in str(spmd.check(KERNEL(fixed).on(mesh), x))


def test_a_sum_of_copies_and_then_a_mean_is_accepted() -> None:
    """The types suspect it, and the numbers do not."""
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    kernel = spmd.kernel("b/dp d/tp -> b/dp", mesh=spmd.make_mesh(dp=2, tp=4))
    mean = kernel(lambda x: lax.psum(norms(x), "tp") / lax.axis_size("tp"))
    np.testing.assert_allclose(mean(x), kernel(norms)(x), rtol=1e-6)
    with pytest.raises(spmd.errors.ReplicationError):
        kernel(wrong)(x)


def test_a_mean_by_hand_is_accepted() -> None:
    """`lax.pmean` is no more than this."""
    x = jnp.arange(6.0)
    kernel = spmd.kernel("d -> d", mesh=spmd.make_mesh(dp=4))
    np.testing.assert_allclose(kernel(lambda x: lax.psum(x, "dp") / lax.axis_size("dp"))(x), x)
    with pytest.raises(spmd.errors.ReplicationError, match="4 times as large"):
        kernel(lambda x: lax.psum(x, "dp"))(x)


def silent_by_types() -> list[tuple[str, Any, Any]]:
    """Wrong kernels of which types suspect nothing: a string, the body, arguments."""
    x, ids = jnp.arange(32.0).reshape(8, 4), jnp.array([0, 1, 2, 3, 4, 5, 6, 7])
    return [
        ("b/dp d -> b/dp d", lambda x: x / x.shape[0], (x,)),
        ("b/dp d -> scalar", lambda x: lax.psum(x.sum(), "dp") / x.shape[0], (x,)),
        ("b/dp d -> scalar", lambda x: jnp.float32(x.shape[0]) + 0 * lax.psum(x.sum(), "dp"), (x,)),
        ("b/dp d -> scalar", lambda x: lax.pmean(x.sum(), "dp"), (x,)),
        ("b/dp d -> b/dp d", lambda x: lax.map(lambda row: row / x.shape[0], x), (x,)),
        (
            "b/dp d, b/dp -> n d",
            lambda x, at: lax.psum(jax.ops.segment_sum(x, at % 2, num_segments=2), "dp") / at.shape[0],
            (x, ids),
        ),
    ]


@pytest.mark.parametrize("how", ["outside", "jit", "eval_shape"])
@pytest.mark.parametrize("case", range(6))
def test_numbers_are_asked_where_they_cost_little(monkeypatch: pytest.MonkeyPatch, case: int, how: str) -> None:
    """The first call asks for one draw, also under `jit`, where arguments are drawn."""
    pattern, body, args = silent_by_types()[case]
    make = lambda: spmd.kernel(pattern, mesh=spmd.make_mesh(dp=2))(body)
    run = {"outside": lambda f: f(*args), "jit": lambda f: jax.jit(f)(*args), "eval_shape": lambda f: f.trace(*args)}[
        how
    ]
    monkeypatch.setenv("SPMD_CHECK", "quick")
    with pytest.raises(spmd.errors.ReplicationError, match="something else on several devices"):
        run(make())
    monkeypatch.setenv("SPMD_CHECK", "types")
    run(make())


def test_a_kernel_is_asked_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.ones((4, 8))
    make = spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=2))
    wrong, suspected = lambda x: x / x.shape[0], lambda x: x * lax.psum(jnp.sqrt((x * x).sum(0, keepdims=True)), "dp")
    long = lambda x: functools.reduce(lambda y, _: jnp.sin(y), range(300), x) / x.shape[0]

    def found(body: Any, asked: str) -> bool:
        monkeypatch.setenv("SPMD_CHECK", asked)
        try:
            make(lambda x: body(x))(x)
        except spmd.errors.ReplicationError:
            return True
        return False

    assert [found(wrong, one) for one in ("off", "types", "quick", "full")] == [False, False, True, True]
    assert [found(suspected, one) for one in ("off", "types", "quick", "full")] == [False, True, True, True]
    assert [found(long, one) for one in ("quick", "full")] == [False, True], "numbers of many equations cost much"
    monkeypatch.delenv("SPMD_CHECK")
    with pytest.raises(spmd.errors.ReplicationError, match="spmd.size"):
        make(wrong)(x)
    make(lambda x: x / spmd.size("b"))(x)
    monkeypatch.setenv("SPMD_CHECK", "fast")
    with pytest.raises(spmd.errors.SpmdError, match="one of off, types, quick, full"):
        make(wrong)(x)


@pytest.mark.parametrize("asked", ["quick", "full"])
def test_arguments_may_be_numbers_of_python(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in a tree, and under `jit`; integers, booleans and complex ones too."""
    monkeypatch.setenv("SPMD_CHECK", asked)
    x, mesh = jnp.ones((4, 8)), spmd.make_mesh(dp=2)
    made = spmd.kernel(in_layouts=("b/dp d", ""), out_layouts="b/dp d", mesh=mesh)
    for number in (0.5, 3, True, 2j):
        kernel = made(lambda x, rate: x + jnp.real(jnp.asarray(rate)).astype(x.dtype))
        for run in (kernel, jax.jit(kernel), kernel.trace):
            run(x, number)
    tree = spmd.kernel(in_layouts=("b/dp d", {"rate": ""}), out_layouts="b/dp d", mesh=mesh)
    np.testing.assert_allclose(tree(lambda x, how: x * how["rate"])(x, {"rate": 0.5}), x / 2)
    with pytest.raises(spmd.errors.ReplicationError):
        made(lambda x, rate: x * rate / x.shape[0])(x, 0.5)


def test_a_print_in_a_body_prints_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces at other sizes are nobody's business."""
    monkeypatch.setenv("SPMD_CHECK", "quick")

    def body(x: Any) -> Any:
        print("traced with", x.shape)
        return 2 * x

    spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=2))(body)(jnp.ones((4, 8)))
    assert capsys.readouterr().out == "traced with (2, 8)\n"


def test_a_comparison_of_meshes_asks_numbers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the kernel's own first trace does not, and the message has all meshes."""
    monkeypatch.setenv("SPMD_CHECK", "quick")
    wrong = spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=2))(lambda x: x / x.shape[0])
    with pytest.raises(spmd.testing.Mismatch, match="is not the same on every mesh"):
        spmd.testing.assert_same_on_any_mesh(wrong, jax.ShapeDtypeStruct((4, 8), "float32"))


def test_a_second_call_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a warm call nor another trace of the same shapes."""
    monkeypatch.setenv("SPMD_CHECK", "quick")
    traces = []
    kernel = spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=2))(lambda x: [traces.append(1), x][1])
    kernel(jnp.ones((4, 8)))
    first = len(traces)
    kernel(jnp.zeros((4, 8)))
    jax.jit(kernel)(jnp.zeros((4, 8)))
    jax.make_jaxpr(lambda x: kernel(kernel(x)))(jnp.zeros((4, 8)))
    assert (first, len(traces)) == (3, 5), "a body is traced again for each jit around it, and for nothing else"


def test_numpys_integers_are_those_of_jax() -> None:
    """int64 is int32 in JAX, and so are the numbers of all modes."""
    mesh = spmd.make_mesh(x=2, y=3)
    kernel = spmd.kernel("n/x/y -> n/x/y", mesh=mesh)(lambda x: spmd.shift(x, "[n/x/y]", 1))
    assert not spmd.check(kernel, np.arange(6))
    assert not spmd.check(kernel, np.arange(6, dtype=np.uint8))


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmax, lax.pmin])
def test_a_collective_over_a_mapped_dimension(reduce: Any) -> None:
    """Where `spmd.local` has no devices, its collectives reduce a dimension of a `vmap`; of some arguments both."""

    def both(x: Any, w: Any) -> Any:
        return reduce(x @ w, "tp"), reduce(lax.stop_gradient(w), "tp"), reduce(lax.stop_gradient(w), ("tp",))

    @spmd.kernel("b/dp d/tp, d/tp f -> b/dp f", mesh=spmd.make_mesh(dp=2, tp=3))
    def body(x: Any, w: Any) -> Any:
        y, *more = spmd.local(both, "b/dp d/tp, d/tp f -> b/dp f, 2 f, 2 f")(x, w)
        return y + sum(one.sum(0) for one in more)[None]

    findings = spmd.check(body, jnp.ones((4, 6)), jnp.ones((6, 5)))
    assert not findings and findings.verdict.kind == "tested"


def test_numbers_are_asked_inside_a_transposition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_CHECK", "full")
    x = jnp.ones((4, 8))
    kernel = spmd.kernel("b/dp d -> d/dp b", mesh=spmd.make_mesh(dp=2))(
        lambda x: spmd.all_to_all(x.T, "d b/dp -> d/dp b")
    )
    back = jax.jit(lambda y: jax.linear_transpose(kernel, x)(y)[0])
    np.testing.assert_allclose(back(jnp.ones((8, 4))), x)
