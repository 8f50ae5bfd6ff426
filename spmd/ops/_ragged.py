"""Rows that travel without gaps: `jax.lax.ragged_all_to_all`, and where it is to be had."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmd import _compat
from spmd.modes import Frame
from spmd.ops._gradients import custom_vjp


def without_gaps(frame: Frame, axes: tuple[str, ...], blocks: int, ragged: bool | None) -> bool:
    """Whether rows travel without gaps over these axes: if asked for, or by default where the hardware can.

    It numbers the devices in the order of the mesh, and only devices of their own can take part.
    """
    able = frame.explicit and blocks > 1 and frame.in_mesh_order(axes) == axes
    return able and (not _compat.on_cpu() if ragged is None else ragged)


class Route(NamedTuple):
    """Rows that travel without gaps, as `jax.lax.ragged_all_to_all` wants them.

    Attributes:
      start: Where the rows for each device begin here.
      size: How many they are.
      base: Where they begin there.
      came: How many rows come from each device.
    """

    start: Any
    size: Any
    base: Any
    came: Any


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def travelled(axes: tuple[str, ...], sizes: tuple[int, int], x: Any, there: Route, back: Route) -> Any:
    """The rows `"c d"` in a buffer of `sizes[0]` rows. JAX's own transpose sends the offsets once more.

    Args:
      axes: The mesh axes.
      sizes: The rows of the buffer, and those of x.
      x: The rows.
      there: The route.
      back: The reverse one.
    """
    out = _compat.pvary(jnp.zeros((sizes[0], x.shape[1]), x.dtype), tuple(_compat.varying_axes(x)))
    return _sent(axes, x, out, there)


def _sent(axes: tuple[str, ...], x: Any, out: Any, there: Route) -> Any:
    """The rows of x in `out`. JAX's own vmap asks that routes are mapped, too."""
    send = functools.partial(jax.lax.ragged_all_to_all, axis_name=axes)
    one = jax.custom_batching.custom_vmap(lambda *args: send(*args))

    @one.def_vmap
    def several(n: int, mapped: Any, *args: Any) -> tuple[Any, bool]:
        every = lambda args, mapped: [
            a if own else jnp.broadcast_to(a, (n, *a.shape)) for a, own in zip(args, mapped, strict=True)
        ]
        if any(mapped[2:]):
            return jax.vmap(send)(*every(args, mapped)), True
        rows = [jnp.moveaxis(a, 0, 1) for a in every(args[:2], mapped[:2])]  # of one route: they are wider
        came = one(*(a.reshape(a.shape[0], -1) for a in rows), *args[2:])
        return jnp.moveaxis(came.reshape(rows[1].shape), 1, 0), True

    return one(x, out, *there)


def _travelled_bwd(axes: tuple[str, ...], sizes: tuple[int, int], kept: tuple[Route, Route], cotangent: Any) -> Any:
    there, back = kept
    nothing = Route(None, None, None, None)
    return travelled(axes, sizes[::-1], cotangent, back, there), nothing, nothing


travelled.defvjp(lambda axes, sizes, x, *kept: (travelled(axes, sizes, x, *kept), kept), _travelled_bwd)
