"""The rule of an operation, tried by numbers over all placements: along which mesh axes its arrays may be divided."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

import spmd
from spmd import _compat
from spmd._jaxprs.errors import first_line
from spmd._jaxprs.traces import FlatProgram
from spmd._text import Table, html_page
from spmd._trees.leaves import held_dtype, kind_of
from spmd.checker import tried
from spmd.checker._arbiter import for_numbers
from spmd.checker._verdict import believed_lines, difference_text
from spmd.comm import _lax
from spmd.errors import LayoutError, MeshError, SizeError, SpmdError
from spmd.language import Layout, Pattern, axes_product, mesh_text
from spmd.mesh import make_mesh
from spmd.testing._assertions import Mismatch
from spmd.testing._meshes import assert_same_on_any_mesh

_CALL = "check_rule(fn, pattern, ...)"
_AXES = {"x": 2, "y": 3}  # of a pattern that names none
_SIZES = (2, 3)  # of axes without a mesh: a size that divides no other one


@dataclass(frozen=True)
class Placement:
    """One way to divide the arrays of an operation.

    Attributes:
      pattern: The layouts.
      holds: Whether results and gradients are those of one device; None if nothing was compared.
      why: What differs, or which error is raised, or why nothing was compared.
      declared: Whether it is the pattern that was given.
    """

    pattern: Pattern
    holds: bool | None
    why: str = ""
    declared: bool = False


class Placements(tuple[Placement, ...]):
    """All placements of an operation. Printed, it is a table: those that hold, then those that do not, with reasons."""

    mesh: Mapping[str, int]

    def __new__(cls, placements: Sequence[Placement], mesh: Mapping[str, int]) -> Self:
        self = super().__new__(cls, placements)
        self.mesh = mesh
        return self

    def __reduce__(self) -> Any:
        return type(self), (tuple(self), dict(self.mesh))

    @property
    def holding(self) -> list[str]:
        """The patterns that hold."""
        return [str(one.pattern) for one in self if one.holds]

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return html_page(f"on {mesh_text(self.mesh)}", [self._table()])

    def _table(self) -> Table:
        word = {True: "holds", False: "does not hold", None: "not tested"}
        order = sorted(self, key=lambda one: (one.holds is not True, one.holds is None))
        return Table([(str(one.pattern), "declared" * one.declared, word[one.holds], one.why) for one in order])


def check_rule(
    fn: Callable[..., Any],
    pattern: str | Pattern,
    *args: Any,
    mesh: Any = None,
    reference: Callable[..., Any] | None = None,
    with_pattern: bool = False,
    grad: bool = True,
    **sizes: int,
) -> Placements:
    """Try an operation of yours, as `spmd.local` and `spmd.opaque` take it, over all placements of its arrays.

    `check_rule(rows, "b d -> b")` of `lambda x: jnp.sum(x, 1)` says that `"b/x d -> b/x"` and `"b d/x -> b {U:x}"`
    hold, and `"b d/x -> b"` does not. Each mesh axis divides one name of the pattern, wherever that stands, or none. Of
    a result that it does not divide, the devices hold copies, or terms of a sum, `{U:x}`. Every combination over the
    axes is a placement. It holds if results and gradients on the mesh are those of the same function on one device, for
    random numbers, interpreted in double precision as `spmd.check` does it. What cannot be interpreted is compiled and
    run, if there are enough devices.

    Shapes are those of whole arrays. Communication: none; of what is compiled, that of `fn`, forward and backward.

    Args:
      fn: A function from one device's shards, one for each layout on the left, to one shard for each on the right.
      pattern: `"layout, ... -> layout, ..."`. Mesh axes in it declare one placement, which has to hold.
      *args: The whole arrays, or structs of them. Without any, float32 arrays of small sizes that divide.
      mesh: A mesh, of devices or abstract. By default the axes of the pattern, of sizes 2, 3, 2, ...; x and y of a
        pattern without axes.
      reference: The same on whole arrays, in plain JAX, to compare with in place of `fn` on one device.
      with_pattern: Whether `fn` takes the pattern of each placement too, behind the arrays: for an operation that
        reads its own string.
      grad: Whether to compare gradients.
      **sizes: Sizes of names, where no arguments are given.

    Returns:
      The placements. Printed, a table.

    Raises:
      Mismatch: The placement that the pattern declares does not hold, or could not be tested. The message has all.
      LayoutError: The pattern has a `...`, a margin or a mark on the left, or not as many layouts as arguments.
      SizeError: A size does not divide over the mesh.

    Example:
      >>> import jax.numpy as jnp
      >>> from spmd.testing import check_rule
      >>> print(check_rule(lambda x, w: jnp.tanh(x @ w), "b d, d f -> b f", mesh={"tp": 2}))
      b/tp d, d f -> b/tp f         holds
      b d, d f/tp -> b f/tp         holds
      b d, d f -> b f               holds
      b d/tp, d/tp f -> b f         does not hold  result: "b f" says equal on tp, and it differs there
      b d/tp, d/tp f -> b f {U:tp}  does not hold  result: 48 of 48 numbers differ, by up to 0.97
      b d, d f -> b f {U:tp}        does not hold  result: 2 times too large: the size of tp
    """
    if not callable(fn):
        raise LayoutError(f"fn is a function, not {kind_of(fn)}.", call=_CALL)
    rule = _Rule.of(fn, pattern, args, mesh, reference, with_pattern, grad, sizes)
    found = Placements([rule.tried(one) for one in rule.placements()], rule.mesh)
    if wrong := [one for one in found if one.declared and not one.holds]:
        raise Mismatch(f'"{wrong[0].pattern}" does not hold on {mesh_text(rule.mesh)}: {wrong[0].why}\n{found}')
    return found


@dataclass(frozen=True)
class _Rule:
    """An operation with its pattern and arguments, to be tried.

    Attributes:
      fn: The function on shards.
      declared: The pattern as it was given.
      bare: The same without axes.
      args: Whole arrays, or structs.
      mesh: The sizes of the axes.
    """

    fn: Callable[..., Any]
    declared: Pattern
    bare: tuple[Layout, ...]
    args: tuple[Any, ...]
    mesh: dict[str, Any]
    devices: Any
    reference: Callable[..., Any] | None
    with_pattern: bool
    grad: bool

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        pattern: str | Pattern,
        args: tuple[Any, ...],
        mesh: Any,
        reference: Callable[..., Any] | None,
        with_pattern: bool,
        grad: bool,
        sizes: Mapping[str, int],
    ) -> _Rule:
        declared = Pattern(pattern, call=_CALL)
        _check_plain(declared)
        named = dict.fromkeys(axis for layout in declared.layouts for axis in layout.axis_names)
        by_default = dict(zip(named, itertools.cycle(_SIZES), strict=False)) or _AXES
        shape = dict(mesh if isinstance(mesh, Mapping) else mesh.shape) if mesh is not None else by_default
        if lacking := [axis for axis in named if axis not in shape]:
            raise MeshError(f"the mesh has no axis {lacking[0]}.", call=_CALL, got=[f"mesh {mesh_text(shape)}"])
        bare = tuple(_placed(layout, {}, ()) for layout in declared.layouts)
        given = args or _structs(bare[: len(declared.inputs)], sizes, axes_product(shape, shape))
        if len(given) != len(declared.inputs):
            rule = f"the pattern has {len(declared.inputs)} layouts on the left, and there are {len(given)} arguments."
            raise LayoutError(rule, call=_CALL)
        devices = mesh if isinstance(mesh, jax.sharding.Mesh) else None
        return cls(fn, declared, bare, given, shape, devices, reference, with_pattern, grad)

    def placements(self) -> Iterator[Pattern]:
        """All of them; the one that is declared first."""
        count = len(self.declared.inputs)
        marked = any(layout.axis_names for layout in self.declared.layouts)
        found = {str(self.declared): self.declared} if marked else {}
        names = dict.fromkeys(name for layout in self.bare for name in layout.names)
        options = []
        for axis in (axis for axis, n in self.mesh.items() if n > 1):  # one device shows nothing
            places: list[tuple[str, str | None, tuple[int, ...]]] = []
            for name in (*names, None):
                free = [i for i, layout in enumerate(self.bare[count:]) if name not in layout.names]
                some = itertools.chain.from_iterable(itertools.combinations(free, k) for k in range(len(free) + 1))
                places += [(axis, name, terms) for terms in some]
            options.append(places)
        for chosen in itertools.product(*options):
            with contextlib.suppress(LayoutError):  # no string says that of the factors of a dimension
                one = Pattern(self._text(chosen))
                found.setdefault(str(one), one)
        return iter(found.values())

    def _text(self, chosen: Sequence[tuple[str, str | None, Collection[int]]]) -> str:
        """The pattern of one placement: for each axis a name, and the results of which its devices hold terms."""
        count, layouts = len(self.declared.inputs), []
        for i, layout in enumerate(self.bare):
            own = [(axis, name) for axis, name, _ in chosen if name in layout.names]
            axes = {name: tuple(axis for axis, one in own if one == name) for _, name in own if name}
            layouts.append(str(_placed(layout, axes, [axis for axis, _, terms in chosen if i - count in terms])))
        return f"{', '.join(layouts[:count])} -> {', '.join(layouts[count:])}"

    def tried(self, pattern: Pattern) -> Placement:
        """What numbers say of one placement."""
        declared = any(layout.axis_names for layout in pattern.layouts) and str(pattern) == str(self.declared)
        of = functools.partial(Placement, pattern, declared=declared)
        kernel = self._kernel(pattern, make_mesh(**self.mesh, abstract=True))
        structs = [jax.ShapeDtypeStruct(jnp.shape(x), held_dtype(x)) for x in self.args]
        try:
            with for_numbers(self.mesh):
                program = FlatProgram.of(kernel, *structs)
        except Exception as error:  # of the function, which may raise anything
            return of(False, _why(error))
        if believed_lines(program.jaxpr):  # numbers would ask the reference of opaque code, and not the code
            return of(*self._run(pattern, "it is opaque code"))
        trial = tried(
            kernel, self.args, kernel.mesh, self.mesh, gradients=self.grad, once=True, reference=self.reference
        )
        if trial.wrong:
            return of(False, difference_text(trial))
        if trial.why:
            return of(*self._run(pattern, trial.why))
        return of(None, f"{trial.underived}; with grad=False results are compared") if trial.underived else of(True)

    def _run(self, pattern: Pattern, why: str) -> tuple[bool | None, str]:
        """Whether the compiled program says that a placement holds, or why it cannot be asked."""
        count = axes_product(self.mesh, self.mesh)
        if self.devices is None and len(jax.devices()) < count:
            return None, f"{why}, and {count} devices are not here to run it"
        mesh = self.devices or make_mesh(**self.mesh)
        try:
            assert_same_on_any_mesh(self._kernel(pattern, mesh), *self.args, grad=self.grad, devices=True)
        except Mismatch:
            return False, "compiled and run, it gives other numbers than on one device"
        except SpmdError as error:
            return None, first_line(error)
        return True, ""

    def _kernel(self, pattern: Pattern, mesh: Any) -> Any:
        """The operation as a kernel. A result that devices hold terms of is added up, to be compared."""
        sides = [layout.without_brackets() for layout in pattern.layouts]
        count = len(pattern.inputs)
        whole = [Layout.from_dims(layout.dims) for layout in sides[count:]]
        text = " -> ".join(", ".join(map(str, side)) for side in (sides[:count], whole))

        def body(*shards: Any) -> Any:
            outs = self.fn(*shards, pattern) if self.with_pattern else self.fn(*shards)
            several = isinstance(outs, tuple | list)
            pairs = zip(outs if several else [outs], sides[count:], strict=True)
            done = [_lax.psum(_compat.pvary(y, o.unreduced), o.unreduced) if o.unreduced else y for y, o in pairs]
            return tuple(done) if several else done[0]

        body.__name__ = getattr(self.fn, "__name__", "fn")
        return spmd.kernel(text, mesh=mesh, check="off")(body)


def _why(error: Exception) -> str:
    """What an error says in one line."""
    got = error.fault.got if isinstance(error, SpmdError) else ()
    return got[0].partition(": made from")[0] if got else first_line(error)


def _check_plain(pattern: Pattern) -> None:
    """Refuse what no placement can be made of."""
    for layout in pattern.layouts:
        if layout.has_ellipsis or layout.has_unnamed or any(any(dim.margin) for dim in layout.dims):
            rule = "each dimension has a name here, and no margin: names say what an axis may divide."
            raise LayoutError(rule, call=_CALL, got=[f'"{layout}"'])
    if marked := [layout for layout in pattern.inputs if layout.unreduced or layout.reduced]:
        raise LayoutError("arguments are blocks or copies here.", call=_CALL, got=[f'"{marked[0]}"'])


def _placed(layout: Layout, axes: Mapping[str, tuple[str, ...]], terms: Sequence[str]) -> Layout:
    """A layout whose names are divided by these axes alone."""
    atom = lambda one: replace(one, axes=axes.get(one.name) if one.named else None)
    dims = [replace(dim, atoms=tuple(map(atom, dim.atoms))) for dim in layout.dims]
    return Layout.from_dims(dims, terms)


def _structs(layouts: Sequence[Layout], sizes: Mapping[str, int], step: int) -> tuple[Any, ...]:
    """Arrays in which each name has a size of its own that all axes together divide."""
    names = dict.fromkeys(name for layout in layouts for name in layout.names)
    if unknown := [name for name in sizes if name not in names]:
        raise SizeError(f"no argument has a dimension {unknown[0]}.", call=_CALL, got=[", ".join(names)])
    free = (2 * step * k for k in itertools.count(1))
    known = {name: sizes.get(name) or next(free) for name in names}
    size = lambda atom: atom.size if atom.size is not None else known[atom.name]
    shape = lambda layout: tuple(math.prod(map(size, dim.atoms)) for dim in layout.dims)
    return tuple(jax.ShapeDtypeStruct(shape(layout), jnp.float32) for layout in layouts)
