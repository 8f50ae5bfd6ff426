"""Where am I? Sizes, blocks and places on the mesh, in terms that all three modes understand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from spmd import _lax
from spmd._leaves import kind_of
from spmd.comm._call import Call, open_call
from spmd.errors import LayoutError, MeshError, ModeError
from spmd.language import Dim, check_axes
from spmd.modes import Frame, current_frame
from spmd.ops._create import index_dtype

Axes = str | tuple[str, ...]


@overload
def size(layout: str, /, **names: Any) -> int: ...
@overload
def size(x: Any, layout: str, /, **names: Any) -> int: ...
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
        factors = [factor for factor in call.operand(x, margins=True).factors if factor.bracket]
        if sum(dim.bracket for dim in call.pattern.inputs[0].dims) != 1:
            call.fail(
                "size asks for one dimension of the array: put it in brackets.",
                advice='as in size(x, "... [d]")',
                error=LayoutError,
            )
        return math.prod(factor.size for factor in factors)
    call, dim = one_dimension("size", args[0], names)
    return math.prod(call.factor(atom).size for atom in dim.atoms)


def local_size(layout: str, /, **names: Any) -> int:
    """How much of a dimension an array holds here: `local_size("b/dp")`.

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
        call.fail(rule, at=fault.span, fix=f'spmd.iota("{layout}")', error=LayoutError)
    here = math.prod(call.factor(atom).local for atom in dim.atoms)
    if not call.frame.explicit or not first.axes:
        return 0
    dtype = index_dtype(call, dim)
    index = _lax.axis_index(first.axes, dict(call.frame.sizes))
    return jnp.asarray(index, dtype) * np.asarray(here, dtype)


def axis_size(axes: Axes) -> int:
    """The number of devices along a mesh axis, or along several together: `axis_size("tp")`.

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
    frame = current_frame("spmd.axis_size")
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
        call.fail(f"{who} asks for one dimension.", advice=advice, error=LayoutError)
    [dim] = asked.dims
    if dim.ellipsis or any(atom.name == "_" for atom in dim.atoms):
        call.fail("a dimension without a name has no size of its own.", at=dim.span, error=LayoutError)
    if any(dim.margin):
        plain = asked.from_dims([Dim(dim.atoms, composite=dim.composite)]).short
        rule = f"{who} counts the dimension itself, without the copies in its margins."
        call.fail(rule, at=dim.span, fix=f'spmd.{who}("{plain}")', error=LayoutError)
    return call, dim
