"""No wrong program is called right by a verdict that says more than was looked at; and their twins are called right."""

from __future__ import annotations

import jax
import pytest

from spmd._jaxprs.lines import line_of
from spmd._jaxprs.walker import equations
from spmd.checker import Finding, Findings, Verdict
from spmd.checker._arbiter import collecting
from tests.checker.attacks import ATTACKS, Attack, outcome, overclaim, same
from tests.sampler import share

EVERY = list(ATTACKS.values())
a_share = pytest.mark.parametrize("attack", share(EVERY), ids=lambda one: one.name)


@a_share
def test_a_verdict_says_no_more_than_was_looked_at(attack: Attack) -> None:
    """The mistake is found, or the verdict names the side that no draw took."""
    found = attack.checked(attack.mistaken)
    assert not overclaim(attack, found), f"{attack.name}, {attack.marks()}"


@a_share
def test_its_twin_is_called_right(attack: Attack) -> None:
    found = attack.checked(attack.correct)
    assert not found, str(found)
    assert found.verdict.kind in ("proved", "tested"), str(found.verdict)


@a_share
def test_numbers_say_which_one_is_right(attack: Attack) -> None:
    """On devices and in plain JAX, with the arguments that show it."""
    wanted = outcome(attack, attack.on_whole_arrays())
    right, wrong = (outcome(attack, attack.on_devices(body)) for body in (attack.correct, attack.mistaken))
    assert same(right, wanted), (right, wanted)
    assert not same(wrong, wanted, tolerance=1e-2), (wrong, wanted)


@a_share
def test_a_marked_line_is_a_part_of_the_program(attack: Attack) -> None:
    """Else no verdict could name it."""
    with collecting(True):
        program = jax.make_jaxpr(attack.traced(attack.mistaken))(*attack.given)
    lines = {str(line_of(eqn)).rpartition(" ")[0].rpartition("/")[2] for eqn in equations(program)}
    assert not lines.isdisjoint(attack.marks()[0]), (attack.marks()[0], sorted(lines))


def test_each_attack_has_a_twin_and_a_reference() -> None:
    for attack in EVERY:
        assert attack.correct is not None and attack.reference is not None, attack.name


def test_what_says_too_much() -> None:
    """A verdict that is no word, or a word about something else, is not enough; a finding or the line is."""
    one = next(attack for attack in EVERY if attack.marks()[1] == ["result"])
    [line] = one.marks()[0]
    verdicts = lambda kind, *reasons: overclaim(one, Findings((), verdict=Verdict(kind, reasons)))
    assert verdicts("proved", f"all but {line} (body)")
    assert verdicts("tested", "On tp=4 the results are those of one device")
    assert verdicts("tested", f"Types suspect tests/checker/{line} (body), and numbers do not show it")
    assert verdicts("tested", f"no draw took the other side at {line}0 (body)")
    assert not verdicts("tested", "On tp=4", f"no draw took the other side at tests/checker/{line} (body)")
    assert not verdicts("not tested", "all numbers of result are zero")
    assert not overclaim(one, Findings((Finding("a rule", certain=False),), verdict=Verdict("tested", ())))
