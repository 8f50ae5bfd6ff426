"""The main job: one program in three modes, on any mesh, however its batch is cut."""

import dataclasses
import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from tests.sampler import rare, share

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 20
SMALL = ["--layers=2", "--d=32", "--hidden=48", "--groups=8", "--queries=2", "--head=4", "--seq=24"]
SMALL += ["--batch=16", f"--steps={STEPS}", "--heldout=4096", "--sample=3"]


@pytest.fixture(scope="module")
def lm() -> Iterator[Any]:
    """The example as a module; users' promotion rules, for optax has its own ideas about dtypes."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield importlib.import_module("train_lm")
    finally:
        sys.path.remove(str(EXAMPLES))


def batches(count: int, c: Any, lm: Any) -> list[jax.Array]:
    text = np.frombuffer((EXAMPLES / "train_lm.py").read_bytes(), np.uint8)
    data = lm.batches(text, c, lm.choose_mesh(c))
    return [data[i] for i in range(count)]


def within(lm: Any, c: Any, mode: str = "explicit") -> Any:
    mesh = lm.choose_mesh(c)
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mode == "reference" else jax.set_mesh(mesh)


def losses(lm: Any, c: Any, mode: str) -> tuple[list[float], Any]:
    """The losses of `STEPS` training steps, and the compiled step."""
    with within(lm, c, mode), spmd.mode(mode):
        state = spmd.init(lambda key: lm.new_state(key, c), lm.state_layouts)(jax.random.key(0))
        data = batches(STEPS, c, lm)
        step, _ = lm.compile_step(state, data[0], c, mode)
        found = []
        for batch in data:
            state, loss = step(state, batch)
            found.append(float(loss))
    return found, step


@rare
def test_three_modes_give_the_same_losses(lm):
    c = lm.read_flags([*SMALL, "--accumulate=2"])
    explicit, step = losses(lm, c, "explicit")
    assert explicit[-1] < explicit[0] - 1  # it learns
    for mode in ("auto", "reference"):
        np.testing.assert_allclose(losses(lm, c, mode)[0], explicit, rtol=0, atol=1e-4)

    with within(lm, c):  # after a step, all of the state lies where it was: nothing is compiled or moved again
        made = spmd.init(lambda key: lm.new_state(key, c), lm.state_layouts).abstract(jax.random.key(0))
    outputs, _ = step.output_shardings
    for wanted, got in zip(jax.tree.leaves(made), jax.tree.leaves(outputs), strict=True):
        assert got.is_equivalent_to(wanted.sharding, wanted.ndim)


class Gradients:
    """Loss and gradients of one batch under some flags, with the compiled program; each is computed once."""

    def __init__(self, lm: Any):
        self.lm = lm
        self.known: dict[tuple[str, ...], Any] = {}

    def __call__(self, *flags: str) -> tuple[float, Any, Any]:
        if flags not in self.known:
            self.known[flags] = self.compute(*flags)
        return self.known[flags]

    def compute(self, *flags: str) -> tuple[float, Any, Any]:
        lm, c = self.lm, self.lm.read_flags([*SMALL, *flags])
        with within(lm, c):
            make = spmd.init(lambda key: lm.new_parameters(key, c), lm.layouts)
            parameters, [batch] = make(jax.random.key(0)), batches(1, c, lm)
            fn = jax.jit(lambda parameters, batch: lm.loss_and_gradients(parameters, batch, c))
            compiled = fn.lower(parameters, batch).compile()
            loss, gradients = compiled(parameters, batch)
        for x, gradient in zip(jax.tree.leaves(parameters), jax.tree.leaves(gradients), strict=True):
            assert x.sharding.is_equivalent_to(gradient.sharding, x.ndim)
            assert gradient.dtype == "float32"
        return float(loss), jax.tree.map(np.asarray, gradients), compiled


@pytest.fixture(scope="module")
def gradients(lm) -> Gradients:
    return Gradients(lm)


@pytest.mark.parametrize(
    "flags",
    share(
        [
            ("--accumulate=4",),
            ("--dp=8", "--tp=1"),
            ("--dp=1", "--tp=8"),
            ("--dp=2", "--tp=4", "--accumulate=2"),
        ]
    ),
    ids=" ".join,
)
@rare
def test_meshes_and_micro_batches_change_nothing(gradients, flags):
    loss, wanted, _ = gradients()
    other, found, _ = gradients(*flags)
    assert abs(other - loss) < 1e-5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), found, wanted)


def reductions(report: Any, axis: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in report:
        if axis in item.axes and item.kind.startswith("psum"):
            found[item.kind] = found.get(item.kind, 0) + item.count
    return found


@rare
def test_gradients_are_reduced_once_however_many_micro_batches(gradients):
    one, four = (spmd.inspect.collectives(gradients(*flags)[2]) for flags in ((), ("--accumulate=4",)))
    matrices = 9
    assert reductions(four, "dp") == reductions(one, "dp")
    assert reductions(one, "dp")["psum_scatter"] == matrices
    # Of the gathers over dp there is one per matrix too; the activations' traffic over tp is per micro-batch.
    assert len([item for item in four if item.kind == "all_gather" and "dp" in item.axes]) == matrices
    assert reductions(four, "tp")["psum_scatter"] == 4 * reductions(one, "tp")["psum_scatter"]


@rare
def test_no_device_holds_whole_logits_or_weights(gradients, lm):
    text = gradients("--dp=2", "--tp=4")[2].as_text()
    assert re.search(r"f32\[8,24,64\]", text)  # b/dp s v/tp
    assert not re.search(r"\b256\b[^=(]*\]\{", text)


@rare
def test_tied_tables(gradients):
    loss, found, _ = gradients("--tied")
    assert list(found["vocab"]) == ["embed"]
    assert abs(loss - gradients()[0]) < 1


@rare
def test_bfloat16_has_float32_gradients_near_those_of_float32(gradients):
    loss, wanted, _ = gradients()
    low, found, _ = gradients("--bf16")
    assert 0 < abs(low - loss) < 0.01
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


def test_the_whole_run(lm, tmp_path, capsys):
    flags = ["--steps=2", f"--json={tmp_path / 'out.json'}", f"--plot={tmp_path / 'out.png'}"]
    results = lm.main([*SMALL, *flags, f"--data={EXAMPLES}", "--heldout=1024", "--batch=8"])
    written = json.loads((tmp_path / "out.json").read_text())
    names = "first losses heldout_bits unigram_bits bigram_bits mesh parameters collectives timings"
    assert set(names.split()) == set(written)
    assert written["losses"] == results["losses"] and len(results["losses"]) == 2
    assert written["mesh"] == {"dp": 4, "tp": 2}
    explicit, auto = (written["collectives"][mode] for mode in ("explicit", "auto"))
    assert abs(explicit["loss"] - auto["loss"]) < 1e-4
    assert 0 < explicit["total_bytes"] < auto["total_bytes"]
    assert (tmp_path / "out.png").stat().st_size > 5000
    shown = capsys.readouterr().out
    for text in ("vocab/embed", "v/tp d/dp", "psum_scatter", "bigram entropy", "tokens/s", "a sample", "auto"):
        assert text in shown


def test_files_that_cannot_be_written_do_not_change_how_a_run_ends(lm, tmp_path, capsys, monkeypatch):
    """A plot that could not be written turned exit code 75 into 1, and its default was one file for all users."""
    results = {"first": 0, "losses": [5.0, 4.0], "timings": {"step": 1.0}}
    lm.write(results, dataclasses.replace(lm.Config(), plot=str(tmp_path / "none" / "a.png"), json=str(tmp_path / "j")))
    said = capsys.readouterr().out
    assert "not written: " in said and "none/a.png" in said and "loss curve" not in said
    assert json.loads((tmp_path / "j").read_text()) == results
    monkeypatch.setattr(lm.tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        lm.write(results, lm.Config())
    assert len(list(tmp_path.glob("*/loss.png"))) == 2
    assert all(one.stat().st_mode & 0o077 == 0 for one in tmp_path.glob("train_lm-*"))


@rare
def test_ctrl_c_ends_with_the_score_so_far_and_a_sample(lm, capsys, monkeypatch):
    stopping = lm.cluster.stopping

    def interrupted(step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return stopping(step)

    monkeypatch.setattr(lm.cluster, "stopping", interrupted)
    results = lm.main([*SMALL, f"--data={EXAMPLES}", "--heldout=1024", "--batch=8"])
    said = capsys.readouterr().out
    assert 3 <= len(results["losses"]) < STEPS and "heldout_bits" in results
    assert f"stopped after step {len(results['losses'])} of {STEPS}, which is not saved" in said
    assert "this model" in said and "sample" in said and "\x1b" not in said


def test_every_setting_is_a_flag_with_its_meaning(lm):
    c = lm.read_flags(["--tied", "--no-bf16", "--lr=0.5", "--steps=7"])
    assert c == dataclasses.replace(lm.Config(), tied=True, lr=0.5, steps=7)


def test_windows_hold_each_byte_once(lm):
    c = lm.read_flags(["--seq=5"])
    text = np.arange(24, dtype=np.uint8)
    windows = lm.Windows(text, c)
    assert len(windows) == 4  # 21 bytes would be enough
    np.testing.assert_array_equal(np.concatenate([windows[i][1:] for i in range(4)]), text[1:21])
    assert [windows[i][0] for i in range(4)] == [0, 5, 10, 15]


def test_windows_depend_on_seed_and_step_only(lm):
    c = lm.read_flags(SMALL)
    with within(lm, c):
        [a0, a1], [b0, b1] = batches(2, c, lm), batches(2, c, lm)
        [other] = batches(1, dataclasses.replace(c, seed=1), lm)
    np.testing.assert_array_equal(a0, b0)
    np.testing.assert_array_equal(a1, b1)
    assert not np.array_equal(a0, a1) and not np.array_equal(a0, other)


def test_held_out_files_are_others(lm, tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * 100)
    train, held = lm.text_bytes.split(str(tmp_path), 150, 3, least=100)
    assert len(held) == 150 and not set(train) & set(held)
    assert sorted(set(train) | set(held)) == list(range(65, 85))
    with pytest.raises(SystemExit, match="too little text: 1,800 bytes to train on and 150 held out"):
        lm.text_bytes.split(str(tmp_path), 150, 3, least=200)


def test_entropies_of_known_texts(lm):
    unigram, bigram = lm.text_bytes.entropies(np.tile(np.arange(4, dtype=np.uint8), 1000))
    assert abs(unigram - 2) < 1e-3 and abs(bigram) < 1e-3
    unigram, bigram = lm.text_bytes.entropies(np.random.default_rng(0).integers(0, 4, 100_000).astype(np.uint8))
    assert abs(unigram - 2) < 1e-3 and abs(bigram - 2) < 1e-2
