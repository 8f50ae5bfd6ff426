"""Trees of arrays placed by the names of their dimensions, and `jax.jit` for functions of such trees."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd import AxisMapping, Layout, axis_mapping
from spmd._python.named import ByName
from spmd._text import bytes_text
from spmd._trees.leaves import Each, Static, Unknown, annotated, by_path, check_hashable, is_array, kind_of, not_int
from spmd.errors import Fault, LayoutError, SizeError, did_you_mean, warn
from spmd.language import axes_product
from spmd.mesh import check_arguments_alive, mesh_for, sizes_for
from spmd.modes import ambient_mapping, ambient_mode

T = TypeVar("T")
BIG = 2**20


class WholeArrayWarning(UserWarning):
    """A big array is whole on every device, although the mesh has several."""


def shard(tree: T, names: Any, mapping: Any = None, mesh: Any = None, *, big: int = BIG) -> T:
    """Place a tree of arrays by the names of their dimensions, inside and outside `jit`.

    This is `spmd.shard` with a required mapping, and with a warning if the mapping leaves a big array whole.

    Communication: that of moving the arrays; none for arrays that are in place already.

    Args:
      tree: An array or a pytree, including modules of Equinox and Flax NNX. Leaves that are not arrays stay as they
        are.
      names: The layouts, see above.
      mapping: The mapping of the names; by default the surrounding `axis_mapping`.
      mesh: The mesh; by default that of the arrays' shardings, or else that of `jax.set_mesh`.
      big: The largest number of bytes of an array that may be whole without a warning.

    Returns:
      The tree, placed.

    Raises:
      LayoutError: If there is no mapping, the mapping lacks a name, or names do not fit the tree.
      MeshError: If there is no mesh, or the mesh lacks an axis.
      SizeError: If dimensions do not divide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import haliax as hax
      >>> mesh = spmd.make_mesh(data=8)
      >>> with hax.axis_mapping({"batch": "data", "embed": None}):
      ...     batch = hax.shard(jnp.zeros((32, 512)), "batch embed", mesh=mesh)
      >>> batch.sharding.spec
      P('data', None)
    """
    found, layouts = mapping_of("shard", mapping), _layouts(names)
    placed = spmd.shard(tree, layouts, mesh=mesh, mapping=found)
    if ambient_mode()[0] != "reference":
        _warn_of_whole(tree, layouts, found, mesh, big)
    return placed


def auto_sharded(tree: T, names: Any, mesh: Any = None) -> T:
    """`shard` by the surrounding `axis_mapping`. Without one it does nothing.

    For library code that may or may not run under a mapping. Communication: that of `shard`.

    Args:
      tree: An array or a pytree.
      names: The layouts, see above.
      mesh: As in `shard`.

    Returns:
      The tree, placed, or as it was.

    Raises:
      SpmdError: Under a mapping, as in `shard`.

    Example:
      >>> import jax.numpy as jnp
      >>> from spmd import haliax as hax
      >>> hax.auto_sharded(jnp.zeros(4), "batch").shape
      (4,)
    """
    return tree if ambient_mapping() is None else shard(tree, names, mesh=mesh)


def shard_with_axis_mapping(tree: T, names: Any, mapping: Any, mesh: Any = None) -> T:
    """`shard`, under its older name.

    Communication: that of `shard`.

    Args:
      tree: An array or a pytree.
      names: The layouts, see above.
      mapping: The mapping of the names.
      mesh: As in `shard`.

    Returns:
      The tree, placed.

    Raises:
      SpmdError: As in `shard`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import haliax as hax
      >>> mesh = spmd.make_mesh(data=4)
      >>> hax.shard_with_axis_mapping(jnp.zeros(8), "batch", {"batch": "data"}, mesh).sharding.spec
      P('data',)
    """
    return shard(tree, names, mapping, mesh)


def mapping_of(who: str, mapping: Any) -> AxisMapping:
    found = ambient_mapping() if mapping is None else AxisMapping.of(mapping)
    if found is None:
        rule = "the call has no mapping: none was given, and axis_mapping does not surround it."
        advice = 'mapping={"batch": "data"}, or with axis_mapping({"batch": "data"}): around the call'
        raise LayoutError(rule, call=f"{who}(...)", advice=advice)
    return found


def _layouts(names: Any) -> Any:
    """Layouts for `spmd.shard`: functions of a key path become functions of the tree below them."""

    def of_tree(one: Any) -> Any:
        plain = not callable(one) or inspect.isclass(one)
        return one if plain else functools.partial(by_path, one)

    return jax.tree.map(of_tree, names)


def _warn_of_whole(tree: Any, layouts: Any, mapping: AxisMapping, mesh: Any, big: int) -> None:
    """Warn about the big arrays that every device of a mesh would hold whole."""
    wanted = spmd.shard(jax.tree.map(_abstract, tree), layouts, mesh=mesh, mapping=mapping)
    whole = []
    for path, x in jax.tree_util.tree_leaves_with_path(wanted):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 and sharding.is_fully_replicated:
            nbytes = math.prod(x.shape) * x.dtype.itemsize
            if nbytes > big:
                whole.append(f"tree{jax.tree_util.keystr(path)}: {x.dtype.name}{list(x.shape)}, {bytes_text(nbytes)}")
    if whole:
        rule = "a big array is whole on every device: none of its names divides it."
        got = [*whole, f"mapping: {_rules_text(mapping)}"]
        advice = '"embed": "data" in the mapping for one of its names, or big=... to allow it'
        warn(str(Fault(rule, call="shard(tree, names)", got=got, advice=advice)), WholeArrayWarning)


def _abstract(x: Any) -> Any:
    """An array without its elements; its mesh stays."""
    if not is_array(x):
        return x
    sharding = getattr(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x, "sharding", None)
    known = isinstance(sharding, NamedSharding) and not sharding.mesh.empty
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if known else None)


def _rules_text(mapping: AxisMapping) -> str:
    return ", ".join(f"{name} -> {'/'.join(axes) or 'whole'}" for name, axes in mapping.items()) or "(empty)"


# --- the mesh axes of named dimensions, their numbers of devices, and the resulting shardings -------------------------


def round_axis_for_partitioning(name: str, size: int, mapping: Any = None, mesh: Any = None) -> int:
    """The next size of a dimension that divides evenly over its mesh axes.

    Communication: none.

    Args:
      name: The dimension.
      size: Its size.
      mapping: As in `shard`.
      mesh: A mesh; by default that of `jax.set_mesh`.

    Returns:
      The smallest multiple of the number of devices along its axes that is not below `size`.

    Raises:
      SpmdError: As in `physical_axis_size`.

    Example:
      >>> import spmd
      >>> from spmd import haliax as hax
      >>> hax.round_axis_for_partitioning("vocab", 50257, {"vocab": "tp"}, spmd.make_mesh(tp=8))
      50264
    """
    if fault := not_int("the size of a dimension", size, 0):
        raise SizeError(fault, call=f"round_axis_for_partitioning({name!r}, size)")
    parts = physical_axis_size(name, mapping, mesh) or 1
    return -(-size // parts) * parts


def physical_axis_name(name: str, mapping: Any = None) -> str | tuple[str, ...] | None:
    """The mesh axes of a named dimension: one, a tuple of several, or None for a dimension that is whole.

    Communication: none.

    Args:
      name: The dimension.
      mapping: As in `shard`.

    Returns:
      The axes.

    Raises:
      LayoutError: If there is no mapping, or it lacks this name.

    Example:
      >>> from spmd import haliax as hax
      >>> hax.physical_axis_name("batch", {"batch": ("data", "fsdp")})
      ('data', 'fsdp')
    """
    axes = _axes("physical_axis_name", name, mapping)
    return axes[0] if len(axes) == 1 else axes or None


def physical_axis_size(name: str, mapping: Any = None, mesh: Any = None) -> int | None:
    """The number of devices over which a named dimension is divided; None if it is whole.

    Communication: none.

    Args:
      name: The dimension.
      mapping: As in `shard`.
      mesh: A mesh; by default that of `jax.set_mesh`.

    Returns:
      The product of the sizes of its mesh axes.

    Raises:
      LayoutError: If there is no mapping, or it lacks this name.
      MeshError: If there is no mesh, or it lacks an axis.

    Example:
      >>> import spmd
      >>> from spmd import haliax as hax
      >>> hax.physical_axis_size("batch", {"batch": ("data", "tp")}, spmd.make_mesh(data=2, tp=4))
      8
    """
    axes = _axes("physical_axis_size", name, mapping)
    sizes = sizes_for(mesh, "physical_axis_size(...)")
    AxisMapping({name: axes}).check(sizes)
    return axes_product(axes, sizes) if axes else None


def sharding_for_axis(names: Any, mapping: Any = None, mesh: Any = None) -> Any:
    """The sharding of an array with dimensions of these names: `sharding_for_axis("batch embed")`.

    Communication: none.

    Args:
      names: One or more names, a layout; or a tree of layouts, or a class with layouts as annotations.
      mapping: As in `shard`.
      mesh: A mesh; by default that of `jax.set_mesh`.

    Returns:
      The `NamedSharding`, or a tree of them.

    Raises:
      LayoutError: If there is no mapping, or it lacks a name.
      MeshError: If there is no mesh, or it lacks an axis.

    Example:
      >>> import spmd
      >>> from spmd import haliax as hax
      >>> hax.sharding_for_axis("batch", {"batch": "data"}, spmd.make_mesh(data=8)).spec
      P('data',)
    """
    found = mesh_for(mesh, [], "sharding_for_axis(...)")
    mapping_of("sharding_for_axis", mapping).check(found.axis_names)
    specs = _specs("sharding_for_axis", names, mapping)
    is_spec = lambda one: isinstance(one, PartitionSpec)
    return jax.tree.map(lambda spec: NamedSharding(found, spec), specs, is_leaf=is_spec)


def pspec_for(names: Any, mapping: Any = None) -> Any:
    """The `PartitionSpec` of named dimensions, or a tree of them for a tree of names.

    Communication: none.

    Args:
      names: A layout, a tree of layouts, or a class with layouts as annotations.
      mapping: As in `shard`.

    Returns:
      The specs; for a class, a dict by attribute name.

    Raises:
      LayoutError: If there is no mapping, or it lacks a name.

    Example:
      >>> from spmd import haliax as hax
      >>> hax.pspec_for({"w": "embed mlp"}, {"embed": None, "mlp": "tp"})
      {'w': P(None, 'tp')}
    """
    return _specs("pspec_for", names, mapping)


def _specs(who: str, names: Any, mapping: Any) -> Any:
    rules = mapping_of(who, mapping)

    def spec(one: Any) -> Any:
        if isinstance(one, type):
            return {name: tree(below) for name, below in annotated(one).items()}
        if not isinstance(one, (str, Layout)):
            what = kind_of(one)
            if isinstance(one, (Each, Unknown)):
                what = "a container in an annotation, which needs a tree for its length"
            rule = f"{who} is given no arrays, so names are layouts, a tree of them, or a class of them, not {what}."
            raise LayoutError(rule, call=f"{who}(names)", advice=f'as in {who}("batch embed")')
        layout = Layout(one)
        rules.need(rules.lacks(layout), f'{who}("{one}")')
        return rules.resolve(layout).spec

    def tree(below: Any) -> Any:
        return jax.tree.map(spec, below, is_leaf=lambda one: isinstance(one, (str, Layout, type, Each, Unknown)))

    return tree(names)


def _axes(who: str, name: Any, mapping: Any) -> tuple[str, ...]:
    rules = mapping_of(who, mapping)
    if not isinstance(name, str):
        rule = f"a dimension is named by a str, not by {kind_of(name)}."
        raise LayoutError(rule, call=f"{who}(name)", advice=f'as in {who}("batch")')
    rules.need([name], f'{who}("{name}")')
    return rules[name]


# --- `jax.jit` for functions with arguments and results that are placed by names ------------------------------------


_TAKEN = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "in_shardings", "out_shardings")
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def named_jit(
    fn: Callable[..., Any] | None = None,
    axis_resources: Any = None,
    *,
    in_axis_resources: Any = None,
    out_axis_resources: Any = None,
    in_names: Any = None,
    out_names: Any = None,
    donate_args: Any = None,
    donate_kwargs: Any = None,
    **jit_options: Any,
) -> Any:
    """`jax.jit` that places arguments and results by the names of their dimensions.

    The function runs under `axis_mapping(axis_resources)`. Arguments with `in_names` are moved to where
    `in_axis_resources` says; others keep their shardings. Results with `out_names` are placed as `out_axis_resources`
    says. The default of both mappings is `axis_resources`. Leaves that are not arrays, such as an Equinox module's
    functions and Python numbers, are static, also in results: a new number compiles anew.

    Communication: that of placing the arguments and results, and what the compiler adds in the function.

    Args:
      fn: The function; without it, this is a decorator.
      axis_resources: The mapping inside the function; by default the surrounding `axis_mapping` at the call.
      in_axis_resources: The mapping of the arguments.
      out_axis_resources: The mapping of the results.
      in_names: The layouts of the arguments, whether passed by position or by keyword: a tuple with an entry for each
        parameter in order, or a dict by parameter name. An argument with None, or without an entry in the dict, stays
        where it is.
      out_names: The layouts of the result.
      donate_args: Whether each positional argument's buffers may be reused: a prefix tree of booleans, or of functions
        from an array to a boolean. If an argument is moved first, its moved copy is donated.
      donate_kwargs: The same for keyword arguments, a dict.
      **jit_options: Further options of `jax.jit`: `keep_unused`, `backend`, `inline`, `compiler_options`.

    Returns:
      The function, with `.lower(*args, **kwargs)` like that of `jax.jit`.

    Raises:
      LayoutError: If arguments or results have a mapping without names, or names without a mapping, or if flags of
        donation do not fit the arguments.
      SpmdError: As in `shard`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import haliax as hax
      >>> mesh = spmd.make_mesh(data=4)
      >>> rules = {"batch": "data", "embed": None}
      >>> names = {"in_names": ("batch embed",), "out_names": "batch"}
      >>> @hax.named_jit(axis_resources=rules, in_axis_resources=rules, **names)
      ... def norms(x):
      ...     return (x**2).sum(-1)
      >>> with jax.set_mesh(mesh):
      ...     norms(jnp.ones((8, 3))).sharding.spec
      P('data',)
    """
    if fn is None:
        options = dict(
            axis_resources=axis_resources,
            in_axis_resources=in_axis_resources,
            out_axis_resources=out_axis_resources,
            in_names=in_names,
            out_names=out_names,
            donate_args=donate_args,
            donate_kwargs=donate_kwargs,
            **jit_options,
        )
        return lambda fn: named_jit(fn, **options)
    if not callable(fn):
        rule = f"named_jit takes a function, not {kind_of(fn)}."
        raise LayoutError(rule, call="named_jit(fn, ...)", advice="named_jit(axis_resources=...)(fn)")
    if taken := next((option for option in _TAKEN if option in jit_options), None):
        rule = f"{taken} is not for named_jit: non-arrays are static, and names and mappings place arrays."
        advice = "donate_args=... or donate_kwargs=..." if "donate" in taken else f"leave out {taken}"
        raise LayoutError(rule, call="named_jit(fn, ...)", advice=advice)
    for what, rules, names in (("in", in_axis_resources, in_names), ("out", out_axis_resources, out_names)):
        if rules is not None and names is None:
            rule = f"{what}_axis_resources places named dimensions, but {what}_names does not name any."
            advice = 'as in in_names=("batch embed",)' if what == "in" else 'as in out_names="batch embed"'
            raise LayoutError(rule, call="named_jit(fn, ...)", advice=advice)
    if in_names is not None and not isinstance(in_names, (tuple, dict)):
        rule = "in_names is a tuple with an entry for each parameter, or a dict by parameter name."
        got = [f"in_names: {kind_of(in_names)}"]
        raise LayoutError(rule, call="named_jit(fn, ...)", got=got, advice='as in in_names=("batch embed",)')
    return _NamedJit(
        fn,
        axis_resources,
        (in_axis_resources, in_names),
        (out_axis_resources, out_names),
        (donate_args, donate_kwargs),
        jit_options,
    )


def fsdp(
    fn: Callable[..., Any] | None = None,
    parameter_mapping: Any = None,
    compute_mapping: Any = None,
    *,
    in_names: Any = None,
    out_names: Any = None,
    **options: Any,
) -> Any:
    """`named_jit` for parameters that rest under one mapping and are used under another (fully sharded data parallel).

    `parameter_mapping` places arguments and results. Inside, `compute_mapping` holds, and `auto_sharded` moves
    parameters to it, where the compiler gathers them. To decide yourself when each weight is gathered and its gradient
    is scattered, use `spmd.parallel.fsdp`.

    Communication: what the compiler needs between the two mappings.

    Args:
      fn: The function; without it, this is a decorator: `@fsdp(parameter_mapping=..., compute_mapping=..., ...)`.
      parameter_mapping: The mapping of arguments and results.
      compute_mapping: The mapping inside.
      in_names: As in `named_jit`.
      out_names: As in `named_jit`.
      **options: Further options of `named_jit`.

    Returns:
      The function.

    Raises:
      LayoutError: As in `named_jit`, or if one of the mappings is missing.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> from spmd import haliax as hax
      >>> mesh = spmd.make_mesh(data=4)
      >>> at_rest, compute = {"embed": "data", "mlp": None}, {"embed": None, "mlp": None}
      >>> names = {"in_names": ("embed mlp",), "out_names": "embed mlp"}
      >>> @hax.fsdp(parameter_mapping=at_rest, compute_mapping=compute, **names)
      ... def double(w):
      ...     return 2 * hax.auto_sharded(w, "embed mlp", mesh)
      >>> with jax.set_mesh(mesh):
      ...     double(jnp.ones((8, 3))).sharding.spec
      P('data', None)

    References:
      Zhao et al., "PyTorch FSDP", https://arxiv.org/abs/2304.11277
    """
    if fn is not None and not callable(fn):  # fsdp(parameter_mapping, compute_mapping), as in Haliax
        fn, parameter_mapping, compute_mapping = None, fn, parameter_mapping
    if parameter_mapping is None or compute_mapping is None:
        rule = "fsdp has two mappings: where parameters rest, and where they compute."
        raise LayoutError(rule, call="fsdp(fn, ...)", advice="parameter_mapping=..., compute_mapping=...")
    return named_jit(
        fn,
        compute_mapping,
        in_axis_resources=parameter_mapping,
        out_axis_resources=parameter_mapping,
        in_names=in_names,
        out_names=out_names,
        **options,
    )


class _NamedJit(ByName):
    """A function of arrays placed by names; see `named_jit`."""

    def __init__(self, fn: Any, inside: Any, arguments: Any, results: Any, donated: Any, options: Any) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._inside = fn, inside
        self._in_mapping, self._in_names = arguments
        self._out_mapping, self._out_names = results
        self._donate_args, self._donate_kwargs = donated
        self._right: dict[int | str, Any] = {}
        self._jitted = jax.jit(self._named(fn), donate_argnums=0, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_arguments_alive(args, kwargs, f"{self._call}(...)")
        arrays, static = self._jitted(*self._prepared(args, kwargs))
        leaves, structure = static.parts
        return jax.tree.unflatten(structure, _merged(arrays, leaves))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).lower`."""
        return self._jitted.lower(*self._prepared(args, kwargs))

    def _named(self, fn: Any) -> Any:
        def run(donated: Any, kept: Any, static: Any) -> Any:
            return self._run(donated, kept, static)

        run.__name__ = getattr(fn, "__name__", "fn")  # the name in compiled programs and profiles
        return run

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """The arrays that are donated, those that are kept, and the rest."""
        inside = ambient_mapping() if self._inside is None else AxisMapping.of(self._inside)
        if self._in_names is not None:
            args, kwargs = self._placed(args, kwargs, inside)
        leaves, structure = jax.tree.flatten((args, kwargs))
        donate = self._flags(args, kwargs)
        donated = [x if flag and is_array(x) else None for x, flag in zip(leaves, donate, strict=True)]
        kept = [x if not flag and is_array(x) else None for x, flag in zip(leaves, donate, strict=True)]
        static = Static(tuple(None if is_array(x) else x for x in leaves), structure, inside)
        check_hashable(static, f"{self._call}(...)")
        return donated, kept, static

    @property
    def _call(self) -> str:
        return getattr(self._fn, "__name__", "fn")

    def _placed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], inside: AxisMapping | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        of_args, of_kwargs = self._names(args, kwargs)
        rules = _rules(self._in_mapping, inside, "in")
        place = lambda key, x, names: x if names is None else self._at_its_place(key, x, names, rules)
        placed = tuple(place(i, x, names) for i, (x, names) in enumerate(zip(args, of_args, strict=True)))
        return placed, {name: place(name, x, of_kwargs.get(name)) for name, x in kwargs.items()}

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The layouts of the positional and of the keyword arguments."""
        given, kinds = self._in_names, self._parameters
        positional = [name for name, kind in kinds.items() if kind in _BY_POSITION]
        if isinstance(given, dict):
            unknown = [name for name in given if name not in kinds]
            if unknown and inspect.Parameter.VAR_KEYWORD not in kinds.values():
                rule = f"in_names names parameters, and {unknown[0]} is not one{did_you_mean(unknown[0], kinds) or '.'}"
                got = [f"parameters: {', '.join(kinds)}"]
                raise LayoutError(rule, call=f"{self._call}(...)", got=got)
            return [given.get(name) for name in (*positional, *[None] * len(args))][: len(args)], given
        others = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
        later = dict(zip([*positional[len(args) :], *others], given[len(args) :], strict=False))
        passed = len(args) + len(later.keys() & kwargs.keys())
        if len(given) != len(args) + len(later) or any(
            later[name] is not None for name in later.keys() - kwargs.keys()
        ):
            rule = f"in_names has an entry for each parameter in order: {passed}, not {len(given)}."
            raise LayoutError(rule, call=f"{self._call}(...)", advice="None for a parameter that stays where it is")
        return list(given[: len(args)]), later

    @functools.cached_property
    def _parameters(self) -> dict[str, Any]:
        """The kind of each parameter."""
        try:
            return {p.name: p.kind for p in inspect.signature(self._fn).parameters.values()}
        except (TypeError, ValueError):  # a builtin
            return {}

    def _at_its_place(self, key: int | str, x: Any, names: Any, rules: AxisMapping) -> Any:
        """An argument, placed. It is not checked again if it was right in the last call and is unchanged."""
        before = _where(x, rules)
        if before is not None and self._right.get(key) == before:
            return x
        placed = shard(x, names, rules)
        if before is not None and _where(placed, rules) == before:
            self._right[key] = before
        return placed

    def _flags(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bool]:
        """Return whether each leaf is donated; a leaf without a flag is not."""
        of_args, of_kwargs = self._donate_args, self._donate_kwargs
        if isinstance(of_args, (list, tuple)):
            of_args = (*of_args, *[False] * (len(args) - len(of_args)))
        if isinstance(of_kwargs, Mapping):
            of_kwargs = {name: of_kwargs.get(name, False) for name in kwargs}
        return _each(of_args, args, "donate_args") + _each(of_kwargs, kwargs, "donate_kwargs")

    def _run(self, donated: list[Any], kept: list[Any], static: Static) -> tuple[list[Any], Static]:
        leaves, structure, inside = static.parts
        args, kwargs = jax.tree.unflatten(structure, _merged(donated, _merged(kept, leaves)))
        with axis_mapping(inside):
            out = self._fn(*args, **kwargs)
        if self._out_names is not None:
            out = shard(out, self._out_names, _rules(self._out_mapping, inside, "out"))
        leaves, structure = jax.tree.flatten(out)
        arrays = [x if is_array(x) else None for x in leaves]
        return arrays, Static(tuple(None if is_array(x) else x for x in leaves), structure)


def _where(tree: Any, rules: AxisMapping) -> Any:
    """Everything that the placement of a tree depends on, if its arrays are on a mesh; else None."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [x for x in leaves if is_array(x)]
    if not all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in arrays):
        return None
    places = [(x.shape, x.dtype, x.sharding) for x in arrays]
    on_a_mesh = all(isinstance(sharding, NamedSharding) for _, _, sharding in places)
    return (structure, places, rules, ambient_mode()) if on_a_mesh else None


def _merged(first: list[Any], second: Any) -> list[Any]:
    return [y if x is None else x for x, y in zip(first, second, strict=True)]


def _each(prefix: Any, tree: Any, what: str) -> list[bool]:
    try:
        flags = jax.tree.leaves(jax.tree.broadcast(False if prefix is None else prefix, tree))
    except ValueError:
        rule = f"{what} is a prefix tree of the arguments: booleans, or functions from an array to a boolean."
        shown = [str(jax.tree.structure(one))[len("PyTreeDef(") : -1] for one in (prefix, tree)]
        got = [f"{what}: {shown[0]}", f"arguments: {shown[1]}"]
        raise LayoutError(rule, call="named_jit(fn, ...)", got=got) from None
    leaves = jax.tree.leaves(tree)
    return [is_array(x) and bool(flag(x) if callable(flag) else flag) for x, flag in zip(leaves, flags, strict=True)]


def _rules(given: Any, inside: AxisMapping | None, side: str) -> AxisMapping:
    rules = inside if given is None else AxisMapping.of(given)
    if rules is None:
        rule = f"{side}_names names dimensions, but no mapping places them."
        advice = f"{side}_axis_resources=..., axis_resources=..., or with axis_mapping(...): around the call"
        raise LayoutError(rule, call="named_jit(fn, ...)", advice=advice)
    return rules
