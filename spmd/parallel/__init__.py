"""Kinds of parallelism as functions on arrays and trees. The docstrings say what moves, when, and what it costs."""

from spmd._python.rooms import open_room
from spmd.nn.overlap import einsum_scatter, gather_einsum
from spmd.parallel.context import ring_attention, ulysses_attention
from spmd.parallel.experts import MoEReport, Routing, balance_bias, moe, router
from spmd.parallel.fully_sharded import (
    ClipByGlobalNorm,
    accumulate,
    clip_by_global_norm,
    fsdp,
    gather,
    global_norm,
    reduce_gradients,
    scan_layers,
)
from spmd.parallel.layouts import FSDPLayouts, ZeroLayouts, fsdp_layouts, mapped_layouts, state_layouts
from spmd.parallel.pipeline_training import pipeline_loss
from spmd.parallel.pipelining import pipeline
from spmd.parallel.schedule import PipelineSchedule, pipeline_schedule
from spmd.parallel.sequence import place_sequence, restore_sequence, sequence_order, sequence_positions

__all__ = [
    "ClipByGlobalNorm",
    "FSDPLayouts",
    "MoEReport",
    "PipelineSchedule",
    "Routing",
    "ZeroLayouts",
    "accumulate",
    "balance_bias",
    "clip_by_global_norm",
    "einsum_scatter",
    "fsdp",
    "fsdp_layouts",
    "gather",
    "gather_einsum",
    "global_norm",
    "mapped_layouts",
    "moe",
    "pipeline",
    "pipeline_loss",
    "pipeline_schedule",
    "place_sequence",
    "reduce_gradients",
    "restore_sequence",
    "ring_attention",
    "router",
    "scan_layers",
    "sequence_order",
    "sequence_positions",
    "state_layouts",
    "ulysses_attention",
]

open_room(globals())
