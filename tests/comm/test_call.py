"""The ways to write one call: pytrees, composites, `...`, keywords, mappings, the user's own shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd import AxisMapping, all_gather, all_to_all, psum_scatter, rearrange, relayout, split
from tests import simulator as sim
from tests.comm.cases import assert_blocks, device_mesh

MESH = {"dp": 2, "tp": 4}


def numbers(*shape, dtype=np.float32):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def in_all_modes(kernel, *args):
    """The values in each mode; asserted equal, and given once."""
    first = jax.tree.map(np.asarray, kernel(*args))
    for run in (kernel.auto, kernel.reference):
        jax.tree.map(np.testing.assert_array_equal, first, jax.tree.map(np.asarray, run(*args)))
    return first


def test_pytrees() -> None:
    """One string for all leaves, whose sizes are each their own; None is not a leaf."""
    mesh = device_mesh(MESH)
    tree = {"u": numbers(8, 4), "v": [numbers(16, 2), None], "w": (numbers(4, 4, dtype=np.int32),)}

    def body(tree):
        return all_gather(tree, "rows/tp columns -> rows columns", to="invarying")

    kernel = spmd.kernel(in_layouts=("_/tp _",), out_layouts="_ _", mesh=mesh)(body)
    out = in_all_modes(kernel, tree)
    assert out["v"][1] is None and out["w"][0].dtype == np.int32
    jax.tree.map(np.testing.assert_array_equal, out, tree)
    gradient = jax.grad(lambda u: kernel({**tree, "u": u})["u"].sum())(tree["u"])
    assert (np.asarray(gradient) == 1).all()


@pytest.mark.parametrize("verb", ["psum", "shift", "ppermute", "defer", "relayout", "split"])
def test_every_verb_takes_a_tree(verb) -> None:
    mesh = device_mesh({"x": 4})
    tree = (numbers(4, 4), {"z": numbers(8, 4)})
    calls = {
        "psum": ("n m/x -> n m", lambda t: spmd.psum(jax.tree.map(lambda v: v.repeat(4, 1), t), "_ _ {U:x} -> _ _")),
        "shift": ("n/x m -> n/x m", lambda t: spmd.shift(t, "[r/x] _")),
        "ppermute": ("n/x m -> n/x m", lambda t: spmd.ppermute(t, "[r/x] _", [(0, 1)])),
        "defer": (
            "n m -> n m/x",
            lambda t: jax.tree.map(
                lambda v: v[:, :1] * (1.0 + spmd.zeros("1 m/x", m=4)), spmd.defer(t, "_ _ -> _ _ {R:x}")
            ),
        ),
        "relayout": ("n/x m -> n m/x", lambda t: relayout(t, "r/x c -> r c/x")),
        "split": ("n m -> n m/x", lambda t: split(t, "r c -> r c/x")),
    }
    pattern, body = calls[verb]
    left, right = pattern.split(" -> ")
    left, right = left.replace("n", "_").replace("m", "_"), right.replace("n", "_").replace("m", "_")
    kernel = spmd.kernel(in_layouts=(left,), out_layouts=right, mesh=mesh)(body)
    out = kernel(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert [x.shape for x in jax.tree.leaves(out)] == [(4, 4), (8, 4)] or verb == "psum"


def test_both_factors_divided() -> None:
    """`(b/dp s/tp)`: legal inside, where a device's block is not an interval of the whole dimension."""
    mesh = device_mesh(MESH)

    @spmd.kernel("b/dp s/tp d -> b/dp s d", mesh=mesh)
    def whole_rows(x):
        x = rearrange(x, "b/dp s/tp d -> (b/dp s/tp) d")
        x = all_gather(x, "(b/dp s/tp) d -> (b/dp s) d", to="invarying")
        return rearrange(x, "(b/dp s) d -> b/dp s d")

    x = numbers(4, 8, 3)
    assert (in_all_modes(whole_rows, x) == x).all()
    assert_blocks(whole_rows(x), sim.scatter(x, "b/dp s d", MESH), mesh)

    @spmd.kernel("b/dp s/tp d -> b/dp s d/tp", mesh=mesh)
    def exchanged(x):
        x = rearrange(x, "b/dp s/tp d -> (b/dp s/tp) d")
        x = all_to_all(x, "(b/dp s/tp) d -> (b/dp s) d/tp")
        return rearrange(x, "(b/dp s) d/tp -> b/dp s d/tp")

    y = numbers(4, 8, 4)
    assert (in_all_modes(exchanged, y) == y).all()


def test_composites_at_the_boundary() -> None:
    mesh = device_mesh(MESH)
    x = numbers(3, 24)
    kernel = spmd.kernel("b (h k)/tp -> b (h k)", mesh=mesh, h=8)(
        lambda x: all_gather(x, "b (h k)/tp -> b (h k)", to="invarying")
    )
    assert (in_all_modes(kernel, x) == x).all()
    inner = spmd.kernel("b (h k)/tp -> b (h k)/dp", mesh=mesh)(
        lambda x: relayout(x, "b (h/tp k) -> b (h/dp k)", h=8, to="invarying")
    )
    assert_blocks(inner(x), sim.scatter(x, "b n/dp", MESH), mesh)
    assert (in_all_modes(inner, x) == x).all()


@pytest.mark.parametrize(
    "axis", ["tp", "dp", ("dp", "tp"), ("tp", "dp"), None], ids=["tp", "dp", "dp-tp", "tp-dp", "none"]
)
def test_an_axis_by_keyword(axis) -> None:
    """One library function, whatever axis it is told."""
    mesh = device_mesh(MESH)
    text = "" if axis is None else "/" + axis if isinstance(axis, str) else "/" + "/".join(axis)

    def body(x):
        x = split(x, "a ... -> a/here ...", here=axis)
        return all_gather(2 * x, "a/here ... -> a ...", here=axis, to="invarying")

    x = numbers(8, 2, 3)
    assert (in_all_modes(spmd.kernel("a b c -> a b c", mesh=mesh)(body), x) == 2 * x).all()
    cut = spmd.kernel(f"a b c -> a{text} b c", mesh=mesh)(lambda x: split(x, "a ... -> a/here ...", here=axis))
    assert_blocks(cut(x), sim.scatter(x, f"a{text} b c", MESH), mesh)


def test_axes_of_a_whole_kernel_by_keyword() -> None:
    body = lambda x: all_gather(x, "a/model b -> a b", to="invarying")
    x = numbers(8, 2)
    for axis in ("tp", ("tp", "dp"), None):
        kernel = spmd.kernel("a/model b -> a b", mesh=device_mesh(MESH), axes={"model": axis})(body)
        assert (in_all_modes(kernel, x) == x).all()


def test_one_body_under_many_mappings() -> None:
    mesh = device_mesh(MESH)

    def body(x):
        x = all_gather(x, "rows columns -> rows/1 columns", to="invarying")
        return split(x, "rows/1 columns -> rows columns")

    x = numbers(8, 16)
    for rows in ("dp", "tp", ("dp", "tp"), ("tp", "dp"), None):
        mapping = AxisMapping({"rows": rows, "columns": None})
        kernel = spmd.kernel("rows columns -> rows columns", mesh=mesh, mapping=mapping)(body)
        assert (in_all_modes(kernel, x) == x).all()
        text = str(spmd.Layout("rows columns").resolve(mapping))
        assert_blocks(kernel(x), sim.scatter(x, text, MESH), mesh)


def test_scattering_over_two_axes_in_another_order() -> None:
    mesh = device_mesh(MESH)

    def body(x):
        x = spmd.reduce(x, "p/dp/tp n -> n {U:dp,tp}", "sum")
        return psum_scatter(x, "n {U:dp,tp} -> n/tp/dp")

    x = numbers(8, 16)
    kernel = spmd.kernel("p/dp/tp n -> n/tp/dp", mesh=mesh)(body)
    assert_blocks(kernel(x), sim.scatter(x.sum(0), "n/tp/dp", MESH), mesh)
    assert (in_all_modes(kernel, x) == x.sum(0)).all()


@pytest.mark.parametrize("mesh", [{"x": 1, "y": 8}, {"x": 1, "y": 1}, {"y": 2, "x": 1, "z": 3}], ids=str)
def test_axes_of_size_one(mesh) -> None:
    """What is written for a big mesh runs on a small one."""

    def body(x):
        x = all_gather(x, "a/x b/y -> a b/y", to="invarying")
        x = split(x, "a b/y -> a/x b/y")
        x = all_to_all(x, "a/x b/y -> a b/y/x")
        x = relayout(x, "a b/y/x -> a/x b/y")
        x = spmd.shift(x, "[a/x] b/y", 1)
        return spmd.reduce(x, "a/x b/y -> b/y", "sum")

    x = numbers(4, 24)
    kernel = spmd.kernel("a/x b/y -> b/y", mesh=device_mesh(mesh))(body)
    assert (in_all_modes(kernel, x) == x.sum(0)).all()
    assert (np.asarray(jax.grad(lambda x: kernel(x).sum())(x)) == 1).all()


def test_in_a_shard_map_of_the_users_own() -> None:
    mesh = device_mesh(MESH)

    def body(x):
        return all_gather(x, "a/tp b -> a b", to="invarying")

    x = jnp.asarray(numbers(8, 2))
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P()))
    assert (np.asarray(mapped(x)) == numbers(8, 2)).all()


def test_a_result_of_another_shape_is_not_reshaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many elements are not enough: here the collective splits the dimension that it should join."""
    true = jax.lax.all_to_all
    swapped = lambda x, axes, split, concat, **how: true(x, axes, concat, split, **how)
    monkeypatch.setattr(jax.lax, "all_to_all", swapped)
    kernel = spmd.kernel("a/tp b -> a b/tp", mesh=device_mesh(MESH))(lambda x: all_to_all(x, "a/tp b -> a b/tp"))
    with pytest.raises(
        spmd.errors.SizeError, match=r"each device has \(1, 32\) of the result, and its layout says \(16, 2\)"
    ):
        kernel(numbers(16, 8))
