"""Where am I? Sizes, blocks and places on the mesh, in terms that all three modes understand."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd import _compat
from spmd._jaxprs.lines import called_at, is_outside
from spmd._trees.arguments import explained
from spmd._trees.leaves import kind_of
from spmd.comm import _lax
from spmd.comm._call import Call, Factor, To, open_call
from spmd.comm._keywords import as_array, check_array
from spmd.errors import Fix, LayoutError, MeshError, ModeError, SizeError
from spmd.language import Atom, Dim, Layout, check_axes
from spmd.modes import Frame, counting, current_frame
from spmd.ops._reduce import placed, plain_dims

# --- arrays made from a layout alone: `zeros`, `ones`, `full`, `iota` -------------------------------------------------


@explained
def zeros(layout: str, /, dtype: Any = None, *, to: To | None = None, **names: Any) -> jax.Array:
    """Zeros of this layout: `zeros("b/dp d")`, for accumulators and for carries of loops.

    Sizes come from the kernel's signature or from keywords. JAX types the value varying along the axes that the layout
    mentions. A loop's new carry has that type too, which is why JAX rejects a plain `jnp.zeros` as the first one.

    Communication: none, forward and backward.

    Args:
      layout: The layout of the result. `{U:axis}` makes the start of a partial sum, `{R:axis}` the start of a carry
        that becomes a gathered copy over this axis.
      dtype: Its dtype. The default is that of `jnp.zeros`: float32, or float64 if `jax_enable_x64` is set.
      to: "varying" types it varying along every mesh axis. It must then be reduced before it leaves the kernel.
      **names: Sizes of names (`d=64`), or mesh axes (`tp="model"`).

    Returns:
      The array: this device's block of it in explicit mode.

    Raises:
      SizeError: If the size of a name is not known, or does not divide.
      LayoutError: On a malformed layout.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("t b/dp -> b/dp", mesh=mesh)
      ... def totals(x):
      ...     return jax.lax.scan(lambda sum, row: (sum + row, None), spmd.zeros("b/dp"), x)[0]
      >>> print(totals(jnp.ones((3, 8))))
      [3. 3. 3. 3. 3. 3. 3. 3.]
    """
    return _filled("zeros", layout, 0, float if dtype is None else dtype, to, names)


@explained
def ones(layout: str, /, dtype: Any = None, *, to: To | None = None, **names: Any) -> jax.Array:
    """Ones of this layout: `ones("b/dp d")`.

    Works as `zeros`, but a `{U:}` mark is an error, because the sum of n ones is n.

    Communication: none, forward and backward.

    Args:
      layout: The layout of the result.
      dtype: Its dtype. The default is that of `jnp.ones`.
      to: "varying" types it varying along every mesh axis.
      **names: Sizes of names (`d=64`), or mesh axes (`tp="model"`).

    Returns:
      The array: this device's block of it in explicit mode.

    Raises:
      SizeError: If the size of a name is not known, or does not divide.
      LayoutError: On a malformed layout.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> print(spmd.kernel("n/x -> n/x", mesh=mesh)(lambda v: v + spmd.ones("n/x"))(jnp.zeros(8)))
      [1. 1. 1. 1. 1. 1. 1. 1.]
    """
    return _filled("ones", layout, 1, float if dtype is None else dtype, to, names)


@explained
def full(layout: str, /, value: Any, dtype: Any = None, *, to: To | None = None, **names: Any) -> jax.Array:
    """An array of this layout with one value everywhere: `full("b/dp q", -jnp.inf)`.

    Communication: none forward. Backward the gradient of `value` is a psum over the axes of the layout.

    Args:
      layout: The layout of the result.
      value: A scalar: a number or an array of rank 0. It may be traced.
      dtype: Its dtype. The default is that of `value`.
      to: "varying" types it varying along every mesh axis.
      **names: Sizes of names (`d=64`), or mesh axes (`tp="model"`).

    Returns:
      The array: this device's block of it in explicit mode.

    Raises:
      SizeError: If the size of a name is not known, or does not divide.
      LayoutError: On a malformed layout, or a value that is not a scalar.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> print(spmd.kernel("n/x -> n/x", mesh=mesh)(lambda v: v + spmd.full("n/x", 0.5))(jnp.zeros(4)))
      [0.5 0.5 0.5 0.5]
    """
    return _filled("full", layout, value, dtype, to, names)


@explained
def iota(layout: str, /, dtype: Any = jnp.int32, **names: Any) -> jax.Array:
    """Global positions along a dimension. Each device has those of its own block.

    `iota("s/cp")` counts 0, 1, ... over the whole of s. If there are several dimensions, brackets choose one:
    `iota("b/dp [s/cp]")`. A `jnp.arange` of the local length would start at 0 on every device.

    Communication: none, forward and backward.

    Args:
      layout: One dimension, or several with one in brackets.
      dtype: The dtype of the positions. The default is int32 even if `jax_enable_x64` is set, as for `offset` and JAX's
        `axis_index`.
      **names: Sizes of names (`s=1024`), or mesh axes (`cp="context"`).

    Returns:
      The positions.

    Raises:
      SizeError: If the size of a name is not known, or does not divide, or positions do not fit the dtype.
      LayoutError: If it is not clear which dimension is meant.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> print(spmd.kernel("s/cp -> s/cp", mesh=mesh)(lambda x: x + spmd.iota("s/cp"))(jnp.zeros(8, int)))
      [0 1 2 3 4 5 6 7]
    """
    call = open_made("iota", layout, names)
    made = call.src
    at = counted(call, made)
    if any(made.dims[at].margin):
        call.fail("iota has no meaning for a margin.", at=made.dims[at].span)
    shape = call.local_shape(made)
    x = jax.lax.broadcast_in_dim(positions(call, made.dims[at], dtype), shape, (at,))
    x = _compat.pvary(x, call.frame.in_mesh_order(made.axis_names)) if call.frame.explicit else x
    return call.result(x, made.without_brackets(), role="created")


def counted(call: Call, made: Layout) -> int:
    """The dimension along which positions are counted: the only one, or the one in brackets."""
    found = [i for i, dim in enumerate(made.dims) if dim.bracket] or list(range(len(made.dims)))
    if len(found) != 1:
        rule = f'{call.name} counts along one dimension: put it in brackets, as in "b/dp [s/cp]".'
        call.fail(rule, got=[f"{len(made.dims)} dimensions"])
    return found[0]


def positions(call: Call, dim: Dim, dtype: Any) -> Any:
    """Global positions along one dimension, built factor by factor, since each factor's block has its own start."""
    whole = math.prod(call.factor(atom).size for atom in dim.atoms)
    if jnp.issubdtype(dtype, jnp.integer) and whole - 1 > jnp.iinfo(dtype).max:
        wide = index_dtype(call, dim)
        rule = f"positions up to {whole - 1} do not fit {jnp.dtype(dtype).name}."
        call.fail(rule, at=dim.span, fix=f"dtype=jnp.{jnp.dtype(wide).name}", error=SizeError)
    total: Any = None
    for atom in dim.atoms:
        factor: Factor = call.factor(atom)
        here = jnp.arange(factor.local, dtype=dtype)
        if call.frame.explicit and factor.axes:
            here = here + call.start(factor).astype(dtype)
        total = here if total is None else (total[:, None] * np.asarray(factor.size, dtype) + here[None, :]).reshape(-1)
    return total


def index_dtype(call: Call, dim: Dim) -> Any:
    """The dtype of positions along a dimension."""
    whole = math.prod(call.factor(atom).size for atom in dim.atoms)
    return call.index_dtype(whole, Layout.from_dims((dim,)).short, dim.span)


def open_made(who: str, layout: Any, names: Mapping[str, Any]) -> Call:
    if not isinstance(layout, str) and hasattr(layout, "shape"):
        raise LayoutError(f'{who} makes an array, so its first argument is a layout: {who}("b/dp d").')
    call = open_call(who, layout, names, inputs=1, arrow=False, example=f'{who}("b/dp", b=8)')
    made = call.src
    for dim in made.dims:
        if dim.ellipsis or any(atom.name == "_" for atom in dim.atoms):
            call.fail(f"{who} needs to know every size, so every dimension has a name.", at=dim.span)
    return call


def _filled(who: str, layout: Any, value: Any, dtype: Any, to: str | None, names: Mapping[str, Any]) -> Any:
    call = open_made(who, layout, names)
    made = call.src
    if np.ndim(value) != 0:
        call.fail(f"the value is a scalar, not an array of shape {np.shape(value)}.")
    check_array(value, "the value", call.fail, dtype)
    if to not in (None, "varying"):
        call.fail(f'to is "varying" or absent, not {to!r}.')
    if made.unreduced and not (isinstance(value, (int, float)) and value == 0):
        n = call.frame.axis_size(made.unreduced)
        rule = f"a partial sum starts from zeros: {n} equal parts would add up to {n} times the value."
        call.refuse(rule, at=call.mark_span("{"), advice=f'as in zeros("{made.short}")')
    x = jnp.full(call.local_shape(made), value, dtype)
    if call.frame.explicit:
        axes = call.frame.axis_names if to == "varying" else call.frame.in_mesh_order(made.axis_names)
        x = _compat.pvary(x, axes)
    return call.result(x, made.without_brackets(), role="created")


Axes = str | tuple[str, ...]


@overload
def size(layout: str, /, **names: Any) -> int: ...
@overload
def size(x: Any, layout: str, /, **names: Any) -> int: ...
@explained
def size(*args: Any, **names: Any) -> int:
    """The global size of a dimension, whatever its `.shape` is here: `size("b")`, `size(x, "... [v/tp]")`.

    If an array comes first, the size of the dimension in brackets is read off the array. That is for library functions,
    which know the layouts of their arguments and not the signature of the kernel.

    Communication: none.

    Args:
      *args: One dimension whose names the kernel's signature binds: `"b"`, or a composite, `"(h k)"`, for the product.
        Or an array and its layout, with one dimension in brackets.
      **names: Sizes of names that the signature does not bind, and mesh axes (`tp="model"`).

    Returns:
      A Python int, the same in every mode and on every mesh.

    Raises:
      SizeError: If the size of a name is not known.
      LayoutError: If the string is not one dimension, or, after an array, does not have one in brackets.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("b/dp d -> scalar", mesh=mesh)
      ... def mean(x):
      ...     assert spmd.size(x, "[b/dp] d") == spmd.size("b")
      ...     return spmd.einsum(x, "b/dp d -> scalar") / (spmd.size("b") * spmd.size("d"))
      >>> print(mean(jnp.ones((8, 3))))
      1.0
    """
    if len(args) not in (1, 2):
        raise LayoutError(
            f"size takes a dimension, or an array and its layout, not {len(args)} arguments.",
            advice='as in size("b"), or size(x, "b/dp [d]")',
        )
    if len(args) == 2:
        x, layout = args
        call = open_call("size", layout, names, arrays=(x,), arrow=False, example='size(x, "[b/dp] d")', also={})
        operand = call.operand(x, margins=True)
        if sum(dim.bracket for dim in operand.layout.dims) != 1:
            rule = "size asks for one dimension of the array: put it in brackets."
            call.fail(rule, advice='as in size(x, "... [d]")')
        return math.prod(factor.size for factor in operand.factors if factor.bracket)
    call, dim = one_dimension("size", args[0], names)
    return math.prod(call.factor(atom).size for atom in dim.atoms)


def local_size(layout: str, /, **names: Any) -> int:
    """Return how much of a dimension an array holds here: `local_size("b/dp")`.

    In explicit mode this is one device's block. In the other modes arrays are whole, and it is the global size. It is
    the size in `.shape` of an array of that layout.

    Communication: none.

    Args:
      layout: One dimension, `"b/dp"`.
      **names: Sizes of names that the signature does not bind, and mesh axes (`dp="data"`).

    Returns:
      A Python int.

    Raises:
      SizeError: If the size of a name is not known, or does not divide.
      LayoutError: If the string is not one dimension.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("b/dp -> b/dp", mesh=mesh)
      ... def sizes(x):
      ...     return 0 * x + spmd.local_size("b/dp")
      >>> print(sizes(jnp.zeros(8, int)), sizes.reference(jnp.zeros(8, int)))
      [2 2 2 2 2 2 2 2] [8 8 8 8 8 8 8 8]
    """
    call, dim = one_dimension("local_size", layout, names)
    return math.prod(call.factor(atom).local for atom in dim.atoms)


def offset(layout: str, /, **names: Any) -> jax.Array | int:
    """The global position at which the local block starts: `offset("v/tp")`.

    In the modes on whole arrays it is 0, so `ids - offset("v/tp")` means the same in all modes. For the positions of a
    whole block use `iota`.

    Communication: none.

    Args:
      layout: One dimension, `"v/tp"`. Of a composite, only the leading factor may be divided.
      **names: Sizes of names that the signature does not bind, and mesh axes (`tp="model"`).

    Returns:
      An int32 scalar, different along the axes that divide the dimension, or the int 0 if it is whole. Beyond 2^31
      elements it is int64, which needs `jax_enable_x64`.

    Raises:
      SizeError: If the size of a name is not known, or does not divide.
      LayoutError: If the string is not one dimension, or its blocks are scattered, as in `"(b/dp s/cp)"`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> @spmd.kernel("v/tp -> v/tp", mesh=mesh)
      ... def starts(x):
      ...     return 0 * x + spmd.offset("v/tp")
      >>> print(starts(jnp.zeros(8, int)))
      [0 0 2 2 4 4 6 6]
    """
    call, dim = one_dimension("offset", layout, names)
    first, rest = dim.atoms[0], dim.atoms[1:]
    fault = next((atom for atom in rest if atom.axes), None)
    if fault is not None:
        rule = "the blocks of this dimension are scattered, so there is no one place where a block starts."
        call.fail(rule, at=fault.span, fix=Fix("iota", (), f"{layout}", call.given))
    factors = [call.factor(atom) for atom in dim.atoms]
    if not call.frame.explicit or not first.axes:
        return 0
    here = math.prod(factor.local for factor in factors)
    whole = math.prod(factor.size for factor in factors)
    return call.start(Factor(Layout.from_dims((dim,)).short, first.axes, here, whole, span=dim.span))


def axis_size(axes: Axes) -> int:
    """The number of devices along a mesh axis, or along several together: `axis_size("tp")`.

    In auto and reference mode arrays are whole, and the number is the same. A loop of so many rounds, or a division by
    it, then computes something else than on devices, unless blocks are a dimension of the array, as in
    `rearrange(x, "(c n)/a -> c/a n", c=axis_size("a"))`. Numbers that differ are an error there.

    Communication: none.

    Args:
      axes: A mesh axis or a tuple of them, under the names that the kernel's strings use.

    Returns:
      A Python int, the same in every mode.

    Raises:
      MeshError: If the mesh has no such axis.
      ModeError: Outside a kernel.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> @spmd.kernel("scalar -> scalar", mesh=mesh)
      ... def count(x):
      ...     return x + spmd.axis_size(("dp", "tp"))
      >>> print(count(0))
      8
    """
    frame, lines = current_frame("spmd.axis_size"), counting.get()
    if lines is not None and not frame.explicit and is_outside(sys._getframe(1).f_code.co_filename):
        lines[called_at()] = None  # our own layers are the same in all modes
    return frame.axis_size(named_axes(axes, frame, f"axis_size({axes!r})"))


def axis_index(axes: Axes) -> jax.Array:
    """This device's place along a mesh axis, or along several axes together, the first of which is the major one.

    Only per-shard code has a place. In auto and reference mode a body sees whole arrays, and this is an error outside
    an island (`local`). `iota`, `shift` and `offset` do most of what it is used for in a way that all modes understand.

    Communication: none.

    Args:
      axes: A mesh axis or a tuple of them, under the names that the kernel's strings use.

    Returns:
      An int32 scalar that differs along these axes.

    Raises:
      MeshError: If the mesh has no such axis.
      ModeError: If the body sees whole arrays, or outside a kernel.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("b/dp -> b/dp", mesh=mesh)
      ... def rank(x):
      ...     return 0 * x + spmd.axis_index("dp")
      >>> print(rank(jnp.zeros(8, int)))
      [0 0 1 1 2 2 3 3]
    """
    call = f"axis_index({axes!r})"
    frame = current_frame("spmd.axis_index")
    order = named_axes(axes, frame, call)
    if not frame.explicit:
        rule = f"in {frame.mode} mode the body sees whole arrays, so it has no index along {', '.join(order)}."
        advice = (
            'iota("c/cp") for the numbers of blocks, offset("s/cp") for where this block starts, '
            'shift(x, "b [c/cp] l", 1) for the neighbour\'s;\n'
            'else local(fn, "in -> out") around the per-shard code'
        )
        raise ModeError(rule, call=call, advice=advice)
    return jnp.asarray(_lax.axis_index(order, dict(frame.sizes)), jnp.int32)


def named_axes(axes: Any, frame: Frame, call: str) -> tuple[str, ...]:
    """The mesh axes that the caller names, after the renames of the kernel's `axes=`."""
    given = (axes,) if isinstance(axes, str) else axes
    if not isinstance(given, (tuple, list)) or not all(isinstance(a, str) for a in given):
        rule = f"a mesh axis is a str, or several a tuple of str, not {kind_of(axes)}."
        raise MeshError(rule, call=call)
    out = frame.renamed(given)
    check_axes(out, dict(frame.sizes), call=call)
    if len(set(out)) < len(out):
        raise MeshError("a mesh axis is named twice.", call=call, got=[", ".join(out)])
    return out


def one_dimension(who: str, layout: Any, names: Mapping[str, Any]) -> tuple[Call, Dim]:
    """The call, and its one dimension."""
    call = open_call(who, layout, names, inputs=1, arrow=False, example=f'{who}("b/dp")')
    [asked] = call.pattern.inputs
    if len(asked.dims) != 1 or asked.unreduced or asked.reduced:
        advice = f'as in {who}("{next(iter(asked.names), "b")}")'
        call.fail(f"{who} asks for one dimension.", advice=advice)
    [dim] = asked.dims
    if dim.ellipsis or any(atom.name == "_" for atom in dim.atoms):
        call.fail("a dimension without a name has no size of its own.", at=dim.span)
    if any(dim.margin):
        plain = asked.from_dims([Dim(dim.atoms, composite=dim.composite)]).short
        rule = f"{who} counts the dimension itself, without the copies in its margins."
        call.fail(rule, at=dim.span, fix=f'spmd.{who}("{plain}")')
    return call, dim


# --- grids of coordinates, of which each device makes its own part: `linspace`, `meshgrid`, `from_function` ----------


_EXAMPLE = 'meshgrid(x, y, "x/a, y/b -> x/a y/b")'


@explained
def linspace(
    start: Any, stop: Any, layout: str, /, *, endpoint: bool = True, dtype: Any = None, **names: Any
) -> jax.Array:
    """Evenly spaced numbers along a dimension: `linspace(0, 1, "x/a")`. Each device has those of its own block.

    Element i of n is `start + (stop - start) i / (n - 1)`, or with `i / n` if the end point is left out, as in
    `jnp.linspace`. The numbers are the same on every mesh, and both ends are exact.

    Communication: none forward. Backward the gradients of `start` and `stop` are a psum over the axes of the layout.

    Args:
      start: The first number, a scalar. It may be traced.
      stop: The last number, or with `endpoint=False` the one after it.
      layout: One dimension, or several with one in brackets, along which the numbers run.
      endpoint: Whether `stop` is one of the numbers.
      dtype: A floating-point dtype. The default is what `jnp.linspace` gives for start and stop.
      **names: Sizes of names (`x=64`), or mesh axes (`a="data"`).

    Returns:
      The numbers: this device's block in explicit mode.

    Raises:
      LayoutError: On a malformed layout, a start or stop that is not a scalar, or a dtype of integers.
      SizeError: If the size of a name is not known, or does not divide.

    Example:
      >>> import spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> print(spmd.kernel("-> x/a", mesh=mesh, x=8)(lambda: spmd.linspace(0, 2, "x/a", endpoint=False))())
      [0.   0.25 0.5  0.75 1.   1.25 1.5  1.75]
    """
    call = open_made("linspace", layout, names)
    made = call.src
    for what, value in (("start", start), ("stop", stop)):
        check_array(value, what, call.fail)
        if np.ndim(value) != 0:
            call.fail(f"{what} is a scalar, not an array of shape {np.shape(value)}.")
    dtype = _dtype_between(start, stop) if dtype is None else dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        advice = 'iota("x/a") counts in integers'
        call.fail(f"linspace makes floating-point numbers, not {jnp.dtype(dtype)}.", advice=advice)
    along = made.dims[counted(call, made)]
    steps = math.prod(call.factor(atom).size for atom in along.atoms) - endpoint
    wide = dtype if jnp.finfo(dtype).bits > 32 else jnp.float32
    first, last = (jnp.asarray(value, wide) for value in (start, stop))
    out = _between(iota(layout, index_dtype(call, along), **names), first, last, steps).astype(dtype)
    return call.result(out, made.without_brackets(), role="created")


def _dtype_between(start: Any, stop: Any) -> Any:
    """The dtype that `jnp.linspace` gives: it depends on both ends and on `jax_enable_x64`."""
    kinds = map(jax.typeof, (start, stop))
    ends = (jax.ShapeDtypeStruct((), kind.dtype, weak_type=kind.weak_type) for kind in kinds)
    return jax.eval_shape(lambda a, b: jnp.linspace(a, b, 2), *ends).dtype


@functools.partial(jax.jit, static_argnums=3)  # compiled even if the caller is not, so that all round alike
def _between(i: Any, first: Any, last: Any, steps: int) -> Any:
    """The numbers, rounded alike in every program. A compiler may round a product and a sum at once, so the products
    here are clipped. It may multiply by the inverse of a constant, so the divisor here is a sum of counts."""
    steps = max(steps, 1)
    most = jnp.finfo(first.dtype).max
    largest = jnp.maximum(abs(first), abs(last))
    scale = jnp.where(largest > most / (2 * steps), 0.5 ** (steps.bit_length() + 1), 1).astype(first.dtype)  # exact
    counts = [k.astype(first.dtype) for k in (steps - i, i)]
    parts = (jnp.clip(end * scale * k, -most, most) for end, k in zip((first, last), counts, strict=True))
    between = jnp.where(largest <= most, sum(parts) / sum(counts) / scale, jnp.nan)
    return jnp.where(i == 0, first, jnp.where(i == steps, last, between))


def meshgrid(*arrays: Any, sparse: bool = False, **names: Any) -> tuple[jax.Array, ...]:
    """Coordinates of a grid from those of its sides: `meshgrid(x, y, z, "x/a, y/b, z -> x/a y/b z")`.

    Result i is array i, repeated along the dimensions of the others. The right side says their order, which is what
    `indexing` does in `jnp.meshgrid`. With `sparse` the other dimensions have size 1, and the results broadcast.

    Communication: none forward. Backward the gradient of an array is the sum over the other dimensions: a psum over
    their axes if the array is equal on them by JAX's own type, and nothing with `sparse`.

    Args:
      *arrays: One array of one dimension for each dimension of the grid, then the pattern.
      sparse: Whether results keep size 1 along the other dimensions.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      A tuple of arrays, one for each of those given.

    Raises:
      LayoutError: If the pattern does not name one dimension per array on the left, and all of them on the right.
      CommunicationError: If the right side places a dimension otherwise.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=2, b=2)
      >>> @spmd.kernel("x/a, y/b -> x/a y/b", mesh=mesh)
      ... def radius(x, y):
      ...     xs, ys = spmd.meshgrid(x, y, "x/a, y/b -> x/a y/b")
      ...     return jnp.sqrt(xs**2 + ys**2)
      >>> print(radius(jnp.array([0.0, 3.0]), jnp.array([0.0, 4.0])))
      [[0. 4.]
       [3. 5.]]
    """
    *given, pattern = arrays or (None,)
    call = open_call("meshgrid", pattern, names, arrays=tuple(given), inputs=None, example=_EXAMPLE, also={})
    [grid] = call.pattern.outputs
    _check_sides(call, grid)
    order = [dim.atoms[0].name for dim in grid.dims]
    operands = [call.operand(x, i) for i, x in enumerate(given)]
    out = []
    for operand in operands:
        at = order.index(operand.names[0])
        x = lax.expand_dims(operand.x, [i for i in range(len(order)) if i != at])
        if sparse:
            dims = [dim if i == at else Dim((Atom("1", (), 1),)) for i, dim in enumerate(grid.dims)]
            out.append(call.result(x, Layout.from_dims(dims)))
            continue
        x = _compat.pvary(x, call.frame.in_mesh_order(grid.axis_names)) if call.frame.explicit else x
        out.append(call.result(jnp.broadcast_to(x, call.local_shape(grid)), grid, role="created"))
    return tuple(out)


def _check_sides(call: Call, grid: Layout) -> None:
    axes: dict[str, Any] = {}
    for layout in (*call.pattern.inputs, grid):
        plain_dims(call, layout)
        single = all(len(dim.atoms) == 1 and not dim.ellipsis for dim in layout.dims)
        if not single or layout.unreduced or layout.reduced or (layout is not grid and len(layout.dims) != 1):
            rule = "each array has one dimension with one name, and the grid has all of them."
            call.fail(rule, advice=f"as in {_EXAMPLE}")
        if layout is not grid:
            axes[layout.dims[0].atoms[0].name] = layout.dims[0].axes
    wanted = [dim.atoms[0].name for dim in grid.dims]
    if sorted(wanted) != sorted(axes) or len(axes) != len(call.pattern.inputs):
        rule = "the grid has the dimensions of the arrays, each once."
        call.fail(rule, got=[f"left: {', '.join(axes)}", f"right: {', '.join(wanted)}"])
    for dim in grid.dims:
        [name] = dim.names
        if dim.axes != axes[name]:
            one, two = placed(name, axes[name]), placed(name, dim.axes)
            rule = f"meshgrid moves nothing: {one} on the left is {two} on the right."
            call.refuse(rule, at=dim.span, advice=f'relayout(x, "{one} -> {two}") in a line of its own')


def from_function(fn: Callable[..., Any], layout: str, /, **names: Any) -> Any:
    """`from_function` inside a kernel."""
    call = open_made("from_function", layout, names)
    made = call.src
    if made.unreduced or made.reduced:
        call.fail("from_function makes complete values, without marks.")
    if not callable(fn):
        rule = f"fn is a function of positions, not {kind_of(fn)}."
        call.fail(rule, advice='as in from_function(lambda i, j: i + j, "x/a y")')
    shape = call.local_shape(made)
    places = [
        lax.expand_dims(positions(call, dim, index_dtype(call, dim)), [k for k in range(len(shape)) if k != i])
        for i, dim in enumerate(made.dims)
    ]
    try:
        inspect.signature(fn).bind(*places)
    except TypeError:
        rule = f"fn takes one array of positions for each dimension, {len(places)} here."
        call.fail(rule, got=[f"fn{inspect.signature(fn)}"], advice='lambda i, j: ... for "x/a y"')
    except ValueError:  # a builtin has no signature
        pass
    out = as_array(fn(*places), "what fn gives", call.fail)
    try:
        whole = jnp.broadcast_to(out, shape)
    except ValueError:
        rule = f"fn gives what broadcasts to {shape}, the shape here."
        call.fail(rule, got=[f"fn returned shape {out.shape}"], error=SizeError)
    axes = call.frame.in_mesh_order(made.axis_names)
    return call.result(_compat.pvary(whole, axes) if call.frame.explicit else whole, made, role="created")
