"""Explicit SPMD programming in JAX: einops, with slashes.

`"b/dp s d/tp"` says shape and placement; across an arrow, the communication. See the README for a first
program, and the documentation for the language, the three modes and each operation.
"""

from spmd import fft, inspect, random, stencil, testing
from spmd._trees import layouts
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
from spmd.errors import (
    CommunicationError,
    LayoutError,
    MeshError,
    ModeError,
    PlacementError,
    ReplicationError,
    SizeError,
    SpmdError,
)
from spmd.hardware import Hardware, Link, hardware
from spmd.inspect._explain import explain
from spmd.inspect._picture import Picture, visualize
from spmd.kernel import Kernel, kernel
from spmd.language import AxisMapping, Layout, Pattern
from spmd.mesh import make_mesh, use_cpu_devices
from spmd.mode import axis_mapping, mode, scope
from spmd.ops import (
    annotate,
    argmax,
    assert_equal,
    axis_index,
    axis_size,
    cond,
    cumsum,
    custom_vjp,
    debug_print,
    einsum,
    full,
    grad,
    iota,
    local,
    local_size,
    offset,
    ones,
    opaque,
    rearrange,
    reduce,
    repeat,
    roll,
    size,
    softmax,
    take,
    top_k,
    typeof,
    value_and_grad,
    zeros,
)
from spmd.placement import from_process_local, init, shard

# isort: split
# Layers are written with the names above.
from spmd import nn, parallel

__version__ = "0.1.0"

__all__ = [
    "AxisMapping",
    "CommunicationError",
    "Hardware",
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
    "all_gather",
    "all_to_all",
    "annotate",
    "argmax",
    "assert_equal",
    "axis_index",
    "axis_mapping",
    "axis_size",
    "cond",
    "cumsum",
    "custom_vjp",
    "debug_print",
    "defer",
    "einsum",
    "explain",
    "fft",
    "from_process_local",
    "full",
    "grad",
    "hardware",
    "init",
    "inspect",
    "iota",
    "kernel",
    "layouts",
    "local",
    "local_size",
    "make_mesh",
    "mode",
    "nn",
    "offset",
    "ones",
    "opaque",
    "parallel",
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
    "scope",
    "shard",
    "shift",
    "size",
    "softmax",
    "split",
    "stencil",
    "take",
    "testing",
    "top_k",
    "typeof",
    "use_cpu_devices",
    "value_and_grad",
    "visualize",
    "zeros",
]
