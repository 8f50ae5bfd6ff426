"""An assertion that the modes of a program agree, in results and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd._table import Table
from spmd.errors import LayoutError, ModeError, not_one_of
from spmd.mesh import check_arguments_alive
from spmd.modes import MODES, mode
from spmd.testing._mismatch import Mismatch

__all__ = ["assert_modes_agree"]


def assert_modes_agree(
    fn: Callable[..., Any],
    *args: Any,
    modes: Sequence[str] = MODES,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    grad: bool = True,
    **kwargs: Any,
) -> None:
    """Assert that a kernel, or a function of kernels, has the same results and gradients in each mode.

    `fn` runs once per mode under `jax.jit`, and so does its pull-back along fixed random cotangents. The other modes
    are compared with the last. Communication: that of `fn` in each mode.

    Args:
      fn: A kernel, or a function that calls kernels.
      *args: Its arguments, with values.
      modes: Of "explicit", "auto" and "reference", two or more.
      rtol: Relative tolerance.
      atol: Absolute tolerance.
      grad: Whether to compare the gradients of all floating-point arguments too.
      **kwargs: Keyword arguments of `fn`; not differentiated.

    Raises:
      Mismatch: Results or gradients differ. The message has their shapes and dtypes in both modes, and by how much.
      ModeError: A mode is not known.
      LayoutError: An argument has no values.
      PlacementError: An argument was donated or deleted.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> @spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)
      ... def norm(x):
      ...     return spmd.reduce(x * x, "b/dp d/tp -> b/dp") ** 0.5
      >>> spmd.testing.assert_modes_agree(norm, jnp.arange(32.0).reshape(4, 8) + 1)
    """
    names = _checked(modes)
    for path, leaf in jax.tree.leaves_with_path((args, kwargs)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            got = [f"args{jax.tree_util.keystr(path)}: {leaf.dtype}{list(leaf.shape)} without values"]
            rule = "the modes are compared by running them, so arguments have values."
            raise LayoutError(rule, call="assert_modes_agree(...)", got=got, advice="as in jnp.ones(shape, dtype)")
    check_arguments_alive(args, kwargs, "assert_modes_agree(...)")
    found = {}
    for name in names:
        with mode(name):
            found[name] = jax.tree.map(np.asarray, _run(fn, args, kwargs, grad))
    *others, base = names
    rows: list[tuple[str, ...]] = []
    for name in others:
        rows += _differences(name, found[name], found[base], rtol, atol)
    if rows:
        head = ("", "mode", "got", f"in {base} mode", "largest difference", "allowed there", "elements")
        shown = getattr(fn, "__name__", "fn")
        rule = f"{shown} is not the same in all modes."
        raise Mismatch("\n".join([rule, Table(rows, head, right=(4, 5, 6)).text()]))


def _checked(modes: Sequence[str]) -> list[str]:
    names = [modes] if isinstance(modes, str) else list(modes)
    for name in names:
        if name not in MODES:
            raise ModeError(not_one_of("mode", name, MODES), call="assert_modes_agree(...)")
    if len(set(names)) < 2:
        rule = "there is nothing to compare with one mode alone."
        raise ModeError(rule, call="assert_modes_agree(...)", fix='modes=("explicit", "reference")')
    return names


def _run(fn: Callable[..., Any], args: Any, kwargs: Any, grad: bool) -> dict[str, Any]:
    """The results, and the gradients of all floating-point arguments along cotangents that are equal in each run."""
    leaves, structure = jax.tree.flatten(args)
    arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray | np.generic | float | complex)]
    moving = [i for i in arrays if grad and jnp.issubdtype(jnp.result_type(leaves[i]), jnp.inexact)]
    rest = [i for i in arrays if i not in moving]

    def program(given: Any, fixed: Any) -> dict[str, Any]:
        def of(*given: Any) -> Any:
            filled = {**dict(zip(moving, given, strict=True)), **dict(zip(rest, fixed, strict=True))}
            return fn(*jax.tree.unflatten(structure, [filled.get(i, x) for i, x in enumerate(leaves)]), **kwargs)

        if not moving:
            return {"result": of()}
        out, pull = jax.vjp(of, *given)
        draws = np.random.default_rng(0)
        gradients = pull(jax.tree.map(lambda y: _cotangent(y, draws), out))
        whole = [None] * len(leaves)
        for i, g in zip(moving, gradients, strict=True):
            whole[i] = g
        return {"result": out, "gradient": jax.tree.unflatten(structure, whole)}

    return jax.jit(program)([leaves[i] for i in moving], [leaves[i] for i in rest])


def _cotangent(y: Any, draws: np.random.Generator) -> Any:
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        return np.zeros(y.shape, jax.dtypes.float0)
    return jnp.asarray(draws.normal(size=y.shape), y.dtype)


def _differences(name: str, got: Any, wanted: Any, rtol: float, atol: float) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    expected = dict(jax.tree.leaves_with_path(wanted))
    for path, x in jax.tree.leaves_with_path(got):
        y = expected[path]
        label = jax.tree_util.keystr(path).replace("['result']", "result").replace("['gradient']", "gradient of args")
        kinds = tuple(f"{v.dtype}{list(v.shape)}" for v in (x, y))
        if x.shape != y.shape or x.dtype != y.dtype:
            rows.append((label, name, *kinds, "-", "-", "-"))
            continue
        wide = [np.asarray(v, np.complex128 if v.dtype.kind == "c" else np.float64) for v in (x, y)]
        gap, allowed = np.abs(wide[0] - wide[1]), atol + rtol * np.abs(wide[1])
        wrong = ~((gap <= allowed) | (wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1])))
        if wrong.any():
            worst = np.unravel_index(np.argmax(np.where(wrong, np.nan_to_num(gap, nan=np.inf), 0)), wrong.shape)
            counts = f"{int(wrong.sum())} of {wrong.size}"
            rows.append((label, name, *kinds, f"{gap[worst]:.3g}", f"{allowed[worst]:.3g}", counts))
    return rows
