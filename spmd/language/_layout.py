"""`Layout`: how one array lies on the mesh. `AxisMapping`: where named dimensions live, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, final

from spmd import _compat
from spmd.errors import LayoutError, MeshError, SizeError, did_you_mean
from spmd.language._parse import Parser
from spmd.language._sizes import Size, WrongRank, as_fault, axes_product, axes_tuple, bind, mesh_text, written_out
from spmd.language._syntax import (
    Atom,
    Axes,
    Dim,
    Value,
    axes_of_rule,
    check_form,
    check_rules,
    fault,
    normal,
    place,
    rule_text,
    with_call,
)

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, PartitionSpec
from spmd._text import Row, Table, html_page


@final
class Layout(Value):
    """How one array lies on the mesh: its dimensions, the mesh axes that divide them, and its marks.

    `b/dp s d` is an array of rank 3 whose dimension b is divided over the mesh axis dp. s and d are whole,
    and the array is equal on every mesh axis that is not mentioned. `{U:tp}` marks partial sums.
    Layouts are immutable and hashable. A string is parsed once.

    Args:
      text: The layout as a string. A Layout is returned as it is.
      call: The call to show in an error. It contains the string.

    Raises:
      LayoutError: If the string is not a layout.

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

    __slots__ = (
        *("atoms", "axes", "axis_names", "bare", "dims", "has_ellipsis", "has_unnamed", "names", "reduced"),
        *("source", "unreduced"),
    )

    dims: tuple[Dim, ...]
    unreduced: tuple[str, ...]
    reduced: tuple[str, ...]
    source: str | None
    """The string that the spans of the atoms refer to (a pattern's layouts: the whole pattern)."""
    atoms: tuple[Atom, ...]
    """The atoms of all dimensions, in order."""
    axes: tuple[str, ...]
    """The mesh axes that divide a dimension, in order of appearance."""
    axis_names: tuple[str, ...]
    """All mesh axes it mentions: those of the dimensions, then those of the marks."""
    names: tuple[str, ...]
    """The names of the dimensions and factors, without `_` and literal sizes."""
    bare: tuple[str, ...]
    """The names without a placement of their own: a mapping places them, else they are whole."""
    has_ellipsis: bool
    """Whether `...` is among the dimensions."""
    has_unnamed: bool
    """Whether `_` is among the dimensions."""

    def __new__(cls, text: str | Layout, *, call: str | None = None) -> Layout:
        if isinstance(text, Layout):
            return text
        if not isinstance(text, str):
            raise LayoutError(
                f"A layout is a string such as 'b/dp s d', but this is of type {type(text).__name__}.", call=call
            )
        try:
            return _parsed(str(text))
        except LayoutError as error:
            raise with_call(error, text, call or f'Layout("{text}")', _parsed) from None

    @classmethod
    def from_dims(
        cls,
        dims: Iterable[Dim],
        unreduced: Iterable[str] = (),
        reduced: Iterable[str] = (),
        *,
        source: str | None = None,
    ) -> Layout:
        """Make a layout of dimensions and marks, and check it by the rules of the language.

        Args:
          dims: The dimensions.
          unreduced: The axes of its `{U:...}`.
          reduced: The axes of its `{R:...}`.
          source: The string that the dimensions' spans refer to, for errors.

        Raises:
          LayoutError: If no string could say this.

        >>> Layout.from_dims(Layout("b/dp s d").dims[:2], unreduced=["tp"])
        Layout('b/dp s {U:tp}')
        """
        dims, unreduced, reduced = tuple(dims), tuple(unreduced), tuple(reduced)
        try:
            check_form(dims, (*unreduced, *reduced))
        except LayoutError as error:
            raise with_call(error, None, "Layout.from_dims(...)") from None
        dims = tuple(map(normal, dims))
        try:
            check_rules(dims, unreduced, reduced, {})
        except LayoutError as error:
            text = _text(dims, unreduced, reduced)
            made = f'the layout "{text}"' if source is None else f'"{source}", read as "{text}"'
            raise with_call(error, source, made) from None
        return make(dims, tuple(sorted(unreduced)), tuple(sorted(reduced)), source)

    @staticmethod
    def of(array: Any, names: str | Layout) -> Layout:
        """Read how an array lies now.

        Args:
          array: A jax.Array, ShapeDtypeStruct or tracer. One without a NamedSharding must be whole.
          names: The names of its dimensions, `"b s d"`.

        Returns:
          The names with the mesh axes that divide them. Undivided dimensions stay bare.

        Raises:
          LayoutError: If the names do not fit the rank, or the sharding cannot be written as a layout.

        >>> import jax.numpy as jnp
        >>> Layout.of(jnp.zeros((2, 3)), "b d")
        Layout('b d')
        """
        return _read(array, Layout(names))

    # --- what it says

    @property
    def rank(self) -> int | None:
        """The number of dimensions. It is None with `...`."""
        return None if self.has_ellipsis else len(self.dims)

    @property
    def is_scalar(self) -> bool:
        """Return whether it has no dimensions (it may have marks)."""
        return not self.dims

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes that divide the dimension or factor `name`, major first.

        Raises:
          LayoutError: If the layout has no such name.

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
        """The PartitionSpec. Bare names are whole in it.

        Raises:
          LayoutError: If no PartitionSpec says the same: with `...`, margins, or two divided factors in one dimension.

        >>> Layout("b/dp/fsdp d").spec
        P(('dp', 'fsdp'), None)
        """
        from jax.sharding import PartitionSpec

        self._need_rank()
        entries: list[Axes] = []
        for dim in self.dims:
            if any(dim.margin):
                rule = f"A dimension with margins, '{dim.short}', has no PartitionSpec: its shards overlap."
                raise self._pointed(fault(rule, dim.span))
            if dim.scattered:
                rule = (
                    f"'{dim.short}' has no PartitionSpec: with several divided factors a device holds "
                    "scattered pieces of the dimension. Inside a kernel this is legal."
                )
                raise self._pointed(fault(rule, dim.span))
            axes = dim.axes
            entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
        return PartitionSpec(*entries, unreduced=frozenset(self.unreduced), reduced=frozenset(self.reduced))

    def sharding(self, mesh: Any) -> NamedSharding:
        """Return the NamedSharding on a mesh.

        Args:
          mesh: A Mesh or an AbstractMesh.

        Raises:
          LayoutError: If the layout has no `spec`.
          MeshError: If the mesh lacks an axis of the layout.

        >>> import jax
        >>> Layout("b/dp d").sharding(jax.make_mesh((1,), ("dp",))).spec
        P('dp', None)
        """
        from jax.sharding import NamedSharding

        self._sizes_on(mesh)
        return NamedSharding(mesh, self.spec)

    # --- sizes

    def local_shape(
        self, global_shape: Iterable[int], mesh: Any, *, sizes: Mapping[str, int] | None = None
    ) -> tuple[int, ...]:
        """Return the shape of one device's shard.

        Args:
          global_shape: The shape of the whole array, without margins.
          mesh: A Mesh, an AbstractMesh or `{"dp": 2}`.
          sizes: Sizes of names, if they are known. They check the divided factors of a composite.

        Raises:
          SizeError: If the rank differs, or sizes do not divide or contradict each other. The message has all faults.
          MeshError: If the mesh lacks an axis of the layout.

        >>> Layout("1+x/a+1 (h k)/tp").local_shape((8, 12), {"a": 2, "tp": 3})
        (6, 4)
        """
        mesh = self._sizes_on(mesh)
        known = {name: Size(size, "sizes") for name, size in (sizes or {}).items()}
        dims = self._fitting(tuple(global_shape), mesh, known=known, margins=False)
        return tuple(size // axes_product(dim.axes, mesh) + sum(dim.margin) for dim, size in dims)

    def global_shape(self, local_shape: Iterable[int], mesh: Any) -> tuple[int, ...]:
        """Return the shape of the whole array, given that of one device's shard.

        Args:
          local_shape: The shape of a shard, with margins.
          mesh: A Mesh, an AbstractMesh or `{"dp": 2}`.

        Raises:
          SizeError: If the rank differs, or a size is smaller than its margins.
          MeshError: If the mesh lacks an axis of the layout.

        >>> Layout("1+x/a+1 d").global_shape((6, 3), {"a": 2})
        (8, 3)
        """
        return tuple(size for _, size in self._fitting(tuple(local_shape), self._sizes_on(mesh), local=True))

    # --- other layouts made of it

    def with_rank(self, rank: int) -> Layout:
        """Return the layout with this rank: unnamed dimensions in place of `...`.

        Raises:
          SizeError: If the layout has another number of dimensions.

        >>> Layout("... d/tp").with_rank(3)
        Layout('_ _ d/tp')
        """
        if not self.has_ellipsis and rank == len(self.dims):
            return self
        dims = written_out(self.dims, rank)
        if dims is None:
            raise SizeError(f"{WrongRank('', None, self, rank).rule}.", call=repr(self))
        return make(tuple(dims), self.unreduced, self.reduced, self.source)

    def without(self, *axes: str) -> Layout:
        """Return the layout with these mesh axes removed. A dimension that has none left is whole (`d/1`).

        >>> Layout("b/dp d/tp {U:cp}").without("tp", "cp")
        Layout('b/dp d/1')
        """
        return self.bind(**dict.fromkeys(axes)) if axes else self

    def without_brackets(self) -> Layout:
        """Return the layout with `[k]` written `k`.

        >>> Layout("b [k]").without_brackets()
        Layout('b k')
        """
        dims = tuple(replace(dim, bracket=False) for dim in self.dims)
        return make(dims, self.unreduced, self.reduced, self.source)

    def prepend(self, dims: str | Layout) -> Layout:
        """Return the layout with dimensions added in front.

        Args:
          dims: The dimensions, as a layout without marks.

        Raises:
          LayoutError: If `dims` has marks, or the result uses an axis twice.

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
          **axes: For each axis its new name, a tuple of names (major first), or None: undivided.

        Raises:
          LayoutError: If the result would use an axis twice.

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

    def resolve(self, mapping: Mapping[str, Axes] | None = None) -> Layout:
        """Return the layout with no bare name: placed as the mapping says, whole where it says nothing.

        Args:
          mapping: The rules, an AxisMapping or a dict. None is the mapping without rules.

        Raises:
          LayoutError: If two names come to lie on one mesh axis, or a factor behind a whole one is divided.

        >>> Layout("batch seq d/tp").resolve({"batch": "dp"})
        Layout('batch/dp seq/1 d/tp')
        """
        return AxisMapping.of(mapping).resolve(self)

    def __str__(self) -> str:
        return _text(self.dims, self.unreduced, self.reduced)

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    def _repr_html_(self) -> str:
        return html_page(str(self), [Table(_rows(self), _HEAD)])

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.dims, self.unreduced, self.reduced, self.source)

    # --- faults

    def _pointed(self, error: LayoutError) -> LayoutError:
        """The error, pointing at a part of this layout."""
        return with_call(error, self.source, repr(self) if self.source is None else None)

    def _need_rank(self) -> None:
        for dim in self.dims:
            if dim.ellipsis:
                rule = "The number of dimensions that '...' stands for is not known here."
                raise self._pointed(fault(rule, dim.span, advice=".with_rank(n)"))

    def _fitting(self, shape: tuple[int, ...], mesh: Mapping[str, int], **how: Any) -> list[tuple[Dim, int]]:
        """The dimensions with the sizes of the whole array; see `bind`."""
        bound = bind([("", shape, self)], mesh, **how)
        if bound.faults:
            call = f'"{self.short}" with shape {shape}'
            raise SizeError(as_fault(bound.faults, mesh, "The shape does not fit the layout.", call=call))
        return [(dim, size or 0) for dim, size in bound.dims[0]]

    def _sizes_on(self, mesh: Any) -> dict[str, int]:
        """The sizes of a mesh's axes, on which the layout has a shape."""
        self._need_rank()
        sizes = dict(getattr(mesh, "shape", mesh))  # of a dict or pairs too
        missing = [f"'{axis}'{did_you_mean(axis, sizes)}" for axis in self.axis_names if axis not in sizes]
        if missing:
            what = "a mesh axis" if len(missing) == 1 else "mesh axes"
            rule = f"The mesh lacks {what} of the layout."
            raise MeshError(rule, call=repr(self), got=[*missing, mesh_text(sizes)])
        return sizes


class AxisMapping(Value, Mapping[str, tuple[str, ...]]):
    """Rules for named dimensions: the mesh axes over which each is divided.

    Under a mapping a bare name lies as its rule says, `name/axis` as it is written, and `name/1` is whole. A mapping is
    immutable and hashable.

    Args:
      rules: For each name a mesh axis, a tuple of them (major first), or None if it is whole.

    Raises:
      LayoutError: If a name or an axis cannot be written in a layout, or a rule has one axis twice.

    >>> mapping = AxisMapping({"batch": ("dp", "fsdp"), "mlp": "tp", "seq": None})
    >>> mapping["mlp"], mapping.get("seq"), mapping.get("other")
    (('tp',), (), None)
    >>> mapping.resolve(Layout("batch seq mlp"))
    Layout('batch/dp/fsdp seq/1 mlp/tp')
    """

    __slots__ = ("_rules",)
    _rules: dict[str, tuple[str, ...]]

    def __init__(self, rules: Mapping[str, Axes] | Iterable[tuple[str, Axes]] = ()):
        try:
            pairs = dict(rules)
        except (TypeError, ValueError):
            rule = f"The rules of a mapping are a dict, but this is of type {type(rules).__name__}."
            raise LayoutError(rule, advice='as in AxisMapping({"batch": "dp"})') from None
        found = {str(name): axes_of_rule(name, value) for name, value in pairs.items()}
        self._hold(frozenset(found.items()), _rules=found)

    @staticmethod
    def of(rules: AxisMapping | Mapping[str, Axes] | None) -> AxisMapping:
        """Return a mapping. A dict becomes one, and None is the mapping without rules.

        Raises:
          LayoutError: If `rules` is something else, or a rule is not valid.

        >>> AxisMapping.of({"mlp": "tp"})
        AxisMapping({'mlp': 'tp'})
        """
        if isinstance(rules, AxisMapping):
            return rules
        if rules is None:
            return _EMPTY
        if not isinstance(rules, Mapping):
            rule = f"A mapping is an AxisMapping or a dict, but this is of type {type(rules).__name__}."
            raise LayoutError(rule, advice='as in AxisMapping({"batch": "dp"})')
        return AxisMapping(rules)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that have a rule, in order."""
        return tuple(self._rules)

    def merge(self, other: AxisMapping | Mapping[str, Axes] | None) -> AxisMapping:
        """Return this mapping with the rules of another added. Where both have a rule, the other's holds.

        >>> AxisMapping({"mlp": "tp"}).merge({"mlp": None, "batch": "dp"})
        AxisMapping({'mlp': None, 'batch': 'dp'})
        """
        return AxisMapping({**self._rules, **AxisMapping.of(other)._rules})

    def check(self, mesh_axis_names: Iterable[str]) -> None:
        """Check that the mesh has all axes of the rules.

        Args:
          mesh_axis_names: The names of the mesh's axes.

        Raises:
          MeshError: If the mesh lacks some. The message names all of them.

        >>> AxisMapping({"mlp": "tp"}).check(("dp", "tp"))
        """
        known = tuple(mesh_axis_names)
        missing = [
            f"{rule_text(name, axes)}: no axis '{axis}'{did_you_mean(axis, known)}"
            for name, axes in self._rules.items()
            for axis in axes
            if axis not in known
        ]
        if missing:
            got = [*missing, f"mesh axes {', '.join(known) or '(none)'}"]
            raise MeshError("The rules of a mapping name axes of the mesh.", call=repr(self), got=got)

    def lacks(self, layout: Layout | str) -> tuple[str, ...]:
        """Return the bare names of a layout that have no rule, in order.

        >>> AxisMapping({"embed": "dp"}).lacks(Layout("batch embed mlp/tp seq/1"))
        ('batch',)
        """
        layout = Layout(layout)
        return tuple(name for name in layout.bare if name in layout.names and name not in self._rules)

    def resolve(self, layout: Layout | str) -> Layout:
        """Return the layout with no bare name: placed by the rules, whole where there is none.

        Raises:
          LayoutError: If two names come to lie on one mesh axis, or a factor behind a whole one is divided.

        >>> AxisMapping({"embed": "dp", "mlp": "tp"}).resolve(Layout("embed/1 mlp"))
        Layout('embed/1 mlp/tp')
        """
        layout = Layout(layout)
        if not layout.bare:
            return layout
        try:
            dims = place(layout.dims, {"U": layout.unreduced, "R": layout.reduced}, self._rules)
        except LayoutError as error:
            raise layout._pointed(error) from None
        return make(tuple(dims), layout.unreduced, layout.reduced, layout.source)

    def place(self, layout: Layout | str, call: str, got: Iterable[str] = ()) -> Layout:
        """Resolve a layout that stands by itself: each of its bare names needs a rule.

        Args:
          layout: The layout.
          call: The call, for messages.
          got: What the layout was given for, for messages. By default it is the layout.

        Raises:
          LayoutError: If a bare name has no rule, and where `resolve` raises it.

        >>> rules = AxisMapping({"embed": None, "mlp": "tp"})
        >>> rules.place(Layout("embed mlp"), "shard(tree, layouts)")
        Layout('embed/1 mlp/tp')
        """
        layout = Layout(layout)
        self.need(self.lacks(layout), call, got or [f'"{layout.short}"'])
        return self.resolve(layout)

    def need(self, names: Iterable[str], call: str, got: Iterable[str] = ()) -> None:
        """Check that each of these names has a rule.

        Args:
          names: Names of dimensions.
          call: The call, for messages.
          got: What the names were found in, for messages.

        Raises:
          LayoutError: If one of them has none. The message names all of them.

        >>> AxisMapping({"embed": None}).need(["embed"], "shard(tree, layouts)")
        """
        missing = [name for name in names if name not in self._rules]
        if missing:
            rule = f"the mapping has no rule for {', '.join(missing)}{did_you_mean(missing[0], self) or '.'}"
            shown = [*got, f"mapping: {', '.join(self) or '(empty)'}"]
            raise LayoutError(rule, call=call, got=shown, advice=f'"{missing[0]}": None for a whole dimension')

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def _repr_html_(self) -> str:
        rows = [(name, _over(axes) if axes else "whole") for name, axes in self._rules.items()]
        return html_page("AxisMapping", [Table(rows, _HEAD)] if rows else [], empty="" if rows else "no rules")

    def __repr__(self) -> str:
        return f"AxisMapping({{{', '.join(rule_text(*rule) for rule in self._rules.items())}}})"

    def __reduce__(self) -> tuple[Any, ...]:
        return AxisMapping, (self._rules,)


_EMPTY = AxisMapping()


# --- making layouts ------------------------------------------------------------------------------------


def make(dims: tuple[Dim, ...], unreduced: tuple[str, ...], reduced: tuple[str, ...], source: str | None) -> Layout:
    """A layout of parts that are known to be right."""
    layout = object.__new__(Layout)
    atoms: list[Atom] = []
    axes: list[str] = []
    names: list[str] = []
    bare: list[str] = []
    ellipsis = unnamed = False
    for dim in dims:
        ellipsis = ellipsis or dim.ellipsis
        atoms += dim.atoms
        axes += dim.axes
        for atom in dim.atoms:
            unnamed = unnamed or atom.name == "_"
            if atom.named:
                names.append(atom.name)
            if atom.axes is None:
                bare.append(atom.name)
    layout._hold(
        (dims, unreduced, reduced),
        dims=dims,
        unreduced=unreduced,
        reduced=reduced,
        source=source,
        atoms=tuple(atoms),
        axes=tuple(axes),
        axis_names=(*axes, *unreduced, *reduced),
        names=tuple(names),
        bare=tuple(bare),
        has_ellipsis=ellipsis,
        has_unnamed=unnamed,
    )
    return layout


def with_axes_of(have: Layout, wanted: Layout) -> tuple[Dim, ...] | None:
    """The dimensions of `have`, divided as those of `wanted`. None if the two do not have as many factors."""
    pairs = list(zip(have.dims, wanted.dims, strict=False))
    if len(have.dims) != len(wanted.dims) or any(len(h.atoms) != len(w.atoms) for h, w in pairs):
        return None
    return tuple(
        replace(h, atoms=tuple(replace(a, axes=b.axes) for a, b in zip(h.atoms, w.atoms, strict=True)))
        for h, w in pairs
    )


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Layout:
    return make(*Parser(text).single())


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


# --- reading a sharding --------------------------------------------------------------------------------


def _read(array: Any, names: Layout) -> Layout:
    """The layout of an array, in given names; see Layout.of."""
    from jax.sharding import NamedSharding, PartitionSpec

    call = f'Layout.of(x, "{names}")'
    shape = tuple(getattr(array, "shape", ()))
    dims = names.with_rank(len(shape)) if names.has_ellipsis and len(shape) + 1 >= len(names.dims) else names
    if len(dims.dims) != len(shape):
        raise LayoutError(f"{WrongRank('', None, names, len(shape)).rule}.", call=call, got=[f"shape {shape}"])
    if names.axis_names:
        fix = f'"{names.without(*names.axis_names).short}"'
        raise LayoutError("Layout.of reads the mesh axes; give it names only.", call=call, fix=fix)
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        sharding = getattr(_typed(array, call), "sharding", None)
    if not isinstance(sharding, NamedSharding):
        if sharding is None or sharding.is_fully_replicated:
            return dims
        rule = "Only an array with a NamedSharding has a layout; this one is divided otherwise."
        raise LayoutError(rule, call=call, got=[f"a {type(sharding).__name__}"])
    spec = sharding.spec
    entries = _compat.partitions(spec, len(shape))
    if PartitionSpec.UNCONSTRAINED in entries:
        raise LayoutError("A dimension that JAX left unconstrained has no layout.", call=call)
    placed = [
        replace(dim, atoms=(replace(dim.atoms[0], axes=axes), *dim.atoms[1:])) if axes else dim
        for dim, axes in zip(dims.dims, map(axes_tuple, entries), strict=True)
    ]
    return Layout.from_dims(placed, spec.unreduced, spec.reduced)


def _typed(array: Any, call: str) -> Any:
    import jax

    try:
        return jax.typeof(array)
    except (TypeError, OverflowError):
        kind = f"one of dtype {array.dtype}" if hasattr(array, "dtype") else f"of type {type(array).__name__}"
        raise LayoutError(f"Layout.of reads an array, and this is {kind}.", call=call) from None


# --- layouts, patterns and mappings as notebooks show them: tables that say in words what strings say in signs --------


_HEAD = ("dimension", "lies")


def of_sides(text: str, sides: Iterable[tuple[str, Iterable[Layout]]]) -> str:
    """A pattern: what goes in, and what comes out."""
    rows: list[Row | tuple[str, ...]] = []
    for side, layouts in sides:
        for layout in layouts:
            rows += [Row((f"{side}: {layout}",), "title"), *_rows(layout)]
    return html_page(text, [Table(rows, _HEAD)])


def _rows(layout: Layout) -> list[tuple[str, str]]:
    rows = [(dim.text, _lies(dim)) for dim in layout.dims]
    rows += [("scalar", "one number")] if not rows else []
    marks = {"U": ("a term of a sum", layout.unreduced), "R": ("its gradient is a term of a sum", layout.reduced)}
    for mark, (what, axes) in marks.items():
        rows += [(f"{{{mark}:{','.join(axes)}}}", f"{what} along {', '.join(axes)}")] if axes else []
    return rows


def _lies(dim: Dim) -> str:
    if dim.ellipsis:
        return "any number of dimensions"
    low, high = dim.margin
    margin = f", and {low} more from the block before, {high} from the block after" if low or high else ""
    if all(atom.axes is None for atom in dim.atoms if atom.named):
        return "whole, unless a mapping divides it" + margin
    return (_over(dim.axes) if dim.axes else "whole") + margin


def _over(axes: Iterable[str]) -> str:
    return f"divided over {' and '.join(axes)}"
