"""`exchange`: rows go to the devices that own them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _compat
from spmd._trees.leaves import is_int, not_int
from spmd.comm import _lax
from spmd.comm._call import Call, Factor, Operand, open_call
from spmd.comm.collectives import roll_p
from spmd.language import Dim, Layout
from spmd.modes import Frame
from spmd.ops._gradients import custom_vjp
from spmd.ops._reduce import plain_dims

# --- rows that travel without gaps: `jax.lax.ragged_all_to_all`, and where it is to be had ----------------------------


def without_gaps(frame: Frame, axes: tuple[str, ...], blocks: int, ragged: bool | None) -> bool:
    """Return whether rows travel without gaps over these axes: if asked for, or by default where the hardware can.

    It numbers the devices in the order of the mesh, and only devices of their own can take part.
    """
    able = frame.explicit and blocks > 1 and frame.in_mesh_order(axes) == axes
    return able and (not _compat.on_cpu() if ragged is None else ragged)


class Route(NamedTuple):
    """Rows that travel without gaps, as `jax.lax.ragged_all_to_all` wants them.

    Attributes:
      start: Where the rows for each device begin here.
      size: How many they are.
      base: Where they begin there.
      came: How many rows come from each device.
    """

    start: Any
    size: Any
    base: Any
    came: Any


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def travelled(axes: tuple[str, ...], sizes: tuple[int, int], x: Any, there: Route, back: Route) -> Any:
    """The rows `"c d"` in a buffer of `sizes[0]` rows. JAX's own transpose sends the offsets once more.

    Args:
      axes: The mesh axes.
      sizes: The rows of the buffer, and those of x.
      x: The rows.
      there: The route.
      back: The reverse one.
    """
    out = _compat.pvary(jnp.zeros((sizes[0], x.shape[1]), x.dtype), tuple(_compat.varying_axes(x)))
    return _sent(axes, x, out, there)


def _sent(axes: tuple[str, ...], x: Any, out: Any, there: Route) -> Any:
    """The rows of x in `out`. JAX's own vmap asks that routes are mapped, too."""
    send = functools.partial(jax.lax.ragged_all_to_all, axis_name=axes)
    one = jax.custom_batching.custom_vmap(lambda *args: send(*args))

    @one.def_vmap
    def several(n: int, mapped: Any, *args: Any) -> tuple[Any, bool]:
        every = lambda args, mapped: [
            a if own else jnp.broadcast_to(a, (n, *a.shape)) for a, own in zip(args, mapped, strict=True)
        ]
        if any(mapped[2:]):
            return jax.vmap(send)(*every(args, mapped)), True
        rows = [jnp.moveaxis(a, 0, 1) for a in every(args[:2], mapped[:2])]  # of one route: they are wider
        came = one(*(a.reshape(a.shape[0], -1) for a in rows), *args[2:])
        return jnp.moveaxis(came.reshape(rows[1].shape), 1, 0), True

    return one(x, out, *there)


def _travelled_bwd(axes: tuple[str, ...], sizes: tuple[int, int], kept: tuple[Route, Route], cotangent: Any) -> Any:
    there, back = kept
    nothing = Route(None, None, None, None)
    return travelled(axes, sizes[::-1], cotangent, back, there), nothing, nothing


travelled.defvjp(lambda axes, sizes, x, *kept: (travelled(axes, sizes, x, *kept), kept), _travelled_bwd)


_EXAMPLE = 'exchange(rows, owner, "[n/dp] d", capacity=64)'
_PACKED = 2**31  # how many pairs of an owner and a slot have a number in an int32

T = TypeVar("T")


def exchange(
    rows: T,
    owner: Any,
    layout: str,
    /,
    *,
    capacity: int,
    hops: Sequence[int] | None = None,
    ragged: bool | None = None,
    **names: Any,
) -> tuple[T, jax.Array, jax.Array]:
    """Send rows to the devices that own them: `exchange(particles, owner, "[n/a] d", capacity=64)`.

    The brackets say which dimension counts the rows. It is divided, and each block of it has slots for rows, some of
    them empty. A row goes to the block that `owner` names: block 0 is on the first device along the axes, as in
    `ppermute`. A slot with a negative owner is empty. The result has the same number of slots.

    No row is lost. One device sends at most `capacity` rows to one other, the first ones of its block. A device takes
    what it has slots for, where those that leave are free, too. What does not fit stays where it is and is counted in
    `stayed`; the next exchange tries again.

    Communication: for n devices and rows of W bytes (of all leaves), one all-gather of counts, 4(n-1)(n+1) bytes, and
    one all-to-all of padded blocks for each dtype, together (n-1) capacity W bytes. With `hops`, one collective-permute
    for each hop and dtype in place of the all-to-all, capacity W bytes each. Backward the same, without the counts.
    Nothing is sent if the rows are not divided. On hardware with ragged_all_to_all, which CPUs do not have, the rows
    that go are sent and no padding, W bytes each: a large capacity then costs nothing.

    Args:
      rows: An array or a pytree of arrays of this layout, such as `"[n/a] ..."`.
      owner: Integers, one for each row: `"n/a"`.
      layout: The layout of the rows, with the dimension that counts them in brackets.
      capacity: How many rows one device can send to one other. The rows that stay need none.
      hops: How many blocks away rows can go, if not to all: `(1, -1)` for neighbours, round the end. Others stay.
      ragged: Whether rows travel by ragged_all_to_all in explicit mode; None for where devices are not CPUs. Rows
        divided over axes in another order than that of the mesh travel padded.
      **names: Sizes or mesh axes of names in the layout. With `a=None` all rows are in one block.

    Returns:
      The rows, in the structure and layout of those given: those that stay on a device first, then those that came, in
      the order of the devices that sent them; empty slots hold zeros. The owner of each row, int32, -1 for empty slots;
      a row that could not go keeps the number of its owner. How many rows, on all devices together, are not where
      their owner is: a scalar, equal on all of them.

    Raises:
      LayoutError: If not exactly one dimension is in brackets, owners are not integers, or the capacity or a hop is not
        an int above zero, or not a hop; or if both hops and ragged are given.
      CommunicationError: If rows or owners are partial sums.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("n/a -> n/a, n/a, scalar", mesh=mesh)
      ... def sorted_by_tens(x):
      ...     return spmd.exchange(x, x // 10, "[n/a]", capacity=2)
      >>> rows, owner, stayed = sorted_by_tens(jnp.array([31, 12, 5, 30, 14, 22, -1, 35]))
      >>> print(rows, owner, stayed)  # the last device has slots for two of its three rows
      [ 5  0 30 12 14 22 35 31] [ 0 -1  3  1  1  2  3  3] 2
    """
    call = open_call("exchange", layout, names, arrays=(rows, owner), arrow=False, example=_EXAMPLE)
    dim = _counted(call)
    numbers = call.operand(owner, layout=Layout.from_dims([Dim(dim.atoms)]), name="owner")
    if not jnp.issubdtype(numbers.x.dtype, jnp.integer):
        call.fail(f"owners are integers, not {numbers.x.dtype}.")
    [factor] = numbers.factors
    if fault := not_int("capacity, the number of rows,", capacity, 1):
        call.fail(fault, advice=f"as in {_EXAMPLE}")
    job = _Job(call, factor, capacity, _distances(call, hops), ragged)
    if hops is not None and ragged is not None:
        rule = "give hops= or ragged=, not both: rows travel by permutes or by one ragged_all_to_all."
        call.fail(rule)
    leaves, tree = jax.tree.flatten(rows)
    calls = [call.fork() for _ in leaves]
    operands = [own.operand(value, name="rows") for own, value in zip(calls, leaves, strict=True)]
    with call.scope():
        parts, owners, stayed = job.run(operands, numbers.x)
    plain = call.src.without_brackets()
    parts = [own.result(part, plain, due=True) for own, part in zip(calls, parts, strict=True)]
    return jax.tree.unflatten(tree, parts), call.result(owners, numbers.layout), call.result(stayed, Layout("scalar"))


def _counted(call: Call) -> Dim:
    """The dimension that counts the rows."""
    src = call.src
    plain_dims(call, src, unnamed=True, literals=True)
    marked = [dim for dim in src.dims if dim.bracket]
    if len(marked) != 1 or len(marked[0].atoms) != 1:
        rule = "exchange moves the rows that one dimension counts: put it in brackets."
        call.fail(rule, advice=f"as in {_EXAMPLE}")
    if src.unreduced:
        call.refuse("a row goes to one device, and a partial sum is on several: psum first.")
    return marked[0]


def _distances(call: Call, hops: Any) -> tuple[int, ...] | None:
    if hops is None:
        return None
    good = isinstance(hops, (tuple, list)) and len(hops) and all(is_int(hop) and hop for hop in hops)
    if not good:
        rule = f"hops are ints other than zero, such as (1, -1), not {hops!r}."
        call.fail(rule)
    return tuple(hops)


class _Plan(NamedTuple):
    """What one block does.

    Attributes:
      send: The row in each place of what is sent, `(destination, place)`.
      sends: Whether there is one.
      kept: The row that stays in each slot, and whether there is one.
      keeps: Whether there is one.
      lands: The slot of each place of what comes, `(source, place)`, all different. Beyond the last one, where nothing
        comes.
      owner: The owner of each slot.
      order: The rows by owner, for rows that travel without gaps.
      routes: How they travel then, from their places in this order to their slots, and back; None if rows are padded.
    """

    send: Any
    sends: Any
    kept: Any
    keeps: Any
    lands: Any
    owner: Any
    order: Any
    routes: tuple[Route, Route] | None


@dataclass(frozen=True)
class _Job:
    """One exchange. Blocks have a dimension of their own, in front: one block on a device, all in whole arrays."""

    call: Call
    factor: Factor
    capacity: int
    hops: tuple[int, ...] | None
    ragged: bool | None

    @cached_property
    def blocks(self) -> int:
        return self.call.frame.axis_size(self.factor.axes)

    @cached_property
    def slots(self) -> int:
        return self.factor.size // self.blocks

    @cached_property
    def distances(self) -> tuple[int, ...]:
        """Return how many blocks away what is sent goes."""
        hops = range(self.blocks) if self.hops is None else self.hops
        return tuple(dict.fromkeys(hop % self.blocks for hop in hops if hop % self.blocks))

    @cached_property
    def divided(self) -> bool:
        """Return whether each device has one block, and not all of them."""
        return self.call.frame.explicit and bool(self.factor.axes)

    def here(self) -> Any:
        """The numbers of the blocks."""
        if not self.divided:
            return _numbers(self.blocks)
        axes = self.factor.axes
        return jnp.asarray(_lax.axis_index(axes, self.call.mesh), jnp.int32)[None]

    def run(self, operands: list[Operand], owner: Any) -> tuple[list[Any], Any, Any]:
        """The rows of each operand, their owners, and how many stayed."""
        if not self.slots:
            return [one.x for one in operands], _narrow(owner), jnp.int32(0)
        owner = _narrow(owner).reshape(-1, self.slots)
        here = self.here()
        orders = jax.vmap(self.ordered)(owner)
        counts, held = orders[2], _count(owner >= 0, 1)
        table = jnp.concatenate([counts, held[:, None]], 1)
        if self.divided:
            table = _lax.all_gather(table, self.factor.axes, 0, "invarying")
        sent = self.settled(table)
        plan = jax.vmap(self.plan, in_axes=(0, 0, 0, None, None))(owner, here, orders, table, sent)
        dims = [next(i for i, f in enumerate(one.factors) if f.bracket) for one in operands]
        moved = [jnp.moveaxis(one.x, dim, 0) for one, dim in zip(operands, dims, strict=True)]
        by_dtype: dict[Any, list[int]] = {}
        for i, x in enumerate(moved):
            by_dtype.setdefault(x.dtype, []).append(i)
        out: dict[int, Any] = {}
        for group in by_dtype.values():  # the leaves of one dtype travel together
            flat = [moved[i].reshape(*owner.shape, math.prod(moved[i].shape[1:])) for i in group]
            there = self.moved(jnp.concatenate(flat, 2), plan)
            start = 0
            for i, x in zip(group, flat, strict=True):
                part = there[..., start : start + x.shape[2]].reshape(moved[i].shape)
                out[i], start = jnp.moveaxis(part, 0, dims[i]), start + x.shape[2]
        away = _count(table[:, :-1]) - _count(jnp.diagonal(table)) - _count(sent)
        beyond = _count(table[:, -1]) - _count(table[:, :-1])  # rows whose owner does not exist
        return [out[i] for i in range(len(moved))], plan.owner.reshape(-1), away + beyond

    def ordered(self, owner: Any) -> tuple[Any, Any, Any]:
        """The rows of a block by owner, where each owner's begin, and how many they are."""
        key = jnp.where((owner >= 0) & (owner < self.blocks), owner, self.blocks)
        counts = jnp.zeros(self.blocks + 1, jnp.int32).at[key].add(1)
        return self.by_owner(key), jnp.cumsum(counts, dtype=jnp.int32) - counts, counts[: self.blocks]

    def by_owner(self, key: Any) -> Any:
        """The rows of a block in the order of their keys, and of their slots where keys are equal.

        To sort one array of numbers takes a sixth of the time of an argsort on a CPU. So the slot is written into the
        low bits of the key.
        """
        bits = (self.slots - 1).bit_length()
        if (self.blocks + 1) << bits > _PACKED:
            return _lax.argsort(key)
        slots = _numbers(self.slots)
        return lax.sort(key << bits | slots, is_stable=False) & ((1 << bits) - 1)

    def settled(self, table: Any) -> Any:
        """Return how many rows each block sends to each other, `(from, to)`. All devices compute the same."""
        n = self.blocks
        counts, held = table[:, :n], table[:, n]
        far = _numbers(n)[None] - _numbers(n)[:, None]
        open_to = jnp.isin(far % n, jnp.array(self.distances, jnp.int32))
        wanted = jnp.where(open_to, jnp.minimum(counts, self.capacity), 0)
        before = jnp.cumsum(wanted, 0, dtype=jnp.int32) - wanted

        def fits(sent: Any) -> Any:
            """Return what of `wanted` has slots if `sent` has left."""
            return jnp.clip((self.slots - held + _count(sent, 1))[None] - before, 0, wanted)

        # What stays because a slot is missing takes a slot itself. So the numbers fall until they fit.
        start = (wanted, fits(wanted))
        return lax.while_loop(lambda one: jnp.any(one[0] != one[1]), lambda one: (one[1], fits(one[1])), start)[1]

    def plan(self, owner: Any, here: Any, ordered: tuple[Any, Any, Any], table: Any, sent: Any) -> _Plan:
        order, starts, _ = ordered
        goes, places, slots = sent[here], _numbers(self.capacity), _numbers(self.slots)
        if self.hops is None or not self.distances:
            to = source = _numbers(self.blocks)
        else:
            hops = jnp.array(self.distances, jnp.int32)
            to, source = (here + hops) % self.blocks, (here - hops) % self.blocks
        send = order[jnp.minimum(starts[to][:, None] + places[None], self.slots - 1)]
        key = jnp.where((owner >= 0) & (owner < self.blocks), owner, 0)
        rank = slots.at[order].set(slots, unique_indices=True) - starts[key]
        keeps = (owner >= 0) & ((owner >= self.blocks) | (rank >= goes[key]))
        after = jnp.cumsum(keeps, dtype=jnp.int32)
        kept, count = slots.at[jnp.where(keeps, after - 1, self.slots)].set(slots, mode="drop"), after[-1]
        comes_from = sent[:, here]
        ends = count + jnp.cumsum(comes_from, dtype=jnp.int32)
        lands = (ends - comes_from)[source][:, None] + places[None]
        beyond = self.slots + _numbers(lands.size).reshape(lands.shape)
        gapless = self.hops is None and without_gaps(self.call.frame, self.factor.axes, self.blocks, self.ragged)
        return _Plan(
            send,
            places[None] < goes[to][:, None],
            kept,
            slots < count,
            jnp.where(places[None] < comes_from[source][:, None], lands, beyond),
            jnp.where(slots < count, owner[kept], jnp.where(slots < ends[-1], here, -1)),
            order,
            self.routes(here, table, sent) if gapless else None,
        )

    def routes(self, here: Any, table: Any, sent: Any) -> tuple[Route, Route]:
        """Return how rows travel without gaps: from where they lie by owner to behind those that stay, and back."""
        counts, held = table[:, :-1], table[:, -1]
        starts = jnp.cumsum(counts, 1, dtype=jnp.int32) - counts
        bases = (held - _count(sent, 1))[None] + jnp.cumsum(sent, 0, dtype=jnp.int32) - sent
        goes, comes = sent[here], sent[:, here]
        return Route(starts[here], goes, bases[here], comes), Route(bases[:, here], comes, starts[:, here], goes)

    def moved(self, x: Any, plan: _Plan) -> Any:
        """The rows `(block, slot, width)` in their new slots. The maps are one-to-one, so no gradient is a sum."""
        if not x.shape[-1]:
            return x
        stays = picked(x, plan.kept, plan.keeps)
        if not self.distances:
            return stays
        if plan.routes is not None:
            there, back = (Route(*(one[0] for one in route)) for route in plan.routes)
            rows = picked(x, plan.order, jnp.ones_like(plan.order, bool))[0]
            came = travelled(self.factor.axes, (self.slots, self.slots), rows, there, back)[None]
            return jnp.where(plan.keeps[..., None], stays, came)
        flat = lambda a: a.reshape(a.shape[0], -1)
        sent = picked(x, flat(plan.send), flat(plan.sends))
        sent = sent.reshape(*plan.send.shape, -1)
        if self.hops is not None:
            came = jnp.stack([self.shifted(sent[:, i], hop) for i, hop in enumerate(self.distances)], 1)
        elif self.divided:
            came = _lax.all_to_all(sent, self.factor.axes, split=1, concat=1)
        else:
            came = jnp.swapaxes(sent, 0, 1)
        came = came.reshape(came.shape[0], -1, came.shape[-1])
        # Not a gather and a choice: on a CPU, XLA does these again in everything that uses the rows.
        put = lambda rows, lands, came: rows.at[lands].set(came, mode="drop", unique_indices=True)
        return jax.vmap(put)(stays, flat(plan.lands), came)

    def shifted(self, x: Any, by: int) -> Any:
        """The places of all blocks, `by` blocks further."""
        if not self.divided:
            return roll_p.bind(x, by=by, axis=0)
        pairs = [(i, (i + by) % self.blocks) for i in range(self.blocks)]
        return _lax.ppermute(x, self.factor.axes, self.call.mesh, pairs)


def _numbers(n: int) -> Any:
    return jnp.arange(n, dtype=jnp.int32)


def _count(x: Any, axis: int | None = None) -> Any:
    """The sum of small numbers in int32. With x64 JAX's own is wider, and a loop cannot carry both."""
    return jnp.sum(x, axis, dtype=jnp.int32)


def _narrow(owner: Any) -> Any:
    """Owners as int32. Those beyond it are nobody's, or empty, as before."""
    limits, most = jnp.iinfo(owner.dtype), jnp.iinfo(jnp.int32).max
    owner = jnp.minimum(owner, most) if limits.max > most else owner
    return (jnp.maximum(owner, -1) if limits.min < -most - 1 else owner).astype(jnp.int32)


def picked(x: Any, index: Any, valid: Any) -> Any:
    """The rows of `"... r d"` by number, zeros where the number is not valid."""
    pick = lambda rows, numbers: rows.at[numbers].get(mode="promise_in_bounds", wrap_negative_indices=False)
    for _ in range(index.ndim - 1):
        pick = jax.vmap(pick)
    return jnp.where(valid[..., None], pick(x, index), jnp.zeros((), x.dtype))
