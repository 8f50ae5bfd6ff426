"""Checkpoints: what is restored on which mesh, and what happens to damaged ones."""

import contextlib
import gc
import json
import re
import resource
import shutil
import signal
import subprocess
import time

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.cluster import _checkpoints, batches, checkpoints
from spmd.cluster._checkpoints import _Damaged, named
from spmd.errors import PlacementError, SpmdError
from tests.cluster.bucket import serving
from tests.cluster.full_disk import TIMEOUT
from tests.cluster.harness import alone, end, exhaustive, launched, start
from tests.sampler import first_seed, rare, share

# Orbax leaves a coroutine behind where a read fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STALE = "tests/cluster/stale.py"
LAYOUTS = {"w": "d/dp f/tp", "b": "f/tp", "count": "scalar", "half": "d/dp/tp"}


@pytest.fixture(autouse=True)
def collected():
    """What Orbax leaves behind is collected in this file, or it fails whichever test the collector runs in."""
    yield
    gc.collect()


def new(key):
    return {
        "w": jax.random.normal(key, (8, 16)),
        "b": jnp.arange(16.0),
        "count": jnp.int32(3),
        "half": jnp.linspace(0, 1, 8).astype(jnp.bfloat16),
    }


def maker(dp=2, tp=4, fn=new, **more):
    return spmd.init(fn, {**LAYOUTS, **more}, mesh=spmd.make_mesh(dp=dp, tp=tp))


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def two_steps(saved, make=None, data=None):
    """Steps 1 and 2, saved; what makes their states."""
    make = make or maker()
    for step in (1, 2):
        if data is not None:
            next(data)
        saved.save(step, make(jax.random.key(step)), data=data)
    saved.wait()
    return make


@pytest.fixture
def saved(tmp_path):
    found = checkpoints(tmp_path / "run")
    yield found
    found.close()


@pytest.mark.parametrize(("dp", "tp"), share([(2, 4), (4, 2), (8, 1), (1, 1)], always=[(2, 4)]))
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


def test_a_state_comes_back_under_another_mapping(saved):
    def make(**names):
        mapping, mesh = spmd.AxisMapping(names), spmd.make_mesh(dp=2, tp=4)
        fn = lambda key: {"w": jax.random.normal(key, (8, 16))}
        return spmd.init(fn, {"w": "embed mlp"}, mesh=mesh, mapping=mapping)

    state = make(embed="dp", mlp="tp")(jax.random.key(1))
    saved.save(1, state)
    found = saved.restore(make(embed=None, mlp=("tp", "dp")), jax.random.key(0))
    same(found.state, state)
    assert found.state["w"].sharding.spec == jax.P(None, ("tp", "dp"))


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
    assert sorted(one.name for one in saved.path.iterdir()) == ["lease.json", "steps"]


def test_what_is_saved_may_be_donated_at_once(saved):
    """Orbax and the checksums look at the arrays while the next step already writes its own."""
    make = spmd.init(lambda key: jax.random.normal(key, (512, 512)), "a/dp b/tp", mesh=spmd.make_mesh(dp=2, tp=4))
    update = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    state = make(jax.random.key(0))
    right = [np.array(state)]
    for step in range(3):
        saved.save(step, state)
        state = update(state)
        right.append(np.array(state))
        found = saved.restore(make, jax.random.key(1))
        assert found.step == step
        same(found.state, right[step])


def test_random_keys_are_saved(saved):
    make = spmd.init(lambda key: {"key": key}, {"key": "scalar"}, mesh=spmd.make_mesh(dp=8))
    saved.save(1, make(jax.random.key(7)))
    found = saved.restore(make, jax.random.key(0)).state["key"]
    same(jax.random.key_data(found), jax.random.key_data(jax.random.key(7)))


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


def orbax_alone(saved, make):
    """The last step as it is restored with the guards off: no checksums, and no step before it."""
    return saved._arrays(max(saved._known()), named(make.abstract(jax.random.key(0)), ""))


@pytest.mark.parametrize("damage", [cut, forget])
def test_a_damaged_step_is_named_and_the_one_before_it_is_taken(saved, damage, capsys):
    make = two_steps(saved)
    for path in files(saved, 2):
        damage(path)
    with pytest.raises(_Damaged):
        orbax_alone(saved, make)
    found = saved.restore(make, jax.random.key(0))
    assert found.step == 1
    same(found.state, make(jax.random.key(1)))
    assert "step 2 is damaged" in capsys.readouterr().err


def orbax_accepts_other_numbers(saved, make, right):
    """Whether step 2 would be restored wrong if there were no checksums."""
    with contextlib.suppress(_Damaged):
        return not np.array_equal(orbax_alone(saved, make)[""], right)
    return False


def test_a_flipped_bit_never_changes_a_number(saved, capsys):
    """Orbax restores wrong numbers where a bit of random float32 is flipped."""
    make = spmd.init(lambda key: jax.random.normal(key, (256, 64)), "a/dp b", mesh=spmd.make_mesh(dp=8))
    two_steps(saved, make)
    right = {step: np.asarray(make(jax.random.key(step))) for step in (1, 2)}
    dice, told, accepted = np.random.default_rng(first_seed()), "", 0
    for path in files(saved, 2):
        content = path.read_bytes()
        for at in dice.integers(0, len(content), 4):
            path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            accepted += orbax_accepts_other_numbers(saved, make, right[2])
            found = saved.restore(make, jax.random.key(0))
            np.testing.assert_array_equal(found.state, right[found.step])
            told += capsys.readouterr().err
        path.write_bytes(content)
    assert told.count("not those that were saved") == accepted >= 2
    assert saved.restore(make, jax.random.key(0)).step == 2


def test_a_damaged_step_is_saved_again(saved):
    make = two_steps(saved)
    for path in files(saved, 2):
        forget(path)
    assert saved.restore(make, jax.random.key(0)).step == 1
    saved.save(2, make(jax.random.key(5)))
    saved.save(1, make(jax.random.key(6)))  # this one stays
    found = saved.restore(make, jax.random.key(0))
    assert found.step == 2
    same(found.state, make(jax.random.key(5)))


def says_the_same(damaged, content):
    """Return whether both are the same JSON. The last digit of a time can be one that float64 does not hold."""
    try:
        return json.loads(damaged) == json.loads(content)
    except ValueError:
        return False


def test_damage_beside_the_arrays_never_changes_the_data(saved, mesh, capsys):
    """Of what we write ourselves: a flipped bit could say that other samples come next."""
    new_data = lambda: batches(np.arange(40), "b/dp", batch=4, seed=3, mesh=mesh)
    make = two_steps(saved, data=new_data())
    path, dice = saved.path / "steps" / "2" / "about" / "0.json", np.random.default_rng(first_seed())
    content = path.read_bytes()

    def restored():
        here = new_data()
        found = saved.restore(make, jax.random.key(0), data=here)
        assert here.state["next"] == found.step
        same(found.state, make(jax.random.key(found.step)))
        return found.step

    digits = [i for i, one in enumerate(content) if chr(one).isdigit()]  # with another digit it is JSON still
    wrong = 0
    for at in [*dice.integers(0, len(content), 8), *dice.choice(digits, 4)]:
        damaged = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        path.write_bytes(damaged)
        wrong += not says_the_same(damaged, content)
        assert restored() == (2 if says_the_same(damaged, content) else 1)
    assert wrong > 6
    cut(path)
    assert restored() == 1
    forget(path)
    assert restored() == 1
    assert capsys.readouterr().err.count("step 2 is damaged") == wrong + 2
    path.write_bytes(content)
    assert restored() == 2


def test_all_steps_damaged_is_an_error(saved):
    make = maker()
    saved.save(1, make(jax.random.key(1)))
    saved.wait()
    for path in files(saved, 1):
        forget(path)
    with pytest.raises(PlacementError, match="no checkpoint can be restored"):
        saved.restore(make, jax.random.key(0))


# --- a full disk -----------------------------------------------------------------------------------------------------

FULL = "tests/cluster/full_disk.py"


def check_full(found, count=1):
    assert found.code == 0, found.err
    assert "done" in found.out and "steps [0, 3]" in found.out
    for step in (1, 2):
        assert found.err.count(f"save({step}, state)") == count
    assert "bytes free" in found.err and "a checkpoint could not be saved" in found.err


def test_training_goes_on_when_the_disk_is_full(tmp_path):
    found = alone(FULL, str(tmp_path), "limit")
    check_full(found)
    assert f"path: {tmp_path}/run, " in found.err


@exhaustive
def test_a_strict_program_ends_when_the_disk_is_full(tmp_path):
    found = alone(FULL, str(tmp_path), "limit", "strict")
    assert found.code == 1 and "done" not in found.out
    assert f"path: {tmp_path}/run, " in found.err and "a checkpoint could not be saved" in found.err


@exhaustive
def test_with_the_guard_off_a_full_disk_ends_the_program(tmp_path):
    found = alone(FULL, str(tmp_path), "limit", "bare")
    assert found.code == 1 and "first" not in found.out and "bytes free" not in found.err


@exhaustive
def test_a_disk_that_is_full_in_two_processes(tmp_path):
    check_full(launched(2, FULL, str(tmp_path), "limit"), 2)


@exhaustive
def test_a_disk_that_fills_up_while_one_process_writes(tmp_path):
    """It waits in vain for the other one, until the time that it was given; then both say why, and go on."""
    found = launched(2, FULL, str(tmp_path), "late")
    check_full(found, 2)
    waited = [float(one) for one in re.findall(r"waited ([0-9.]+)", found.out)]
    assert len(waited) == 4 and 0.9 * TIMEOUT < max(waited) < 4 * TIMEOUT, waited
    for rank in range(2):
        told = [line for line in found.err.splitlines() if line.startswith(f"[{rank}]") and "rank 1: " in line]
        assert len(told) == 2, found.err


@exhaustive
def test_a_small_disk_that_is_full(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("this user may not mount a disk")
    try:
        found = alone(FULL, str(tmp_path), str(tmp_path / "filler"))
        check_full(found)
        assert "/run, 0 bytes free" in found.err
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@exhaustive
def test_damage_that_one_process_alone_can_see_sends_all_of_them_back(tmp_path):
    """Only rank 1 reads what is lost; where Orbax's own restore fails in one process, the others wait for minutes."""
    assert launched(2, FULL, str(tmp_path), "never").code == 0
    lost = list((tmp_path / "run" / "steps" / "3" / "state" / "ocdbt.process_1" / "d").iterdir())
    assert lost
    for one in lost:
        one.unlink()
    found = launched(2, FULL, str(tmp_path), "never")
    assert found.code == 0, found.err
    assert "[0] first 2" in found.out and "[1] first 2" in found.out
    assert found.err.count("step 3 is damaged") == 1 and "steps [3, 4, 5]" in found.out


# --- another state ---------------------------------------------------------------------------------------------------


def test_another_state_is_refused_with_all_differences(saved, monkeypatch):
    saved.save(1, maker()(jax.random.key(1)))

    def other(key):
        return {"w": jnp.ones((8, 8)), "bias": jnp.ones(16), "count": jnp.float32(1), "half": jnp.ones(8, jnp.bfloat16)}

    layouts = {"w": "d/dp f/tp", "bias": "f", "count": "scalar", "half": "d"}
    make = spmd.init(other, layouts, mesh=spmd.make_mesh(dp=2, tp=4))
    with pytest.raises(PlacementError) as caught:
        saved.restore(make, jax.random.key(0))
    for part in (
        "['w']: saved [8, 16] P('dp', 'tp'), here [8, 8] P('dp', 'tp')",
        "['bias']: not in the checkpoint; it has ['b']",
        "['count']: saved int32, here float32",
        "['b']: in the checkpoint only",
    ):
        assert part in str(caught.value)
    monkeypatch.setattr(_checkpoints, "_check_same", lambda *_: None)
    with pytest.raises(KeyError) as without:
        saved.restore(make, jax.random.key(0))
    assert "saved" not in str(without.value)


def test_another_dtype_is_cast_if_asked(saved, monkeypatch):
    state = maker()(jax.random.key(1))
    saved.save(1, state)
    make = maker(fn=lambda key: {**new(key), "w": new(key)["w"].astype(jnp.bfloat16)})
    with pytest.raises(PlacementError, match="saved float32, here bfloat16"):
        saved.restore(make, jax.random.key(0))
    found = saved.restore(make, jax.random.key(0), cast=True).state
    np.testing.assert_array_equal(found["w"], state["w"].astype(jnp.bfloat16))
    monkeypatch.setattr(_checkpoints, "_check_same", lambda *_: None)
    assert saved.restore(make, jax.random.key(0)).state["w"].dtype == jnp.bfloat16  # Orbax casts without a word


def test_what_cannot_be_saved(saved):
    with pytest.raises(SpmdError, match="consists of arrays"):
        saved.save(1, {"w": 3})
    with pytest.raises(SpmdError, match="step is an integer"):
        saved.save(-1, {})
    with pytest.raises(SpmdError, match="keep is a positive"):
        checkpoints(saved.path, keep=0)
    with pytest.raises(SpmdError, match="timeout_seconds is a positive"):
        checkpoints(saved.path, timeout_seconds=0)


# --- processes that see other steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "step"), share([("listing", 15), ("hidden", 10)]))
@rare  # how processes agree: test_agreement.py; restoring in two: test_faults.py
def test_all_processes_restore_one_step_where_one_has_an_old_listing(tmp_path, how, step):
    """Rank 0 restored step 15 and rank 1 step 10, without a word."""
    run = tmp_path / "run"
    assert launched(2, STALE, str(run), "save").code == 0
    found = launched(2, STALE, str(run), how)
    assert found.code == 0, found.err
    lines = dict(re.findall(r"\[(\d)\] restored (.*)", found.out))
    right = jax.random.normal(jax.random.key(step), (8,)).reshape(2, 4)
    for rank in range(2):
        number, numbers = lines[f"{rank}"].split(" ", 1)
        assert int(number) == step, found.out
        np.testing.assert_allclose(json.loads(numbers), right[rank], rtol=1e-6)
    assert found.out.count("done") == (2 if how == "listing" else 0)


# --- a run whose saves fail ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full():
    """No file grows beyond a few bytes."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1][1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])


def left_behind(saved):
    return [one.name for one in (saved.path / "steps").iterdir() if not one.name.isdigit()]


def test_a_run_whose_last_save_failed_ends_with_an_error(tmp_path, capsys):
    saved, make = checkpoints(tmp_path / "run"), maker()
    saved.save(1, make(jax.random.key(1)))
    saved.wait()
    with full():
        saved.save(2, make(jax.random.key(2)))
        with pytest.raises(SpmdError, match="could not be saved"):
            saved.close()
    assert "save(2, state)" in capsys.readouterr().err


def test_a_run_whose_first_save_failed_ends_with_an_error(tmp_path):
    saved, make = checkpoints(tmp_path / "run"), maker()
    with full(), pytest.raises(SpmdError, match="could not be saved"), saved:
        saved.save(1, make(jax.random.key(1)))


def test_what_ended_a_block_is_raised_and_a_failed_save_is_said(tmp_path, capsys):
    def fails():
        with full(), checkpoints(tmp_path / "run") as saved:
            saved._settle = lambda *_: saved._failed(1, "no space")
            saved._writing = 1, None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert "a checkpoint could not be saved" in capsys.readouterr().err


def test_a_failed_save_that_a_later_one_made_good_is_no_error(tmp_path, capsys):
    saved, make = checkpoints(tmp_path / "run"), maker()
    saved.save(1, make(jax.random.key(1)))
    saved.wait()
    with full():
        saved.save(2, make(jax.random.key(2)))
        saved.wait()
    assert "could not be saved" in capsys.readouterr().err
    assert left_behind(saved) == []  # on a disk that is full
    saved.save(2, make(jax.random.key(2)))
    saved.close()
    assert checkpoints(tmp_path / "run").restore(make, jax.random.key(0)).step == 2


def test_what_a_killed_save_left_behind_is_removed(tmp_path):
    saved, make = checkpoints(tmp_path / "run"), maker()
    (saved.path / "steps" / "7.orbax-checkpoint-tmp-1").mkdir(parents=True)
    with saved:
        saved.save(1, make(jax.random.key(1)))
    assert left_behind(saved) == []


@rare  # in one process: test_a_run_whose_last_save_failed_ends_with_an_error
def test_the_example_ends_with_another_code_if_its_last_save_failed(tmp_path):
    """It said "which is saved in" and ended with the code that queues it again, and nothing was saved."""
    found = launched(2, "tests/cluster/unsaved.py", str(tmp_path), devices=4)
    assert found.code == 1, (found.out, found.err)
    assert "stopped after" not in found.out and "a checkpoint could not be saved" in found.err
    left = {one.name for one in (tmp_path / "saved").iterdir()} | {
        one.name for one in (tmp_path / "saved/steps").iterdir()
    }
    assert left == {"steps", "2"} | (left & {"lease.json"}), left


# --- which steps stay ------------------------------------------------------------------------------------------------


def steps(saved):
    return sorted(int(one.name) for one in (saved.path / "steps").iterdir() if one.name.isdigit())


def test_a_damaged_step_does_not_take_the_place_of_a_good_one(tmp_path, capsys):
    make = maker()
    with checkpoints(tmp_path / "run", keep=2) as saved:
        two_steps(saved, make)
        for path in files(saved, 2):
            forget(path)
        assert saved.restore(make, jax.random.key(0)).step == 1
        saved.save(3, make(jax.random.key(3)))
        saved.wait()
        assert steps(saved) == [1, 3]
        for path in files(saved, 3):
            forget(path)
        assert saved.restore(make, jax.random.key(0)).step == 1


def test_each_step_has_all_that_it_needs(saved, tmp_path):
    """Losing a folder beside the steps made every step unreadable."""
    make = two_steps(saved)
    for one in saved.path.iterdir():
        if one.name != "steps":
            shutil.rmtree(one) if one.is_dir() else one.unlink()
    assert saved.restore(make, jax.random.key(0)).step == 2
    (tmp_path / "copy" / "steps").mkdir(parents=True)
    shutil.copytree(saved.path / "steps" / "1", tmp_path / "copy" / "steps" / "1")
    with checkpoints(tmp_path / "copy") as other:
        assert other.restore(make, jax.random.key(0)).step == 1


def test_a_step_under_another_name_is_not_taken_for_it(saved, capsys):
    make = two_steps(saved)
    (saved.path / "steps" / "2").rename(saved.path / "steps" / "9")
    with checkpoints(saved.path) as other:
        assert other.restore(make, jax.random.key(0)).step == 1
    assert "step 9 is damaged" in capsys.readouterr().err


def test_folders_of_others_among_the_steps_stay(saved, capsys):
    """Their names are numbers. Retention deleted them, and a damaged one was saved over."""
    others = [saved.path / "steps" / str(step) / "thesis.tex" for step in (1, 2, 7)]
    for one in others:
        one.parent.mkdir(parents=True)
        one.touch()
    make = maker()
    assert saved.restore(make, jax.random.key(0)).step == 0
    for step in (3, 4, 5, 6, 7, 8):
        saved.save(step, make(jax.random.key(step)))
    saved.wait()
    assert f"{others[-1].parent} is there, and is no checkpoint" in capsys.readouterr().err
    assert steps(saved) == [1, 2, 5, 6, 7, 8] and all(one.exists() for one in others)
    assert saved.restore(make, jax.random.key(0)).step == 8


# --- what is saved ---------------------------------------------------------------------------------------------------


def test_empty_arrays_and_empty_states(saved):
    def new(key):
        return {"w": jnp.ones((8, 4)), "none": jnp.zeros((0, 3), jnp.bfloat16), "keys": jax.random.split(key, 0)}

    make = spmd.init(new, {"w": "a/dp b", "none": "a b", "keys": "a"}, mesh=spmd.make_mesh(dp=8))
    state = make(jax.random.key(0))
    saved.save(1, state)
    found = saved.restore(make, jax.random.key(1))
    assert found.step == 1 and found.state["none"].shape == (0, 3) and found.state["keys"].shape == (0,)
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), found.state) == jax.tree.map(
        lambda x: (x.dtype, x.sharding), state
    )
    make = spmd.init(lambda key: {}, {}, mesh=spmd.make_mesh(dp=8))
    saved.save(2, {})
    assert saved.restore(make, jax.random.key(1)) == ({}, 2)


class Odd:
    """A key whose text does not tell which one it is."""

    def __init__(self, rank):
        self.rank = rank

    def __lt__(self, other):
        return self.rank < other.rank

    def __repr__(self):
        return "key"


def test_what_cannot_be_saved_is_said(saved):
    with pytest.raises(SpmdError, match="outside jit"):
        jax.jit(lambda x: saved.save(1, {"w": x}))(jnp.ones(8))
    with pytest.raises(SpmdError, match="same name"):
        saved.save(1, {Odd(0): jnp.ones(8), Odd(1): jnp.zeros(8)})
    gone = jnp.ones(8)
    gone.delete()
    with pytest.raises(SpmdError, match="donated"):
        saved.save(1, {"w": gone})
    with pytest.raises(SpmdError, match=r"spmd\.init"):
        saved.restore(lambda key: jnp.ones(8), jax.random.key(0))
    assert steps(saved) == []


def test_what_is_closed_stays_closed(tmp_path):
    make = maker()
    with checkpoints(tmp_path / "run") as saved:
        saved.save(1, make(jax.random.key(1)))
    saved.close()
    for call in (lambda: saved.save(2, make(jax.random.key(1))), lambda: saved.restore(make, jax.random.key(0))):
        with pytest.raises(SpmdError, match="closed"):
            call()

    def fails():
        with checkpoints(tmp_path / "run") as saved:
            saved.save(2, make(jax.random.key(2)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert steps(saved) == [1, 2]


@pytest.mark.parametrize("path", ["ftp://host/run", "s4://bucket/run", "gs://", "http://host/run"])
def test_places_that_nobody_writes_to_are_refused_at_once(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpmdError, match="bucket"):
        checkpoints(path)
    assert list(tmp_path.iterdir()) == []


def test_orbax_writes_no_arrays_to_s3(tmp_path, monkeypatch):
    """So `checkpoints` refuses it. Once this fails, it need not: TensorStore has a driver, and etils a file system."""
    import orbax.checkpoint as orbax
    from etils import epath
    from fsspec.implementations import memory

    class Files(memory.MemoryFileSystem):
        protocol = ("s3",)

    fsspec.register_implementation("s3", Files, clobber=True)
    monkeypatch.chdir(tmp_path)
    writer = orbax.Checkpointer(orbax.StandardCheckpointHandler())
    with pytest.raises(ValueError, match="should be absolute"):
        writer.save(epath.Path("s3://bucket/run"), args=orbax.args.StandardSave({"w": jnp.ones(4)}))
    writer.close()
    with pytest.raises(SpmdError, match="bucket"):
        checkpoints("s3://bucket/run")


# --- two programs in one folder --------------------------------------------------------------------------------------


@rare  # in one process: test_lease.py
def test_a_second_program_in_the_folder_is_an_error(tmp_path):
    folder, since = tmp_path / "run", time.monotonic()
    first = start(["tests/cluster/tenant.py", str(folder)])
    assert first.stdout.readline() == "saved\n"
    found = alone("tests/cluster/tenant.py", str(folder))
    assert found.code == 1 and "another program saves into this folder" in found.err
    assert f"process {first.pid} on" in found.err
    assert "restored 1" in found.out  # reading disturbs nobody
    first.kill()
    end(first, since)
    again = start(["tests/cluster/tenant.py", str(folder)])
    assert [again.stdout.readline() for _ in range(2)] == ["restored 1\n", "saved\n"]
    assert time.monotonic() - since < 90
    again.kill()
    end(again, since)


@pytest.mark.parametrize("taken", [False, True])
def test_what_another_program_saved_since_the_restore_is_seen(tmp_path, taken):
    """A job restores while the one before it still saves. Both save step 10: ValueError, Destination already exists."""
    make, keep = maker(), {"keep": 2}
    with checkpoints(tmp_path / "run", **keep) as first:
        first.save(5, make(jax.random.key(5)))
        first.wait()
        second = checkpoints(tmp_path / "run", **keep)
        assert second.restore(make, jax.random.key(0)).step == 5
        if taken:
            second.save(6, make(jax.random.key(6)))
            second.wait()
        for step in (9, 10):
            first.save(step, make(jax.random.key(step)))
    with second:
        second.save(10, make(jax.random.key(0)))  # it is there already, and stays
        second.save(11, make(jax.random.key(11)))
        same(second.restore(make, jax.random.key(0)).state, make(jax.random.key(11)))
    assert steps(second) == [10, 11]
    shutil.rmtree(second.path / "steps" / "11")
    with checkpoints(tmp_path / "run") as third:
        same(third.restore(make, jax.random.key(0)).state, make(jax.random.key(10)))


ODD = [
    b"null",
    b"[1]",
    b"[" * 10**5,
    b'{"content": ' * 300 + b"1" + b"}" * 300,
    {},
    {"leaves": 3},
    {"sums": None},
    {"data": 3},
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:20])
def test_odd_metadata_of_a_step(saved, odd, mesh, capsys):
    make, data = maker(), batches(np.arange(40), "b/dp", batch=4, mesh=mesh)
    two_steps(saved, make, data)
    path = saved.path / "steps/2/about/0.json"
    if isinstance(odd, dict):  # by a program that computes the digest too
        about = {name: one for name, one in json.loads(path.read_text())["content"].items() if name in ("step", *odd)}
        about |= odd
        odd = json.dumps({"digest": _checkpoints._digest(about), "content": about}).encode()
    path.write_bytes(odd)
    with checkpoints(saved.path) as other:
        assert other.restore(make, jax.random.key(0), data=data).step == 1
    assert "step 2 is damaged" in capsys.readouterr().err


def test_an_odd_place_in_the_data_is_said_with_the_path(saved, mesh):
    make, data = maker(), batches(np.arange(40), "b/dp", batch=4, mesh=mesh)
    two_steps(saved, make, data)
    path = saved.path / "steps/2/about/0.json"
    about = json.loads(path.read_text())["content"]
    about["data"]["next"] = -5
    path.write_text(json.dumps({"digest": _checkpoints._digest(about), "content": about}))
    with checkpoints(saved.path) as other, pytest.raises(SpmdError, match=f"(?s)number of a batch.*{path.parents[1]}"):
        other.restore(make, jax.random.key(0), data=data)


# --- in a bucket -----------------------------------------------------------------------------------------------------


def test_checkpoints_in_a_bucket(tmp_path, monkeypatch):
    """They were saved in a folder `gs:` of this machine, or failed at the save."""
    monkeypatch.chdir(tmp_path)
    make = maker()
    with serving() as (address, objects):
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        with checkpoints("gs://bucket/run", keep=2) as saved:
            for step in (1, 2, 3):
                saved.save(step, make(jax.random.key(step)))
            found = saved.restore(make, jax.random.key(0))
            assert found.step == 3 and "run/lease.json" in objects
            same(found.state, make(jax.random.key(3)))
        assert {one.split("/")[2] for one in objects} == {"2", "3"}
        del objects["run/steps/3/about/0.json"]
        with checkpoints("gs://bucket/run") as saved:
            assert saved.restore(make, jax.random.key(0)).step == 2
    assert list(tmp_path.iterdir()) == []


# --- numbers that are not finite, and policies -----------------------------------------------------------------------


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    """It overwrote the last good checkpoints: three of NaN, with keep=3."""
    with checkpoints(tmp_path / "run") as saved:
        make = two_steps(saved)
        bad = make(jax.random.key(3))
        bad["half"] = bad["half"].at[5].set(jnp.inf)
        with pytest.raises(SpmdError, match=r"not finite(.|\n)*\['half'\]"):
            saved.save(3, bad)
        assert saved.restore(make, jax.random.key(0)).step == 2
    with checkpoints(tmp_path / "run", finite=False) as saved:
        saved.save(3, bad)
        assert saved.restore(make, jax.random.key(0)).step == 3


@pytest.mark.parametrize(
    ("policy", "stay"),
    share(
        [
            (lambda of: of.BestN(get_metric_fn=lambda metrics: -metrics["loss"], n=2), {3, 5, 6}),
            (lambda of: of.EveryNSteps(interval_steps=2), {2, 4, 6}),
            (lambda of: of.AnyPreservationPolicy([of.LatestN(2), of.EveryNSteps(interval_steps=4)]), {4, 5, 6}),
        ]
    ),
)
def test_policies_of_orbax_say_what_stays(tmp_path, policy, stay):
    from orbax.checkpoint import checkpoint_managers

    keep = policy(checkpoint_managers.preservation_policy)
    losses = {1: 4.0, 2: 3.0, 3: 1.0, 4: 2.5, 5: 2.0, 6: 9.0}
    for steps in ([1, 2, 3], [4, 5, 6]):  # those of an earlier run count too
        with checkpoints(tmp_path / "run", keep=keep) as saved:
            for step in steps:
                saved.save(step, maker()(jax.random.key(step)), metrics={"loss": losses[step]})
    assert {int(one.name) for one in (tmp_path / "run" / "steps").iterdir()} == stay
