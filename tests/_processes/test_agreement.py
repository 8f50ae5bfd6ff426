"""What differs between processes, as each of them says it."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from spmd._processes import agreement as _agreement
from spmd._processes.agreement import disagreements, ranks


@pytest.fixture
def together(monkeypatch):
    """The lines that a process gets when all processes have these facts: the gathers are played one after another."""

    def run(facts, rank=0):
        texts = [json.dumps(one, sort_keys=True, default=str).encode() for one in facts]
        digests = np.stack([np.frombuffer(_agreement.hashlib.sha256(one).digest(), np.uint8) for one in texts])
        lengths = np.array([[len(one)] for one in texts], np.int32)
        padded = np.stack([np.frombuffer(one.ljust(lengths.max(), b"\0"), np.uint8) for one in texts])
        answers = iter([digests, lengths, padded])

        def gather(mine):
            answer = next(answers)
            np.testing.assert_array_equal(mine, answer[rank])  # what this process gave is its row
            return answer

        monkeypatch.setattr(_agreement, "gathered", gather)
        monkeypatch.setattr(_agreement.jax, "process_count", lambda: len(facts))
        return disagreements(facts[rank])

    return run


def test_one_process_agrees_with_itself():
    assert disagreements({"a": 1}) == []


def test_equal_facts_are_no_lines(together):
    assert together([{"a": 1, "b": [2]}] * 3) == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_process_gets_the_same_lines(together, rank):
    facts = [{"jax": "0.10", "lr": 0.1}, {"jax": "0.10", "lr": 0.2}, {"jax": "0.10", "lr": 0.1}]
    assert together(facts, rank) == ["lr: rank 1: 0.2; ranks 0, 2: 0.1"]


def test_what_one_process_lacks(together):
    assert together([{"a": 1}, {"a": 1, "more": "x" * 300}]) == [f'more: rank 0: null; rank 1: "{"x" * 199}...']


def test_files_are_named(together):
    files = [{"files": {"a.py": "1", "b.py": "2"}}, {"files": {"a.py": "1", "b.py": "3"}}, {"files": {"a.py": "1"}}]
    [line] = together(files)
    assert line.startswith("files: b.py (ranks ") and "a.py" not in line


def test_many_ranks_are_shortened():
    assert ranks([3]) == "rank 3"
    assert ranks(range(12)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."


# --- lines of programs -----------------------------------------------------------------------------------------------


def played(monkeypatch, texts):
    """Run `first_difference` in as many threads as there are texts; how many bytes each process has sent, too."""
    rows, barrier, sent = [None] * len(texts), threading.Barrier(len(texts)), [0] * len(texts)
    rank = threading.local()

    def gathered(row):
        rows[rank.here] = row
        sent[rank.here] += row.nbytes
        barrier.wait()
        found = np.stack(rows)
        barrier.wait()
        return found

    def one(here):
        rank.here = here
        return _agreement.first_difference(texts[here])

    monkeypatch.setattr(_agreement, "gathered", gathered)
    monkeypatch.setattr(_agreement.jax, "process_count", lambda: len(texts))
    with ThreadPoolExecutor(len(texts)) as pool:
        found = list(pool.map(one, range(len(texts))))
    assert len(set(found)) == 1
    return found[0], sent


LINES = [f"{i}" for i in range(1000)]


@pytest.mark.parametrize("at", [0, 1, 499, 500, 998, 999])
def test_the_first_line_that_differs_is_found(monkeypatch, at):
    other = [*LINES[:at], "x", *LINES[at + 1 :]]
    other[-1] = other[-1] if at == 999 else "y"  # a later one
    found, sent = played(monkeypatch, [LINES, other, LINES])
    assert found == f'line {at + 1:05}: rank 1: "x"; ranks 0, 2: "{at}"'
    assert max(sent) < 1000


@pytest.mark.parametrize("count", [0, 1, 999])
def test_a_program_that_ends_earlier(monkeypatch, count):
    found, _ = played(monkeypatch, [LINES, LINES[:count]])
    assert found == f'line {count + 1:05}: rank 0: "{count}"; rank 1: null'


def test_equal_lines_are_no_difference(monkeypatch):
    assert played(monkeypatch, [LINES] * 3) == ("", [32] * 3)
    assert played(monkeypatch, [[]] * 2)[0] == ""


def test_a_program_of_20_megabytes_is_not_sent(monkeypatch):
    """All processes got the whole program of each: 40 GB of 2,000 hosts."""
    lines = ["  %1 = stablehlo.add %2, %3 : tensor<8x128xf32>" * 2] * 200_000
    other = [*lines[:150_000], "x" * 10**6, *lines[150_001:]]
    found, sent = played(monkeypatch, [lines, other])
    assert found.startswith('line 150001: rank 0: "  %1') and "... #" in found
    assert max(sent) < 2000
