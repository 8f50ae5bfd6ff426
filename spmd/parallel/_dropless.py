"""Experts without a capacity: rows travel to the devices of their experts, and lie there in the order of the experts.

The letters are those of `experts`, and:

    r devices along ep   l experts of one device   g, h devices along ep, where it divides batch and sequence
    i blocks of tokens along tp, if tp divides the sequence   o sources: all devices that send to one, `(g h)`
    p places for the rows that one device sends to one other   z rows in the buffer of one device
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _compat, all_gather, all_to_all, annotate, axis_size, custom_vjp, psum_scatter, rearrange, split
from spmd.comm import _lax
from spmd.language import axes_tuple
from spmd.modes import current_frame
from spmd.nn.norm import wide
from spmd.ops._exchange import Route, picked, travelled, without_gaps

# --- rows that move one to one: tokens to places and back -------------------------------------------------------------
#
# The gradients here are written out. A row goes to one place, so the transpose of a gather is a gather too. JAX would
# make a scatter, which adds in the hardware's order.


class Moves(NamedTuple):
    """A one-to-one map between choices and places. In front are the same dimensions as of the rows that move.

    Attributes:
      place: The place of each choice.
      kept: Whether each choice has a place.
      choice: The choice in each place.
      filled: Whether each place has a choice.
    """

    place: Any
    kept: Any
    choice: Any
    filled: Any

    def inverse(self) -> Moves:
        """The map from places to choices."""
        return Moves(self.choice, self.filled, self.place, self.kept)


def _no_gradient(moves: Moves) -> Moves:
    return Moves(*(None for _ in moves))


@custom_vjp
def dispatched(group: Any, moves: Moves) -> Any:
    """The tokens `"... t d"` in their places. Choice i is one of token i % t."""
    return picked(group, moves.choice % group.shape[-2], moves.filled)


def _dispatched_fwd(group: Any, moves: Moves) -> Any:
    return dispatched(group, moves), (moves, jnp.arange(group.shape[-2]))


def _dispatched_bwd(kept: Any, cotangent: Any) -> Any:
    moves, tokens = kept
    chosen = picked(cotangent, moves.place, moves.kept)
    by_choice = (*chosen.shape[:-2], -1, tokens.size, chosen.shape[-1])
    return jnp.sum(jnp.reshape(chosen, by_choice), axis=-3), _no_gradient(moves)


dispatched.defvjp(_dispatched_fwd, _dispatched_bwd)


@custom_vjp
def collected(results: Any, moves: Moves) -> Any:
    """The contents of the places, `"... p d"`, for each choice."""
    return picked(results, moves.place, moves.kept)


def _collected_bwd(moves: Moves, cotangent: Any) -> Any:
    return picked(cotangent, moves.choice, moves.filled), _no_gradient(moves)


collected.defvjp(lambda results, moves: (collected(results, moves), moves), _collected_bwd)


Axes = dict[str, Any]


def near(at: Axes) -> Axes:
    """The axes outside the products of the experts, where tp may divide tokens."""
    return {name: at[name] for name in ("dp", "sp", "by_s", "tp_s", "by_b")}


def without_capacity(
    group: Any, experts: Any, weights: tuple[Any, Any, Any], activation: Callable[[Any], Any], exchange: Exchange
) -> tuple[Any, Any, Any]:
    """The results of the choices, whether each was computed, and the load of the experts.

    Args:
      group: The tokens `"n/dp m/sp t d"`, a block of a device in each of n and m.
      experts: Their choices, `"n/dp m/sp t k"`.
      weights: Gate, up and down.
      activation: That of the gate.
      exchange: How rows travel.

    Returns:
      The results `"n/dp m/sp kt d"`, a partial sum if tp divides no tokens; `"n/dp m/sp kt"`; and `"n/dp m/sp e"`.
    """
    at, far, i = exchange.at, exchange.far, exchange.blocks
    order, counts = jax.vmap(jax.vmap(lambda one: in_order(one, exchange.e)))(experts)
    table = exchange.table(counts)
    moves = exchange.leaving(experts, order, counts, table)
    x = exchange.there(dispatched(group, moves), table)
    x = all_gather(x, "n/dp m/sp/tp_s r/by_b/by_s z d -> n/dp m/sp r/by_b/by_s z d", **exchange.near)
    x = rearrange(x, "n/dp (m i)/sp r/by_b/by_s z d -> n/dp m/sp r/by_b/by_s (i z) d", i=i, **far)
    arriving, each = exchange.arriving(table)
    if arriving is not None:
        x = collected(x, arriving.inverse())
    y = _experts(x, weights, each, activation, at)
    if arriving is not None:
        y = collected(y, arriving)
    y = annotate(y, "n/dp m/sp r/by_b/by_s z d {U:tp}", tp=at["tp"], **far)
    apart = "n/dp m/sp r/by_b/by_s (i z) d {U:tp} -> n/dp (m i)/sp r/by_b/by_s z d {U:tp}"
    y = rearrange(y, apart, i=i, tp=at["tp"], **far)
    home = "n/dp m/sp r/by_b/by_s z d {U:tp_s} -> n/dp m/sp/tp_s r/by_b/by_s z d"
    y = psum_scatter(y, home, **exchange.near) if at["tp_s"] else y
    results = collected(exchange.back(y, table), moves)
    return results, moves.kept, counts / order.shape[-1]


def in_order(experts: Any, e: int) -> tuple[Any, Any]:
    """The choices `"t k"` of one block in the order of their experts, stably, so that first choices come before second
    ones, and how many each expert has."""
    choices = experts.T.reshape(-1)
    counts = jnp.sum(choices[:, None] == jnp.arange(e, dtype=choices.dtype)[None], axis=0, dtype=jnp.int32)
    return _lax.argsort(choices).astype(jnp.int32), counts


def moves_of(to: Any, order: Any, wanted: Any, sent: Any, places: int) -> Moves:
    """The moves of choices to places, of which each of several takers has so many.

    Args:
      to: The taker of each choice.
      order: The choices in the order of their takers.
      wanted: How many choices each taker has.
      sent: How many of them it takes, the first ones.
      places: The places of each taker.
    """
    starts = jnp.cumsum(wanted) - wanted
    rank = _lax.argsort(order).astype(jnp.int32) - starts[to]
    kept = rank < sent[to]
    ranks = jnp.arange(places, dtype=jnp.int32)[None]
    filled = ranks < sent[:, None]
    choice = order[jnp.where(filled, starts[:, None] + ranks, 0)]
    return Moves(jnp.where(kept, to * places + rank, 0), kept, choice.reshape(-1), filled.reshape(-1))


def _experts(x: Any, weights: tuple[Any, Any, Any], each: Any, activation: Callable[[Any], Any], at: Axes) -> Any:
    """The rows `"n m r z d"` through the experts of their devices, `each` of which has so many: partial over tp."""
    parts = {"r": axis_size((*axes_tuple(at["by_b"]), *axes_tuple(at["by_s"])))}
    where = {"by_b": at["by_b"], "by_s": at["by_s"], "tp": at["tp"]}
    into = "(r l)/by_b/by_s d f/tp -> r/by_b/by_s l d f/tp"
    gate, up = (rearrange(w, into, **parts, **where) for w in weights[:2])
    down = rearrange(weights[2], "(r l)/by_b/by_s f/tp d -> r/by_b/by_s l f/tp d", **parts, **where)
    product = jax.vmap(jax.vmap(jax.vmap(grouped), (0, None, 0)), (0, None, 0))
    if x.shape[0] * x.shape[1] * x.shape[2] == 1:  # one device: no vmap that the hardware would have to undo
        product = lambda x, w, each: grouped(x[0, 0, 0], w[0], each[0, 0, 0])[None, None, None]
    return product(activation(product(x, gate, each)) * product(x, up, each), down, each)


class Table(NamedTuple):
    """What all sources send to all devices of ep, known to all of them: `"n m i o r"`.

    Attributes:
      wanted: The rows that a source has for a device.
      sent: Those for which the device has room: of the first sources first.
      base: Where they begin in its buffer, if rows lie there without gaps.
      kept: Those for each expert, `"n m i o r l"`: of the first experts first.
    """

    wanted: Any
    sent: Any
    base: Any
    kept: Any


class Exchange(NamedTuple):
    """How rows travel along ep.

    Attributes:
      at: The mesh axes of the placeholders in the strings.
      e: The number of experts.
      rows: The most rows that one device takes from the blocks of tokens that it exchanges with.
      choices: The choices of one block of tokens.
      most: How many of them one device of ep can be for at most.
      ragged: Whether rows travel without gaps, by ragged_all_to_all.
    """

    at: Axes
    e: int
    rows: int
    choices: int
    most: int
    ragged: bool

    @property
    def near(self) -> Axes:
        return near(self.at)

    @property
    def far(self) -> Axes:
        return {name: axes for name, axes in self.near.items() if name != "tp_s"}

    @property
    def ways(self) -> dict[str, int]:
        """The devices along ep, where it divides the batch and where it divides the sequence."""
        return {"g": axis_size(axes_tuple(self.at["by_b"])), "h": axis_size(axes_tuple(self.at["by_s"]))}

    @property
    def parts(self) -> int:
        return self.ways["g"] * self.ways["h"]

    @property
    def blocks(self) -> int:
        return axis_size(axes_tuple(self.at["tp_s"]))

    @property
    def places(self) -> int:
        """p: the places for the rows that one device sends to one other."""
        return min(self.rows, self.most)

    def table(self, counts: Any) -> Table:
        """The same on all devices of ep and tp, from the counts of each block of tokens."""
        dp, by_b, sp, tp_s, by_s = (self.at[name] for name in ("dp", "by_b", "sp", "tp_s", "by_s"))
        counts = annotate(counts, "n/dp/by_b m/sp/tp_s/by_s e", **self.near)
        pattern = "n/dp/by_b m/sp/tp_s/by_s e -> n/dp m/sp/tp_s e"
        counts = all_gather(counts, pattern, dp=dp, by_b=by_b, sp=sp, tp_s=tp_s, by_s=by_s)
        counts = all_gather(counts, "n/dp m/sp/tp_s e -> n/dp m/sp e", dp=dp, sp=sp, tp_s=tp_s)
        apart = "(n g)/dp (m i h)/sp (r l) -> n/dp m/sp i (g h) r l"
        counts = rearrange(counts, apart, dp=dp, sp=sp, i=self.blocks, r=self.parts, **self.ways)
        wanted = jnp.sum(counts, axis=5, dtype=jnp.int32)
        before = jnp.cumsum(wanted, axis=3) - wanted
        sent = jnp.clip(self.rows - before, 0, wanted)
        kept = jnp.clip(sent[..., None] - (jnp.cumsum(counts, axis=5) - counts), 0, counts)
        return Table(wanted, sent, jnp.minimum(before, self.rows), kept)

    def from_here(self, what: Any) -> Any:
        """The rows of a table for this source: `"n m i o r"` becomes `"n m r"`."""
        blocks = "n/dp m/sp i (g h) r -> (n g)/dp (m i h)/sp r"
        one = rearrange(what, blocks, **self.ways, dp=self.at["dp"], sp=self.at["sp"])
        for into in ("n/dp m/sp r -> n/dp/by_b m/sp r", "n/dp/by_b m/sp r -> n/dp/by_b m/sp/tp_s/by_s r"):
            one = split(one, into, **{name: axes for name, axes in self.near.items() if f"/{name}" in into})
        return one

    def to_here(self, what: Any) -> Any:
        """The columns of a table for this device: `"n m i o r ..."` becomes `"n m r i o ..."`."""
        one = jnp.moveaxis(what, 4, 2)
        more = " l" * (what.ndim - 5)
        return split(one, f"n/dp m/sp r i o{more} -> n/dp m/sp r/by_b/by_s i o{more}", **self.far)

    def leaving(self, experts: Any, order: Any, counts: Any, table: Table) -> Moves:
        """The places of the choices `"n m t k"` in what a device sends."""
        plan = jax.vmap(jax.vmap(self.leaving_block))
        return plan(experts, order, counts, self.from_here(table.sent))

    def leaving_block(self, experts: Any, order: Any, counts: Any, sent: Any) -> Moves:
        to = experts.T.reshape(-1) // (self.e // self.parts)
        wanted = jnp.sum(counts.reshape(self.parts, -1), axis=1, dtype=jnp.int32)
        moves = moves_of(to, order, wanted, sent, self.places)
        if self.ragged:  # without gaps
            return Moves(_lax.argsort(order).astype(jnp.int32), moves.kept, order, jnp.ones_like(moves.kept))
        return moves

    def arriving(self, table: Table) -> tuple[Moves | None, Any]:
        """Return where the rows `"n m r (i z)"` of a buffer are in the order of the experts, and how many each of them
        has. None if they are in order."""
        kept, base = self.to_here(table.kept), self.to_here(table.base)
        each = jnp.sum(kept, axis=(3, 4), dtype=jnp.int32)
        if self.parts * self.blocks == 1:
            return None, each
        plan = self.arriving_device
        for _ in range(3):
            plan = jax.vmap(plan)
        return plan(kept, base), each

    def arriving_device(self, kept: Any, base: Any) -> Moves:
        """The plan of one device: rows lie source by source, and within a source in the order of the experts."""
        blocks, sources, l = kept.shape
        size = self.rows if self.ragged else sources * self.places
        if not self.ragged:
            base = jnp.broadcast_to(jnp.arange(sources, dtype=jnp.int32)[None] * self.places, base.shape)
        base = (base + jnp.arange(blocks, dtype=jnp.int32)[:, None] * size).reshape(-1)
        kept = kept.reshape(-1, l)
        ends = jnp.cumsum(kept, axis=1)
        begins = ends - kept  # of an expert's rows among those of a source
        last = jnp.cumsum(kept.T.reshape(-1)).reshape(l, -1)
        first = last - kept.T  # of a source's rows among those in order
        slots = jnp.arange(blocks * min(self.rows, size), dtype=jnp.int32)
        piece = jnp.minimum(jnp.searchsorted(last.reshape(-1), slots, side="right"), last.size - 1)
        expert, source = piece // base.size, piece % base.size
        comes = slots < last[-1, -1]
        found = jnp.where(comes, base[source] + begins[source, expert] + slots - first[expert, source], 0)
        places = jnp.arange(blocks * size, dtype=jnp.int32)
        source = jnp.searchsorted(base, places, side="right") - 1
        rank = places - base[source]
        expert = jnp.minimum(jnp.sum(ends[source] <= rank[:, None], axis=1, dtype=jnp.int32), l - 1)
        filled = rank < ends[source, -1]
        slot = jnp.where(filled, first[expert, source] + rank - begins[source, expert], 0)
        return Moves(slot, filled, found, comes)

    def there(self, x: Any, table: Table) -> Any:
        """Return what a device sends, `"n/dp/by_b m/sp/tp_s/by_s c d"`, in the buffers of those that it is for,
        `"n/dp m/sp/tp_s r/by_b/by_s z d"`."""
        if self.ragged:
            there, back = self.routes(table)
            x = travelled(self.axes, (self.rows, self.choices), x[0, 0], there, back)
            return annotate(x[None, None, None], "n/dp m/sp/tp_s r/by_b/by_s z d", **self.near)
        x = jnp.reshape(x, (*x.shape[:2], self.parts, self.places, -1))
        x = annotate(x, "n/dp/by_b m/sp/tp_s/by_s r p d", **self.near)
        x = all_to_all(x, "n/dp/by_b m/sp/tp_s/by_s r p d -> n/dp m/sp/tp_s r/by_b/by_s p d", **self.near)
        buffers = "(n g)/dp (m h)/sp/tp_s r/by_b/by_s p d -> n/dp m/sp/tp_s r/by_b/by_s (g h p) d"
        return rearrange(x, buffers, **self.ways, **self.near)

    def back(self, y: Any, table: Table) -> Any:
        """The reverse of `there`: a partial sum if tp divides no tokens."""
        own = {"whole": self.at["whole"], **self.near}
        if self.ragged:
            there, back = self.routes(table)
            y = travelled(self.axes, (self.choices, self.rows), y[0, 0, 0], back, there)
            return annotate(y[None, None], "n/dp/by_b m/sp/tp_s/by_s c d {U:whole}", **own)
        apart = "n/dp m/sp/tp_s r/by_b/by_s (g h p) d {U:whole} -> (n g)/dp (m h)/sp/tp_s r/by_b/by_s p d {U:whole}"
        y = rearrange(y, apart, **self.ways, **own)
        home = "n/dp m/sp/tp_s r/by_b/by_s p d {U:whole} -> n/dp/by_b m/sp/tp_s/by_s r p d {U:whole}"
        y = all_to_all(y, home, **own)
        return jnp.reshape(y, (*y.shape[:2], self.parts * self.places, -1))

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of ep, as the mesh calls them."""
        axes = (*axes_tuple(self.at["by_b"]), *axes_tuple(self.at["by_s"]))
        return current_frame("moe").renamed(axes)

    def routes(self, table: Table) -> tuple[Route, Route]:
        """Return how rows travel without gaps, there and back, on this device."""
        starts = jnp.cumsum(table.wanted, axis=4) - table.wanted
        own = [self.from_here(part)[0, 0] for part in (starts, table.sent, table.base)]
        theirs = [self.to_this_block(part)[0, 0, 0] for part in (starts, table.sent, table.base)]
        return Route(own[0], own[1], own[2], theirs[1]), Route(theirs[2], theirs[1], theirs[0], own[1])

    def to_this_block(self, what: Any) -> Any:
        """`to_here`, for the block of tokens of this device of tp: `"n m r o"`."""
        one = rearrange(self.to_here(what), "n/dp m/sp r/by_b/by_s i o -> n/dp (m i)/sp r/by_b/by_s o", **self.far)
        return split(one, "n/dp m/sp r/by_b/by_s o -> n/dp m/sp/tp_s r/by_b/by_s o", **self.near)


def exchange_of(at: Axes, e: int, t: int, k: int, rows: int | None, ragged: bool | None) -> Exchange:
    """The exchange of blocks of t tokens with k choices each.

    Args:
      at: The mesh axes of the placeholders in the strings.
      e: The number of experts.
      t: The tokens of a block.
      k: The choices of a token.
      rows: The most rows that a device takes; None for all that can come.
      ragged: Whether by ragged_all_to_all; None for where the hardware has it.
    """
    axes = (*axes_tuple(at["by_b"]), *axes_tuple(at["by_s"]))
    parts = axis_size(axes)
    most = min(k, e // parts) * t  # a token chooses an expert once
    frame = current_frame("moe")
    ragged = without_gaps(frame, frame.renamed(axes), parts, ragged)
    return Exchange(at, e, parts * most if rows is None else min(rows, parts * most), k * t, most, ragged)


# --- grouped -----------------------------------------------------------------------------------------------------

# Products of rows with the matrices of their groups: `jax.lax.ragged_dot`, and on GPUs a loop over tiles of rows.
#
# XLA for GPUs multiplies every row with every matrix: with 16 groups an H200 does a twelfth of what it does in one
# large product. A tile has rows of one group, and is multiplied with the matrix of that group alone.

# JAX's ragged_dot has no vmap in which one operand is not mapped, and none of a vmap. Here the mapped products are one
# product of all groups. Each has the rows of its own groups only, if what is left over belongs to its last group.


@custom_vjp
def grouped(x: Any, w: Any, counts: Any) -> Any:
    """Multiply each row of `"r d"` with the matrix of its group, `"g d f"`: the first `counts[0]` with the first.

    Rows behind all groups are zeros. What becomes of them in the result is undefined.
    """
    return _product(x, w, counts)


def _grouped_bwd(kept: Any, cotangent: Any) -> Any:
    x, w, counts = kept
    return grouped(cotangent, jnp.swapaxes(w, 1, 2), counts), contracted(x, cotangent, counts), None


grouped.defvjp(lambda *kept: (grouped(*kept), kept), _grouped_bwd)


@custom_vjp
def contracted(x: Any, y: Any, counts: Any) -> Any:
    """Sum the outer products of the rows of `"r d"` and `"r f"` for each group: `"g d f"`."""
    return _contraction(x, y, counts)


def _contracted_bwd(kept: Any, cotangent: Any) -> Any:
    x, y, counts = kept
    return grouped(y, jnp.swapaxes(cotangent, 1, 2), counts), grouped(x, cotangent, counts), None


contracted.defvjp(lambda *kept: (contracted(*kept), kept), _contracted_bwd)


# --- in tiles -----------------------------------------------------------------------------------------------------

_UNROLLED = 4  # rounds of the loop at once: a round of its own costs a GPU as much as half a tile


class _Tiles(NamedTuple):
    """Tiles of `size` rows each, enough for any counts.

    Attributes:
      group: The group of each.
      start: Its first row; behind all rows if it is not needed.
      rows: How many of its rows are of its group. Those of the last group end with the tiles.
    """

    group: Any
    start: Any
    rows: Any


def _size(rows: int, groups: int) -> int:
    """Return the rows of a tile: at most half of what a group has on average, so that few are filled in vain."""
    return 1 << min(10, max(4, (rows // (2 * groups)).bit_length() - 1))


def _tiles(counts: Any, rows: int, size: int) -> _Tiles:
    tiles = -(-counts // size)
    last = jnp.cumsum(tiles, dtype=counts.dtype)  # the number of tiles up to each group
    number = jnp.arange(rows // size + counts.shape[0], dtype=counts.dtype)
    group = jnp.sum(number[:, None] >= last[None], axis=1, dtype=counts.dtype)
    needed, group = group < counts.shape[0], jnp.minimum(group, counts.shape[0] - 1)
    end = jnp.cumsum(counts, dtype=counts.dtype)[group]
    start = end - counts[group] + (number - (last - tiles)[group]) * size
    return _Tiles(group, jnp.where(needed, start, rows), jnp.where(needed, end - start, 0))


def _empty(shape: tuple[int, ...], dtype: Any, *like: Any) -> Any:
    """Zeros, of a type that a loop can carry into which the others go."""
    axes = sorted(frozenset().union(*map(_compat.varying_axes, like)))
    return _compat.pvary(jnp.zeros(shape, dtype), axes)


def in_tiles(x: Any, w: Any, counts: Any) -> Any:
    """Compute `grouped`. A tile may reach into the next group, whose tiles come later and overwrite it."""
    rows, size = x.shape[0], _size(x.shape[0], w.shape[0])
    x = jnp.pad(x, ((0, size), (0, 0)))

    def multiply(out: Any, tile: _Tiles) -> tuple[Any, None]:
        here = lax.dynamic_slice_in_dim(x, tile.start, size) @ lax.dynamic_index_in_dim(w, tile.group, keepdims=False)
        return lax.dynamic_update_slice_in_dim(out, here, tile.start, 0), None

    out = _empty((rows + size, w.shape[2]), jnp.result_type(x, w), x, w, counts)
    return lax.scan(multiply, out, _tiles(counts, rows, size), unroll=_UNROLLED)[0][:rows]


def sums_in_tiles(x: Any, y: Any, counts: Any) -> Any:
    """Compute `contracted`. The sum of a group is at least float32, until its last tile."""
    rows, size = x.shape[0], _size(x.shape[0], counts.shape[0])
    dtype, shape = jnp.result_type(x, y), (x.shape[1], y.shape[1])
    x, y = (jnp.pad(rows_, ((0, size), (0, 0))) for rows_ in (x, y))
    number = jnp.arange(size, dtype=counts.dtype)[:, None]

    def add(carry: tuple[Any, Any, Any], tile: _Tiles) -> tuple[Any, None]:
        sums, total, before = carry
        own = jnp.where(number < tile.rows, lax.dynamic_slice_in_dim(x, tile.start, size), jnp.zeros((), x.dtype))
        here = lax.dynamic_slice_in_dim(y, tile.start, size)
        more = jnp.einsum("zd,zf->df", own, here, preferred_element_type=total.dtype)
        total = jnp.where(tile.group == before, total, jnp.zeros((), total.dtype)) + more
        sums = lax.dynamic_update_index_in_dim(sums, total.astype(dtype), tile.group, 0)
        return (sums, total, tile.group), None

    tiles = _tiles(counts, rows, size)
    sums, total = (_empty(*one, x, y, counts) for one in (((counts.shape[0], *shape), dtype), (shape, wide(x))))
    return lax.scan(add, (sums, total, tiles.group[0]), tiles, unroll=_UNROLLED)[0][0]


# --- where there is a kernel for it, and mapped ---------------------------------------------------------------------

_ROWS = (((0,), (0,)), ((), ()))
_BY_GROUP = lax.RaggedDotDimensionNumbers(_ROWS, lhs_ragged_dimensions=(0,), rhs_group_dimensions=())


@jax.custom_batching.custom_vmap
def _ragged(x: Any, w: Any, counts: Any) -> Any:
    return lax.ragged_dot(x, w, counts)


@jax.custom_batching.custom_vmap
def _ragged_sums(x: Any, y: Any, counts: Any) -> Any:
    return lax.ragged_dot_general(x, y, counts, _BY_GROUP)


@jax.custom_batching.custom_vmap
def _product(x: Any, w: Any, counts: Any) -> Any:
    return (in_tiles if _compat.runs_on_gpu() else _ragged)(x, w, counts)


@jax.custom_batching.custom_vmap
def _contraction(x: Any, y: Any, counts: Any) -> Any:
    return (sums_in_tiles if _compat.runs_on_gpu() else _ragged_sums)(x, y, counts)


def _products(n: int, mapped: Any, *args: Any) -> tuple[Any, bool]:
    x, w, counts = _flat(n, mapped, args)
    return _ragged(x, w, counts).reshape(n, x.shape[0] // n, w.shape[-1]), True


def _contractions(n: int, mapped: Any, *args: Any) -> tuple[Any, bool]:
    x, y, counts = _flat(n, mapped, args)
    return _ragged_sums(x, y, counts).reshape(n, -1, x.shape[-1], y.shape[-1]), True


_ragged.def_vmap(_products)
_product.def_vmap(_products)
_ragged_sums.def_vmap(_contractions)
_contraction.def_vmap(_contractions)


def _flat(n: int, mapped: Any, args: Any) -> tuple[Any, ...]:
    """Put the mapped arrays one after another. The last group of each has the rows that are left over, too."""
    x, other, counts = (a if own else jnp.broadcast_to(a, (n, *a.shape)) for a, own in zip(args, mapped, strict=True))
    rest = x.shape[1] - jnp.sum(counts, axis=1, dtype=counts.dtype)
    counts = counts.at[:, -1].add(rest)
    return tuple(a.reshape(-1, *a.shape[2:]) for a in (x, other, counts))
