"""`@kernel`: strings become `jit(shard_map(body))`, constraints, or plain JAX on one device."""

from spmd.kernels._boundary import VmapWarning
from spmd.kernels._kernel import Kernel, kernel
from spmd.kernels._registry import arguments_of

__all__ = ["Kernel", "VmapWarning", "arguments_of", "kernel"]
