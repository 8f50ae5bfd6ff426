"""Embeddings: rows of a table by index, and the same table as the last layer."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax

from spmd import all_to_all, einsum, scope, take
from spmd.errors import LayoutError, not_one_of
from spmd.nn.linear import entered

__all__ = ["embedding", "unembedding"]

Axes = str | tuple[str, ...] | None

Part = Literal["vocabulary", "features"]
PARTS = get_args(Part)


@scope(mapping=None)
def embedding(
    ids: Any, table: Any, *, over: Part = "vocabulary", tp: Axes = None, sp: Axes = None, cp: Axes = None
) -> jax.Array:
    """Look up the vectors of tokens in a table that is divided over its vocabulary or over its features.

    If the vocabulary is divided, each device looks up the rows that it has, with zeros for the others, and the sum is
    the result. If the features are divided, each device looks up its features of all tokens. With `sp` these are then
    exchanged for all features of its own tokens, which sends n times fewer bytes. The tied `unembedding` and the losses
    need a divided vocabulary. An index outside the table gives zeros.

    Layouts: ids `"... s/cp"` (with `sp=None` any `"..."`), whole over tp. Divided vocabulary: table `"v/tp d"`, result
    `"... s/cp/sp d"`. Divided features: table `"v d/tp"`, result `"... s/cp/sp d"`, or `"... d/tp"` with `sp=None`.

    Communication, for S bytes of `"... s/cp d"` per device, on n devices of tp. Divided vocabulary: with `sp`, a
    psum_scatter forward, S(n-1)/n bytes, and an all_gather of the same bytes backward; without, a psum forward,
    2S(n-1)/n bytes. Divided features: with `sp`, an all_to_all of S(n-1)/n² bytes, forward and again backward; without,
    nothing. If the table is equal by JAX's own type on axes that divide tokens, its gradient is summed over them:
    2V(m-1)/m bytes for a block of V bytes on m devices, however few rows were looked up.

    Memory: the ids are kept for the backward pass. The gradient has the size of the table's block.

    Args:
      ids: Integers.
      table: One row per token of the vocabulary.
      over: "vocabulary" or "features": what tp divides.
      tp: The mesh axes that divide the table.
      sp: The mesh axes that divide the sequence from here on; the same as tp, or None.
      cp: Mesh axes that already divide the sequence of ids.

    Returns:
      The vectors, in the dtype of the table.

    Raises:
      LayoutError: If `over` is something else, or ids are not integers.
      SpmdError: If sizes or placements do not fit.

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
        raise LayoutError(not_one_of("over", over, PARTS), call="embedding(ids, table)")
    if over == "vocabulary":
        if sp is None:
            return take(table, ids, "[v/tp] d, ... -> ... d", tp=tp)
        return take(table, ids, "[v/tp] d, ... s/cp -> ... s/cp/sp d", tp=tp, sp=sp, cp=cp)
    found = take(table, ids, "[v] d/tp, ... -> ... d/tp", tp=tp)
    return found if sp is None else all_to_all(found, "... s/cp d/tp -> ... s/cp/sp d", tp=tp, sp=sp, cp=cp)


@scope(mapping=None)
def unembedding(
    x: Any, table: Any, *, tp: Axes = None, sp: Axes = None, cp: Axes = None, preferred_element_type: Any = "float32"
) -> jax.Array:
    """Scores for all tokens of the vocabulary, `x @ table.T`. Each device computes those of its part.

    The table may be that of `embedding` (tied weights, whose gradients add up) or a separate one. `cross_entropy` takes
    the scores. `linear_cross_entropy` does both, and never holds all scores.

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
      SpmdError: If sizes or placements do not fit.

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
    x = entered(x, tp=tp, sp=sp, cp=cp)
    table = table.astype(x.dtype)
    return einsum(x, table, "... d, v/tp d -> ... v/tp", tp=tp, preferred_element_type=preferred_element_type)
