"""Fields on disk: each process writes the blocks of its devices to a Zarr array, and reads those of any other mesh."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import reprlib
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd._processes.agreement import everyone, in_all
from spmd._processes.copies import block_text
from spmd._text import bytes_text
from spmd._trees.arguments import explained
from spmd.errors import PlacementError, SpmdError, is_int
from spmd.language import Layout
from spmd.mesh import mesh_for, outside_trace, whole_sharding
from spmd.modes import ambient_mode
from spmd.placement import placements

# --- where programs write: a folder, or a bucket of a cloud -----------------------------------------------------------


def in_a_bucket(path: str | Path, schemes: Sequence[str], call: str) -> bool:
    """Return whether a path is one in a bucket, `gs://bucket/folder`, and not a folder of this machine.

    Args:
      path: The path.
      schemes: Those that are known here, such as "gs".
      call: The call, for the error.

    Raises:
      SpmdError: It is another URL, which would become a folder of that name.
    """
    found = re.match(r"([a-zA-Z][\w+.-]*):/+(.*)", str(path))  # a Path has only one slash left
    if found is None:
        return False
    scheme, rest = found.groups()
    if isinstance(path, str) and scheme in schemes and path.startswith(f"{scheme}://") and rest.strip("/"):
        return True
    known = " or ".join(f'"{one}://bucket/folder"' for one in schemes)
    raise SpmdError(f"nothing is written to {str(path)!r}.", call=call, advice=f"a folder, or {known}, as a string")


def entries(text: bytes, path: Any, **right: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what a file of JSON says.

    Args:
      text: The file.
      path: Where it is, for the error.
      **right: For entries, whether what they say is right; None stands for one that is not there.

    Raises:
      OSError: It says something else, or nothing.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise OSError(f"{path} is no JSON") from None
    if not isinstance(found, dict):
        raise OSError(f"{path} is of type {type(found).__name__}, and has no entries")
    for name, test in right.items():
        if not test(found.get(name)):
            raise OSError(f"{path}: {name!r} is {reprlib.repr(found[name]) if name in found else 'missing'}")
    return found


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


_MOST = 2**26  # bytes of a chunk
_ABOUT = "spmd"  # the attribute that says how the array lay


@explained
def write_zarr(path: str | Path, x: jax.Array, names: str, *, overwrite: bool = False) -> None:
    """Write an array to Zarr: `write_zarr("density.zarr", rho, "x y z")`.

    Each process writes the blocks that its devices hold, and one of the copies of a block. No device sends anything.
    The result is a Zarr array of version 3, which xarray and others read too; zarr-python has no bfloat16. It has the
    names of the dimensions, and as its attribute `spmd` the layout and the mesh of the array. A chunk is a device's
    block, or an equal part of it of at most 64 MiB, so no two processes write one chunk. Each chunk has a checksum.

    What is not complete has another name: the array is written beside its place, as `density.zarr.*.part`, and renamed
    when all processes have written all chunks. In a bucket, which knows no renaming, the file that says the shape comes
    last, and without it there is no array. TensorStore writes it (`pip install "spmd[cluster]"`). All processes call
    this function, and it returns when the array is there.

    Communication: none between devices. In several processes, a few all-gathers of 32 bytes.

    Args:
      path: A folder that does not exist, on a disk that all processes reach; or `gs://bucket/density.zarr`, or
        `s3://bucket/density.zarr`. A link is followed.
      x: The array, of numbers or booleans.
      names: The names of its dimensions, `"x y z"`. Where they lie is read off the array.
      overwrite: Whether to replace an array that `write_zarr` has written. Nothing else is ever replaced.

    Raises:
      LayoutError: If the names are not those of its dimensions.
      SpmdError: If the path is another URL.
      PlacementError: If there is something at the path already, a process cannot write its blocks or writes them
        elsewhere, or the array holds random keys or is traced.

    Example:
      >>> import jax.numpy as jnp, spmd, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> slabs = spmd.shard(jnp.arange(24.0).reshape(8, 3), "x/a y", mesh=spmd.make_mesh(a=8))
      >>> spmd.cluster.write_zarr(f"{folder}/u.zarr", slabs, "x y")
      >>> pairs = spmd.cluster.read_zarr(f"{folder}/u.zarr", "x/b y", mesh=spmd.make_mesh(b=2, c=4))
      >>> pairs.sharding.spec, float(abs(pairs - slabs).max())
      (P('b', None), 0.0)

    References:
      https://zarr-specs.readthedocs.io/en/latest/v3/core/
    """
    call = f'write_zarr("{path}", x, "{names}")'
    layout = _written_as(x, names, call)
    place, chunk = _Place(path, call), _chunk(x.sharding.shard_shape(x.shape), x.dtype.itemsize)
    metadata, rule = _metadata(x, layout, chunk), "the array could not be written."

    def write() -> None:
        store = _opened(place.part, metadata=metadata, open=True, assume_metadata=True)
        blocks = [one for one in x.addressable_shards if one.replica_id == 0]
        for writing in [store[one.index].write(np.asarray(one.data)) for one in blocks]:
            writing.result()

    def end() -> None:
        if jax.process_index() == 0:
            chunks = math.prod(n // c for n, c in zip(x.shape, chunk, strict=True)) if x.size else 0
            place.end(overwrite, metadata, chunks)

    _in_all(lambda: place.begin(overwrite), rule, call)
    try:
        for step in (write, end):
            _in_all(step, rule, call)
    except PlacementError:
        place.remove("part")
        raise


@explained
def read_zarr(
    path: str | Path,
    layout: str | None = None,
    *,
    mesh: Any = None,
    mapping: Any = None,
    dtype: Any = None,
    rename: Mapping[str, str] | None = None,
) -> jax.Array:
    """Read an array from Zarr: `read_zarr("density.zarr", "x/a y/b z", mesh=mesh)`.

    The mesh, the layout and the number of processes need not be those that wrote it. Each process reads the chunks in
    which its devices have something, and each block once. A chunk that is missing or damaged is an error, while Zarr
    itself would give zeros for one that is missing. Arrays that others have written are read too, where chunks may be
    missing. All processes call this function.

    Communication: none between devices. In several processes, an all-gather of 32 bytes.

    Args:
      path: The folder of the array, or its URL, as for `write_zarr`.
      layout: How it is to lie. By default as it lay when it was written, if `write_zarr` has written it. Its names are
        those of the array, where it has some; `_` stands for any.
      mesh: The mesh. By default it is that of `jax.set_mesh`.
      mapping: Rules for bare names. By default they are those of the surrounding `axis_mapping`.
      dtype: A floating type to which floating numbers are cast, on the host. By default they stay as they are.
      rename: What its dimensions are called in the layout: `{"lon": "x"}`.

    Returns:
      The array, placed.

    Raises:
      PlacementError: If there is no array, or one that is not complete; a chunk is missing or damaged; its dimensions
        have other names; it does not fit into the memory; JAX does not hold its type, or `dtype` is of another kind.
      SizeError: If the array does not fit the layout.
      MeshError: If there is no mesh, or an axis is unknown.

    Example:
      >>> import jax.numpy as jnp, spmd, tempfile
      >>> folder, mesh = tempfile.mkdtemp(), spmd.make_mesh(a=2, b=4)
      >>> spmd.cluster.write_zarr(f"{folder}/u.zarr", spmd.shard(jnp.ones((8, 4)), "x/a y/b", mesh=mesh), "x y")
      >>> spmd.cluster.read_zarr(f"{folder}/u.zarr", mesh=mesh).sharding.spec
      P('a', 'b')

    References:
      https://zarr-specs.readthedocs.io/en/latest/v3/core/
    """
    call = f'read_zarr("{path}"' + (f', "{layout}")' if layout is not None else ")")
    if not outside_trace():
        raise PlacementError("read_zarr runs outside jit.", call=call, advice="pass it as an argument")
    place = _Place(path, call)
    about = _in_all(place.about, "there is no complete array at this path.", call)
    if layout is None:
        if _ABOUT not in about["attributes"]:
            rule = "the array does not say how it lay, because something else wrote it."
            raise PlacementError(rule, call=call, advice=f'read_zarr("{path}", "x/a y")')
        layout = about["attributes"][_ABOUT]["layout"]
    shape, stored = tuple(about["shape"]), jnp.dtype(about["data_type"])
    wanted = _held_by_jax(stored, dtype, call)
    mesh = mesh_for(mesh, [], call)
    [found] = placements(jax.ShapeDtypeStruct(shape, wanted), layout, mesh, mapping, call)
    _check_names(about, Layout(str(layout)), rename or {}, call)
    sharding: Any = whole_sharding(mesh) if ambient_mode()[0] == "reference" else found

    def read() -> dict[str, np.ndarray[Any, Any]]:
        store = _opened(place.whole, open=True, fill_missing_data_reads=_ABOUT not in about["attributes"])
        blocks = {block_text(one, shape): one for one in sharding.addressable_devices_indices_map(shape).values()}
        _check_memory(len(blocks) * math.prod(sharding.shard_shape(shape)) * stored.itemsize)
        futures = {block: store[where].read() for block, where in blocks.items()}
        return {block: np.asarray(one.result()).astype(wanted, copy=False) for block, one in futures.items()}

    numbers = _in_all(read, "the array could not be read.", call)
    return jax.make_array_from_callback(shape, sharding, lambda where: numbers[block_text(where, shape)])


def _written_as(x: Any, names: str, call: str) -> Layout:
    """Return how an array lies, if it can be written."""
    if isinstance(x, jax.core.Tracer):
        raise PlacementError("write_zarr runs outside jit.", call=call, advice="return it, and write the result")
    if not isinstance(x, jax.Array):
        rule = f"write_zarr takes a jax.Array, not {type(x).__name__}."
        raise PlacementError(rule, call=call, advice="spmd.shard(x, layout) makes one")
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        rule = "write_zarr writes numbers, not random keys."
        raise PlacementError(rule, call=call, advice="jax.random.key_data(x)")
    layout = Layout.of(x, names)
    if layout.unreduced:
        raise PlacementError("a partial sum is not written: its blocks are terms.", call=call, got=[layout.short])
    return layout


class _Place:
    """Where an array is, or will be. In a folder it is written beside its place, and renamed when it is whole. In a
    bucket, where nothing can be renamed, what says the shape is deleted first. It is written last."""

    def __init__(self, path: str | Path, call: str) -> None:
        self.in_a_bucket = in_a_bucket(path, ("gs", "s3"), call)
        self.whole: Any = f"{path}".rstrip("/") if self.in_a_bucket else Path(os.path.realpath(path))
        self.part: Any = self.whole

    def begin(self, overwrite: bool) -> None:
        name = everyone(uuid.uuid4().hex)[0]  # that nobody else has
        if not self.in_a_bucket:
            self.part, self.old = (Path(f"{self.whole}.{name}.{ending}") for ending in ("part", "old"))
        if jax.process_index() == 0:
            self._check_room(overwrite)
            self.remove("part")
            for kept in ((_NAME, f"{_NAME}\0"), ()) if self.in_a_bucket else ():
                _files(self.part).delete_range(_tensorstore().KvStore.KeyRange(*kept)).result()

    def end(self, overwrite: bool, metadata: Mapping[str, Any], chunks: int) -> None:
        files = _files(self.part)
        if (found := len(files.list().result())) != chunks:
            raise OSError(f"process 0 finds {found} chunks of {chunks}: do all processes reach this disk?")
        drawn = _opened("memory://", metadata=metadata, create=True).kvstore
        files.write(_NAME, drawn.read(_NAME).result().value).result()
        if not self.in_a_bucket:
            self._check_room(overwrite)  # something may have come there meanwhile
            if self.whole.exists():
                self.whole.rename(self.old)
            self.part.rename(self.whole)
            self.remove("old")

    def _check_room(self, overwrite: bool) -> None:
        """Complain about what is there, but for an array of ours that may be replaced: nothing else is ever deleted."""
        if self.in_a_bucket:
            names = [key.decode() for key in _files(self.whole).list().result()]
        elif self.whole.exists() and not self.whole.is_dir():
            raise FileExistsError("a file is at this path, and is not replaced")
        else:
            names = [one.relative_to(self.whole).as_posix() for one in self.whole.rglob("*")]
        there, ours = _NAME in names, self.in_a_bucket and _NAME not in names  # that is what a stopped write leaves
        with contextlib.suppress(OSError):
            ours = ours or _ABOUT in self.about()["attributes"]
        other = [one for one in names if not (ours and re.fullmatch(rf"{re.escape(_NAME)}|c(/\d+)*", one))]
        if other:
            told = f"what is at this path was not written by write_zarr, and is not replaced: it has {min(other)!r}"
            raise FileExistsError(told)
        if there and not overwrite:
            raise FileExistsError("there is an array at this path already: overwrite=True replaces it")

    def about(self) -> dict[str, Any]:
        """What an array says of itself."""
        if self._has(_NAME):
            text, path = _files(self.whole).read(_NAME).result().value, f"{self.whole}/{_NAME}"
            if entries(text, path, node_type=is_text)["node_type"] != "array":
                raise OSError("it is a group of arrays: read one of them")
            about = entries(text, path, **_ENTRIES)
            names = about.get("dimension_names") or [None] * len(about["shape"])
            if len(names) != len(about["shape"]):
                raise OSError(f"{path}: {len(names)} 'dimension_names' for {len(about['shape'])} dimensions")
            return {**about, "dimension_names": names, "attributes": about.get("attributes") or {}}
        if self._has(".zarray") or self._has(".zgroup"):
            raise OSError("it is written in version 2 of Zarr, and version 3 is read")
        if left := [one.name for one in self._left("old|part")]:
            raise OSError(f"it was not written to its end: beside it is {', '.join(left)}")
        raise OSError("nothing is there, or it was not written to its end")

    def _left(self, ending: str) -> list[Path]:
        """What writes that were stopped have left beside it."""
        if self.in_a_bucket or not self.whole.parent.is_dir():
            return []
        form = re.compile(rf"{re.escape(self.whole.name)}\.[0-9a-f]{{32}}\.({ending})")
        return sorted(one for one in self.whole.parent.iterdir() if form.fullmatch(one.name))

    def remove(self, ending: str) -> None:
        for one in self._left(ending):
            shutil.rmtree(one, ignore_errors=True)

    def _has(self, name: str) -> bool:
        return bool(_files(self.whole).read(name).result().state == "value")


def _is_number(name: Any) -> bool:
    """Return whether it is the name of a type of numbers."""
    with contextlib.suppress(TypeError, ValueError):
        return isinstance(name, str) and bool(jnp.issubdtype(jnp.dtype(name), jnp.number) or name == "bool")
    return False


def _says_layout(about: Any) -> bool:
    return is_mapping(about) and is_text(about.get("layout"))


_NAME = "zarr.json"  # what says the shape
_ENTRIES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda shape: isinstance(shape, list) and all(is_int(n, 0) for n in shape),
    "data_type": _is_number,
    "dimension_names": lambda names: (
        not names or (isinstance(names, list) and all(n is None or is_text(n) for n in names))
    ),
    "attributes": lambda told: is_mapping(told or {}) and _says_layout((told or {}).get(_ABOUT, {"layout": ""})),
}


def _chunk(block: Sequence[int], item: int) -> list[int]:
    """The block, or an equal part of it that is small enough: cut along its first dimensions."""
    chunk = [max(n, 1) for n in block]
    for dim, n in enumerate(chunk):
        most = _MOST // (item * math.prod(chunk) // n)
        chunk[dim] = next(size for size in range(max(min(n, most), 1), 0, -1) if n % size == 0)
    return chunk


def _metadata(x: jax.Array, layout: Layout, chunk: Sequence[int]) -> dict[str, Any]:
    mesh = getattr(x.sharding, "mesh", None)
    return {
        "shape": x.shape,
        "data_type": x.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "dimension_names": _names(layout),
        "attributes": {_ABOUT: {"layout": layout.short, "mesh": dict(mesh.shape) if mesh is not None else {}}},
    }


def _names(layout: Layout) -> list[str | None]:
    """Return what the dimensions are called; None for those without a name."""
    return [" ".join(str(a.name) for a in d.atoms) if all(a.named for a in d.atoms) else None for d in layout.dims]


def _check_names(about: Mapping[str, Any], layout: Layout, rename: Mapping[str, str], call: str) -> None:
    """Complain about dimensions that have other names in the layout than the array says."""
    stored: list[str | None] = about["dimension_names"]
    if unknown := [name for name in rename if name not in stored]:
        raise PlacementError(f"the array has no dimension {unknown[0]!r}.", call=call, got=[_listed(stored)])
    wanted = [None if name is None else rename.get(name, name) for name in stored]
    here = _names(layout.with_rank(len(stored)))
    wrong = {old: new for old, name, new in zip(stored, wanted, here, strict=True) if name != new and name and new}
    if wrong:
        rule = "the names of the layout are not those of the array."
        got = [f"the array: {_listed(stored)}", f"here: {_listed(here)}"]
        advice = f"write its names, in its order; or rename={json.dumps({**rename, **wrong})} if they mean the same"
        raise PlacementError(rule, call=call, got=got, advice=advice)


def _listed(names: Sequence[str | None]) -> str:
    return " ".join("_" if name is None else f"({name})" if " " in name else name for name in names)


def _check_memory(needed: int) -> None:
    """Complain about numbers that this machine cannot hold, for which TensorStore would end the process."""
    if needed > (held := _memory()):
        told = f"this process needs {bytes_text(needed)} of memory, and this machine has {bytes_text(int(held))}"
        raise OSError(f"{told}: divide the array over devices of more hosts")


def _memory() -> float:
    """The memory of this machine, or what its container may take of it."""
    found = [float("inf")]
    for one in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max"
            found.append(int(Path(one).read_text()))
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not on Windows
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found)


def library(name: str, rule: str) -> Any:
    """Return a package that is imported where it is needed.

    Raises:
      SpmdError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SpmdError(rule, advice='pip install "spmd[cluster]"') from error


def _tensorstore() -> Any:
    return library("tensorstore", "TensorStore, which reads and writes Zarr, is not installed.")


def _where(path: Path | str) -> Any:
    return {"driver": "file", "path": f"{path}/"} if isinstance(path, Path) else f"{path}/"


def _files(path: Path | str) -> Any:
    return _tensorstore().KvStore.open(_where(path)).result()


def _opened(path: Path | str, **how: Any) -> Any:
    whole = {"store_data_equal_to_fill_value": True} if "metadata" in how else {}
    return _tensorstore().open({"driver": "zarr3", "kvstore": _where(path), **whole, **how}).result()


def _held_by_jax(stored: Any, dtype: Any, call: str) -> Any:
    """The type in which an array is read."""
    wanted = stored if dtype is None else jnp.dtype(dtype)
    floating = all(jnp.issubdtype(one, jnp.floating) for one in (stored, wanted))
    if wanted != stored and not floating:
        rule = f"the array is {stored.name}, and dtype={wanted.name} is of another kind."
        raise PlacementError(rule, call=call, advice="read it as it is, then astype")
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        rule = f"the array is {wanted.name}, which JAX does not hold unless jax_enable_x64 is on."
        more = "; or dtype=jnp.float32" if floating else ""
        raise PlacementError(rule, call=call, advice=f"jax.config.update('jax_enable_x64', True){more}")
    return wanted


def _in_all(step: Callable[[], Any], rule: str, call: str) -> Any:
    """Return what a step gives, if it succeeds in all processes; else all of them raise.

    Communication: in several processes an all-gather of 32 bytes.
    """
    return in_all(step, lambda told: PlacementError(rule, call=call, got=[told]), OSError, ValueError, KeyError)
