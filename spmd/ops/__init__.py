"""Operations on arrays. Their strings say shape, placement and communication."""

from spmd.ops._along import argmax, argmin, cumsum, flip, roll, softmax
from spmd.ops._annotate import annotate, assert_equal, debug_print, fused, meanwhile, per_shard, typeof
from spmd.ops._einops import einsum, rearrange, repeat
from spmd.ops._exchange import exchange
from spmd.ops._gradients import custom_vjp, grad, value_and_grad
from spmd.ops._local import cond, local, opaque
from spmd.ops._reduce import reduce
from spmd.ops._sizes import axis_index, axis_size, full, iota, linspace, local_size, meshgrid, offset, ones, size, zeros
from spmd.ops._sort import argsort, sort, top_k
from spmd.ops._take import scatter_add, take

__all__ = [
    "annotate",
    "argmax",
    "argmin",
    "argsort",
    "assert_equal",
    "axis_index",
    "axis_size",
    "cond",
    "cumsum",
    "custom_vjp",
    "debug_print",
    "einsum",
    "exchange",
    "flip",
    "full",
    "fused",
    "grad",
    "iota",
    "linspace",
    "local",
    "local_size",
    "meanwhile",
    "meshgrid",
    "offset",
    "ones",
    "opaque",
    "per_shard",
    "rearrange",
    "reduce",
    "repeat",
    "roll",
    "scatter_add",
    "size",
    "softmax",
    "sort",
    "take",
    "top_k",
    "typeof",
    "value_and_grad",
    "zeros",
]
