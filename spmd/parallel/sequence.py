"""The order of the tokens of a divided sequence: contiguous, or such that causal work is balanced."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from spmd import all_to_all, axis_size, iota, ppermute, rearrange, scope, size
from spmd._trees.arguments import explained
from spmd.comm._marks import ordered
from spmd.errors import SizeError, check_one_of
from spmd.language import Axes

Placement = Literal["contiguous", "zigzag", "striped"]
PLACEMENTS = get_args(Placement)


@explained
@scope
def sequence_order(length: int, parts: int, placement: Placement) -> np.ndarray:
    """The order of a sequence that is then divided in equal blocks, for data on the host.

    Under a causal mask a late token has more work than an early one. With "contiguous" blocks the last block has about
    2n - 1 times as many pairs of queries and keys as the first. "zigzag" gives block c the chunks c and 2n-1-c of 2n.
    "striped" gives it every n-th token, starting from c. `x[:, sequence_order(...)]` does not communicate where the
    batch is made. The positions of the tokens are `sequence_positions`, and `numpy.argsort` of the order undoes it.

    Args:
      length: Tokens in the whole sequence; for zig-zag a multiple of twice the blocks.
      parts: The number of blocks: devices along the context axis.
      placement: "contiguous", "zigzag" or "striped".

    Returns:
      int32 positions: the i-th is that of the token at place i.

    Raises:
      LayoutError: If the placement is unknown.
      SizeError: If the length does not divide.

    Example:
      >>> import spmd
      >>> print(spmd.parallel.sequence_order(8, 2, "zigzag"), spmd.parallel.sequence_order(8, 2, "striped"))
      [0 1 6 7 2 3 4 5] [0 2 4 6 1 3 5 7]

    References:
      Brandon et al., "Striped Attention", https://arxiv.org/abs/2311.09431; zig-zag as in
      Llama 3, https://arxiv.org/abs/2407.21783 (section 3.3.2).
    """
    check_placement(placement, f"sequence_order({length}, {parts}, {placement!r})", length, parts)
    blocks = np.arange(parts, dtype=np.int32)
    return np.asarray(block_positions(blocks, length // parts, parts, placement)).reshape(-1)


@scope(mapping=None)
def sequence_positions(length: int, placement: Placement = "contiguous", *, cp: Axes) -> jax.Array:
    """The positions of the tokens on this device, for rotary embeddings and masks of a divided sequence.

    Layouts: result `"s/cp"`.

    Communication: none.

    Args:
      length: Tokens in the whole sequence.
      placement: "contiguous", "zigzag" or "striped", as in `sequence_order`.
      cp: The mesh axes that divide the sequence.

    Returns:
      int32 positions.

    Raises:
      LayoutError: If the placement is unknown.
      SizeError: If the length does not divide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=2)
      >>> @spmd.kernel("-> s/cp", mesh=mesh, s=8)
      ... def at():
      ...     return spmd.parallel.sequence_positions(8, "zigzag", cp="cp")
      >>> print(at())
      [0 1 6 7 2 3 4 5]
    """
    blocks = axis_size(cp) if cp else 1
    check_placement(placement, f"sequence_positions({length}, {placement!r})", length, blocks)
    block = iota("c/cp", c=blocks, cp=cp)
    at = block_positions(block, length // blocks, blocks, placement)
    return ordered(rearrange(at, "c/cp l -> (c l)/cp", cp=cp), placement, cp, anew=True)


@scope(mapping=None)
def place_sequence(x: Any, placement: Placement, *, cp: Axes, axis: int = -2) -> jax.Array:
    """Bring a sequence from contiguous blocks into the placement: activations, tokens, labels.

    The tokens are the same, in the order of `sequence_order`. It is better to put data from the host into this order on
    the host, where it costs nothing.

    Layouts: x and result `"... s/cp ..."`. `axis` says which dimension is s; all others may be divided in any way.

    Communication: for S bytes on a device and n devices along cp, zig-zag takes two collective-permutes of S/2 bytes
    each (one if n is 2), and striped one all-to-all of S(n-1)/n bytes. Backward the reverse.

    Args:
      x: The array.
      placement: "contiguous" (nothing is done), "zigzag" or "striped".
      cp: The mesh axes that divide the sequence.
      axis: The array axis of the sequence.

    Returns:
      The array, of the same layout.

    Raises:
      LayoutError: If the placement is unknown.
      SizeError: If the sequence does not divide: into 2n chunks for zig-zag; for striped, each block into n parts.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=2)
      >>> place = lambda x: spmd.parallel.place_sequence(x, "striped", cp="cp", axis=-1)
      >>> print(spmd.kernel("s/cp -> s/cp", mesh=mesh)(place)(jnp.arange(8)))
      [0 2 4 6 1 3 5 7]
    """
    return _moved("place_sequence", x, placement, cp, axis, back=False)


@scope(mapping=None)
def restore_sequence(x: Any, placement: Placement, *, cp: Axes, axis: int = -2) -> jax.Array:
    """Undo `place_sequence`: bring the tokens back into the order of the sequence.

    Layouts, communication and arguments are those of `place_sequence`. A mean over tokens needs no restoring, because
    it is the same in any order.

    Args:
      x: The array.
      placement: The current order of its tokens.
      cp: The mesh axes that divide the sequence.
      axis: The array axis of the sequence.

    Returns:
      The array, of the same layout.

    Raises:
      LayoutError: If the placement is unknown.
      SizeError: If the sequence does not divide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=2)
      >>> restore = lambda x: spmd.parallel.restore_sequence(x, "zigzag", cp="cp", axis=-1)
      >>> print(spmd.kernel("s/cp -> s/cp", mesh=mesh)(restore)(jnp.array([0, 1, 6, 7, 2, 3, 4, 5])))
      [0 1 2 3 4 5 6 7]
    """
    return _moved("restore_sequence", x, placement, cp, axis, back=True)


# --- the moves, in one direction and back -------------------------------------------------------------------------


# A block is cut into pieces, one for each block; they are exchanged, and put together. The second one is the way back.
_STRIPES = (
    ("(c l j)/cp ... -> c/cp l j ...", "c/cp l j ... -> c l j/cp ...", "c l j/cp ... -> (j c l)/cp ..."),
    ("(j c l)/cp ... -> c l j/cp ...", "c l j/cp ... -> c/cp l j ...", "c/cp l j ... -> (c l j)/cp ..."),
)


def _moved(who: str, x: Any, placement: Placement, cp: Axes, axis: int, *, back: bool) -> Any:
    """The array with its tokens in the placement, from contiguous blocks; or `back` in them."""
    blocks, x = _opened(x, who, placement, cp, axis)
    x = ordered(x, placement if back else "contiguous", cp)
    if placement == "zigzag":
        x = rearrange(x, "(c z l)/cp ... -> z c/cp l ...", c=blocks, z=2, cp=cp)
        halves = _by_parity(blocks, cp, x[0], x[1]) if back else [x[0], x[1]]
        there = [[(j, i) for i, j in pairs] if back else pairs for pairs in _rounds(blocks)]
        halves = [ppermute(one, "[c/cp] l ...", pairs, cp=cp) for one, pairs in zip(halves, there, strict=True)]
        x = jnp.stack(halves if back else _by_parity(blocks, cp, *halves))
        x = rearrange(x, "z c/cp l ... -> (c z l)/cp ...", cp=cp)
    if placement == "striped":
        apart, exchange, together = _STRIPES[back]
        x = rearrange(x, apart, c=blocks, j=blocks, cp=cp)
        x = rearrange(all_to_all(x, exchange, cp=cp), together, cp=cp)
    return ordered(jnp.moveaxis(x, 0, axis), "contiguous" if back else placement, cp, anew=True)


# --- shared by both ---------------------------------------------------------------------------------------------


def block_positions(block: Any, length: int, blocks: int, placement: str, part: int = 0, parts: int = 1) -> Any:
    """The positions of the tokens of each block, `"c l"`, or of one of `parts` equal parts of each block.

    Args:
      block: The number of each block: `"c"`, of NumPy or of JAX.
      length: Tokens of a whole block.
      blocks: The number of blocks.
      placement: "contiguous", "zigzag" or "striped".
      part: The number of the part.
      parts: The number of parts.
    """
    size = length // parts
    inside = (part * size + np.arange(size, dtype=np.int32))[None]
    block = block[:, None]
    if placement == "striped":
        return inside * blocks + block
    if placement == "zigzag":
        half = length // 2
        late = inside // half  # the second chunk counts from the end
        return (block + late * (2 * blocks - 1 - 2 * block)) * half + inside % half
    return block * length + inside


def check_placement(placement: str, call: str, length: int, blocks: int) -> None:
    """Raise if the placement is unknown, or cannot divide the length."""
    check_one_of("a placement", placement, PLACEMENTS, call)
    chunks = 2 * blocks if placement == "zigzag" else blocks
    if length % chunks:
        pad = -length % chunks
        raise SizeError(
            f"{placement} divides a sequence over {blocks} blocks into {chunks} chunks, and {length} does not "
            f"divide by {chunks}.",
            call=call,
            advice=f"pad the sequence by {pad} to {length + pad}",
        )


def _opened(x: Any, who: str, placement: str, cp: Axes, axis: int) -> tuple[int, Any]:
    """The number of blocks, and the array with its sequence first; the sequence must divide."""
    blocks = axis_size(cp) if cp else 1
    x = jnp.moveaxis(x, axis, 0)
    length = size(x, "[s/cp] ...", cp=cp)
    call = f"{who}(x, {placement!r})"
    check_placement(placement, call, length, blocks)
    if placement == "striped" and length % blocks**2:
        pad = -length % blocks**2
        rule = (
            f"each of the {blocks} blocks sends every other block an equal share of its tokens, and {length} does not "
            f"divide by {blocks} x {blocks}."
        )
        raise SizeError(rule, call=call, advice=f"pad the sequence by {pad} to {length + pad}")
    return blocks, x


def _rounds(blocks: int) -> list[list[tuple[int, int]]]:
    """The destinations of the chunks, first of the even ones and then of the odd ones.

    Each round is a permutation: chunks i and 2n-1-i end up on one device, and one of them is even and one is odd.
    """
    to = [i if i < blocks else 2 * blocks - 1 - i for i in range(2 * blocks)]
    return [[(c, to[2 * c + z]) for c in range(blocks)] for z in (0, 1)]


def _by_parity(blocks: int, cp: Axes, even: Any, odd: Any) -> list[Any]:
    """The even chunks and the odd ones as the early and the late ones, or the other way round: of chunks c and 2n-1-c
    of an odd block, the late one is even."""
    swap = jnp.expand_dims(iota("c/cp", c=blocks, cp=cp) % 2 == 1, tuple(range(1, even.ndim)))
    return [jnp.where(swap, odd, even), jnp.where(swap, even, odd)]
