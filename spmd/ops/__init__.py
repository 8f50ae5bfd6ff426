"""Operations on arrays. Their strings say shape, placement and communication."""

from spmd.ops._annotate import annotate, assert_equal, debug_print, per_shard, typeof
from spmd.ops._control import cond
from spmd.ops._create import full, iota, ones, zeros
from spmd.ops._einsum import einsum
from spmd.ops._exchange import exchange
from spmd.ops._fused import fused
from spmd.ops._gradients import custom_vjp, grad, value_and_grad
from spmd.ops._grids import linspace, meshgrid
from spmd.ops._local import local, opaque
from spmd.ops._rearrange import rearrange, repeat
from spmd.ops._reduce import reduce
from spmd.ops._roll import flip, roll
from spmd.ops._scatter_add import scatter_add
from spmd.ops._sizes import axis_index, axis_size, local_size, offset, size
from spmd.ops._softmax import argmax, argmin, cumsum, softmax
from spmd.ops._sort import argsort, sort
from spmd.ops._take import take
from spmd.ops._top_k import top_k

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
