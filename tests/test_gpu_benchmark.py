"""The command for a GPU runs, at small sizes, wherever there is none."""

import json

import spmd
from tests.benchmarks import gpu
from tests.sampler import rare


@rare
def test_the_command_writes_its_figures_and_prints_a_table(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu, "profile", lambda: spmd.accelerators.hardware("h100"))  # so that a time is predicted
    assert gpu.main(["--json", str(tmp_path / "gpu.json"), "--seconds", "0"]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert all(seconds > 0 for name in ("block", "transform", "experts") for seconds in found[name].values())
    assert found["decoder"]["predicted_seconds"] > 0 and found["decoder"]["tokens_per_second"] > 0
    text = capsys.readouterr().out
    for line in (
        "block, strings",
        "shard_map by hand",
        "plain jit",
        "jnp.fft.fftn",
        "MFU",
        "explain's time, all overlaps",
        "speeds measured here",
        "experts without a capacity",
        "compile",
    ):
        assert line in text
