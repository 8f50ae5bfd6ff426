"""A lease: who holds a folder, until when, and what others hear. Two real programs are in `test_checkpoints.py`."""

import json
import time

import jax
import jax.numpy as jnp
import pytest
from etils import epath

import spmd
from spmd.cluster import _checkpoints
from spmd.cluster._checkpoints import Lease
from spmd.errors import SpmdError


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(_checkpoints, "BEAT", 1.1)  # files tell whole seconds
    monkeypatch.setattr(_checkpoints, "PATIENCE", 2.3)


@pytest.fixture
def elsewhere(monkeypatch):
    """Makes what follows another program, on another host."""

    def move(name="b"):
        monkeypatch.setattr(_checkpoints, "_ME", name)
        monkeypatch.setattr(_checkpoints, "_system", lambda: name)

    return move


def written(folder, **more):
    content = {"holder": "x", "host": "there", "process": "1", "system": "another", **more}
    (folder / "lease.json").write_text(json.dumps(content))


def test_who_holds_it_goes_on_until_the_release(tmp_path):
    lease, other = Lease(epath.Path(tmp_path)), Lease(epath.Path(tmp_path))
    assert not lease.held and lease.take() == "" and lease.held
    assert other.take() == ""  # of the same process
    lease.release()
    assert not lease.held
    other.release()
    assert list(tmp_path.iterdir()) == []
    lease.release()


def test_who_lives_is_named_and_who_is_silent_is_not_waited_for(tmp_path, elsewhere):
    first, second = Lease(epath.Path(tmp_path)), Lease(epath.Path(tmp_path))
    assert first.take() == ""
    content = (tmp_path / "lease.json").read_text()
    mine = _checkpoints._ME
    elsewhere()
    assert json.loads(content)["holder"] == mine
    # the thread of the first one is in this process, so its words are written by hand
    first._ended.set()
    since = time.monotonic()
    assert second.take() == "" and 2.3 <= time.monotonic() - since < 6
    assert json.loads((tmp_path / "lease.json").read_text())["holder"] == "b"
    second.release()


def test_a_word_while_one_waits(tmp_path, monkeypatch):
    written(tmp_path)
    slept = time.sleep

    def meanwhile(seconds):
        slept(1.1)
        written(tmp_path)

    monkeypatch.setattr(_checkpoints.time, "sleep", meanwhile)
    assert Lease(epath.Path(tmp_path)).take() == "process 1 on there"


def test_of_two_that_take_it_in_one_moment_the_last_word_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(_checkpoints.time, "sleep", lambda seconds: written(tmp_path))
    lease = Lease(epath.Path(tmp_path))
    assert lease.take() == "process 1 on there" and not lease.held


def test_who_was_looked_at_before_is_not_waited_for_again(tmp_path):
    written(tmp_path)
    lease = Lease(epath.Path(tmp_path))
    assert lease.holder()["host"] == "there"
    time.sleep(2.4)
    since = time.monotonic()
    assert lease.take() == "" and time.monotonic() - since < 1
    lease.release()


def test_a_program_that_ended_on_this_system_is_not_waited_for(tmp_path):
    if _checkpoints._system():
        written(tmp_path, system=_checkpoints._system(), process="999999999")
        assert Lease(epath.Path(tmp_path)).holder() is None
        written(tmp_path, system=_checkpoints._system(), process="1")
        assert Lease(epath.Path(tmp_path)).holder() is not None


def test_a_lease_that_was_taken_meanwhile_is_noticed(tmp_path):
    """As by a process that stood still for longer than the others wait."""
    lease = Lease(epath.Path(tmp_path))
    assert lease.take() == ""
    written(tmp_path)
    assert lease.take() == "process 1 on there"
    lease.release()
    assert (tmp_path / "lease.json").exists()  # the other one's


def test_a_file_that_says_nothing(tmp_path):
    (tmp_path / "lease.json").write_text("{")
    lease = Lease(epath.Path(tmp_path))
    assert lease.holder()["host"] == "another host"
    assert lease.take() == ""
    lease.release()


ODD = [
    b"null",
    b"{}",
    b"[1]",
    b"3",
    b"\xff\xfe",
    b"[" * 10**5,
    b'{"holder": "x"}',
    b'{"holder": 3, "host": 1}',
    b"thesis",
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[:20].decode("latin"))
def test_a_file_of_somebody_else_is_an_error_with_its_path_and_stays(tmp_path, odd):
    """It ended in a TypeError or KeyError, or was overwritten after half a minute."""
    file = tmp_path / "lease.json"
    file.write_bytes(odd)
    with pytest.raises(OSError, match=str(file)):
        Lease(epath.Path(tmp_path)).take()
    make = spmd.init(lambda key: {"w": jnp.ones(8)}, {"w": "d/dp"}, mesh=spmd.make_mesh(dp=8))
    saved = spmd.cluster.checkpoints(tmp_path)
    state, _ = saved.restore(make, jax.random.key(0))
    for call in (lambda: saved.save(1, state), saved.close):
        with pytest.raises(SpmdError, match=f"(?s)could not be saved.*{file}"):
            call()
    assert file.read_bytes() == odd


def test_a_lease_becomes_odd_while_it_is_held(tmp_path):
    lease = Lease(epath.Path(tmp_path))
    assert lease.take() == ""
    (tmp_path / "lease.json").write_text("null")
    lease.release()
    assert (tmp_path / "lease.json").read_text() == "null"


@pytest.mark.parametrize("process", ["", "x", "-1", "1" * 30, "9" * 5000])
def test_a_process_with_an_odd_number_may_live(tmp_path, process):
    written(tmp_path, system=_checkpoints._system(), process=process)
    assert Lease(epath.Path(tmp_path)).holder() is not None


@pytest.mark.parametrize("torn", [b"", b"{", b'{"holder": "', b'{"holder": "x", "ho', bytes(100)])
def test_a_lease_that_was_not_written_to_its_end(tmp_path, torn):
    """On a disk that is full, or before the power went."""
    (tmp_path / "lease.json").write_bytes(torn)
    assert Lease(epath.Path(tmp_path)).holder()["host"] == "another host"
