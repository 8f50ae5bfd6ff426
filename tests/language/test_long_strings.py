"""Strings that nobody means: they are refused at once, and no message repeats them."""

import re
import time

import numpy as np
import pytest

import spmd
from spmd.errors import Fault, SpmdError
from spmd.language import Layout, Pattern
from tests.sampler import share

MANY = 2 * 10**5
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMES = [f"{a}{b}{c}" for a in LETTERS for b in LETTERS for c in LETTERS]
X = np.ones((8, 8), np.float32)


def strings(count):
    """Strings of so many characters: each repeats another part of the language, or what is none."""
    names = NAMES[: count // 5]
    parts = ["a", "a ", "a+", "(", "[", "/b", "->", "a,", "1", ".", "é", " ", "**/", "a /b ", "{U:", "\n"]
    grown = ["a" + part * (count // len(part)) for part in parts]
    listed = [
        f"({' '.join(names)})",
        "a" + "/b".join(names),
        f"a {{U:{','.join(names)}}}",
        " ".join(names),
        "+".join(names),
    ]
    return [*grown, *listed, f"{' ' * count}a b", f"b a{' ' * count}/c"]


CALLS = {
    "Layout": Layout,
    "Pattern": Pattern,
    "to": lambda text: Pattern(f"a -> {text}"),
    "kernel": lambda text: spmd.kernel(text, mesh=mesh())(lambda x: x)(X),
    "shard": lambda text: spmd.shard(X, text, mesh=mesh()),
    "match": lambda text: spmd.match_layouts({"a": {"b": X}}, {text: "a b"}),
    "below": lambda text: spmd.match_layouts({"a": X}, {"**": text}),
    "mapping": lambda text: spmd.AxisMapping({"b": text, text: "b?"}),
    "mesh": lambda text: spmd.make_mesh(**{text: 9}),
    "mode": lambda text: spmd.mode(text).__enter__(),
    "plan": lambda text: spmd.plan(text, mesh=mesh()),
} | {
    name: lambda text, body=body: spmd.kernel("b/dp d -> b/dp d", mesh=mesh())(lambda x: body(x, text))(X)
    for name, body in {
        "all_gather": lambda x, text: spmd.all_gather(x, text),
        "einsum": lambda x, text: spmd.einsum(x, x, text),
        "reduce": lambda x, text: spmd.reduce(x, text, "sum"),
        "the operation": lambda x, text: spmd.reduce(x, "b/dp d -> d", text),
        "annotate": lambda x, text: spmd.annotate(x, text),
        "size": lambda x, text: x * spmd.size(text),
        "axis_index": lambda x, text: x * spmd.axis_index(text),
        "an axis": lambda x, text: spmd.all_gather(x, "b/q d -> b d", q=text),
        "a keyword": lambda x, text: spmd.all_gather(x, "b/dp d -> b d", **{text.replace("\n", " "): 2}),
        "a loss": lambda x, text: spmd.grad(lambda x: x.sum(), loss=text)(x),
        "iota": lambda x, text: spmd.iota(text),
        "fft": lambda x, text: spmd.fft.fft(x, text),
        "halo": lambda x, text: spmd.stencil.halo(x, text),
    }.items()
}


def mesh():
    return spmd.make_mesh(dp=2, tp=4)


def quoted(message: str) -> int:
    """The length of the longest word, or text in quotes."""
    found = re.findall(r"\S+|\"[^\"\n]*\"|(?<!\w)'[^'\n]*'(?!\w)", message)
    return max(map(len, found))


@pytest.mark.parametrize("name", share(CALLS, always=("Layout", "kernel", "a loss", "match")))
def test_a_string_that_is_far_too_long_is_refused_at_once(name):
    """A layout of a million characters took 86 seconds in a group, and its message repeated it."""
    with pytest.raises(SpmdError):
        CALLS[name]("?")  # what has to be loaded and compiled
    for text in strings(MANY if name != "Layout" else 10**6):
        began = time.process_time()
        with pytest.raises(SpmdError) as caught:
            CALLS[name](text)
        told = str(caught.value)
        assert time.process_time() - began < 2, text[:20]
        assert quoted(told) <= 200 and len(told) < 2000, told[:400]


@pytest.mark.parametrize("name", share(CALLS))
def test_no_message_quotes_more_than_two_hundred_characters(name):
    """Of a string that is not too long; a fix of a thousand is there to be pasted."""
    for text in strings(4900):
        try:
            CALLS[name](text)
        except SpmdError as error:
            told = [line for line in str(error).split("\n") if not line.startswith("fix: ")]
            assert quoted("\n".join(told)) <= 200 and len(str(error)) < 4000, str(error)[:400]


def test_strings_as_long_as_programs_have_them():
    layout = ", ".join(f"{a} {b}/tp" for a, b in zip(NAMES[:350], NAMES[350:700], strict=True))
    assert 4000 < len(layout) < 5000 and len(Pattern(f"{layout} -> scalar").inputs) == 350


def test_what_is_cut_and_what_is_not():
    long, words = "x" * 201, "a b " * 60
    fault = Fault(
        f"'{long}' is no name, and isn't '{words}'.", f'f(x, "{words}")', got=[f"{long}: f32[2]"], fix=f'"{words}"'
    )
    shown = str(fault).split("\n")
    assert shown[0].startswith('f(x, "a b') and shown[0].endswith('a b ")') and len(shown[0]) < 200
    assert "..." in shown[1] and shown[1].endswith("'.") and "is no name, and isn't 'a b" in shown[1]
    assert len(shown[2]) < 200 and shown[3] == f'fix: "{words}"'
    assert "fix" not in str(Fault("A rule.", fix="x" * 1001))
    near = "a sentence that isn't short, whose words aren't long, and which has many of them, so that it's long. " * 4
    assert str(Fault(near)) == near
