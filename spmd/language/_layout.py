"""`Layout`: how one array lies on the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, final

from spmd.errors import LayoutError, MeshError, SizeError, did_you_mean
from spmd.language._parse import Parser
from spmd.language._syntax import Atom, Dim, Fault, Span, check, check_form, normal

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, PartitionSpec

    from spmd.language._mapping import AxisMapping

__all__ = ["Layout", "axis_sizes"]

Axes = str | tuple[str, ...] | None


@final
class Layout:
    """How one array lies on the mesh: its dimensions, the mesh axes that divide them, and its marks.

    `b/dp s d` is an array of rank 3 whose dimension b is split over the mesh axis dp; s and d are whole,
    and the array is equal on every mesh axis that is not mentioned.  `{U:tp}` marks partial sums.
    Layouts are immutable and hashable; a string is parsed once.

    Args:
      text: the layout as a string; a Layout is returned as it is.
      call: the call to show in an error, with the string in it.

    Raises:
      LayoutError: the string is no layout.

    >>> layout = Layout("b/dp s (h k)/tp {U:cp}")
    >>> layout.names, layout.axes, layout.unreduced
    (('b', 's', 'h', 'k'), ('dp', 'tp'), ('cp',))
    >>> Layout("(h/tp k)")
    Layout('(h k)/tp')
    >>> Layout("b/dp s").spec
    P('dp', None)
    >>> Layout("b/dp s").local_shape((8, 3), {"dp": 4})
    (2, 3)
    """

    __slots__ = ("__weakref__", "_hash", "_text", "dims", "reduced", "source", "unreduced")

    dims: tuple[Dim, ...]
    unreduced: tuple[str, ...]
    reduced: tuple[str, ...]
    source: str | None
    """The string that the spans of the atoms refer to (a pattern's layouts: the whole pattern)."""

    def __new__(cls, text: str | Layout, *, call: str | None = None) -> Layout:
        if isinstance(text, Layout):
            return text
        if not isinstance(text, str):
            raise LayoutError(
                f"A layout is a string such as 'b/dp s d', but this is of type {type(text).__name__}.",
                call=call,
            )
        try:
            return _parsed(str(text))
        except Fault as fault:
            raise_fault(fault, text, call or f'Layout("{text}")')

    @classmethod
    def from_dims(
        cls,
        dims: Iterable[Dim],
        unreduced: Iterable[str] = (),
        reduced: Iterable[str] = (),
        *,
        source: str | None = None,
    ) -> Layout:
        """Make a layout of dimensions and marks; the rules of the language hold for it.

        Args:
          dims: the dimensions.
          unreduced: the axes of its `{U:...}`.
          reduced: the axes of its `{R:...}`.
          source: the string that the dimensions' spans refer to, for errors.

        Raises:
          LayoutError: no string could say this.

        >>> Layout.from_dims(Layout("b/dp s d").dims[:2], unreduced=["tp"])
        Layout('b/dp s {U:tp}')
        """
        dims, unreduced, reduced = tuple(dims), tuple(unreduced), tuple(reduced)
        try:
            check_form(dims, (*unreduced, *reduced))
        except Fault as fault:
            raise LayoutError(fault.rule, call="Layout.from_dims(...)") from None
        dims = tuple(normal(dim) for dim in dims)
        try:
            check(dims, unreduced, reduced, {})
        except Fault as fault:
            text = _text(dims, unreduced, reduced)
            if source is None:
                raise LayoutError(fault.rule, call=f'the layout "{text}"', fix=fault.fix, advice=fault.advice) from None
            raise_fault(fault, source, f'"{source}", read as "{text}"')
        return make(dims, tuple(sorted(unreduced)), tuple(sorted(reduced)), source)

    @staticmethod
    def of(array: Any, names: str | Layout) -> Layout:
        """Read how an array lies now.

        Args:
          array: a jax.Array, ShapeDtypeStruct or tracer; one without a NamedSharding must be whole.
          names: the names of its dimensions, `"b s d"`.

        Returns:
          The names with the mesh axes that divide them; undivided dimensions stay bare.

        Raises:
          LayoutError: the names do not fit the rank, or the sharding cannot be written as a layout.

        >>> import jax.numpy as jnp
        >>> Layout.of(jnp.zeros((2, 3)), "b d")
        Layout('b d')
        """
        from spmd.language._sharding import read

        return read(array, Layout(names))

    # --- what it says

    @property
    def rank(self) -> int | None:
        """The number of dimensions; None with `...`."""
        return None if self.has_ellipsis else len(self.dims)

    @property
    def is_scalar(self) -> bool:
        """Whether it has no dimensions (it may have marks)."""
        return not self.dims

    @property
    def has_ellipsis(self) -> bool:
        """Whether `...` is among the dimensions."""
        return any(dim.ellipsis for dim in self.dims)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """All atoms in order."""
        return tuple(atom for dim in self.dims for atom in dim.atoms)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dimensions and factors, without `_` and literal sizes."""
        return tuple(atom.name for atom in self.atoms if atom.named)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that divide a dimension, in order of appearance."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """All mesh axes it mentions: those of the dimensions, then those of the marks."""
        return (*self.axes, *self.unreduced, *self.reduced)

    @property
    def bare(self) -> tuple[str, ...]:
        """The names that say nothing of their placement: a mapping decides, else they are whole."""
        return tuple(atom.name for atom in self.atoms if atom.axes is None)

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes that divide the dimension or factor `name`, major first.

        >>> Layout("b/dp/fsdp d").axes_of("b")
        ('dp', 'fsdp')
        """
        for atom in self.atoms:
            if atom.name == name and atom.named:
                return atom.axes or ()
        hint = did_you_mean(name, self.names)
        raise LayoutError(f"The layout has no dimension '{name}'{hint or '.'}", call=repr(self))

    @property
    def short(self) -> str:
        """The layout without `/1`, as it is written where no mapping is in force.

        >>> Layout("b/dp s").resolve(None).short
        'b/dp s'
        """
        return _text(self.dims, self.unreduced, self.reduced, explicit=False)

    # --- as JAX says it

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec; bare names are whole.

        >>> Layout("b/dp/fsdp d").spec
        P(('dp', 'fsdp'), None)
        """
        from jax.sharding import PartitionSpec

        self._need_rank()
        entries: list[Axes] = []
        for dim in self.dims:
            if any(dim.margin):
                self._fault(
                    dim.span,
                    f"A dimension with margins, '{dim.short}', has no PartitionSpec: its shards overlap.",
                )
            if sum(bool(atom.axes) for atom in dim.atoms) > 1:
                rule = (
                    f"'{dim.short}' has no PartitionSpec: with several divided factors a device holds "
                    "scattered pieces of the dimension. Inside a kernel this is legal."
                )
                self._fault(dim.span, rule)
            axes = dim.axes
            entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
        marks = {"unreduced": frozenset(self.unreduced), "reduced": frozenset(self.reduced)}
        return PartitionSpec(*entries, **{kind: axes for kind, axes in marks.items() if axes})

    def sharding(self, mesh: Any) -> NamedSharding:
        """Return the NamedSharding on a Mesh or AbstractMesh.

        Raises:
          MeshError: the mesh lacks an axis of the layout.

        >>> import jax
        >>> Layout("b/dp d").sharding(jax.make_mesh((1,), ("dp",))).spec
        P('dp', None)
        """
        from jax.sharding import NamedSharding

        self._need_axes(axis_sizes(mesh))
        return NamedSharding(mesh, self.spec)

    # --- sizes

    def local_shape(
        self, global_shape: Iterable[int], mesh: Any, *, sizes: Mapping[str, int] | None = None
    ) -> tuple[int, ...]:
        """Return the shape of one device's shard.

        Args:
          global_shape: the shape of the whole array, without margins.
          mesh: a Mesh, an AbstractMesh or `{"dp": 2}`.
          sizes: the sizes of names, where known: the divided factors of a composite are checked by them.

        Raises:
          SizeError: the rank differs or a size is not divisible; all failures at once.
          MeshError: the mesh lacks an axis of the layout.

        >>> Layout("1+x/a+1 (h k)/tp").local_shape((8, 12), {"a": 2, "tp": 3})
        (6, 4)
        """
        from spmd.language._sizes import local_shape

        return local_shape(self, tuple(global_shape), axis_sizes(mesh), sizes or {})

    def global_shape(self, local_shape: Iterable[int], mesh: Any) -> tuple[int, ...]:
        """Return the shape of the whole array, given that of one device's shard.

        Args:
          local_shape: the shape of a shard, with margins.
          mesh: a Mesh, an AbstractMesh or `{"dp": 2}`.

        Raises:
          SizeError: the rank differs, or a size is smaller than its margins.
          MeshError: the mesh lacks an axis of the layout.

        >>> Layout("1+x/a+1 d").global_shape((6, 3), {"a": 2})
        (8, 3)
        """
        from spmd.language._sizes import global_shape

        return global_shape(self, tuple(local_shape), axis_sizes(mesh))

    # --- other layouts made of it

    def with_rank(self, rank: int) -> Layout:
        """Return the layout with `...` replaced by unnamed dimensions, so that it has this rank.

        >>> Layout("... d/tp").with_rank(3)
        Layout('_ _ d/tp')
        """
        missing = rank - sum(not dim.ellipsis for dim in self.dims)
        if missing < 0 or (missing and not self.has_ellipsis):
            least = "at least " if self.has_ellipsis else ""
            named = sum(not dim.ellipsis for dim in self.dims)
            raise SizeError(f"The layout has rank {least}{named}, not {rank}.", call=repr(self))
        dims: list[Dim] = []
        for dim in self.dims:
            unnamed = Dim((Atom("_", (), None, dim.span),), span=dim.span)
            dims.extend([unnamed] * missing if dim.ellipsis else [dim])
        return make(tuple(dims), self.unreduced, self.reduced, self.source)

    def without(self, *axes: str) -> Layout:
        """Return the layout with these mesh axes removed; a dimension left without any is whole (`d/1`).

        >>> Layout("b/dp d/tp {U:cp}").without("tp", "cp")
        Layout('b/dp d/1')
        """
        return self.bind(**dict.fromkeys(axes))

    def without_brackets(self) -> Layout:
        """Return the layout with `[k]` written `k`.

        >>> Layout("b [k]").without_brackets()
        Layout('b k')
        """
        dims = tuple(replace(dim, bracket=False) for dim in self.dims)
        return make(dims, self.unreduced, self.reduced, self.source)

    def prepend(self, dims: str | Layout) -> Layout:
        """Return the layout with dimensions added in front.

        >>> Layout("d/dp f").prepend("layers")
        Layout('layers d/dp f')
        """
        front = Layout(dims)
        if front.unreduced or front.reduced:
            raise LayoutError("Only dimensions can be prepended, not marks.", call=f'.prepend("{front}")')
        return Layout.from_dims((*front.dims, *self.dims), self.unreduced, self.reduced)

    def bind(self, **axes: Axes) -> Layout:
        """Return the layout with mesh axes renamed, in dimensions and marks.

        Args:
          **axes: for each axis its new name, a tuple of names (major first), or None: undivided.

        Raises:
          LayoutError: the result would use an axis twice.

        >>> Layout("s/tp d").bind(tp=("tk", "tr"))
        Layout('s/tk/tr d')
        """
        new = {axis: _bound(axis, value) for axis, value in axes.items()}
        if not new.keys() & set(self.axis_names):
            return self

        def renamed(old: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for axis in old for name in new.get(axis, (axis,)))

        dims = [
            replace(
                dim,
                atoms=tuple(atom if not atom.axes else replace(atom, axes=renamed(atom.axes)) for atom in dim.atoms),
            )
            for dim in self.dims
        ]
        return Layout.from_dims(dims, renamed(self.unreduced), renamed(self.reduced), source=self.source)

    def resolve(self, mapping: AxisMapping | Mapping[str, Axes] | None = None) -> Layout:
        """Return the layout with no bare name: placed as the mapping says, whole where it says nothing.

        Raises:
          LayoutError: two names come to lie on one mesh axis, or a factor behind a whole one is divided.

        >>> Layout("batch seq d/tp").resolve({"batch": "dp"})
        Layout('batch/dp seq/1 d/tp')
        """
        from spmd.language._mapping import AxisMapping

        return AxisMapping.of(mapping).resolve(self)

    # --- the value

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Layout({self._text!r})"

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._text == other._text if isinstance(other, Layout) else NotImplemented

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Layout is immutable, '{name}' cannot be set")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: object) -> Layout:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.dims, self.unreduced, self.reduced, self.source)

    # --- faults

    def _fault(self, span: Span, rule: str, advice: str | None = None) -> NoReturn:
        """Raise a LayoutError that points at a part of this layout."""
        if self.source is None:
            raise LayoutError(rule, call=repr(self), advice=advice)
        raise LayoutError(rule, source=self.source, span=span, advice=advice)

    def _need_rank(self) -> None:
        for dim in self.dims:
            if dim.ellipsis:
                self._fault(
                    dim.span,
                    "The number of dimensions that '...' stands for is not known here.",
                    advice=".with_rank(n)",
                )

    def _need_axes(self, sizes: Mapping[str, int]) -> None:
        missing = [axis for axis in self.axis_names if axis not in sizes]
        if missing:
            mesh = ", ".join(f"{name}={size}" for name, size in sizes.items())
            hints = [f"'{axis}'{did_you_mean(axis, sizes)}" for axis in missing]
            rule = (
                "The mesh lacks a mesh axis of the layout."
                if len(hints) == 1
                else "The mesh lacks mesh axes of the layout."
            )
            raise MeshError(rule, call=repr(self), got=[*hints, f"mesh {mesh or 'without axes'}"])


def make(dims: tuple[Dim, ...], unreduced: tuple[str, ...], reduced: tuple[str, ...], source: str | None) -> Layout:
    """A layout of parts that are known to be right."""
    layout = object.__new__(Layout)
    text = _text(dims, unreduced, reduced)
    values = {"dims": dims, "unreduced": unreduced, "reduced": reduced, "source": source, "_text": text}
    for name, value in (*values.items(), ("_hash", hash(("Layout", text)))):
        object.__setattr__(layout, name, value)
    return layout


def axis_sizes(mesh: Any) -> dict[str, int]:
    """The sizes of a mesh's axes in mesh order; of a Mesh, an AbstractMesh, a dict or pairs."""
    return dict(getattr(mesh, "shape", mesh))


def axes_product(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Into how many parts the axes divide."""
    return prod(sizes[axis] for axis in axes)


def raise_fault(fault: Fault, source: str, call: str) -> NoReturn:
    """Raise what the parser found as a LayoutError, with the call it happened in."""
    shown = {"call": call, "source": source, "span": fault.span}
    raise LayoutError(fault.rule, **shown, fix=fault.fix, advice=fault.advice) from None


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Layout:
    return make(*Parser(text).single(), text)


def _text(dims: Iterable[Dim], unreduced: Iterable[str], reduced: Iterable[str], *, explicit: bool = True) -> str:
    parts = [dim.text if explicit else dim.short for dim in dims]
    parts.extend(
        f"{{{kind}:{','.join(axes)}}}" for kind, axes in (("U", tuple(unreduced)), ("R", tuple(reduced))) if axes
    )
    return " ".join(parts) or "scalar"


def _bound(axis: str, value: Axes) -> tuple[str, ...]:
    """The names that an axis is bound to."""
    names = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) and name.isidentifier() for name in names):
        rule = "A mesh axis is bound to a name, a tuple of names, or None."
        raise LayoutError(rule, got=[f"{axis}={value!r} of type {type(value).__name__}"])
    return tuple(names)
