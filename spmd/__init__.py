"""Explicit SPMD programming in JAX: einops, with slashes.

`"b/dp s d/tp"` states the shape of an array and its placement. Two such strings with an arrow between them state the
communication. See the README for a first program, and the documentation for the language, the three modes and each
operation.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spmd import fft, linalg, random, stencil
from spmd._topologies import topology_devices
from spmd._trees import layouts
from spmd.accelerators import Hardware, Link, hardware
from spmd.checker import Finding, Findings, check
from spmd.comm import (
    Plan,
    Step,
    all_gather,
    all_to_all,
    defer,
    plan,
    ppermute,
    psum,
    psum_scatter,
    relayout,
    shift,
    split,
)
from spmd.drawing import Picture
from spmd.drawing._picture import draws
from spmd.errors import (
    CommunicationError,
    Impossible,
    LayoutError,
    MeshError,
    ModeError,
    PlacementError,
    ReplicationError,
    SizeError,
    SpmdError,
)
from spmd.kernels import Kernel, VmapWarning, kernel
from spmd.language import AxisMapping, Layout, Pattern
from spmd.mesh import make_mesh, use_cpu_devices
from spmd.modes import axis_mapping, mode, scope
from spmd.ops import (
    annotate,
    argmax,
    argsort,
    assert_equal,
    axis_index,
    axis_size,
    cond,
    cumsum,
    custom_vjp,
    debug_print,
    einsum,
    exchange,
    flip,
    full,
    fused,
    grad,
    iota,
    linspace,
    local,
    local_size,
    meshgrid,
    offset,
    ones,
    opaque,
    per_shard,
    rearrange,
    reduce,
    repeat,
    roll,
    scatter_add,
    size,
    softmax,
    sort,
    take,
    top_k,
    typeof,
    value_and_grad,
    zeros,
)
from spmd.placement import from_function, from_process_local, init, shard

if TYPE_CHECKING:
    from spmd import cluster, haliax, inspect, nn, parallel, searcher, testing
    from spmd.inspect._explain import explain
    from spmd.inspect._picture import visualize
    from spmd.searcher._search import search

__version__ = "0.1.0"

__all__ = [
    "AxisMapping",
    "CommunicationError",
    "Finding",
    "Findings",
    "Hardware",
    "Impossible",
    "Kernel",
    "Layout",
    "LayoutError",
    "Link",
    "MeshError",
    "ModeError",
    "Pattern",
    "Picture",
    "PlacementError",
    "Plan",
    "ReplicationError",
    "SizeError",
    "SpmdError",
    "Step",
    "VmapWarning",
    "all_gather",
    "all_to_all",
    "annotate",
    "argmax",
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
    "hardware",
    "init",
    "inspect",
    "iota",
    "kernel",
    "layouts",
    "linalg",
    "linspace",
    "local",
    "local_size",
    "make_mesh",
    "meshgrid",
    "mode",
    "nn",
    "offset",
    "ones",
    "opaque",
    "parallel",
    "per_shard",
    "plan",
    "ppermute",
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
    "typeof",
    "topology_devices",
    "use_cpu_devices",
    "value_and_grad",
    "visualize",
    "zeros",
]

# What is written with the names above loads at its first use: a third of the time that `import spmd` would take.
_ROOMS = ("cluster", "haliax", "inspect", "nn", "parallel", "searcher", "testing")
_TOOLS = {
    "explain": "spmd.inspect._explain",
    "search": "spmd.searcher._search",
    "visualize": "spmd.inspect._picture",
}


def _loaded(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"spmd.{name}")
    if name in _TOOLS:
        globals()[name] = getattr(import_module(_TOOLS[name]), name)
        return globals()[name]
    raise AttributeError(f"module 'spmd' has no attribute {name!r}")


if not TYPE_CHECKING:  # to type checkers, every misspelt name would be one that loads
    __getattr__ = _loaded


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A notebook shows a plan also where nobody has named `spmd.visualize`.
draws(Plan, lambda plan: _loaded("visualize")(plan))
