"""What all processes have to have alike, noted where it arises and compared in the background: hashes, no contents."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from spmd._processes.copies import fingerprint, is_local, takes_part

_on = [True]  # whether processes compare by themselves
_HELD = 256  # facts that wait to be compared; nobody takes them in a program that is alone
_noted: collections.deque[tuple[str, str, Callable[[], Mapping[str, Any]]]] = collections.deque(maxlen=_HELD)
_times: collections.Counter[tuple[str, str]] = collections.Counter()
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_WORD = re.compile(r"[^\s,;(){}\[\]]+")
_SAMPLE = 2**18  # elements of an array that are hashed
# What decides which numbers a program computes; other settings may differ between hosts.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)


def compare(on: bool) -> None:
    """Say whether processes compare by themselves from now on."""
    _on[0] = on


def comparing() -> bool:
    """Return whether they do."""
    return _on[0]


def note_program(name: str, jaxpr: Any, mesh: Any) -> None:
    """Note a program that is traced, to be compared."""
    if _on[0] and takes_part(mesh):
        _note(name, lambda: {"program": _digest(jaxpr)}, str(jaxpr.in_avals))


def note_arguments(name: str, values: Iterable[tuple[str, Any]], mesh: Any) -> None:
    """Note the arguments of a call, and the settings of JAX, to be compared."""
    if _on[0] and takes_part(mesh):
        found: dict[str, Any] = {path: fingerprint(_sample(x)) for path, x in values if is_local(x)}
        found["settings"] = {one: str(getattr(jax.config, one, None)) for one in _SETTINGS}
        _note(name, lambda: found)


def noted() -> Iterable[tuple[str, str, Mapping[str, Any]]]:
    """Take what is noted: a name, what tells it from others of that name, and the facts."""
    while _noted:
        name, which, facts = _noted.popleft()
        with contextlib.suppress(Exception):  # an array may be gone meanwhile; then this process says nothing of it
            yield name, which, facts()


def _note(name: str, facts: Callable[[], Mapping[str, Any]], types: str = "") -> None:
    """Note facts that are the same in all processes where name, types and how often they came are."""
    _times[name, types] += 1
    _noted.append((name, f"{types} {_times[name, types]}", facts))


def _digest(jaxpr: Any) -> str:
    """A hash of the words of a jaxpr and of its constants: sets are written in any order, functions with addresses, and
    files with the folder of this host."""
    words = sorted(word for word in _WORD.findall(_ADDRESS.sub("", str(jaxpr))) if ".py" not in word)
    words += [fingerprint(_sample(x)) for x in getattr(jaxpr, "consts", ()) if is_local(x)]
    return f"#{hashlib.sha256(' '.join(words).encode()).hexdigest()[:16]}"


def _sample(x: Any) -> Any:
    """An array; of very many elements, equally many of those of the host, and none of those of devices."""
    size = np.size(x)
    if size <= _SAMPLE:
        return x
    return 0 if isinstance(x, jax.Array) else np.asarray(x).reshape(-1)[:: size // _SAMPLE]
