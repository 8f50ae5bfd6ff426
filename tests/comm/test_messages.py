"""What plans and changes of layout between two meshes say of wrong calls, in messages.txt under the call."""

from pathlib import Path

import jax
import numpy as np

import spmd
from tests.goldens import pinned, raised


def told(call: str) -> str:
    """Return the error of a call: `x` is 4 x 6 and lies as a/x b on `trainer`, x=2; `sampler` is p=4, of other devices."""
    devices = np.array(jax.devices())
    trainer = jax.sharding.Mesh(devices[:2], ("x",))
    x = spmd.shard(np.ones((4, 6), np.float32), "a/x b", mesh=trainer)
    sampler = jax.sharding.Mesh(devices[4:8], ("p",))
    return raised(call, {"jax": jax, "np": np, "spmd": spmd, "trainer": trainer, "sampler": sampler, "x": x})


_, test_write, test_message = pinned(Path(__file__).with_name("messages.txt"), told)
