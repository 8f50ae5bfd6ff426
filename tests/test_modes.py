"""What surrounds a call: modes and mappings, nested, in threads, and as part of JAX's cache keys."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import AxisMapping, axis_mapping, mode
from spmd.modes import ambient_mapping, ambient_mode

MESH = spmd.make_mesh(dp=2, tp=4)


@spmd.kernel("a/dp b -> a/dp b", mesh=MESH)
def local_rows(x):
    """The number of rows that the body sees tells the mode."""
    return x * 0 + x.shape[0]


def rows() -> int:
    return int(np.asarray(local_rows(jnp.ones((8, 4))))[0, 0])


def test_modes_nest_and_end() -> None:
    assert rows() == 4
    with mode("auto"):
        assert rows() == 8
        with mode("explicit"):
            assert rows() == 4
        assert rows() == 8
    assert rows() == 4
    with pytest.raises(ZeroDivisionError), mode("reference"):
        1 / 0
    assert ambient_mode() == ("explicit", "all")


def test_a_jitted_step_is_traced_again() -> None:
    seen = []

    @jax.jit
    def step(x):
        seen.append(ambient_mode()[0])
        return local_rows(x)

    x = jnp.ones((8, 4))
    for name in ("explicit", "auto", "reference", "auto", "explicit"):
        with mode(name):
            step(x)
    assert seen == ["explicit", "auto", "reference"]


def test_another_mapping_traces_again() -> None:
    seen = []

    @jax.jit
    def place(x):
        seen.append(ambient_mapping())
        return spmd.shard(x, "batch embed", mesh=MESH)

    x = jnp.ones((8, 4))
    for rules in ({"batch": "dp", "embed": None}, {"batch": "tp", "embed": None}, {"batch": "dp", "embed": None}):
        with axis_mapping(rules):
            assert place(x).sharding.spec[0] == rules["batch"]
    assert len(seen) == 2


def test_modes_are_a_threads_own() -> None:
    """Also in a thread that was started inside a `with`, as JAX's own context values are."""
    inside, outside = threading.Event(), threading.Event()
    found = {}

    def other():
        inside.wait(10)
        found["mode"], found["mapping"] = ambient_mode()[0], ambient_mapping()
        outside.set()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other)
        with mode("auto"), axis_mapping({"a": "dp"}):
            inside.set()
            assert outside.wait(10)
        waiting.result()
    assert found == {"mode": "explicit", "mapping": None}


def test_two_threads_with_two_modes() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def run(name):
        with mode(name):
            barrier.wait()
            return rows()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, ["explicit", "auto"])) == [4, 8]


BLOCKS = [  # a block, another one, and what is read
    (lambda: mode("auto"), lambda: mode("reference"), ambient_mode),
    (lambda: axis_mapping({"a": "dp"}), lambda: axis_mapping({"a": "tp"}), ambient_mapping),
]


@pytest.mark.parametrize(("one", "other", "read"), BLOCKS)
def test_suspended_generators_leave_nothing_behind(one, other, read) -> None:
    before = read()

    def inside(block):
        with block():
            yield

    first, second = inside(one), inside(other)
    next(first), next(second)
    with other():
        wanted = read()
    first.close()  # before the one that began later
    assert read() == wanted
    second.close()
    assert read() == before and not [b for b in (first, second) if b.gi_frame]
    with one():
        assert read() != before
    assert read() == before


def test_a_suspended_generator_sets_its_callers_mode() -> None:
    """That is how context managers are written, and Python cannot tell other generators from them."""

    @contextlib.contextmanager
    def whole():
        with mode("auto"):
            yield

    def numbers():
        with mode("auto"):
            yield rows()

    def outside():
        with mode("auto"):
            found = rows()
        yield found

    with whole():
        assert rows() == 8
    for wanted, generator in ((8, numbers()), (4, outside())):
        assert next(generator) == 8 and rows() == wanted
        assert next(generator, None) is None and rows() == 4


@pytest.mark.parametrize(("one", "other", "read"), BLOCKS)
def test_coroutines_leave_nothing_behind(one, other, read) -> None:
    """Each sees its own block or is told that another one holds; afterwards there is none."""
    before, found = read(), []

    async def inside(block, pause):
        with block():
            mine = read()
            await asyncio.sleep(pause)
            try:
                found.append(read() == mine)
            except spmd.errors.ModeError as error:
                assert "another coroutine is suspended inside" in str(error)
                found.append("told")
        await asyncio.sleep(0.05)
        assert read() == before

    async def beside():
        await asyncio.sleep(0.005)
        with pytest.raises(spmd.errors.ModeError, match="another coroutine"):
            read()

    async def main():
        await asyncio.gather(inside(one, 0.01), inside(other, 0.02), beside())
        assert read() == before

    asyncio.run(main())
    assert read() == before and sorted(map(str, found)) == ["True", "told"]


def test_blocks_that_coroutines_share() -> None:
    """A task has the block that it was started in, and blocks that say the same do not disturb each other."""

    async def task():
        await asyncio.sleep(0)
        return rows()

    async def same():
        with mode("auto"):
            return await task()

    async def main():
        with mode("auto"):
            found = await asyncio.gather(task(), same(), same())
            found.append(await asyncio.to_thread(lambda: ambient_mode()[0]))  # a thread has its own
        return found

    assert asyncio.run(main()) == [8, 8, 8, "explicit"]
    with mode("auto"):
        assert asyncio.run(task()) == 8
    assert rows() == 4


def test_a_generator_that_ends_in_another_thread() -> None:
    def inside():
        with mode("auto"):
            yield

    held = inside()
    next(held)
    assert rows() == 8
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (held.close(), rows())).result() == (None, 4)
    assert rows() == 4


def test_mappings_nest() -> None:
    with axis_mapping({"a": "dp", "b": None}) as outer:
        assert isinstance(outer, AxisMapping) and ambient_mapping() == outer
        with axis_mapping({"b": "tp"}):
            assert "a" not in ambient_mapping()
        with axis_mapping({"b": "tp"}, merge=True) as both:
            assert dict(both) == {"a": ("dp",), "b": ("tp",)}
        with axis_mapping(None):
            assert ambient_mapping() is None
        assert ambient_mapping() == outer
    assert ambient_mapping() is None


def test_merging_with_nothing_around() -> None:
    with axis_mapping({"a": "dp"}, merge=True) as mapping:
        assert mapping.get("a") == ("dp",)


@pytest.mark.parametrize("rules", [{"a": 3}, {"a": ["dp", 4]}, {"a b": "dp"}, {3: "dp"}, "dp", 7, {"a": "d p"}])
def test_rules_that_are_none(rules) -> None:
    before = ambient_mapping()
    with pytest.raises(spmd.errors.SpmdError), axis_mapping(rules):
        pass
    assert ambient_mapping() is before


@pytest.mark.parametrize("name", ["explict", "", None, 3, "Auto"])
def test_modes_that_are_none(name) -> None:
    with pytest.raises(spmd.errors.ModeError, match="'explicit', 'auto' or 'reference'"), mode(name):
        pass


def test_a_scope_of_its_own() -> None:
    """A library function's names are not its caller's."""

    def double(x):
        return spmd.einsum(x, x, "b, b -> b")

    x = np.arange(8, dtype=np.float32)
    with pytest.raises(spmd.errors.SizeError, match="b has two sizes|b is"):
        spmd.kernel("b, d -> d", mesh=MESH)(lambda x, y: double(y))(x[:4], x)
    out = spmd.kernel("b, d -> d", mesh=MESH)(lambda x, y: spmd.scope(double)(y))(x[:4], x)
    assert (np.asarray(out) == x * x).all()


def test_a_scope_without_the_mapping_of_its_caller() -> None:
    """Under the caller's rule `d` lies on dp; the library's `d` has nothing to do with it."""

    def total(x):
        return spmd.reduce(x, "d -> scalar")

    x = np.arange(8, dtype=np.float32)
    kernel = lambda fn: spmd.kernel("d -> scalar", mesh=MESH, mapping={"d": None})(fn)
    assert kernel(spmd.scope(mapping=None)(total))(x) == 28

    divided = spmd.kernel("d, e -> e", mesh=MESH, mapping={"d": "dp", "e": None})
    assert (divided(lambda x, y: y * spmd.scope(mapping=None)(total)(y))(x, x) == 28 * x).all()
    with pytest.raises(spmd.errors.SpmdError):  # kept, the rule divides what is whole
        divided(lambda x, y: y * spmd.scope(total)(y))(x, x)
