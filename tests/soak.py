"""Random programs for as long as there is time: `python -m tests.soak --minutes 30 --seed 1`.

Each program is drawn from a family: verbs, changes of layout, copies, transformations, operations, Fourier transforms,
stencils, layers, placements (`tests/programs.py`), and further calls of kernels, bodies for the checker, and `sampled`: any
test of the suite that is parametrised over `seeds`, with a fresh seed. Values and gradients are compared in all modes with
plain JAX on whole arrays and, where it has the operation, with the simulator. A child process runs the programs, so that
an abort of the compiler is one failure among others, and memory is bounded.

A failure is printed with the line that runs it again, and then made smaller: its choices are replaced by simpler ones, the
first of each list, one after another, for as long as it fails in the same way: fewer axes, smaller sizes, plainer
spellings. The exit status is 1 if anything failed.

    --minutes 30       stop after so long          --only verbs,einsum    these families only
    --programs 20000   or after so many            --list                 the families, and how often they are drawn
    --seed 1           another seed, other ones    --choices S:1,0,2      one program again, by its choices
"""

import argparse
import collections
import concurrent.futures
import contextlib
import gc
import importlib
import inspect
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from spmd.modes import MODES
from tests.checker import random_programs
from tests.checker.test_names import NAMES, Drawn
from tests.checker.test_soundness import called_equal
from tests.conftest import FULL_CASES
from tests.kernels import test_sampled_calls
from tests.programs import FAMILIES, Program, attempt
from tests.sampler import Choices

BATCH = 8  # programs in one compilation
LIFE = 1500  # programs that one child process runs
MEMORY = 3 << 30  # bytes after which it ends early
SHRINKING = 25.0  # seconds of this process for each failure, so that a busy machine finds the same
HERE = Path(__file__).parent


@dataclass
class Result:
    """What came of one program."""

    family: str
    seed: int
    text: str
    modes: Sequence[str] = ()
    gradient: bool = False
    fault: str = ""
    again: str = ""
    smaller: str = ""


@dataclass
class Tally:
    """What was run so far."""

    programs: collections.Counter[str] = field(default_factory=collections.Counter)
    gradients: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: collections.Counter[str] = field(default_factory=collections.Counter)
    modes: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, one: Result) -> None:
        self.programs[one.family] += 1
        self.gradients[one.family] += one.gradient
        self.failures[one.family] += bool(one.fault)
        counts = self.modes.setdefault(one.family, collections.Counter())
        for mode in one.modes:
            counts[mode] += 1

    def table(self, seed: int) -> str:
        rows = [("family", "programs", "gradients", "failures", "in modes")]
        for name in sorted(self.programs):
            modes = ", ".join(f"{mode} {n}" for mode, n in self.modes[name].items())
            rows.append((name, *(str(c[name]) for c in (self.programs, self.gradients, self.failures)), modes))
        total = sum(self.programs.values())
        rows.append(("all", *(str(sum(c.values())) for c in (self.programs, self.gradients, self.failures)), ""))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        line = lambda row: "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3)), row[4]])
        spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu = sum(one.ru_utime + one.ru_stime for one in spent)
        rates = [
            f"{n:.0f} s {what}, {total / max(n, 1e-9):.1f} programs/s"
            for n, what in ((self.seconds, "in all"), (cpu, "of CPU"))
        ]
        last = f"jax {jax.__version__}, seed {seed}, {'; '.join(rates)}"
        return "\n".join([*map(line, rows), last])


# -------------------- what is not compiled together with others


def call(choices: Choices) -> Result:
    """A kernel called in any of the ways in which kernels are called."""
    case = test_sampled_calls.Case(choices)
    test_sampled_calls.check(case)
    return Result("calls", choices.seed, str(case), (case.mode,), case.how == "gradient")


def soundness(choices: Choices) -> Result:
    """A body by hand: what the checker calls equal is equal."""
    called_equal(choices)
    return Result("checker", choices.seed, "a random body", ("explicit",))


def bodies(make: Callable[[Choices], random_programs.Random]) -> Callable[[Choices], Result]:
    """A family of `random_programs`, of which what is wrong must be a finding, and what is right must be none."""

    def run(choices: Choices) -> Result:
        text, outcome = random_programs.judged(choices, make)
        return Result(make.__name__, choices.seed, text, (outcome,))

    run.__doc__ = make.__doc__
    return run


def names(choices: Choices) -> Result:
    """Square arrays, and one string with its names in another order: found where other sizes refuse it."""
    program, mode = Drawn(choices.below(1 << 20)), choices.choice(MODES)
    place, order = choices.choice(program.strings()), tuple(choices.permutation(list(NAMES)))
    refused = program.judged(place, order, mode)
    return Result("names", choices.seed, f"{program.signature} as {order} at {place}", (mode, *["found"] * refused))


def threads(choices: Choices) -> Result:
    """Bodies that are checked, explained and run as a reference from a pool of threads, as from one."""
    several = [choices.choice([*random_programs.FAMILIES])(choices) for _ in range(2)]
    kernels = [spmd.kernel(one.pattern, mesh=spmd.make_mesh(**one.mesh), check="warn")(one.body) for one in several]

    def asked(i: int) -> list[Any]:
        found = [
            lambda: str(spmd.check(kernels[i], *several[i].args)),
            lambda: spmd.explain(kernels[i], *several[i].args),
        ]
        return [
            answer(one) for one in (*found, lambda: jax.tree.map(np.asarray, kernels[i].reference(*several[i].args)))
        ]

    with warnings.catch_warnings(), concurrent.futures.ThreadPoolExecutor(4) as pool:
        warnings.simplefilter("ignore")
        together = [*pool.map(asked, [*range(len(several))] * 2)]
        for i, found in enumerate(together):
            alone = asked(i % len(several))
            assert str(found) == str(alone), (
                f"{several[i % len(several)].text}: {found} from a thread, and {alone} alone"
            )
    return Result("threads", choices.seed, "; ".join(one.text for one in several), ("a pool",))


def answer(ask: Callable[[], Any]) -> str:
    try:
        return str(ask())
    except spmd.errors.SpmdError as error:
        return f"{type(error).__name__}: {error}"


def sampled(choices: Choices) -> Result:
    """Any test that is parametrised over seeds, with this one."""
    test, given, name = sampled_call(choices)
    with contextlib.suppress(pytest.skip.Exception):
        test(**given)
    return Result("sampled", choices.seed, name, ("as the test says",), "grad" in name or "deriv" in name)


def sampled_call(choices: Choices) -> tuple[Callable[..., None], dict[str, Any], str]:
    """A test, its arguments, and its name as pytest knows it."""
    path, test = choices.choice(sampled_tests())
    given, ids, first = {}, [], 0
    for mark in test.pytestmark:  # the innermost decorator comes first, in pytest's names too
        names = [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else list(mark.args[0])
        if names == ["seed"]:
            first = mark.args[1][0]
            given["seed"] = value = first + choices.seed
            ids.append(str(value))
            continue
        values = list(mark.args[1])
        at = choices.below(len(values))
        given |= dict(zip(names, values[at] if len(names) > 1 else [values[at]], strict=True))
        plain = isinstance(values[at], str | int | bool | float | None)
        ids.append(str(values[at]) if plain else f"{names[0]}{at}")
    return test, given, f"{path}::{test.__name__}[{'-'.join(ids)}]"


_tests: list[tuple[str, Any]] = []


def sampled_tests() -> list[tuple[str, Any]]:
    """All tests whose arguments are a seed and things that stand beside it."""
    for path in sorted(HERE.rglob("test_*.py")) if not _tests else ():
        name = ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
        if "seeds(" not in path.read_text() or name == "tests.test_soak":
            continue
        for test in vars(importlib.import_module(name)).values():
            marks = [m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
            seeded = [m for m in marks if m.args[0] == "seed" and isinstance(m.args[1], range)]
            named = [
                n.strip() for m in marks for n in (m.args[0].split(",") if isinstance(m.args[0], str) else m.args[0])
            ]
            own = seeded and len(marks) == len(test.pytestmark) and test.__module__ == name
            if own and {*named} == {*inspect.signature(test).parameters}:
                _tests.append((str(path.relative_to(HERE.parent)), test))
    return _tests


ALONE: dict[str, tuple[Callable[[Choices], Result], int]] = {
    "calls": (call, 2),
    "checker": (soundness, 1),
    **{make.__name__: (bodies(make), often) for make, often in random_programs.FAMILIES.items()},
    "names": (names, 6),
    "threads": (threads, 1),
    "sampled": (sampled, 1),
}


# -------------------- one after another


def order(seed: int, only: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Families and seeds, without end."""
    names = [name for name, (_, often) in {**FAMILIES, **ALONE}.items() for _ in range(often) if name in only]
    dice = random.Random(seed)
    while True:
        yield dice.choice(names), dice.randrange(1 << 28)


def reproduced(family: str, seed: int) -> str:
    """The line that runs a program again."""
    if family == "sampled":
        name = sampled_call(Choices(seed))[2]
        return f"SPMD_TEST_SEED={seed} SPMD_TEST_CASES=1 python -m pytest '{name}'"
    cases = FULL_CASES if family in ALONE else 1  # of those that run alone, the default suite takes a share
    return (
        f"SPMD_TEST_SEED={seed} SPMD_TEST_CASES={cases} "
        f"python -m pytest 'tests/test_soak.py::test_programs[{family}-{seed}]'"
    )


def run_one(family: str, choices: Choices) -> tuple[Result, Exception | None]:
    """One program by itself."""
    text = ""
    try:
        if family in ALONE:
            return ALONE[family][0](choices), None
        program = FAMILIES[family][0](choices)
        text = program.text
        return summary(family, choices.seed, program), attempt([program])[0]
    except Exception as error:
        return Result(family, choices.seed, text), error


def summary(family: str, seed: int, program: Program) -> Result:
    return Result(family, seed, program.text, tuple(program.runs), program.gradient)


def told(error: Exception) -> str:
    text = str(error).strip().split("\n--------------------")[0]
    return f"{type(error).__name__}: {text[:1500]} {' '.join(getattr(error, '__notes__', ()))}".strip()


def alike(error: Exception) -> str:
    """What two faults of one kind share."""
    return f"{type(error).__name__} {str(error).strip().split(':')[0][:40]}"


def smaller(family: str, choices: Choices, error: Exception, seconds: float = SHRINKING) -> tuple[list[int], Result]:
    """The simplest choices found that fail in the same way: zeros from some place on, then one zero or half at a time."""
    best, text, until = list(choices.drawn), None, time.process_time() + seconds

    def fails(tried: list[int]) -> bool:
        nonlocal text, best
        again = Choices(choices.seed, tried)
        result, fault = run_one(family, again)
        if fault is None or alike(fault) != alike(error):
            return False
        text, best = result, again.drawn
        return True

    keep = len(best)
    while keep and time.process_time() < until:
        keep = keep // 2
        if not fails(best[:keep]):
            break
    for i in range(len(best)):
        for value in (0, best[i] // 2) if i < len(best) and best[i] else ():
            if time.process_time() > until or (value < best[i] and fails([*best[:i], value, *best[i + 1 :]])):
                break
    return best, text or run_one(family, Choices(choices.seed, best))[0]


def judged(result: Result, choices: Choices, error: Exception, seen: collections.Counter[str]) -> Result:
    """A failure with the line that runs it again, and smaller where it is the first of its kind."""
    result.fault, result.again = told(error), reproduced(result.family, result.seed)
    seen[f"{result.family} {alike(error)}"] += 1
    if result.family != "sampled" and seen[f"{result.family} {alike(error)}"] == 1:
        best, small = smaller(result.family, choices, error)
        numbers = ",".join(map(str, best))
        result.smaller = (
            f"{small.text}\n    python -m tests.soak --only {result.family} --choices {result.seed}:{numbers}"
        )
    return result


def work(todo: Iterator[tuple[str, int]], most: int, until: float, say: Callable[[str, Any], None]) -> Iterator[Result]:
    """Run programs until there were enough, the time is over or memory is full."""
    waiting: dict[int, list[tuple[str, Choices, Program]]] = {}
    seen: collections.Counter[str] = collections.Counter()
    drawn = batches = 0
    while drawn < most and time.time() < until:
        drawn += 1
        family, seed = next(todo)
        choices = Choices(seed)
        if family in ALONE:
            say("about", [(family, seed)])
            result, error = run_one(family, choices)
            yield judged(result, choices, error, seen) if error else result
            continue
        try:
            program = FAMILIES[family][0](choices)
        except Exception as error:
            yield judged(Result(family, seed, ""), choices, error, seen)
            continue
        batch = waiting.setdefault(program.devices, [])
        batch.append((family, choices, program))
        if len(batch) == BATCH:
            yield from finished(waiting.pop(program.devices), seen, say)
            batches += 1
            if batches % 10 == 0:
                jax.clear_caches()
                gc.collect()
            if resident() > MEMORY:
                break
    for batch in waiting.values():
        yield from finished(batch, seen, say)


def finished(batch: Any, seen: Any, say: Callable[[str, Any], None]) -> Iterator[Result]:
    say("about", [(family, choices.seed) for family, choices, _ in batch])
    for (family, choices, program), error in zip(batch, attempt([p for _, _, p in batch]), strict=True):
        result = summary(family, choices.seed, program)
        yield judged(result, choices, error, seen) if error else result


def resident() -> int:
    """Bytes of memory that this process has, where the system says so."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# -------------------- the child, and who looks after it


def child(options: argparse.Namespace) -> int:
    """Run the programs that the parent names, each line of the output saying one thing as JSON."""
    todo = [(family, int(seed)) for family, seed in json.loads(sys.stdin.read())]
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is not a line of ours

    def say(kind: str, what: Any) -> None:
        print(json.dumps([kind, what]), file=lines, flush=True)

    for result in work(iter(todo), len(todo), options.until, say):
        say("result", asdict(result))
    return 0


def listen(todo: Sequence[tuple[str, int]], until: float) -> Iterator[tuple[str, Any]]:
    """What a child says of these programs; at the end how it ended."""
    command = [sys.executable, "-m", "tests.soak", "--child", "--until", str(until)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=HERE.parent) as process:
        assert process.stdin and process.stdout and process.stderr
        errors: collections.deque[str] = collections.deque(maxlen=60)
        drain = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
        drain.start()
        process.stdin.write(json.dumps(todo))
        process.stdin.close()
        for line in process.stdout:
            kind, what = json.loads(line)
            yield kind, what
        process.wait()
        drain.join(5)
    yield (
        "end",
        (process.returncode, "".join(line for line in errors if "heck failed" in line or "Error" in line)[:500]),
    )


def supervised(options: argparse.Namespace) -> Iterator[Result]:
    """The results of one child after another. What a child died of is run again, each program by itself."""
    rest: list[tuple[str, int]] = []
    fresh = itertools.islice(order(options.seed, options.only), options.programs)
    while time.time() < options.until and (rest := rest or list(itertools.islice(fresh, LIFE))):
        about: list[tuple[str, int]] = []
        before = len(rest)
        for kind, what in listen(rest, options.until):
            if kind == "about":
                about = [(family, seed) for family, seed in what]
            elif kind == "result":
                one = Result(**what)
                rest = [each for each in rest if each != (one.family, one.seed)]
                about = [each for each in about if each != (one.family, one.seed)]
                yield one
            elif what[0] and not about:
                raise SystemExit(f"the child ended with {what[0]}: {what[1]}")
            elif what[0]:
                rest = [each for each in rest if each not in about]
                yield from itertools.starmap(alone, about)
        if len(rest) == before:
            break  # out of time


def alone(family: str, seed: int) -> Result:
    """One program in a child of its own."""
    found = Result(family, seed, "")
    for kind, what in listen([(family, seed)], float("inf")):
        if kind == "result":
            found = Result(**what)
        elif kind == "end" and what[0]:
            found.fault, found.again = f"the process ended with {what[0]}: {what[1]}", reproduced(family, seed)
    return found


# -------------------- the command


def main(given: Sequence[str] | None = None) -> int:
    """Run, print each failure as it comes, and at the end what was run."""
    options = parsed(given)
    if options.list:
        for name, (make, often) in {**FAMILIES, **ALONE}.items():
            print(f"{name:20} {often}  {(inspect.getdoc(make) or '').splitlines()[0] if make.__doc__ else ''}".rstrip())
        return 0
    if options.child:
        return child(options)
    if options.choices:
        return chosen(options)
    tally, start = Tally(), time.monotonic()
    results = (
        work(order(options.seed, options.only), options.programs, options.until, lambda *_: None)
        if options.in_process
        else supervised(options)
    )
    last = start
    for one in results:
        tally.add(one)
        tally.seconds = time.monotonic() - start
        if one.fault:
            print(f"\nFAILED {one.family}: {one.text}\n    {one.fault}\n    {one.again}", flush=True)
            if one.smaller:
                print(f"  smaller: {one.smaller}", flush=True)
        if time.monotonic() - last > 60:
            last = time.monotonic()
            total, bad = sum(tally.programs.values()), sum(tally.failures.values())
            print(f"... {total} programs, {bad} failures, {tally.seconds:.0f} s", flush=True)
    print(tally.table(options.seed), flush=True)
    return int(any(tally.failures.values()) or not tally.programs)


def chosen(options: argparse.Namespace) -> int:
    """One program by its choices."""
    seed, _, drawn = options.choices.partition(":")
    replay = [int(n) for n in drawn.split(",")] if drawn else None
    result, error = run_one(options.only[0], Choices(int(seed), replay))
    print(result.text)
    print(told(error) if error else "as it should be")
    return int(error is not None)


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=10**9)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--choices", default="")
    for hidden in ("--child", "--in-process"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    known = [*FAMILIES, *ALONE]
    options.only = options.only.split(",") if options.only else known
    unknown = [name for name in options.only if name not in known]
    if unknown:
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(known)}")
    minutes = options.minutes or (1e6 if options.programs < 10**9 else 1)
    options.until = float(options.until) if options.until else time.time() + 60 * minutes
    return options


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  eight devices, strict JAX

    np.seterr(all="ignore")
    sys.exit(main())
