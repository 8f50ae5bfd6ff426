"""What the environment says of a process, for each launcher and scheduler."""

import json

import pytest

from spmd._processes.environment import REMADE, Task, agreed, forgotten, tasks
from spmd.errors import MeshError

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "5"}
TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
LAUNCHED = {"SPMD_RANK": "0", "SPMD_PROCESSES": "2", "SPMD_COORDINATOR": "localhost:99"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (SLURM, None),  # a shell inside an allocation
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, (3, 8, None, True)),
        (MPI, (1, 2, None, True)),
        (POD, (5, None, None, True)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod of its own
        (TORCH, (1, 4, "node0:29500", False)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4, None, False)),
        ({"RANK": "1"}, None),
        (LAUNCHED, (0, 2, "localhost:99", False)),
    ],
)
def test_what_a_source_says(environment, expected):
    found = [(one.rank, one.count, one.coordinator, one.detected) for one in tasks(environment)]
    assert found == ([] if expected is None else [expected])


def test_the_launcher_is_asked_first():
    found = tasks({**TORCH, **MPI, **POD, **SLURM, "SLURM_STEP_NUM_TASKS": "8", **LAUNCHED})
    assert [one.rank for one in found] == [0, 3, 1, 5, 1]
    assert found[0] == Task("python -m spmd launch", 0, 2, "localhost:99")


@pytest.mark.parametrize("text", ["", "one", "-1", "1.0"])
def test_a_variable_that_is_not_a_number_is_named(text):
    with pytest.raises(MeshError, match="the variable WORLD_SIZE is a number"):
        tasks({**TORCH, "WORLD_SIZE": text})


def test_a_program_that_did_not_join_is_one_of_several(monkeypatch):
    """What `make_mesh` asks. A pod knows its number only, and may be the only one."""
    for environment, rank in ((LAUNCHED, 0), (TORCH, 1), (POD, None), ({**TORCH, "WORLD_SIZE": "1"}, None), ({}, None)):
        with monkeypatch.context() as told:
            for name in {*SLURM, *MPI, *POD, *TORCH, *LAUNCHED}:
                told.delenv(name, raising=False)
            for name, value in environment.items():
                told.setenv(name, value)
            found = forgotten()
            assert rank == (None if found is None else found.rank)
    for name, value in {**LAUNCHED, **TORCH}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match="two sources disagree"):
        forgotten()


# -------------------- which source counts

LAUNCHER = Task("python -m spmd launch", 1, 2, "h:1")
SCHEDULER = Task("SLURM (SLURM_PROCID, SLURM_STEP_NUM_TASKS)", 1, 2, detected=True)


def test_the_arguments_come_first_then_the_launcher():
    given = Task("the arguments", 1, 2, "a:2")
    assert agreed(None, []) is None and agreed(Task("the arguments", 0, 1, None), [SCHEDULER]) is None  # alone
    assert agreed(given, [LAUNCHER, SCHEDULER]) is given
    assert agreed(None, [LAUNCHER, SCHEDULER]) is LAUNCHER
    assert (
        agreed(None, [LAUNCHER, SCHEDULER._replace(rank=0, count=1)]) is LAUNCHER
    )  # one task starts several processes
    assert agreed(None, [SCHEDULER._replace(count=None), LAUNCHER]) == SCHEDULER._replace(count=None)


@pytest.mark.parametrize("other", [{"rank": 0}, {"count": 4}, {"rank": 0, "count": None}])
def test_sources_that_disagree_are_both_named(other):
    other = SCHEDULER._replace(**other)
    with pytest.raises(MeshError) as caught:
        agreed(None, [LAUNCHER, other])
    assert "python -m spmd launch: rank 1 of 2" in str(caught.value)
    assert f"{other.source}: rank {other.rank}" in str(caught.value)


def test_after_a_remake_the_new_number_counts_and_not_the_first_one(monkeypatch):
    told = json.dumps({"rank": 1, "count": 2, "coordinator": "a:1", "turn": 1})
    first = {"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
    new = Task("cluster.remake", 1, 2, "a:1")
    assert tasks({**first, REMADE: told}) == [new]
    assert [one.rank for one in tasks({**first, REMADE: json.dumps({"turn": 1})})] == [3, 3]
    monkeypatch.setenv(REMADE, told)
    assert agreed(Task("the arguments", 3, 4, "b:2"), [new]) == new
