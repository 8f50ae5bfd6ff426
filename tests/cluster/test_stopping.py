"""A signal asks a program to stop. That several processes stop at the same step is in `test_main_job.py`."""

import signal

import pytest

from tests.cluster.harness import alone, joined
from tests.sampler import rare, share

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


ASKED = """
import os, signal, sys
from spmd.cluster import stopping
print(stopping(0), stopping(1))
os.kill(os.getpid(), int(sys.argv[1]))
print(stopping(2), stopping(3))
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("at once")
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_to_stop_from_then_on_and_a_second_interrupt_does_not_wait(number):
    found = alone("-c", ASKED, str(int(number)))
    assert found.out.splitlines()[:2] == ["False False", "True True"], found
    assert number != signal.SIGINT or found.out.splitlines()[2:] == ["at once"]


PROGRAM = "tests/cluster/signalled.py"


@pytest.mark.parametrize("number", share([signal.SIGUSR1, signal.SIGTERM]))
def test_more_signals_during_the_exit_change_nothing(number):
    """Python gives its handlers back before it ends, and the exit code was that of the signal: 16 of 16."""
    found = alone(PROGRAM, str(int(number)), "loop")
    assert found.code == 75 and "stopped" in found.out, found


@pytest.mark.parametrize(
    ("number", "when"), share([(number, when) for number in SIGNALS[:2] for when in ("join", "loop")])
)
@rare  # in one process: the test above
def test_more_signals_to_several_processes_change_nothing(number, when):
    """One that came while a process waited for the others to join ended it."""
    found = joined([[PROGRAM, str(int(number)), when]] * 2)
    assert [one.code for one in found] == [75, 75], found
