"""A kernel under `jax.vmap`, over a dimension that the mesh divides: each device keeps its part.

Outside of `jit` the arrays show how the mapped dimension lies, and JAX asks only `spmd_axis_name`. So the dimension is
lifted out of the user's `vmap`, mapped by one that knows the axes, and lowered again. Lifting and lowering are linear,
and each is the other's transpose: gradients may be taken around the `vmap`, inside of it, or both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from spmd import _compat
from spmd._compat import ad, batching


def divided(fn: Callable[..., Any], leaves: Sequence[Any], axes: tuple[str, ...], sizes: dict[str, int]) -> Any:
    """`fn(leaves)` under the one `vmap` around it, with these axes dividing the mapped dimension; None if they cannot.

    Args:
      fn: A function of a list of arrays.
      leaves: Its arguments, as the `vmap` has made them.
      axes: The mesh axes that divide the mapped dimension of some of them.
      sizes: Their sizes.
    """
    known = [(leaf, *_compat.mapped(leaf)) for leaf in leaves]
    one = next(((leaf, value.shape[dims[0]]) for leaf, value, dims in known if dims), None)
    if one is None or any(len(dims) > 1 or isinstance(value, jax.core.Tracer) for _, value, dims in known):
        return None
    token, size = jax.lax.stop_gradient(one[0]), one[1]
    if size % math.prod(sizes[axis] for axis in axes):
        return None
    lifted = [_lift.bind(leaf, token, size=size, whole=False) for leaf in leaves]
    places = [0 if np.ndim(y) > np.ndim(leaf) else None for y, leaf in zip(lifted, leaves, strict=True)]
    try:
        out = jax.vmap(fn, (places,), spmd_axis_name=axes)(lifted)
    except ValueError:  # the user's own vmap has told JAX these axes; or the call is wrong, and says so once more
        return None
    return jax.tree.map(lambda y: _lower.bind(y, token, size=size), out)


def _linear(name: str, batch: Callable[..., Any], transpose: Callable[..., Any]) -> Primitive:
    """A primitive of an array, in which it is linear, and of a token: whatever the `vmap` maps."""
    op = Primitive(name)

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        params |= {"whole": True} if "whole" in params else {}
        (x, token), (tangent, _) = primals, tangents
        out = op.bind(x, token, **params)
        zero = isinstance(tangent, ad.Zero)
        return out, ad.Zero(jax.typeof(out).to_tangent_aval()) if zero else op.bind(tangent, token, **params)

    def transposed(cotangent: Any, x: Any, token: Any, **params: Any) -> Any:
        zero = isinstance(cotangent, ad.Zero)
        return ad.Zero(x.aval) if zero else transpose(cotangent, token, **params), None

    ad.primitive_jvps[op] = jvp
    ad.primitive_transposes[op] = transposed
    batching.primitive_batchers[op] = batch
    return op


def _lifted(args: Any, dims: Any, *, size: int, whole: bool) -> Any:
    """The dimension that the token has becomes the array's first. An array without it stays as it is, unless its
    gradient is taken inside of the `vmap`: that has the dimension."""
    (x, token), (dim, of_token) = args, dims
    if of_token is None:  # another `vmap`, such as that of a Jacobian
        return _lift.bind(x, token, size=size, whole=whole), dim + 1
    if dim is not None:
        return jnp.moveaxis(x, dim, 0), None
    return (jnp.broadcast_to(x, (size, *x.shape)) if whole else x), None


def _lowered(args: Any, dims: Any, *, size: int) -> Any:
    (x, token), (dim, of_token) = args, dims
    if of_token is not None:
        return x, 0
    return _lower.bind(jnp.moveaxis(x, dim, 1), token, size=size), 0


_lift = _linear("spmd_lift", _lifted, lambda cotangent, token, *, size, whole: _lower.bind(cotangent, token, size=size))
_lower = _linear(
    "spmd_lower", _lowered, lambda cotangent, token, *, size: _lift.bind(cotangent, token, size=size, whole=True)
)
_lift.def_abstract_eval(lambda x, _, *, size, **__: x.update(shape=(size, *x.shape)))
_lower.def_abstract_eval(lambda x, _, **__: x.update(shape=x.shape[1:]))
