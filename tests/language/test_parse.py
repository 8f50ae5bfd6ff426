"""Any string gives a layout that round-trips, or a LayoutError: never another exception."""

import os
import random
import time

import pytest

from spmd.errors import LayoutError
from spmd.language import AxisMapping, Layout, Pattern
from tests.conftest import case_count

CASES = int(os.environ.get("SPMD_FUZZ_CASES", 25_000 * case_count()))

SEEDS = [
    "b/dp s/tp d",
    "b/dp/fsdp d/1",
    "(h k)/tp",
    "(b/dp s/cp) d",
    "(h/tp k)/1 _ 3",
    "1+x/a+1 y",
    "x/a+1 2+3+4 5/tp",
    "d f/tp {U:dp,fsdp} {R:cp}",
    "... [v/tp] d",
    "scalar",
    "b h q [k]",
    "b/dp d, d f/tp -> b/dp f/tp",
    "... s/tp d -> ... s d",
    "b/dp s, scalar -> scalar, d",
    "-> {U:dp}",
    "d/dp f/tp,\n  f/tp d/dp,\n -> b/dp\n",
]
PIECES = [
    *"/+()[]{}:,_ \n\t\0.-*=>1290bdx",
    "->", "...", "{U:", "{R:", "}", "/1", "/tp", "//", "/ dp", "1+", "+1", "scalar", "()", "[k]", "(h k)",
    "__", "é", "…", "→", "\ud800", "²", "9" * 5000, "{b}", "{}", "\u3000", "\x1c", "=>", "U", "R", "dp", "tp",
]  # fmt: skip


def strings(count: int, seed: int):
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.3:
            yield "".join(rng.choices(PIECES, k=rng.randrange(12)))
            continue
        text = rng.choice(SEEDS)
        for _ in range(rng.randrange(1, 4)):
            at, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
            what = rng.randrange(4)
            if what == 0:
                text = text[:at] + rng.choice(PIECES) + text[at:]
            elif what == 1:
                text = text[:at] + text[min(end, at + 2) :]
            elif what == 2:
                text = text[:at] + text[end:] + text[at:end]
            else:
                text = text[:at] + rng.choice(SEEDS)[: rng.randrange(9)] + text[end:]
        yield text


def failure(make, text: str) -> str | None:
    """What is wrong with how `make` treats a string; None if nothing."""
    try:
        value = make(text)
    except LayoutError as error:
        lines = str(error).split("\n")
        shown = lines[2:3]
        return None if shown and "^" in shown[0] and not shown[0].strip(" ^") else f"no caret: {text!r}"
    except Exception as error:
        return f"{type(error).__name__}: {text!r}"
    try:
        again = make(str(value))
    except LayoutError:
        return f"{text!r} reads as {value!r}, which does not parse"
    return None if again == value and str(again) == str(value) else f"{text!r} -> {value!r} -> {again!r}"


def without_arrow(text: str) -> Pattern:
    return Pattern(text, arrow=False)


@pytest.mark.parametrize("make", [Layout, Pattern, without_arrow], ids=["layout", "pattern", "arrowless"])
def test_any_string_parses_or_gives_a_layout_error(make):
    failures = [found for text in strings(CASES // 3, seed=CASES) if (found := failure(make, text))]
    assert failures[:10] == []


def test_what_is_derived_from_any_layout_round_trips_or_gives_a_layout_error():
    mapping = AxisMapping({"b": "dp", "s": "tp", "h": ("cp", "a"), "d": None})
    accepted = 0
    for text in strings(CASES // 3, seed=1):
        try:
            layout = Layout(text)
        except LayoutError:
            continue
        accepted += 1
        changes = (
            lambda one: one.resolve(mapping),
            lambda one: one.resolve(None),
            lambda one: one.bind(dp="tp", tp=("x", "y")),
            lambda one: one.without("dp", "cp"),
            lambda one: one.without_brackets(),
            lambda one: one.prepend("layers"),
            lambda one: one.with_rank(7),
        )
        for change in changes:
            try:
                made = change(layout)
            except ValueError as error:
                assert type(error).__module__ == "spmd.errors", (text, error)
                continue
            assert Layout(str(made)) == made, (text, made)
        assert layout.resolve(mapping) if not layout.bare else True
    assert accepted > CASES // 50


def test_the_checker_sees_other_exceptions():
    assert failure({}.__getitem__, "b") == "KeyError: 'b'"


def test_the_checker_sees_a_text_that_does_not_parse():
    assert failure(Layout, "b (h d") is None, "a LayoutError with a caret is right"
    assert failure(lambda text: f"{Layout(text)} (", "b") == "'b' reads as 'b (', which does not parse"


def test_the_checker_sees_a_text_that_says_something_else():
    class Grows(str):
        def __str__(self):
            return self + " x"

    assert failure(Grows, "b") == "'b' -> 'b' -> 'b x'"


def test_the_checker_wants_a_caret():
    def careless(text):
        raise LayoutError("wrong")

    assert failure(careless, "b") == "no caret: 'b'"


def test_a_mark_takes_time_by_its_length():
    """Twice the axes take twice the time, and not four times: by processor time, the least of three."""

    def seconds(count):
        text = "d {U:" + ",".join(f"a{i}" for i in range(count)) + "}"
        took = []
        for _ in range(3):
            start = time.process_time()
            for _ in range(20):
                Pattern(f"{text} -> d")
                text += " "  # another text, which is not known yet
            took.append(time.process_time() - start)
        return min(took)

    assert seconds(900) < 3 * seconds(450) + 0.01
