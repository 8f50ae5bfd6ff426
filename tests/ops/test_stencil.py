"""Halos against `np.pad`, block by block; stencils, differences and convolutions against the whole array."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal

import spmd
from spmd import stencil
from tests.ops.harness import MODES, close, make_mesh, pulled
from tests.ops.harness import run as run_in
from tests.sampler import dice, seeds

EDGES = {  # the modes of `np.pad` that give the same
    "periodic": {"mode": "wrap"},
    "zero": {"mode": "constant"},
    "edge": {"mode": "edge"},
    "symmetric": {"mode": "symmetric"},
    "antisymmetric": {"mode": "symmetric"},  # and minus that
    "reflect": {"mode": "reflect"},
    "antireflect": {"mode": "reflect", "reflect_type": "odd"},
}
ENDS = [*(edge for edge in EDGES if edge != "periodic"), 3, -2.0]  # those of one end, which the other may not have
DTYPES = ("float32", "bfloat16", "int32", "bool", "complex64")


def numbers(seed: int, shape: tuple[int, ...], dtype: str = "float32"):
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape)).astype(dtype)


def padded(x, margins, edges):
    """The whole array by `np.pad`, or `jnp.pad` where it is traced: a dimension and an end at a time."""
    xp = np if isinstance(x, np.ndarray) else jnp
    for dim, (widths, ends) in enumerate(zip(margins, edges, strict=True)):
        sides = [side(xp, x, dim, widths[at], ends[at], at) for at in (0, 1)]
        x = xp.concatenate([sides[0], x, sides[1]], axis=dim)
    return x


def side(xp, x, dim: int, width: int, edge, at: int):
    how = EDGES.get(edge) or {"mode": "constant", "constant_values": edge}
    wide = xp.pad(x, [((width, 0) if at == 0 else (0, width)) if i == dim else (0, 0) for i in range(x.ndim)], **how)
    part = xp.split(wide, [width if at == 0 else x.shape[dim]], axis=dim)[at]
    return -part if edge == "antisymmetric" else part


# --- halo: what each block holds ----------------------------------------------------------------------------


def sample(seed: Any) -> tuple:
    """A mesh, the axes and sizes of x and y, their margins, their edges as pairs, and as the call says them."""
    draw = dice(seed)
    mesh = draw.choice([{"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 3, "b": 2}, {"a": 8, "b": 1}, {"a": 1, "b": 5}])
    places = draw.choice(
        [(("a",), ("b",)), (("a", "b"), ()), ((), ("b", "a")), (("b",), ("a",)), (("a",), ()), ((), ("b",))]
    )
    blocks = [int(np.prod([mesh[axis] for axis in axes], dtype=int)) for axes in places]
    shape = tuple(n * draw.choice([1, 2, 3, 5]) for n in blocks)
    dtype = draw.choice(DTYPES)
    known = [edge for edge in EDGES if dtype != "bool" or not edge.startswith("anti")]
    ends = [edge for edge in ENDS if dtype != "bool" or edge in known]
    if draw.random() < 0.5:
        edge = draw.choice(known)
        edges = [(edge, edge)] * 2
    else:
        low, high = draw.choice(ends), draw.choice(ends)
        one = draw.choice(known)
        edge = {"x": (low, high), "y": one}
        edges = [(low, high), (one, one)]
    margins = [(draw.choice([0, 1, 2, 4]), draw.choice([0, 1, 3])) for _ in places]
    margins = margins if any(map(any, margins)) else [(1, 0), (0, 2)]
    for dim, ends in enumerate(edges):  # no mirror is wider than the array
        most = [shape[dim] - 1 if "reflect" in str(e) else shape[dim] if "sym" in str(e) else 9 for e in ends]
        margins[dim] = tuple(map(min, margins[dim], most))
    if not any(map(any, margins)):
        edges, edge, margins = [("edge", "edge")] * 2, "edge", [(1, 0), (0, 2)]
    return mesh, places, shape, margins, edges, edge, dtype


def texts(places, margins) -> tuple[str, str]:
    plain = ["/".join((name, *axes)) for name, axes in zip("xy", places, strict=True)]
    wide = [
        (f"{low}+" if low else "") + t + (f"+{high}" if high else "")
        for t, (low, high) in zip(plain, margins, strict=True)
    ]
    return " ".join(plain), " ".join(wide)


@pytest.mark.parametrize("seed", seeds(times=3))
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


# --- stencils: values, adjoints ------------------------------------------------------------------------------


def neighbourhood(u, margins, n):
    """A sum over the neighbourhood, diagonals too, with a weight for every place: a product, for small programs."""
    rows = sum((3 * i - 5) * u[i : i + n[0]] for i in range(sum(margins[0]) + 1))
    return sum((7 * j * j - 2) * rows[:, j : j + n[1]] for j in range(sum(margins[1]) + 1))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", seeds(times=2))
def test_a_stencil_and_its_gradient(seed: int, overlap: bool) -> None:
    mesh, places, shape, margins, edges, edge, _ = sample(seed + 1000)
    plain, wide = texts(places, margins)
    x, by = numbers(seed, shape), numbers(seed + 1, shape)

    def fn(u):
        return neighbourhood(u, margins, [k - sum(m) for k, m in zip(u.shape, margins, strict=True)])

    want, (gradient,) = pulled(lambda x: fn(padded(x, margins, edges)), x, by=by)
    run = spmd.kernel(f"{plain} -> {plain}", mesh=make_mesh(mesh))(
        stencil.stencil(fn, f"{wide} -> {plain}", edge=edge, overlap=overlap)
    )
    for mode in MODES[:1] if overlap else MODES:  # only explicit mode has parts
        out, (found,) = pulled(getattr(run, mode), x, by=by)
        close(out, want)
        close(found, gradient)


@pytest.mark.parametrize("edge", [*EDGES, {"x": ("antisymmetric", "antireflect"), "y": "symmetric"}])
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


def test_a_wall_whose_value_is_traced() -> None:
    """A moving lid: its value is an argument, and has a gradient, the sum over the devices that hold the wall."""
    x, by = numbers(0, (8, 6)), numbers(1, (8, 6))
    laplace = lambda u: u[2:, 1:-1] + 2 * u[:-2, 1:-1] + 3 * u[1:-1, 2:] + 5 * u[1:-1, :-2]

    def whole(u, lid):
        u = jnp.pad(u, ((1, 1), (0, 0)), mode="wrap")
        low, high = -u[:, :1], jnp.full_like(u[:, :1], 1) * lid
        return laplace(jnp.concatenate([low, u, high], 1))

    want, gradients = pulled(whole, x, jnp.float32(3), by=by)
    run = spmd.kernel("x/a y/b, scalar -> x/a y/b", mesh=make_mesh({"a": 2, "b": 3}))(
        lambda u, lid: stencil.stencil(
            laplace, "1+x/a+1 1+y/b+1 -> x/a y/b", edge={"x": "periodic", "y": ("antisymmetric", lid)}
        )(u)
    )
    for mode in MODES:
        out, found = pulled(getattr(run, mode), x, jnp.float32(3), by=by)
        close(out, want)
        jax.tree.map(close, found, gradients)


def test_a_wall_whose_value_differs_between_devices() -> None:
    run = spmd.kernel("x/a -> x/a", mesh=make_mesh({"a": 4}))(
        lambda u: stencil.halo(u, "x/a -> 1+x/a", edge=u.sum())[1:]
    )
    with pytest.raises(spmd.SpmdError, match='"scalar".*different|differ'):
        run(numbers(0, (8,)))


# --- halos of halos ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds())
def test_halos_compose(seed: int) -> None:
    """Margins that grow, or come a dimension at a time, are those asked for at once; so are their gradients."""
    mesh, places, shape, margins, _, edge, dtype = sample(seed + 3000)
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


@pytest.mark.parametrize("edge", ["antireflect", "reflect", "edge", 2.0])
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


def test_several_arrays_and_margins_left_over() -> None:
    mesh = make_mesh({"a": 4})
    u, c = numbers(0, (16,)), numbers(1, (16,))
    flux = stencil.stencil(lambda u, c: c * (u[2:] - u[:-2]), "2+x/a+2, 1+x/a+1 -> 1+x/a+1")
    run = spmd.kernel("x/a, x/a -> x/a", mesh=mesh)(lambda u, c: (lambda f: f[1:-1] + f[2:] * f[:-2])(flux(u, c)))
    f = np.pad(np.asarray(c), 1, mode="wrap") * (lambda p: p[2:] - p[:-2])(np.pad(np.asarray(u), 2, mode="wrap"))
    for mode in MODES:
        close(getattr(run, mode)(u, c), f[1:-1] + f[2:] * f[:-2])


def test_under_a_mapping_of_the_kernel_and_renamed_axes() -> None:
    mesh = make_mesh({"a": 4, "b": 2})
    x = numbers(0, (8, 6))
    mapped = spmd.kernel("x y -> x y", mesh=mesh, mapping={"x": "a", "y": "b"})(
        lambda u: stencil.diff(stencil.stencil(lambda u: u[2:], "1+x+1 y -> x y")(u), "x [y]")
    )
    renamed = spmd.kernel("x/b y/a -> x/b y/a", mesh=mesh, axes={"a": "b", "b": "a"})(
        lambda u: stencil.diff(stencil.stencil(lambda u: u[2:], "1+x/b+1 y/a -> x/b y/a")(u), "x/b [y/a]")
    )
    want = np.roll(np.asarray(x), -1, 0)
    want = np.roll(want, -1, 1) - want
    for run in (mapped, renamed):
        for mode in MODES:
            close(getattr(run, mode)(x), want)


def test_a_loop_of_steps_under_vmap_and_remat() -> None:
    mesh = make_mesh({"a": 4})
    step = stencil.stencil(lambda u: (u[2:] + u[:-2]) / 2, "1+x/a+1 -> x/a", overlap=True)

    def body(u):
        advance = jax.checkpoint(lambda u, _: (jax.vmap(step)(u), None))
        return jax.lax.scan(advance, u, None, length=5)[0]

    run = spmd.kernel("n x/a -> n x/a", mesh=mesh)(body)
    x = numbers(0, (3, 16))
    want = np.asarray(x)
    for _ in range(5):
        want = (np.roll(want, 1, 1) + np.roll(want, -1, 1)) / 2
    for mode in MODES:
        out, (gradient,) = pulled(getattr(run, mode), x, by=x)
        close(out, want)
        close(gradient, want)  # symmetric


def star(u, margins, n):
    """A sum over the neighbours along each dimension, with weights that tell every place from every other."""
    low = [m[0] for m in margins]
    across = [u[i : i + n[0], low[1] : low[1] + n[1]] * (3 * i - 5) for i in range(sum(margins[0]) + 1)]
    along = [u[low[0] : low[0] + n[0], j : j + n[1]] * (7 * j * j - 2) for j in range(sum(margins[1]) + 1)]
    return sum([*across, *along])


@pytest.mark.parametrize("seed", seeds())
def test_without_corners(seed: int) -> None:
    mesh, places, shape, margins, edges, edge, _ = sample(seed + 2000)
    plain, wide = texts(places, margins)
    x, by = numbers(seed, shape), numbers(seed + 1, shape)
    fn = lambda u: star(u, margins, [k - sum(m) for k, m in zip(u.shape, margins, strict=True)])
    want, (gradient,) = pulled(lambda x: fn(padded(x, margins, edges)), x, by=by)
    step = stencil.stencil(fn, f"{wide} -> {plain}", edge=edge, overlap=bool(seed % 2), corners=False)
    run = spmd.kernel(f"{plain} -> {plain}", mesh=make_mesh(mesh))(step)
    for mode in MODES:
        out, (found,) = pulled(getattr(run, mode), x, by=by)
        close(out, want)
        close(found, gradient)


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


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_corners_of_what_has_no_nan_are_filled(dtype: str) -> None:
    """A wrong corner would not show, so there is none."""
    x = (jnp.arange(48).reshape(8, 6) % 7).astype(dtype)
    nine = lambda u: u[:-2, :-2] ^ u[2:, 2:] ^ u[1:-1, 1:-1]  # reads diagonal neighbours
    step = stencil.stencil(nine, "1+x/a+1 1+y/b+1 -> x/a y/b", corners=False)
    run = spmd.kernel("x/a y/b -> x/a y/b", mesh=make_mesh({"a": 4, "b": 2}))(step)
    for mode in MODES:
        np.testing.assert_array_equal(getattr(run, mode)(x), nine(np.pad(x, 1, mode="wrap")))


# --- differences and convolutions ----------------------------------------------------------------------------


@pytest.mark.parametrize("edge", EDGES)
def test_diff(edge: str) -> None:
    x = numbers(0, (6, 8))
    run = spmd.kernel("y x/a -> y x/a", mesh=make_mesh({"a": 4}))(lambda u: stencil.diff(u, "... [x/a]", edge=edge))
    want = np.diff(padded(np.asarray(x), [(0, 0), (0, 1)], [(edge, edge)] * 2), axis=1)
    for mode in MODES:
        close(getattr(run, mode)(x), want)


@pytest.mark.parametrize("shape", [(3, 4), (5, 1), (2, 2), (9, 3)])
def test_convolve(shape: tuple[int, int]) -> None:
    x, w = numbers(0, (2, 12, 10)), numbers(1, shape)
    run = spmd.kernel("n x/a y/b, w v -> n x/a y/b", mesh=make_mesh({"a": 4, "b": 2}))(
        lambda u, w: stencil.convolve(u, w, "n [x/a] [y/b]")
    )
    whole = lambda x, w: jnp.stack([jax.scipy.signal.convolve(one, w, mode="same") for one in x])
    want = np.stack([scipy.signal.convolve(one, w, mode="same") for one in np.asarray(x)])
    _, gradients = pulled(whole, x, w, by=x)
    for mode in MODES:
        out, found = pulled(getattr(run, mode), x, w, by=x)
        close(out, want)
        for a, b in zip(found, gradients, strict=True):
            close(a, b, 1e-4)


def test_convolve_and_diff_with_an_edge_for_each_dimension() -> None:
    x, w = numbers(0, (12, 10)), numbers(1, (3, 5))
    edge = {"x": "periodic", "y": ("antisymmetric", 2.0)}

    def body(u, w):
        return stencil.convolve(u, w, "[x/a] [y/b]", edge=edge) + stencil.diff(u, "x/a [y/b]", edge=edge)

    def whole(u, w):
        edges = [("periodic",) * 2, ("antisymmetric", 2.0)]
        out = jax.scipy.signal.convolve(padded(u, [(1, 1), (2, 2)], edges), w, mode="valid")
        return out + jnp.diff(padded(u, [(0, 0), (0, 1)], edges), axis=1)

    want, gradients = pulled(whole, x, w, by=x)
    run = spmd.kernel("x/a y/b, w v -> x/a y/b", mesh=make_mesh({"a": 4, "b": 2}))(body)
    for mode in MODES:
        out, found = pulled(getattr(run, mode), x, w, by=x)
        close(out, want, 1e-4)
        for a, b in zip(found, gradients, strict=True):
            close(a, b, 1e-3)


@pytest.mark.parametrize("width", [5, 13, 29])  # of blocks of 6, on devices that hold two copies
def test_convolve_where_an_axis_holds_copies(width: int) -> None:
    """XLA's own partitioner, of a convolution of the whole arrays, gives twice of some of these."""
    x, w = numbers(0, (24,)), numbers(1, (width,))
    run = spmd.kernel("x/a, w -> x/a", mesh=make_mesh({"a": 4, "b": 2}))(lambda u, w: stencil.convolve(u, w, "[x/a]"))
    want = np.convolve(x, w)[(width - 1) // 2 :][:24]
    _, gradients = pulled(lambda x, w: jnp.convolve(x, w)[(width - 1) // 2 :][:24], x, w, by=x)
    for mode in MODES:
        out, found = pulled(getattr(run, mode), x, w, by=x)
        close(out, want)
        jax.tree.map(close, found, gradients)


def test_convolve_of_other_numbers_and_beside_composites() -> None:
    mesh = make_mesh({"a": 4, "b": 2})
    complex_numbers = jax.lax.complex(numbers(0, (12,)), numbers(1, (12,)))
    turned = spmd.kernel("x/a -> x/a", mesh=mesh)(lambda u: stencil.convolve(u, [1j, 2, 3], "[x/a]"))
    composite = spmd.kernel("(h k)/b x/a -> (h k)/b x/a", mesh=mesh, h=2)(
        lambda u: stencil.convolve(stencil.diff(u, "(h k)/b [x/a]", h=2), [1.0, 2, 3], "(h k)/b [x/a]", h=2)
    )
    step = stencil.stencil(lambda u: u[:, 2:] + u[:, :-2], "(h k)/b 1+x/a+1 -> (h k)/b x/a", h=2)
    stepped = spmd.kernel("(h k)/b x/a -> (h k)/b x/a", mesh=mesh, h=2)(step)
    for mode in MODES:
        close(getattr(turned, mode)(complex_numbers), np.convolve(complex_numbers, np.array([1j, 2, 3], "c8"), "same"))
        x = np.asarray(numbers(2, (6, 12)))
        close(getattr(stepped, mode)(x), np.roll(x, 1, 1) + np.roll(x, -1, 1))
        differences = np.roll(x, -1, 1) - x
        wanted = [np.convolve(row, np.float32([1, 2, 3]), "same") for row in differences]
        close(getattr(composite, mode)(x), np.stack(wanted))
    changes = spmd.kernel("x/a -> x/a", mesh=mesh)(lambda u: stencil.diff(u, "[x/a]", edge="edge"))
    positive = np.asarray(numbers(0, (12,)) > 0)
    close(changes(positive), np.diff(positive, append=positive[-1]))


# --- communication -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "edge", "count", "elements"),
    [
        ("x/a y -> 1+x/a+1 y", "periodic", 2, 2 * 6),
        ("x/a y -> 2+x/a y", "zero", 1, 2 * 6),
        ("x/a y -> 5+x/a y", "periodic", 3, 5 * 6),  # blocks of 2: two whole ones and a half
        ("x/a y -> 1+x/a+1 y", "reflect", 2, 2 * 6),
        ("x/a y -> x/a 1+y+1", "edge", 0, 0),
        ("x/a y -> 2+x/a+2 y", {"x": ("antisymmetric", 3.0)}, 2, 2 * 2 * 6),
        ("x/a y -> 1+x/a+1 1+y+1", {"x": "periodic", "y": "antireflect"}, 2, 2 * 6),
        ("x/a y/b -> 1+x/a+1 1+y/b+1", "periodic", 4, 2 * 3 + 2 * 4),  # the corners with the second dimension
    ],
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


def test_overlapped_work_does_not_wait() -> None:
    """In the compiled program some call of the stencil reads nothing that was sent; without overlap all do."""
    mesh = make_mesh({"a": 4})
    x = spmd.shard(jnp.ones((32, 6)), "x/a y", mesh=mesh)

    def waits(overlap: bool) -> list[bool]:
        step = stencil.stencil(lambda u: jnp.sin(u[2:]) + u[:-2], "1+x/a+1 y -> x/a y", overlap=overlap)
        jaxpr = spmd.kernel("x/a y -> x/a y", mesh=mesh)(step).trace(x).jaxpr
        found: list[bool] = []
        sent: set = set()
        for eqn in inner_body(jaxpr).eqns:
            reads = any(v in sent for v in eqn.invars if not hasattr(v, "val"))
            if eqn.primitive.name == "ppermute" or reads:
                sent |= set(eqn.outvars)
            if eqn.primitive.name == "sin":
                found.append(reads)
        return found

    assert waits(overlap=False) == [True]
    assert sorted(waits(overlap=True)) == [False, True, True]


def inner_body(jaxpr):
    """The body of the shard_map in it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            return eqn.params["jaxpr"]
        for value in eqn.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                found = inner_body(value)
                if found is not None:
                    return found
    return None


def test_no_more_permutes_than_the_compiler_needs() -> None:
    """The same stencil by XLA's own partitioner, from `jnp.roll` and from a convolution."""
    mesh = make_mesh({"a": 8})
    x = spmd.shard(jnp.ones((64, 6)), "x/a y", mesh=mesh)
    blur = np.ones((5, 3), np.float32)

    def convolved(u):
        pads = [(2, 2), (1, 1)]
        return jax.lax.conv_general_dilated(u[None, None], jnp.asarray(blur)[None, None], (1, 1), pads)[0, 0]

    pairs = [
        (
            stencil.stencil(lambda u: u[2:] + u[:-2], "1+x/a+1 y -> x/a y"),
            lambda u: jnp.roll(u, -1, 0) + jnp.roll(u, 1, 0),
        ),
        (lambda u: stencil.convolve(u, blur, "[x/a] [y]"), convolved),
    ]
    for ours, whole in pairs:
        kernel = spmd.kernel("x/a y -> x/a y", mesh=mesh)(ours)
        mine = spmd.inspect.collectives(kernel, x, mesh=mesh)
        theirs = spmd.inspect.collectives(jax.jit(whole, out_shardings=x.sharding), x, mesh=mesh)
        close(kernel(x), whole(x))
        assert mine.counts == {"ppermute": 2}
        assert mine.counts["ppermute"] <= sum(theirs.counts.values()) and mine.total_bytes <= theirs.total_bytes
