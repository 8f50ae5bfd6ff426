"""Kinds of parallelism as functions on arrays and trees: what moves, when, and what it costs in the docstrings."""

from spmd.parallel.accumulate import accumulate
from spmd.parallel.experts import MoEReport, Routing, balance_bias, moe, router
from spmd.parallel.fsdp import fsdp, scan_layers
from spmd.parallel.gather import gather, reduce_gradients
from spmd.parallel.layouts import FSDPLayouts, ZeroLayouts, fsdp_layouts, mapped_layouts, state_layouts
from spmd.parallel.optimizer import ClipByGlobalNorm, clip_by_global_norm, global_norm

__all__ = [
    "ClipByGlobalNorm",
    "FSDPLayouts",
    "MoEReport",
    "Routing",
    "ZeroLayouts",
    "accumulate",
    "balance_bias",
    "clip_by_global_norm",
    "fsdp",
    "fsdp_layouts",
    "gather",
    "global_norm",
    "mapped_layouts",
    "moe",
    "reduce_gradients",
    "router",
    "scan_layers",
    "state_layouts",
]
