"""What a program states about the kernels that its functions become."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from spmd._facts import FusedName, one_line
from spmd._leaves import is_array, is_key, kind_of
from spmd.comm._marks import fused_p, tag, tag_of
from spmd.errors import LayoutError

P = ParamSpec("P")
R = TypeVar("R")


def fused(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """State that a function is one kernel on an accelerator, for `explain` and `search`: `@spmd.fused("attention")`.

    They then count its arguments and results as memory and as memory traffic, and nothing of what is inside. The
    attention layers say this of their scores, for which GPUs and TPUs have kernels. The program itself stays the same:
    it computes what the function says, and on a CPU, or where the compiler finds no such kernel, it does write what is
    inside. `Memory.opened` is what it then needs.

    The backward pass is one kernel too, as in flash attention: it reads the arguments, the results and the cotangents
    of the results, and writes the cotangents of the arguments. What the forward pass keeps for it from inside counts
    nothing: the kernel makes it again. Work is counted as it is written, forward and backward, with the products in the
    type of the numbers that enter the kernel. A kernel that skips what a causal mask hides makes half of the products.

    What the function reads from outside must be an argument; what it closes over is taken for computed inside. What
    has no gradient, such as a mask, is not counted again backward. One such function inside another is a part of it.
    Collectives inside count as always.

    Communication: none, forward and backward.

    Args:
      what: What kind of kernel it is, for the reader: `explain` says how much memory traffic stays inside.

    Returns:
      A decorator. The function takes and returns trees of arrays; other leaves stay as they are.

    Raises:
      LayoutError: If it is not said what kind of kernel it is.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> @spmd.fused("attention")
      ... def attention(q, k, v):
      ...     return jax.nn.softmax(q @ k.T) @ v
      >>> arrays = [jax.ShapeDtypeStruct((4096, 64), jnp.float32)] * 3
      >>> spmd.explain(attention, *arrays).written.hbm_bytes == 4 * 4096 * 64 * 4
      True

    References:
      Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691
    """
    if not isinstance(what, str) or not what.strip():
        rule = "a reader wants to know which kernel the function is meant to be."
        got = [] if isinstance(what, str) else [f"what: {kind_of(what)}"]
        raise LayoutError(rule, call="fused(...)", got=got, advice='as in @spmd.fused("attention")')
    name = FusedName(one_line(what))

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            args, kwargs = _noted((args, kwargs), name, "enter")
            with jax.named_scope(name):  # for equations without operands too, such as positions
                out = fn(*args, **kwargs)
            return _noted(out, name, "leave")

        return run

    return decorate


def _noted(tree: Any, what: str, role: str) -> Any:
    """The same arrays, which enter or leave a kernel. What is known of their layouts stays known."""

    def leaf(x: Any) -> Any:
        if not is_array(x) or is_key(x):
            return x
        known, out = tag_of(x), fused_p.bind(x, what=what, role=role)
        return out if known is None else tag(out, known.layout, known.origin, known.name)

    return jax.tree.map(leaf, tree)
