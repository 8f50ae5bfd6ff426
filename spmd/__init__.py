"""Explicit SPMD programming in JAX: einops, with slashes.

`"b/dp s d/tp"` states the shape of an array and its placement. Two such strings with an arrow between them state the
communication. See the README for a first program, and the documentation for the language, the three modes and each
operation.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spmd._python.rooms import dir_of, no_such_name

if TYPE_CHECKING:
    from spmd import (
        accelerators,
        cluster,
        comm,
        errors,
        fft,
        haliax,
        inspect,
        linalg,
        nn,
        ops,
        parallel,
        porting,
        propagation,
        random,
        searcher,
        stencil,
        testing,
    )
    from spmd._trees.matching import match_layouts
    from spmd.accelerators import topology_devices
    from spmd.comm import *
    from spmd.inspect._check import check
    from spmd.inspect._explanation import explain
    from spmd.inspect._picture import visualize
    from spmd.kernels import Kernel, kernel
    from spmd.language import AxisMapping, Layout, Pattern
    from spmd.mesh import make_mesh, use_cpu_devices
    from spmd.modes import axis_mapping, mode, scope
    from spmd.ops import *
    from spmd.placement import from_function, from_process_local, init, shard
    from spmd.porting import port
    from spmd.propagation import propagate
    from spmd.searcher._search import search

__version__ = "0.1.0"

# The names that are the package's own. All others are those of `comm` and `ops`, and are listed there alone.
__all__ = [
    "AxisMapping",
    "Kernel",
    "Layout",
    "Pattern",
    "accelerators",
    "axis_mapping",
    "check",
    "cluster",
    "errors",
    "explain",
    "fft",
    "from_function",
    "from_process_local",
    "haliax",
    "init",
    "inspect",
    "kernel",
    "linalg",
    "make_mesh",
    "match_layouts",
    "mode",
    "nn",
    "parallel",
    "port",
    "porting",
    "propagate",
    "propagation",
    "random",
    "scope",
    "search",
    "searcher",
    "shard",
    "stencil",
    "testing",
    "topology_devices",
    "use_cpu_devices",
    "visualize",
]
if TYPE_CHECKING:
    __all__ += comm.__all__
    __all__ += ops.__all__
_OWN = __all__
del __all__  # Python then asks `_loaded` for all names, which loads the rooms of the others

# A room loads when one of its names is used, because all of them take as long as JAX does. A name is in the lowest room
# whose `__all__` has it; a few are in modules that stand in no room, or below one.
_ROOMS = (
    *("errors", "language", "drawing", "accelerators", "mesh", "modes"),
    *("comm", "ops", "placement", "kernels", "checker", "fft", "linalg", "random", "stencil"),
    *("nn", "parallel", "inspect", "propagation", "porting", "cluster", "haliax", "searcher", "testing"),
)
_HOMES = {
    "check": "inspect._check",
    "explain": "inspect._explanation",
    "match_layouts": "_trees.matching",
    "search": "searcher._search",
    "topology_devices": "accelerators",
    "visualize": "inspect._picture",
}


def _loaded(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"spmd.{name}")
    if name == "__all__":
        globals()[name] = sorted([*_OWN, *import_module("spmd.comm").__all__, *import_module("spmd.ops").__all__])
        return globals()[name]
    rooms = _ROOMS if name in _OWN else () if name.startswith("_") else ("comm", "ops")
    home = _HOMES.get(name) or next((one for one in rooms if name in import_module(f"spmd.{one}").__all__), None)
    if home is None:
        no_such_name(__name__, name)
    globals()[name] = getattr(import_module(f"spmd.{home}"), name)
    return globals()[name]


if not TYPE_CHECKING:  # to type checkers, every misspelt name would be one that loads
    __getattr__ = _loaded


def __dir__() -> list[str]:
    return dir_of({"__all__": _loaded("__all__"), **globals()})
