"""Stencils, differences and convolutions against the whole array."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import stencil
from spmd.modes import MODES
from tests.ops.halos import EDGES, neighbourhood, numbers, padded, sample, texts
from tests.ops.harness import close, make_mesh, pulled
from tests.sampler import seeds, share


@pytest.mark.parametrize("seed", seeds())
def test_a_stencil_and_its_gradient(seed: int) -> None:
    mesh, places, shape, margins, edges, edge, _ = sample(seed + 1000)
    plain, wide = texts(places, margins)
    x, by = numbers(seed, shape), numbers(seed + 1, shape)

    def fn(u):
        return neighbourhood(u, margins, [k - sum(m) for k, m in zip(u.shape, margins, strict=True)])

    want, (gradient,) = pulled(lambda x: fn(padded(x, margins, edges)), x, by=by)
    run = spmd.kernel(f"{plain} -> {plain}", mesh=make_mesh(mesh))(stencil.stencil(fn, f"{wide} -> {plain}", edge=edge))
    for mode in MODES:
        out, (found,) = pulled(getattr(run, mode), x, by=by)
        close(out, want)
        close(found, gradient)


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
    step = stencil.stencil(lambda u: (u[2:] + u[:-2]) / 2, "1+x/a+1 -> x/a")

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
    step = stencil.stencil(fn, f"{wide} -> {plain}", edge=edge, corners=False)
    run = spmd.kernel(f"{plain} -> {plain}", mesh=make_mesh(mesh))(step)
    for mode in MODES:
        out, (found,) = pulled(getattr(run, mode), x, by=by)
        close(out, want)
        close(found, gradient)


@pytest.mark.parametrize("dtype", share(["int32", "bool", "uint8"]))
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


@pytest.mark.parametrize("shape", share([(3, 4), (5, 1), (2, 2), (9, 3)]))
def test_convolve(shape: tuple[int, int]) -> None:
    from scipy import signal  # takes a second to import

    x, w = numbers(0, (2, 12, 10)), numbers(1, shape)
    run = spmd.kernel("n x/a y/b, w v -> n x/a y/b", mesh=make_mesh({"a": 4, "b": 2}))(
        lambda u, w: stencil.convolve(u, w, "n [x/a] [y/b]")
    )
    whole = lambda x, w: jnp.stack([jax.scipy.signal.convolve(one, w, mode="same") for one in x])
    want = np.stack([signal.convolve(one, w, mode="same") for one in np.asarray(x)])
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


@pytest.mark.parametrize("width", share([5, 13, 29]))  # of blocks of 6, on devices that hold two copies
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


@pytest.fixture
def optimized():
    """The compiler as users have it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_memory_is_that_of_one_padded_block(sizes: tuple[int, int, int], corners: bool) -> None:
    """In a loop, 7 points need the block with its margins and what is sent, and no copy for each dimension."""
    n, mesh = 32, make_mesh(dict(zip("abc", sizes, strict=True)))
    x = spmd.shard(np.ones((n, n, n), np.float32), "x/a y/b z/c", mesh=mesh)
    whole = lambda u, i, d: u[tuple(slice(1 + d, u.shape[j] - 1 + d) if i == j else slice(1, -1) for j in range(3))]
    seven = lambda u: sum(whole(u, i, d) for i in range(3) for d in (-1, 1)) - 6 * whole(u, 0, 0)

    step = stencil.stencil(seven, "1+x/a+1 1+y/b+1 1+z/c+1 -> x/a y/b z/c", corners=corners)
    kernel = spmd.kernel("x/a y/b z/c -> x/a y/b z/c", mesh=mesh)(step)
    close(kernel(x), kernel.reference(x))
    loop = spmd.kernel("x/a y/b z/c -> x/a y/b z/c", mesh=mesh)(
        lambda u: jax.lax.fori_loop(0, 5, lambda _, u: step(u), u)
    )
    block = 4 * math.prod(n // k + 2 for k in sizes)
    assert loop.lower(x).compile().memory_analysis().temp_size_in_bytes <= 1.5 * block


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
