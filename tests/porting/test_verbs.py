"""Each collective as the verb that says it."""

import re

import pytest

from tests.porting.programs import UNTYPED, mapped, ported

SAID = {
    "psum": (["lax.psum(x.sum(1), 'tp')"], "(P('dp', 'tp'),)", "P('dp')", [(4, 8)], ['"b/dp {U:tp} -> b/dp"']),
    "pmean": (
        ["lax.pmean(x.mean(0), 'dp')"],
        "(P('dp'),)",
        "P()",
        [(4, 8)],
        ['"d {U:dp} -> d") / spmd.axis_size("dp")'],
    ),
    "psum_of_two_axes": (
        ["lax.psum(x.sum(), ('dp', 'tp'))"],
        "(P('dp', 'tp'),)",
        "P()",
        [(4, 8)],
        ['"{U:dp,tp} -> scalar"'],
    ),
    "pmax": (
        ["lax.pmax(jnp.max(x, 1), 'tp')"],
        "(P(None, 'tp'),)",
        "P()",
        [(4, 8)],
        ['spmd.reduce(x, "d f/tp -> d", "max")'],
    ),
    "all_gather": (
        ["lax.all_gather(x, 'tp', axis=1, tiled=True, to='invarying')"],
        "(P('dp', 'tp'),)",
        "P('dp')",
        [(4, 8)],
        ['"b/dp d/tp -> b/dp d", to="invarying"'],
    ),
    "all_gather_of_rows": (
        ["lax.all_gather(x, 'tp').sum(0)"],
        "(P('dp', 'tp'),)",
        "P('dp')",
        [(4, 8)],
        ["spmd.rearrange(x,", "-> k/tp b/dp m"],
    ),
    "psum_scatter": (
        ["lax.psum_scatter(x @ y, 'tp', scatter_dimension=1, tiled=True)"],
        "(P('dp', 'tp'), P('tp'))",
        "P('dp', 'tp')",
        [(4, 8), (8, 12)],
        ['"b/dp f {U:tp} -> b/dp f/tp"'],
    ),
    "all_to_all": (
        ["lax.all_to_all(x, 'tp', 1, 0, tiled=True)"],
        "(P('tp'),)",
        "P(None, 'tp')",
        [(8, 8)],
        ['"d/tp f -> d f/tp"'],
    ),
    "all_to_all_of_slots": (
        ["lax.all_to_all(x, 'tp', 0, 0).sum(0, keepdims=True)"],
        "(P('tp'),)",
        "P('tp')",
        [(16, 8)],
        ["jnp.squeeze(", "spmd.all_to_all(spmd.rearrange("],
    ),
    "shift": (
        ["lax.ppermute(x, 'tp', [(0, 1), (1, 2), (2, 3), (3, 0)])"],
        "(P('tp'),)",
        "P('tp')",
        [(8,)],
        ['spmd.shift(x, "[d/tp]", 1)'],
    ),
    "shift_back": (
        ["lax.ppermute(x, 'tp', [(0, 3), (1, 0), (2, 1), (3, 2)])"],
        "(P('tp'),)",
        "P('tp')",
        [(8,)],
        ['spmd.shift(x, "[d/tp]", -1)'],
    ),
    "shift_without_wrapping": (
        ["lax.ppermute(x, 'tp', [(0, 1), (1, 2), (2, 3)])"],
        "(P('tp'),)",
        "P('tp')",
        [(8,)],
        ['spmd.shift(x, "[d/tp]", 1, wrap=False)'],
    ),
    "ppermute": (
        ["lax.ppermute(x, 'tp', [(0, 2), (2, 0)])"],
        "(P('tp'),)",
        "P('tp')",
        [(8,)],
        ['spmd.ppermute(x, "[d/tp]", [(0, 2), (2, 0)])'],
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_a_collective_is_said(tmp_path, name):
    lines, specs, out, shapes, expected = SAID[name]
    found = ported(tmp_path, mapped(lines, specs, out, UNTYPED if ".sum(0)" in lines[0] else ""), *shapes)
    [said] = found.said
    assert not found.differences and not found.notes, found
    assert all(part in said.text for part in expected), said
    assert said.text


GROUPS = {
    "sums_of_sums": (
        [
            "x = lax.psum_scatter(x.sum(0), 'tp', axis_index_groups=[[0, 1], [2, 3]], tiled=True)",
            "x = lax.psum(x, ('tp',), axis_index_groups=[[0, 2], [1, 3]])",
            "lax.all_gather(x, 'tp', axis_index_groups=[[0, 1], [2, 3]], tiled=True)",
        ],
        "(P('tp'),)",
        "P()",
        UNTYPED,
        ["f {U:tp0,tp1} -> f/tp1 {U:tp0}", "f/tp1 {U:tp0} -> f/tp1", "f/tp1 -> f"],
    ),
    "turned_there_and_back": (
        [
            "x = lax.all_to_all(x, 'tp', 1, 0, axis_index_groups=[[0, 1], [2, 3]], tiled=True)",
            "x = x / lax.axis_size('tp')",
            "lax.all_to_all(x, 'tp', 0, 1, axis_index_groups=[[0, 1], [2, 3]], tiled=True)",
        ],
        "(P(('tp',)),)",
        "P('tp')",
        "",
        ["d/tp0/tp1 f -> d/tp0 f/tp1", "d/tp0 f/tp1 -> d/tp0/tp1 f", 'spmd.axis_size(("tp0", "tp1"))'],
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_an_axis_are_an_axis(tmp_path, name):
    lines, specs, out, more, expected = GROUPS[name]
    found = ported(tmp_path, mapped(lines, specs, out, more), (16, 8))
    assert "mesh=spmd.make_mesh(dp=2, tp0=2, tp1=2, devices=mesh.devices.ravel()))" in found.text, found
    assert all(part in found.text for part in expected), found.text
    assert not found.differences and "results: equal" in found.same and all(one.text for one in found.said), found
    assert any(re.match("sent for results: .* in both", one) for one in found.same)


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([[0, 1], [2, 3]], "groups of tp: on a mesh with tp0=2, tp1=2 in its place it is over tp1"),
        ([[0, 2], [1, 3]], "groups of tp: on a mesh with tp0=2, tp1=2 in its place it is over tp0"),
        ([[0, 3], [1, 2]], "groups of tp that are neither neighbours nor one of each"),
    ],
)
def test_groups_that_stay_are_told(tmp_path, groups, why):
    """The mean of each group, which depends on how many groups there are: a kernel would need a dimension of them."""
    lines = [f"x - lax.pmean(x.mean(0, keepdims=True), 'tp', axis_index_groups={groups})"]
    found = ported(tmp_path, mapped(lines, "(P('tp'),)", "P('tp')", UNTYPED), (8, 3))
    [said] = found.said
    assert (said.text, said.why) == ("", why) and not found.differences
    assert "spmd.kernel(" not in found.text and "shard_map stays" in found.notes[0]
