"""Hand-written bodies with markers, traced as a kernel would be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.source_info_util as source_info_util
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from spmd._lax import _split_p
from spmd.checker import check_jaxpr
from spmd.comm._marks import assert_equal_p, layout_p
from spmd.errors import ReplicationError
from spmd.language import Layout, Pattern

# Here stand the operations' markers, so this file is no user's code either.
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


def message(body: Callable[..., Any], *specs: Any, **kwargs: Any) -> str:
    """The error of a wrong body, with line numbers of this directory taken out."""
    try:
        check(body, *specs, **kwargs)
    except ReplicationError as error:
        return re.sub(r"(\S*/)?(\w+\.py):\d+ \(\S*?([\w<>]+)\)", r"\2:N (\3)", str(error).strip("\n"))
    raise AssertionError("no error")
