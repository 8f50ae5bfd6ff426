"""Which collectives a compiled program runs, over which mesh axes, how often and with how many bytes."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

from spmd._text import Table, bytes_text, fields_of, sent_bytes, shown_file, shown_width, wrapped
from spmd.errors import SpmdError
from spmd.inspect._hlo import Frame, HloModule, Instruction, Visit, end_of, parse_module, parse_shapes, shape_bytes
from spmd.inspect._program import stage
from spmd.language import axes_product, mesh_text
from spmd.mesh import sizes_for

# --- groups of devices in compiled text, in each form that JAX prints, and the mesh axes that they stand for ----------


_IOTA = re.compile(r"^(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_NAME = r"(?:'[^']*'|\"[^\"]*\"|[\w.]+)"
_MESH = re.compile(
    r"^@?mesh[\[<](?P<sizes>[^\]>]*)[\]>]"
    r"(?:,\s*device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))?"
    r"\s*\{(?P<axes>[^}]*)\}"
)
_SIZE = re.compile(rf"({_NAME})=(\d+)")
_AXIS = re.compile(rf"({_NAME})(?::\((\d+)\)(\d+))?")

Groups = tuple[tuple[int, ...], ...]


def parse_groups(text: str, partitions: int) -> Groups:
    """The groups in `text`, which begins with the value of `replica_groups=`.

    Three forms are printed: a list, a transposed iota, and axes of a mesh with parts of axes.

    >>> parse_groups("{{0,1},{2,3}}, to_apply=%add", 4)
    ((0, 1), (2, 3))
    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['x'=2,'y'=4] {'y':(1)2}", 8)
    ((0, 2), (1, 3), (4, 6), (5, 7))

    Raises:
      SpmdError: The text has another form.
    """
    if text.startswith("{"):
        return parse_pairs(text) or (tuple(range(partitions)),)
    if found := _IOTA.match(text):
        return _rows(_iota(found.group(2)).reshape(_ints(found.group(1))))
    if found := _MESH.match(text):
        return _mesh_groups(found)
    raise SpmdError(f"The compiled text has replica groups in a form that is not known here: {text[:80]!r}.")


def parse_pairs(text: str) -> Groups:
    """The (source, target) pairs of a collective-permute, or the groups of a list, which ends where its brace closes.

    >>> parse_pairs("{{0,1},{1,0}}, metadata={}")
    ((0, 1), (1, 0))
    """
    return tuple(map(_ints, re.findall(r"\{([\d,\s]+)\}", text[1 : end_of(text, 1, "}")])))


def named_mesh(text: str) -> dict[str, int] | None:
    """The mesh that the groups of `text` are written in, when its axes carry their own names.

    >>> named_mesh("mesh['dp'=2,'tp'=4] {'tp'}"), named_mesh("mesh['axis_0'=8] {'axis_0'}")
    ({'dp': 2, 'tp': 4}, None)
    """
    found = _MESH.match(text)
    if found is None:
        return None
    sizes = _sizes(found)
    invented = all(re.fullmatch(r"(mesh_)?axis_\d+", name) for name in sizes)
    return None if invented else sizes


def axes_of_groups(groups: Groups, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], bool]:
    """The mesh axes, in mesh order, along which the members of a group differ.

    Device i of the groups is the i-th of the mesh in row-major order. The second value says whether each
    group spans those axes entirely; XLA's own resharding also uses parts of axes.

    >>> axes_of_groups(((0, 2), (1, 3)), {"dp": 2, "tp": 2})
    (('dp',), True)
    >>> axes_of_groups(((0, 1), (2, 3)), {"tp": 4})
    (('tp',), False)
    """
    axes = axes_of_pairs(groups, mesh)
    size = axes_product(axes, mesh)
    return axes, all(len(group) == size for group in groups)


def axes_of_pairs(pairs: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes, in mesh order, along which a source and its target, or the members of a group, differ.

    >>> axes_of_pairs(((0, 1), (1, 0), (2, 3), (3, 2)), {"dp": 2, "tp": 2})
    ('tp',)
    """
    shape = tuple(mesh.values())
    last = max(itertools.chain(*pairs), default=0)
    if last >= math.prod(shape):
        rule = (
            f"The compiled program has a device {last}, and the {mesh_text(mesh)} has only {math.prod(shape)} devices."
        )
        raise SpmdError(rule, advice="mesh= is the mesh that the program was compiled for")
    differs = np.zeros(len(shape), bool)
    for group in pairs:
        places = np.stack(np.unravel_index(np.asarray(group, dtype=np.int64), shape))
        differs |= (places != places[:, :1]).any(axis=1)
    return tuple(itertools.compress(mesh, differs))


def _sizes(found: re.Match[str]) -> dict[str, int]:
    return {name.strip("'\""): int(size) for name, size in _SIZE.findall(found.group("sizes"))}


def _mesh_groups(found: re.Match[str]) -> Groups:
    sizes = _sizes(found)
    parts = [
        (name.strip("'\""), int(before or 1), int(size) if size else None)
        for name, before, size in _AXIS.findall(found.group("axes"))
    ]
    factors: list[tuple[str, int, int]] = []  # (axis, product of the factors before it, size), mesh order
    for name, size in sizes.items():
        cuts = {1, size}
        for axis, before, part in parts:
            if axis == name and part is not None:
                cuts |= {before, before * part}
        edges = sorted(cuts)
        factors += [(name, a, b // a) for a, b in itertools.pairwise(edges)] or [(name, 1, 1)]
    chosen: list[int] = []
    for axis, before, part in parts:
        end = sizes[axis] if part is None else before * part
        chosen += [i for i, (name, at, _) in enumerate(factors) if name == axis and before <= at < end]
    rest = [i for i in range(len(factors)) if i not in chosen]
    ids = found.group("ids") or f"[{math.prod(sizes.values())}]"
    devices = _iota(ids) if ids.startswith("[") else np.array(_ints(ids))
    grid = devices.reshape([size for _, _, size in factors]).transpose(rest + chosen)
    return _rows(grid.reshape(-1, math.prod(factors[i][2] for i in chosen)))


def _iota(text: str) -> np.ndarray:
    """The numbers of devices in the order of `[4,2]T(1,0)`."""
    dims, _, order = text.partition("T")
    grid = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return (grid.transpose(_ints(order)) if order else grid).reshape(-1)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _rows(grid: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in grid)


def axes_text(axes: Sequence[str]) -> str:
    """Axis names as a layout writes them: `dp/tp`; `-` if there are none."""
    return "/".join(axes) or "-"


# XLA's names and ours. Any reduction is an all-reduce, so `psum` stands for pmax and pmin too.
KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "psum",
    "reduce-scatter": "psum_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "ppermute",
    "collective-broadcast": "pbroadcast",
}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: `all_gather`, `psum` (any all-reduce), `psum_scatter`, `all_to_all`, `ppermute`; XLA itself also
        makes `ragged_all_to_all` and `pbroadcast`.
      axes: The mesh axes it runs over, in mesh order; empty when no mesh is known.
      whole: Whether its groups span those axes entirely. XLA's own resharding also uses parts of axes.
      group_size: Devices per group; for a ppermute, of the axes it moves along.
      bytes: Bytes that one device sends in one execution: with n devices per group and S the larger side,
        S(n-1)/n for all_gather and psum_scatter, twice that for psum, shard*(n-1)/n for all_to_all, the
        shard for ppermute.
      count: How often one call of the program runs it (loops multiplied out).
      exact: Whether `count` is certain. In a loop of unknown length it is counted once, in a branch as taken.
      operands: Dtype and local shape of each operand; several when XLA combined collectives into one.
      op_name: The name that JAX gave it, such as `jit(f)/shard_map/psum_invariant`.
      frames: The Python lines that made it, innermost first.
      reducer: The name that JAX gave the sum it applies. It still says who asked for the collective if XLA has
        moved it, for example out of a loop.
    """

    kind: str
    axes: tuple[str, ...]
    whole: bool
    group_size: int
    bytes: int
    count: int
    exact: bool
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    op_name: str = ""
    frames: tuple[Frame, ...] = ()
    reducer: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in one call of the program."""
        return self.bytes * self.count

    @property
    def dtype(self) -> str:
        """The dtype of the largest operand, as HLO writes it."""
        return self._largest[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape of the largest operand."""
        return self._largest[1]

    @property
    def where(self) -> str:
        """`file.py:12` of the innermost line outside this package; empty when the text has no lines."""
        return place_of(self.frames)

    @property
    def _largest(self) -> tuple[str, tuple[int, ...]]:
        return max(self.operands, key=lambda operand: shape_bytes(*operand))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        names = "kind axes whole group_size bytes count exact operands op_name where"
        return fields_of(self, *names.split())


def place_of(frames: Sequence[Frame]) -> str:
    """`file.py:12` of the innermost line outside this package; empty where there is none."""
    theirs = [frame for frame in frames if not frame.file.startswith(_PACKAGE)] or frames
    return f"{os.path.basename(shown_file(theirs[0].file))}:{theirs[0].line}" if theirs else ""


def counts_by_kind(runs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return how often each kind of collective runs, kinds in the order of their names."""
    found: dict[str, int] = {}
    for kind, count in sorted(runs, key=lambda run: run[0]):
        found[kind] = found.get(kind, 0) + count
    return found


One = TypeVar("One")


def grouped(ones: Iterable[One], key: Callable[[One], Any]) -> dict[Any, tuple[One, ...]]:
    """Those with the same key together, in the order of the first of each."""
    found: dict[Any, list[One]] = {}
    for one in ones:
        found.setdefault(key(one), []).append(one)
    return {name: tuple(alike) for name, alike in found.items()}


def by_part(ones: Iterable[One]) -> dict[str, tuple[One, ...]]:
    """What is sent, or will be, by the part of the program that sends it, as a report shows it."""
    again, backward = "forward again, for jax.checkpoint", "backward"
    part = lambda one: one.phase if one.phase == "forward" else again if one.recomputed else backward
    found = grouped(ones, part)
    return {name: found[name] for name in ("forward", again, backward) if name in found}


class CollectiveReport(Sequence[Collective]):
    """The collectives of one compiled program, in the order in which it runs them.

    A sequence of `Collective`; printing it shows `table()`.
    """

    def __init__(self, items: Iterable[Collective], mesh: Mapping[str, int] | None = None) -> None:
        self._items = tuple(items)
        self.mesh = dict(mesh) if mesh is not None else None

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> CollectiveReport: ...
    def __getitem__(self, index: int | slice) -> Collective | CollectiveReport:
        found = self._items[index]
        return CollectiveReport(found, self.mesh) if isinstance(found, tuple) else found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CollectiveReport) and self._items == other._items

    __hash__ = None  # type: ignore[assignment]

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in one call."""
        return sum(item.total_bytes for item in self)

    @property
    def counts(self) -> dict[str, int]:
        """Return how many collectives of each kind one call runs, kinds in the order of their names."""
        return counts_by_kind((item.kind, item.count) for item in self)

    @property
    def exact(self) -> bool:
        """False when a collective lies in a loop of unknown length or in a branch."""
        return all(item.exact for item in self)

    def by_axis(self) -> dict[str, CollectiveReport]:
        """Return one report for each set of mesh axes, keyed as a layout writes them: `"tp"`, `"dp/tp"`."""
        return self._grouped(lambda item: axes_text(item.axes))

    def by_kind(self) -> dict[str, CollectiveReport]:
        """Return one report for each kind of collective."""
        return self._grouped(lambda item: item.kind)

    def _grouped(self, key: Callable[[Collective], str]) -> dict[str, CollectiveReport]:
        found = grouped(self, key)
        return {name: CollectiveReport(found[name], self.mesh) for name in sorted(found)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        found = fields_of(self, "mesh", "counts", "total_bytes", "exact")
        return {**found, "collectives": [item.to_dict() for item in self]}

    def table(self, width: int | None = None) -> str:
        """Return the report as text, with one line for each collective and a line of totals.

        Args:
          width: The number of columns. By default it is that of the terminal.
        """
        if not self:
            return "no collectives"
        width = shown_width(width)
        # a verb on a pytree is one line of the program and many collectives
        same = lambda one: (one.kind, one.axes, one.dtype, one.shape, len(one.operands), one.where)
        head = ("collective", "axes", "times", "operand", "bytes", "where")
        table = Table([*map(_row, grouped(self, same).values())], head, right=(2, 4), below=(5,))
        total = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        said = [f"total: {total}; {bytes_text(self.total_bytes)} sent per device"]
        if not self.exact:
            said.append("* in a loop of unknown length (counted once) or in a branch (counted as taken)")
        return "\n".join([table.text(width), *(part for line in said for part in wrapped(line, width))])

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        counts = ", ".join(f"{kind}={count}" for kind, count in self.counts.items())
        return f"CollectiveReport({counts or 'no collectives'}, total_bytes={self.total_bytes})"


def _row(items: Sequence[Collective]) -> tuple[str, ...]:
    item = items[0]
    times = f"{sum(i.count for i in items)}{'' if all(i.exact for i in items) else '*'}"
    more = f" +{len(item.operands) - 1}" if len(item.operands) > 1 else ""
    operand = f"{item.dtype}[{','.join(map(str, item.shape))}]{more}"
    axes = axes_text(item.axes) + ("" if item.whole else f" (groups of {item.group_size})")
    return (item.kind, axes, times, operand, bytes_text(sum(i.total_bytes for i in items)), item.where)


# -------------------- the counting


def collectives(fn: Any, *args: Any, mesh: Any = None, **kwargs: Any) -> CollectiveReport:
    """The collectives of `fn` as compiled for these arguments: kinds, mesh axes, bytes, how often, where.

    Nothing is run: `fn` is traced, lowered and compiled. The report shows what the compiler left, combined as it
    has combined it and in its dtypes: the CPU compiler, for example, sums bfloat16 in float32.

    Args:
      fn: A kernel, a `jax.jit`ed or plain function, or what `.lower` or `.compile` returned (then without
        arguments).
      *args: Arguments of `fn`, arrays or `jax.ShapeDtypeStruct`s.
      mesh: The mesh whose axes name the groups: a Mesh, an AbstractMesh or sizes. By default the one that
        `fn` or its arguments carry.
      **kwargs: Keyword arguments of `fn`.

    Returns:
      A `CollectiveReport`, with the bytes that each device sends.

    Raises:
      SpmdError: `fn` is none of the above, or the mesh is smaller than the program.

    >>> import jax
    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    >>> body = lambda x: jax.lax.psum(x, "tp")
    >>> specs = {"in_specs": P("dp", "tp"), "out_specs": P("dp")}
    >>> fn = jax.jit(jax.shard_map(body, mesh=mesh, **specs))
    >>> report = collectives(fn, jax.ShapeDtypeStruct((8, 64), "float32"))
    >>> report.counts, report.total_bytes
    ({'psum': 1}, 384)
    """
    program = stage("collectives", fn, args, kwargs)
    text = program.compiled.as_text()
    return collectives_of_text(text, mesh=program.mesh if mesh is None else mesh)


def collectives_of_text(text: str, *, mesh: Any = None) -> CollectiveReport:
    """The collectives in `text`, the text of a compiled module; see `collectives`."""
    if not text:
        raise SpmdError("This backend does not give the text of its compiled programs.")
    module = parse_module(text)
    sizes = None if mesh is None else sizes_for(mesh, "collectives(..., mesh=...)")
    visits = list(_collective_visits(module))
    if sizes is None:
        # JAX 0.12 writes groups in the program's own mesh; use its names when nothing better is known.
        groups = (visit.instruction.attribute_from("replica_groups") or "" for visit, _ in visits)
        sizes = next((named for text in groups if (named := named_mesh(text))), None)
    records = (_record(module, visit, opcode, sizes) for visit, opcode in visits)
    return CollectiveReport((record for record in records if record is not None), sizes)


def _collective_visits(module: HloModule) -> Iterator[tuple[Visit, str]]:
    for visit in module.visits():
        opcode = visit.instruction.opcode.removesuffix("-start")
        if opcode == "send" and "_xla_send_recv_source_target_pairs" in visit.instruction.attributes:
            yield visit, "collective-permute"  # on GPUs, a permute in a loop may be pipelined as sends
        elif opcode in KINDS and not _goes_on(module, visit):  # an asynchronous one is counted where it starts
            yield visit, _scattered(module, visit, opcode)


def _goes_on(module: HloModule, visit: Visit) -> bool:
    """Return whether this is a later part of a collective that runs beside other work.

    XLA for TPUs writes such a collective again into each fusion that runs meanwhile and into the one that ends it.
    """
    if "async_collective_fusion_config" not in visit.instruction.attributes:
        return False
    inside = module.computations[visit.computation]
    return not any('"AsyncCollectiveStart"' in one.attributes for one in inside)


def _scattered(module: HloModule, visit: Visit, opcode: str) -> str:
    """On TPUs a fusion of an all-reduce and the slice of its result is a reduce-scatter."""
    root = module.root(visit.computation) if visit.caller and visit.caller.opcode == "fusion" else None
    alone = root and root.opcode == "dynamic-slice" and root.operands[0] == visit.instruction.name
    return "reduce-scatter" if opcode == "all-reduce" and alone else opcode


def _record(module: HloModule, visit: Visit, opcode: str, mesh: dict[str, int] | None) -> Collective | None:
    instruction = visit.instruction
    found = _group(module, instruction, opcode, mesh)
    if found is None:
        return None
    axes, whole, size = found
    types = [module.named(visit.computation, name).type for name in instruction.operands]
    operands = tuple(shape for text in types for shape in parse_shapes(text))
    in_place = len(types) == 4 and opcode == "collective-permute" and "s32[" in types[3]
    if instruction.opcode == "send" or opcode == "ragged-all-to-all" or in_place:
        operands = operands[:1]  # the others are a token, or a buffer, and offsets and sizes in it
    named = instruction if instruction.op_name or not visit.caller else visit.caller
    reducer = next(iter(instruction.called("to_apply")), "")
    applied = (one.op_name for one in module.computations.get(reducer, ()) if one.op_name)
    return Collective(
        kind=KINDS[opcode],
        axes=axes,
        whole=whole,
        group_size=size,
        bytes=sent_bytes(KINDS[opcode], sum(shape_bytes(*operand) for operand in operands), size),
        count=visit.times,
        exact=visit.exact,
        operands=operands,
        op_name=named.op_name,
        frames=module.stack(named),
        reducer=next(applied, ""),
    )


def _group(
    module: HloModule, instruction: Instruction, opcode: str, mesh: dict[str, int] | None
) -> tuple[tuple[str, ...], bool, int] | None:
    """The axes of a collective, whether its groups span them, and the devices in one; None if nothing moves."""
    if opcode == "collective-permute":
        key = "_xla_send_recv_source_target_pairs" if instruction.opcode == "send" else "source_target_pairs"
        where = instruction.attributes.partition(key + "=")[2].lstrip('"')
        pairs = parse_pairs(where)
        if all(source == target for source, target in pairs):
            return None
        if mesh is None:
            return (), True, len({device for pair in pairs for device in pair})
        axes = axes_of_pairs(pairs, mesh)
        return axes, True, axes_product(axes, mesh)
    groups = parse_groups(instruction.attribute_from("replica_groups") or "{}", module.partitions)
    size = max(len(group) for group in groups)
    if size <= 1:
        return None
    axes, whole = ((), True) if mesh is None else axes_of_groups(groups, mesh)
    return axes, whole, size
