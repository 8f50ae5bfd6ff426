"""Wrong calls outside of kernels, each with its message in messages.txt under the call; `x` is 8 x 8, and `w` 8 x 12.

A new one is a line `=== call` there: `SPMD_UPDATE_GOLDEN=1 python -m pytest tests/ops/test_messages.py` writes the texts
anew. What needs a kernel, and what a pasted `fix:` computes, is in the files `bad_*.py`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import spmd
from tests.goldens import Golden, raised, written_anew
from tests.ops.harness import frame

GOLDEN = Golden(Path(__file__).with_name("messages.txt"))
TEXTS = GOLDEN.read()
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


if written_anew():

    def test_write():
        GOLDEN.write({call: told(call) for call in TEXTS})


@pytest.mark.parametrize("call", TEXTS)
def test_errors_say_what_is_wrong_and_what_to_write(call):
    assert told(call) == TEXTS[call]


def test_each_says_something_else():
    assert len(set(TEXTS.values())) == len(TEXTS) > 60
