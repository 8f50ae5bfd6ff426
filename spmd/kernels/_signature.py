"""What a kernel declares: which parameter has which layouts, what is static, what is donated."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._python.rooms import nearest
from spmd._trees.leaves import kind_of, not_int
from spmd._trees.matching import layout_of_spec
from spmd.errors import Fix, LayoutError, MeshError, ModeError, SizeError, SpmdError, did_you_mean
from spmd.language import (
    AxisMapping,
    Layout,
    NotProduct,
    Pattern,
    Size,
    Unequal,
    WrongRank,
    another_name,
    as_fault,
    axes_tuple,
    bind,
    mesh_text,
)


@dataclass(eq=False)
class Signature:
    """The declared side of a kernel, read once at decoration.

    Attributes:
      fn: The body.
      source: The pattern as written, or a short form of `in_layouts` and `out_layouts`.
      params: Names of the arguments, in call order.
      layouts: A prefix tree of layouts for each argument that is not static.
      outputs: The prefix tree of the results.
      static: Names of static arguments.
      donate: Names of donated arguments.
      written: Whether `source` is a pattern, into which the spans of the layouts point.
      auto: The mesh axes that are left to the compiler.
      check: What a finding of the checker is: "error", "warn" or "off".
      named: The dimensions and mesh axes that its layouts name, as far as a call has met them.
    """

    fn: Callable[..., Any]
    source: str
    params: tuple[str, ...]
    layouts: dict[str, Any]
    outputs: Any
    static: tuple[str, ...]
    donate: tuple[str, ...]
    mapping: AxisMapping | None
    arg_mapping: dict[str, AxisMapping]
    axes: tuple[tuple[str, Any], ...]
    sizes: tuple[tuple[str, int], ...] = ()
    auto: tuple[str, ...] = ()
    shared_mapping: bool = True
    python: inspect.Signature | None = field(default=None)
    written: bool = True
    named: set[str] = field(default_factory=set)
    check: str = "error"

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def text(self) -> str:
        """Return how messages show the kernel."""
        return f'{self.name}: kernel("{self.source}")' if self.written else f"{self.name}: kernel({self.source})"

    def fail(
        self,
        rule: str,
        *,
        got: Sequence[str] = (),
        fix: str | Fix | Sequence[str | Fix] | None = None,
        advice: str | None = None,
        error: type[SpmdError] = LayoutError,
        span: Any = None,
    ) -> NoReturn:
        shown = {"call": self.text, "source": self.source, "span": span}
        raise error(rule, **shown, got=list(got), fix=fix, advice=advice)

    def sized(
        self,
        arrays: Sequence[tuple[str, tuple[int, ...], Layout]],
        mesh: Mapping[str, int],
        *,
        local: bool,
        known: Mapping[str, Size],
    ) -> dict[str, Size]:
        """Global sizes of all names, each with the argument that bound it.

        Args:
          arrays: The path, the shape and the layout of each array.
          mesh: Sizes of the mesh axes.
          local: Whether the shapes are those of shards.
          known: Names bound before.

        Raises:
          SizeError: With all contradictions and all indivisible dimensions.
          LayoutError: If a rank does not fit.
        """
        bound = bind(arrays, mesh, known=known, local=local)
        if not bound.faults:
            return bound.sizes
        source = self.source if self.written else None  # into which the spans of the layouts point
        rule = f"the {'results' if local else 'arguments'} do not fit the signature."
        fault = as_fault(bound.faults, mesh, rule, call=self.text, source=source)
        start, end = fault.span or (0, 0)
        span = (start, end) if 0 <= start < end <= len(source or "") else None
        twice = [one.name for one in bound.faults if isinstance(one, Unequal) and not one.blocks]
        error = LayoutError if any(isinstance(one, WrongRank) for one in bound.faults) else SizeError
        unspaced = [isinstance(one, WrongRank) and one.unspaced for one in bound.faults]
        fix, advice = spaced(source) if all(unspaced) else None, fault.advice or another_name(twice)
        if advice is None and local and any(isinstance(one, NotProduct) for one in bound.faults):
            advice = "what the body reshapes is each device's own block: gather what is divided first"
        if advice is None and any(layout.is_scalar and shape == (2,) for _, shape, layout in arrays):
            advice = "a key of jax.random.PRNGKey has shape (2,), and that of jax.random.key(seed) is a scalar"
        raise error(replace(fault, span=span, fix=fix, advice=advice))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments in parameter order, defaults filled in."""
        if not kwargs and len(args) == len(self.params):
            return list(args)
        if self.python is None:
            return self.fail(f"{self.name} takes {len(self.params)} positional arguments, and was given {len(args)}.")
        try:
            bound = self.python.bind(*args, **kwargs)
        except TypeError as error:
            return self.fail(f"the arguments do not fit {self.name}{self.python}: {error}.")
        bound.apply_defaults()
        values: list[Any] = []
        for name, value in bound.arguments.items():
            kind = self.python.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                values += value
            elif kind is inspect.Parameter.VAR_KEYWORD:
                values += value.values()
            else:
                values.append(value)
        if len(values) != len(self.params):
            self.fail(f"{self.name} has layouts for {len(self.params)} arguments, and was given {len(values)}.")
        return values

    def default(self, name: str) -> Any:
        """The default of a parameter, or a mark where it has none."""
        parameter = None if self.python is None else self.python.parameters.get(name)
        return inspect.Parameter.empty if parameter is None else parameter.default

    def call(self, values: Sequence[Any]) -> Any:
        """Run the body on arguments in parameter order. It fills in its own defaults.

        A transformation keeps the signature of what it transforms and takes arrays only, so that
        `jax.vmap(jnp.linalg.eigvalsh)` would map over the string that is the default of `UPLO`.
        """
        if self.python is None:
            return self.fn(*values)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        last = 0  # where the positional arguments end that are not defaults
        for name, value in zip(self.params, values, strict=True):
            parameter = self.python.parameters.get(name)
            default = name in self.static and value is self.default(name)
            if parameter is None or parameter.kind is not parameter.KEYWORD_ONLY:
                args.append(value)
                last = last if default else len(args)
            elif not default:
                kwargs[name] = value
        return self.fn(*args[:last], **kwargs)


def read(
    fn: Callable[..., Any],
    pattern: str | Pattern | None,
    in_layouts: Any,
    out_layouts: Any,
    *,
    mapping: Any,
    arg_mapping: Mapping[str, Any] | None,
    axes: Mapping[str, Any] | None,
    sizes: Mapping[str, int],
    static: Sequence[str],
    donate: Sequence[str],
    auto: str | Sequence[str],
    check: str,
) -> Signature:
    """Read the declaration of a kernel and check it against the parameters of `fn`."""
    python = _python_signature(fn)
    static, donate = _names("static", static), _names("donate", donate)
    _check_dict("arg_mapping", arg_mapping, '{"params": {"embed": "dp"}}')
    _check_dict("axes", axes, '{"tp": "model"}')
    if "in_specs" in sizes or "out_specs" in sizes:
        rule = "a kernel has layouts, which are strings, in place of jax.shard_map's in_specs and out_specs."
        call = f"{getattr(fn, '__name__', type(fn).__name__)}: kernel(in_specs=..., out_specs=...)"
        raise LayoutError(rule, call=call, advice=_of_specs(sizes.get("in_specs"), sizes.get("out_specs")))
    pattern = _pattern(pattern, fn, in_layouts, out_layouts)
    if pattern is not None:
        inputs: Any = () if pattern.empty_left else pattern.inputs
        outputs: Any = pattern.outputs[0] if len(pattern.outputs) == 1 else pattern.outputs
        source = pattern.source
    else:
        inputs, outputs = in_layouts, out_layouts
        source = f"in_layouts={_short(in_layouts)}, out_layouts={_short(out_layouts)}"
    signature = Signature(
        fn,
        source,
        (),
        {},
        _as_layouts(outputs),
        static,
        donate,
        mapping=None if mapping is None else AxisMapping.of(mapping),
        arg_mapping={k: AxisMapping.of(v) for k, v in (arg_mapping or {}).items()},
        axes=tuple(sorted((axes or {}).items())),
        sizes=tuple(sorted((n, int(k) if isinstance(k, np.integer) else k) for n, k in sizes.items())),
        auto=_names("auto", auto, "a mesh axis, or several names", 'auto="dp"'),
        shared_mapping=mapping is None or isinstance(mapping, AxisMapping),
        python=python,
        written=pattern is not None,
        check=check,
    )
    signature.params = _parameters(signature, inputs)
    _check_names(signature)
    signature.layouts = _assign(signature, inputs)
    both = [n for n in signature.donate if n in signature.static]
    if both:
        signature.fail(f"{both[0]} is static, so it has no buffer to donate.")
    return signature


def _of_specs(*sides: Any) -> str:
    """The pattern that says what `in_specs` and `out_specs` say, as far as they are specs without containers."""
    specs = [side if isinstance(side, tuple) and not isinstance(side, PartitionSpec) else (side,) for side in sides]
    if not all(isinstance(one, PartitionSpec) for side in specs for one in side):
        return 'as in @kernel("b/dp d -> b/dp d", mesh=mesh), where P("dp") has a name for each dimension'
    pattern = " -> ".join(", ".join(map(layout_of_spec, side)) for side in specs)
    return f'as in "{pattern}", with a name, or _, for each dimension'


def _python_signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def _names(what: str, value: Any, of: str = "an argument, or several names", example: str = "") -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Collection) and all(isinstance(name, str) for name in value):
        return tuple(value)
    rule = f"{what} is the name of {of}, not {value!r}."
    raise LayoutError(rule, call="kernel(...)", advice="as in " + (example or f'{what}="x"'))


def _check_dict(what: str, value: Any, example: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        rule = f"{what} is a dict, not {kind_of(value)}."
        raise LayoutError(rule, call="kernel(...)", advice=f"as in {what}={example}")


def _pattern(pattern: Any, fn: Callable[..., Any], in_layouts: Any, out_layouts: Any) -> Pattern | None:
    name = getattr(fn, "__name__", type(fn).__name__)
    if pattern is None:
        if in_layouts is None or out_layouts is None:
            rule = "a kernel declares its layouts: a pattern string, or both in_layouts and out_layouts."
            raise LayoutError(rule, call=f"{name}: kernel(...)", advice='as in @kernel("b/dp d -> b/dp d", mesh=mesh)')
        return None
    if in_layouts is not None or out_layouts is not None:
        raise LayoutError(
            "a pattern string and in_layouts/out_layouts say the same thing twice: give one.",
            call=f"{name}: kernel(...)",
        )
    if isinstance(pattern, Pattern):
        return pattern
    if not isinstance(pattern, str):
        rule = f"the pattern is a string, not {kind_of(pattern)}."
        raise LayoutError(rule, call=f"{name}: kernel(...)", advice='as in kernel("b/dp d -> b/dp d", mesh=mesh)(fn)')
    return Pattern(pattern, call=f'{name}: kernel("{pattern}")')


def _short(tree: Any) -> str:
    text = str(jax.tree.map(str, tree, is_leaf=lambda x: isinstance(x, (str, Layout)) or x is None))
    text = " ".join(text.replace('"', "'").split())
    return text if len(text) <= 60 else text[:57] + "..."


def _as_layouts(tree: Any) -> Any:
    def one(leaf: Any) -> Any:
        return Layout(leaf) if isinstance(leaf, str) else leaf

    if callable(tree) and not isinstance(tree, Layout):
        return tree
    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, (str, Layout, type)) or x is None or callable(x))


def _parameters(signature: Signature, inputs: Any) -> tuple[str, ...]:
    """Names of all arguments in call order; a `*args` is counted out by the layouts."""
    wanted = len(inputs) if isinstance(inputs, (tuple, list)) else None
    if signature.python is None:
        return tuple(f"args[{i}]" for i in range((wanted or 0) + len(signature.static)))
    names: list[str] = []
    fixed = [p for p in signature.python.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in signature.python.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            rest = (wanted or 0) - sum(q.name not in signature.static and q.default is q.empty for q in fixed)
            names += [f"{p.name}[{i}]" for i in range(max(rest, 0))]
        elif p.kind is p.VAR_KEYWORD:
            signature.fail(f"**{p.name} cannot be given layouts: name the arguments.")
        else:
            names.append(p.name)
    return tuple(names)


_PER_ARGUMENT = "one layout per argument; static=(...) for those that are not arrays"
_OF_SELF = (
    'static="self" if the method takes its arrays as arguments; an array of self that is divided needs a layout:\n'
    'self is an argument as any other, a tree of arrays, as in in_layouts=({"scale": "d/tp"}, "b/dp d/tp")'
)


def _assign(signature: Signature, inputs: Any) -> dict[str, Any]:
    arrays = [n for n in signature.params if n not in signature.static]
    if isinstance(inputs, dict) and set(inputs) <= set(signature.params) and inputs:
        by_name = {k: _as_layouts(v) for k, v in inputs.items()}
    elif isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        if len(inputs) < len(arrays):
            arrays = _drop_defaults(signature, arrays, len(inputs))
        if len(inputs) != len(arrays):
            signature.fail(
                f"{signature.name} has {len(arrays)} array argument{'s' * (len(arrays) != 1)}, and "
                f"the left side {len(inputs)} "
                f"layout{'s' * (len(inputs) != 1)}.",
                got=[f"arguments: {', '.join(arrays) or 'none'}"],
                advice=_OF_SELF if arrays[:1] == ["self"] else _PER_ARGUMENT,
            )
        by_name = {n: _as_layouts(v) for n, v in zip(arrays, inputs, strict=True)}
    elif len(arrays) == 1:
        by_name = {arrays[0]: _as_layouts(inputs)}
    else:
        by_name = signature.fail("in_layouts is a tuple with one entry per argument, or a dict by argument name.")
    missing = [n for n in arrays if n not in by_name]
    if missing:
        signature.fail(
            f"no layout for the argument{'s' * (len(missing) > 1)} {', '.join(missing)}.",
            advice="a layout, or static=(...)",
        )
    return by_name


def _drop_defaults(signature: Signature, arrays: list[str], count: int) -> list[str]:
    """Trailing parameters with defaults and no layout become static."""
    known = signature.python.parameters if signature.python else {}
    tail = arrays[count:]
    if all(n in known and known[n].default is not inspect.Parameter.empty for n in tail):
        signature.static = (*signature.static, *tail)
        return arrays[:count]
    return arrays


_ARGUMENT = "the name of an argument, or several names"
_LAYOUTS = 'the pattern, as in "b/dp d -> b/dp d"'
_KEYWORDS = {  # those of `kernel`, and what those of other functions are here
    "mesh": "mesh=mesh",
    "mapping": 'mapping={"b": "dp"}',
    "static_argnums": f'static="n", {_ARGUMENT}',
    "donate_argnums": f'donate="x", {_ARGUMENT}',
    "axis_names": 'auto="tp", the mesh axes that are left to the compiler',
    "boundary": 'boundary="error"',
    "check": 'check="warn" or check="off", which is about findings',
    "check_vma": "leave it out: JAX always checks its types",
    "mode": 'kernel.auto(...) or kernel.reference(...) for one call, with spmd.mode("auto"): for all calls',
    "in_shardings": _LAYOUTS,
    "out_shardings": _LAYOUTS,
}


def meant_by(keyword: str) -> str | None:
    """Return what a keyword that a kernel does not have is called here."""
    return _KEYWORDS.get(nearest(keyword, _KEYWORDS) or "")


def _check_names(signature: Signature) -> None:
    for name, size in signature.sizes:
        if fault := not_int(f"{name}, a keyword that binds a size,", size, 1):
            if (meant := meant_by(name)) and not re.search(rf"\b{name}\b", signature.source):
                signature.fail(f"a kernel has no keyword {name}, and other keywords bind sizes.", advice=meant)
            number = isinstance(size, int | float) or size == ()
            signature.fail(fault, advice=None if number else f'axes={{"{name}": ...}} renames a mesh axis')
    for what, names in (
        ("static", signature.static),
        ("donate", signature.donate),
        ("arg_mapping", tuple(signature.arg_mapping)),
    ):
        for name in names:
            if name not in signature.params:
                rule = (
                    f"{what} names {name!r}, which is not an argument of "
                    f"{signature.name}{did_you_mean(name, signature.params) or '.'}"
                )
                signature.fail(rule, got=[f"arguments: {', '.join(signature.params)}"])


def spaced(source: str | None) -> str | None:
    """A string in NumPy's manner, `bd,df->bf`, with a space between its names, in quotes; None for another one.

    >>> spaced("bd,df->bf")
    '"b d,d f->b f"'
    """
    if source is None or not re.fullmatch(r"[A-Za-z\s,]+->[A-Za-z\s,]+", source):
        return None
    return f'"{re.sub("[A-Za-z]+", lambda name: " ".join(name[0]), source)}"'


# --- mesh axes that a kernel leaves to the compiler: `kernel(..., auto="dp")` ----------------------------------------


def check_left(signature: Signature, mesh: Any, layouts: Iterable[Layout]) -> None:
    """Check that the axes are on the mesh, that no layout names them, and that a compiler may divide them.

    Raises:
      MeshError: The mesh lacks one of them, or has no others.
      LayoutError: A layout names one of them.
      ModeError: One of them is `AxisType.Explicit`.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    got = [mesh_text(mesh.shape)]
    for axis in signature.auto:
        if axis not in kinds:
            near = did_you_mean(axis, kinds) or "."
            rule = f"auto= leaves {axis} to the compiler, and the mesh has no such axis{near}"
            signature.fail(rule, got=got, error=MeshError)
        if kinds[axis] is AxisType.Explicit:
            rule = f"auto= leaves {axis} to the compiler, which is AxisType.Explicit: types say how arrays lie."
            advice = f"a mesh with {axis} as AxisType.Auto, or a kernel whose strings name {axis}"
            signature.fail(rule, got=got, advice=advice, error=ModeError)
    if set(kinds) <= set(signature.auto):
        rule = "auto= leaves every axis of the mesh to the compiler, and no axis is left for the strings."
        signature.fail(rule, got=got, advice="jax.jit, or kernel.auto(...)", error=MeshError)
    for layout in layouts:
        named = [axis for axis in signature.auto if axis in layout.axis_names]
        if named:
            rule = f'auto= leaves {named[0]} to the compiler, and "{layout.short}" names it.'
            advice = f"{named[0]} in the strings, or in auto=, not in both"
            signature.fail(rule, advice=advice, error=LayoutError)


def without(spec: Any, rank: int, axes: Iterable[str]) -> P:
    """A spec without the axes that are left to the compiler: how an array lies along the others."""
    gone = set(axes)
    kept = [tuple(a for a in axes_tuple(entry) if a not in gone) for entry in _compat.partitions(spec, rank)]
    return P(*(entry or None for entry in kept))
