"""Fields on disk: what is read on which mesh, what lies in the files, and what happens to those that are not whole."""

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.cluster import _fields, read_zarr, write_zarr
from spmd.errors import PlacementError, SpmdError
from tests import simulator
from tests.cluster.bucket import serving
from tests.sampler import Sampler, seeds

MESH = {"a": 2, "b": 4}
X = np.arange(96, dtype=np.float32).reshape(8, 12)


def placed(layout="x/a y/b", x=X):
    return spmd.shard(x, layout, mesh=spmd.make_mesh(**MESH))


def files(path: Path) -> set[str]:
    return {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()}


@pytest.mark.parametrize("seed", seeds())
def test_a_field_comes_back_on_any_mesh(tmp_path, seed):
    """Other meshes, other layouts: blocks begin and end anywhere in the chunks."""
    sampler = Sampler(seed)
    meshes = [sampler.mesh(), sampler.mesh()]
    layouts = [sampler.layout("x y z", mesh) for mesh in meshes]
    both = {f"{i}{axis}": n for i, mesh in enumerate(meshes) for axis, n in mesh.items()}
    named = [
        " ".join("/".join([w.split("/")[0], *(f"{i}{axis}" for axis in w.split("/")[1:])]) for w in layout.split())
        for i, layout in enumerate(layouts)
    ]
    sizes = sampler.sizes("x y z", both, named)
    x = sampler.array(tuple(sizes.values()), sampler.dtype(kinds="fic"))
    first, second = (spmd.make_mesh(**mesh, partial=True) for mesh in meshes)
    write_zarr(tmp_path / "u", spmd.shard(x, layouts[0], mesh=first), "x y z")
    found = read_zarr(tmp_path / "u", layouts[1], mesh=second)
    assert found.dtype == x.dtype and found.sharding.spec == spmd.Layout(layouts[1]).spec
    np.testing.assert_array_equal(np.asarray(found), x)
    chunks = math.prod(simulator.count(meshes[0], w.split("/")[1:]) for w in layouts[0].split())
    assert len(files(tmp_path / "u")) == chunks + 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn"])
def test_every_type_of_number(tmp_path, dtype):
    x = placed(x=jnp.asarray(X).astype(dtype))
    write_zarr(tmp_path / "u", x, "x y")
    found = read_zarr(tmp_path / "u", mesh=spmd.make_mesh(**MESH))
    assert found.dtype == x.dtype and found.sharding == x.sharding
    np.testing.assert_array_equal(np.asarray(found), np.asarray(x))


@pytest.mark.parametrize(("layout", "x"), [("scalar", np.float32(3)), ("x y/a", np.zeros((0, 4), np.float32))])
def test_scalars_and_empty_arrays(tmp_path, layout, x):
    write_zarr(tmp_path / "u", placed(layout, x), layout.replace("/a", ""))
    np.testing.assert_array_equal(read_zarr(tmp_path / "u", mesh=spmd.make_mesh(**MESH)), x)


def test_what_lies_beside_the_numbers(tmp_path):
    """As the format says it: a reader of its own finds the chunks of each block, and the names."""
    write_zarr(tmp_path / "u", placed("x/a y"), "x y")
    about = json.loads((tmp_path / "u/zarr.json").read_text())
    assert (about["zarr_format"], about["shape"], about["data_type"]) == (3, [8, 12], "float32")
    assert about["dimension_names"] == ["x", "y"]
    assert about["attributes"] == {"spmd": {"layout": "x/a y", "mesh": MESH}}
    assert files(tmp_path / "u") == {"zarr.json", "c/0/0", "c/1/0"}
    block = (tmp_path / "u/c/1/0").read_bytes()[:-4]  # before the checksum
    np.testing.assert_array_equal(np.frombuffer(block, "<f4").reshape(4, 12), X[4:])


def test_large_blocks_are_cut_into_equal_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(_fields, "_MOST", 2 * 12 * 4)
    write_zarr(tmp_path / "u", placed("x y"), "x y")
    assert len(files(tmp_path / "u")) == 1 + 4
    np.testing.assert_array_equal(read_zarr(tmp_path / "u", "x/a y/b", mesh=spmd.make_mesh(**MESH)), X)
    assert _fields._chunk((7, 9, 5), 4) == [1, 3, 5] and _fields._chunk((4, 6), 4) == [4, 6]


def test_modes_and_mappings(tmp_path):
    mesh = spmd.make_mesh(**MESH)
    for mode in ("explicit", "auto", "reference"):
        with spmd.mode(mode), spmd.axis_mapping({"x": "b", "y": None}):
            x = spmd.shard(X, "x y", mesh=mesh)
            write_zarr(tmp_path / mode, x, "x y")
            found = read_zarr(tmp_path / mode, "x y", mesh=mesh)
        assert found.sharding.is_fully_replicated == (mode == "reference")
        assert found.sharding == x.sharding
        np.testing.assert_array_equal(found, X)


def test_each_block_is_read_once_and_nothing_else(tmp_path, monkeypatch):
    """Of what devices hold copies of, one is read; the chunks of other columns may be missing."""
    write_zarr(tmp_path / "u", placed("x/a y/b"), "x y")
    opened, asked = _fields._opened, []

    class Seen:
        def __init__(self, store):
            self.store = store

        def __getitem__(self, where):
            asked.append(where)
            return self.store[where]

    monkeypatch.setattr(_fields, "_opened", lambda *args, **how: Seen(opened(*args, **how)))
    np.testing.assert_array_equal(read_zarr(tmp_path / "u", "x y/b", mesh=spmd.make_mesh(**MESH)), X)
    assert sorted(where[1].start or 0 for where in asked) == [0, 3, 6, 9]
    (tmp_path / "u/c/1/3").unlink()
    store = opened(tmp_path / "u", open=True, fill_missing_data_reads=False)
    np.testing.assert_array_equal(store[:, 2:9].read().result(), X[:, 2:9])


def test_a_missing_chunk_is_no_zeros_and_a_damaged_one_is_noticed(tmp_path):
    write_zarr(tmp_path / "u", placed(), "x y")
    chunk = tmp_path / "u/c/1/2"
    whole = chunk.read_bytes()
    damages = {"missing": None, "Digest mismatch": whole[:5] + b"!" + whole[6:], "expected at least": whole[:9]}
    for said, content in damages.items():
        chunk.unlink() if content is None else chunk.write_bytes(content)
        with pytest.raises(PlacementError, match=said):
            read_zarr(tmp_path / "u", mesh=spmd.make_mesh(**MESH))
    chunk.write_bytes(whole)
    np.testing.assert_array_equal(read_zarr(tmp_path / "u", mesh=spmd.make_mesh(**MESH)), X)


@pytest.mark.parametrize("begun", [False, True])
def test_a_write_that_is_torn_leaves_what_was_there(tmp_path, monkeypatch, begun):
    """A process that is killed before the last chunk, or before the array gets its name."""
    if begun:
        write_zarr(tmp_path / "u", placed(), "x y")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write_zarr(tmp_path / "u", placed(x=-X), "x y", overwrite=begun)
    monkeypatch.undo()
    mesh = spmd.make_mesh(**MESH)
    if begun:
        np.testing.assert_array_equal(read_zarr(tmp_path / "u", mesh=mesh), X)
    else:
        with pytest.raises(PlacementError, match="not written to its end"):
            read_zarr(tmp_path / "u", mesh=mesh)
    write_zarr(tmp_path / "u", placed(x=2 * X), "x y", overwrite=True)
    np.testing.assert_array_equal(read_zarr(tmp_path / "u", mesh=mesh), 2 * X)
    assert [one.name for one in tmp_path.iterdir()] == ["u"]


def test_chunks_that_are_not_there_are_counted(tmp_path, monkeypatch):
    """As where each process writes to a disk of its own: the array gets no name."""
    opened = _fields._opened

    class Lost:
        """Writes the first chunk, and not the others."""

        def __init__(self, store):
            self.store = store

        def __getitem__(self, where):
            rows = where[0].indices(8)
            return self.store[where] if rows[0] == 0 else self

        def write(self, _):
            return self

        def result(self):
            return None

    monkeypatch.setattr(_fields, "_opened", lambda *args, **how: Lost(opened(*args, **how)))
    with pytest.raises(PlacementError, match="finds 4 chunks of 8: do all processes reach this disk"):
        write_zarr(tmp_path / "u", placed(), "x y")
    assert not (tmp_path / "u").exists()


def test_arrays_of_others(tmp_path):
    """No layout, float64, and chunks that are zero are not there."""
    about = {
        "shape": [8, 12],
        "data_type": "float64",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 5]}},
    }
    store = _fields._opened(tmp_path / "u", metadata=about, create=True, store_data_equal_to_fill_value=False)
    store[:3].write(np.ones((3, 12))).result()
    mesh = spmd.make_mesh(**MESH)
    found = read_zarr(tmp_path / "u", "x/a y/b", mesh=mesh, dtype="float32")
    assert found.dtype == jnp.float32 and float(found.sum()) == 36
    with pytest.raises(PlacementError, match="does not say how it lay"):
        read_zarr(tmp_path / "u", mesh=mesh)
    with pytest.raises(PlacementError, match="float64, which JAX does not hold"):
        read_zarr(tmp_path / "u", "x/a y/b", mesh=mesh)
    with jax.enable_x64(True):
        assert read_zarr(tmp_path / "u", "x/a y/b", mesh=mesh).dtype == jnp.float64


# --- what others have at the path, and beside it ---------------------------------------------------------------------


def everything(folder: Path) -> dict[str, bytes | str]:
    """All that is in a folder: files with their bytes, links with where they lead, and folders."""
    kinds = {one: one.readlink() if one.is_symlink() else one.is_dir() or one.read_bytes() for one in folder.rglob("*")}
    return {str(one.relative_to(folder)): kind for one, kind in kinds.items()}


def lay(folder: Path, text: str) -> None:
    """Make files from `name: content`, folders from `name/` and links from `name -> target`."""
    for one in text.split(", "):
        name, _, content = one.partition(": ")
        link, _, target = one.partition(" -> ")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if target:
            (folder / link).symlink_to(target)
        elif name.endswith("/"):
            (folder / name).mkdir(parents=True)
        else:
            (folder / name).write_text(content)


OTHERS = {
    "a file": "u: thesis",
    "a folder": "u/thesis/one.tex: x",
    "a folder with empty ones": "u/runs/1/",
    "a link to a folder": "home/thesis.tex: x, u -> home",
    "a link to a file": "thesis.tex: x, u -> thesis.tex",
    "chunks without what says the shape": "u/c/0/0: x",
    "a group of arrays": 'u/zarr.json: {"node_type":"group","attributes":{"spmd":{}}}, u/a/zarr.json: {}',
    "an array of others": 'u/zarr.json: {"node_type":"array","shape":[1],"data_type":"int8"}, u/c/0: x',
    "what is no metadata": "u/zarr.json: null, u/c/0: x",
    "a Zarr of version 2": "u/.zarray: {}, u/0.0: x",
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("there", OTHERS.values(), ids=OTHERS)
def test_what_is_no_array_of_ours_is_never_replaced(tmp_path, there, overwrite):
    """overwrite=True replaced a folder with somebody's thesis, and a file."""
    lay(tmp_path, there)
    before = everything(tmp_path)
    with pytest.raises(PlacementError, match="is not replaced"):
        write_zarr(tmp_path / "u", placed(), "x y", overwrite=overwrite)
    assert everything(tmp_path) == before


def test_what_others_put_into_an_array_stays(tmp_path):
    write_zarr(tmp_path / "u", placed(), "x y")
    lay(tmp_path, "u/notes/first.txt: x")
    before = everything(tmp_path)
    with pytest.raises(PlacementError, match="it has 'notes'"):
        write_zarr(tmp_path / "u", placed(), "x y", overwrite=True)
    assert everything(tmp_path) == before


BESIDE = "u.part/a: x, u.old/a: x, u.part.old: x, .u/a: x, u.0123.part/a: x, u.backup.old/a: x, v.part/: "


@pytest.mark.parametrize("fails", [False, True])
def test_what_lies_beside_an_array_stays(tmp_path, monkeypatch, fails):
    """PATH.old and PATH.part went without a word."""
    lay(tmp_path, BESIDE)
    before = everything(tmp_path)
    if fails:

        def full(*_):
            raise OSError("no space")

        with monkeypatch.context() as here:
            here.setattr(_fields._Place, "end", full)
            with pytest.raises(PlacementError, match="no space"):
                write_zarr(tmp_path / "u", placed(), "x y")
        assert everything(tmp_path) == before
    for _ in range(3):
        write_zarr(tmp_path / "u", placed(), "x y", overwrite=True)
    shutil.rmtree(tmp_path / "u")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_comes_to_the_path_meanwhile_stays(tmp_path, monkeypatch, overwrite):
    end = _fields._Place.end

    def late(*args):
        lay(tmp_path, "u/thesis.tex: x")
        end(*args)

    monkeypatch.setattr(_fields._Place, "end", late)
    with pytest.raises(PlacementError, match="it has 'thesis.tex'"):
        write_zarr(tmp_path / "u", placed(), "x y", overwrite=overwrite)
    assert everything(tmp_path) == {"u": True, "u/thesis.tex": b"x"}


@pytest.mark.parametrize("links", ["u -> v", "u -> w, w -> far/v, far/: ", "far/: , u -> near/v, near -> far", "u/: "])
def test_links_and_empty_folders(tmp_path, links):
    """A second overwrite through a link failed: it had replaced the link."""
    lay(tmp_path, links)
    kept = {name: kind for name, kind in everything(tmp_path).items() if kind is not True}
    for times in (1, 2, 3):
        write_zarr(tmp_path / "u", placed(x=times * X), "x y", overwrite=times > 1)
        np.testing.assert_array_equal(read_zarr(tmp_path / "u", mesh=spmd.make_mesh(**MESH)), times * X)
        found = everything(tmp_path)
        assert {name: found[name] for name in kept} == kept
        assert not [name for name in found if name.endswith(("part", "old"))]


def test_a_write_that_is_killed_while_it_replaces_keeps_what_was_there(tmp_path, monkeypatch):
    """Between the two renamings: the message names it, and it goes when the next array is whole."""
    write_zarr(tmp_path / "u", placed(), "x y")
    rename = Path.rename

    def killed(self, target):
        if self.name.endswith(".part"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as here:
        here.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            write_zarr(tmp_path / "u", placed(x=-X), "x y", overwrite=True)
    mesh = spmd.make_mesh(**MESH)
    with pytest.raises(PlacementError, match=r"beside it is u\.\w+\.old, u\.\w+\.part"):
        read_zarr(tmp_path / "u", mesh=mesh)
    [old] = tmp_path.glob("u.*.old")
    np.testing.assert_array_equal(read_zarr(old, mesh=mesh), X)
    write_zarr(tmp_path / "u", placed(x=2 * X), "x y")
    np.testing.assert_array_equal(read_zarr(tmp_path / "u", mesh=mesh), 2 * X)
    assert [one.name for one in tmp_path.iterdir()] == ["u"]


WELL = {"node_type": "array", "shape": [2], "data_type": "int8"}
ODD = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"3",
    b'"x"',
    b"{}",
    b"\xff\xfe\0",
    b"[" * 10**5,
    b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
]
ODD += [
    json.dumps({**WELL, name: value}).encode()
    for name, values in {
        "node_type": [None, 3, [], "node"],
        "shape": [None, 3, {}, [-1], [1.5], ["2"], [True], [None], [[2]]],
        "data_type": [None, 3, "r16", "object", "string", {"name": "numpy.datetime64"}, "x" * 10**6],
        "dimension_names": [3, "x", {"x": 1}, [3], [[]], ["x", "y"], []],
        "attributes": [[1], "x", 3, {"spmd": None}, {"spmd": []}, {"spmd": {}}, {"spmd": {"layout": 3}}],
    }.items()
    for value in values
    if value != [] or name == "node_type"
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[:70].decode("latin"))
def test_odd_metadata_are_an_error_with_the_path(tmp_path, odd):
    (tmp_path / "u").mkdir()
    path = tmp_path / "u" / "zarr.json"
    path.write_bytes(odd)
    for layout in (None, "_"):
        with pytest.raises(PlacementError) as caught:
            read_zarr(tmp_path / "u", layout, mesh=spmd.make_mesh(**MESH))
        assert str(path) in str(caught.value) or "group" in str(caught.value)
        assert len(str(caught.value)) < 800
    with pytest.raises(PlacementError, match="is not replaced"):
        write_zarr(tmp_path / "u", placed(), "x y", overwrite=True)
    assert path.read_bytes() == odd


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["y/a x/b", "y x", "x/a z/b", "(x y)/a z", "... x"])
def test_other_names_than_those_of_the_array_are_refused(tmp_path, layout):
    """The array came back with its names exchanged."""
    write_zarr(tmp_path / "u", placed(), "x y")
    with pytest.raises(PlacementError, match="names"):
        read_zarr(tmp_path / "u", layout, mesh=spmd.make_mesh(**MESH))


@pytest.mark.parametrize("layout", ["x/a y/b", "... y/b", "x ...", "...", "_/a _", "x/a _", "8 12/b"])
def test_names_that_are_those_of_the_array_or_none(tmp_path, layout):
    write_zarr(tmp_path / "u", placed(), "x y")
    np.testing.assert_array_equal(read_zarr(tmp_path / "u", layout, mesh=spmd.make_mesh(**MESH)), X)


def test_dimensions_that_are_called_otherwise_here(tmp_path):
    mesh = spmd.make_mesh(**MESH)
    write_zarr(tmp_path / "u", placed(), "x y")
    found = read_zarr(tmp_path / "u", "lon/a lat/b", mesh=mesh, rename={"x": "lon", "y": "lat"})
    np.testing.assert_array_equal(found, X)
    np.testing.assert_array_equal(read_zarr(tmp_path / "u", "y/a x/b", mesh=mesh, rename={"x": "y", "y": "x"}), X)
    with pytest.raises(PlacementError, match="has no dimension 'lon'"):
        read_zarr(tmp_path / "u", "lon/a y", mesh=mesh, rename={"lon": "x"})


# --- buckets and other places ----------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch):
    with serving() as (address, objects):
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        yield objects


def test_an_array_in_a_bucket(bucket, tmp_path, monkeypatch):
    """It was written into a folder `gs:` of this machine."""
    monkeypatch.chdir(tmp_path)
    mesh, url = spmd.make_mesh(**MESH), "gs://bucket/runs/u.zarr"
    with pytest.raises(PlacementError, match="no complete array"):
        read_zarr(url, "x y", mesh=mesh)
    write_zarr(url, placed(), "x y")
    assert list(tmp_path.iterdir()) == []
    chunks = {f"runs/u.zarr/c/{i}/{j}" for i in range(2) for j in range(4)}
    assert set(bucket) == {"runs/u.zarr/zarr.json", *chunks}
    np.testing.assert_array_equal(read_zarr(url, mesh=mesh), X)
    np.testing.assert_array_equal(read_zarr(url, "x y/b", mesh=mesh), X)
    with pytest.raises(PlacementError, match="overwrite=True"):
        write_zarr(url, placed(), "x y")
    write_zarr(url, placed("x/a y", -X), "x y", overwrite=True)
    assert set(bucket) == {f"runs/u.zarr/{name}" for name in ("zarr.json", "c/0/0", "c/1/0")}
    np.testing.assert_array_equal(read_zarr(url, mesh=mesh), -X)
    del bucket["runs/u.zarr/c/1/0"]
    with pytest.raises(PlacementError, match="missing"):
        read_zarr(url, mesh=mesh)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_others_have_in_a_bucket_stays(bucket, overwrite):
    """All below the path was deleted, also with overwrite=False."""
    others = ["thesis.tex", "c/0/thesis.tex", "c/0/0/", "zarr.json.old", "a/zarr.json"]
    write_zarr("gs://bucket/whole", placed(), "x y")
    for number, other in enumerate(others):
        bucket[f"u{number}/{other}"] = bucket[f"u{number}.part/x"] = bucket[f"u{number}"] = b"x"
        bucket |= {f"v{number}/{name.partition('/')[2]}": b for name, b in bucket.items() if name.startswith("whole/")}
        bucket[f"v{number}/{other}"] = b"x"
    before = dict(bucket)
    for number, other in enumerate(others):
        for path in (f"u{number}", f"v{number}"):
            with pytest.raises(PlacementError, match=f"is not replaced: it has '{other}'"):
                write_zarr(f"gs://bucket/{path}", placed(), "x y", overwrite=overwrite)
    assert bucket == before


def test_a_write_to_a_bucket_that_is_torn_is_no_array(bucket, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    write_zarr("gs://bucket/u", placed(), "x y")
    monkeypatch.setattr(_fields._Place, "end", killed)
    with pytest.raises(KeyboardInterrupt):
        write_zarr("gs://bucket/u", placed(), "x y", overwrite=True)
    with pytest.raises(PlacementError, match="no complete array"):
        read_zarr("gs://bucket/u", mesh=spmd.make_mesh(**MESH))


def test_what_is_in_a_bucket_of_s3_is_asked_of_s3():
    """No server here speaks its language; the driver is the same as that for a folder."""
    import tensorstore

    spec = tensorstore.KvStore.Spec(_fields._where("s3://bucket/u.zarr")).to_json()
    assert spec["driver"] == "s3" and spec["path"] == "u.zarr/"


def test_other_places_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("ftp://bucket/u.zarr", "gs://", Path("gs://bucket/u.zarr")):
        for call in (lambda path=path: write_zarr(path, placed(), "x y"), lambda path=path: read_zarr(path)):
            with pytest.raises(SpmdError, match="bucket/folder"):
                call()
    assert list(tmp_path.iterdir()) == []


# --- arrays that are far too large -----------------------------------------------------------------------------------


def test_an_array_far_too_large_is_an_error(tmp_path):
    """It aborted the process."""
    about = {
        "shape": [2**40, 2**20],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1024, 1024]}},
    }
    _fields._opened(tmp_path / "u", metadata=about, create=True)
    with pytest.raises(PlacementError, match=r"this process needs \S+ TiB of memory"):
        read_zarr(tmp_path / "u", "x/a y/b", mesh=spmd.make_mesh(**MESH))
