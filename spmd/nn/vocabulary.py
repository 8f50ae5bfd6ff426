"""Embeddings: rows of a table by number, and the same table as the last layer."""

from __future__ import annotations

from typing import Any

from spmd import all_gather, all_to_all, defer, einsum, scope, take
from spmd.errors import LayoutError, did_you_mean

__all__ = ["embedding", "unembedding"]

Axes = str | tuple[str, ...] | None

PARTS = ("vocabulary", "features")


@scope(mapping=None)
def embedding(
    ids: Any, table: Any, *, over: str = "vocabulary", tp: Axes = None, sp: Axes = None, cp: Axes = None
) -> Any:
    """Look up the vectors of tokens in a table that is divided over its vocabulary or over its features.

    Over the vocabulary, each device looks up what it has, zeros for the rest, and the sum is the result. Over the
    features each device looks up its features of all tokens; with `sp` these are then exchanged for all features
    of its own tokens, which moves n times less. The vocabulary is what the tied `unembedding` and the losses want
    divided. A number outside the table gives zeros.

    Layouts: ids `"... s/cp"` (with `sp=None` any `"..."`), whole over tp. Over the vocabulary: table `"v/tp d"`, result
    `"... s/cp/sp d"`. Over the features: table `"v d/tp"`, result `"... s/cp/sp d"`, and with `sp=None` `"... d/tp"`.

    Communication, for S bytes of `"... s/cp d"` per device, on n devices of tp. Over the vocabulary with `sp` a
    psum_scatter forward, S(n-1)/n bytes, and an all_gather backward, as many; without, a psum forward, 2S(n-1)/n
    bytes. Over the features with `sp` an all_to_all of S(n-1)/n² bytes, forward and again backward; without, nothing.
    The table's gradient, where it is equal by JAX's own type on axes that divide tokens, is summed over them:
    2V(m-1)/m bytes for a block of V bytes on m devices, however few rows were looked up.

    Memory: the ids are kept for the backward pass, whose gradient has the size of the table's block.

    Args:
      ids: Integers.
      table: One row per token of the vocabulary.
      over: "vocabulary" or "features": what tp divides.
      tp: The mesh axes that divide the table.
      sp: The mesh axes that divide the sequence from here on; the same as tp, or None.
      cp: Mesh axes that divide the sequence of ids already.

    Returns:
      The vectors, in the dtype of the table.

    Raises:
      LayoutError: If `over` is something else, or ids are no integers.
      SpmdError: Where sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("b s, v/tp d -> b s/tp d", mesh=mesh)
      ... def embed(ids, table):
      ...     return spmd.nn.embedding(ids, table, tp="tp", sp="tp")
      >>> print(embed(jnp.array([[3, 0]]), jnp.arange(8.0).reshape(4, 2)))
      [[[6. 7.]
        [0. 1.]]]

    References:
      Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053, for the vocabulary.
    """
    if over not in PARTS:
        hint = did_you_mean(over, PARTS) if isinstance(over, str) else ""
        rule = f"over is {' or '.join(map(repr, PARTS))}, not {over!r}{hint or '.'}"
        raise LayoutError(rule, call="embedding(ids, table)")
    if over == "vocabulary":
        if sp is None:
            return take(table, ids, "[v/tp] d, ... -> ... d", tp=tp)
        return take(table, ids, "[v/tp] d, ... s/cp -> ... s/cp/sp d", tp=tp, sp=sp, cp=cp)
    found = take(table, ids, "[v] d/tp, ... -> ... d/tp", tp=tp)
    return found if sp is None else all_to_all(found, "... s/cp d/tp -> ... s/cp/sp d", tp=tp, sp=sp, cp=cp)


@scope(mapping=None)
def unembedding(
    x: Any, table: Any, *, tp: Axes = None, sp: Axes = None, cp: Axes = None, preferred_element_type: Any = "float32"
) -> Any:
    """Scores of all tokens of the vocabulary, each device those of its part: `x @ table.T`.

    The table may be the one of `embedding`, its gradients then add up (tied weights), or one of its own. The
    scores are what `cross_entropy` takes; `linear_cross_entropy` does both and never has them all.

    Layouts: x `"... s/cp/sp d"` (with `sp=None` any `"... d"`), table `"v/tp d"`, result `"... s/cp v/tp"`.

    Communication and memory: those of `column_linear`.

    Args:
      x: The residual stream after the last layer.
      table: One row per token of the vocabulary.
      tp: The mesh axes that divide the vocabulary.
      sp: The mesh axes that divide the sequence until here; the same as tp, or None.
      cp: Mesh axes that divide the sequence here and after.
      preferred_element_type: The dtype of the scores; None for that of x.

    Returns:
      The scores.

    Raises:
      SpmdError: Where sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("b s/tp d, v/tp d -> b s v/tp", mesh=mesh)
      ... def scores(x, table):
      ...     return spmd.nn.unembedding(x, table, tp="tp", sp="tp")
      >>> print(scores(jnp.ones((1, 2, 2)), jnp.arange(8.0).reshape(4, 2))[0, 0])
      [ 1.  5.  9. 13.]

    References:
      Press and Wolf, "Using the Output Embedding to Improve Language Models", https://arxiv.org/abs/1608.05859
    """
    if sp is None:
        x = defer(x, "... d -> ... d {R:tp}", tp=tp)
    else:
        x = all_gather(x, "... s/cp/sp d -> ... s/cp d", sp=sp, cp=cp)
    table = table.astype(x.dtype)
    return einsum(x, table, "... d, v/tp d -> ... v/tp", tp=tp, preferred_element_type=preferred_element_type)
