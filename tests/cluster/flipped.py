"""Process 1 of two has a flipped bit in an array that all copy, and then a number that is not finite."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd


def flipped(x: jax.Array, device: jax.Device) -> jax.Array:
    """The array with another bit on one device."""
    blocks = []
    for part in x.addressable_shards:
        block = np.array(part.data)
        if part.device == device:
            block.view(np.uint8)[0] ^= 1
        blocks.append(jax.device_put(block, part.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks)


def main() -> None:
    """Say what the guard says."""
    spmd.cluster.initialize()
    rank, mesh = jax.process_index(), spmd.make_mesh(a=-1)
    w = spmd.shard(np.arange(8.0, dtype=np.float32), "d", mesh=mesh)
    third = sorted(jax.devices(), key=lambda one: one.id)
    [device] = [one for one in third if one.process_index == 1][:1]
    x = spmd.init(lambda key: jnp.arange(8.0), "d/a", mesh=mesh)(jax.random.key(0))
    bad = jax.jit(lambda x: x / jnp.where(x == 7, 0, 1))(x)
    for state in ({"w": flipped(w, device)}, {"w": bad}):
        try:
            with jax.set_mesh(mesh):  # as programs have it
                spmd.cluster.guard(0, state)
        except spmd.errors.SpmdError as error:
            print(str(error).replace(f"device {device.id} ", "device 2 "), flush=True)
    print(f"rank {rank} is done", flush=True)


if __name__ == "__main__":
    main()
