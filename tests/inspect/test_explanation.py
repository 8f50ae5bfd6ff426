"""What an explanation says and prints: times, tables, HTML, plain values.

`SPMD_UPDATE_GOLDEN=1 python -m pytest tests/inspect/test_explanation.py -k golden` writes the printed tables anew.
"""

import functools
import html.parser
import io
import json
import os
import re
import sys
from pathlib import Path

import jax
import pytest

import spmd
from spmd import explain
from spmd.inspect import Explanation
from tests.goldens import Golden
from tests.inspect.harness import compiled_gradient, f32, of_text
from tests.inspect.programs import MESH, arguments, make_loss, make_mlp

GOLDEN = Path(__file__).with_name("explanations.txt")
WIDTHS = (60, 100, 140)


# -------------------- cost


def test_time_is_the_models():
    report = compiled_gradient()
    time, h100 = report.time, spmd.accelerators.hardware("h100")
    assert time.compute == pytest.approx(sum(n / h100.peak(d) for d, n in report.written.matmul_flops.items()))
    assert time.memory == pytest.approx(report.written.hbm_bytes / h100.hbm_bandwidth)
    by_hand = sum(
        one.runs * h100.collective_seconds(one.kind, one.bytes, one.axes, report.mesh) for one in report.collectives
    )
    assert time.communication == pytest.approx(by_hand) == pytest.approx(sum(time.by_axis.values()))
    assert time.serial == pytest.approx(time.compute + time.memory + time.communication)
    assert time.overlapped == getattr(time, time.bound) == max(time.compute, time.memory, time.communication)


def test_a_faster_link_shortens_its_axis_alone():
    machine = spmd.accelerators.Hardware(
        "lab", {"float32": 1e12}, 1e11, 1e9, spmd.accelerators.Link(1e9), links={"tp": spmd.accelerators.Link(4e9)}
    )
    slow = spmd.accelerators.Hardware("slow", {"float32": 1e12}, 1e11, 1e9, spmd.accelerators.Link(1e9))
    times = [explain(make_mlp(), *arguments(), hardware=one).time.by_axis for one in (machine, slow)]
    assert times[0]["tp"] == pytest.approx(times[1]["tp"] / 4)
    assert times[0]["dp"] == pytest.approx(times[1]["dp"])


# -------------------- what it prints


HLO = Golden(GOLDEN.with_name("hlo.txt")).read()["another program than what was written"]


@functools.cache
def printed(name: str) -> Explanation:
    if name == "gradient":
        return explain(make_loss(), *arguments(MESH), hardware="h100")
    if name == "forward":
        return explain(make_mlp(), *arguments())
    if name == "nothing":
        return explain(jax.jit(lambda x: x + 1), f32(4), compiled=False)
    program = explain(make_mlp(), *arguments(MESH))
    report = of_text(HLO, mesh=program.mesh)
    machine = spmd.accelerators.hardware("tpu-v5p")
    return Explanation("mlp", program.mesh, program.written, report, hardware=machine, platform="gpu")


NAMES = ("gradient", "forward", "changed", "nothing")


# JAX writes derivatives otherwise in each version, so that other arrays stand beside them.
ESTIMATES = re.compile(r"^  (temporaries .*estimated|about ).*$", re.MULTILINE)


def goldens() -> str:
    parts = [f"=== {name} {width}\n{printed(name).table(width)}\n" for name in NAMES for width in WIDTHS]
    return ESTIMATES.sub(lambda line: re.sub(r"\d", "#", line[0]), "\n".join(parts))


def test_golden_tables():
    if os.environ.get("SPMD_UPDATE_GOLDEN"):
        GOLDEN.write_text(goldens())
    assert goldens() == GOLDEN.read_text()


@pytest.mark.parametrize("width", [40, 60, 77, 100, 140])
@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_wider_than_the_terminal(name, width):
    lines = printed(name).table(width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert not any(line.endswith(" ") for line in lines)
    kinds = {one.kind for one in printed(name).collectives}
    assert all(any(kind in line for line in lines) for kind in kinds)


def test_what_the_compiler_changed_is_flagged():
    report = printed("changed")
    notes = {one.text.partition("(")[0] + one.axes[0]: one.note for one in report.collectives if one.written}
    assert notes["einsumtp"] == "compiled as psum"
    assert [one.note for one in report.collectives if one.runs == 0] == ["the compiler removed it"]
    assert [one.kind for one in report.unwritten] == ["all_to_all", "all_gather"]
    assert [one.where for one in report.unwritten] == ["train.py:41", ""]
    text = " ".join(report.table(100).split())
    assert "! all_to_all" in text and "it does not say for what" in text


def test_the_flag_goes_with_what_is_flagged():
    """The same text without the strangers has none."""
    program = explain(make_mlp(), *arguments(MESH))
    text = "\n".join(line for line in HLO.splitlines() if "all-to-all.4 =" not in line and "all-gather.5" not in line)
    report = Explanation("mlp", program.mesh, program.written, of_text(text, mesh=program.mesh))
    assert report.unwritten == ()
    assert "NOBODY WROTE" not in str(report)


def test_what_crosses_processes_is_summed_apart():
    program = explain(make_mlp(), *arguments(MESH))
    assert program.crossing == () and "between processes" not in str(program)
    report = Explanation("mlp", program.mesh, program.written, None, crossing=("dp",))
    over = [one for one in report.collectives if "dp" in one.axes]
    assert 0 < len(over) < len(report.collectives) and report.between_processes == tuple(over)
    assert report.to_dict()["bytes_between_processes"] == sum(one.total_bytes for one in over)
    text = report.table(100)
    assert "dp crosses processes" in text.splitlines()[0] and "between processes" in text


class Balanced(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tables, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append(0)
        if tag in ("td", "th"):
            self.tables[-1][-1] += int(dict(attrs).get("colspan", 1))
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("name", NAMES)
def test_html_is_well_formed_and_says_the_same(name):
    report = printed(name)
    page = Balanced()
    page.feed(report._repr_html_())
    assert page.open == []
    assert page.tables and all(len(set(rows)) == 1 for rows in page.tables)  # no row is shorter than another
    text = " ".join(page.text)
    for one in report.collectives:
        assert one.kind in text and one.where in text
    if report.unwritten:
        assert 'class="loud"' in report._repr_html_()
    assert "<script" not in report._repr_html_()


@pytest.mark.parametrize("width", WIDTHS)
def test_rich_prints_the_same_in_colours(width):
    console = pytest.importorskip("rich.console")
    for name in NAMES:
        out = console.Console(file=io.StringIO(), width=width, force_terminal=False)
        out.print(printed(name))
        lines = [line.rstrip() for line in out.file.getvalue().rstrip("\n").split("\n")]
        assert "\n".join(lines) == printed(name).table(width)
    colours = console.Console(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    colours.print(printed("changed"))
    loud = [line for line in colours.file.getvalue().split("\n") if "\x1b[1;31m" in line]
    assert any("NOBODY WROTE" in line for line in loud) and any("! all_to_all" in line for line in loud)


def test_rich_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    report = printed("gradient")
    assert str(report) and report._repr_html_() and repr(report)


@pytest.mark.parametrize("name", NAMES)
def test_plain_values_are_json(name):
    report = printed(name)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["total_bytes"] == report.total_bytes == sum(one["total_bytes"] for one in plain["collectives"])
    assert [one["where"] for one in plain["collectives"]] == [one.where for one in report.collectives]
    assert plain["mesh"] == report.mesh
