"""Faults in runs of several processes, provoked one by one: what is seen of each, when, and what is lost.

    python -m tests.cluster.faults [--only KIND ...] [--write]
    python -m tests.cluster.faults --random 100 [--seed 0] [--steps 200]

Each run saves every second step and has no launcher. After a fault the same command is run again, without it: the losses
and samples of all steps have to be those of a run that nothing disturbed, bit for bit. With `--write` the table goes
into `docs/pages/when-a-run-stops.md`.
"""

import argparse
import functools
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.harness import ROOT, Ended, end, join, joined
from tests.pages import Part

PROGRAM = "tests/cluster/disturbed.py"
TABLE = Part(ROOT / "docs/pages/when-a-run-stops.md", "faults")
PATIENCE = 5.0
STEPS = 12
GONE = "rank {who} does not answer"
ENDED = "rank {who} on \\S+ has ended: "
COORDINATOR = "rank 0, which has the coordinator of all, does not answer"


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in one process.

    Attributes:
      kind: Its name in `disturbed.py`; several with one name differ in `who`.
      what: It in words.
      said: What is said, with `{who}` for the rank; it has to be in what the other processes write.
      limit: After how many seconds at most, with the patience p.
      who: The rank in which it happens.
      codes: The exit codes of the other processes.
      prefetch: Whether a thread reads ahead.
    """

    kind: str
    what: str
    said: str
    limit: str = "p + 10"
    who: int = 1
    codes: tuple[int, ...] = (75,)
    prefetch: int = 0

    @property
    def name(self) -> str:
        """Its name on the command line and in tests."""
        return self.kind + (f"-{self.who}" if self.who != 1 else "") + ("-ahead" if self.prefetch else "")


FAULTS = [
    Fault("sleep", "`time.sleep` in one process", "rank {who} on \\S+ is in `time.sleep(1000)`"),
    Fault("lock", "a lock that nobody releases", "rank {who} on \\S+ is in `lock.acquire()`"),
    Fault("reader", "a reader that blocks", "rank {who} on \\S+ reads a batch in `os.read(", who=0),
    Fault("reader", "the same, read ahead by a thread", "rank {who} on \\S+ reads a batch in `next(data)`", prefetch=2),
    Fault("branch", "one process takes another branch", "wait for each other at different lines"),
    Fault("exit", "`sys.exit` in one process", "rank {who} on \\S+ has ended"),
    Fault("stop", "a whole process stands still (SIGSTOP), or its host is gone", GONE, "p / 2 + 10"),
    Fault("stop", "the same, of process 0, which has JAX's coordinator", COORDINATOR, "p / 2 + 10", who=0),
    Fault("kill", "`kill -9` of one process", GONE, "10"),
    Fault("kill", "`kill -9` of process 0", f"{COORDINATOR}|the leader task", "10", who=0, codes=(75, -6, 1)),
    Fault(
        "network", "the connections of one process are closed", f"{GONE}|Connection closed by peer", "10", codes=(75, 1)
    ),
    Fault("raise", "an exception in one process", ENDED + "ValueError: bad data", "10"),
    Fault("error", "an exception in the source of the data", ENDED + "OSError: the disk is gone", "10"),
    Fault("flip", "a bit flips in a copy", "device \\d+ \\(rank {who} on \\S+ differs from 3", "2", codes=(1,)),
    Fault("nan", "a number is not finite", "numbers of the state are not finite.*\\n.*'x'", "2", codes=(1,)),
    Fault("disk", "the disk is full in one process", "rank {who}: .*No space left", "2", codes=(1,)),
    Fault("term", "SIGTERM to one process", "done", "10", codes=(0,)),
    Fault("damage", "a file of the last checkpoint is damaged", "step \\d+ is damaged", "0", codes=(0,)),
]


@dataclass(frozen=True)
class Seen:
    """What was seen of a fault: after how many seconds the others had ended, what they said, how many steps were done
    again, and what is wrong with all this."""

    seconds: float
    said: str
    lost: int
    wrong: str = ""


def steps_of(out: str) -> dict[int, str]:
    """The loss and sample of each step, as process 0 prints them; of a step that came twice the last one."""
    return {int(step): rest for step, rest in re.findall(r"^step (\d+) (.*)", out, re.M)}


@functools.cache
def undisturbed(count: int, steps: int) -> dict[int, str]:
    """A run in which nothing happens."""
    found = joined([[PROGRAM, "none", "0", "0", str(steps)]] * count)
    assert [one.code for one in found] == [0] * count, found
    return steps_of(found[0].out)


def see(fault: Fault, *, count: int = 2, when: int = 5, steps: int = STEPS) -> Seen:
    """Provoke a fault, then run the same program again without it."""
    with tempfile.TemporaryDirectory() as folder:
        told = {"PATIENCE": str(PATIENCE), "FOLDER": f"{folder}/run", "PREFETCH": str(fault.prefetch)}
        kind = "none" if fault.kind == "damage" else fault.kind
        found, seconds = _provoked([PROGRAM, kind, str(fault.who), str(when), str(steps)], count, told, fault)
        if fault.kind == "damage":
            steps += 4
            seconds = 0.0  # it is seen at the next start
            _damage(Path(folder, "run", "steps", str(steps - 4)))
        again = joined([[PROGRAM, "none", "0", "0", str(steps)]] * count, [told] * count)
        others = again if fault.kind == "damage" else [one for rank, one in enumerate(found) if rank != fault.who]
        first, second = steps_of(found[0].out), steps_of(again[0].out)
        lost = len(first.keys() & second.keys())
        return Seen(
            seconds, _line(fault, others), lost, _wrong(fault, others, seconds, again, first, second, count, steps)
        )


def _provoked(command: Sequence[str], count: int, told: dict[str, str], fault: Fault) -> tuple[list[Ended], float]:
    """How the processes end, and after how many seconds those that the fault is not in."""
    since = time.monotonic()
    processes = join([command] * count, [told] * count)
    ended = {rank: end(one, since, 90) for rank, one in enumerate(processes) if rank != fault.who}
    now = time.time()
    if fault.kind == "stop":
        processes[fault.who].kill()
    ended[fault.who] = end(processes[fault.who], since, 90)
    if fault.kind == "disk":
        now = time.time()
    times = re.findall(r"^fault ([\d.]+)", ended[fault.who].out, re.M)
    return [ended[rank] for rank in range(count)], now - float(times[0]) if times else 0.0


def _damage(step: Path) -> None:
    largest = max(
        (one for one in step.rglob("*") if one.is_file() and "d" in one.parts), key=lambda one: one.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 255
    largest.write_bytes(bytes(content))


def _said(fault: Fault) -> str:
    text = fault.said.replace("{who}", str(fault.who))
    return re.sub(r"(?<!\\)([()`])", r"\\\1", text)


def _line(fault: Fault, others: Sequence[Ended]) -> str:
    """The line of the other processes that names the fault."""
    for one in others:
        if found := re.search(_said(fault), one.err + one.out):
            text = one.err + one.out
            start, stop = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
            return " ".join(text[start:stop].split())
    return ""


def _wrong(
    fault: Fault,
    others: Sequence[Ended],
    seconds: float,
    again: Sequence[Ended],
    first: dict[int, str],
    second: dict[int, str],
    count: int,
    steps: int,
) -> str:
    """What is not as it should be; empty where all is."""
    if not _line(fault, others):
        return f"nobody says {_said(fault)!r}: {[one.err[-800:] for one in others]}"
    if seconds > (limit := eval(fault.limit, {"p": PATIENCE})):
        return f"it took {seconds:.1f} s, not {limit}"
    if any(one.code not in fault.codes for one in others):
        return f"exit codes {[one.code for one in others]}"
    if any(one.code for one in again):
        return f"it does not go on: {[one.err[-800:] for one in again]}"
    right = undisturbed(count, steps)
    good = first if fault.kind not in ("nan", "flip") else {}
    if {**good, **second} != {step: right[step] for step in {**good, **second}} or max(second, default=steps) != steps:
        return "the losses or samples are not those of a run that nothing disturbed"
    return ""


# --- the table -------------------------------------------------------------------------------------------------------

HEAD = "| fault | seen after, at most | here | what is said | steps done again |\n|---|---|---|---|---|"


LIMITS = {
    "0": "at the next start",
    "2": "2 s",
    "10": "10 s",
    "p + 10": "`patience` + 10 s",
    "p / 2 + 10": "`patience` / 2 + 10 s",
}


def row(fault: Fault, seen: Seen) -> str:
    """A row of the page."""
    limit = LIMITS[fault.limit]
    said = re.sub(rf" on {re.escape(socket.gethostname())}\b", " on HOST", seen.said).removeprefix(
        "the run stands still at step 5: "
    )
    if len(said) > 400 and (found := re.search(_said(fault), said)):
        said = f"... {said[max(found.start() - 60, 0) : found.end() + 100]} ..."
    cell = re.sub(r"/tmp/\S+/run", "run", said).replace("|", "\\|").replace("`", "")
    return f"| {fault.what} | {limit} | {f'{seen.seconds:.1f} s' if seen.seconds else '-'} | {cell} | {seen.lost} |"


def at_random(number: int, seed: int, steps: int) -> int:
    """That many random faults in runs of two to eight processes; how many of them are not as they should be."""
    draw, bad = random.Random(seed), 0
    kinds = ["kill", "stop", "sleep", "raise", "disk", "damage", "flip", "nan", "network"]
    for i in range(number):
        count, kind = draw.choice([2, 2, 3, 4, 8]), draw.choice(kinds)
        who, when = draw.randrange(count), draw.randrange(3, steps - 2)
        of_it = [one for one in FAULTS if one.kind == kind]
        base = next((one for one in of_it if one.who == who), of_it[0])
        said = base.said
        if kind == "flip":
            said = "device \\d+ \\(rank {who} on \\S+ differs"
        if kind in ("kill", "network", "raise") and who == 0:
            said = f"{said}|{COORDINATOR}|the leader task|Connection closed by peer"
        limit = {"2": "15", "10": "25"}.get(base.limit, f"{base.limit} + 10")  # eight processes on few cores
        fault = Fault(kind, base.what, said, limit, who, (0, 1, 75, -6))
        seen = see(fault, count=count, when=when, steps=steps)
        bad += bool(seen.wrong)
        print(
            f"{i}: {kind} in {who} of {count} at {when}: {seen.seconds:.1f} s, {seen.lost} again. {seen.wrong}",
            flush=True,
        )
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)
    if options.random:
        return min(at_random(options.random, options.seed, options.steps), 1)
    rows, bad = [], 0
    for fault in FAULTS:
        if not options.only or fault.name in options.only:
            seen = see(fault)
            rows.append(row(fault, seen))
            bad += bool(seen.wrong)
            print(fault.name, rows[-1], seen.wrong, sep="\n  ", flush=True)
    if options.write:
        TABLE.write("\n".join([HEAD, *rows]))
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
