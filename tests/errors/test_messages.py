"""Errors are a product: each bad input has its whole message pinned in golden.txt.

The bad inputs stand beside the tests of the modules that refuse them, in files `bad_*.py` of the rooms.
`SPMD_UPDATE_GOLDEN=1 python -m pytest tests/errors` writes the file anew; read the difference before committing it.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import spmd
from spmd.kernels import Kernel
from spmd.modes import outermost
from tests.checker.pasting import check_pasted
from tests.errors.registry import BAD, FIXED, Pasted, X, facts_of, fixes_of, read
from tests.goldens import Golden, written_anew
from tests.pages import COUNTS
from tests.sampler import share

TESTS = Path(__file__).parents[1]
for _file in sorted(TESTS.rglob("bad_*.py")):  # they fill the registry, in this order
    importlib.import_module(".".join(("tests", *_file.relative_to(TESTS).with_suffix("").parts)))

GOLDEN = Golden(Path(__file__).with_name("golden.txt"))

_MESSAGES: dict[object, str] = {}


def message(name: str, mesh) -> str:
    """Class and text of the error that a bad input raises; lines of this machine's files without path or number."""
    if BAD[name] not in _MESSAGES:
        _MESSAGES[BAD[name]] = _raised(name, mesh)
    return _MESSAGES[BAD[name]]


def _raised(name: str, mesh) -> str:
    with pytest.raises(spmd.errors.SpmdError) as caught:
        BAD[name](mesh)
    text = str(caught.value).strip("\n")
    text = re.sub(r"\S*(bad_\w+\.py):\d+", r"\1:N", text)
    text = re.sub(r"(optax/[\w/]+\.py):\d+", r"\1:N", text)
    return f"{type(caught.value).__name__}\n{text}"


golden = GOLDEN.read


if written_anew():

    def test_write(mesh):
        GOLDEN.write({name: message(name, mesh) for name in BAD})


@pytest.mark.parametrize("name", BAD)
def test_message(name, mesh):
    assert message(name, mesh) == golden()[name]


def test_there_are_many_and_each_says_something_else():
    texts = golden()
    assert list(texts) == list(BAD)
    assert len(BAD) >= 60
    assert len(set(texts.values())) == len(texts)
    assert 'all_gather(x, "x/dp -> x", to="invarying")' in texts["gathered_copy_leaves"]


def takes_the_fix(name: str) -> bool:
    return "fix" in inspect.signature(FIXED[name]).parameters


# What only these run of the library.
ALONE = (
    "random_with_an_rbg_key",
    "a_payload_that_lies_otherwise",
    "a_soft_cap_in_a_kernel_without",
    "experts_with_a_bound_on_rows_and_a_capacity",
)


@pytest.mark.parametrize("name", share(FIXED, always=ALONE))
def test_the_program_as_the_message_says(name, mesh):
    """With the lines of the message as it is now, where it has some; else with what its words say. A pasted line gives
    the numbers and gradients of one device, and sends no more than what the compiler would send in its place."""
    assert name in BAD
    fix = Pasted(message(name, mesh)) if takes_the_fix(name) else None
    ran = kernels_run(lambda: FIXED[name](mesh, *([fix] if fix else [])))
    assert not fix or fix.used == set(range(len(fix.lines))), "a program that pastes some of the lines only"
    for kernel, args, kwargs in ran if name not in ON_DEVICES_ONLY else ():
        check_pasted(kernel, args, kwargs, sends_more=not fix or name in SENDS_MORE)


# They have no program on one device, or it cannot take arguments that lie anywhere.
ON_DEVICES_ONLY = {
    "raw_branches_of_two_types": "one branch has the shape of a block",
    "sum_that_is_sent_in_a_byte": "a raw collective",
    "an_untiled_gather": "a raw collective",
    "sum_over_an_axis_along_which_a_value_is_equal": "a raw collective",
    "loop_of_a_library": "spmd.opaque, without its meaning on whole arrays",
    "branches_of_a_library": "spmd.opaque, without its meaning on whole arrays",
    "arguments_on_two_meshes": "arguments that lie where they do on purpose",
    "argument_lies_elsewhere": "arguments that lie where they do on purpose",
}

# The compiler is the right twin of a mended program: in auto mode it chooses the collectives. Here it sends less.
SENDS_MORE = {
    "a_payload_that_lies_otherwise": "it gathers the few numbers where spmd.sort permutes blocks",
    "a_deposit_of_a_partial_sum": "it cuts the margins off before it sums",
    "gathered_axis_that_divides_no_data": "it need not make the copies of the mean equal, 7 bytes",
    "pipeline_stage_that_varies": "it need not make the copies of the mean equal, 4 bytes",
    "pipeline_loss_in_an_order_of_pipeline": "it gathers the weights to all, and no device is in a pipeline",
}


def kernels_run(program: Callable[[], object]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The kernels that a program runs, those inside others left out, with their arguments."""
    found = []
    run = Kernel.__call__

    def call(self, *args, **kwargs):
        if outermost() is not None and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            found.append((self, args, kwargs))
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "__call__", call)
        program()
    return found


@pytest.mark.parametrize("name", BAD)
def test_each_fix_is_code_and_is_run(name):
    """`fix:` is a line to paste: what is none is `advice:`. No exceptions: a message with a new one needs its `@fixed`
    program, which takes `fix`, runs it as Python and compares the numbers."""
    text = golden()[name]
    for line in fixes_of(text):
        read(line)  # a SyntaxError where it is not Python
        assert "..." not in re.sub(r'"[^"]*"', "", line), "a blank to fill in is not a line to paste"
    assert bool(fixes_of(text)) == (name in FIXED and takes_the_fix(name))


@pytest.mark.parametrize("name", share([name for name, text in golden().items() if fixes_of(text)]))
def test_the_fault_is_told_where_every_advice_fails(name, mesh, monkeypatch):
    def fails(make, *args, **kwargs):
        raise LookupError

    monkeypatch.setattr("spmd.errors._make", fails)
    assert set(facts_of(golden()[name])) <= set(facts_of(_raised(name, mesh)))


OF_ONE = [
    "all_gather",
    "split",
    "psum",
    "psum_scatter",
    "all_to_all",
    "relayout",
    "defer",
    "annotate",
    "softmax",
    "argmax",
    "cumsum",
    "sort",
    "flip",
    "reduce",
    "rearrange",
    "repeat",
    "size",
]
OF_TWO = ["take", "einsum", "meshgrid"]


@pytest.mark.parametrize("verb", [*OF_ONE, *OF_TWO])
def test_the_example_of_each_verb_is_a_call_that_it_takes(verb, mesh):
    """A call with what is not a string is advised by an example in the verb's own shape, which is run here."""
    whole = {"split", "defer"}
    partial = {"psum", "psum_scatter"}
    found = []

    def fn(x):
        with pytest.raises(spmd.errors.LayoutError) as caught:
            getattr(spmd, verb)(*[x] * (1 + (verb in OF_TWO)), 2)
        [example] = re.findall(r"^advice: as in (.*)$", str(caught.value), re.M)
        x = spmd.all_gather(x, "b/dp d -> b d") if verb in whole or verb == "meshgrid" else x
        x = spmd.zeros("b d {U:dp}", d=4) if verb in partial else x
        known = {"x": x, "y": x, "table": x, "ids": spmd.iota("b", b=8)}
        if verb == "meshgrid":
            example = example.replace("/a", "/dp").replace("/b", "/tp")
            known.update(x=spmd.iota("n/dp", n=8), y=spmd.iota("m/tp", m=8))
        if verb == "take":
            known["table"] = spmd.zeros("v/tp d", v=8, d=4)
        if verb == "einsum":
            known["y"] = spmd.zeros("d f", d=4, f=3)
        if verb == "defer":
            known["x"] = spmd.zeros("d", d=4)
        found.append(eval(example, vars(spmd) | known))
        return spmd.zeros("scalar")

    spmd.kernel("b/dp d -> scalar", mesh=mesh)(fn)(X)
    assert found


def test_most_messages_say_what_to_type():
    """README has the number, which is counted when the page is written."""
    assert COUNTS["percent of messages with a fix"]() >= 60


def test_advice_that_is_run_is_in_the_message():
    texts = golden()
    words = ("advice: ", "pad it", "numpy.asarray", "jax.ShapeDtypeStruct", "did you mean")
    assert all(takes_the_fix(name) or any(word in texts[name] for word in words) for name in FIXED)
    assert 'fix: spmd.all_gather(x, "x/dp -> x", to="invarying")' in texts["gathered_copy_leaves"]


def test_meshes_are_shown_in_their_own_order():
    for name, text in golden().items():
        for axes in re.findall(r"mesh ((?:\w+=\d+(?:, )?)+)", text):
            assert re.fullmatch(r"(dp=\d+(, )?)?(tp=\d+)?|i=8", axes), name  # without axes that are the compiler's


def test_no_message_shows_values_or_internals():
    for name, text in golden().items():
        assert not re.search(r"Array\(|\[\s*\d+\.\s", text), name
        assert not re.search(r"frozenset|Tracer|NoneType object|Traceback|0x[0-9a-f]{6}", text), name
        assert not re.search(r"\n\n(?!\(\d+\) )", text), name  # a blank line only before the next of several faults


def test_a_changed_message_is_noticed(mesh, monkeypatch):
    name = "unknown_mode"
    assert message(name, mesh) != golden()[name].replace("explicit", "explict")
    monkeypatch.setitem(BAD, "fine", lambda mesh: None)
    monkeypatch.setitem(BAD, "fine", lambda mesh: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        message("fine", mesh)
