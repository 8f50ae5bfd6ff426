"""`meanwhile`: what travels in the time in which something else is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from spmd import _compat
from spmd._jaxprs.facts import WindowName
from spmd._trees.leaves import is_array, is_key, kind_of
from spmd.comm._marks import tag, tag_of
from spmd.errors import SpmdError

X = TypeVar("X")
Y = TypeVar("Y")
W = TypeVar("W")
V = TypeVar("V")
_EXAMPLE = 'meanwhile(layer, x, lambda w: spmd.all_gather(w, "d/dp f -> d f"), w)'


def meanwhile(compute: Callable[[X], Y], x: X, move: Callable[[W], V], w: W, /) -> tuple[Y, V]:
    """Let something travel in the time in which something else is computed: `y, w = meanwhile(layer, x, gather, w)`.

    What travels begins when x is there, and not earlier. Whoever takes one of both results waits for both. In between
    the compiler may run them at the same time, and may not put either of them elsewhere. So the weights of the next
    layer are gathered while this one is computed, and those of the layer after it are not gathered yet. `explain` says
    what is computed in that time, and how much of the time of the collectives it covers.

    It is an order, and not a promise: whether a device computes while it sends depends on the hardware, the compiler
    and its flags. JAX has no asynchronous gather of its own. This is `jax.lax.optimization_barrier` around both. With
    JAX 0.10 there is no order between values of which only one is equal along an axis: its barrier would lose that.

    The backward pass has the same order, turned round: the gradient of w is reduced and scattered in the time in which
    that of x is computed. Under `jax.checkpoint`, `scan` and `vmap` it is what it is outside.

    Layouts: those of x and w, and of what both functions return.

    Communication: what both functions send, forward and backward, and nothing else.

    Args:
      compute: What is computed. It sends nothing, or what need not wait for `move`.
      x: Its argument, an array or a pytree.
      move: What travels, a verb or several.
      w: Its argument, an array or a pytree.

    Returns:
      What `compute` and `move` return.

    Raises:
      SpmdError: If `compute` or `move` is not a function.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("b/dp d, l d/dp f -> b/dp f", mesh=mesh)
      ... def layers(x, w):
      ...     gather = lambda w: spmd.all_gather(w, "d/dp f -> d f")
      ...     now = gather(w[0])
      ...     x, then = spmd.meanwhile(lambda x: jnp.tanh(x @ now), x, gather, w[1])
      ...     return jnp.tanh(x @ then)
      >>> layers(jnp.ones((4, 8)), jnp.ones((2, 8, 8))).shape
      (4, 8)
    """
    for name, fn in (("compute", compute), ("move", move)):
        if not callable(fn):
            rule = f"meanwhile takes two functions, each with its argument; {name} is {kind_of(fn)}."
            raise SpmdError(rule, call="meanwhile(compute, x, move, w)", advice=f"as in {_EXAMPLE}")
    name = WindowName()
    x, w = _together((x, w))
    with jax.named_scope(name):
        y = compute(x)
    with jax.named_scope(name.moves):
        v = move(w)
    return _together((y, v))


def _together(tree: Any) -> Any:
    """The same arrays, of which each is there when all are. What is known of their layouts stays known."""
    leaves, structure = jax.tree.flatten(tree)
    at = [i for i, x in enumerate(leaves) if is_array(x) and not is_key(x)]
    made = _compat.in_order([leaves[i] for i in at]) if at else []
    for i, new in zip(at, made, strict=True):
        known = tag_of(leaves[i])
        leaves[i] = new if known is None else tag(new, known.layout, known.origin, known.name)
    return jax.tree.unflatten(structure, leaves)


__all__ = ["meanwhile"]
