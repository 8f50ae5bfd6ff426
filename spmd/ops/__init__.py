"""Operations on arrays: their strings say shape, placement and communication."""

from spmd.ops._control import cond
from spmd.ops._create import full, iota, ones, zeros
from spmd.ops._einsum import einsum
from spmd.ops._gradients import custom_vjp, grad, value_and_grad
from spmd.ops._rearrange import rearrange, repeat
from spmd.ops._reduce import reduce
from spmd.ops._softmax import argmax, cumsum, softmax
from spmd.ops._take import take

__all__ = [
    "argmax",
    "cond",
    "cumsum",
    "custom_vjp",
    "einsum",
    "full",
    "grad",
    "iota",
    "ones",
    "rearrange",
    "reduce",
    "repeat",
    "softmax",
    "take",
    "value_and_grad",
    "zeros",
]
