"""The files for SLURM and Kubernetes: they have what JAX and the main job need, and the script for SLURM is run."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.harness import ROOT, end, environment, exhaustive
from tests.cluster.main_job import FLAGS, text
from tests.sampler import share

SLURM, KUBERNETES = ROOT / "examples" / "slurm.sh", ROOT / "examples" / "kubernetes.yaml"


@pytest.fixture
def flags(monkeypatch) -> Any:
    """What the main job makes of its flags; an error where there are none of this name."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("train_lm").read_flags


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(KUBERNETES.read_text())}


def slurm_options() -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", SLURM.read_text(), re.MULTILINE))


def test_both_commands_are_those_of_the_main_job(flags, parts):
    container = parts["Job"]["spec"]["template"]["spec"]["containers"][0]
    [line] = re.findall(r"^    python (.*)$", SLURM.read_text(), re.MULTILINE)
    program, *args = shlex.split(line.replace('"$checkpoint"', "folder").replace('"$@"', ""))
    assert [program] == container["command"][1:]
    for found in (flags(args), flags(container["args"])):
        assert (found.devices, found.every, found.stopped) == ("all", 500, 75)
    assert flags(args).checkpoint == "folder"


def test_the_script_for_slurm_leaves_time_to_save_and_is_queued_again():
    options = slurm_options()
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert "requeue" in options and "gpus-per-task" not in options
    name, seconds = options["signal"].split("@")
    assert name == "USR1" and int(seconds) >= 60


def test_the_job_has_what_jax_asks_kubernetes_for(parts):
    job, pod = parts["Job"]["spec"], parts["Job"]["spec"]["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"] > 1
    service = parts["Service"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": parts["Job"]["metadata"]["name"]}
    account = parts["ServiceAccount"]["metadata"]["name"]
    assert pod["serviceAccountName"] == account == parts["RoleBinding"]["subjects"][0]["name"]
    assert parts["RoleBinding"]["roleRef"]["name"] == parts["Role"]["metadata"]["name"]
    allowed = {(kind, verb) for rule in parts["Role"]["rules"] for kind in rule["resources"] for verb in rule["verbs"]}
    assert allowed >= {("pods", "list"), ("services", "list"), ("jobs", "get")}  # as jax.distributed calls them


def test_a_pod_that_was_stopped_is_replaced_and_does_not_count_as_failed(parts):
    job, pod = parts["Job"]["spec"], parts["Job"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
    rules = job["podFailurePolicy"]["rules"]
    assert all(rule["action"] == "Ignore" for rule in rules)
    stopped = rules[0]["onExitCodes"]
    assert stopped["values"] == [75, 143] and stopped["containerName"] == pod["containers"][0]["name"]
    mounts = {one["name"] for one in pod["containers"][0]["volumeMounts"]}
    assert mounts == {one["name"] for one in pod["volumes"]}


def test_a_condition_of_a_pod_has_a_status(parts):
    """Kubernetes 1.29 to 1.34 refuse the file without."""
    rules = parts["Job"]["spec"]["podFailurePolicy"]["rules"]
    conditions = [one for rule in rules for one in rule.get("onPodConditions", [])]
    assert conditions and all(one == {"type": "DisruptionTarget", "status": "True"} for one in conditions)


def crashes_that_are_left(job: dict[str, Any], pods: int) -> int:
    """How many crashes of one process a job survives, each of which fails all of its pods, as Kubernetes counts them:
    against the limit of its index, or, where there is none, against one limit for all (6 by default)."""
    by_index = job.get("backoffLimitPerIndex")
    return int(job.get("backoffLimit", 6) // pods if by_index is None else by_index)


@pytest.mark.parametrize("pods", [2, 11, 2000])
def test_one_crash_does_not_end_a_large_job(parts, pods):
    """With one limit of 10 for all, the first crash ended a job of 11 pods."""
    job = parts["Job"]["spec"]
    assert crashes_that_are_left(job, pods) >= 10
    assert job["podReplacementPolicy"] == "Failed"  # what Kubernetes demands beside podFailurePolicy
    assert job["maxFailedIndexes"] == 0  # the others are not trained for without one


# --- the script for SLURM, run ---------------------------------------------------------------------------------------

# What srun does here: two tasks on this host, each with its variables; signals are passed on; the largest exit code.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 \\
        SLURM_STEP_NODELIST=localhost "$@" & tasks+=("$!")
done
echo "${tasks[@]}" > "$TASKS"
code=0
for task in "${tasks[@]}"; do wait "$task"; one=$?; ((one > code)) && code=$one; done
exit "$code"
"""


def cluster(folder: Path) -> dict[str, str]:
    """Variables of a batch script, and commands of a SLURM of our own."""
    commands = folder / "bin"
    commands.mkdir()
    texts = {"srun": SRUN, "scontrol": '#!/bin/bash\necho "$@" >> "$QUEUE"\n'}
    texts["python"] = f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n'
    for name, content in texts.items():
        (commands / name).write_text(content)
        (commands / name).chmod(0o755)
    told = {"SLURM_JOB_ID": str(os.getpid()), "JAX_NUM_CPU_DEVICES": "4", "CHECKPOINT": str(folder / "saved")}
    told |= {"QUEUE": str(folder / "queue"), "TASKS": str(folder / "tasks")}
    return environment({**told, "PATH": f"{commands}:{os.environ['PATH']}"})


def test_the_script_for_slurm_is_bash():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)


@pytest.mark.parametrize(
    ("code", "again"), [(0, False), (1, False), (75, True), (138, True), (143, True), (137, False)]
)
def test_a_signal_in_the_first_seconds_is_queued_again_too(tmp_path, code, again):
    """Before Python has loaded JAX, SIGUSR1 ends the processes; the job was lost."""
    variables = cluster(tmp_path)
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/bash\nexit {code}\n")
    found = subprocess.run(["bash", str(SLURM)], cwd=ROOT, env=variables, capture_output=True, check=False)
    assert found.returncode == code and (tmp_path / "queue").exists() == again


@exhaustive
def test_a_job_of_slurm_is_stopped_queued_again_and_goes_on(tmp_path):
    """JAX finds the processes by the variables of SLURM."""
    variables, pipes = cluster(tmp_path), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = ["bash", str(SLURM), *FLAGS, f"--data={text(tmp_path, epoch=10)}", "--every=1", "--steps=400"]
    process, since, said = subprocess.Popen(command, cwd=ROOT, env=variables, **pipes), time.monotonic(), ""
    while "step 2: " not in said:
        line = process.stdout.readline()
        assert line, (said, process.communicate())
        said += line
    for task in (tmp_path / "tasks").read_text().split():  # as SLURM sends it, to all tasks
        os.kill(int(task), signal.SIGUSR1)
    found = end(process, since)
    assert found.code == 75, found.err
    assert (tmp_path / "queue").read_text() == f"requeue {os.getpid()}\n"
    [step] = re.findall(r"stopped after step (\d+) of 400", said + found.out)

    command[-1] = f"--steps={step}"  # another schedule of learning rates, which does not matter here
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    assert f"step {step} was saved in" in done.stdout and "this model" in done.stdout
    assert (tmp_path / "queue").read_text().count("requeue") == 1


@pytest.mark.parametrize("version", share([f"1.{minor}" for minor in range(29, 38)]))
def test_kubernetes_takes_the_file_strictly(version):
    """By the schema of each version; an unknown or missing field is an error."""
    validate = pytest.importorskip("kubernetes_validate").validate
    documents = list(yaml.safe_load_all(KUBERNETES.read_text()))
    for one in documents:
        validate(one, version, strict=True)
    job = documents[-1]
    del job["spec"]["podFailurePolicy"]["rules"][1]["onPodConditions"][0]["status"]
    if int(version[2:]) < 35:
        with pytest.raises(Exception, match="status"):
            validate(job, version, strict=True)
