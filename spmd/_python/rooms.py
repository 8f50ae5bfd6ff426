"""The doors of rooms: what `dir` shows, and what the error for an unknown name says.

It is loaded with the package, so it imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, NoReturn

_OPS = ("sum", "mean", "max", "min", "prod", "any", "all", "logsumexp")

# What other libraries call it, and how it is written here.
ELSEWHERE = {
    **{op: f'spmd.reduce(x, "b/dp d -> d", "{op}")' for op in _OPS},
    "pmean": 'spmd.reduce(x, "b/dp d -> d", "mean")',
    "pmax": 'spmd.reduce(x, "b/dp d -> d", "max")',
    "pmin": 'spmd.reduce(x, "b/dp d -> d", "min")',
    "allreduce": 'spmd.psum(x, "d {U:dp} -> d")',
    "all_reduce": 'spmd.psum(x, "d {U:dp} -> d")',
    "reduce_scatter": 'spmd.psum_scatter(x, "d {U:dp} -> d/dp")',
    "gather": 'spmd.all_gather(x, "b/dp d -> b d")',
    "scatter": 'spmd.split(x, "b d -> b/dp d")',
    "collective_permute": 'spmd.shift(x, "[b/dp] d", 1)',
    "sendrecv": 'spmd.shift(x, "[b/dp] d", 1)',
    "matmul": 'spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")',
    "dot": 'spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")',
    "transpose": 'spmd.rearrange(x, "b/dp d -> d b/dp")',
    "reshape": 'spmd.rearrange(x, "b/dp (h k) -> b/dp h k", h=4)',
    "arange": 'spmd.iota("b/dp")',
    "linear": 'spmd.nn.column_linear(x, w, tp="tp")',
    "dense": 'spmd.nn.column_linear(x, w, tp="tp")',
    "attention": "spmd.nn.dot_product_attention(q, k, v, causal=True)",
    "shard_map": '@spmd.kernel("b/dp d -> b/dp d", mesh=mesh)',
    "pjit": '@spmd.kernel("b/dp d -> b/dp d", mesh=mesh)',
    "jit": '@spmd.kernel("b/dp d -> b/dp d", mesh=mesh)',
    "with_sharding_constraint": 'spmd.annotate(x, "b/dp d")',
    "device_put": 'spmd.shard(x, "b/dp d", mesh=mesh)',
    "layouts": 'spmd.match_layouts(x, {"**": "b/dp d"})',
    "PartitionSpec": 'spmd.Layout("b/dp d").spec',
    "Mesh": "spmd.make_mesh(dp=2, tp=4)",
}


def in_turn(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Decorate what loads a room: one thread at a time does so.

    Python's own locks are one for each module. Threads that load a package and a module of it at once get half of them,
    those of JAX too. A thread in the middle of a module of ours holds such a lock, for which the one that loads may be
    waiting: it does not wait for its turn.
    """
    lock = threading.RLock()

    def loaded(name: str) -> Any:
        with contextlib.nullcontext() if _inside_a_module() else lock:
            return load(name)

    return loaded


def _inside_a_module() -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").startswith("spmd."):
            return True
        frame = frame.f_back
    return False


def open_room(names: dict[str, Any]) -> None:
    """Give a module a `__dir__` of its public names, and a `__getattr__` for names that it does not have.

    Args:
      names: The module's `globals()`. Type checkers do not see the two functions, and so refuse wrong names.
    """
    room = names["__name__"]
    names["__dir__"] = lambda: dir_of(names)
    names["__getattr__"] = lambda name: no_such_name(room, name)


def dir_of(names: dict[str, Any]) -> list[str]:
    """The public names of a module, and what Python keeps in it."""
    return sorted({*names["__all__"], *(name for name in names if name.startswith("__"))})


def no_such_name(room: str, name: str) -> NoReturn:
    """Say that a room has no such name, and which it may be.

    Raises:
      AttributeError: Always. It has no object, so that Python adds no guess of its own.
    """
    hint = "" if name.startswith("_") else _hint_for(room, name)
    raise AttributeError(f"module {room!r} has no attribute {name!r}{hint}", name=name)


def _hint_for(room: str, name: str) -> str:
    """Return what follows in the error for an unknown name: what to write, the name that it resembles, or nothing."""
    if name in ELSEWHERE:
        return f": write {ELSEWHERE[name]}"
    known = dict(_public(room))
    asked = _plain(name)
    exact = [path for path, one in known.items() if one == name]  # in another room
    same = exact or [path for path, one in known.items() if _plain(one) == asked]
    if not same and (own := _of_jax(name)):
        return f": write {own}, which is right where the dimensions it works along are whole"
    for some in (same, [path for path in known if path.rpartition(".")[0] == room], known):
        if near := nearest(name, [known[path] for path in some]):
            path = next(path for path in some if known[path] == near)
            return f"; did you mean '{path}'?"
    return ""


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _public(room: str) -> Iterator[tuple[str, str]]:
    """All public names by their paths: those of the room first, then those of the package, then those of its rooms."""
    top = sys.modules["spmd"]
    rooms = [f"spmd.{name}" for name in top.__all__ if isinstance(getattr(top, name), type(top))]
    for home in dict.fromkeys((room, "spmd", *rooms)):
        yield from ((f"{home}.{name}", name) for name in import_module(home).__all__)


def _of_jax(name: str) -> str:
    """Return how JAX's own function of that name is called."""
    for module, short in (("jax.numpy", "jnp"), ("jax.nn", "jax.nn"), ("jax.numpy.linalg", "jnp.linalg")):
        if hasattr(import_module(module), name):
            return f"{short}.{name}"
    return ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like this one; None where none is close."""
    import difflib

    if len(name) > 100:  # difflib takes the square of it
        return None
    names = [str(one) for one in known]
    folded = {one.lower(): one for one in reversed(names)}
    turned = [one for key, one in folded.items() if sorted(key) == sorted(name.lower())]
    if turned:  # "pd" is dp, and not tp
        return turned[0]
    cutoff = 0.5 if len(name) <= 3 else 0.6
    near = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=cutoff)
    return folded[near[0]] if near else None
