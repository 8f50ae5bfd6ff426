"""A run that stands still ends within its patience, and says which process stopped it, and where."""

import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

import spmd
from spmd.cluster._recorder import HUNG, STORING, Watch, _Recorder, judge, recorder
from tests.cluster.harness import end, exhaustive, join, joined
from tests.sampler import rare, share

DISTURBED = "tests/cluster/disturbed.py"
PATIENCE = 3


def place(kind: str, where: str, **more: Any) -> dict[str, Any]:
    """Where a rank is, as it says so."""
    seconds = {"idle": 70.0, "still": 65.0, "rests": 0.0, "limit": 600.0}
    return {"kind": kind, "where": where, "step": 7, **seconds, "loop": True, "host": "h", **more}


STEP = "`step(x)` (train.py:9)"
WAITS = place("waits", STEP)
SLEEPS = place("runs", "`time.sleep(9)` (train.py:5)")


def test_who_is_named() -> None:
    def named(*places: dict[str, Any] | None) -> str:
        text, _ = judge({rank: one for rank, one in enumerate(places) if one is not None}, len(places), 60)
        assert not text or text.startswith("the run stands still at step 7: ")
        return text.removeprefix("the run stands still at step 7: ")

    assert named(WAITS, SLEEPS, WAITS) == (
        f"rank 1 did not reach {STEP}, where the others wait. rank 1 on h is in `time.sleep(9)` (train.py:5), for 65 s."
    )
    assert named(WAITS, None).endswith("rank 1 does not answer: it is stopped, or its host is gone.")
    assert named(None, WAITS, None).startswith("ranks 0, 2 did not reach")
    assert "rank 0 on h reads a batch in" in named(place("data", "`f.read()` (loader.py:4)"), WAITS)
    assert "ranks 0, 1 did not reach" not in named(*[place("data", "`f.read()` (loader.py:4)")] * 2)
    assert "rank 0 on h reads a batch" in named(*[place("data", "`f.read()` (loader.py:4)")] * 2)
    assert "rank 1 on h has ended" in named(WAITS, place("ended", ""))
    # Orbax's threads wait for the others, so who saves is named last
    assert named(place("save", "`saved.save(x)` (train.py:8)"), SLEEPS).startswith("rank 1 did not reach")
    assert "rank 0 on h saves in" in named(*[place("save", "`saved.save(x)` (train.py:8)")] * 2)
    assert named(WAITS, {**place("ended", ""), "step": 5}).endswith("rank 1 on h has ended, after step 5.")
    assert named(WAITS, {**place("save", "`saved.close()`"), "step": 5}).endswith("for 65 s, after step 5.")
    other = place("waits", "`step(y)` (train.py:11)")
    assert named(WAITS, WAITS, other).startswith(f"rank 2 did not reach {STEP}")
    assert "wait for each other at different lines" in named(WAITS, other)
    earlier = {**other, "step": 5}  # it has left the loop
    assert named(WAITS, earlier).startswith(f"rank 1 did not reach {STEP}") and ", after step 5." in named(
        WAITS, earlier
    )


def test_what_the_others_wait_in_is_named() -> None:
    """Of several collectives no backend says which one it is."""
    psum, gather = 'psum(x, "b {U:tp} -> b") (model.py:4)', 'all_gather(x, "b/dp -> b") (model.py:3)'

    def told(sends: Any, *others: Any) -> str:
        places = dict(enumerate([WAITS | {"sends": sends}, *others]))
        return judge(places, len(places), 60)[0]

    assert f"did not reach {STEP}, where the others wait in {psum}. rank 1" in told(([psum], 1), SLEEPS)
    assert f"wait in one of {gather}; {psum}. rank 1" in told(([gather, psum], 2), SLEEPS)
    assert f"wait in one of {gather}; {psum}; 37 more. rank 1" in told(([gather, psum], 39), SLEEPS)
    assert f"all wait, ranks 0, 1 in {STEP}, in {psum}: a device" in told(([psum], 1), WAITS)
    assert "where the others wait. " in told(([], 0), SLEEPS)


def test_who_may_go_on() -> None:
    compiles = place("compiles", STEP, limit=3600.0)
    works = place("runs", "`plot(x)` (train.py:12)", still=0.1)
    for places in (
        [WAITS, compiles],
        [SLEEPS, SLEEPS],  # nobody waits for another
        [works, place("ended", "")],  # process 0 evaluates
        [place("failed", ""), WAITS],  # its error is told
    ):
        assert judge(dict(enumerate(places)), 2, 60) == ("", False)
    late = {**compiles, "still": 3601.0, "limit": 3600.0}
    text, ends = judge({0: WAITS, 1: late}, 2, 60)
    assert ends and "rank 1 on h compiles in `step(x)`" in text
    saves = place("save", "`saved.close()` (train.py:20)", still=1.0)  # its disk takes bytes
    for said, places in {
        "rank 0 on h is in `plot(x)`": [works, WAITS],
        "all wait, ranks 0, 1 in `step(x)`": [WAITS, WAITS],  # a long program
        "wait for each other at different lines": [
            WAITS,
            place("waits", "`float(loss)` (train.py:10)"),
        ],  # or run ahead
        "rank 0 on h saves in": [saves, saves],  # a large state
    }.items():
        text, ends = judge(dict(enumerate(places)), 2, 60)
        assert said in text and not ends, text
        assert judge({rank: one | {"idle": 601.0} for rank, one in enumerate(places)}, 2, 60)[1]
    rests = [place("waits", line, rests=31.0) for line in (STEP, "`step(y)` (train.py:11)")]
    assert judge(dict(enumerate(rests)), 2, 60)[1]  # on CPU, where nobody computes
    assert not judge({0: rests[0], 1: WAITS}, 2, 60)[1]
    assert judge({0: WAITS, 1: SLEEPS}, 2, 60)[1] and judge({0: WAITS}, 2, 60)[1]
    assert "rank 1 does not answer" in judge({0: place("failed", "")}, 2, 60)[0]


def test_before_a_loop_nobody_is_in_a_hurry() -> None:
    """It is told of, and ends where somebody will never come."""
    start = [{**one, "loop": False} for one in (WAITS, SLEEPS)]
    text, ends = judge(dict(enumerate(start)), 2, 60)
    assert "rank 1 did not reach `step(x)`" in text and not ends
    assert judge({rank: one | {"idle": 601.0} for rank, one in enumerate(start)}, 2, 60)[1]
    assert judge({0: start[0]}, 2, 60)[1] and judge({0: start[0], 1: {**start[1], "kind": "ended"}}, 2, 60)[1]


def test_where_all_only_run_each_is_named() -> None:
    """After several times the patience; of those who compute, nothing is known."""
    runs = [place("runs", f"`lock.acquire()` (train.py:{line})", still=190.0, rests=190.0) for line in (4, 5)]
    text, ends = judge(dict(enumerate(runs)), 2, 60)
    assert "the processes wait for each other at different lines: rank 0 in `lock.acquire()` (train.py:4)" in text
    assert not ends and judge({rank: one | {"idle": 601.0} for rank, one in enumerate(runs)}, 2, 60)[1]
    assert "no process goes on: ranks 0, 1 in" in judge({0: runs[0], 1: runs[0]}, 2, 60)[0]
    served = {rank: one | {"idle": 9e9, "loop": False} for rank, one in enumerate(runs)}  # nobody asks a server
    assert judge(served, 2, 60)[0] and not judge(served, 2, 60)[1]
    assert "rank 2 did not reach" in judge({0: runs[0], 1: runs[0], 2: runs[1]}, 3, 60)[0]
    assert judge({0: runs[0], 1: {**runs[1], "still": 1.0}}, 2, 60) == ("", False)


def test_of_those_who_save_the_one_whose_disk_does_not_answer_is_named() -> None:
    saves = place("save", "`saved.close()` (train.py:20)", still=10.0)
    stuck = place("save", "`saved.close()` (train.py:20), `open(path)` (backend.py:133)", busy=True)
    waits = place("waits", "`saved.close()` (train.py:20)")
    for places in ([stuck, saves], [stuck, waits], [stuck, waits, waits]):
        text, ends = judge(dict(enumerate(places)), len(places), 60)
        assert ends and text.startswith("the run stands still at step 7: rank 0 on h saves in `saved.close()`"), text
        assert not judge({0: {**stuck, "still": 10.0}, **dict(enumerate(places[1:], 1))}, len(places), 60)[1]


def test_a_disk_that_takes_bytes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = object.__new__(Watch)
    watch._bytes = 0
    moves = lambda: [watch._disk_moves() for _ in range(2)][-1]
    for remote in (False, True):
        monkeypatch.setattr(recorder, "remote", remote)
        monkeypatch.setattr(recorder, "doing", "data")
        assert not moves()
        for doing in STORING:
            monkeypatch.setattr(recorder, "doing", doing)
            assert moves() is remote  # of a bucket nobody here knows
            (tmp_path / "file").write_bytes(bytes(2**20))
            assert watch._disk_moves()


PLAIN = "tests/cluster/plain.py"


@pytest.mark.parametrize(
    ("call", "where", "kind"),
    share([(call, "loop", kind) for call in ("kernel", "jit", "table") for kind in ("sleep", "all", "works")], times=2),
)
def test_a_loop_that_tells_of_no_laps_is_watched(call: str, where: str, kind: str) -> None:
    """It ends after several times the patience. One in which each turn takes long, or in which nobody waits for another,
    goes to its end."""
    found = joined([[PLAIN, call, where, kind]] * 2, [{"PATIENCE": f"{PATIENCE}"}] * 2, timeout=120)
    assert [one.code for one in found] == ([HUNG, HUNG] if kind == "sleep" else [0, 0]), found
    said = {
        "works": "",
        "sleep": "rank 1 did not reach `float(x.addressable_shards[0].data[0])`",
        "all": "no process goes on: ranks 0, 1 in `time.sleep(",  # and perhaps they wait for somebody outside
    }
    assert said[kind] in found[0].err and (kind != "works" or "stands still" not in found[0].err)


@exhaustive
def test_a_start_that_stands_still_is_told_of() -> None:
    """The others wait for 30 s, in which Gloo wants to meet them all."""
    found = joined([[PLAIN, "jit", "start", "sleep"]] * 2, [{"PATIENCE": f"{PATIENCE}"}] * 2, timeout=120)
    assert "rank 1 on " in found[0].err and "is in `time.sleep(1000)` (plain.py:" in found[0].err, found
    assert "If nothing goes on, it ends after 180 s." in found[0].err


def test_a_warm_step_costs_less_than_50_microseconds() -> None:
    recorder, times = _Recorder(), []
    for step in range(2000):
        since = time.perf_counter()
        recorder.at(step)
        with recorder.inside("data"):
            pass
        recorder.read(0.0)
        with recorder.inside("save"):
            pass
        times.append(time.perf_counter() - since)
    assert statistics.median(times) < 50e-6


def test_seconds_add_up() -> None:
    one = _Recorder()
    with one.inside("restore"):
        time.sleep(0.02)
    one.hear("/jax/core/compile/backend_compile_duration", 0.01)
    one.hear("/jax/core/compile/jaxpr_trace_duration", 5.0)  # within others
    time.sleep(0.03)
    for step in range(4):
        one.at(step)
        with one.inside("data"):
            time.sleep(0.01)
        with one.inside("save"), one.inside("data"):
            pass
        time.sleep(0.02)
    one.repeated = 1
    found = one.goodput()
    parts = [found[name] for name in ("start", "compile", "data", "save", "restore", "again", "steps")]
    assert abs(sum(parts) - found["seconds"]) < 1e-6 and abs(found["seconds"] - (time.monotonic() - one.born)) < 1.0
    assert found["restore"] >= 0.02 and found["compile"] == 0.01 and found["data"] >= 0.04 and found["start"] > 0.01
    assert found["again"] >= 0.03 and found["steps again"] == 1 and found["steps"] >= 0.04
    assert json.loads(json.dumps(found)) == found


@rare
def test_what_is_done_again_is_counted(tmp_path: Path) -> None:
    """A run is killed between two saves: the next one says how many steps it does again."""
    told = {"FOLDER": str(tmp_path / "run"), "EVERY": "30", "PATIENCE": "3", "BUSY": "0.3"}
    joined([[DISTURBED, "kill", "1", "52", "70"]] * 2, [told] * 2)
    found = joined([[DISTURBED, "none", "1", "0", "70"]] * 2, [told] * 2)
    assert [one.code for one in found] == [0, 0], found
    [(share, again)] = re.findall(
        r"^goodput: (\d+)% of .* s in new steps; start .*, (\d+) steps again", found[0].err, re.M
    )
    assert 0 < int(share) < 100 and 5 <= int(again) <= 22
    assert "goodput:" not in found[1].err


@rare
def test_the_slowest_process_is_named() -> None:
    found = joined([[DISTURBED, "slow", "1", "4", "60"]] * 2, timeout=60)
    for one in found:
        assert one.code == 0 and re.search(r"^slowest: rank 1 on \S+ waits \d+% of its time", one.out, re.M), one
    times = re.findall(r"^[01] .*", found[0].out, re.M)
    assert len(times) == 2 and float(times[1].split()[4]) > 0.05  # of a batch of four samples that this process reads


FAULTS = {
    "sleep": "is in `time.sleep(1000)` (disturbed.py:",
    "lock": "is in `lock.acquire()` (disturbed.py:",
    "reader": "reads a batch in `os.read(os.pipe()[0], 1)` (disturbed.py:",
    "stop": "does not answer",
    "kill": "does not answer",
    "exit": "has ended",
    "branch": "wait for each other at different lines: rank 0 in `",
}


@pytest.mark.parametrize(
    ("kind", "who"),
    # from the last one on, so that it is not the kind that test_faults.py draws
    share(
        [(kind, who) for kind in [*FAULTS][::-1] for who in (1, 0) if who or kind not in ("kill", "branch")], times=2
    ),
)
def test_the_right_rank_is_named_in_time(kind: str, who: int) -> None:
    """Without a launcher. Where the coordinator, rank 0, is killed, JAX ends the others at once."""
    since = time.monotonic()
    processes = join([[DISTURBED, kind, str(who)]] * 2, [{"PATIENCE": str(PATIENCE)}] * 2)
    other, ended = end(processes[1 - who], since, 60), time.time()
    if kind == "stop":
        processes[who].kill()
    faulty = end(processes[who], since, 60)
    if kind == "stop" and who == 0:
        assert "rank 0, which has the coordinator of all, does not answer" in other.err, other
    else:
        assert FAULTS[kind] in other.err and (kind == "branch" or f"rank {who} " in other.err), other
    [fault] = re.findall(r"^fault ([\d.]+)", faulty.out, re.M)
    assert ended - float(fault) < PATIENCE + 15
    assert other.code == HUNG
    assert kind in ("kill", "stop") or faulty.code == HUNG
    assert kind in ("kill", "stop") or ("disturbed.py" in faulty.err and "flight recorder" not in faulty.out)


@rare
def test_a_function_decides_what_becomes_of_a_hang() -> None:
    """It returns an exit code, or None: then the run goes on."""
    for code, ends in (("3", 3), ("none", 0)):
        found = joined([[DISTURBED, "nap", "1"]] * 2, [{"PATIENCE": "1", "ON_HANG": code}] * 2, timeout=40)
        assert [one.code for one in found] == [ends, ends], found
        assert "asked: the run stands still at step 4: rank 1 did not reach" in found[0].out


# -------------------- when what is left of a run goes on: test_remake.py


@pytest.mark.parametrize("left", [[], [1, 2]])
def test_nobody_goes_on_where_it_is_not_known_with_whom(left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "left", left)
    assert spmd.cluster.remake("it stands still") == HUNG


def test_it_ends_after_some_times(monkeypatch: pytest.MonkeyPatch) -> None:
    remade = "SPMD_REMADE"
    monkeypatch.setattr(recorder, "left", [0])
    monkeypatch.setenv(remade, json.dumps({"turn": 3}))
    assert spmd.cluster.remake("it stands still", times=3) == HUNG
