"""Wrong calls outside of kernels, each with its message in messages.txt under the call; `x` is 8 x 8, and `w` 8 x 12.

What needs a kernel is in the files `bad_*.py`.
"""

import ast
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.language import Layout, Pattern
from tests.checker.pasting import check_pasted
from tests.errors.registry import fixes_of
from tests.goldens import pinned, raised
from tests.ops.harness import frame

IDS = jnp.zeros((4, 8), jnp.int32)
NAMES = vars(spmd.ops) | {
    "jax": jax,
    "jnp": jnp,
    "np": np,
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


def pasted(call: str, fixes: list[str]) -> str:
    """The code that a user has then: a whole call, or its own call with another string and a call around `x`."""
    string = next((line for line in fixes if line.startswith('"')), None)
    code = next((line for line in fixes if line != string), "x")
    if string is None:
        return code
    return re.sub(r"\bx\b", code, re.sub(r'"[^"]*"', string, call, count=1), count=1)


def layouts_of(code: str) -> tuple[dict[str, Layout], Layout]:
    """How the arrays of a call lie, by their names, and how its result does."""
    found: dict[str, Layout] = {}

    def read(node: ast.Call) -> Pattern:
        [text] = [
            ast.literal_eval(one) for one in node.args if isinstance(one, ast.Constant) and type(one.value) is str
        ]
        pattern = Pattern(text, arrow="->" in text)
        for one, layout in zip(node.args, pattern.inputs, strict=False):
            if isinstance(one, ast.Name):
                found[one.id] = layout.without_brackets()
            elif isinstance(one, ast.Call):
                read(one)
        return pattern

    pattern = read(ast.parse(code, mode="eval").body)
    return found, (pattern.outputs or pattern.inputs)[0].without_brackets()


def apart(layout: Layout) -> str:
    """Where the terms of a partial sum are given: blocks of one dimension more."""
    marks = layout.unreduced
    return f"u/{'/'.join(marks)} {layout.without(*marks).short}" if marks else layout.short


@pytest.mark.parametrize("call", [call for call, text in TEXTS.items() if fixes_of(text)])
def test_what_runs_with_a_fix_in_its_place(call: str) -> None:
    """As the message is now. It gives the numbers and gradients of one device, and sends no more than the compiler."""
    code = pasted(call, fixes_of(told(call)))
    lies, out = layouts_of(code)
    given = [eval(ast.unparse(one), NAMES) for one in ast.parse(call, mode="eval").body.args]
    arrays = [np.sin(np.arange(x.size)).reshape(x.shape).astype(x.dtype) for x in given if isinstance(x, jax.Array)]
    terms = lambda x, axes: np.stack([x * (k + 1) for k in range({"dp": 2, "tp": 4}[axes[0]])]) if axes else x

    def body(*blocks: Any) -> Any:
        sums = {
            name: spmd.reduce(x, f"{apart(layout)} -> {layout.short}") if layout.unreduced else x
            for x, (name, layout) in zip(blocks, lies.items(), strict=True)
        }
        made = eval(code, {**NAMES, "spmd": spmd, **sums})
        return made[0] if isinstance(made, tuple) else made

    mesh = spmd.make_mesh(dp=2, tp=4)
    if lies:
        right = "b k" if call.startswith("top_k") else out.short
        pattern = f"{', '.join(map(apart, lies.values()))} -> {right}"
        terms_of = [terms(x, layout.unreduced) for x, layout in zip(arrays, lies.values(), strict=False)]
        check_pasted(spmd.kernel(pattern, mesh=mesh)(body), terms_of)
    else:  # a question, which the sizes of an argument answer
        spmd.kernel("b/dp s/tp -> b/dp s/tp", mesh=mesh)(lambda x: (x, body())[0])(np.ones((8, 4), np.float32))
