"""Fourier transforms of distributed arrays. A dimension that is renamed is transformed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, Literal, NoReturn, get_args

import jax
import jax.numpy as jnp

from spmd._trees.leaves import not_int
from spmd.comm import _lax
from spmd.comm._call import Call, To, open_call
from spmd.comm.plans import relayout
from spmd.errors import not_one_of
from spmd.modes import inner
from spmd.ops._fft_job import JOINED, Job, Stage, cut, job_of, joined, renamed_dims, route, transposed
from spmd.ops._fft_walls import TYPES, Wall, factors, in_two_factors, transformed
from spmd.ops._local import local

Norm = Literal["backward", "ortho", "forward"]
NORMS = get_args(Norm)
_relayout, _local = inner(relayout), inner(local)


def fft(x: Any, pattern: str, /, *, norm: Norm = "backward", to: To | None = None, **names: Any) -> jax.Array:
    """The discrete Fourier transform along each renamed dimension: `fft(x, "x/a y z -> kx ky/a kz")`.

    Dimensions match by position. One that has another name on the right is transformed. The right side says where the
    result lies: `"x/a y z -> kx ky/a kz"` leaves the spectrum transposed, as slab-decomposed codes do, and
    `"... -> kx/a ky kz"` brings it back, which costs a second exchange. Any placements are allowed on either side, any
    number of dimensions may be transformed, and all modes work. The layouts in between are chosen to send the fewest
    bytes. A dimension that such a layout does not divide is padded on the way.

    Communication: with N numbers in a device's shard, one all-to-all of N (n - 1)/n for each group of n devices that
    divides a transformed dimension, and then whatever the right side asks for. A slab (`"x/a y z -> kx ky/a kz"`) takes
    one, a pencil (`"x/a y/b z -> kx ky/a kz/b"`) two, and a single dimension, `"x/a -> kx/a"`, three. There is no
    gather unless the right side is gathered. Backward the same in reverse. Memory: shards and padding.

    Args:
      x: The array, real or complex.
      pattern: `"layout -> layout"`, with the dimensions in the same order.
      norm: "backward" (no factor forward, 1/n in the inverse), "ortho" or "forward", as in `jnp.fft`.
      to: As in `all_gather`, the type of a result that the right side gathers.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The transform, complex, in the layout of the right side.

    Raises:
      LayoutError: If no dimension is renamed, ranks differ, a transformed dimension is a composite, or no other
        dimension can take over the axes of one that is divided.
      SizeError: If a dimension does not divide where a layout of the pattern divides it.

    Example:
      >>> import jax.numpy as jnp, numpy as np, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> x = jnp.arange(8 * 4 * 3.0).reshape(8, 4, 3)
      >>> @spmd.kernel("x/a y z -> kx ky/a kz", mesh=mesh)
      ... def spectrum(x):
      ...     return spmd.fft.fft(x, "x/a y z -> kx ky/a kz")
      >>> np.allclose(spectrum(x), np.fft.fftn(x), atol=1e-4)
      True

    References:
      N. Li, S. Laizet, 2DECOMP&FFT, Cray User Group 2010 (slabs and pencils).
    """
    return _transform("fft.fft", x, pattern, names, norm=norm, to=to)


def ifft(x: Any, pattern: str, /, *, norm: Norm = "backward", to: To | None = None, **names: Any) -> jax.Array:
    """The inverse of `fft` along each renamed dimension: `ifft(f, "kx ky/a kz -> x/a y z")`.

    Layouts, communication and memory as in `fft`.

    Args:
      x: The spectrum.
      pattern: `"layout -> layout"`, dimensions in the same order, the renamed ones transformed.
      norm: As given to `fft`.
      to: As in `all_gather`, the type of a result that the right side gathers.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The array, complex, in the layout of the right side.

    Raises:
      LayoutError: As `fft`.
      SizeError: As `fft`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("x/a y -> x/a y", mesh=mesh)
      ... def there_and_back(x):
      ...     return spmd.fft.ifft(spmd.fft.fft(x, "x/a y -> kx ky/a"), "kx ky/a -> x/a y").real
      >>> print(there_and_back(jnp.eye(4)).round(3).tolist()[1])
      [0.0, 1.0, 0.0, 0.0]
    """
    return _transform("fft.ifft", x, pattern, names, norm=norm, to=to)


def rfft(
    x: Any, pattern: str, /, *, pad: bool = False, norm: Norm = "backward", to: To | None = None, **names: Any
) -> jax.Array:
    """The Fourier transform of a real array: the last renamed dimension keeps its n // 2 + 1 frequencies from 0 up.

    `rfft(x, "x/a y z -> kx ky/a kz")` transforms z first, as real numbers, then x and y. What is sent before that has
    half the bytes. All else is as in `fft`.

    For even n, n // 2 + 1 is odd and rarely divides. Let another dimension take over the axes. If all dimensions are
    taken, as in pencils, let `pad=True` add zeros behind the frequencies:
    `rfft(x, "x/a y/b z -> kx ky/a kz/b", pad=True)`.

    Args:
      x: A real array.
      pattern: `"layout -> layout"`. The last renamed dimension has n // 2 + 1 entries on the right.
      pad: Whether zeros may follow these, up to the size that a keyword or the signature gives its name (`kz=40`, the
        same on every mesh), or else to the next size that its axes divide. `irfft` and `rfftfreq` take the keyword too.
      norm: As in `fft`.
      to: As in `all_gather`, the type of a result that the right side gathers.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The half spectrum, complex, in the layout of the right side.

    Raises:
      LayoutError: As `fft`, and if x is complex.
      SizeError: As `fft`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("x/a y -> kx/a ky", mesh=mesh)
      ... def half(x):
      ...     return spmd.fft.rfft(x, "x/a y -> kx/a ky")
      >>> half(jnp.ones((8, 6))).shape
      (8, 4)
    """
    return _transform("fft.rfft", x, pattern, names, norm=norm, to=to, pad=pad)


def irfft(
    x: Any, pattern: str, /, *, pad: bool = False, norm: Norm = "backward", to: To | None = None, **names: Any
) -> jax.Array:
    """The inverse of `rfft`, to a real array: `irfft(f, "kx ky/a kz -> x/a y z", z=64)`.

    The size of the last renamed dimension is that of its name on the right, given by a keyword or by the kernel's
    signature. Without one it is 2 (m - 1) for m frequencies, as in `jnp.fft.irfft`. All else is as in `ifft`.

    Args:
      x: The half spectrum.
      pattern: `"layout -> layout"`.
      pad: Whether the spectrum has more entries than frequencies, as `rfft(..., pad=True)` makes it. The first
        n // 2 + 1 are transformed back, and those behind them are ignored. The size n must then be given.
      norm: As given to `rfft`.
      to: As in `all_gather`, the type of a result that the right side gathers.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The array, real, in the layout of the right side.

    Raises:
      LayoutError: As `fft`.
      SizeError: As `fft`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("x/a y -> x/a y", mesh=mesh)
      ... def there_and_back(x):
      ...     return spmd.fft.irfft(spmd.fft.rfft(x, "x/a y -> kx ky/a"), "kx ky/a -> x/a y", y=7)
      >>> there_and_back(jnp.ones((4, 7))).shape
      (4, 7)
    """
    return _transform("fft.irfft", x, pattern, names, norm=norm, to=to, pad=pad)


def dct(
    x: Any, pattern: str, /, *, type: int = 2, norm: Norm = "backward", to: To | None = None, **names: Any
) -> jax.Array:
    """The discrete cosine transform along each renamed dimension: `dct(u, "x/a y z -> kx y/a z")`.

    It is the Fourier transform of a function that is even at the walls at both ends of a dimension (its derivative is
    zero there). Types are numbered as in `scipy.fft`: I has elements on the walls, II has walls half an element beyond
    the first and the last element, III is the inverse of II up to a factor, and IV is even at the first wall and odd at
    the last one. Without a norm, type II is `2 sum_n x[n] cos(pi k (2 n + 1) / (2 N))`. A real array stays real. Of a
    complex one the real and the imaginary parts are transformed. Periodic and walled dimensions mix:
    `fft.rfft(fft.dct(u, "x y/a z -> x y/a kz"), "x y/a kz -> kx/a ky kz")`.

    Communication: as `fft`, in numbers of the array's own type: half the bytes of a complex transform. Backward the
    same in reverse.

    Args:
      x: The array, real or complex.
      pattern: `"layout -> layout"`, with the dimensions in the same order. Those with a new name are transformed.
      type: 1, 2, 3 or 4.
      norm: "backward" (no factor forward), "ortho" (the matrix is orthogonal) or "forward", as in `scipy.fft`.
      to: As in `all_gather`, the type of a result that the right side gathers.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The transform, in the layout of the right side. Its dtype is that of x; half precision becomes float32.

    Raises:
      LayoutError: As `fft`, and if there is no such type.
      SizeError: As `fft`, and if a dimension of one element has two walls on elements (type 1).

    Example:
      >>> import jax.numpy as jnp, numpy as np, scipy.fft, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> x = jnp.arange(8 * 4.0).reshape(8, 4)
      >>> @spmd.kernel("x/a y -> kx y/a", mesh=mesh)
      ... def cosines(x):
      ...     return spmd.fft.dct(x, "x/a y -> kx y/a")
      >>> np.allclose(cosines(x), scipy.fft.dct(x, axis=0), atol=1e-3)
      True

    References:
      G. Strang, The discrete cosine transform, SIAM Review 41 (1999). J. Makhoul, A fast cosine transform in one and
      two dimensions, IEEE Trans. ASSP 28 (1980).
    """
    return _transform("fft.dct", x, pattern, names, norm=norm, to=to, type=type)


def idct(
    x: Any, pattern: str, /, *, type: int = 2, norm: Norm = "backward", to: To | None = None, **names: Any
) -> jax.Array:
    """The inverse of `dct` of the same type: `idct(f, "kx y/a z -> x/a y z")`.

    Layouts, communication and dtypes as in `dct`.

    Args:
      x: The array of coefficients.
      pattern: `"layout -> layout"`, dimensions in the same order, the renamed ones transformed.
      type: As given to `dct`.
      norm: As given to `dct`.
      to: As in `all_gather`, the type of a result that the right side gathers.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The array, in the layout of the right side.

    Raises:
      LayoutError: As `dct`.
      SizeError: As `dct`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("x/a y -> x/a y", mesh=mesh)
      ... def there_and_back(x):
      ...     return spmd.fft.idct(spmd.fft.dct(x, "x/a y -> kx ky/a"), "kx ky/a -> x/a y")
      >>> print(abs(there_and_back(jnp.eye(4)).round(3)).tolist()[1])
      [0.0, 1.0, 0.0, 0.0]
    """
    return _transform("fft.idct", x, pattern, names, norm=norm, to=to, type=type)


def dst(
    x: Any, pattern: str, /, *, type: int = 2, norm: Norm = "backward", to: To | None = None, **names: Any
) -> jax.Array:
    """The discrete sine transform along each renamed dimension: `dst(u, "x/a y z -> kx y/a z")`.

    It is the Fourier transform of a function that is odd at the walls at both ends of a dimension (it is zero there).
    Types are numbered as in `scipy.fft`: I has walls one element beyond the first and the last element, II half an
    element beyond them, III is the inverse of II up to a factor, and IV is odd at the first wall and even at the last
    one. All else is as in `dct`.

    Args:
      x: The array, real or complex.
      pattern: `"layout -> layout"`, with the dimensions in the same order. Those with a new name are transformed.
      type: 1, 2, 3 or 4.
      norm: As in `dct`.
      to: As in `all_gather`, the type of a result that the right side gathers.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The transform, in the layout of the right side. Its dtype is that of x; half precision becomes float32.

    Raises:
      LayoutError: As `dct`.
      SizeError: As `fft`.

    Example:
      A Poisson equation between walls at which u is zero:

      >>> import jax.numpy as jnp, numpy as np, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("x/a y -> x/a y", mesh=mesh)
      ... def solve(f):
      ...     f = spmd.fft.dst(f, "x/a y -> kx ky/a", type=1)
      ...     kx, ky = spmd.iota("kx", kx=8, dtype=float), spmd.iota("ky/a", ky=8, dtype=float)
      ...     kx, ky = (2 * jnp.cos(jnp.pi * (k + 1) / 9) for k in (kx, ky))
      ...     f = f / (kx[:, None] + ky[None] - 4)
      ...     return spmd.fft.idst(f, "kx ky/a -> x/a y", type=1)
      >>> u = np.pad(solve(jnp.ones((8, 8))), 1)
      >>> laplace = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
      >>> np.allclose(laplace, 1, atol=1e-4)
      True
    """
    return _transform("fft.dst", x, pattern, names, norm=norm, to=to, type=type)


def idst(
    x: Any, pattern: str, /, *, type: int = 2, norm: Norm = "backward", to: To | None = None, **names: Any
) -> jax.Array:
    """The inverse of `dst` of the same type: `idst(f, "kx y/a z -> x/a y z")`.

    Layouts, communication and dtypes as in `dct`.

    Args:
      x: The array of coefficients.
      pattern: `"layout -> layout"`, dimensions in the same order, the renamed ones transformed.
      type: As given to `dst`.
      norm: As given to `dst`.
      to: As in `all_gather`, the type of a result that the right side gathers.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The array, in the layout of the right side.

    Raises:
      LayoutError: As `dst`.
      SizeError: As `dst`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("x/a y -> x/a y", mesh=mesh)
      ... def there_and_back(x):
      ...     return spmd.fft.idst(spmd.fft.dst(x, "x/a y -> kx ky/a"), "kx ky/a -> x/a y")
      >>> print(abs(there_and_back(jnp.eye(4)).round(3)).tolist()[1])
      [0.0, 1.0, 0.0, 0.0]
    """
    return _transform("fft.idst", x, pattern, names, norm=norm, to=to, type=type)


# --- one transform -----------------------------------------------------------------------------------------


_PLAIN: dict[str, Any] = {"norm": "backward", "to": None, "pad": False, "type": 2}  # keywords that nobody gives
_SINES = {"fft.dct": False, "fft.idct": False, "fft.dst": True, "fft.idst": True}


def _wall(call: Call, kind: Any) -> Wall | None:
    """The transform between walls that is called; None for those of periodic arrays."""
    if call.name not in _SINES:
        return None
    if not_int("type", kind) or kind not in TYPES:
        call.fail(f"type is 1, 2, 3 or 4, not {kind!r}.")
    return Wall(_SINES[call.name], kind, call.name.startswith("fft.i"))


def _transform(who: str, x: Any, pattern: Any, names: dict[str, Any], **given: Any) -> Any:
    how = {**_PLAIN, **given}
    also = {key: value for key, value in how.items() if value != _PLAIN[key]}
    example = f'{who}(x, "b/dp d -> b/dp k")'
    call = open_call(who, pattern, names, arrays=(x,), example=example, also=also)
    call.type_copies(how["to"])
    if how["norm"] not in NORMS:
        call.fail(not_one_of("norm", how["norm"], NORMS))
    norm = None if how["norm"] == "backward" else how["norm"]  # with that word `jnp.fft` multiplies by one
    wall = _wall(call, how["type"])
    operand = call.operand(x)
    x = _inexact(call, operand.x)
    named = job_of(call, operand, x.dtype, renamed_dims(call), how["pad"], wall)
    job = named.of_wide_axes()  # a dimension with one block is whole
    with call.scope(), call.hidden():
        stages = route(job)
        if not _in_place(named) and (stages if job == named else route(named)) is None:
            _nowhere(call, named)  # decided by names, so that it is an error on every mesh
        if stages is not None:
            return call.result(_Walk(call, job, named, operand.names, norm, wall).walked(x, stages))
        sizes = factors(named.before[-1], named.parts(named.source[-1]))
        return call.result(in_two_factors(x, sizes, named.source[-1], inverse=who == "fft.ifft", norm=norm))


def _in_place(job: Job) -> bool:
    """Return whether the array has one dimension that is divided, the transformed one, alike on both sides."""
    alone = job.moved == {len(job.source) - 1} and not any(job.source[:-1])
    return alone and not job.real and job.source == job.target


def _nowhere(call: Call, job: Job) -> NoReturn:
    rule = (
        "a dimension must be whole while it is transformed, and no other dimension here can take over its axes. The "
        "only dimension of an array stays in place if it is complex and both sides divide it alike."
    )
    got = [f'"{call.src.short}", of size {job.before[-1]}', call.frame.describe()]
    call.fail(rule, got=got, advice="gather it first, or give the array another dimension")


def _inexact(call: Call, x: Any) -> Any:
    """Numbers that XLA transforms: smaller floats become float32, integers and booleans JAX's default float."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        if call.name == "fft.rfft":
            fix = call.paste(call.src, call.dst, name="fft.fft")
            call.fail("rfft is for real arrays.", got=[f"dtype {x.dtype}"], fix=fix)
        return x
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.result_type(float)
    return x if x.dtype in (jnp.float32, jnp.float64) else x.astype(wide)


class _Walk:
    """The stages of one transform, on arrays.

    The dimension that is transformed next is the last one in memory. An exchange copies the array anyway, and its
    pieces are joined where the transform reads them.
    """

    def __init__(self, call: Call, job: Job, named: Job, names: tuple[str, ...], norm: Any, wall: Wall | None) -> None:
        self.call, self.job, self.named = call, job, named
        self.names, self.norm, self.wall = names, norm, wall
        self.order = tuple(range(len(names)))  # which dimension each axis of the array is
        self.padded: dict[int, tuple[str, ...]] = {}  # padded dimensions, and the axes that they had then
        self.whole = call.frame.mode == "reference"

    def walked(self, x: Any, stages: tuple[Stage, ...]) -> Any:
        """All stages. In auto mode they are one island, because XLA of jax 0.10 gathers for a transform."""
        if self.call.frame.mode != "auto":
            return self.run(x, stages, self.call.to)
        ends = self.written(self.named.source), self.written(self.named.target, self.order)
        return _local(functools.partial(self.run, stages=stages, to="invarying"), " -> ".join(ends))(x)

    def run(self, x: Any, stages: tuple[Stage, ...], to: To) -> Any:
        at = self.job.source
        left = set(self.job.moved)
        for stage in stages:
            if stage.to is None:
                left -= set(stage.moved)
                x = self.plain(stage.moved)(x)
            else:
                x = self.go(x, at, stage, left, to)
                at = stage.to
        if self.placed(at) != self.named.target and not self.whole:
            x = _relayout(x, f"{self.text(at)} -> {self.written(self.named.target)}", to=to)
        return transposed(x, tuple(self.order.index(i) for i in range(x.ndim)))  # in their own order again

    def go(self, x: Any, at: tuple[Any, ...], stage: Stage, left: set[int], to: To) -> Any:
        """A change of layout, between padding and cropping where a dimension does not divide."""
        assert stage.to is not None
        if self.whole:
            return x
        true = [b if i in left else a for i, (b, a) in enumerate(zip(self.job.before, self.job.after, strict=True))]
        pads = {i: (m, n) for i, (n, m) in enumerate(zip(stage.sizes, true, strict=True)) if n > m}
        entering = [i for i in pads if i not in self.padded]
        self.padded |= {i: at[i] for i in entering}
        x = self.resized(x, at, {i: pads[i][1] for i in entering})
        x = self.moved(x, at, stage.to, [i for i in sorted(left) if at[i] and not stage.to[i]], to)
        leaving = [i for i in pads if self.padded[i] == stage.to[i]]
        self.padded = {i: axes for i, axes in self.padded.items() if i not in leaving}
        return self.resized(x, stage.to, {i: pads[i][0] for i in leaving})

    def resized(self, x: Any, at: tuple[Any, ...], sizes: dict[int, int]) -> Any:
        """Each block with zeros added or entries removed at its end, so that the dimensions have these sizes."""

        shape = list(x.shape)
        for i, size in sizes.items():
            shape[self.order.index(i)] = size // self.job.parts(at[i])
        x = jax.lax.slice(x, [0] * x.ndim, [min(n, m) for n, m in zip(x.shape, shape, strict=True)])
        return jnp.pad(x, [(0, m - n) for n, m in zip(x.shape, shape, strict=True)]) if sizes else x

    def moved(self, x: Any, at: tuple[Any, ...], then: tuple[Any, ...], freed: list[int], to: To) -> Any:
        """From one placement to another. The dimensions that are freed to be transformed become the last ones."""
        order = (*(i for i in self.order if i not in freed), *freed)
        x = x.transpose([self.order.index(i) for i in order])
        self.order = order
        changed = [i for i in order if at[i] != then[i]]
        for giver, taker in (changed, changed[::-1]) if len(changed) == 2 else ():
            axes = at[giver][len(then[giver]) :]
            simple = at[giver] == (*then[giver], *axes) and then[taker] == (*at[taker], *axes)
            if simple and 1 < self.job.parts(axes) <= JOINED:
                pieces = cut(x, self.job.parts(axes), order.index(taker))
                return joined(_lax.all_to_all(pieces, axes, 0, 0), order.index(giver))
        return _relayout(x, f"{self.text(at)} -> {self.text(then)}", to=to)

    def plain(self, dims: tuple[int, ...]) -> Callable[[Any], Any]:
        half, real, norm = self.job.half, self.job.real, self.norm
        place = self.order.index
        if self.wall is not None:
            along = functools.partial(self.wall.along_last, norm=norm)
            one = lambda x, i: transformed(lambda x, axes: along(x), x, [place(i)])
            return lambda x: functools.reduce(one, dims, x)
        if half in dims and real == "first":
            extra = self.job.after[half] - (self.job.before[half] // 2 + 1)

            def halved(x: Any) -> Any:
                x = transformed(functools.partial(jnp.fft.rfftn, norm=norm), x, [place(half)])
                return jnp.pad(x, [(0, extra * (i == place(half))) for i in range(x.ndim)]) if extra else x

            return halved
        inverse = self.call.name in ("fft.ifft", "fft.irfft")
        rest = sorted(place(i) for i in dims if i != half or real != "last")
        many = jnp.fft.ifftn if inverse else jnp.fft.fftn

        def run(x: Any) -> Any:
            if rest:
                x = transformed(functools.partial(many, norm=norm), x, rest)
            if half in dims and real == "last":
                n = self.job.after[half]
                x = jax.lax.slice_in_dim(x, 0, n // 2 + 1, axis=place(half))
                x = transformed(functools.partial(jnp.fft.irfftn, s=(n,), norm=norm), x, [place(half)])
            return x

        return run

    def text(self, at: tuple[Any, ...]) -> str:
        """The layout of a placement, with names of our own."""
        return self.written(self.placed(at))

    def placed(self, at: tuple[Any, ...]) -> tuple[Any, ...]:
        """A placement with the axes of size 1, which stay where the source has them until the end."""
        units = (tuple(a for a in axes if self.job.parts((a,)) == 1) for axes in self.named.source)
        ends = zip(self.job.source, self.named.source, units, at, strict=True)
        return tuple(written if now == wide else (*unit, *now) for wide, written, unit, now in ends)

    def written(self, at: tuple[Any, ...], renamed: Collection[int] = ()) -> str:
        names = [f"{'e' if i in renamed else 'd'}{i}" for i in range(len(self.names))]
        words = ["..." if self.names[i].startswith("...") else "/".join((names[i], *at[i])) for i in self.order]
        return " ".join(dict.fromkeys(words))
