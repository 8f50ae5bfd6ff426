"""Faults in runs of several processes, provoked one by one: what is seen of each, when, and what is lost.

    python -m tests.cluster.faults [--only KIND ...] [--write]
    python -m tests.cluster.faults --random 100 [--seed 0] [--steps 200]

Each run saves every second step and has no launcher. After a fault the same command is run again, without it: the losses
and samples of all steps have to be those of a run that nothing disturbed, bit for bit. With `--write` the table goes
into `docs/pages/when-a-run-stops.md`. Random faults come one after the other in runs that save every twentieth of their
steps: after each the same command is run again, with the next one.
"""

import argparse
import functools
import itertools
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.cluster.harness import ROOT, Ended, end, join, joined
from tests.pages import Part

PROGRAM = "tests/cluster/disturbed.py"
PAGE = ROOT / "docs/pages/when-a-run-stops.md"
TABLE, CAMPAIGN = Part(PAGE, "faults"), Part(PAGE, "random faults")
PATIENCE = 5.0
STEPS = 12
JOIN = 20  # seconds in which all have to join
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
      place: Where in the program it comes.
    """

    kind: str
    what: str
    said: str
    limit: str = "p + 10"
    who: int = 1
    codes: tuple[int, ...] = (75,)
    prefetch: int = 0
    place: str = "step"

    @property
    def name(self) -> str:
        """Its name on the command line and in tests."""
        return self.kind + (f"-{self.who}" if self.who != 1 else "") + ("-ahead" if self.prefetch else "")


FAULTS = [
    Fault("sleep", "`time.sleep` in one process", "rank {who} on \\S+ is in `time.sleep(1000)`"),
    Fault("lock", "a lock that nobody releases", "rank {who} on \\S+ is in `lock.acquire()`"),
    Fault("reader", "a reader that blocks", "rank {who} on \\S+ reads a batch in `os.read(", who=0),
    Fault("reader", "the same, read ahead by a thread", "rank {who} on \\S+ reads a batch in `next(data)`", prefetch=2),
    Fault(
        "silent",
        "the disk of one process answers no call",
        "rank {who} on \\S+ saves in `saved.save(|rank {who} on \\S+ saves in `os.read(",
    ),
    Fault("writer", "the same, while a thread writes", "rank {who} on \\S+ saves in `saved.\\w+("),
    Fault("silent", "the same, of process 0", "rank {who} on \\S+ saves in `saved.save(", who=0),
    Fault("branch", "one process takes another branch", "wait for each other at different lines"),
    Fault("fewer", "one process does fewer steps, and saves", "rank {who} on \\S+ .*`saved.save(.*, after step 4"),
    Fault("less", "the same, and ends", "rank {who} on \\S+ has ended, after step 4"),
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
    Fault("batch", "a sample of one process is not finite", "rank {who} has read samples with such", "2", codes=(1,)),
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


@dataclass(frozen=True)
class Start:
    """One start of a run: the fault and its step (None for the last start, which goes to the end), how its processes
    ended, and how many seconds after the fault those that it is not in."""

    fault: Fault | None
    when: int
    ended: Sequence[Ended]
    seconds: float

    @property
    def steps(self) -> dict[int, str]:
        """What process 0 says of each step; of those after a fault of numbers nothing, for they are done again."""
        wrong = self.fault is not None and self.fault.kind in ("nan", "flip", "batch")
        found = steps_of(self.ended[0].out)
        return {step: said for step, said in found.items() if not wrong or step <= self.when}


def see(faults: Sequence[tuple[Fault, int]], *, count: int = 2, steps: int = STEPS, every: int = 2) -> list[Seen]:
    """Provoke faults at steps of one run, which is started again after each; what is seen of them.

    Args:
      faults: Each with its step, in which it comes; the steps grow.
      count: How many processes.
      steps: How many steps the run has.
      every: After how many steps it saves, and compares copies.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = {"INITIALIZATION": str(JOIN), "PATIENCE": str(PATIENCE), "FOLDER": f"{folder}/run", "EVERY": str(every)}
        starts = []
        for fault, when in faults:
            ended, seconds = _provoked(fault, when, count, steps, every, told)
            starts.append(Start(fault, when, ended, seconds))
            if fault.kind == "damage":
                _damage(max(Path(folder, "run", "steps").iterdir(), key=lambda one: int(one.name)))
        ended = joined([[PROGRAM, "none", "0", "0", str(steps)]] * count, [told] * count)
        starts.append(Start(None, steps, ended, 0.0))
    pairs = list(itertools.pairwise(starts))
    seen = [_seen(start, after, undisturbed(count, steps)) for start, after in pairs]
    whole = {step: said for start in starts for step, said in start.steps.items()}
    if not seen[-1].wrong and (whole != undisturbed(count, steps) or any(one.code for one in ended)):
        seen[-1] = replace(seen[-1], wrong=f"the run does not end right: {[one.err[-800:] for one in ended]}")
    return seen


def _provoked(
    fault: Fault, when: int, count: int, steps: int, every: int, told: dict[str, str]
) -> tuple[list[Ended], float]:
    """How the processes end, and after how many seconds those that the fault is not in."""
    since = time.monotonic()
    # a file is damaged when a run has ended; on a full disk a run goes on, and the failure of its last save is an error
    steps = {"damage": when, "disk": min(when + every + 1, steps)}.get(fault.kind, steps)
    command = [PROGRAM, fault.kind, str(fault.who), str(when), str(steps)]
    processes = join([command] * count, [{**told, "PREFETCH": str(fault.prefetch), "PLACE": fault.place}] * count)
    ended = {rank: end(one, since) for rank, one in enumerate(processes) if rank != fault.who}
    now = time.time()
    if fault.kind == "stop":
        processes[fault.who].kill()
    ended[fault.who] = end(processes[fault.who], since)
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


def _seen(start: Start, after: Start, right: dict[int, str]) -> Seen:
    """What is seen of a fault, in the start in which it comes and in the one after it."""
    fault = start.fault
    assert fault is not None
    if fault.kind == "damage":  # it is seen at the next start
        others = after.ended
    else:
        others = [one for rank, one in enumerate(start.ended) if rank != fault.who]
    first, second, line, wrong = start.steps, after.steps, _line(fault, others), ""
    codes = [one.code for one in (start.ended if fault.kind == "damage" else others)]
    if not line:
        wrong = f"nobody says {_said(fault)!r}: {[one.err[-800:] for one in others]}"
    elif start.seconds > (limit := eval(fault.limit, {"p": PATIENCE})):
        wrong = f"it took {start.seconds:.1f} s, not {limit}"
    elif not set(codes) <= set(fault.codes):
        wrong = f"exit codes {codes}"
    elif first and second and min(second) > max(first) + 1:
        wrong = f"it does not go on: {[one.err[-800:] for one in after.ended]}"
    elif any(said != right[step] for one in (first, second) for step, said in one.items()):
        wrong = "the losses or samples are not those of a run that nothing disturbed"
    again = steps_of(start.ended[0].out).keys() & second.keys()  # those after a fault of numbers too
    return Seen(start.seconds, line, len(again), wrong)


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


IN_ONE_RUN = 7  # random faults
KINDS = ["kill", "stop", "sleep", "raise", "disk", "damage", "flip", "nan", "network", "batch", "silent", "writer"]
ANYWHERE = ["kill", "stop", "sleep", "raise"]
PLACES = ["step", "step", "import", "init", "restore", "compile", "data", "save", "end"]
SLEEPS = "rank {who} on \\S+ .*`time.sleep"
NEVER = "DEADLINE_EXCEEDED|Deadline Exceeded"  # JAX does not say who has not joined


def drawn(kind: str, who: int, place: str) -> Fault:
    """A fault of a kind in a process and at a place, among more than two of them on few cores."""
    of_it = [one for one in FAULTS if one.kind == kind]
    base = next((one for one in of_it if one.who == who), of_it[0])
    said, codes, limit = base.said, base.codes, {"2": "15", "10": "25"}.get(base.limit, f"{base.limit} + 10")
    if kind == "flip":
        said = "device \\d+ \\(rank {who} on \\S+ differs"
    if kind == "sleep":
        said = SLEEPS
    if kind == "kill" and who:
        said = f"{said}|rank {{who}} on \\S+ has ended"
    if kind in ("kill", "network", "raise") and who == 0:
        said = f"{said}|{COORDINATOR}|the leader task|Connection closed by peer"
    if kind in ("kill", "network", "raise", "stop"):
        codes = (75, 1)  # JAX may be the first to see it
    if place in ("restore", "compile"):  # which have a patience of their own
        limit = f"4 * p + {limit}"
    if place in ("import", "init"):
        said, codes, limit = NEVER, (1,), f"3 * {JOIN} + 25"
    codes = (*codes, -6)  # where process 0 ends first, JAX aborts the others
    return replace(base, said=said, who=who, codes=codes, limit=limit, place=place)


def draw_run(draw: random.Random, several: int, count: int, steps: int, every: int) -> list[tuple[Fault, int]]:
    """Faults of one run with their steps: each after another save than the one before it, and at most one at the end."""
    apart, found = (steps - 2 * every) // several, []
    for number in range(several):
        place = draw.choice(PLACES[: None if number == several - 1 else -1])
        kind = draw.choice(KINDS if place == "step" else ANYWHERE)
        when = every + 1 + number * apart + draw.randrange(max(apart - 2 * every, 1))
        found.append((drawn(kind, draw.randrange(count), place), when))
    return found


def at_random(number: int, seed: int, steps: int) -> tuple[int, list[str]]:
    """That many random faults, several of them in each run of two or three processes: how many of them are not as they
    should be, and the lines of a table."""
    draw, seen, since = random.Random(seed), list[tuple[Fault, Seen]](), time.monotonic()
    for count in itertools.cycle([2, 3]):
        if len(seen) == number:
            break
        every = max(steps // 20, 2)
        several = min(IN_ONE_RUN, number - len(seen), max((steps - 2 * every) // (2 * every + 2), 1))
        faults = draw_run(draw, several, count, steps, every)
        for (fault, when), one in zip(faults, see(faults, count=count, steps=steps, every=every), strict=True):
            where = f"{fault.kind} in {fault.who} of {count}, {fault.place} at {when}"
            print(f"{len(seen)}: {where}: {one.seconds:.1f} s, {one.lost} again. {one.wrong}", flush=True)
            seen.append((fault, one))
        print(f"   {(time.monotonic() - since) / len(seen):.1f} s for each of {len(seen)}", flush=True)
        print("\n".join(summary(seen, seed)), flush=True)
    return sum(bool(one.wrong) for _, one in seen), summary(seen, seed)


def summary(seen: Sequence[tuple[Fault, Seen]], seed: int) -> list[str]:
    """What the page says of random faults: by place, how many were as they should be, and the longest time."""
    bad = sum(bool(one.wrong) for _, one in seen)
    rows = [f"{len(seen)} faults, seed {seed}: {len(seen) - bad} as they should be, {bad} not.", ""]
    rows += ["| place | kinds | faults | not as they should be | seconds, at most |", "|---|---|---|---|---|"]
    for place in dict.fromkeys(PLACES):
        here = [(fault, one) for fault, one in seen if fault.place == place]
        kinds = ", ".join(sorted({fault.kind for fault, _ in here}))
        most = max((one.seconds for _, one in here), default=0.0)
        rows.append(f"| {place} | {kinds} | {len(here)} | {sum(bool(one.wrong) for _, one in here)} | {most:.1f} |")
    return rows


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
        bad, lines = at_random(options.random, options.seed, options.steps)
        if options.write:
            CAMPAIGN.write("\n".join(lines))
        return min(bad, 1)
    rows, bad = [], 0
    for fault in FAULTS:
        if not options.only or fault.name in options.only:
            [seen] = see([(fault, 5)])
            rows.append(row(fault, seen))
            bad += bool(seen.wrong)
            print(fault.name, rows[-1], seen.wrong, sep="\n  ", flush=True)
    if options.write:
        TABLE.write("\n".join([HEAD, *rows]))
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
