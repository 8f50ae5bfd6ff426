"""Operations on arrays: their strings say shape, placement and communication."""

from spmd.ops._create import full, iota, ones, zeros
from spmd.ops._einsum import einsum
from spmd.ops._reduce import reduce

__all__ = ["einsum", "full", "iota", "ones", "reduce", "zeros"]
