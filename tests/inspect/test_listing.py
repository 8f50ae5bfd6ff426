"""`spmd.check(...).source()`: the user's lines, and the layouts beside them.

`SPMD_UPDATE_GOLDEN=1 python -m pytest tests/inspect/test_listing.py` writes the printed listings anew.
"""

from __future__ import annotations

import ast
import html.parser
import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from tests.checker.twins.registry import Pair, is_float, load, refused
from tests.conftest import case_count
from tests.inspect.listed_programs import MESH, PROGRAMS
from tests.sampler import first_seed

GOLDEN = Path(__file__).with_name("listings.txt")
PAIRS = list(load().values())
EXHAUSTIVE = case_count() >= 100
SAMPLE = PAIRS if EXHAUSTIVE else random.Random(first_seed()).sample(PAIRS, case_count())
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)

named = lambda pair: f"{pair.group}-{pair.name}"


def listing(name: str) -> Any:
    fn, structs = PROGRAMS[name]
    return spmd.check(fn, *structs).source()


def values(source: Any) -> dict[str, set[str]]:
    """The layouts of each name, wherever it stands."""
    found: dict[str, set[str]] = {}
    for block in source.blocks:
        for line in block.lines:
            for value in line.values:
                found.setdefault(value.name, set()).update(value.layouts)
    return found


# -------------------- as printed


if os.environ.get("SPMD_UPDATE_GOLDEN"):
    GOLDEN.write_text("".join(f"## {name}\n{listing(name).text(100)}\n\n" for name in PROGRAMS))

WRITTEN = dict(part.split("\n", 1) for part in GOLDEN.read_text().split("## ")[1:])


def test_all_listings_are_pinned():
    assert WRITTEN.keys() == PROGRAMS.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_as_pinned(name):
    assert f"{listing(name).text(100)}\n\n" == WRITTEN[name]


def test_a_listing_is_the_program_and_comments():
    """Each line is there as it is written, so that a function can be pasted with its layouts."""
    source = listing("mlp")
    for block in source.blocks:
        shown = "\n".join(str(type(source)((block,))).splitlines()[3:])
        written = Path(block.file).read_text().splitlines()
        for line in block.lines:
            assert line.text.strip() == written[line.number - 1].strip()
            assert line.text in shown
        tree = ast.parse("\n".join(line.removeprefix("  ") for line in shown.splitlines()))
        assert tree.body[0].name == block.name


# -------------------- facts


def test_facts_are_values():
    source = listing("a_wrong_one")
    [block] = source.blocks
    assert source.mesh == {"dp": 2, "tp": 4}
    assert block.name == "a_wrong_one"
    assert block.file.endswith("listed_programs.py")
    [wrong] = [line for line in block.lines if line.findings]
    assert wrong.text == "    norms = jnp.sqrt(jnp.sum(x**2, axis=1))"
    assert [one.kind for one in wrong.findings] == ["nonlinear"]
    assert f":{wrong.number} " in wrong.findings[0].line
    assert {name: set(v.layouts) for line in block.lines for v in line.values for name in [v.name]} == values(source)


def body(pattern):
    @spmd.kernel(pattern, mesh=MESH)
    def step(x):
        total = x.sum(1)
        wide = jnp.tanh(x)
        return lax.psum(total + 0 * wide.max(1), "tp")

    return spmd.check(step, X).source()


def test_another_layout_is_another_text():
    """Meta-test: with the same body, what is known of each value follows the string."""
    divided, swapped, merged = body("b/dp d/tp -> b/dp"), body("b/tp d/dp -> b/tp"), body("b d/dp/tp -> b")
    assert values(divided)["total"] == {"b/dp {U:tp}"}
    assert values(swapped)["total"] == {"b/tp {U:dp}"}
    assert values(merged)["total"] == {"b {U:dp,tp}"}
    assert [values(one)["wide"] for one in (divided, swapped, merged)] == [{"b/dp d/tp"}, {"b/tp d/dp"}, {"b d/dp/tp"}]
    assert len({str(one) for one in (divided, swapped, merged)}) == 3


def test_names_come_from_strings_and_go_with_their_dimensions():
    @spmd.kernel("b/dp s d/tp -> b/dp s d/tp", mesh=MESH)
    def step(x):
        turned = x.transpose(2, 0, 1)
        merged = x.reshape(-1, x.shape[-1])
        apart = merged.reshape(x.shape)
        cut = x[:, 1:]
        gathered = lax.all_gather(x, "tp", axis=2, tiled=True)
        renamed = spmd.annotate(x, "batch/dp ... d/tp")
        unnamed = jnp.zeros((3, 5)) + 1
        return apart + renamed + 0 * turned.sum() * cut.sum() * gathered.sum() * unnamed.sum() * merged.sum()

    found = values(spmd.check(step, jax.ShapeDtypeStruct((4, 6, 8), jnp.float32)).source())
    assert found["turned"] == {"d/tp b/dp s"}
    assert found["merged"] == {"(b/dp s) d/tp"}
    assert found["apart"] == {"b/dp s d/tp"}
    assert found["cut"] == {"b/dp 5 d/tp"}
    assert found["gathered"] == {"b/dp s d"}
    assert found["renamed"] == {"batch/dp s d/tp"}
    assert found["unnamed"] == {"3 5"}


def test_what_else_is_known_stands_behind():
    @spmd.kernel("b/dp d/tp -> b/dp", mesh=MESH, check="off")
    def step(x):
        partial = x.sum(1)
        largest = x.max(1)
        place = lax.axis_index("tp")
        moved = lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)])
        scalar = partial.sum()
        return (
            lax.psum(partial, "tp")
            + 0 * lax.pmax(largest, "tp")
            + 0 * place.astype(jnp.float32) * moved.sum()
            + 0 * scalar
        )

    found = values(spmd.check(step, X).source())
    assert found["partial"] == {"b/dp {U:tp}"}
    assert found["largest"] == {"b/dp ? pending max over tp"}
    assert found["place"] == {"scalar {V:tp}"}
    assert found["moved"] == {"b/dp d/? {V:tp}"}
    assert found["scalar"] == {"scalar {U:dp,tp}"}


def test_a_value_and_its_gradient_are_told_apart():
    found = values(listing("a_gradient_in_the_body"))
    assert found["value"] == {"scalar {U:dp}"}
    assert found["g"] == {"d f {U:dp}"}


def test_names_that_are_not_told_apart_stand_together():
    def pair(x):
        whole = lax.psum(x, "tp")
        return x * 2, whole + 1

    @spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=MESH, check="off")
    def step(x):
        a, b = pair(x)
        c, d = x + 1, lax.psum(x, "tp")
        carry, _ = lax.scan(lambda c, _: ((c[0] + 1, c[1]), None), (a, d), None, length=2)
        return a + b + c + d + carry[0]

    found = values(spmd.check(step, X).source())
    assert len(found["a, b"]) == 2
    assert "a" not in found
    assert found["c"] == {"b/dp d/tp"}
    assert found["d"] == {"b/dp d/?"}
    assert found["carry"] == {"b/dp d/tp"}
    assert "_" not in found


# -------------------- where it is shown


def test_a_notebook_shows_a_table():
    class Cells(html.parser.HTMLParser):
        texts: list[str] = []

        def handle_data(self, data):
            self.texts.append(data)

    parser = Cells()
    parser.feed(listing("a_wrong_one")._repr_html_())
    assert '    return lax.psum(norms, "tp")' in parser.texts
    assert "norms  b/dp ? over tp" in parser.texts
    assert any(text.strip().startswith("^ nonlinear: each device along tp") for text in parser.texts)


def test_rich_prints_the_same():
    console = pytest.importorskip("rich.console")
    out = io.StringIO()
    source = listing("a_wrong_one")
    console.Console(file=out, width=120, color_system=None).print(source)
    assert [line.rstrip() for line in out.getvalue().splitlines()] == source.text(120).splitlines()


def test_other_findings_do_not_have_the_program():
    with pytest.raises(spmd.errors.SpmdError, match="do not have the program"):
        spmd.inspect.Findings().source()


def test_findings_and_errors_can_be_sent_to_another_process():
    fn, structs = PROGRAMS["a_wrong_one"]
    findings = spmd.check(fn, *structs)
    assert pickle.loads(pickle.dumps(findings)) == findings
    assert pickle.loads(pickle.dumps(findings))[0].line.number == findings[0].line.number
    with pytest.raises(spmd.errors.ReplicationError) as caught:
        fn(jnp.ones((8, 16)))
    assert caught.value.program is not None
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.findings, again.program) == (str(caught.value), caught.value.findings, None)


def test_there_may_be_nothing_to_show():
    source = spmd.check(lambda x: x + 1, X).source()
    assert not source.blocks
    assert "no kernel" in str(source)


# -------------------- broadly


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("pair", SAMPLE, ids=named)
def test_every_twin_can_be_shown(pair: Pair, raw: bool) -> None:
    """No exception, every finding at its line, and no name that the line does not have."""
    for right in (True, False):
        fn = pair.correct if right else pair.mistaken
        run = jax.jit(pair.shard_map(fn)) if raw else pair.kernel(fn)
        try:
            findings = spmd.check(run, *pair.arguments())
        except Exception:  # JAX, or a verb, refuses to trace it
            assert not right or raw or refused(pair)
            continue
        source = findings.source()
        lines = [line for block in source.blocks for line in block.lines]
        assert sorted(str(one) for line in lines for one in line.findings) == sorted(map(str, findings))
        assert not right or any(line.values for line in lines)
        assert str(source)
        assert source._repr_html_()


def scored(pair: Pair, run):
    def score(*args):
        outs = [x for x in jax.tree.leaves(run(*args)) if is_float(x)]
        return sum((jnp.real(x).astype(jnp.float32).sum() for x in outs), jnp.zeros(()))

    return score


@pytest.mark.parametrize("pair", [pair for pair in SAMPLE if not pair.no_gradient], ids=named)
def test_a_gradient_shows_the_layouts_of_its_forward_pass(pair: Pair) -> None:
    """JAX rewrites the program that it differentiates, and keeps other values. What a line makes stays the same."""
    run, args = pair.kernel(pair.correct), pair.arguments()
    floats = tuple(i for i, x in enumerate(args) if is_float(x))
    if not floats:
        pytest.skip("nothing to differentiate by")
    plain = values_by_line(spmd.check(run, *args).source())
    shown = values_by_line(spmd.check(jax.grad(scored(pair, run), argnums=floats), *args).source())
    for place, layouts in shown.items():
        assert layouts <= plain[place], place


def values_by_line(source: Any) -> dict[tuple[str, int, str], set[str]]:
    """The layouts of each name on each line of the pair's own file."""
    found: dict[tuple[str, int, str], set[str]] = {}
    for block in source.blocks:
        for line in block.lines if "twins" in block.file else ():
            for value in line.values:
                found.setdefault((block.file, line.number, value.name), set()).update(value.layouts)
    return found


def test_what_a_loop_stacks_is_not_what_left_the_body():
    """The tangent of a kernel with integers, by `float0`, for each step of a loop."""
    mesh = spmd.make_mesh(dp=2)
    kernel = spmd.kernel("b/dp d, b/dp -> b/dp d, b/dp", mesh=mesh)(lambda x, i: (x * 2, i + 1))

    def steps(x, i):
        tangents = (x, np.zeros(i.shape, jax.dtypes.float0))
        return jax.lax.scan(lambda c, _: (c, jax.jvp(kernel, (x, i), tangents)[1][0]), x, None, length=3)[1]

    found = spmd.check(steps, np.ones((4, 2), np.float32), np.arange(4, dtype=np.int32))
    assert "4/dp 2" in str(found.source())
