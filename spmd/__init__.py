"""Explicit SPMD programming in JAX: einops, with slashes.

`"b/dp s d/tp"` states the shape of an array and its placement. Two such strings with an arrow between them state the
communication. See the README for a first program, and the documentation for the language, the three modes and each
operation.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spmd._python.rooms import dir_of, in_turn, no_such_name

if TYPE_CHECKING:
    from spmd import (
        accelerators,
        cluster,
        errors,
        fft,
        haliax,
        inspect,
        linalg,
        nn,
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

__all__ = [
    "AxisMapping",
    "Kernel",
    "Layout",
    "Pattern",
    "accelerators",
    "all_gather",
    "all_to_all",
    "annotate",
    "argmax",
    "argmin",
    "argsort",
    "assert_equal",
    "axis_index",
    "axis_mapping",
    "axis_size",
    "check",
    "cluster",
    "cond",
    "cumsum",
    "custom_vjp",
    "debug_print",
    "defer",
    "einsum",
    "errors",
    "exchange",
    "explain",
    "fft",
    "flip",
    "from_function",
    "from_process_local",
    "full",
    "fused",
    "grad",
    "haliax",
    "init",
    "inspect",
    "iota",
    "kernel",
    "linalg",
    "linspace",
    "local",
    "local_size",
    "make_mesh",
    "match_layouts",
    "meanwhile",
    "meshgrid",
    "mode",
    "nn",
    "offset",
    "ones",
    "opaque",
    "parallel",
    "per_shard",
    "plan",
    "port",
    "porting",
    "ppermute",
    "propagate",
    "propagation",
    "psum",
    "psum_scatter",
    "random",
    "rearrange",
    "reduce",
    "relayout",
    "repeat",
    "roll",
    "scatter_add",
    "scope",
    "search",
    "searcher",
    "shard",
    "shift",
    "size",
    "softmax",
    "sort",
    "split",
    "stencil",
    "take",
    "testing",
    "top_k",
    "topology_devices",
    "typeof",
    "use_cpu_devices",
    "value_and_grad",
    "visualize",
    "zeros",
]

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
    if name not in __all__:
        no_such_name(__name__, name)
    home = _HOMES.get(name) or next(room for room in _ROOMS if name in import_module(f"spmd.{room}").__all__)
    import_module(f"spmd.{home.partition('.')[0]}")
    globals()[name] = getattr(import_module(f"spmd.{home}"), name)
    return globals()[name]


if not TYPE_CHECKING:  # to type checkers, every misspelt name would be one that loads
    __getattr__ = in_turn(_loaded)


def __dir__() -> list[str]:
    return dir_of(globals())
