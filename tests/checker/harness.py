"""Hand-written bodies with markers, traced as a kernel would be."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.source_info_util as source_info_util
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from spmd.checker import Finding, check_jaxpr
from spmd.checker._arbiter import collecting
from spmd.checker._dataflow import Dataflow, walk_closed
from spmd.checker._state import FREE, HIDDEN, Dim, State, axes_of_dim, is_divided
from spmd.comm._lax import _split_p
from spmd.comm._marks import assert_equal_p, layout_p
from spmd.errors import ReplicationError
from spmd.language import Layout, Pattern

# Here stand the operations' markers, so this file is not a user's code either.
source_info_util.register_exclusion(__file__)

AXES = ("dp", "tp")
SHAPE = (8, 8)


def mesh(dp: int = 2, tp: int = 4, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((dp, tp), AXES, axis_types=(kind,) * 2, devices=jax.devices()[: dp * tp])


def mark(x: jax.Array, layout: str, role: str = "annotate", call: str | None = None, **said: Any) -> jax.Array:
    """What an operation leaves on a value."""
    text = call or f'{role}(x, "{layout}")'
    return layout_p.bind(x, layout=_in(text, Layout(layout), role), call=text, role=role, **said)


def _in(call: str, layout: Layout, role: str) -> Layout:
    """The layout as the call's own string has it, with its place there: operations take theirs from the pattern."""
    [source] = re.findall('"([^"]*)"', call)[:1] or [call]
    pattern = Pattern(source, arrow="->" in source) if source else None
    sides = () if pattern is None else pattern.inputs if role == "operand" else pattern.layouts
    return next((one for one in sides if one.without_brackets() == layout), layout)


def layouts_of(specs: Any) -> list[Layout]:
    """The arguments' layouts, as a kernel knows them."""
    entries = [[*spec, None, None][:2] for spec in specs]
    joined = [["/".join((entry,) if isinstance(entry, str) else entry or ()) for entry in pair] for pair in entries]
    return [
        Layout(" ".join(f"{n}/{axes}" if axes else n for n, axes in zip("ab", pair, strict=True))) for pair in joined
    ]


def assert_equal(x: jax.Array, *axes: str) -> jax.Array:
    return assert_equal_p.bind(x, axes=axes, why="the test says so")


def split(x: jax.Array, axis: str, dim: int, parts: int) -> jax.Array:
    return _split_p.bind(x, jax.lax.axis_index(axis), dim=dim, parts=parts, axis=axis)


def varying(x: jax.Array, *axes: str) -> jax.Array:
    missing = tuple(a for a in axes or AXES if a not in jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def rows(w: jax.Array) -> jax.Array:
    """The rows of a whole array that belong to a block along tp."""
    n = w.shape[0] // lax.axis_size("tp")
    return lax.dynamic_slice_in_dim(w, lax.axis_index("tp") * n, n)


def shards(body: Callable[..., Any], *specs: Any, m: Any, args: Any) -> Any:
    """What each device gets: arrays with a dimension for dp and one for tp in front."""
    stacked = lambda *args: jax.tree.map(lambda v: varying(v)[None, None], body(*args))
    run = jax.shard_map(stacked, mesh=m, in_specs=specs or (P("dp", "tp"), P()), out_specs=P("dp", "tp"))
    return jax.tree.map(np.asarray, jax.jit(run)(*args))


def dims_of(layout: str, shape: tuple[int, ...]) -> list[Dim]:
    """A layout as the checker writes one, of an array whose block has this shape."""
    return [((n, tuple(dim.axes)),) for dim, n in zip(Layout(layout).dims, shape, strict=True)]


class Apart(AssertionError):
    """The devices do not hold what they are said to hold."""


def nearly(one: np.ndarray, two: np.ndarray) -> bool:
    return np.allclose(one, two, rtol=1e-3, atol=1e-4)


def whole(
    stacked: np.ndarray,
    dims: Sequence[Dim],
    partial: frozenset[str] = frozenset(),
    mesh_axes: Sequence[str] = AXES,
    close: Callable[[np.ndarray, np.ndarray], bool] = nearly,
) -> np.ndarray:
    """The whole array, put together from what the devices hold as these dims say; terms of a sum are added.

    Along an axis that divides nothing, all devices must hold the same. A constant dimension is one element of it.
    """
    counts = stacked.shape[: len(mesh_axes)]
    value = stacked.reshape(*counts, *(size for dim in dims for size, _ in dim))
    order: list[int] = []
    shape: list[int] = []
    place = len(mesh_axes)
    for dim in dims:
        shape.append(1)
        for size, axes in dim:
            if axes is FREE:
                first = value.take([0], axis=place)
                _agree(close, value, first)
                value, size = (first, 1) if len(dim) == 1 else (value, size)
            for i in map(mesh_axes.index, axes if is_divided(axes) else ()):
                order.append(i)
                shape[-1] *= counts[i]
            order.append(place)
            shape[-1] *= size
            place += 1
    rest = [i for i in range(len(mesh_axes)) if i not in order]
    value = value.transpose(*rest, *order)
    for axis in (mesh_axes[i] for i in rest):
        if axis in partial:
            value = value.sum(0)
            continue
        _agree(close, value, value[:1])
        value = value[0]
    return value.reshape(shape)


def _agree(close: Callable[[np.ndarray, np.ndarray], bool], value: np.ndarray, first: np.ndarray) -> None:
    if not close(value, np.broadcast_to(first, value.shape)):
        raise Apart


def trace(body: Callable[..., Any], *specs: Any, out: Any = P(AXES), m: Any = None, args: Any = None) -> Any:
    """The jaxpr of `jit(shard_map(body))` on float arrays of 8 by 8, one per spec."""
    specs = specs or (P("dp", "tp"), P())
    m = m or mesh()
    args = args or [jnp.ones(SHAPE) for _ in specs]
    return jax.jit(jax.shard_map(body, mesh=m, in_specs=specs, out_specs=out)).trace(*args).jaxpr


def check(body: Callable[..., Any], *specs: Any, **kwargs: Any) -> None:
    """Trace and check. A body may return anything: it is made to vary so that JAX lets it out."""

    def returned(*args: Any) -> Any:
        return jax.tree.map(lambda x: varying(jnp.atleast_1d(x)), body(*args))

    check_jaxpr(
        arg_layouts=layouts_of(specs or (P("dp", "tp"), P())),
        closed_jaxpr=trace(body if "out" in kwargs else returned, *specs, **kwargs),
        mesh_axes=AXES,
        kernel="kernel",
        arg_names=("x", "w"),
    )


def suspicions(fn: Callable[..., Any], *args: Any) -> list[Finding]:
    """What types alone say of a program, before numbers are asked."""
    with collecting(True):
        jaxpr = jax.make_jaxpr(fn)(*args)
    walk = Dataflow("kernel", ())
    walk_closed(walk, jaxpr)
    return list(dict.fromkeys(walk.findings))


def message(body: Callable[..., Any], *specs: Any, **kwargs: Any) -> str:
    """The error of a wrong body, with line numbers of this directory taken out."""
    try:
        check(body, *specs, **kwargs)
    except ReplicationError as error:
        return re.sub(r"(\S*/)?(\w+\.py):\d+ \(\S*?([\w<>]+)\)", r"\2:N (\3)", str(error).strip("\n"))
    raise AssertionError("no error")


class Inside(Dataflow):
    """A walk without what a body returns: here partial sums leave it, and each device's result is a row of an output."""

    def _check_returned(self, eqn: Any, outs: Any) -> None:
        pass


@dataclass(frozen=True)
class Seen:
    """What the checker knows of the results of a body, and what the devices hold.

    Attributes:
      states: The state of each result.
      held: Its numbers, with a dimension for dp and one for tp in front.
      alone: The numbers of the same body on one device, with whole arrays.
      kinds: The kinds of the findings.
    """

    states: list[State]
    held: list[np.ndarray]
    alone: list[np.ndarray]
    kinds: list[str]

    def agree(self) -> int:
        """Compare each result of which all is known with one device; how many these are."""
        known = 0
        for state, held, alone in zip(self.states, self.held, self.alone, strict=True):
            if is_known(state):
                known += 1
                together = whole(held, state.dims, state.partial)
                np.testing.assert_allclose(np.broadcast_to(together, alone.shape), alone, rtol=1e-3, atol=1e-4)
        return known

    @property
    def axes(self) -> list[list[tuple[str, ...]]]:
        """For each result, the axes that divide each of its dimensions."""
        return [[axes_of_dim(dim) for dim in state.dims] for state in self.states]

    def __getitem__(self, part: slice) -> Seen:
        """Some of the results."""
        return Seen(self.states[part], self.held[part], self.alone[part], self.kinds)


def parted(found: Seen, counts: Sequence[int]) -> list[Seen]:
    """The results of a body that does several things, so that it is compiled once: so many of each."""
    ends = np.cumsum([0, *counts])
    return [found[slice(a, b)] for a, b in itertools.pairwise(ends)]


def is_known(state: State) -> bool:
    hidden = any(axes is HIDDEN for dim in state.dims for _, axes in dim)
    return not (hidden or state.pending or state.different)


def seen(body: Callable[..., Any], *layouts: str, args: Sequence[Any]) -> Seen:
    """Run a body whose arguments lie so on the mesh of AXES and on one device, and walk over it."""
    specs = tuple(Layout(layout).spec for layout in layouts)
    listed = lambda *args: list(jax.tree.leaves(body(*args)))
    stacked = lambda *args: [varying(v)[None, None] for v in listed(*args)]
    made = {"in_specs": specs, "out_specs": P("dp", "tp")}
    walk = Inside("kernel", AXES)
    walk_closed(walk, jax.jit(jax.shard_map(stacked, mesh=mesh(), **made)).trace(*args).jaxpr)
    states = [state._replace(dims=state.dims[2:]) for state in walk.outputs[-1][1]]
    held = shards(listed, *specs, m=mesh(), args=args)
    alone = [v[0, 0] for v in shards(listed, *specs, m=mesh(1, 1), args=args)]
    return Seen(states, held, alone, [finding.kind for finding in walk.findings])
