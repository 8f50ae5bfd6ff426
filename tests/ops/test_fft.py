"""Fourier transforms: against NumPy and, for gradients, jnp.fft on whole arrays; the collectives by formula."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import fft
from spmd.modes import MODES
from tests.ops.harness import make_mesh, pulled
from tests.sampler import dice, rare, seeds, share

NUMPY = {"fft": np.fft.fftn, "ifft": np.fft.ifftn, "rfft": np.fft.rfftn, "irfft": np.fft.irfftn}
JNP = {"fft": jnp.fft.fftn, "ifft": jnp.fft.ifftn, "rfft": jnp.fft.rfftn, "irfft": jnp.fft.irfftn}


def kernel(kind: str, pattern: str, mesh, **options):
    sizes = {name: options.pop(name) for name in list(options) if name in spmd.Pattern(pattern).names}
    body = lambda x: getattr(fft, kind)(x, pattern, to="invarying", **options)
    return spmd.kernel(pattern, mesh=mesh, **sizes)(body)


def gathered(run: Any, x: Any) -> set[str]:
    """The mesh axes over which something is gathered."""
    sent = spmd.explain(run, x, compiled=False).collectives
    return {axis for one in sent if one.kind == "all_gather" for axis in one.axes}


def numbers(rng: np.random.Generator, shape, real: bool, double: bool = False):
    x = rng.normal(size=shape)
    x = x if real else x + 1j * rng.normal(size=shape)
    return x.astype({(True, False): "f4", (False, False): "c8", (True, True): "f8", (False, True): "c16"}[real, double])


def close(got, want, tolerance: float = 2e-6) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(initial=0), 1) * 10)


# --- sampled -------------------------------------------------------------------------------------------------


def sample(seed: Any) -> tuple:
    """A mesh, a pattern, the shape of its left side and what is transformed. Sizes divide where the pattern says."""
    draw = dice(seed)
    mesh = draw.choice(
        [{"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 3, "b": 2}, {"a": 8, "b": 1}, {"a": 5}, {"a": 2, "b": 2, "c": 2}]
    )
    rank = draw.randint(2, 4)
    kind = draw.choice(["fft", "ifft", "rfft", "irfft"])
    moved = sorted(draw.sample(range(rank), draw.randint(1, rank - 1 if rank > 2 else 2)))

    def placed() -> list[list[str]]:
        dims: list[list[str]] = [[] for _ in range(rank)]
        for axis in draw.sample(list(mesh), len(mesh)):
            if draw.random() < 0.8:
                dims[draw.randrange(rank)].append(axis)
        return dims

    before, after = placed(), placed()
    half = moved[-1] if kind in ("rfft", "irfft") else -1
    (before if kind == "irfft" else after)[half][:] = [] if half >= 0 else (before if kind == "irfft" else after)[half]
    shape = []
    for i in range(rank):
        parts = math.lcm(*(math.prod(mesh[x] for x in axes[i]) for axes in (before, after)))
        shape.append(parts * draw.choice([1, 2, 3] if parts > 1 else [3, 5, 6, 7]))
    left = " ".join("/".join((f"x{i}", *before[i])) for i in range(rank))
    right = " ".join("/".join((f"{'k' if i in moved else 'x'}{i}", *after[i])) for i in range(rank))
    return mesh, kind, f"{left} -> {right}", tuple(shape), tuple(moved), half


@pytest.mark.parametrize("seed", seeds())
def test_sampled(seed: int) -> None:
    mesh, kind, pattern, shape, moved, half = sample(seed)
    rng = np.random.default_rng(seed)
    norm = rng.choice(["backward", "ortho", "forward"])
    given = tuple(n // 2 + 1 if kind == "irfft" and i == half else n for i, n in enumerate(shape))
    x = numbers(rng, given, kind == "rfft")
    sizes = {f"k{half}": shape[half]} if kind == "irfft" else {}
    whole = {"s": [shape[i] for i in moved]} if kind == "irfft" else {}
    run = kernel(kind, pattern, make_mesh(mesh), norm=norm, **sizes)
    src, dst = spmd.Pattern(pattern).inputs[0], spmd.Pattern(pattern).outputs[0]
    if set(src.axes) <= set(dst.axes):  # the array stays divided; only an axis that a plan borrowed is gathered
        assert gathered(run, x).isdisjoint(dst.axes)
    want = NUMPY[kind](x, axes=moved, norm=norm, **whole)
    by = numbers(rng, want.shape, not np.iscomplexobj(want))
    _, want_gradient = pulled(lambda x: JNP[kind](x, axes=moved, norm=norm, **whole), x, by=by)
    for mode in MODES:
        out, (gradient,) = pulled(getattr(run, mode), x, by=by)
        assert out.dtype == (np.float32 if kind == "irfft" else np.complex64)
        close(out, want)
        close(gradient, want_gradient[0])


@pytest.mark.parametrize("pattern", ["x/a y z -> kx/a ky kz", "n x/a y/b -> n kx/b ky/a"])
@rare
def test_many_devices_exchange_in_the_form_that_few_do_not(pattern: str, monkeypatch) -> None:
    """Up to some number of devices the pieces of an exchange are joined one by one; eight are few."""
    mesh = make_mesh({"a": 4, "b": 2})
    x = numbers(np.random.default_rng(0), (8, 16, 24), False)
    few = kernel("fft", pattern, mesh)
    wanted = spmd.inspect.collectives(few, x, mesh=mesh)
    for module in ("_fft", "_fft_job"):
        monkeypatch.setattr(f"spmd.ops.{module}.JOINED", 0)
    many = kernel("fft", pattern, mesh)
    found = spmd.inspect.collectives(many, x, mesh=mesh)
    assert (found.counts, found.total_bytes) == (wanted.counts, wanted.total_bytes)
    jax.tree.map(close, pulled(many, x), pulled(few, x))


# --- communication -------------------------------------------------------------------------------------------

SLAB, PENCIL = {"a": 8}, {"a": 2, "b": 4}
CUBE = {"a": 2, "b": 2, "c": 2}
FORMULAS = [
    # the number of all-to-alls, and the bytes in shards: (n - 1)/n each
    ("slab", SLAB, "x/a y z -> kx ky/a kz", 1, 7 / 8),
    ("slab, back where it was", SLAB, "x/a y z -> kx/a ky kz", 2, 14 / 8),
    ("pencil", PENCIL, "x/a y/b z -> kx ky/a kz/b", 2, 1 / 2 + 3 / 4),
    ("pencil, the other way round", {"a": 4, "b": 2}, "x/a y/b z -> kx ky/a kz/b", 2, 3 / 4 + 1 / 2),
    ("batch", PENCIL, "n/a x/b y z -> n/a kx ky/b kz", 1, 3 / 4),
    ("only whole dimensions", PENCIL, "x/a y/b z -> x/a y/b kz", 0, 0),
    ("two dimensions", SLAB, "x/a y -> kx ky/a", 1, 7 / 8),
]


@pytest.mark.parametrize(
    ("mesh", "pattern", "count", "shards"), share([f[1:] for f in FORMULAS]), ids=share([f[0] for f in FORMULAS])
)
def test_bytes_are_the_formula(mesh, pattern: str, count: int, shards: float) -> None:
    mesh = make_mesh(mesh)
    rank = len(spmd.Pattern(pattern).inputs[0].dims)
    x = spmd.shard(jnp.ones((16, 32, 24, 8)[:rank], jnp.complex64), pattern.split(" ->")[0], mesh=mesh)
    run = kernel("fft", pattern, mesh)
    report = spmd.inspect.collectives(run, x, mesh=mesh)
    expected = {"all_to_all": count} if count else {}
    assert report.counts == expected
    assert report.total_bytes == shards * x.nbytes / 8
    cotangent = spmd.shard(jnp.ones(x.shape, x.dtype), pattern.split("-> ")[1], mesh=mesh)
    both = spmd.inspect.collectives(lambda x, ct: jax.vjp(run, x)[1](ct), x, cotangent, mesh=mesh)
    assert both.counts == expected, "the transform is linear: only the way back is left"
    assert both.total_bytes == report.total_bytes


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_a_natural_pencil_never_gathers_and_stays_within_two_exchanges_each_way(mode: str) -> None:
    """Nor where the compiler moves the data: it is asked for one exchange at a time."""
    mesh = make_mesh(PENCIL)
    x = spmd.shard(jnp.ones((16, 32, 24), jnp.complex64), "x/a y/b z", mesh=mesh)
    run = getattr(kernel("fft", "x/a y/b z -> kx/a ky/b kz", mesh), mode)
    both = spmd.inspect.collectives(lambda x: (y := run(x), jax.vjp(run, x)[1](y)), x, mesh=mesh)
    assert set(both.counts) == {"all_to_all"} and both.total_bytes <= 2 * 2 * (1 / 2 + 3 / 4) * x.nbytes / 8


@pytest.mark.parametrize(
    ("mesh", "pattern"),
    share(
        [
            (PENCIL, "x/a y/b z -> kx ky/b/a kz"),
            (PENCIL, "x/b y/a z -> x/a ky/b kz"),
            (CUBE, "x/a y/b z/c -> kx/a ky/b kz/c"),
        ]
    ),
)
def test_auto_mode_sends_what_explicit_mode_sends(mesh, pattern: str) -> None:
    """Also where several dimensions give axes away at once, and in the gradient."""
    mesh = make_mesh(mesh)
    x = spmd.shard(jnp.ones((16, 32, 24), jnp.complex64), pattern.split(" ->")[0], mesh=mesh)
    run = kernel("fft", pattern, mesh)
    sent = [
        spmd.inspect.collectives(lambda x, one=one: (y := one(x), jax.vjp(one, x)[1](y)), x, mesh=mesh)
        for one in (run, run.auto)
    ]
    assert sent[0].counts == sent[1].counts and sent[0].total_bytes == sent[1].total_bytes > 0


def test_real_numbers_are_sent_as_half_of_complex_ones() -> None:
    mesh = make_mesh(SLAB)
    x = spmd.shard(jnp.ones((16, 30), jnp.float32), "x/a y", mesh=mesh)
    report = spmd.inspect.collectives(kernel("rfft", "x/a y -> kx/a ky", mesh), x, mesh=mesh)
    # 30 real numbers become 16 complex ones, so they are sent after the transform; and back
    assert report.counts == {"all_to_all": 2}
    assert report.total_bytes == 2 * 7 / 8 * (2 * 16 * 8)
    first = spmd.shard(jnp.ones((16, 32), jnp.float32), "x y/a", mesh=mesh)
    report = spmd.inspect.collectives(kernel("rfft", "x y/a -> x/a ky", mesh), first, mesh=mesh)
    assert report.total_bytes == 7 / 8 * first.nbytes / 8


def test_memory_is_of_the_size_of_shards() -> None:
    mesh = make_mesh(PENCIL)
    x = spmd.shard(jnp.ones((32, 32, 32), jnp.complex64), "x/a y/b z", mesh=mesh)
    run = kernel("fft", "x/a y/b z -> kx ky/a kz/b", mesh)
    memory = jax.jit(run).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 4 * x.nbytes / 8  # the whole is 8 shards


@pytest.mark.parametrize(
    ("mesh", "pattern"), share([(SLAB, "x/a y z -> kx ky/a kz"), (PENCIL, "x/a y/b z -> kx/a ky/b kz")])
)
def test_memory_of_gradients_is_of_the_size_of_shards(mesh, pattern: str) -> None:
    """What an exchange joins piece by piece, its gradient does not add up piece by piece."""
    mesh = make_mesh(mesh)
    x, ct = (spmd.shard(jnp.ones((32, 32, 32), jnp.complex64), side, mesh=mesh) for side in pattern.split(" -> "))
    run = kernel("fft", pattern, mesh)
    memory = jax.jit(lambda x, ct: jax.vjp(run, x)[1](ct)).lower(x, ct).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 4 * x.nbytes / 8


def test_gradients_of_gradients_and_of_batches() -> None:
    """The pieces of an exchange have transposes of their own, and those have them too."""
    x, y, by = (numbers(np.random.default_rng(seed), (3, 8, 16), True) for seed in range(3))
    run = kernel("fft", "x/a y -> kx ky/a", make_mesh({"a": 4}))
    ours = lambda x, y: (abs(jax.vmap(run)(x * y)) ** 2).sum()
    theirs = lambda x, y: (abs(jnp.fft.fftn(x * y, axes=(1, 2))) ** 2).sum()
    twice = lambda f: jax.jit(lambda x, y: jax.grad(lambda y: (jax.grad(f)(x, y) * by).sum())(y))
    close(twice(ours)(x, y), twice(theirs)(x, y))


@pytest.mark.parametrize(
    ("n", "mesh", "kind"),
    share(
        [
            *[(64, {"a": 8}, "fft"), (48, {"a": 2, "b": 2}, "ifft"), (90, {"a": 3}, "fft")],
            # of sizes that the number of devices divides, and its square does not
            *[
                (24, {"a": 8}, "fft"),
                (30, {"a": 3, "b": 2}, "ifft"),
                (4, {"a": 4}, "fft"),
                (70, {"a": 5, "b": 1}, "fft"),
            ],
        ],
        always=[(64, {"a": 8}, "fft"), (24, {"a": 8}, "fft"), (30, {"a": 3, "b": 2}, "ifft")],
    ),
)
def test_a_dimension_alone(n: int, mesh, kind: str) -> None:
    pattern = f"x/{'/'.join(mesh)} -> kx/{'/'.join(mesh)}"
    x, by = (numbers(np.random.default_rng(seed), (n,), False) for seed in (0, 1))
    run = kernel(kind, pattern, make_mesh(mesh))
    _, want_gradient = pulled(JNP[kind], x, by=by)
    for mode in MODES:
        out, (gradient,) = pulled(getattr(run, mode), x, by=by)
        close(out, NUMPY[kind](x))
        close(gradient, want_gradient[0])
    parts = math.prod(mesh.values())
    report = spmd.inspect.collectives(run, x, mesh=make_mesh(mesh))
    assert report.counts == {"all_to_all": 3}
    whole, rest = divmod(n // parts, parts)
    padded = parts * (whole + bool(rest)) * parts * 8  # bytes of rows whose length the devices divide
    assert report.total_bytes == 3 * padded * (parts - 1) // parts**2


@pytest.mark.parametrize("parts", range(2, 9))
def test_a_dimension_alone_is_cut_into_two_lengths(parts: int) -> None:
    """Multiples of the devices, as equal as can be; else the first is the number of devices."""
    for n in range(parts, 20 * parts, parts):
        program = jax.make_jaxpr(kernel("fft", "x/a -> kx/a", make_mesh({"a": parts})))(np.ones(n, np.complex64))
        pairs = [(m, n // m) for m in range(parts, n + 1, parts) if n % (m * parts) == 0]
        wanted = min(pairs, key=max, default=(parts, n // parts))
        assert {int(found) for found in re.findall(r"fft_lengths=\((\d+),\)", str(program))} == {*wanted}


def test_a_dimension_alone_in_a_batch() -> None:
    x = numbers(np.random.default_rng(0), (3, 24), False)
    run = kernel("fft", "x/a -> kx/a", make_mesh(SLAB))
    close(jax.vmap(run)(x), np.fft.fft(x))


@pytest.mark.parametrize(
    ("kind", "pattern", "shape"),
    share(
        [
            ("fft", "b x/a y -> b kx ky/a", (0, 8, 8)),
            ("fft", "b x/a y/c -> b kx ky/a/c", (0, 8, 8)),
            ("ifft", "b x/a -> b kx/a", (0, 8)),
            ("rfft", "b/c x/a y -> b/c kx/a ky", (0, 8, 8)),
            ("irfft", "b x/a y -> b kx ky/a", (0, 8, 5)),
        ]
    ),
)
def test_a_batch_of_nothing(kind: str, pattern: str, shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32 if kind == "rfft" else np.complex64)
    wanted = JNP[kind](x, axes=range(1, x.ndim))
    run = kernel(kind, pattern, make_mesh({"a": 2, "c": 2}))
    for mode in MODES:
        found, (gradient,) = pulled(getattr(run, mode), x, by=np.zeros(wanted.shape, wanted.dtype))
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)


# --- what does not divide -------------------------------------------------------------------------------------


def test_layouts_in_between_need_not_divide() -> None:
    """kz is left with 5 // 2 + 1 = 3 frequencies and takes over 8 devices on the way."""
    x = numbers(np.random.default_rng(0), (8, 5), True)
    run = kernel("rfft", "x/a z -> kx/a kz", make_mesh(SLAB))
    close(run(x), np.fft.rfftn(x))


@pytest.mark.parametrize(
    ("mesh", "pattern", "shape"),
    share(
        [
            ({"a": 4, "b": 2}, "x/a y/b -> kx/a y/b", (8, 6)),
            ({"a": 4, "b": 2}, "x/a y/b -> kx/a ky/b", (12, 6)),  # each takes over the other's axis, padded
            ({"a": 2, "b": 2, "c": 2}, "x/a y/b z/c -> kx/a ky/b kz/c", (2, 6, 2)),
        ]
    ),
)
def test_dimensions_that_are_divided_already_take_over_axes_that_do_not_divide_them(mesh, pattern: str, shape) -> None:
    """Each of their blocks is padded."""
    moved = [i for i, word in enumerate(pattern.split("-> ")[1].split()) if word[0] == "k"]
    x, by = (numbers(np.random.default_rng(seed), shape, False) for seed in (0, 1))
    want, want_gradient = pulled(lambda x: jnp.fft.fftn(x, axes=moved), x, by=by)
    run = kernel("fft", pattern, make_mesh(mesh))
    for mode in MODES:
        out, gradient = pulled(getattr(run, mode), x, by=by)
        close(out, want)
        close(gradient[0], want_gradient[0])
    assert set(spmd.inspect.collectives(run, x, mesh=make_mesh(mesh)).counts) == {"all_to_all"}


def test_an_exchange_of_what_an_exchange_brought() -> None:
    """XLA on CPUs took a piece of the first result for the whole piece that came in, and laid it out otherwise."""
    pattern, shape = "x0 x1/b x2/c -> k0/a/c x1 x2/b", (4, 6, 6)
    run = kernel("ifft", pattern, make_mesh({"a": 2, "b": 2, "c": 2}))
    rng = np.random.default_rng(0)
    x, by = numbers(rng, shape, False), numbers(rng, shape, False)
    value, [gradient] = pulled(run, jnp.asarray(x), by=by)
    close(value, np.fft.ifftn(x, axes=(0,)))
    close(gradient, pulled(lambda x: jnp.fft.ifftn(x, axes=(0,)), jnp.asarray(x), by=by)[1][0])


def test_a_gather_after_a_transform() -> None:
    """XLA for CPUs lays the array out for the gather, and its own transform then refuses to run."""
    x = numbers(np.random.default_rng(0), (8, 8, 6), False)
    run = kernel("fft", "x y/a z -> x y kz", make_mesh({"a": 4}))
    out, (gradient,) = pulled(run, x)  # the transform of the transform, in one program
    close(out, np.fft.fft(x))
    close(gradient, np.fft.fft(out))


# --- padded half spectra --------------------------------------------------------------------------------------

REAL_PENCILS = [
    # the mesh, both layouts, the shape of the real array, and how many entries the half spectrum has then
    (PENCIL, "x/a y/b z", "kx ky/a kz/b", (4, 8, 12), 8),
    (PENCIL, "n x/b y/a", "n kx/a ky/b", (3, 8, 8), 8),
    (SLAB, "x/a y", "x ky/a", (8, 10), 8),
    ({"a": 4, "b": 1}, "x/a y/b z", "kx ky/a kz/b", (4, 4, 6), 4),  # one block of z: nothing to fill up
]


@pytest.mark.parametrize(("mesh", "there", "away", "shape", "entries"), share(REAL_PENCILS))
def test_a_padded_half_spectrum(mesh, there: str, away: str, shape, entries: int) -> None:
    """Zeros behind the n // 2 + 1 frequencies; what stands there does not matter on the way back."""
    mesh, n = make_mesh(mesh), shape[-1]
    moved = [i for i, word in enumerate(away.split()) if word[0] == "k"]
    fill = [(0, 0)] * (len(shape) - 1) + [(0, entries - (n // 2 + 1))]
    x, by = numbers(np.random.default_rng(0), shape, True), numbers(np.random.default_rng(1), shape, True)
    f, junk = (numbers(np.random.default_rng(seed), (*shape[:-1], entries), False) for seed in (2, 3))
    forward = kernel("rfft", f"{there} -> {away}", mesh, pad=True)
    last = spmd.Pattern(f"{there} -> {away}").inputs[0].dims[-1].atoms[0].name
    back = kernel("irfft", f"{away} -> {there}", mesh, pad=True, **{last: n})
    want, want_gradient = pulled(lambda x: jnp.pad(jnp.fft.rfftn(x, axes=moved), fill), x, by=f)
    sizes = [shape[i] for i in moved]
    inverse = lambda f: jnp.fft.irfftn(f[..., : n // 2 + 1], axes=moved, s=sizes)
    want_back, want_back_gradient = pulled(inverse, junk, by=by)
    for mode in MODES:
        out, gradient = pulled(getattr(forward, mode), x, by=f)
        close(out, want)
        close(gradient[0], want_gradient[0])
        out, gradient = pulled(getattr(back, mode), junk, by=by)
        close(out, want_back)
        close(gradient[0], want_back_gradient[0])


def test_a_padded_half_spectrum_costs_half_of_a_whole_one() -> None:
    mesh = make_mesh(PENCIL)
    there, away = "x/a y/b z", "kx ky/a kz/b"
    x = spmd.shard(jnp.ones((8, 16, 30), jnp.float32), there, mesh=mesh)
    forward = kernel("rfft", f"{there} -> {away}", mesh, pad=True)
    f = jax.jit(forward)(x)
    assert f.shape == (8, 16, 16)
    back = kernel("irfft", f"{away} -> {there}", mesh, pad=True, z=30)
    shard = 8 * 16 * 16 * 8 // 8  # 16 frequencies of 8 bytes, on 8 devices
    for fn, given, taken in ((forward, x, f), (back, f, x)):
        for report in (
            spmd.inspect.collectives(fn, given, mesh=mesh),
            spmd.inspect.collectives(lambda x, ct: jax.vjp(fn, x)[1](ct), given, taken, mesh=mesh),  # noqa: B023
        ):
            assert report.counts == {"all_to_all": 2}
            assert report.total_bytes == shard // 2 + shard * 3 // 4


def test_a_derivative_with_padded_frequencies() -> None:
    """Real data in pencils, wavenumbers of every dimension, the same padding on every mesh where the size is given."""
    n = 12
    i = np.arange(n) * 2 * np.pi / n
    u = (np.sin(i)[:, None, None] + np.cos(2 * i)[:, None] * np.sin(3 * i)).astype(np.float32)

    def laplacian(u):
        layouts = ("kx", "ky/a")
        kx, ky = (fft.fftfreq(layout, 1 / n) for layout in layouts)
        kz = fft.rfftfreq("kz/b", n, 1 / n, pad=True)
        kx, ky, kz = spmd.meshgrid(kx, ky, kz, "kx, ky/a, kz/b -> kx ky/a kz/b", sparse=True)
        f = fft.rfft(u, "x/a y/b z -> kx ky/a kz/b", pad=True)
        k2 = (kx**2 + ky**2 + kz**2).astype(f.dtype)
        return fft.irfft(-k2 * f, "kx ky/a kz/b -> x/a y/b z", pad=True)

    want = -np.sin(i)[:, None, None] - 13 * np.cos(2 * i)[:, None] * np.sin(3 * i)
    for mesh, sizes in ((PENCIL, {}), ({"a": 4, "b": 2}, {}), (PENCIL, {"kz": 12}), ({"a": 2, "b": 3}, {"kz": 12})):
        run = spmd.kernel("x/a y/b z -> x/a y/b z", mesh=make_mesh(mesh), kx=n, ky=n, **sizes)(laplacian)
        for mode in MODES if not sizes else MODES[:1]:
            np.testing.assert_allclose(getattr(run, mode)(u), want, atol=2e-4)


def test_padded_frequencies_go_on() -> None:
    run = spmd.kernel("-> j/a", mesh=make_mesh({"a": 4}))(lambda: fft.rfftfreq("j/a", 12, 0.5, pad=True))
    for mode in MODES:
        np.testing.assert_allclose(getattr(run, mode)(), np.arange(8) / 6, rtol=1e-6)


# --- axes of size 1 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    share(
        ["x/a y/b z -> kx ky/a kz/b", "x/b/a y z/c -> kx/c ky/a/b kz", "x/a y/b z -> kx/a/b ky kz", "x/b y -> kx/b y"]
    ),
)
def test_a_dimension_divided_by_one_is_whole(pattern: str) -> None:
    """The very program of the mesh that does not have the axis."""
    x = numbers(np.random.default_rng(0), (8, 8, 8)[: pattern.count(" ") // 2], False)
    sizes = {"a": 4, "b": 1, "c": 1}

    def instructions(mesh, axes):
        run = spmd.kernel(pattern, mesh=make_mesh(mesh), axes=axes)(lambda x: fft.fft(x, pattern))
        report = spmd.inspect.collectives(run, x, mesh=make_mesh(mesh))
        text = jax.jit(lambda x: jax.vjp(run, x)[1](run(x))).lower(x).compile().as_text()
        close(run(x), np.fft.fftn(x, axes=[i for i, word in enumerate(pattern.split("-> ")[1].split()) if "k" in word]))
        return report.counts, report.total_bytes, sorted(re.findall(r" ([a-z-]+)\(", text))

    whole = {axis: None for axis in ("b", "c") if f"/{axis}" in pattern}
    assert instructions(sizes, {}) == instructions({"a": 4}, whole)


def test_what_is_accepted_does_not_depend_on_the_sizes_of_axes() -> None:
    for size in (1, 2):
        run = spmd.kernel("x/a -> k/a", mesh=make_mesh({"a": size}))(lambda x: fft.rfft(x, "x/a -> k/a"))
        with pytest.raises(spmd.errors.LayoutError, match="no other dimension here can take over"):
            run(np.ones(6, np.float32))


# --- the order of dimensions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    ["x/a y z -> ky/a kz kx", "x/a y z -> x/a kz ky", "x y/a z -> Y X/a z", "x0 x1/a x2 -> k1/a k0 x2"]
    + ["n row/a col -> n f_col f_row/a", "x/a y z -> z_hat y_hat/a x_hat"],
)
def test_names_in_another_order_are_an_error_that_says_both_readings(pattern: str) -> None:
    run = spmd.kernel(pattern, mesh=make_mesh({"a": 4}))(lambda x: fft.fft(x, pattern))
    with pytest.raises(
        spmd.errors.LayoutError, match=r"(?s)by position: .*by name: .*and transposed.*rearrange\(spmd.fft"
    ):
        run(np.ones((4, 8, 4), np.complex64))


@pytest.mark.parametrize(
    "pattern", ["x/a y z -> u/a v w", "x y z/a -> kx ly mz/a", "a b/a c -> ka kb/a c", "t y/a x -> frequency y/a x"]
)
def test_other_names_are_the_users_own(pattern: str) -> None:
    x = numbers(np.random.default_rng(0), (4, 4, 4), False)
    run = spmd.kernel(pattern, mesh=make_mesh({"a": 4}))(lambda x: fft.fft(x, pattern))
    same = [i for i, (a, b) in enumerate(zip(*(side.split() for side in pattern.split(" -> ")), strict=True)) if a == b]
    close(run(x), np.fft.fftn(x, axes=[i for i in range(3) if i not in same]))


# --- vmap, scan, remat, double precision ----------------------------------------------------------------------


@rare
def test_under_vmap_scan_and_remat() -> None:
    mesh = make_mesh({"a": 4})
    x = numbers(np.random.default_rng(0), (3, 4, 8), False)

    @jax.checkpoint
    def there(x):
        return fft.fft(x, "x/a y -> kx ky/a")

    def back(k):
        return fft.ifft(k, "kx ky/a -> x/a y")

    def body(x):
        mapped = jax.vmap(lambda x: back(there(x) * 2))(x)
        _, looped = jax.lax.scan(lambda carry, x: (carry, back(there(x))), None, x)
        return mapped + looped

    run = spmd.kernel("n x/a y -> n x/a y", mesh=mesh)(body)
    for mode in MODES:
        out, (gradient,) = pulled(getattr(run, mode), x, by=x)
        close(out, 3 * x)
        close(gradient, 3 * x)


def test_ellipsis_composites_and_other_names() -> None:
    mesh = make_mesh(PENCIL)
    x = numbers(np.random.default_rng(0), (3, 4, 8, 16), False)
    dots = spmd.kernel("n x/a y/b z -> n kx y/b z/a", mesh=mesh)(lambda x: fft.fft(x, "n x/a y/b z -> n kx y/b z/a"))
    close(dots(x), np.fft.fft(x, axis=1))
    leading = spmd.kernel("n x/a y/b z -> n x/a ky z/b", mesh=mesh)(lambda x: fft.fft(x, "... y/b z -> ... ky z/b"))
    close(leading(x), np.fft.fft(x, axis=2))
    axes = spmd.kernel("x/a y -> kx y/a", mesh=mesh)(lambda x: fft.fft(x, "x/r y -> kx y/r", r="a"))
    close(axes(x[0, :, :, 0]), np.fft.fft(x[0, :, :, 0], axis=0))
    groups = spmd.kernel("(g x)/a y -> (g x)/a ky", mesh=mesh, g=2)(
        lambda x: fft.fft(x, "(g x)/a y -> (g x)/a ky", g=2)
    )
    close(groups(x[0, :, :, 0]), np.fft.fft(x[0, :, :, 0], axis=1))


def test_double_precision() -> None:
    with jax.enable_x64(True):
        x = numbers(np.random.default_rng(0), (8, 12), False, double=True)
        run = kernel("fft", "x/a y -> kx ky/a", make_mesh({"a": 4}))
        out = run(jnp.asarray(x))
        assert out.dtype == jnp.complex128
        close(out, np.fft.fftn(x), 1e-14)


@pytest.mark.parametrize("dtype", share(["int32", "bool", "bfloat16", "float16"]))
def test_other_numbers_become_float32(dtype: str) -> None:
    x = jnp.arange(32).reshape(8, 4) % 2 == 0
    x = x.astype(dtype)
    for kind in ("fft", "rfft"):
        run = kernel(kind, "x/a y -> kx/a ky", make_mesh({"a": 4}))
        close(run(x), NUMPY[kind](np.asarray(x.astype("float32"))))


def test_integers_are_as_exact_as_in_jnp() -> None:
    x = np.arange(48).reshape(8, 6) ** 3
    run = kernel("fft", "x/a y -> kx/a ky", make_mesh({"a": 4}))
    with jax.enable_x64(True):
        out = run(x)
        assert out.dtype == jnp.fft.fftn(x).dtype == jnp.complex128
        close(out, np.fft.fftn(x), 1e-13)


def test_nothing_is_multiplied_by_one() -> None:
    """On a GPU a factor of one is another pass over the array."""
    x = numbers(np.random.default_rng(0), (8, 12, 4), False)
    for kind in ("fft", "ifft"):
        jaxpr = jax.make_jaxpr(lambda x, kind=kind: kernel(kind, "x/a y z -> kx ky/a kz", make_mesh({"a": 4}))(x))(x)
        assert not re.findall(r" = (mul|div)\b", f"{jaxpr}")
