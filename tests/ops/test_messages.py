"""Wrong calls outside of kernels, each with its message in messages.txt under the call; `x` is 8 x 8, and `w` 8 x 12.

What needs a kernel, and what a pasted `fix:` computes, is in the files `bad_*.py`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

import spmd
from tests.goldens import pinned, raised
from tests.ops.harness import frame

IDS = jnp.zeros((4, 8), jnp.int32)
NAMES = vars(spmd.ops) | {
    "jax": jax,
    "jnp": jnp,
    "random": spmd.random,
    "key": jax.random.key(0),
    "x": jnp.ones((8, 8)),
    "w": jnp.ones((8, 12)),
    "ids": IDS,
}


def told(call: str) -> str:
    with frame({"dp": 2, "tp": 4}).enter():
        return raised(call, NAMES)


TEXTS, test_write, test_message = pinned(Path(__file__).with_name("messages.txt"), told)


def test_each_says_something_else():
    assert len(set(TEXTS.values())) == len(TEXTS) > 60
