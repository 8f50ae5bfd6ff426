"""Pictures of plans: what they say moves must be enough to make every device's next shard, and no more."""

import math
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest

import spmd
from spmd.language import Layout
from tests.inspect.drawings import SVG, blocks_of_svg, devices_of_text, expected_index, faults_of_svg, steps_of_svg
from tests.sampler import Sampler, seeds

PATTERNS = [
    ("a/x b -> a b/x", {"x": 4}),
    ("a/x/y b -> a/y b/x", {"x": 2, "y": 3}),
    ("a/x b/y -> a/y b/x", {"x": 2, "y": 2, "z": 2}),
    ("a/y/x -> a/x/y", {"x": 2, "y": 4}),
    ("a/x b -> a b", {"x": 5, "y": 2}),
    ("a b -> a/x b/y", {"x": 2, "y": 2}),
    ("a b {U:x} -> a/x b", {"x": 4, "y": 2}),
    ("a b {U:x,y} -> a/y b", {"x": 2, "y": 2}),
    ("a/x b {U:y} -> a b/x", {"x": 2, "y": 2}),
    ("(a c)/x b -> (a c) b/x", {"x": 2}),
    ("(a/x c/y) b -> (a c)/x b", {"x": 2, "y": 2}),
]


def made(pattern: str, mesh: dict[str, int], **options) -> spmd.inspect.Plan:
    size = math.lcm(*mesh.values()) ** 2 * 2
    names = [name for name in "abc" if name in pattern]
    return spmd.plan(pattern, sizes={name: size * (i + 1) for i, name in enumerate(names)}, mesh=mesh, **options)


def positions(layout: Layout, plan: spmd.inspect.Plan) -> list[np.ndarray]:
    """For each device the positions of the whole array that it holds, as flat numbers; by names, not by boxes."""
    atoms = Layout(" ".join(f"{a.name}{''.join(f'/{x}' for x in a.axes or ())}" for a in layout.atoms) or "scalar")
    shape = tuple(plan.sizes[name] for name in atoms.names)
    whole = np.arange(math.prod(shape)).reshape(shape)
    return [whole[np.ix_(*index)].ravel() for index in expected_index(atoms, shape, plan.mesh)]


def check_moves(plan: spmd.inspect.Plan) -> None:
    """Each step's transfers complete every shard, with data that the senders have."""
    drawn = spmd.visualize(plan).to_dict()["steps"]
    for step, moved in zip(plan.steps, (one["transfers"] for one in drawn), strict=True):
        before, after = positions(step.before, plan), positions(step.after, plan)
        received = [0] * len(before)
        got = [set(map(int, held)) for held in before]
        for to, sources, nbytes in (one.values() for one in moved):
            received[to] += nbytes
            sent = [set(map(int, before[source])) & set(map(int, after[to])) for source in sources]
            assert all(one == sent[0] for one in sent)
            assert nbytes == plan.dtype.itemsize * len(sent[0])
            assert to not in sources
            got[to] |= sent[0]
        assert all(set(map(int, want)) <= have for want, have in zip(after, got, strict=True)), step.text
        if step.kind in ("all_gather", "all_to_all", "psum_scatter"):
            assert max(received) == step.bytes, step.text
        elif step.kind in ("ppermute", "sends"):
            assert max(received) <= step.bytes, step.text
        else:
            assert received == [0] * len(before)


@pytest.mark.parametrize("prefer", ["collectives", "bytes"])
@pytest.mark.parametrize(("pattern", "mesh"), PATTERNS)
def test_what_moves(pattern, mesh, prefer):
    plan = made(pattern, mesh, prefer=prefer)
    check_moves(plan)
    picture = spmd.visualize(plan)
    assert faults_of_svg(picture.svg) == []
    text = picture.text(100)
    assert len(devices_of_text(text)) == math.prod(mesh.values()) * (len(plan.steps) + 1)
    for number, step in enumerate(plan.steps):
        assert f"{number + 1}. {step.kind}" in text
        assert step.after.short in text


@pytest.mark.parametrize("seed", seeds(12))
def test_random_plans(seed):
    sampler = Sampler(seed)
    mesh = sampler.mesh(int(sampler.rng.integers(2, 4)))
    sides = [sampler.layout("a b c", mesh, used=0.9)] * 2
    while sides[0] == sides[1]:  # which is not a change to plan
        sides[1] = sampler.layout("a b c", mesh, used=0.9)
    names = {"abc"[i]: math.prod(mesh.values()) * (i + 1) for i in range(3)}
    plan = spmd.plan(" -> ".join(sides), sizes=names, mesh=mesh, prefer=str(sampler.choice(["collectives", "bytes"])))
    check_moves(plan)
    assert faults_of_svg(spmd.visualize(plan).svg) == []


def test_a_missing_transfer_is_noticed(monkeypatch):
    """Meta-test."""
    plan = made("a/x b -> a b/x", {"x": 4})
    told = spmd.visualize(plan).to_dict()
    del told["steps"][0]["transfers"][0]
    monkeypatch.setattr(spmd, "visualize", lambda plan: SimpleNamespace(to_dict=lambda: told))
    with pytest.raises(AssertionError):
        check_moves(plan)


def test_text_of_a_plan():
    plan = spmd.plan("a/x b -> a b/x", sizes={"a": 8, "b": 8}, mesh={"x": 2, "y": 2})
    assert spmd.visualize(plan).text(100).splitlines() == [
        "a/x b -> a b/x   a=8, b=8, float32   mesh x=2, y=2",
        "",
        "a/x b",
        "       b",
        "a/x    0:8",
        "     ┌──────┐",
        " 0:4 │ 0, 1 │",
        "     ├──────┤",
        " 4:8 │ 2, 3 │",
        "     └──────┘",
        "",
        "1. all_to_all over x: 64 B per device",
        "   among 0,2; 1,3: 64 B from each device to each other one",
        "",
        "a b/x",
        "       b/x",
        "a      0:4    4:8",
        "     ┌──────┬──────┐",
        " 0:8 │ 0, 1 │ 2, 3 │",
        "     └──────┴──────┘",
        "",
        "total: 64 B per device, lower bound 64 B, ratio 1.00",
        "largest array on the way: 128 B per device",
    ]


def test_arrows_of_a_permute():
    """`a/x/y -> a/y/x`: device (i, j) sends its block to (j, i), which on a 2 x 2 mesh swaps 1 and 2."""
    plan = spmd.plan("a/x/y -> a/y/x", sizes={"a": 16}, mesh={"x": 2, "y": 2})
    assert [step.kind for step in plan.steps] == ["ppermute"]
    picture = spmd.visualize(plan)
    assert "2 -> 1, 1 -> 2: 16 B each" in str(picture)
    moved = picture.to_dict()["steps"][0]["transfers"]
    assert moved == [{"to": 1, "from": [2], "bytes": 16}, {"to": 2, "from": [1], "bytes": 16}]
    lines = list(ET.fromstring(picture.svg).iter(f"{SVG}line"))
    assert len(lines) == 2


def test_copies_are_sources_alike():
    plan = spmd.plan("a/x -> a/y", sizes={"a": 16}, mesh={"x": 4, "y": 4})
    assert "any of 4-7 -> 1" in spmd.visualize(plan).text(200)


def test_one_device_has_one_colour_in_all_steps():
    svg = spmd.visualize(made("a/x/y b -> a/y b/x", {"x": 2, "y": 2})).svg
    colours: dict[str, set[str]] = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        if group.get("data-devices"):
            rect = group.find(f"{SVG}rect")
            assert rect is not None
            colours.setdefault(group.get("data-devices", ""), set()).add(rect.get("fill", ""))
    assert len(colours) == 4
    assert all(len(one) == 1 for one in colours.values())


SIXTY_FOUR = [
    ("a/x b/y -> a/y b/x", {"x": 8, "y": 8}),
    ("a/x/y b -> a/y b/x", {"x": 8, "y": 8}),  # grids of 64 x 1, 1 x 64 and 8 x 8, and groups of 8
    ("a/x/y b -> a/y/x b", {"x": 4, "y": 16}),
    ("a/x b/y c/z -> a/z b/x c/y", {"x": 4, "y": 4, "z": 4}),
    ("a/x/y b -> a/y b/x", {"x": 4, "y": 4}),
    ("a/x b -> a b/x", {"x": 128, "y": 64}),  # a summary
]


@pytest.mark.parametrize(("pattern", "mesh"), SIXTY_FOUR)
def test_arrows_lie_between_the_grids_they_join(pattern, mesh):
    """Every arrow begins beside or below what is before the step and ends before what is after it."""
    svg = spmd.visualize(made(pattern, mesh)).svg
    assert faults_of_svg(svg) == []
    steps = list(steps_of_svg(svg))
    assert len(steps) == len(made(pattern, mesh).steps)
    for before, arrows, after in steps:
        assert arrows
        for x, y, to_x, to_y in arrows:
            right = before.right <= min(x, to_x) and max(x, to_x) <= after.left
            down = before.bottom <= min(y, to_y) and max(y, to_y) <= after.top
            assert right or down
            across = [(before.top, y, before.bottom), (after.top, to_y, after.bottom)]
            if len(arrows) == 1:  # it stands for the whole step, and points from a grid at a grid
                spans = across if right else [(before.left, x, before.right), (after.left, to_x, after.right)]
                assert all(low <= at <= high for low, at, high in spans)


@pytest.mark.parametrize(("pattern", "mesh"), SIXTY_FOUR[:-1])
def test_each_device_drawn_has_a_colour_of_its_own(pattern, mesh):
    colours: dict[str, str] = {}
    for group in ET.fromstring(spmd.visualize(made(pattern, mesh)).svg).iter(f"{SVG}g"):
        if group.get("data-devices"):
            rect = group.find(f"{SVG}rect")
            assert rect is not None
            assert colours.setdefault(group.get("data-devices", ""), rect.get("fill", "")) == rect.get("fill")
    assert len(colours) == math.prod(mesh.values()) == len(set(colours.values()))


def test_nothing_to_do_and_many_devices():
    nothing = spmd.visualize(spmd.plan("a/x b/y -> a b/y", sizes={"a": 8, "b": 2}, mesh={"x": 1, "y": 2}))
    assert "nothing moves" in str(nothing)
    assert blocks_of_svg(nothing.svg) == {0: "a/x 0:8; b/y 0:1", 1: "a/x 0:8; b/y 1:2"}
    large = spmd.visualize(spmd.plan("a/x b -> a b/x", sizes={"a": 4096, "b": 4096}, mesh={"x": 128, "y": 64}))
    assert "64 groups of 128 devices" in str(large)
    assert "1 group of 128 devices" in str(spmd.visualize(spmd.plan("a/x b -> a b/x", a=128, b=128, mesh={"x": 128})))
    assert len(str(large).splitlines()) < 40
    assert faults_of_svg(large.svg) == []
    assert "transfers" not in large.to_dict()["steps"][0]
