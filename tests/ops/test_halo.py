"""Halos against `np.pad`, block by block; their adjoints, what they send, and halos of halos."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import stencil
from spmd.modes import MODES
from tests.ops.halos import EDGES, inner_body, numbers, padded, sample, texts
from tests.ops.harness import close, make_mesh, pulled
from tests.ops.harness import run as run_in
from tests.sampler import dice, seeds, share


@pytest.mark.parametrize("seed", seeds())
def test_each_block_holds_its_window_of_the_padded_array(seed: int) -> None:
    mesh, places, shape, margins, edges, edge, dtype = sample(seed)
    plain, wide = texts(places, margins)
    x = numbers(seed, shape, dtype)
    whole = padded(np.asarray(x), margins, edges)

    def body(x):  # every block leaves whole, in dimensions of its own
        return spmd.stencil.halo(x, f"{plain} -> {wide}", edge=edge)[None, :, None, :]

    run = jax.jit(
        jax.shard_map(
            body,
            mesh=make_mesh(mesh),
            in_specs=spmd.Layout(plain).spec,
            out_specs=jax.sharding.PartitionSpec(places[0] or None, None, places[1] or None, None),
        )
    )
    blocks = np.asarray(run(x))
    local = [n // k for n, k in zip(shape, (blocks.shape[0], blocks.shape[2]), strict=True)]
    assert blocks.shape[1::2] == tuple(n + sum(m) for n, m in zip(local, margins, strict=True))
    for i in range(blocks.shape[0]):
        for j in range(blocks.shape[2]):
            window = whole[i * local[0] :, j * local[1] :][: blocks.shape[1], : blocks.shape[3]]
            np.testing.assert_array_equal(blocks[i, :, j], window)
    halo = lambda x: spmd.stencil.halo(x, f"{plain} -> {wide}", edge=edge)
    for mode in ("auto", "reference"):
        np.testing.assert_array_equal(np.asarray(run_in(halo, mesh, [plain], plain, mode)(x)), whole)


@pytest.mark.parametrize("edge", share([*EDGES, {"x": ("antisymmetric", "antireflect"), "y": "symmetric"}]))
def test_the_gradient_is_the_adjoint(edge) -> None:
    """<Hx, y> = <x, H'y> exactly: the numbers are small integers."""
    mesh = make_mesh({"a": 4, "b": 2})
    pattern = "x/a y/b -> 3+x/a+4 y/b+1"
    halo = jax.shard_map(
        lambda x: stencil.halo(x, pattern, edge=edge),
        mesh=mesh,
        in_specs=spmd.Layout("x/a y/b").spec,
        out_specs=spmd.Layout("x/a y/b").spec,
    )
    x = numbers(0, (8, 6))
    out, pull = jax.vjp(jax.jit(halo), x)
    y = numbers(1, out.shape)
    assert float((out * y).sum()) == float((x * pull(y)[0]).sum())


def test_a_wall_whose_value_differs_between_devices() -> None:
    run = spmd.kernel("x/a -> x/a", mesh=make_mesh({"a": 4}))(
        lambda u: stencil.halo(u, "x/a -> 1+x/a", edge=u.sum())[:-1]
    )
    with pytest.raises(spmd.errors.SpmdError, match='"scalar".*different|differ'):
        run(numbers(0, (8,)))


# --- halos of halos ------------------------------------------------------------------------------------------


def in_any_order(edge):
    """The edges with zeros for numbers where others are odd, or other numbers: in a corner the order of dimensions
    would matter."""
    ends = [end for one in edge.values() for end in (one if isinstance(one, tuple) else (one,))]
    odd = any(isinstance(end, str) and end.startswith("anti") for end in ends)
    numbers = {0 if end == "zero" else end for end in ends if end == "zero" or not isinstance(end, str)}
    if not odd and len(numbers) < 2:
        return edge
    plain = lambda end: end if isinstance(end, str) else "zero"
    return {name: tuple(map(plain, one)) if isinstance(one, tuple) else plain(one) for name, one in edge.items()}


@pytest.mark.parametrize("seed", seeds())
def test_halos_compose(seed: int) -> None:
    """Margins that grow, or come a dimension at a time, are those asked for at once; so are their gradients."""
    mesh, places, shape, margins, _, edge, dtype = sample(seed + 3000)
    edge = in_any_order(edge) if isinstance(edge, dict) else edge
    draw = dice(seed)
    first = [tuple(draw.randint(0, n) for n in pair) for pair in margins]
    if draw.random() < 0.3 or first == margins or not any(map(any, first)):
        first = [margins[0], (0, 0)] if all(map(any, margins)) else [tuple(n - (n > 1) for n in m) for m in margins]
    plain, wide = texts(places, margins)
    steps = [plain, texts(places, first)[1], wide]
    steps = list(dict.fromkeys(steps))
    spec = spmd.Layout(plain).spec
    x = numbers(seed, shape, dtype)

    def grown(x):
        for a, b in itertools.pairwise(steps):
            x = stencil.halo(x, f"{a} -> {b}", edge=edge)
        return x

    at_once = lambda x: stencil.halo(x, f"{plain} -> {wide}", edge=edge)
    mapped = [
        jax.jit(jax.shard_map(body, mesh=make_mesh(mesh), in_specs=spec, out_specs=spec)) for body in (grown, at_once)
    ]
    out, want = (run(x) for run in mapped)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(want))
    whole = run_in(grown, mesh, [plain], plain, "reference")(x)
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(run_in(at_once, mesh, [plain], plain, "auto")(x)))
    if x.dtype == jnp.float32:
        by = numbers(seed + 1, out.shape)
        (found,), (gradient,) = (pulled(run, x, by=by)[1] for run in mapped)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(gradient))


@pytest.mark.parametrize("edge", share(["antireflect", "reflect", "edge", 2.0]))
def test_one_end_of_one_dimension_beside_both_of_another(edge) -> None:
    """In auto mode XLA's partitioner ended the process where slices of padded arrays were joined."""
    mesh, pattern = make_mesh({"a": 2, "b": 4}), "x/a y/b -> x/a+1 4+y/b+1"

    @spmd.kernel("x/a y/b -> x/a y/b", mesh=mesh)
    def body(u):
        wide = stencil.halo(u, pattern, edge={"x": (edge, "zero"), "y": "symmetric"})
        return wide[1:, 4:-1] + wide[:-1, :-5]

    u = numbers(0, (10, 8))
    whole = padded(np.asarray(u), ((0, 1), (4, 1)), ((edge, "zero"), ("symmetric", "symmetric")))
    for mode in MODES:
        close(getattr(body, mode)(u), whole[1:, 4:-1] + whole[:-1, :-5])


def test_margins_stay_where_another_dimension_moves() -> None:
    def body(u):
        rows = stencil.halo(u, "x/a y/b -> 1+x/a+1 y/b")
        total = spmd.psum(rows.sum(1), "1+x/a+1 {U:b} -> 1+x/a+1")
        rows = spmd.all_gather(rows, "1+x/a+1 y/b -> 1+x/a+1 y")
        rows = spmd.split(rows / total[:, None], "1+x/a+1 y -> 1+x/a+1 y/b")
        return rows[2:] - rows[:-2]

    x = jnp.abs(numbers(0, (8, 6))) + 1
    x = x / x.sum(1, keepdims=True)
    run = spmd.kernel("x/a y/b -> x/a y/b", mesh=make_mesh({"a": 4, "b": 2}))(body)
    close(run(x), jnp.roll(x, -1, 0) - jnp.roll(x, 1, 0))


def test_a_wider_halo_sends_what_is_new() -> None:
    mesh = make_mesh({"a": 4, "b": 2})
    spec = spmd.Layout("x/a y/b").spec
    x = spmd.shard(jnp.ones((16, 6)), "x/a y/b", mesh=mesh)

    def sent(*steps: str, **more):
        def body(x):
            for a, b in itertools.pairwise(("x/a y/b", *steps)):
                x = stencil.halo(x, f"{a} -> {b}", **more)
            return x

        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
        report = spmd.inspect.collectives(run, x, mesh=mesh)
        return report.counts.get("ppermute", 0), report.total_bytes // 4

    mixed = {"edge": {"x": "periodic", "y": ("antisymmetric", 2)}}
    assert sent("1+x/a+1 y/b", **mixed) == (2, 2 * 3)
    assert sent("3+x/a+3 y/b", **mixed) == (2, 6 * 3)
    assert sent("1+x/a+1 y/b", "3+x/a+3 y/b", **mixed) == (4, 6 * 3)  # no element twice
    assert sent("1+x/a+1 y/b", "1+x/a+1 1+y/b+1", **mixed) == (4, 2 * 3 + 2 * 6)  # the corners with y
    assert sent("1+x/a+1 1+y/b+1", **mixed) == (4, 2 * 3 + 2 * 6)
    assert sent("1+x/a+1 1+y/b+1", corners=False, **mixed) == (4, 2 * 3 + 2 * 4)


def test_corners_that_were_not_asked_for() -> None:
    """They are not sent, cannot be read unnoticed, and nothing waits for another dimension's margins."""
    mesh = make_mesh({"a": 4, "b": 2})
    x = spmd.shard(jnp.ones((8, 6)), "x/a y/b", mesh=mesh)
    spec = spmd.Layout("x/a y/b").spec
    wide = lambda x: stencil.halo(x, "x/a y/b -> 1+x/a+1 2+y/b+1", corners=False)
    halo = jax.jit(jax.shard_map(wide, mesh=mesh, in_specs=spec, out_specs=spec))
    report = spmd.inspect.collectives(halo, x, mesh=mesh)
    assert report.counts == {"ppermute": 4} and report.total_bytes == 4 * (2 * 3 + 3 * 2)
    block = np.asarray(halo(x))[:4, :6]
    assert np.isnan(block).sum() == 2 * 3 and np.isnan(block[[0, 0, 0, 3, 3, 3], [0, 1, 5] * 2]).all()
    sent: set = set()
    for eqn in inner_body(jax.make_jaxpr(halo)(x)).eqns:
        reads = any(v in sent for v in eqn.invars if not hasattr(v, "val"))
        assert not (eqn.primitive.name == "ppermute" and reads)
        if eqn.primitive.name == "ppermute" or reads:
            sent |= set(eqn.outvars)


# --- communication -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "edge", "count", "elements"),
    share(
        [
            ("x/a y -> 1+x/a+1 y", "periodic", 2, 2 * 6),
            ("x/a y -> 2+x/a y", "zero", 1, 2 * 6),
            ("x/a y -> 5+x/a y", "periodic", 3, 5 * 6),  # blocks of 2: two whole ones and a half
            ("x/a y -> 1+x/a+1 y", "reflect", 2, 2 * 6),
            ("x/a y -> x/a 1+y+1", "edge", 0, 0),
            ("x/a y -> 2+x/a+2 y", {"x": ("antisymmetric", 3.0)}, 2, 2 * 2 * 6),
            ("x/a y -> 1+x/a+1 1+y+1", {"x": "periodic", "y": "antireflect"}, 2, 2 * 6),
            ("x/a y/b -> 1+x/a+1 1+y/b+1", "periodic", 4, 2 * 3 + 2 * 4),  # the corners with the second dimension
        ]
    ),
)
def test_permutes_and_bytes(pattern: str, edge: str, count: int, elements: int) -> None:
    mesh = make_mesh({"a": 4, "b": 2})
    x = spmd.shard(jnp.ones((8, 6)), pattern.split(" ->")[0], mesh=mesh)
    spec = spmd.Layout(pattern.split(" ->")[0]).spec
    halo = jax.shard_map(lambda x: stencil.halo(x, pattern, edge=edge), mesh=mesh, in_specs=spec, out_specs=spec)
    report = spmd.inspect.collectives(jax.jit(halo), x, mesh=mesh)
    assert report.counts == ({"ppermute": count} if count else {})
    assert report.total_bytes == 4 * elements
    lay = jax.NamedSharding(mesh, spec)
    back = jax.jit(lambda x, ct: jax.vjp(halo, x)[1](ct), in_shardings=(lay, lay), out_shardings=(lay,))
    both = spmd.inspect.collectives(back.lower(x, jax.eval_shape(halo, x)).compile(), mesh=mesh)
    assert both.counts == report.counts and both.total_bytes == report.total_bytes
