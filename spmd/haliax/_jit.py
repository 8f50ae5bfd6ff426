"""`jax.jit` for functions whose arguments and results are placed by names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from spmd import AxisMapping, axis_mapping
from spmd.errors import LayoutError, compose
from spmd.haliax._placement import shard
from spmd.mode import ambient_mapping

__all__ = ["fsdp", "named_jit"]


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
    """`jax.jit` whose arguments and results are placed by the names of their dimensions.

    The function runs under `axis_mapping(axis_resources)`; its arguments are brought to where `in_axis_resources` says
    if that is given, and keep their own shardings otherwise; its results lie where `out_axis_resources` says, which is
    `axis_resources` if absent. Leaves that are no arrays (an Equinox
    module's functions) are static, also in results.

    Communication: what placing the arguments and results takes, and what the compiler puts into the function.

    Args:
      fn: The function; absent, this is a decorator.
      axis_resources: Where names live inside; absent, the surrounding `axis_mapping` at the call.
      in_axis_resources: Where the arguments are to lie.
      out_axis_resources: Where the results are to lie.
      in_names: The layouts of the positional arguments, a tuple with an entry for each; None leaves one alone.
      out_names: The layouts of the result.
      donate_args: Whether each positional argument's buffers may be reused: a prefix tree of booleans, one entry per
        argument, or a function from a leaf to one.
      donate_kwargs: The same for keyword arguments, a dict.
      **jit_options: Further options of `jax.jit`, such as `inline`.

    Returns:
      The function, with `.lower(*args, **kwargs)` as that of `jax.jit`.

    Raises:
      LayoutError: If a mapping is given for arguments or results whose names are not, or names without a mapping.
      SpmdError: As `shard`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import haliax as hax
      >>> mesh = spmd.make_mesh(data=4)
      >>> rules = {"batch": "data", "embed": None}
      >>> @hax.named_jit(axis_resources=rules, in_axis_resources=rules, in_names=("batch embed",), out_names="batch")
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
    for what, rules, names in (("in", in_axis_resources, in_names), ("out", out_axis_resources, out_names)):
        if rules is not None and names is None:
            rule = f"{what}_axis_resources places named dimensions, and {what}_names does not name any."
            fix = 'in_names=("batch embed",)' if what == "in" else 'out_names="batch embed"'
            raise LayoutError(compose(rule, call="named_jit(fn, ...)", fix=fix))
    if in_names is not None and not isinstance(in_names, tuple):
        rule = "in_names is a tuple with an entry for each positional argument."
        got = [f"in_names: {type(in_names).__name__}"]
        raise LayoutError(compose(rule, call="named_jit(fn, ...)", got=got, fix='in_names=("batch embed",)'))
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
    """`named_jit` for parameters that rest under one mapping and compute under another (fully sharded data parallel).

    Arguments and results lie as `parameter_mapping` says; inside, `compute_mapping` is in force, and `auto_sharded`
    brings parameters under it. The compiler gathers them there. To decide yourself when each weight is gathered and its
    gradient scattered, there is `spmd.parallel.fsdp`.

    Communication: what the compiler needs between the two mappings.

    Args:
      fn: The function; absent, this is a decorator: `@fsdp(parameter_mapping=..., compute_mapping=..., ...)`.
      parameter_mapping: Where names live in arguments and results.
      compute_mapping: Where they live inside.
      in_names: As in `named_jit`.
      out_names: As in `named_jit`.
      **options: Further options of `named_jit`.

    Returns:
      The function.

    Raises:
      LayoutError: As `named_jit`, and without both mappings.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> from spmd import haliax as hax
      >>> mesh = spmd.make_mesh(data=4)
      >>> at_rest, compute = {"embed": "data", "mlp": None}, {"embed": None, "mlp": None}
      >>> @hax.fsdp(parameter_mapping=at_rest, compute_mapping=compute, in_names=("embed mlp",), out_names="embed mlp")
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
        raise LayoutError(compose(rule, call="fsdp(fn, ...)", fix="parameter_mapping=..., compute_mapping=..."))
    return named_jit(
        fn,
        compute_mapping,
        in_axis_resources=parameter_mapping,
        out_axis_resources=parameter_mapping,
        in_names=in_names,
        out_names=out_names,
        **options,
    )


@jax.tree_util.register_static
class _Static:
    """What is no array, on its way through `jit`: a part of the structure."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.parts == other.parts


class _NamedJit:
    """A function of arrays placed by names; see `named_jit`."""

    def __init__(self, fn: Any, inside: Any, arguments: Any, results: Any, donated: Any, options: Any) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._inside, self._donated = fn, inside, donated
        self._in_mapping, self._in_names = arguments
        self._out_mapping, self._out_names = results
        self._jitted = jax.jit(self._run, donate_argnums=0, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arrays, static = self._jitted(*self._prepared(args, kwargs))
        return _joined(arrays, static)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).lower`."""
        return self._jitted.lower(*self._prepared(args, kwargs))

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """The arrays that are donated, those that are kept, and the rest."""
        inside = self._rules(self._inside)
        if self._in_names is not None:
            rules = self._rules(self._in_mapping) if self._in_mapping is not None else inside
            if len(self._in_names) != len(args):
                rule = f"in_names has an entry for each positional argument: {len(args)}, not {len(self._in_names)}."
                raise LayoutError(compose(rule, call=f"{self._fn.__name__}(...)", fix="None for one left alone"))
            named = zip(args, self._in_names, strict=True)
            args = tuple(x if n is None else shard(x, n, _needed(rules, "in")) for x, n in named)
        flags = self._flags(args, kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        donated = [x if flag and _is_array(x) else None for x, flag in zip(leaves, flags, strict=True)]
        kept = [x if not flag and _is_array(x) else None for x, flag in zip(leaves, flags, strict=True)]
        rest = tuple(None if _is_array(x) else x for x in leaves)
        return donated, kept, _Static(rest, structure, inside)

    def _rules(self, mapping: Any) -> AxisMapping | None:
        return ambient_mapping() if mapping is None else AxisMapping.of(mapping)

    def _flags(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bool]:
        of_args, of_kwargs = self._donated
        flags: list[bool] = []
        for given, prefix, what in ((args, of_args, "donate_args"), (kwargs, of_kwargs, "donate_kwargs")):
            if prefix is None or isinstance(prefix, bool):
                flags += [bool(prefix)] * len(jax.tree.leaves(given))
            elif callable(prefix):
                flags += [bool(prefix(leaf)) for leaf in jax.tree.leaves(given)]
            else:
                prefix = tuple(prefix) if what == "donate_args" else dict(prefix)
                try:
                    flags += [bool(f) for f in jax.tree.leaves(jax.tree.broadcast(prefix, given))]
                except ValueError as error:
                    rule = f"{what} follows the arguments: a boolean for each, or for each of its parts."
                    raise LayoutError(compose(rule, call="named_jit(fn, ...)", got=[str(error)])) from None
        return flags

    def _run(self, donated: list[Any], kept: list[Any], static: _Static) -> tuple[list[Any], _Static]:
        rest, structure, inside = static.parts
        merged = [
            r if d is None and k is None else k if d is None else d for d, k, r in zip(donated, kept, rest, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(structure, merged)
        with axis_mapping(inside):
            out = self._fn(*args, **kwargs)
        if self._out_names is not None:
            rules = self._rules(self._out_mapping) if self._out_mapping is not None else inside
            out = shard(out, self._out_names, _needed(rules, "out"))
        leaves, structure = jax.tree.flatten(out)
        fixed = tuple(None if _is_array(x) else x for x in leaves)
        return [x if _is_array(x) else None for x in leaves], _Static(fixed, structure)


def _joined(arrays: list[Any], static: _Static) -> Any:
    fixed, structure = static.parts
    return jax.tree.unflatten(structure, [f if x is None else x for x, f in zip(arrays, fixed, strict=True)])


def _is_array(x: Any) -> bool:
    return (hasattr(x, "shape") and hasattr(x, "dtype")) or isinstance(x, (bool, int, float, complex))


def _needed(rules: AxisMapping | None, side: str) -> AxisMapping:
    if rules is None:
        rule = f"{side}_names names dimensions, and no mapping says where they live."
        fix = f"{side}_axis_resources=..., axis_resources=..., or with axis_mapping(...) around the call"
        raise LayoutError(compose(rule, call="named_jit(fn, ...)", fix=fix))
    return rules
