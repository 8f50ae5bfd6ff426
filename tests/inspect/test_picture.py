"""Pictures of layouts and arrays: what they draw is compared with JAX's own index maps and with plain cutting."""

import builtins
import itertools
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.language import Layout
from tests.goldens import Golden, written_anew
from tests.inspect.drawings import SVG, blocks_of_svg, devices_of_text, expected_index, faults_of_svg
from tests.sampler import seeds

GOLDEN = Golden(Path(__file__).with_name("pictures.txt"))

PICTURES = {
    "two_dimensions": ("b/dp s d/tp", (8, 16, 32), {"dp": 2, "tp": 4}),
    "replicas": ("b/dp d", (8, 6), {"dp": 2, "tp": 4}),
    "scalar": ("scalar", (), {"dp": 2, "tp": 2}),
    "partial_sums": ("b/dp s {U:tp}", (8, 16), {"dp": 2, "tp": 4}),
    "partial_sums_and_copies": ("d {U:tp} {R:dp}", (8,), {"dp": 2, "tp": 2}),
    "margins": ("1+x/a+1 y+2", (12, 5), {"a": 3}),
    "scattered": ("(b/dp s/cp) (h k)/tp", {"b": 8, "s": 6, "h": 4, "k": 3}, {"dp": 2, "cp": 2, "tp": 2}),
    "axis_order": ("b/y/x", (12,), {"x": 3, "y": 2}),
    "no_sizes": ("b/dp (h k)/tp _", None, {"dp": 2, "tp": 2}),
    "some_sizes": ("b/dp d/tp", {"d": 8}, {"dp": 2, "tp": 2}),
    "axes_of_size_one": ("b/dp d/tp", (4, 6), {"dp": 1, "tp": 1}),
    "slices": ("a/x b/y c/z", (4, 6, 8), {"x": 2, "y": 3, "z": 2}),
    "nested": ("a/w b/x c/y d/z e", (4, 6, 8, 2, 7), {"w": 2, "x": 2, "y": 2, "z": 2}),
    "many_columns": ("a/x", (64,), {"x": 32, "y": 2}),
    "too_many": ("b/dp d/tp/pp", (256, 1024), {"dp": 128, "tp": 8, "pp": 16}),
}
BETWEEN = {
    "two_meshes": ("a/x b -> a b/p", {"a": 8, "b": 12}, {"x": 4}, {"p": 2, "q": 3}),
    "two_meshes_three_dimensions": ("a/x b c -> a b/p c", {"a": 8, "b": 4, "c": 2}, {"x": 2}, {"p": 2}),
    "two_meshes_that_agree": ("a/x b -> a/p b", {"a": 8, "b": 12}, {"x": 2}, {"p": 2}),
}


def picture(name: str) -> spmd.inspect.Picture:
    if name in BETWEEN:
        pattern, sizes, mesh, to = BETWEEN[name]
        return spmd.visualize(spmd.plan(pattern, sizes=sizes, mesh=mesh, to=to))
    return spmd.visualize(*PICTURES[name])


def drawn(name: str) -> str:
    return picture(name).text(100)


golden = GOLDEN.read


if written_anew():

    def test_write():
        GOLDEN.write({name: drawn(name) for name in (*PICTURES, *BETWEEN)})


@pytest.mark.parametrize("name", (*PICTURES, *BETWEEN))
def test_text(name):
    assert drawn(name) == golden()[name]


def test_golden_has_no_more():
    assert list(golden()) == [*PICTURES, *BETWEEN]


@pytest.mark.parametrize("name", (*PICTURES, *BETWEEN))
def test_svg_is_readable(name):
    assert faults_of_svg(picture(name).svg) == []


def test_a_picture_of_two_meshes_has_the_devices_by_their_numbers():
    devices = np.array(jax.devices())
    mesh, to = Mesh(devices[[5, 3]], ("x",)), Mesh(devices[[3, 6]], ("p",))
    text = spmd.visualize(spmd.plan("a/x b -> a b/p", a=4, b=4, mesh=mesh, to=to)).text(100)
    assert sorted(devices_of_text(text)) == [3, 3, 5, 6] and "5 -> 3: 16 B" in text and "5, 3 -> 6: 16 B each" in text


def test_faults_are_noticed():
    """Meta-test: overlapping and clipped texts."""
    page = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="40">{}</svg>'
    word = '<text x="{}" y="20" text-anchor="start">abc</text>'
    assert faults_of_svg(page.format(word.format(5) + word.format(40))) == []
    assert faults_of_svg(page.format(word.format(5) + word.format(20))) == ["'abc' and 'abc'"]
    assert faults_of_svg(page.format(word.format(80))) == ["'abc' is clipped"]


# --- any layout on any mesh ------------------------------------------------------------------------------------


def placed(draw: Random, most: int, sizes: tuple[int, ...]) -> tuple[str, tuple[int, ...], dict[str, int]]:
    """A layout, a shape that it divides, and a mesh of at most `most` devices."""
    mesh: dict[str, int] = {}
    for axis in draw.sample("wxyz", draw.randint(1, 4)):
        size = draw.choice(sizes)
        if math.prod(mesh.values()) * size <= most:
            mesh[axis] = size
    mesh = mesh or {"x": 1}
    rank = draw.randint(0, 5)
    axes: list[list[str]] = [[] for _ in range(rank)]
    summed = []
    for axis in draw.sample(sorted(mesh), len(mesh)):
        where = draw.randint(-1, rank)
        if where == rank:
            summed.append(axis)
        elif where >= 0:
            axes[where].append(axis)
    dims = [f"{'abcde'[i]}{''.join(f'/{axis}' for axis in axes[i])}" for i in range(rank)]
    shape = tuple(math.prod(mesh[axis] for axis in axes[i]) * draw.randint(1, 3) for i in range(rank))
    text = " ".join(dims) + (f" {{U:{','.join(summed)}}}" if summed else "")
    return text.strip() or "scalar", shape, mesh


@pytest.mark.parametrize("seed", seeds(times=10))
def test_random_layouts(seed):
    text, shape, mesh = placed(Random(seed), 64, (1, 2, 3, 4, 5, 8))
    layout, picture = Layout(text), spmd.visualize(text, shape, mesh)
    expected = expected_index(layout, shape, mesh)
    found = picture.to_dict()
    for entry, place, index in zip(
        found["devices"], itertools.product(*map(range, mesh.values())), expected, strict=True
    ):
        assert tuple(entry["coordinates"].values()) == place
        assert list(entry["coordinates"]) == list(mesh)
        assert tuple(range(one["start"], one["stop"]) for one in entry["index"]) == index
    assert found["local_shape"] == [len(run) for run in expected[0]]
    for width in (60, 100, 200):
        assert sorted(devices_of_text(picture.text(width))) == list(range(math.prod(mesh.values())))
        assert max(map(len, picture.text(width).splitlines())) <= max(width, 130)
    drawn = blocks_of_svg(picture.svg)
    names = [dim.short for dim in layout.dims]
    assert drawn == {
        device: "; ".join(f"{name} {run.start}:{run.stop}" for name, run in zip(names, index, strict=True))
        for device, index in enumerate(expected)
    }
    assert faults_of_svg(picture.svg) == []


@pytest.mark.parametrize("seed", seeds(times=5))
def test_random_arrays(seed):
    """A placed array, on devices in any order, against JAX's own map from devices to indices."""
    draw = Random(seed)
    text, shape, sizes = placed(draw, 8, (1, 2, 4, 8, 3))
    layout = Layout(text).without(*Layout(text).unreduced)
    devices = draw.sample(jax.devices(), math.prod(sizes.values()))
    mesh = Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))
    x = jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, layout.spec))
    picture = spmd.visualize(x)
    entries = {entry["device"]: entry for entry in picture.to_dict()["devices"]}
    theirs = x.sharding.devices_indices_map(shape)
    assert set(entries) == {device.id for device in theirs}
    for device, index in theirs.items():
        mine = [(one["start"], one["stop"]) for one in entries[device.id]["index"]]
        assert mine == [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
        [at] = np.argwhere(mesh.devices == device)
        assert tuple(entries[device.id]["coordinates"].values()) == tuple(at)
    assert sorted(devices_of_text(picture.text(100))) == sorted(entries)
    assert set(blocks_of_svg(picture.svg)) == set(entries)


def test_the_independent_cut_agrees_with_jax():
    """`expected_index` is right where JAX can say."""
    mesh = spmd.make_mesh(x=2, y=4)
    theirs = NamedSharding(mesh, P(("y", "x"), None)).devices_indices_map((16, 3))
    mine = expected_index(Layout("a/y/x b"), (16, 3), {"x": 2, "y": 4})
    for device, index in zip(mesh.devices.flat, mine, strict=True):
        assert [range(*one.indices(size)) for one, size in zip(theirs[device], (16, 3), strict=True)] == list(index)


# --- what is special ---------------------------------------------------------------------------------------------


def test_scattered_pieces_are_counted_right():
    """`(b/dp s/cp)` on a device: its rows of s, as positions of the dimension."""
    b, s, dp, cp = 8, 6, 2, 3
    held = np.arange(b * s).reshape(dp, b // dp, cp, s // cp)[1, :, 2].ravel()
    runs = 1 + int((np.diff(held) != 1).sum())
    picture = spmd.visualize("(b/dp s/cp)", {"b": b, "s": s}, {"dp": dp, "cp": cp})
    assert f"{runs} runs of {len(held) // runs}" in str(picture)
    index = picture.to_dict()["devices"][5]["index"][0]
    rows, columns = np.unravel_index(held, (b, s))
    assert index == {"b": [rows.min(), rows.max() + 1], "s": [columns.min(), columns.max() + 1]}


def test_summands_and_copies():
    """Devices that differ on a summed axis only are one copy."""
    text = str(spmd.visualize("b/x {U:z}", (4,), {"z": 2, "x": 2, "y": 2}))
    assert "sum(0,4), sum(1,5)" in text and "sum(2,6), sum(3,7)" in text
    assert "(along y)" in text
    one = str(spmd.visualize("b {U:z}", (4,), {"z": 1, "x": 2}))
    assert "sum(0" not in one


def test_margins_are_drawn_over_the_neighbours():
    page = ET.fromstring(spmd.visualize("1+x/a", (8,), {"a": 2}).svg)
    halos = [rect for rect in page.iter(f"{SVG}rect") if rect.get("data-margin")]
    cells = [group.find(f"{SVG}rect") for group in page.iter(f"{SVG}g") if group.get("data-devices")]
    assert len(halos) == len(cells) == 2
    for halo, cell in zip(halos, cells, strict=True):
        assert float(halo.get("x")) < float(cell.get("x"))  # before, not after
        right = float(halo.get("x")) + float(halo.get("width"))
        assert right == pytest.approx(float(cell.get("x")) + float(cell.get("width")))


def test_summary_of_many_devices():
    picture = spmd.visualize("b/dp d/tp", (4096, 64), {"dp": 2048, "tp": 8})
    text = picture.text(100)
    assert "16384 devices hold 16384 different blocks" in text
    assert "2046:2048" not in text and "4094:4096" in text and "..." in text
    page = ET.fromstring(picture.svg)
    assert len([group for group in page.iter(f"{SVG}g") if group.get("data-index")]) == 9
    assert faults_of_svg(picture.svg) == []
    assert len(str(spmd.visualize("b {U:dp}", (4,), {"dp": 65536}))) < 400


def test_sixty_four_devices_are_drawn_one_by_one():
    picture = spmd.visualize("a/x b/y", (16, 16), {"x": 8, "y": 8})
    assert sorted(devices_of_text(picture.text(120))) == list(range(64))
    assert len(blocks_of_svg(picture.svg)) == 64


def test_arrays_on_one_device():
    text = str(spmd.visualize(jnp.ones(3)))
    assert "float32[3]" in text and "uncommitted" in text
    committed = jax.device_put(jnp.ones((2, 3)), jax.devices()[3])
    text = str(spmd.visualize(committed))
    assert "uncommitted" not in text
    assert devices_of_text(text) == [3]
    assert str(spmd.visualize(jax.random.key(0)))


def test_abstract_arrays():
    mesh = spmd.make_mesh(x=2, y=2, abstract=True)
    struct = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, ("y", "x"))))
    picture = spmd.visualize(struct)
    assert picture.to_dict()["local_bytes"] == 4 * 2 * 2
    assert picture.to_dict()["devices"][1]["index"][1] == {"start": 4, "stop": 6, "block": 2}


class Ragged:
    """A sharding that is not a NamedSharding: device 2 holds two columns, the others one row each of the rest."""

    is_fully_replicated = False

    def devices_indices_map(self, shape):
        devices = jax.devices()
        return {
            devices[0]: (slice(0, 1), slice(0, 4)),
            devices[1]: (slice(1, None), slice(0, 4)),
            devices[2]: (slice(None), slice(4, 6)),
        }


class Array:
    shape, dtype, sharding = (2, 6), np.dtype("float32"), Ragged()


def test_other_shardings():
    picture = spmd.visualize(Array())
    assert sorted(devices_of_text(str(picture))) == [0, 1, 2]
    assert "a Ragged" in str(picture)
    assert blocks_of_svg(picture.svg) == {
        0: "dim0 0:1; dim1 0:4",
        1: "dim0 1:2; dim1 0:4",
        2: "dim0 0:2; dim1 4:6",
    }


def test_where_the_mesh_comes_from():
    mesh = spmd.make_mesh(x=2)
    with jax.set_mesh(mesh):
        assert "mesh x=2" in str(spmd.visualize("a/x"))
    with spmd.axis_mapping({"batch": "x"}):
        assert "batch/x" in str(spmd.visualize("batch d/1", (4, 3), mesh))
        with pytest.raises(
            spmd.errors.LayoutError, match="has no rule for d"
        ):  # as everywhere under an ambient mapping
            spmd.visualize("batch d", (4, 3), mesh)


# --- inside kernels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
def test_in_a_kernel(mode):
    mesh = spmd.make_mesh(dp=2, tp=4)
    seen = {}

    @spmd.kernel("b/dp s d/tp -> b/dp s", mesh=mesh)
    def body(x):
        seen["argument"] = spmd.visualize(x)
        seen["string"] = spmd.visualize("b/dp s d/tp")
        partial = spmd.reduce(x, "b/dp s d/tp -> b/dp s {U:tp}")
        seen["partial"] = spmd.visualize(partial)
        seen["plain"] = spmd.visualize(x + 1)
        return spmd.psum(partial, "b/dp s {U:tp} -> b/dp s")

    x = np.arange(2 * 4 * 3 * 8, dtype=np.float32).reshape(8, 3, 8)
    with spmd.mode(mode):
        out = body(x)
    np.testing.assert_allclose(out, x.sum(2))
    outside = spmd.visualize("b/dp s d/tp", (8, 3, 8), mesh)
    for name in ("argument", "string"):
        assert blocks_of_svg(seen[name].svg) == blocks_of_svg(outside.svg), name
        assert seen[name].to_dict()["devices"] == outside.to_dict()["devices"]
    assert "sum(0-3)" in str(seen["partial"]) and "float32[8,3]" in str(seen["partial"])
    plain = str(seen["plain"])
    whole = "its shards differ along dp, tp" if mode == "explicit" else "it is whole"
    assert f"in {mode} mode {whole}" in " ".join(plain.split())
    assert f"in {mode} mode" in str(seen["argument"])
    assert faults_of_svg(seen["plain"].svg) == []


@pytest.mark.parametrize(
    ("pattern", "options", "title"),
    [
        ("b/dp d/t -> b/dp d/t", {"axes": {"t": "tp"}}, "b/dp d/tp"),
        ("b/dp d/t -> b/dp d/t", {"axes": {"t": None}}, "b/dp d"),
        ("b d -> b d", {"mapping": {"b": ("dp", "tp"), "d": None}}, "b/dp/tp d"),
    ],
)
def test_axes_that_a_kernel_renames_or_maps(pattern, options, title):
    seen = []

    @spmd.kernel(pattern, mesh=spmd.make_mesh(dp=2, tp=4), **options)
    def body(x):
        seen.extend([spmd.visualize(x), spmd.visualize(pattern.partition(" ->")[0])])
        return x

    body(np.ones((8, 4), np.float32))
    assert [one.to_dict()["layout"] for one in seen] == [title, title]
    assert seen[0].to_dict()["devices"] == seen[1].to_dict()["devices"]


def test_a_picture_leaves_no_trace():
    mesh = spmd.make_mesh(dp=2)

    def lowered(look):
        def body(x):
            if look:
                spmd.visualize(x)
            return x * 2

        return spmd.kernel("b/dp -> b/dp", mesh=mesh)(body).lower(np.ones(4, np.float32)).as_text()

    assert lowered(True) == lowered(False)


def test_in_shard_map_and_vmap():
    mesh = spmd.make_mesh(dp=2, tp=2)
    seen = []

    def look(row):
        seen.append(str(spmd.visualize(row)))
        return row

    def body(x):
        seen.append(str(spmd.visualize("a/dp b", (4, 6))))
        return jax.vmap(look)(x)

    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))(np.ones((4, 6), np.float32))
    assert "mesh dp=2, tp=2" in seen[0] and "0, 1" in seen[0]
    assert "float32[6]" in seen[1] and "differ along dp" in " ".join(seen[1].split())


def test_types_of_explicit_axes():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x = jax.device_put(np.zeros((8, 4), np.float32), NamedSharding(mesh, P("dp", "tp")))
    seen = []
    with jax.set_mesh(mesh):
        jax.jit(lambda x: (seen.append(spmd.visualize(x)), x)[1])(x)
    assert blocks_of_svg(seen[0].svg) == blocks_of_svg(spmd.visualize(x).svg)


# --- how it is shown ----------------------------------------------------------------------------------------------


def test_names_are_escaped():
    picture = spmd.visualize("a/x b", (4, 6), {"x": 2})
    assert "1+a/x" in spmd.visualize("1+a/x", (4,), {"x": 2}).svg
    ET.fromstring(picture.svg)


def test_text_needs_no_other_package(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        assert name.partition(".")[0] not in ("rich", "IPython", "matplotlib")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    picture = spmd.visualize("a/x b", (4, 6), {"x": 2})
    assert str(picture) and picture.svg


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(a: str, b: str) -> float:
    """As WCAG 2 defines it; 4.5 is asked of text."""
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def colours() -> tuple[str, set[str], list[str], list[str]]:
    """Of the card, of texts, and of the blocks of 64 devices: their fills and their edges."""
    root = ET.fromstring(spmd.visualize("a/x", (64,), {"x": 64}).svg)
    texts = {one.get("fill") for one in root.iter(f"{SVG}text")}
    blocks = [one.find(f"{SVG}rect") for one in root.iter(f"{SVG}g") if one.get("data-devices")]
    return root.find(f"{SVG}rect").get("fill"), texts, *([one.get(key) for one in blocks] for key in ("fill", "stroke"))


def test_every_text_stands_out():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    card, texts, fills, edges = colours()
    assert len(fills) == len(set(fills)) == 64 == len(set(edges))
    faint, ink = sorted(texts, key=lambda text: contrast(text, card))
    assert min(contrast(ink, fill) for fill in (*fills, card)) > 7
    assert contrast(faint, card) > 4.5
    assert min(contrast(edge, card) for edge in edges) > 3  # lines


# Machado, Oliveira and Fernandes (2009), severity 1.0: what protanopes and deuteranopes see of linear RGB.
PROTAN = np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]])
DEUTAN = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]])


@pytest.mark.parametrize("seen", [np.eye(3), PROTAN, DEUTAN], ids=["all", "protan", "deutan"])
def test_colours_differ_for_the_colour_blind(seen):
    fills = [np.array([int(one[at : at + 2], 16) / 255 for at in (1, 3, 5)]) for one in colours()[2]]
    viewed = [np.clip(seen @ fill**2.2, 0, 1) ** (1 / 2.2) for fill in fills]
    gaps = [float(np.linalg.norm(a - b)) for a, b in itertools.pairwise(viewed)]
    assert min(gaps) > 0.12


def test_import_stays_light():
    code = "import sys, spmd; print([m for m in ('rich', 'IPython', 'matplotlib', 'argparse') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rich" not in done.stdout and "matplotlib" not in done.stdout


def test_long_names_fit_the_terminal():
    sizes = {"batch": 8, "heads": 8, "sequence": 64, "key_heads": 8, "features": 8}
    layout = "(batch heads)/data sequence/context (key_heads features)/tensor {U:replica}"
    picture = spmd.visualize(layout, sizes, {"data": 2, "context": 2, "tensor": 2, "replica": 2})
    assert max(map(len, picture.text(80).splitlines())) <= 80
    assert set(picture.text(300).split()) == set(picture.text(80).split())


def test_a_mesh_is_drawn_with_its_devices():
    mesh = spmd.make_mesh(dp=2, tp=4)
    picture = spmd.visualize(mesh)
    assert picture.text(80).splitlines() == [
        "mesh dp=2, tp=4",
        "",
        "devices  tp=0  tp=1  tp=2  tp=3",
        "dp=0        0     1     2     3",
        "dp=1        4     5     6     7",
    ]
    shapes = [one for one in ET.fromstring(picture.svg).iter(f"{SVG}rect") if one.get("data-device")]
    assert [one.get("data-device") for one in shapes] == list(map(str, range(8)))
    fills = [one.get("fill") for one in shapes]
    assert len({*fills[:4]}) == len({*fills[4:]}) == 1 and fills[0] != fills[4], "one colour for each index along dp"
    assert picture.to_dict()["devices"][5] == {"device": 5, "coordinates": {"dp": 1, "tp": 1}}
    assert faults_of_svg(spmd.visualize(spmd.make_mesh(a=4, b=4, c=4, abstract=True)).svg) == []


def test_what_has_no_arrays_is_not_told_to_be_drawn_leaf_by_leaf() -> None:
    found = spmd.check(spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=4))(lambda x: x), jnp.ones((4, 8)))
    with pytest.raises(spmd.errors.LayoutError, match="not a Findings") as caught:
        spmd.visualize(found)
    assert "leaves" not in str(caught.value)
