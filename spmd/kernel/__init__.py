"""`@kernel`: strings become `jit(shard_map(body))`, constraints, or plain JAX on one device."""

from spmd.kernel._boundary import VmapWarning
from spmd.kernel._kernel import Kernel, kernel
from spmd.kernel._known import arguments_of

__all__ = ["Kernel", "VmapWarning", "arguments_of", "kernel"]
