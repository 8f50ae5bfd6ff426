"""`@kernel`: strings become `jit(shard_map(body))`, constraints, or plain JAX on one device."""

from spmd.kernels._kernel import Kernel, kernel

__all__ = ["Kernel", "kernel"]
