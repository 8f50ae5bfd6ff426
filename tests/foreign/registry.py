"""Bodies of public code: each a raw `shard_map` program, and what it computes on whole arrays.

Each is rewritten and reduced: what it communicates is as it was. `like` names the repository, the file and the line.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

Build = Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclass(frozen=True)
class Foreign:
    """A program.

    Attributes:
      name: Its name.
      build: From a mesh to a function and its arguments.
      like: Where code like this is published: `owner/name path:line`.
      oracle: The same on whole arrays.
      sizes: The axes of its mesh.
      finds: The kinds of findings that `spmd.check` has of it, where it is wrong as published.
      stays: How many of its collectives no string says, and so stay.
      mapped: Whether its `shard_map` stays too, because the checker refuses it as a kernel.
      own: Whether it means each device's own block, which a kernel says with `spmd.per_shard`.
      asks: The kinds of findings that are questions without the oracle: it is right, and meant per shard.
    """

    name: str
    build: Build
    like: str
    oracle: Callable[..., Any]
    sizes: dict[str, int]
    finds: tuple[str, ...] = ()
    stays: int = 0
    mapped: bool = False
    own: bool = False
    asks: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """`FILE:NAME`, as `spmd port` takes it."""
        return f"{Path(self.build.__code__.co_filename)}:{self.name}"


BODIES: dict[str, Foreign] = {}


def foreign(like: str, oracle: Callable[..., Any], **words: Any) -> Callable[[Build], Build]:
    """Enter a program. A file that is read again enters nothing twice. Words that `Foreign` does not have are axes."""
    known = {name: words.pop(name) for name in ("finds", "stays", "mapped", "own", "asks") if name in words}

    def enter(build: Build) -> Build:
        BODIES.setdefault(build.__name__, Foreign(build.__name__, build, like, oracle, words, **known))
        return build

    return enter


def draw(*shape: int, seed: str = "") -> Any:
    """Numbers of a normal distribution, others for another shape or seed."""
    rng = np.random.default_rng(zlib.crc32(f"{shape}{seed}".encode()))
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def count(*shape: int, most: int) -> Any:
    """Integers below `most`."""
    rng = np.random.default_rng(zlib.crc32(f"{shape}".encode()))
    return jnp.asarray(rng.integers(0, most, size=shape), jnp.int32)
