"""An assertion that the modes of a program agree, in results and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spmd._text.table import Table
from spmd.checker._numbers import compared, labelled, pulled
from spmd.errors import LayoutError, ModeError, not_one_of
from spmd.mesh import check_arguments_alive
from spmd.modes import MODES, Mode, mode
from spmd.testing._mismatch import Mismatch


def assert_modes_agree(
    fn: Callable[..., Any],
    *args: Any,
    modes: Sequence[Mode] = MODES,
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
      Mismatch: Results or gradients differ. The message says by how much, or in which shapes and dtypes.
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
            program, arrays = pulled(functools.partial(fn, **kwargs), args, grad=grad)
            found[name] = jax.tree.map(np.asarray, jax.jit(program)(*arrays))
    *others, base = names
    rows: list[tuple[str, ...]] = []
    for name in others:
        rows += _rows(name, found[name], found[base], rtol, atol)
    if rows:
        head = ("", "mode", "got", f"in {base} mode", "largest difference", "allowed there", "elements")
        shown = getattr(fn, "__name__", "fn")
        rule = f"{shown} is not the same in all modes."
        raise Mismatch("\n".join([rule, Table(rows, head, right=(4, 5, 6)).text()]))


def _checked(modes: Sequence[Mode]) -> list[Mode]:
    names: list[Any] = [modes] if isinstance(modes, str) else list(modes)
    for name in names:
        if name not in MODES:
            raise ModeError(not_one_of("mode", name, MODES), call="assert_modes_agree(...)")
    if len(set(names)) < 2:
        rule = "there is nothing to compare with one mode alone."
        raise ModeError(rule, call="assert_modes_agree(...)", fix='modes=("explicit", "reference")')
    return names


def _rows(name: str, got: Any, wanted: Any, rtol: float, atol: float) -> list[tuple[str, ...]]:
    found = compared(got, wanted, lambda _, y: atol + rtol * np.abs(y))
    types = [(one.got, one.wanted) if one.got != one.wanted else ("", "") for one in found]
    return [(labelled(one.path), name, *both, *one.counts) for one, both in zip(found, types, strict=True)]
