"""Whether all processes have the same facts: an all-gather of hashes, and of the facts only where the hashes differ."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd._jaxprs import errors as jax_errors

T = TypeVar("T")

_LINE = 160  # characters of a line that processes have differently


def disagreements(facts: Mapping[str, Any]) -> list[str]:
    """Return what differs between processes, one line for each fact; empty where all have the same.

    Every process calls it with facts of its own, which JSON can write, and all get the same lines.

    Communication: an all-gather of 32 bytes per process; where the hashes differ, one of the facts.
    """
    if jax.process_count() == 1:
        return []
    text = json.dumps(facts, sort_keys=True, default=str).encode()
    if _alike(text):
        return []
    return differences(dict(enumerate(map(json.loads, _gather(text)))))


def differences(facts: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return what differs of the facts of some ranks, one line for each fact."""
    names = list(dict.fromkeys(name for one in facts.values() for name in one))
    lines = [_difference(name, {rank: one.get(name) for rank, one in facts.items()}) for name in names]
    return [line for line in lines if line]


def first_difference(lines: Sequence[str]) -> str:
    """The first line that processes have differently, with the ranks; empty where all have the same.

    Communication: an all-gather of 32 bytes per process; where the lines differ, one for each halving of their number,
    and the beginning of that line.
    """
    if jax.process_count() == 1 or _alike("\n".join(lines).encode()):
        return ""
    same, other = 0, int(gathered(np.array([len(lines)], np.int32)).max())
    while other - same > 1:
        middle = (same + other) // 2
        same, other = (middle, other) if _alike("\n".join(lines[:middle]).encode()) else (same, middle)
    [line] = lines[same : same + 1] or [None]
    if line is not None and len(line) > _LINE:  # of a large constant, say
        line = f"{line[:_LINE]}... #{hashlib.sha256(line.encode()).hexdigest()[:8]}"
    return _held(f"line {same + 1:05}", dict(enumerate(everyone(line))))


def everyone(value: Any) -> list[Any]:
    """The values of all processes, which JSON can write, by rank; all of them call it.

    Communication: in several processes, an all-gather of the values.
    """
    return [json.loads(one) for one in _gather(json.dumps(value).encode())]


def gathered(row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The rows of all processes, by rank. JAX's own `process_allgather` wants as many devices in each of them."""
    if jax.process_count() == 1:
        return row[None]
    of_process: dict[int, list[Any]] = collections.defaultdict(list)
    for one in jax.devices():
        of_process[one.process_index].append(one)
    least = min(map(len, of_process.values()))
    devices = np.array([of_process[rank][:least] for rank in sorted(of_process)])
    mesh = Mesh(devices, ("processes", "devices"))
    split, copied = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("processes",), ()))
    rows = jax.make_array_from_process_local_data(split, row[None], (len(devices), *row.shape))
    with jax.set_mesh(mesh):  # the program's own one has other devices
        whole = jax.jit(_itself, out_shardings=copied)(rows)
    return np.asarray(whole.addressable_data(0))


def _itself(x: jax.Array) -> jax.Array:
    return x


def _alike(text: bytes) -> bool:
    """Return whether all processes have the same bytes."""
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
    return len(np.unique(gathered(digest), axis=0)) == 1


def anywhere(*faults: str) -> list[str]:
    """Each fault, with the ranks where processes differ; empty where all is well. All processes take part.

    Communication: an all-gather of 32 bytes per process; where they differ, one of the faults.
    """
    named = {f"{i}": fault for i, fault in enumerate(faults)}
    different = dict(line.split(": ", 1) for line in disagreements(named))
    return [different.get(i, fault) for i, fault in named.items()]


def in_all(step: Callable[[], T], fault: Callable[[str], Exception], *errors: type[Exception]) -> T:
    """Return what a step gives in this process; all take part. What one of them could not do is a fault in all.

    Communication: that of `anywhere`.
    """
    found, told = None, ""
    try:
        found = step()
    except errors as error:
        told = jax_errors.first_line(error)
    [told] = anywhere(told)
    if told:
        raise fault(told)
    return cast(T, found)


def _gather(payload: bytes) -> list[bytes]:
    """The bytes of each process, which may be of different length."""
    lengths = gathered(np.array([len(payload)], np.int32)).reshape(-1)
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    return [row[:n].tobytes() for row, n in zip(gathered(padded), lengths, strict=True)]


def _difference(name: str, by_rank: Mapping[int, Any]) -> str:
    """Return what the processes have of one fact; of a dict, which of its entries differ."""
    values = [*by_rank.values()]
    if all(isinstance(value, dict) for value in values) and any(value != values[0] for value in values):
        return _entries(name, by_rank)
    return _held(name, by_rank)


def _held(name: str, by_rank: Mapping[int, Any]) -> str:
    """Return who has which value of one fact, those who are fewest first; empty where all have the same."""
    holders: dict[str, list[int]] = collections.defaultdict(list)
    for rank, value in by_rank.items():
        holders[json.dumps(value, sort_keys=True)].append(rank)
    if len(holders) == 1:
        return ""
    fewest = sorted(holders.items(), key=lambda one: (len(one[1]), one[1]))
    return f"{name}: " + "; ".join(f"{ranks(who)}: {_short(text)}" for text, who in fewest)


def _entries(name: str, by_rank: Mapping[int, dict[str, Any]]) -> str:
    """Return which entries of a dict differ, and who has the rarer value."""
    keys = sorted({key for one in by_rank.values() for key in one})
    found = []
    for key in keys:
        column = {rank: json.dumps(one.get(key), sort_keys=True) for rank, one in by_rank.items()}
        common = collections.Counter(column.values()).most_common(1)[0][0]
        if odd := [rank for rank, text in column.items() if text != common]:
            found.append(f"{key} ({ranks(odd)})")
    return f"{name}: {', '.join(found[:8])}{', ...' * (len(found) > 8)} differ from the other processes'"


def ranks(numbers: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2, 3`."""
    shown = ", ".join(map(str, numbers[:8])) + ", ..." * (len(numbers) > 8)
    return f"rank{'s' * (len(numbers) > 1)} {shown}"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
