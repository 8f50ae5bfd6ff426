"""What is changed in a collective: each change is the code that a user would have written in its place."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.checker.harness import varying

__all__ = ["CHANGES", "COLLECTIVES", "Call", "possible", "telling"]

# The collectives themselves, whoever replaces their names in `jax.lax` later.
COLLECTIVES: Mapping[str, Callable[..., Any]] = {
    name: getattr(lax, name)
    for name in ("all_gather", "all_to_all", "axis_index", "pmax", "pmean", "pmin", "ppermute", "psum", "psum_scatter")
}
_SIGNATURES = {name: inspect.signature(fn) for name, fn in COLLECTIVES.items()}


@dataclass(frozen=True)
class Call:
    """One call of a collective of `jax.lax`, its arguments by name."""

    name: str
    given: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, args: Any, keywords: Any) -> Call:
        bound = _SIGNATURES[name].bind(*args, **keywords)
        bound.apply_defaults()
        return cls(name, bound.arguments)

    @property
    def axes(self) -> tuple[str, ...]:
        axes = self.given["axis_name"]
        return (axes,) if isinstance(axes, str) else tuple(axes)

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def sizes(self) -> list[int]:
        return [lax.axis_size(axis) for axis in self.axes]

    @property
    def leaves(self) -> list[Any]:
        return jax.tree.leaves(self.given.get("x"))

    def varying(self) -> Any:
        """The operand as JAX types the result of a collective."""
        return jax.tree.map(lambda x: varying(x, *self.axes), self.given["x"])

    def again(self, name: str | None = None, **other: Any) -> Any:
        """This call with other arguments, or another collective of the same axes."""
        if name is not None:
            return COLLECTIVES[name](self.given["x"], self.given["axis_name"])
        return COLLECTIVES[self.name](**{**self.given, **other})


# --- a collective is dropped, and the result has the shape that the code after it needs ------------------------


def _alone(call: Call) -> Any:
    """A reduction or a permutation: what this device has."""
    return call.varying() if call.name == "ppermute" else call.given["x"]


def _tiled(call: Call) -> Any:
    """A gather: this device's block, as often as there are devices."""
    join = jnp.concatenate if call.given["tiled"] else jnp.stack
    return jax.tree.map(lambda x: join([x] * call.devices, call.given["axis"]), call.varying())


def _own_block(call: Call) -> Any:
    """A reduce-scatter: this device's block of its own term."""
    dim, index = call.given["scatter_dimension"], COLLECTIVES["axis_index"](call.given["axis_name"])

    def own(x: Any) -> Any:
        if not call.given["tiled"]:
            return lax.dynamic_index_in_dim(x, index, dim, keepdims=False)
        size = x.shape[dim] // call.devices
        return lax.dynamic_slice_in_dim(x, index * size, size, dim)

    return jax.tree.map(own, call.varying())


def _in_place(call: Call) -> Any:
    """An all-to-all: the pieces change places within this device."""
    split, concat = call.given["split_axis"], call.given["concat_axis"]

    def moved(x: Any) -> Any:
        if not call.given["tiled"]:
            return jnp.moveaxis(x, split, concat)
        return jnp.concatenate(jnp.split(x, call.devices, split), concat)

    return jax.tree.map(moved, call.varying())


# --- it is another one -----------------------------------------------------------------------------------------


def _mean(call: Call) -> Any:
    return jax.tree.map(lambda x: x / call.devices, call.again())


def _turned(call: Call) -> Any:
    return call.again(axis_name=call.axes[::-1])


def _reversed(call: Call) -> Any:
    return call.again(perm=[(j, i) for i, j in call.given["perm"]])


def _swapped(call: Call) -> Any:
    return call.again(split_axis=call.given["concat_axis"], concat_axis=call.given["split_axis"])


def _zero(call: Call) -> Any:
    return varying(jnp.int32(0), *call.axes)


# --- which changes there are -----------------------------------------------------------------------------------


def _inexact(call: Call) -> bool:
    return all(jnp.issubdtype(x.dtype, jnp.inexact) for x in call.leaves)


def _several(call: Call) -> bool:
    return len(call.axes) > 1


def _one_way(call: Call) -> bool:
    return {*map(tuple, call.given["perm"])} != {(j, i) for i, j in call.given["perm"]}


def _always(call: Call) -> bool:
    return True


Change = tuple[Callable[[Call], Any], Callable[[Call], bool]]

# For each collective the changes: the code in its place, and which calls it suits.
CHANGES: Mapping[str, Mapping[str, Change]] = {
    "psum": {
        "dropped": (_alone, _always),
        "mean for sum": (_mean, _inexact),
        "max for sum": (lambda call: call.again("pmax"), _inexact),
    },
    "pmean": {"dropped": (_alone, _always), "sum for mean": (lambda call: call.again("psum"), _always)},
    "pmax": {"dropped": (_alone, _always), "sum for max": (lambda call: call.again("psum"), _inexact)},
    "pmin": {"dropped": (_alone, _always), "sum for min": (lambda call: call.again("psum"), _inexact)},
    "all_gather": {"dropped": (_tiled, _always), "axes in another order": (_turned, _several)},
    "psum_scatter": {
        "dropped": (_own_block, _always),
        "mean for sum": (_mean, _inexact),
        "axes in another order": (_turned, _several),
    },
    "all_to_all": {
        "dropped": (_in_place, _always),
        "split and concat swapped": (_swapped, lambda call: call.given["split_axis"] != call.given["concat_axis"]),
        "axes in another order": (_turned, _several),
    },
    "ppermute": {"dropped": (_alone, _always), "permutation reversed": (_reversed, _always)},
    "axis_index": {"index zeroed": (_zero, _always), "axes in another order": (_turned, _several)},
}


def possible(call: Call) -> list[str]:
    """The changes that a call can have, whatever the sizes of its axes: what changes is the text of a program."""
    if call.given.get("axis_index_groups") is not None:
        return []
    if not all(hasattr(x, "dtype") for x in call.leaves):  # lax.psum(1, "x") is a number
        return []
    return [name for name, (_, suits) in CHANGES[call.name].items() if suits(call)]


def telling(call: Call) -> list[str]:
    """Those that make another program: none along axes of one device, no other order where one axis alone has several."""
    if call.devices == 1:
        return []
    several = sum(size > 1 for size in call.sizes) > 1
    return [
        name
        for name in possible(call)
        if (several or name != "axes in another order") and (name != "permutation reversed" or _one_way(call))
    ]
