"""Checkpoints: what is restored on which mesh, and what happens to damaged ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.cluster import batches, checkpoints
from spmd.cluster._checkpoints import checksum
from spmd.errors import PlacementError, SpmdError
from tests.sampler import first_seed

# Orbax leaves a coroutine behind where a read fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LAYOUTS = {"w": "d/dp f/tp", "b": "f/tp", "count": "scalar", "key": "scalar", "half": "d/dp/tp"}


def new(key):
    return {
        "w": jax.random.normal(key, (8, 16)),
        "b": jnp.arange(16.0),
        "count": jnp.int32(3),
        "half": jnp.linspace(0, 1, 8).astype(jnp.bfloat16),
    }


def maker(dp=2, tp=4, fn=new, **more):
    return spmd.init(
        fn, {**{k: v for k, v in LAYOUTS.items() if k != "key"}, **more}, mesh=spmd.make_mesh(dp=dp, tp=tp)
    )


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture
def saved(tmp_path):
    found = checkpoints(tmp_path / "run")
    yield found
    found.close()


@pytest.mark.parametrize(("dp", "tp"), [(2, 4), (4, 2), (8, 1), (1, 1)])
def test_a_state_comes_back_on_every_mesh(saved, dp, tp):
    state = maker()(jax.random.key(1))
    saved.save(7, state)
    make = maker(dp, tp)
    found = saved.restore(make, jax.random.key(2))
    assert found.step == 7
    same(found.state, state)
    assert jax.tree.map(lambda x: x.sharding, found.state) == jax.tree.map(
        lambda x: x.sharding, make(jax.random.key(0))
    )


def test_nothing_saved_is_a_new_state(saved):
    found = saved.restore(maker(), jax.random.key(1))
    assert found.step == 0
    same(found.state, maker()(jax.random.key(1)))


def test_the_last_ones_are_kept(saved):
    make = maker()
    for step in range(6):
        saved.save(step, make(jax.random.key(step)))
    found = saved.restore(make, jax.random.key(0))
    assert found.step == 5
    same(found.state, make(jax.random.key(5)))
    assert sorted(one.name for one in (saved.path / "steps").iterdir() if one.name.isdigit()) == ["3", "4", "5"]
    assert {one.stem for one in (saved.path / "checksums").iterdir()} <= {"2", "3", "4", "5"}


def test_the_data_go_on(saved, mesh):
    make = lambda: batches(np.arange(40), "b/dp", batch=4, seed=3, mesh=mesh)
    data, other = make(), make()
    next(data), next(data)
    saved.save(2, maker()(jax.random.key(0)), data=data)
    saved.restore(maker(), jax.random.key(0), data=other)
    np.testing.assert_array_equal(next(other), next(data))


# --- damage ----------------------------------------------------------------------------------------------------------


def files(saved, step):
    """The stored numbers of a step, largest file first."""
    found = [
        one
        for one in (saved.path / "steps" / str(step) / "state").rglob("*")
        if one.is_file() and one.parent.name == "d"
    ]
    return sorted(found, key=lambda one: -one.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def forget(path):
    path.unlink()


@pytest.mark.parametrize("damage", [cut, forget])
def test_a_damaged_step_is_named_and_the_one_before_it_is_taken(saved, damage, capsys):
    make = maker()
    for step in (1, 2):
        saved.save(step, make(jax.random.key(step)))
    saved.wait()
    for path in files(saved, 2):
        damage(path)
    found = saved.restore(make, jax.random.key(0))
    assert found.step == 1
    same(found.state, make(jax.random.key(1)))
    assert "step 2 is damaged" in capsys.readouterr().err


def test_a_flipped_bit_never_changes_a_number(saved, capsys):
    """Orbax restores wrong numbers where a bit of random float32 is flipped."""
    make = spmd.init(lambda key: jax.random.normal(key, (256, 64)), "a/dp b", mesh=spmd.make_mesh(dp=8))
    for step in (1, 2):
        saved.save(step, make(jax.random.key(step)))
    saved.wait()
    right = {step: np.asarray(make(jax.random.key(step))) for step in (1, 2)}
    dice, told = np.random.default_rng(first_seed()), ""
    for path in files(saved, 2):
        content = path.read_bytes()
        for at in dice.integers(0, len(content), 4):
            path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            found = saved.restore(make, jax.random.key(0))
            np.testing.assert_array_equal(found.state, right[found.step])
            told += capsys.readouterr().err
        path.write_bytes(content)
    assert told.count("not those that were saved") >= 2
    assert saved.restore(make, jax.random.key(0)).step == 2


def test_a_step_without_checksums_was_not_finished(saved, capsys):
    make = maker()
    saved.save(1, make(jax.random.key(1)))
    saved.save(2, make(jax.random.key(2)))
    saved.wait()
    (saved.path / "checksums" / "2.json").unlink()
    assert saved.restore(make, jax.random.key(0)).step == 1


def test_all_steps_damaged_is_an_error(saved):
    make = maker()
    saved.save(1, make(jax.random.key(1)))
    saved.wait()
    for path in files(saved, 1):
        forget(path)
    with pytest.raises(PlacementError, match="no checkpoint can be restored"):
        saved.restore(make, jax.random.key(0))


# --- another state ---------------------------------------------------------------------------------------------------


def test_another_state_is_refused_with_all_differences(saved):
    saved.save(1, maker()(jax.random.key(1)))

    def other(key):
        return {"w": jnp.ones((8, 8)), "bias": jnp.ones(16), "count": jnp.float32(1), "half": jnp.ones(8, jnp.bfloat16)}

    layouts = {"w": "d/dp f/tp", "bias": "f", "count": "scalar", "half": "d"}
    make = spmd.init(other, layouts, mesh=spmd.make_mesh(dp=2, tp=4))
    with pytest.raises(PlacementError) as caught:
        saved.restore(make, jax.random.key(0))
    text = str(caught.value)
    for part in (
        "['w']: saved [8, 16] P('dp', 'tp'), here [8, 8] P('dp', 'tp')",
        "['bias']: not in the checkpoint; it has ['b']",
        "['count']: saved int32, here float32",
        "['b']: in the checkpoint only",
    ):
        assert part in text, text


def test_another_dtype_is_cast_if_asked(saved):
    state = maker()(jax.random.key(1))
    saved.save(1, state)
    make = maker(fn=lambda key: {**new(key), "w": new(key)["w"].astype(jnp.bfloat16)})
    with pytest.raises(PlacementError, match="saved float32, here bfloat16"):
        saved.restore(make, jax.random.key(0))
    found = saved.restore(make, jax.random.key(0), cast=True).state
    np.testing.assert_array_equal(found["w"], state["w"].astype(jnp.bfloat16))


def test_what_cannot_be_saved(saved):
    with pytest.raises(SpmdError, match="consists of arrays"):
        saved.save(1, {"w": 3})
    with pytest.raises(SpmdError, match="step is an integer"):
        saved.save(-1, {})
    with pytest.raises(SpmdError, match="keep is a positive"):
        checkpoints(saved.path, keep=0)


# --- checksums -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "complex64", "float8_e4m3fn", "int4"]
)
def test_a_checksum_sees_one_bit_and_not_the_mesh(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 2, (8, 24)) if dtype == "bool" else rng.integers(0, 7, (8, 24))).astype(dtype)
    wanted = tuple(map(int, checksum(x)))
    for layout in ("a/dp b/tp", "a b/tp/dp", "a/tp/dp b"):
        placed = spmd.shard(x, layout, mesh=spmd.make_mesh(dp=2, tp=4))
        assert tuple(map(int, checksum(placed))) == wanted
    changed = x.at[3, 5].set(~x[3, 5] if dtype == "bool" else x[3, 5] + jnp.ones((), dtype))
    swapped = x.at[0].set(x[1]).at[1].set(x[0])
    for other in (changed, swapped):
        found = tuple(map(int, checksum(other)))
        assert found[0] != wanted[0] and found[1] != wanted[1]
