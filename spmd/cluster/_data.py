"""Batches of a data set, of which each process reads the rows that its devices hold."""

from __future__ import annotations

import collections
import contextlib
import functools
import reprlib
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, Self

import jax
import numpy as np
from jax.sharding import Mesh

from spmd._processes.agreement import disagreements
from spmd._processes.copies import takes_part
from spmd._trees.arguments import explained
from spmd._trees.leaves import not_int
from spmd.cluster._recorder import recorder
from spmd.errors import MeshError, PlacementError, SizeError, SpmdError, is_int
from spmd.mesh import mesh_for, whole_sharding
from spmd.modes import ambient_mode, mode
from spmd.placement import shard


class Source(Protocol):
    """A data set: `len(source)` samples, of which `source[i]` reads one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@explained
def batches(
    source: Source,
    layouts: Any,
    *,
    batch: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    mesh: Any = None,
    mapping: Any = None,
    prefetch: int = 2,
    workers: int = 1,
    retries: int = 0,
) -> Batches:
    """Batches of samples as global arrays: `batches(source, "b/dp s", batch=64, seed=0)`.

    The first dimension of each layout counts the samples of a batch; the others are those of a sample. Batch i depends
    on the seed and on i alone, so every mesh and every number of processes sees the same batches. Each process reads
    only the rows that its devices hold, each of them once. Every sample comes once in each epoch, and each epoch has an
    order of its own. A batch may hold the end of one epoch and the start of the next.

    Communication: at first an all-gather of one hash over the processes, which compares numbers, shapes and mesh. Then
    none between devices; each process moves its own rows from the host to its devices.

    Args:
      source: Anything with `len(source)` and `source[i]`: an array, a memory map, a list, a map-style data set of grain
        or PyTorch. A sample is an array, a number, or a pytree of them, always of the same shapes.
      layouts: A prefix tree of layouts for a batch of such samples.
      batch: How many samples a batch has, on all processes together.
      seed: Of the order.
      shuffle: Whether the order is random; otherwise it is the source's.
      epochs: After how many epochs the batches end. Samples that do not fill a batch at the end are left out. If it is
        not given, the batches never end.
      mesh: The mesh. By default it is that of `jax.set_mesh`.
      mapping: Rules for bare names. By default they are those of the surrounding `axis_mapping`.
      prefetch: How many batches a thread reads ahead; 0 reads when a batch is asked for.
      workers: How many threads read the samples of a batch. A source gains that waits for a disk, a bucket or C. One
        that computes in Python lets `source[i]` ask a `concurrent.futures.ProcessPoolExecutor`, of which as many
        processes are then busy.
      retries: How often a sample is read again after an OSError, after 0.1, 0.2, 0.4 ... seconds. Whatever happens, no
        sample is lost and none comes twice.

    Returns:
      The batches: an iterator with `state`, which is saved and restored, and with `batches[i]`. `close()`, or the end
      of `with batches(...) as data:`, ends its threads and lets go of what they have read; so does dropping it.

    Raises:
      SizeError: The batch does not fit the layouts, a sample has another shape, or the processes' sources, batches or
        seeds differ.
      MeshError: There is no mesh, or it has no devices.

    Example:
      >>> import numpy as np, spmd
      >>> mesh = spmd.make_mesh(dp=8)
      >>> data = spmd.cluster.batches(np.arange(60).reshape(20, 3), "b/dp s", batch=16, mesh=mesh)
      >>> next(data).shape, data.state["next"]
      ((16, 3), 1)
    """
    call = "batches(source, layouts)"
    numbers = {"batch": (batch, 1), "seed": (seed, 0), "epochs": (1 if epochs is None else epochs, 1)}
    numbers |= {"prefetch": (prefetch, 0), "workers": (workers, 1), "retries": (retries, 0)}
    for name, (value, least) in numbers.items():
        if fault := not_int(name, value, least):
            raise SpmdError(fault, call=call)
    if not (length := len(source)):
        raise SizeError("a source has at least one sample.", call=call)
    found = mesh_for(mesh, [], call)
    if not isinstance(found, Mesh):
        raise MeshError("batches lie on devices, and an abstract mesh has none.", call=call)
    order, end = Order(length, int(seed), shuffle), None if epochs is None else epochs * length // batch
    return Batches(order, int(batch), end, source, layouts, found, mapping, prefetch, workers, retries)


@explained
def my_rows(layout: str, shape: Sequence[int], *, mesh: Any = None, mapping: Any = None) -> np.ndarray:
    """Return which rows of a global array this process's devices hold, for loaders of your own.

    No communication.

    Args:
      layout: The layout of the global array.
      shape: Its shape.
      mesh: The mesh. By default it is that of `jax.set_mesh`.
      mapping: Rules for bare names. By default they are those of the surrounding `axis_mapping`.

    Returns:
      Positions along the first dimension, in ascending order.

    Raises:
      SizeError: The shape does not fit the layout.

    Example:
      >>> import spmd
      >>> spmd.cluster.my_rows("b/dp s", (8, 4), mesh=spmd.make_mesh(dp=2, tp=4))
      array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    whole = jax.ShapeDtypeStruct(tuple(shape), np.float32)
    placed = shard(whole, layout, mesh=mesh_for(mesh, [], "my_rows(layout, shape)"), mapping=mapping)
    return _rows_here(placed.sharding, whole.shape)


@dataclass(frozen=True)
class Order:
    """In which order samples come.

    Attributes:
      length: How many samples there are.
      seed: Of the random order.
      shuffle: Whether it is random.
    """

    length: int
    seed: int
    shuffle: bool = True

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return which samples come at positions first, first + 1, ...; the epochs follow each other.

        >>> Order(4, seed=1, shuffle=False).samples(6, 3)
        array([2, 3, 0])
        """
        epochs, places = np.divmod(np.arange(first, first + count), self.length)
        if not self.shuffle:
            return places
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = _permuted(places[here], self.length, self.seed, int(epoch))
        return found


def _permuted(places: np.ndarray, length: int, *key: int) -> np.ndarray:
    """Return where a random permutation of `length` numbers takes these, without writing the permutation down.

    A Feistel network permutes the numbers below a power of four; those that leave the range go round again.
    Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
    """
    bits = max((int(length - 1).bit_length() + 1) // 2, 1)
    mask = np.uint64((1 << bits) - 1)
    keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
    found = places.astype(np.uint64)
    out = np.ones(found.shape, bool)
    while out.any():
        left, right = found[out] >> np.uint64(bits), found[out] & mask
        for one in keys:
            left, right = right, left ^ (_mixed(right ^ one) & mask)
        found[out] = left << np.uint64(bits) | right
        out = found >= length
    return found.astype(np.int64)


_ROUNDS = 6


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64. Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(eq=False, repr=False)
class Batches(Iterator[Any]):
    """Batches of a data set, as `batches` makes them.

    Attributes:
      order: In which order samples come.
      size: How many samples a batch has.
    """

    order: Order
    size: int
    _end: int | None
    _source: Source
    _layouts: Any
    _mesh: Mesh
    _mapping: Any
    _prefetch: int
    _workers: int
    _retries: int

    def __post_init__(self) -> None:
        self._next, self._closed = 0, False
        self._ahead: collections.deque[Future[Any]] = collections.deque()
        self._thread = ThreadPoolExecutor(1, "batches")
        self._readers = ThreadPoolExecutor(self._workers, "batches_worker") if self._workers > 1 else None
        self._placed = self._structs()
        self._whole = whole_sharding(self._mesh) if ambient_mode()[0] == "reference" else None
        if takes_part(self._mesh):
            self._check_same()

    def close(self) -> None:
        """End the threads, and let go of what they have read ahead. Once closed, it stays closed."""
        self._closed = True
        self._forget_ahead()
        for pool in filter(None, (self._thread, self._readers)):
            pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        if self._end is None:
            raise TypeError("batches without epochs= never end.")
        return self._end

    def __getitem__(self, index: int) -> Any:
        """Batch `index`, without moving on."""
        if not is_int(index, 0) or (self._end is not None and index >= self._end):
            raise IndexError(f"batch {index} of {'no end' if self._end is None else self._end}")
        return self._read(int(index))

    def __next__(self) -> Any:
        if self._end is not None and self._next >= self._end:
            raise StopIteration
        if self._closed:
            advice = "batches(...) begins anew, and batches.state = ... goes on"
            raise SpmdError("these batches are closed.", call="next(batches)", advice=advice)
        began = time.monotonic()
        with recorder.inside("data"):
            if not self._prefetch:
                found = self._read(self._next)
            else:
                self._read_ahead()
                try:
                    found = self._ahead.popleft().result()
                except BaseException:
                    self._forget_ahead()  # who catches it and goes on gets this batch
                    raise
        self._next += 1
        recorder.read(time.monotonic() - began)
        return found

    @property
    def state(self) -> dict[str, int]:
        """Return where the batches are: a few integers, the same in every process."""
        return {"next": self._next, "batch": self.size, **vars(self.order)}

    @state.setter
    def state(self, state: Mapping[str, int]) -> None:
        mine, call = self.state, "batches.state = ..."
        if not isinstance(state, Mapping):
            raise SpmdError(f"a state of batches is a dict, not of type {type(state).__name__}.", call=call)
        if missing := [name for name in mine if name not in state]:
            raise SpmdError(f"a state of batches has {', '.join(mine)}; {', '.join(missing)} is missing.", call=call)
        told = {name: reprlib.repr(state[name]) for name in mine}
        found = {name: _whole(state[name]) for name in mine}
        same = [name for name in mine if name != "next"]
        if wrong := [f"{name}: {told[name]}, here {mine[name]}" for name in same if found[name] != mine[name]]:
            rule = "the state belongs to other batches: samples would be lost or come twice."
            raise SpmdError(rule, call=call, got=wrong, advice="batches(...) with those arguments")
        if (index := found["next"]) is None or not 0 <= index < np.iinfo(np.int64).max // self.size:
            raise SpmdError(f"next is the number of a batch, not {told['next']}.", call=call)
        self._next = index
        self._forget_ahead()

    def _check_same(self) -> None:
        """Processes that read different batches would train on rows of both. An all-gather of one hash."""
        shapes = [f"{x.dtype.name}{list(x.shape)} {x.sharding.spec}" for x in jax.tree.leaves(self._placed)]
        mesh = ", ".join(f"{axis}={size}" for axis, size in self._mesh.shape.items())
        devices = [one.id for one in self._mesh.devices.flat]
        facts = {**self.state, "batches": self._end, "shapes": shapes, "mesh": mesh, "devices": devices}
        if wrong := disagreements(facts):
            rule = "the processes do not read the same batches."
            advice = "pass the same data, batch, seed and mesh in all of them; each reads only its own rows"
            raise SizeError(rule, call="batches(source, layouts)", got=wrong, advice=advice)

    # --- reading ---

    def _forget_ahead(self) -> None:
        for one in self._ahead:
            one.cancel()
        self._ahead.clear()

    def _read_ahead(self) -> None:
        while len(self._ahead) < self._prefetch + 1:
            index = self._next + len(self._ahead)
            if self._end is not None and index >= self._end:
                break
            self._ahead.append(self._thread.submit(_read_of, weakref.ref(self), index))

    def _structs(self) -> Any:
        """The shapes and shardings of a batch; the first sample tells them."""
        sample = jax.tree.map(np.asarray, self._tried(int(self.order.samples(0, 1)[0])))
        whole = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.size, *x.shape), jax.dtypes.canonicalize_dtype(x.dtype)), sample
        )
        try:
            return self._place(whole)
        except SpmdError as error:
            self._check_single(sample)
            raise error

    def _place(self, tree: Any) -> Any:
        with mode("explicit"):
            return shard(tree, self._layouts, mesh=self._mesh, mapping=self._mapping)

    def _check_single(self, sample: Any) -> None:
        """Complain if a sample fits the layouts of a batch."""
        try:
            self._place(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), sample))
        except SpmdError:
            return
        rule = "source[i] is one sample, and this one has the layout of a whole batch."
        got = [f"shapes: {[x.shape for x in jax.tree.leaves(sample)]}"]
        advice = "a source that is not batched; or, of one that is, spmd.shard(batch, layouts) for each batch"
        raise SizeError(rule, call="batches(source, layouts)", got=got, advice=advice)

    def _read(self, index: int) -> Any:
        samples = self.order.samples(index * self.size, self.size)
        structs, structure = jax.tree.flatten(self._placed)
        placed = [(one.shape, self._whole or one.sharding) for one in structs]
        held = np.unique(np.concatenate([_rows_here(where, shape) for shape, where in placed]))
        read = lambda at: self._sample(int(samples[at]), structs, structure)
        rows = dict(zip(held.tolist(), (self._readers.map if self._readers else map)(read, held), strict=True))

        def block(leaf: int, where: Any) -> np.ndarray:
            return np.stack([rows[at][leaf][where[1:]] for at in range(*where[0].indices(self.size))])

        arrays = [jax.make_array_from_callback(*one, functools.partial(block, leaf)) for leaf, one in enumerate(placed)]
        return jax.tree.unflatten(structure, arrays)

    def _tried(self, index: int) -> Any:
        for turn in range(self._retries):
            try:
                return self._source[index]
            except OSError:
                time.sleep(0.1 * 2**turn)
        return self._source[index]

    def _sample(self, index: int, structs: Sequence[Any], structure: Any) -> list[np.ndarray]:
        try:
            leaves, found = jax.tree.flatten(self._tried(index))
        except StopIteration as error:  # it would end the loop over the batches, as if all were read
            rule = f"the source raised StopIteration for sample {index}, which len(source) counts."
            raise SpmdError(rule, call="batches(source, ...)") from error
        leaves = [np.asarray(x) for x in leaves]
        shapes = [x.shape for x in leaves]
        if found != structure or shapes != [one.shape[1:] for one in structs]:
            wanted = [one.shape[1:] for one in structs]
            rule = f"sample {index} has other shapes than the first one."
            got = [f"shapes: {shapes}, first {wanted}"]
            advice = "pad or cut the samples in the source, so that all have one shape"
            raise SizeError(rule, call="batches(source, ...)", got=got, advice=advice)
        if not all(map(_is_finite, leaves)):
            recorder.unsound.append(index)
        return [_fitted(x, one.dtype, index) for x, one in zip(leaves, structs, strict=True)]


def _read_of(batches: weakref.ref[Batches], index: int) -> Any:
    """A batch of batches that somebody still has."""
    there = batches()
    return None if there is None or there._closed else there._read(index)


def _whole(value: Any) -> int | None:
    """A number that is whole, whatever holds it; None for all else."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return int(value) if int(value) == value else None
    return None


def _is_finite(x: np.ndarray) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, np.inexact) or bool(np.isfinite(x).all())


def _rows_here(sharding: Any, shape: Sequence[int]) -> np.ndarray:
    blocks = sharding.addressable_devices_indices_map(tuple(shape)).values()
    return np.unique(np.concatenate([np.arange(shape[0])[where[0]] for where in blocks]))


def _fitted(x: np.ndarray, dtype: Any, index: int) -> np.ndarray:
    """The sample in the dtype of the batch; integers that do not fit are not wrapped."""
    found = x.astype(dtype)
    if x.dtype.kind in "iu" and found.dtype != x.dtype and (found != x).any():
        rule = f"sample {index} has integers that do not fit {np.dtype(dtype).name}."
        advice = "jax.config.update('jax_enable_x64', True), or a smaller dtype in the source"
        raise PlacementError(rule, call="batches(source, ...)", got=[f"{x.dtype.name}"], advice=advice)
    return found
