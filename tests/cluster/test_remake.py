"""What is left of a run goes on by itself, and its numbers are those of a run that nothing disturbed."""

import re
import time
from pathlib import Path

import numpy as np

from tests.cluster.faults import PROGRAM, steps_of
from tests.cluster.harness import Ended, end, exhaustive, free_port, joined, start
from tests.sampler import rare


def remade(kind: str, who: str, count: int, folder: Path) -> list[Ended]:
    told = {"PATIENCE": "5", "FOLDER": f"{folder}/run", "ON_HANG": "remake", "WIDTH": f"{2 * count}"}
    return joined([[PROGRAM, kind, who, "5", "12"]] * count, [told] * count, timeout=120)


@rare  # test_faults.py has a process that sleeps, and the rest of this file what is agreed on
def test_a_process_that_sleeps_starts_anew_beside_the_others(tmp_path: Path) -> None:
    ended = remade("sleep", "1", 2, tmp_path)
    assert [one.code for one in ended] == [0, 0], ended
    undisturbed = joined([[PROGRAM, "none", "0", "0", "12"]] * 2)[0]
    assert steps_of(ended[0].out) == steps_of(undisturbed.out)
    assert all('"count": 2' in one.err for one in ended)


@exhaustive
def test_two_of_four_go_on_with_a_mesh_of_their_devices(tmp_path: Path) -> None:
    ended = remade("kill", "1,3", 4, tmp_path)
    assert [one.code for one in ended] == [0, -9, 0, -9], ended
    assert re.search(r"^remade \S+ 4$", ended[0].out, re.M), ended[0].out  # devices
    undisturbed = joined([[PROGRAM, "none", "0", "0", "12"]] * 4)[0]
    found, wanted = steps_of(ended[0].out), steps_of(undisturbed.out)
    for step, text in wanted.items():  # a sum over another mesh has another order
        (loss, sample), (right, right_sample) = found[step].split(), text.split()
        assert sample == right_sample
        np.testing.assert_allclose(float.fromhex(loss), float.fromhex(right), rtol=1e-5)


@exhaustive
def test_a_process_that_somebody_starts_again_joins_the_others(tmp_path: Path) -> None:
    since, port = time.monotonic(), str(free_port())
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "JAX_NUM_CPU_DEVICES": "2"}
    told |= {"PATIENCE": "5", "FOLDER": f"{tmp_path}/run", "ON_HANG": "replaced"}
    first, second = (start([PROGRAM, "kill", "1", "5", "12"], {**told, "RANK": rank}) for rank in "01")
    assert end(second, since).code == -9
    time.sleep(5 / 2 + 7)  # before that, JAX would abort the first one
    second = start([PROGRAM, "none", "1", "5", "12"], {**told, "RANK": "1"})
    ended = [end(one, since) for one in (first, second)]
    assert [one.code for one in ended] == [0, 0], ended
    assert steps_of(ended[0].out) == steps_of(joined([[PROGRAM, "none", "0", "0", "12"]] * 2)[0].out)
