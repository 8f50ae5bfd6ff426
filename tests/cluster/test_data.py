"""Batches: which samples, in which order, on which devices, and what a restored state gives."""

import collections
import gc
import multiprocessing
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import jax
import numpy as np
import pytest

import spmd
from spmd.cluster import Batches, batches, my_rows
from spmd.errors import PlacementError, SizeError, SpmdError
from tests.cluster.computing import sample
from tests.sampler import dice, seeds

SOURCE = np.arange(23 * 4).reshape(23, 4)


class Counted:
    """A source that remembers which samples were read."""

    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read.append(index)
        return self.rows[index]


# --- the order -------------------------------------------------------------------------------------------------------


class Numbers:
    """A source of any length, whose samples are their numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        high, low = divmod(index, 10**6)  # JAX's integers are of 32 bits
        return np.array([*divmod(high, 10**6), low], np.int32)


def order(length: int, seed: int, batch: int) -> Batches:
    """The batches that tell the order."""
    return batches(Numbers(length), "b n", batch=batch, seed=seed, mesh=spmd.make_mesh(a=1), prefetch=0)


def samples(length: int, seed: int, first: int, count: int) -> np.ndarray:
    """The numbers of some samples."""
    assert first % count == 0
    found = np.asarray(order(length, seed, count)[first // count]).astype(np.int64)
    return found @ np.array([10**12, 10**6, 1])


@pytest.mark.parametrize("seed", seeds())
def test_every_sample_comes_once_in_an_epoch(seed):
    rng = dice(seed)
    length, size = rng.randint(1, 300), rng.randint(1, 40)
    key, count = rng.randint(0, 2**40), 3 * length // size + 1
    data = order(length, key, size)
    found = np.concatenate([np.asarray(data[i])[:, 2] for i in range(count)])
    for epoch in range(3):
        here = found[epoch * length : (epoch + 1) * length]
        np.testing.assert_array_equal(np.sort(here), np.arange(length))
    np.testing.assert_array_equal(found[: count * size], samples(length, key, 0, count * size))


def test_epochs_and_seeds_have_orders_of_their_own():
    n = 1000
    orders = [samples(n, seed, epoch * n, n) for seed in range(3) for epoch in range(3)]
    orders.append(np.arange(n))
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 10  # one on average in random permutations


def test_the_order_is_random(cases):
    """Where each sample stands, over many epochs, is uniform: a chi-square of 23 x 23 cells."""
    n, trials = 23, 500 * cases
    counts = np.zeros((n, n))
    for epoch in samples(n, 0, 0, trials * n).reshape(trials, n):
        counts[np.arange(n), epoch] += 1
    expected = trials / n
    chi = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom)


def test_a_source_of_any_length_needs_no_permutation_in_memory():
    found = samples(10**15 + 37, 3, 5 * 10**15, 1000)
    assert len(np.unique(found)) == 1000 and found.min() >= 0 and found.max() < 10**15 + 37


# --- where they lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "layout"), [((2, 4), "b/a s/b"), ((4, 2), "b/a/b s"), ((8, 1), "b/a s"), ((1, 8), "b s")]
)
def test_batches_are_the_same_on_every_mesh(shape, layout):
    mesh = spmd.make_mesh(**dict(zip("ab", shape, strict=True)))
    data = batches(SOURCE, layout, batch=16, seed=5, mesh=mesh)
    for i in range(4):
        found = next(data)
        assert found.sharding.spec == spmd.Layout(layout).spec
        np.testing.assert_array_equal(found, SOURCE[samples(23, 5, 16 * i, 16)])


def test_trees_of_samples_and_numbers(mesh):
    source = [{"x": np.full((4,), i, np.float32), "y": i} for i in range(20)]
    data = batches(source, {"x": "b/dp s/tp", "y": "b/dp"}, batch=8, shuffle=False, mesh=mesh)
    found = next(data)
    np.testing.assert_array_equal(found["y"], np.arange(8))
    np.testing.assert_array_equal(found["x"], np.repeat(np.arange(8.0), 4).reshape(8, 4))


def test_a_memory_map_is_a_source(mesh, tmp_path):
    stored = np.lib.format.open_memmap(tmp_path / "rows.npy", mode="w+", dtype=np.int32, shape=SOURCE.shape)
    stored[:] = SOURCE
    data = batches(np.load(tmp_path / "rows.npy", mmap_mode="r"), "b/dp s", batch=8, mesh=mesh)
    np.testing.assert_array_equal(next(data), SOURCE[samples(23, 0, 0, 8)])


def test_each_row_is_read_once(mesh):
    source = Counted(SOURCE)
    data = batches(source, "b/dp s", batch=16, mesh=mesh, prefetch=0)
    source.read.clear()
    next(data)
    assert sorted(source.read) == sorted(samples(23, 0, 0, 16))


@pytest.mark.parametrize("kind", spmd.modes.MODES)
def test_every_mode_has_the_same_batches(mesh, kind):
    with spmd.mode(kind):
        found = next(batches(SOURCE, "b/dp s", batch=8, mesh=mesh))
    np.testing.assert_array_equal(found, SOURCE[samples(23, 0, 0, 8)])
    assert len(found.sharding.device_set) == (1 if kind == "reference" else 8)


def test_epochs_end():
    mesh = spmd.make_mesh(a=4)
    data = batches(SOURCE, "b/a s", batch=8, epochs=2, mesh=mesh)
    assert len(data) == 5 == len(list(data))
    with pytest.raises(StopIteration):
        next(data)
    with pytest.raises(IndexError):
        data[5]
    with pytest.raises(TypeError):
        len(batches(SOURCE, "b/a s", batch=8, mesh=mesh))


# --- the state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_restored_state_goes_on(mesh, prefetch):
    make = lambda layout: batches(SOURCE, layout, batch=8, seed=2, mesh=mesh, prefetch=prefetch)
    whole = [np.asarray(batch) for _, batch in zip(range(7), make("b/dp s"), strict=False)]
    first, second = make("b/dp s"), make("b/dp/tp s")
    for i in range(3):
        np.testing.assert_array_equal(next(first), whole[i])
    next(second)  # what was read ahead is forgotten
    second.state = first.state
    for i in range(3, 7):
        np.testing.assert_array_equal(next(second), whole[i])
    np.testing.assert_array_equal(second[1], whole[1])
    assert second.state["next"] == 7


def test_a_state_of_other_batches_is_refused(mesh):
    data = batches(SOURCE, "b/dp s", batch=8, mesh=mesh)
    other = batches(SOURCE[:20], "b/dp s", batch=4, seed=1, mesh=mesh)
    with pytest.raises(SpmdError) as caught:
        data.state = other.state
    for text in ("batch: 4, here 8", "seed: 1, here 0", "length: 20, here 23"):
        assert text in str(caught.value)
    with pytest.raises(SpmdError, match="next, batch"):
        data.state = {"next": 1}


ODD = [None, [], [1], "next", 3, {}, *({"next": one} for one in (-5, 2**80, None, "3", [3], 1.5, float("nan"), {}))]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_an_odd_state_is_refused(mesh, odd):
    """A number below zero or beyond NumPy's ended in its OverflowError, later, in a thread."""
    data = batches(SOURCE, "b/dp s", batch=8, mesh=mesh)
    wrong = [odd] if not isinstance(odd, dict) or not odd else [{**data.state, **odd}]
    wrong += [{**data.state, "seed": odd["next"]}] if isinstance(odd, dict) and odd else []
    for one in wrong:
        with pytest.raises(SpmdError, match="next|dict|other batches"):
            data.state = one
    data.state = {name: np.asarray(value) for name, value in data.state.items()}  # as it comes from other libraries
    assert data.state["next"] == 0
    np.testing.assert_array_equal(next(data), data[0])


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_the_source_raises_reaches_the_caller(mesh, prefetch):
    class Broken(Counted):
        def __getitem__(self, index):
            if index == 9:
                raise OSError("disk gone")
            return super().__getitem__(index)

    data = batches(Broken(SOURCE), "b/dp s", batch=4, shuffle=False, mesh=mesh, prefetch=prefetch)
    next(data), next(data)
    with pytest.raises(OSError, match="disk gone"):
        next(data)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("error", [OSError, StopIteration, KeyboardInterrupt])
def test_no_batch_is_lost_after_an_error_that_the_caller_caught(mesh, prefetch, error):
    """With two that are read ahead they were 0, 1, 2, the error, 4, 5, 5, 6."""

    class Once(Counted):
        broken = True

        def __getitem__(self, index):
            if index == 13 and self.broken:
                self.broken = False
                raise error("disk gone")
            return super().__getitem__(index)

    data = batches(Once(np.arange(40)), "b/dp", batch=4, shuffle=False, mesh=mesh, prefetch=prefetch)
    found = []
    while len(found) < 9:
        state = data.state["next"]
        try:
            found.append(int(next(data)[0]) // 4)
        except (OSError, SpmdError, KeyboardInterrupt) as caught:
            assert "disk gone" in str(caught) or "for sample 13" in str(caught)
            found.append("error")
            assert data.state["next"] == state == 3
    assert found == [0, 1, 2, "error", 3, 4, 5, 6, 7]
    assert data.state["next"] == 8


def test_samples_of_another_shape_are_named(mesh):
    rows = [np.zeros(4)] * 6 + [np.zeros(5)] * 6
    data = batches(rows, "b/dp s", batch=8, shuffle=False, mesh=mesh)
    with pytest.raises(SizeError, match="sample 6 has other shapes"):
        next(data)


def test_integers_that_do_not_fit_are_not_wrapped(mesh):
    data = batches([np.array([2**40])] * 8, "b/dp s", batch=8, mesh=mesh)
    with pytest.raises(PlacementError, match="do not fit int32"):
        next(data)


def test_rows_of_this_process(mesh):
    np.testing.assert_array_equal(my_rows("b/dp s", (8, 4), mesh=mesh), np.arange(8))
    with pytest.raises(SizeError):
        my_rows("b/dp s", (7, 4), mesh=mesh)
    assert len(jax.devices()) == 8


class Failing:
    """Samples of which some cannot be read at the first tries, and that take a while."""

    def __init__(self, tries: int):
        self.tries, self.failed, self.threads = tries, collections.Counter[int](), set[int]()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> np.ndarray:
        self.threads.add(threading.get_ident())
        time.sleep(0.002)
        if index % 3 == 0 and self.failed[index] < self.tries:
            self.failed[index] += 1
            raise OSError("try again")
        return np.full(2, index, np.float32)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_samples_are_read_again_and_none_is_lost(workers, prefetch):
    mesh = spmd.make_mesh(dp=8)
    want = [np.asarray(one) for one in batches(Failing(0), "b/dp d", batch=8, epochs=3, mesh=mesh, prefetch=0)]
    source = Failing(1)
    data = batches(source, "b/dp d", batch=8, epochs=3, mesh=mesh, prefetch=prefetch, workers=workers, retries=1)
    for one in want:
        np.testing.assert_array_equal(next(data), one)
    assert data.state["next"] == len(want) and (len(source.threads) > 2) == (workers > 1)


def test_an_error_that_stays_is_raised_after_so_many_tries():
    source = Failing(0)
    data = batches(source, "b/dp d", batch=8, mesh=spmd.make_mesh(dp=8), prefetch=0, retries=2, workers=2)
    source.tries = 10
    for _ in range(2):
        with pytest.raises(OSError, match="try again"):
            next(data)
        assert data.state["next"] == 0
    source.tries = 0
    want = batches(Failing(0), "b/dp d", batch=8, mesh=spmd.make_mesh(dp=8))
    np.testing.assert_array_equal(next(data), next(want))


def test_processes_read_and_the_place_is_exact():
    """A thread each waits for one of them, so what is said of threads holds."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        mesh, make = spmd.make_mesh(dp=8), lambda: batches(Asking(pool), "b/dp d", batch=8, mesh=mesh, workers=2)
        data = make()
        first = [np.asarray(next(data)) for _ in range(3)]
        again = make()
        again.state = {**data.state, "next": 1}
        rest = [np.asarray(next(again)) for _ in range(2)]
    for i, found in enumerate(first):
        np.testing.assert_array_equal(found[:, 0], samples(23, 0, 8 * i, 8))
    np.testing.assert_array_equal([one[:, 0] for one in first[1:]], [one[:, 0] for one in rest])
    processes = {int(one) for found in first for one in found[:, 1]}
    assert len(processes) == 2 and os.getpid() not in processes


class Asking:
    """A source whose samples other processes compute."""

    def __init__(self, pool):
        self.pool = pool

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return self.pool.submit(sample, index).result()


class Slow:
    """Samples of a megabyte, of which each takes a while."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(0.05)
        return np.zeros((256, 1024), np.float32)


def readers() -> int:
    return sum(one.name.startswith("batches") for one in threading.enumerate())


@pytest.mark.parametrize("end", ["dropped", "closed", "with"])
def test_batches_that_end_leave_no_thread_and_no_array(mesh, end):
    """Those that were dropped read on, batch after batch, and held what they had read."""
    gc.collect()
    before = readers(), len(jax.live_arrays())
    for _ in range(6):
        data = spmd.cluster.batches(Slow(), "b/dp s t", batch=4, mesh=mesh, prefetch=50)
        if end == "with":
            with data:
                next(data)
        else:
            next(data)
        if end == "closed":
            data.close()
        if end != "dropped":
            with pytest.raises(SpmdError, match="these batches are closed"):
                next(data)
        del data
    until = time.monotonic() + 5.0  # each ends the batch that it reads, of 0.2 s, and none of the 10 s that it would
    left = lambda: (readers() > before[0], len(jax.live_arrays()) > before[1])
    while any(left()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(left())
