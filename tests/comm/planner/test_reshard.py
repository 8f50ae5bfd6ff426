"""What a plan says is what runs: compiled collectives and bytes, values to the bit, gradients back by the plan back."""

import functools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import spmd
from spmd.inspect import collectives
from tests import simulator as sim
from tests.comm.cases import assert_blocks, device_mesh, written
from tests.comm.test_resharding import CUBE, EVERY, placements
from tests.ops.harness import run as run_in
from tests.sampler import Sampler, seeds, share

ODD = [{"x": 2, "y": 4}, {"x": 3, "y": 2}, {"x": 4, "y": 2}, {"x": 5, "y": 1}, {"x": 1, "y": 2, "z": 3}]
DTYPES = ["bool", "int8", "uint16", "bfloat16", "float32", "complex64"]


def pairs_of(mesh, dims, count, seed=0):
    everything = placements(tuple(mesh), dims)
    pairs = [(a, b) for a in everything for b in everything if a != b]
    return pairs if EVERY else random.Random(seed).sample(pairs, min(count, len(pairs)))


def sharding(layout, mesh):
    return NamedSharding(device_mesh(mesh), spmd.Layout(layout if isinstance(layout, str) else written(layout)).spec)


def kernel_of(source, target, mesh, **how):
    """The relayout alone, in a kernel."""
    pattern = f"{written(source)} -> {written(target)}"
    return spmd.kernel(pattern, mesh=device_mesh(mesh))(lambda x: spmd.relayout(x, pattern, to="invarying", **how))


def plan_of(source, target, mesh, x, **how):
    sizes = dict(zip("abc", x.shape, strict=False))
    return spmd.plan(f"{written(source)} -> {written(target)}", sizes=sizes, mesh=mesh, dtype=x.dtype, **how)


def check(source, target, mesh, x, **how):
    """One relayout in a kernel: what is compiled against the plan, what comes out against the simulator."""
    kernel = kernel_of(source, target, mesh, **how)
    compiled = kernel.lower(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(source, mesh))).compile()
    found, plan = collectives(compiled, mesh=device_mesh(mesh)), plan_of(source, target, mesh, x, **how)
    wide = 2 if x.dtype == jnp.bfloat16 and found and "f32" in found[0].dtype else 1  # the CPU compiler widens it
    assert (found.total_bytes, len(found)) == (wide * plan.bytes, plan.collectives), f"{plan}\n{found}"
    out = kernel(jax.device_put(x, sharding(source, mesh)))
    assert_blocks(out, sim.scatter(x, written(target), mesh), device_mesh(mesh))


@pytest.mark.parametrize(("source", "target"), share(pairs_of(CUBE, 2, 8)))
def test_compiled_bytes_are_the_plans(source, target) -> None:
    check(source, target, CUBE, np.arange(16 * 24, dtype=np.float32).reshape(16, 24))


@pytest.mark.parametrize(("source", "target"), share(pairs_of(CUBE, 3, 4, seed=1)))
def test_compiled_bytes_are_the_plans_in_three_dimensions(source, target) -> None:
    check(source, target, CUBE, np.arange(8 * 16 * 24, dtype=np.int32).reshape(8, 16, 24))


@pytest.mark.parametrize("mesh", share(ODD), ids=str)
def test_compiled_bytes_are_the_plans_on_odd_meshes(mesh) -> None:
    n = math.prod(mesh.values())
    for source, target in pairs_of(mesh, 2, 2, seed=n):
        check(source, target, mesh, np.arange(6 * n * n, dtype=np.int32).reshape(2 * n, 3 * n))


@pytest.mark.parametrize(
    ("source", "target", "mesh"),
    share(
        [
            ((("x",), ("y",)), (("y",), ("x",)), {"x": 2, "y": 4}),  # unequal axes
            ((("x",), ()), (("y",), ()), {"x": 2, "y": 4}),  # cut shards change places
            (((), ("x", "y")), (("x",), ("y",)), CUBE),  # over an axis that nobody names
            ((("y", "x"), ()), ((), ("y",)), CUBE),  # an all_to_all with copies
            ((("x", "y"), ()), (("z",), ("x",)), CUBE),
        ]
    ),
)
def test_steps_that_only_plans_have(source, target, mesh) -> None:
    x = np.arange(24 * 16, dtype=np.float32).reshape(24, 16)
    check(source, target, mesh, x)
    weights = np.random.default_rng(0).integers(-3, 4, x.shape).astype(np.float32)
    kernel = kernel_of(source, target, mesh)
    found, again = jax.vjp(lambda x: jax.jvp(kernel, (x,), (x,))[1], x)
    np.testing.assert_array_equal(found, x)
    np.testing.assert_array_equal(again(jnp.asarray(weights))[0], weights)


@pytest.mark.parametrize(("source", "target"), share(pairs_of(CUBE, 2, 4, seed=3)))
def test_point_to_point_rounds(source, target) -> None:
    x = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    assert plan_of(source, target, CUBE, x, prefer="bytes").ratio == 1
    check(source, target, CUBE, x, prefer="bytes")


@pytest.mark.parametrize(
    ("source", "target", "mesh"),
    share(
        [
            ((("x", "y"), ()), (("y",), ()), {"x": 2, "y": 3}),
            ((("y",), ()), ((), ("y", "x")), {"x": 2, "y": 3}),
            ((("x",), ("y",)), (("y", "x"), ()), {"x": 3, "y": 2}),
            ((("x", "y"), ("z",)), (("y", "x"), ()), {"x": 2, "y": 2, "z": 2}),
        ]
    ),
)
def test_rounds_of_cells(source, target, mesh) -> None:
    """From halves to thirds: pieces of one size would not do."""
    x = np.arange(12 * 18, dtype=np.float32).reshape(12, 18) if 3 in mesh.values() else np.ones((8, 8), np.float32)
    plan = plan_of(source, target, mesh, x, prefer="bytes")
    assert plan.ratio == 1
    check(source, target, mesh, x, prefer="bytes")
    weights = np.random.default_rng(0).integers(-3, 4, x.shape).astype(np.float32)
    kernel = kernel_of(source, target, mesh, prefer="bytes")
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda v: (kernel(v) * weights).sum()))(x), weights)


def test_rounds_of_pieces_in_other_modes_and_under_vmap() -> None:
    source, target = (("x",), ("y", "z")), (("z", "y"), ())
    x = np.arange(3 * 16 * 24).reshape(3, 16, 24)
    pattern = f"{written(source)} -> {written(target)}"
    plan = plan_of(source, target, CUBE, x[0], prefer="bytes")
    assert [step.kind for step in plan.steps] == ["sends", "all_gather"] and plan.ratio == 1
    body = jax.vmap(lambda x: spmd.relayout(x, pattern, to="invarying", prefer="bytes"))
    kernel = spmd.kernel(f"n {written(source)} -> n {written(target)}", mesh=device_mesh(CUBE))(body)
    for run in (kernel, kernel.auto, kernel.reference):
        np.testing.assert_array_equal(run(x), x)
    loss = lambda run: lambda v: (run(v) * x.astype(np.float32)).sum()
    gradient = jax.jit(jax.grad(loss(kernel)))(x.astype(np.float32))
    np.testing.assert_array_equal(gradient, x)


# -------------------- backward


@pytest.mark.parametrize(("source", "target"), share(pairs_of(CUBE, 2, 6, seed=4)))
@pytest.mark.parametrize("prefer", ["collectives", "bytes"])
def test_the_gradient_is_the_planned_reverse(source, target, prefer) -> None:
    """The backward pass alone, compiled: the bytes of the plan back, and every weight where it was."""
    x = jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=sharding(source, CUBE))
    kernel = kernel_of(source, target, CUBE, prefer=prefer)

    @functools.partial(jax.jit, out_shardings=sharding(source, CUBE))
    def back(weights):
        return jax.linear_transpose(kernel, x)(weights)[0]

    weights = np.random.default_rng(1).integers(-3, 4, x.shape).astype(np.float32)
    placed = jax.device_put(weights, sharding(target, CUBE))
    found = collectives(back, placed, mesh=device_mesh(CUBE))
    plan = plan_of(target, source, CUBE, x, prefer=prefer)
    assert found.total_bytes == plan.bytes, f"{plan}\n{found}"
    np.testing.assert_array_equal(back(placed), weights)


@pytest.mark.parametrize("seed", seeds(4))
def test_copies_that_are_typed_varying(seed) -> None:
    """Gathered, divided otherwise and gathered again: the gradients of copies are parts of a sum, each counted once."""
    source, target = random.Random(seed).sample([p for p in placements("xyz") if any(p)], 2)
    a, b = written(source), written(target)

    def body(x, w):
        x = spmd.relayout(x, f"{a} -> {b}")
        x = spmd.relayout(x, f"{b} -> a b")
        x = spmd.relayout(x, "a b -> a/z/y/x b")
        return (spmd.relayout(x, "a/z/y/x b -> a b", to="invarying") * w).sum()

    x, w = (np.random.default_rng(i).integers(-3, 4, (16, 24)).astype(np.float32) for i in (seed, 50 + seed))
    kernel = spmd.kernel(f"{a}, a b -> scalar", mesh=device_mesh(CUBE))(body)
    assert kernel(x, w) == (x * w).sum()
    np.testing.assert_array_equal(jax.jit(jax.grad(kernel))(x, w), w)


TYPED = {
    "one device": ({"x": 1, "y": 2}, "a/x b -> a b", "p/x"),
    "a gather": ({"x": 2, "y": 2}, "a/x b -> a b", "p/x"),
    "an exchange": (CUBE, "a/y/x b -> a b/y", "p/x"),
    "two gathers": (CUBE, "a/x b/y -> a b", "p/x/y"),
    "rounds of sends": (CUBE, "a/x b/y/z -> a/z/y b", "p/x"),
}


@pytest.mark.parametrize("name", TYPED)
def test_a_copy_is_typed_varying_where_it_is_asked_for(name) -> None:
    mesh, pattern, copies = TYPED[name]
    before, after = pattern.split(" -> ")
    seen = []

    def body(x):
        there = spmd.relayout(x, pattern, to="varying", prefer="bytes")
        seen.append("x" in jax.typeof(there).manual_axis_type.varying)
        return there[None]

    run_in(body, mesh, [before], f"{copies} {after}")(np.ones((8, 8), np.float32))
    assert seen[-1]


# -------------------- what arrays there are


@pytest.mark.parametrize("dtype", share(DTYPES))
def test_every_dtype(dtype) -> None:
    seed = DTYPES.index(dtype)
    x = Sampler(seed).rng.integers(0, 2, (16, 24)).astype(jnp.dtype(dtype))
    for prefer in ("collectives", "bytes"):
        for source, target in pairs_of(CUBE, 2, 1, seed=20 + seed):
            check(source, target, CUBE, x, prefer=prefer)


@pytest.mark.parametrize(
    ("pattern", "opened", "mesh", "sizes"),
    share(
        [
            ("(h k)/tp d -> (h k) d/tp", "h/tp k d -> h k d/tp", {"tp": 4}, {"h": 8, "k": 3, "d": 16}),
            (
                "(b/dp s/cp) d -> (b s) d/cp/dp",
                "b/dp s/cp d -> b s d/cp/dp",
                {"dp": 2, "cp": 4},
                {"b": 6, "s": 8, "d": 16},
            ),
            (
                "(b/dp s/cp) d -> (b/cp s/dp) d",
                "b/dp s/cp d -> b/cp s/dp d",
                {"dp": 2, "cp": 3},
                {"b": 6, "s": 12, "d": 2},
            ),
            ("b (h/tp k) -> b/tp (h k)", "b h/tp k -> b/tp h k", {"tp": 4, "x": 2}, {"b": 8, "h": 4, "k": 3}),
        ]
    ),
)
def test_composite_dimensions(pattern, opened, mesh, sizes) -> None:
    """Two names in one dimension, as the kernel's boundary knows them apart."""
    (left, right), (before, after) = pattern.split(" -> "), opened.split(" -> ")

    def body(x):
        x = spmd.rearrange(x, f"{before} -> {left}")
        x = spmd.relayout(x, pattern, to="invarying")
        return spmd.rearrange(x, f"{right} -> {after}")

    kernel = spmd.kernel(opened, mesh=device_mesh(mesh))(body)
    x = np.arange(math.prod(sizes.values()), dtype=np.int32).reshape(tuple(sizes.values()))
    assert_blocks(kernel(x), sim.scatter(x, after, mesh), device_mesh(mesh))
    placed = jax.device_put(x, sharding(before, mesh))
    plan = spmd.plan(pattern, sizes=sizes, mesh=mesh, dtype=np.int32)
    assert collectives(kernel, placed).total_bytes == plan.bytes > 0


# -------------------- outside kernels


@pytest.mark.parametrize("mesh", share([CUBE, {"x": 3, "y": 2}]), ids=str)
def test_shard_moves_a_placed_array_by_the_plan(mesh) -> None:
    """What `shard` runs sends the plan's bytes: measured on the program that a `jax.jit` around nothing else has."""
    n = math.prod(mesh.values())
    x = np.arange(6 * n * n, dtype=np.float32).reshape(2 * n, 3 * n)
    for source, target in pairs_of(mesh, 2, 4, seed=5):
        placed = jax.device_put(x, sharding(source, mesh))
        out = spmd.shard(placed, written(target))
        assert out.sharding == sharding(target, mesh)
        assert_blocks(out, sim.scatter(x, written(target), mesh), device_mesh(mesh))
        w = jax.device_put(x % 7, sharding(target, mesh))
        gradient = jax.grad(
            lambda v, target=target, w=w: (spmd.shard(v, written(target), mesh=w.sharding.mesh) * w).sum()
        )
        np.testing.assert_array_equal(gradient(placed), x % 7)


def test_shard_compiles_once() -> None:
    placed = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), sharding("a/x b/y", CUBE))
    spmd.shard(placed, "a/y b/x")
    traced: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: traced.append(event))
    try:
        out = spmd.shard(placed, "a/y b/x")
        assert not [event for event in traced if "compile" in event]
        jax.jit(lambda x: x + 1)(placed)
        assert [event for event in traced if "compile" in event], "what is compiled is heard of"
    finally:
        jax.monitoring.clear_event_listeners()
    assert spmd.shard(out, "a/y b/x") is out or spmd.shard(out, "a/y b/x").sharding == out.sharding


def test_a_placed_array_of_another_mesh_is_put() -> None:
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    placed = jax.device_put(x, sharding("a/x b", {"x": 2, "y": 4}))
    out = spmd.shard(placed, "a b/x", mesh=device_mesh(CUBE))
    assert_blocks(out, sim.scatter(x, "a b/x", CUBE), device_mesh(CUBE))


def test_keys_and_scalars_are_put() -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), sharding("a/x", CUBE))
    moved = spmd.shard(keys, "a/y/x")
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))
    assert spmd.shard(jax.device_put(np.float32(3), sharding("scalar", CUBE)), "scalar") == 3


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto], ids=str)
def test_shard_on_meshes_of_either_type(kind) -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    placed = spmd.shard(x, "a/x b/y", mesh=mesh)
    np.testing.assert_array_equal(spmd.shard(placed, "a/y b/x"), x)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(spmd.shard(placed, "a b/y/x"), x)


@pytest.mark.parametrize("partial", share([("x",), ("x", "y")]), ids=",".join)
@pytest.mark.parametrize("prefer", ["collectives", "bytes"])
def test_partial_sums_send_what_the_plan_says(partial, prefer) -> None:
    """Summed and moved: forward the plan's bytes, and the gradient of a sum is the result's, for every part."""
    rest = tuple(axis for axis in CUBE if axis not in partial)
    x = np.random.default_rng(0).integers(-3, 4, (sim.count(CUBE, partial), 16, 24)).astype(np.float32)
    for seed in range(3):
        source = random.Random(seed).choice(placements(rest))
        target = random.Random(10 + seed).choice(placements("xyz"))
        before = f"{written(source)} {{U:{','.join(partial)}}}"
        front = f"p/{'/'.join(partial)} {written(source)}"

        def body(x, front=front, before=before, target=target):
            x = spmd.reduce(x, f"{front} -> {before}", "sum")
            return spmd.relayout(x, f"{before} -> {written(target)}", to="invarying", prefer=prefer)

        kernel = spmd.kernel(f"{front} -> {written(target)}", mesh=device_mesh(CUBE))(body)
        assert_blocks(kernel(x), sim.scatter(x.sum(0), written(target), CUBE), device_mesh(CUBE))
        placed = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(front, CUBE))
        sizes = {"a": 16, "b": 24}
        plan = spmd.plan(f"{before} -> {written(target)}", sizes=sizes, mesh=CUBE, prefer=prefer)
        assert collectives(kernel, placed).total_bytes == plan.bytes, f"{plan}"
        w = np.random.default_rng(seed).integers(-3, 4, x.shape[1:]).astype(np.float32)
        gradient = jax.jit(jax.grad(lambda x, kernel=kernel, w=w: (kernel(x) * w).sum()))(x)
        np.testing.assert_array_equal(gradient, np.broadcast_to(w, x.shape))


@pytest.mark.parametrize("to", ["varying", "invarying"])
def test_an_exchange_of_unequal_axes_under_vmap(to) -> None:
    pattern, mesh = "x/a y/b -> x/b y/a", {"a": 4, "b": 2}
    run = spmd.kernel(f"n {pattern.replace('->', '-> n')}", mesh=device_mesh(mesh))(
        jax.vmap(lambda x: spmd.relayout(x, pattern, to=to))
    )
    x, by = Sampler(0).array((3, 4, 4)), Sampler(1).array((3, 4, 4))
    value, pull = jax.vjp(run, x)
    np.testing.assert_array_equal(value, x)
    np.testing.assert_array_equal(pull(jnp.asarray(by))[0], by)


@pytest.mark.parametrize(
    ("mesh", "pattern", "shape"),
    share(
        [
            ({"a": 4, "b": 2}, "x/b y/a -> x y/b", (4, 12)),  # a gather of unequal axes
            ({"a": 4, "r": 1}, "x y/r/a -> x/a/r y", (4, 12)),  # axes of size 1 that leave, come and turn
            ({"a": 4, "r": 1}, "x y/a {U:r} -> x/r y", (4, 12)),
            ({"a": 2, "b": 2, "r": 1}, "x/r y/a/b -> x y/b", (4, 12)),
        ]
    ),
)
def test_what_a_plan_leaves_whole_is_invarying_and_its_gradient_counts_once(mesh, pattern: str, shape) -> None:
    source, target = pattern.split(" -> ")
    start = source.replace(" {U:r}", "")

    def gathered(x, to):
        x = spmd.reduce(x[None], f"p/r {start} -> {source}", "sum") if source != start else x
        whole = spmd.relayout(spmd.relayout(x, pattern, to=to), f"{target} -> x y", to="invarying")
        return spmd.reduce(whole * whole, "x y -> scalar", "sum")

    for to in ("varying", "invarying"):
        run = spmd.kernel(f"{start} -> scalar", mesh=device_mesh(mesh))(functools.partial(gathered, to=to))
        x = Sampler(0).array(shape)
        gradient, curve = jax.jit(lambda x, run=run: (jax.grad(run)(x), jax.hessian(run)(x).sum((0, 1))))(x)
        np.testing.assert_array_equal(gradient, 2 * x)
        np.testing.assert_array_equal(curve, np.full(shape, 2.0))
