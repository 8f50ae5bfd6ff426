"""What each verb sends: kind, number, axes and bytes, from the compiled program, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import Layout
from spmd.inspect import collectives
from tests import simulator as sim
from tests.comm.cases import device_mesh

MESH = {"dp": 2, "tp": 4}
WHOLE = 8 * 16 * 4  # bytes of the array `a b`, f32[8,16]
SHARD = WHOLE // 4


def placed(layout: str, mesh):
    return jax.NamedSharding(mesh, Layout(layout).spec)


def found(report) -> dict[str, int]:
    """`{"all_gather tp": bytes}`, or `(bytes, count)` where there are several."""
    sums: dict[str, tuple[int, int]] = {}
    for item in report:
        key = f"{item.kind} {'/'.join(item.axes)}"
        bytes_, count = sums.get(key, (0, 0))
        sums[key] = (bytes_ + item.total_bytes, count + item.count)
        assert item.whole and item.exact
    return {key: bytes_ if count == 1 else (bytes_, count) for key, (bytes_, count) in sums.items()}


def sent(pattern: str, body, *shapes, mesh=MESH, mode="explicit") -> tuple[dict, dict]:
    """Forward, and the pull-back alone with a cotangent in the output's layout."""
    concrete = device_mesh(mesh)
    kernel = getattr(spmd.kernel(pattern, mesh=concrete)(body), mode)
    ins, [out] = sim.split_pattern(pattern)
    lie = tuple(placed(layout, concrete) for layout in ins)
    args = tuple(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s) for shape, s in zip(shapes, lie, strict=True))
    forward = jax.jit(kernel, in_shardings=lie, out_shardings=placed(out, concrete))
    result = jax.eval_shape(kernel, *args)

    def pull(cotangent, *args):
        return jax.vjp(kernel, *args)[1](cotangent)

    backward = jax.jit(pull, in_shardings=(placed(out, concrete), *lie), out_shardings=lie)
    ct = jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=placed(out, concrete))
    return found(collectives(forward, *args, mesh=concrete)), found(collectives(backward, ct, *args, mesh=concrete))


def verb(name, pattern, **keywords):
    return lambda x: getattr(spmd, name)(x, pattern, **keywords)


def test_all_gather_invarying() -> None:
    body = verb("all_gather", "a/tp b -> a b", to="invarying")
    assert sent("a/tp b -> a b", body, (8, 16)) == ({"all_gather tp": WHOLE * 3 // 4}, {})


def test_all_gather_varying() -> None:
    """A gathered copy that meets divided data; the gradient to the data costs the forward's gather again."""

    def body(x, w):
        w = jax.lax.stop_gradient(w)
        return spmd.einsum(spmd.all_gather(x, "a/tp b -> a b"), w, "a b, w/tp -> w/tp a b")

    forward, backward = sent("a/tp b, w/tp -> w/tp a b", body, (8, 16), (4,))
    assert forward == {"all_gather tp": WHOLE * 3 // 4}
    assert backward == {"psum_scatter tp": WHOLE * 3 // 4}


@pytest.mark.parametrize(
    ("pattern", "forward"),
    [
        ("a/dp/tp b -> a b", {"all_gather dp/tp": WHOLE * 7 // 8}),
        ("a/tp/dp b -> a b", {"all_gather dp/tp": WHOLE * 7 // 8}),
        ("a/dp/tp b -> a/dp b", {"all_gather tp": WHOLE // 2 * 3 // 4}),
        ("a/dp b/tp -> a b", {"all_gather dp": WHOLE // 4 // 2, "all_gather tp": WHOLE * 3 // 4}),
    ],
)
def test_gathers_of_several_axes(pattern, forward) -> None:
    """One collective per dimension, also over two axes in an order that is not the mesh's."""
    assert sent(pattern, verb("all_gather", pattern, to="invarying"), (8, 16)) == (forward, {})


def summed(mark: str, then):
    """Partial sums out of a divided dimension `p` in front, then the verb."""
    return lambda x: then(spmd.reduce(x, f"p/{mark.replace(',', '/')} a b -> a b {{U:{mark}}}", "sum"))


def test_psum() -> None:
    body = summed("tp", verb("psum", "a b {U:tp} -> a b"))
    assert sent("p/tp a b -> a b", body, (4, 8, 16)) == ({"psum tp": 2 * WHOLE * 3 // 4}, {})
    body = summed("dp,tp", verb("psum", "a b {U:dp,tp} -> a b"))
    assert sent("p/dp/tp a b -> a b", body, (8, 8, 16)) == ({"psum dp/tp": 2 * WHOLE * 7 // 8}, {})


def test_psum_scatter() -> None:
    body = summed("tp", verb("psum_scatter", "a b {U:tp} -> a b/tp"))
    assert sent("p/tp a b -> a b/tp", body, (4, 8, 16)) == (
        {"psum_scatter tp": WHOLE * 3 // 4},
        {"all_gather tp": WHOLE * 3 // 4},
    )


def test_all_to_all() -> None:
    body = verb("all_to_all", "a/tp b -> a b/tp")
    once = {"all_to_all tp": SHARD * 3 // 4}
    assert sent("a/tp b -> a b/tp", body, (8, 16)) == (once, once)


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_shift(mode) -> None:
    """One permute each way, in auto mode too, where the compiler finds it in a roll."""
    once = {"ppermute tp": SHARD}
    assert sent("a/tp b -> a/tp b", verb("shift", "[a/tp] b", by=1), (8, 16), mode=mode) == (once, once)
    open_ended = verb("shift", "[a/tp] b", by=-1, wrap=False)
    assert sent("a/tp b -> a/tp b", open_ended, (8, 16), mode=mode) == (once, once)


def test_ppermute() -> None:
    once = {"ppermute tp": SHARD}
    body = verb("ppermute", "[a/tp] b", perm=[(0, 1), (1, 0), (3, 2)])
    assert sent("a/tp b -> a/tp b", body, (8, 16)) == (once, once)
    both = {"ppermute dp/tp": WHOLE // 8}
    body = verb("shift", "[a/tp/dp] b")
    assert sent("a/tp/dp b -> a/tp/dp b", body, (8, 16)) == (both, both)


def test_split() -> None:
    """A slice forward, one all-gather backward; the naive slice has an all-reduce of the whole."""
    body = verb("split", "a b -> a/tp b")
    assert sent("a b -> a/tp b", body, (8, 16)) == ({}, {"all_gather tp": WHOLE * 3 // 4})

    def naive(x):
        return jax.lax.dynamic_slice_in_dim(x, 2 * jax.lax.axis_index("tp"), 2)

    assert sent("a b -> a/tp b", naive, (8, 16)) == ({}, {"psum tp": 2 * WHOLE * 3 // 4})


def test_a_split_copy_sends_nothing_more() -> None:
    """What was gathered `to="varying"` and is split: backward the gather's own reduce-scatter and no gather."""

    def body(x):
        return spmd.split(spmd.all_gather(x, "a/tp b -> a b"), "a b -> a b/tp")

    forward, backward = sent("a/tp b -> a b/tp", body, (8, 16))
    assert set(forward) <= {"all_gather tp", "all_to_all tp"} and len(forward) == 1
    assert set(backward) <= {"psum_scatter tp", "all_to_all tp"} and len(backward) == 1


def test_defer() -> None:
    """Nothing inside the loop: the one all-reduce is that of a replicated argument, at the end."""

    def body(w, x):
        w = spmd.defer(w, "b -> b {R:dp}")
        return jax.lax.scan(lambda carry, rows: (carry, rows * w[None]), jnp.float32(0), x)[1]

    def with_fixed_data(w, x):
        return body(w, jax.lax.stop_gradient(x))

    forward, backward = sent("b, n a/dp b -> n a/dp b", with_fixed_data, (16,), (3, 8, 16))
    assert forward == {}
    assert backward == {"psum dp": 2 * 16 * 4 // 2}


NOTHING = {
    "all_gather": ("a/tp b -> a b", {"to": "invarying"}),
    "split": ("a b -> a/tp b", {}),
    "all_to_all": ("a/tp b -> a b/tp", {}),
    "relayout": ("a/dp/tp b -> a/tp/dp b", {}),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_on_axes_of_size_one(name) -> None:
    pattern, keywords = NOTHING[name]
    assert sent(pattern, verb(name, pattern, **keywords), (8, 16), mesh={"dp": 1, "tp": 1, "z": 4}) == ({}, {})


def test_no_sums_and_permutes_on_axes_of_size_one() -> None:
    unit = {"dp": 8, "tp": 1}
    body = summed("tp", verb("psum", "a b {U:tp} -> a b"))
    assert sent("p/tp a b -> a b", body, (1, 8, 16), mesh=unit) == ({}, {})
    body = summed("tp", verb("psum_scatter", "a b {U:tp} -> a b/tp"))
    assert sent("p/tp a b -> a b/tp", body, (1, 8, 16), mesh=unit) == ({}, {})
    assert sent("a/tp b -> a/tp b", verb("shift", "[a/tp] b"), (8, 16), mesh=unit) == ({}, {})


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_on_no_axis(name) -> None:
    pattern, keywords = NOTHING[name]
    body = verb(name, pattern, **keywords, tp=None, **({"dp": None} if name == "relayout" else {}))
    assert sent("a b -> a b", body, (8, 16)) == ({}, {})


@pytest.mark.parametrize("rule", ["tp", None])
def test_a_mapping_decides(rule) -> None:
    """The same line is a collective under one mapping and nothing under another, equal values either way."""
    mesh, mapping = device_mesh(MESH), spmd.AxisMapping({"a": rule, "b": None})
    x = np.arange(128, dtype=np.float32).reshape(8, 16)
    at_rest = jax.device_put(x, jax.NamedSharding(mesh, Layout("a b").resolve(mapping).spec))
    gather = spmd.kernel("a b -> a/1 b", mesh=mesh, mapping=mapping)(verb("all_gather", "a b -> a/1 b", to="invarying"))
    cut = spmd.kernel("a/1 b -> a b", mesh=mesh, mapping=mapping)(verb("split", "a/1 b -> a b"))
    assert found(collectives(gather, at_rest)) == ({"all_gather tp": WHOLE * 3 // 4} if rule else {})
    assert found(collectives(cut, x)) == {}
    for kernel in (gather, cut):
        for run in (kernel, kernel.auto, kernel.reference):
            assert (np.asarray(run(x)) == x).all()


def test_a_count_can_be_wrong() -> None:
    body = verb("all_gather", "a/tp b -> a b", to="invarying")
    twice = lambda x: body(x) + body(x * 2)
    assert sent("a/tp b -> a b", twice, (8, 16))[0] != sent("a/tp b -> a b", body, (8, 16))[0]
