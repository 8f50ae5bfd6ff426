"""Meshes: making one, finding the one in use, and virtual CPU devices."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Never, overload

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from spmd import _compat
from spmd._processes.environment import forgotten
from spmd._python.ambient import Ambient
from spmd._trees.leaves import kind_of, not_int
from spmd.errors import LayoutError, MeshError, ModeError, PlacementError, is_int
from spmd.language import Layout, mesh_text

__all__ = [
    "ambient_mesh",
    "check_alive",
    "check_arguments_alive",
    "check_mesh",
    "lies_whole",
    "made_whole",
    "make_mesh",
    "mesh_for",
    "mesh_of",
    "no_mesh",
    "outside_trace",
    "use_cpu_devices",
    "whole_sharding",
]


@overload
def make_mesh(
    *words: Never,
    devices: Sequence[Any] | None = None,
    abstract: Literal[False] = False,
    alone: bool = False,
    partial: bool = False,
    **axes: int,
) -> Mesh: ...
@overload
def make_mesh(
    *words: Never,
    devices: Sequence[Any] | None = None,
    abstract: Literal[True],
    alone: bool = False,
    partial: bool = False,
    **axes: int,
) -> AbstractMesh: ...
@overload
def make_mesh(
    *words: Never,
    devices: Sequence[Any] | None = None,
    abstract: bool,
    alone: bool = False,
    partial: bool = False,
    **axes: int,
) -> Mesh | AbstractMesh: ...
def make_mesh(
    *words: Never,
    devices: Sequence[Any] | None = None,
    abstract: bool = False,
    alone: bool = False,
    partial: bool = False,
    **axes: int,
) -> Mesh | AbstractMesh:
    """Make a mesh with named axes, in the order written.

    All axes are `AxisType.Auto`, the type under which arrays of any sharding may meet. A mesh of your own, with
    Explicit axes or a mixture, works in every function of `spmd` as well.

    Communication: none.

    Args:
      devices: The devices to use. By default they are those that `use_cpu_devices` chose, or else the first
        `prod(axes)` of `jax.devices()` in the order that suits the hardware. Where they are in several slices of TPUs
        or nodes of GPUs, the first axes cross these, and the last ones stay inside.
      abstract: Make an `AbstractMesh`: names and sizes without devices, for tracing and planning.
      alone: Allow a mesh of this process's own devices where a launcher or a scheduler started several processes, and
        none of them called `spmd.cluster.initialize`.
      partial: Allow a mesh in which some processes have no device. They cannot use it.
      **axes: Axis names with their sizes. One may be -1. It gets the devices that are left.

    Returns:
      A `jax.sharding.Mesh`, or an `AbstractMesh`.

    Raises:
      MeshError: If a size is not an int of at least 1, a layout cannot write a name, a device is given twice,
        there are too few devices, a process has none in the mesh, several processes were started and did not join, or
        slices or nodes have unequal parts.

    Example:
      >>> import spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> mesh.axis_names, mesh.size
      (('dp', 'tp'), 8)
    """
    if words:
        call = f"make_mesh({', '.join(map(repr, words))})"
        raise MeshError("each axis is a keyword with its size.", call=call, advice="as in make_mesh(dp=2, tp=4)")
    call = f"make_mesh({', '.join(f'{k}={v!r}' for k, v in axes.items())})"
    _check_axes(axes, call)
    pool = None if devices is None else _pool(devices, call)
    sizes = _fill(axes, pool, abstract, call)
    kinds = (AxisType.Auto,) * len(sizes)
    shape, names = tuple(sizes.values()), tuple(sizes)
    if abstract:
        return AbstractMesh(shape, names, axis_types=kinds)
    if not alone:
        _check_joined(call)
    pool = _devices() if pool is None else pool
    wanted = math.prod(shape)
    if wanted > len(pool):
        raise _too_few(call, wanted, pool)
    if devices is not None and wanted != len(pool):
        raise MeshError(
            f"the axes multiply to {wanted}, but {len(pool)} devices were given.",
            call=call,
            fix=f"devices=devices[:{wanted}]",
        )
    pool = pool[:wanted]
    if not partial:
        _check_everyone(pool, call)
    if devices is not None:
        return Mesh(np.array(pool, dtype=object).reshape(shape), names, axis_types=kinds)
    if len({_slice_of(one) for one in pool}) > 1:
        return Mesh(_over_slices(sizes, pool, call), names, axis_types=kinds)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=pool)


def _slice_of(device: Any) -> int:
    """The slice of TPUs of a device, or the node or domain of GPUs, inside which a network is fast."""
    return getattr(device, "slice_index", None) or 0


def _over_slices(sizes: Mapping[str, int], pool: Sequence[Any], call: str) -> np.ndarray[Any, Any]:
    """The devices of several slices or nodes, so that the first axes cross them and the last ones stay inside."""
    counts = Counter(map(_slice_of, pool))
    outer, rest = [], len(counts)
    for size in sizes.values():
        outer.append(math.gcd(size, rest))
        rest //= outer[-1]
    if rest > 1 or len(set(counts.values())) > 1:
        rule = (
            f"the devices are in {len(counts)} slices or nodes, and these axes cannot be cut so that each has a part."
        )
        got = [f"devices of each: {', '.join(f'{n}' for n in counts.values())}"]
        advice = "as many devices of each, and axes that have their number as a factor; or devices=, in your order"
        raise MeshError(rule, call=call, got=got, advice=advice)
    inner = [size // one for size, one in zip(sizes.values(), outer, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices=pool)


def _check_axes(axes: Mapping[str, Any], call: str) -> None:
    if not axes:
        raise MeshError("a mesh needs at least one axis.", call=call, advice="as in make_mesh(dp=2, tp=4)")
    for name, size in axes.items():
        if not _writable(name):
            rule = f"layouts name the axes of a mesh, and none can name {name!r}."
            advice = "a name of ASCII letters, digits and '_' that starts with a letter"
            raise MeshError(rule, call=call, advice=advice)
        fault = not_int(f"the size of axis {name}", size, 1, "-1 for the rest")
        if fault and not (is_int(size) and size == -1):
            raise MeshError(fault, call=call)


def _check_joined(call: str) -> None:
    """Programs that were started together and did not join would each train alone."""
    task = forgotten() if not jax.distributed.is_initialized() else None
    if task is not None:
        rule = f"{task.count} processes were started, and this one has not joined the others."
        advice = "spmd.cluster.initialize() at the top of the program; or alone=True for a mesh of its own"
        raise MeshError(rule, call=call, got=[str(task)], advice=advice)


def _check_everyone(pool: Sequence[Any], call: str) -> None:
    """A process without a device in the mesh fails at its first array, and the others wait for it."""
    count = jax.process_count()
    without = sorted(set(range(count)) - {device.process_index for device in pool}) if count > 1 else []
    if without:
        who = f"process{'es' * (len(without) > 1)} {', '.join(map(str, without))}"
        rule = f"{who} of {count} {'have' if len(without) > 1 else 'has'} no device in the mesh."
        advice = "a mesh of all devices, with -1 for one of its axes; or partial=True where that is meant"
        got = [f"the mesh has {len(pool)} of {jax.device_count()} devices"]
        raise MeshError(rule, call=call, got=got, advice=advice)


@functools.lru_cache(maxsize=64)
def processes_of(mesh: Mesh) -> frozenset[int]:
    """The processes that have a device in a mesh."""
    return frozenset(device.process_index for device in mesh.devices.flat)


def crossing(mesh: Any) -> tuple[str, ...]:
    """The mesh axes along which the process changes: what is sent over them leaves a process. An abstract mesh has no
    devices, so nothing is known of it."""
    if not isinstance(mesh, Mesh) or len(processes_of(mesh)) == 1:
        return ()
    owners = np.array([device.process_index for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    return tuple(axis for dim, axis in enumerate(mesh.axis_names) if np.diff(owners, axis=dim).any())


def crossing_text(axes: Sequence[str]) -> str:
    """Say that axes cross processes."""
    return f"{', '.join(axes)} cross{'es' * (len(axes) == 1)} processes"


def owners_text(mesh: Any) -> str:
    """Return which devices of a mesh each process has: `process 0 has 0, 1; process 1 has 2, 3`."""
    held: dict[int, list[int]] = {}
    for device in mesh.devices.flat:
        held.setdefault(device.process_index, []).append(device.id)
    shown = [f"process {rank} has {_ids_text(held[rank])}" for rank in sorted(held)[:_SHOWN]]
    return "; ".join([*shown, "..."] if len(held) > _SHOWN else shown)


_SHOWN = 8  # devices or processes that a message lists


def _ids_text(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:_SHOWN])) + ", ..." * (len(ids) > _SHOWN)


def _pool(devices: Any, call: str) -> list[Any]:
    found = list(np.ravel(np.asarray(devices, dtype=object)))
    wrong = [x for x in found if not hasattr(x, "platform")]
    if wrong:
        rule = f"devices are jax.Device objects, and one is of type {type(wrong[0]).__name__}."
        raise MeshError(rule, call=call, advice="as in devices=jax.devices()[:8]")
    twice = [str(device) for device, count in Counter(found).items() if count > 1]
    if twice:
        rule = "each device has one place in a mesh."
        got = [f"more than once: {', '.join(twice[:3])}{', ...' * (len(twice) > 3)}"]
        raise MeshError(rule, call=call, got=got, advice="as in devices=jax.devices()[:8]")
    return found


def _writable(name: str) -> bool:
    """Return whether a layout can divide a dimension over an axis of this name."""
    try:
        return Layout(f"n/{name}").axes == (name,)
    except LayoutError:
        return False


def _fill(axes: dict[str, int], pool: list[Any] | None, abstract: bool, call: str) -> dict[str, int]:
    free = [name for name, size in axes.items() if size == -1]
    if not free:
        return {name: int(size) for name, size in axes.items()}
    if len(free) > 1:
        raise MeshError(f"only one axis may be -1, and {', '.join(free)} are.", call=call)
    if abstract:
        raise MeshError("an abstract mesh has no devices to count, so no axis can be -1.", call=call)
    known = math.prod(size for size in axes.values() if size != -1)
    count = len(_devices() if pool is None else pool)
    if count % known:
        raise MeshError(f"{count} devices do not divide by the {known} of the other axes.", call=call)
    return {name: count // known if size == -1 else int(size) for name, size in axes.items()}


def _too_few(call: str, wanted: int, pool: list[Any]) -> MeshError:
    platform = pool[0].platform if pool else "no"
    return MeshError(
        f"the mesh needs {wanted} devices, and there are {len(pool)} ({platform}).",
        call=call,
        advice=f"spmd.use_cpu_devices({wanted}) at the top of the program for virtual CPU devices, or smaller axes",
    )


def use_cpu_devices(count: int) -> list[Any]:
    """Make `count` virtual CPU devices the devices of this program, also where a GPU exists.

    Call it at the top of a program, before anything that asks JAX for devices. A CPU backend that runs
    already and has enough devices is accepted. In a program of several processes it comes after
    `jax.distributed.initialize`, and counts the devices of each process. No communication.

    Args:
      count: How many devices.

    Returns:
      The first `count` CPU devices, which `make_mesh` uses from now on.

    Raises:
      MeshError: If JAX already runs with fewer CPU devices; their number can no longer change.

    Example:
      >>> import spmd
      >>> len(spmd.use_cpu_devices(8))
      8
    """
    if fault := not_int("the number of devices", count, 1):
        raise MeshError(fault, call=f"use_cpu_devices({count!r})")
    refused = _ask_for_cpu(count)
    have = jax.devices("cpu")
    if len(have) < count:
        raise MeshError(
            f"JAX already runs with {len(have)} CPU device{'s' * (len(have) > 1)}; it cannot grow to {count}.",
            call=f"use_cpu_devices({count})",
            got=["the backend starts with the first array or the first question for devices"],
            advice=f"call spmd.use_cpu_devices({count}) before them, at the top of the program",
        ) from refused
    _chosen[:] = have
    if jax.default_backend() != "cpu":  # an accelerator was in use already: new arrays go to the CPU from here on
        jax.config.update("jax_default_device", have[0])
    return have[:count]


_chosen: list[Any] = []  # the CPU devices that use_cpu_devices chose, which jax.devices() may not show first


def _ask_for_cpu(count: int) -> Exception | None:
    """Set the number of CPU devices while that is possible; the refusal where it is not."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return None  # the number is set there, and JAX refuses to be told twice
    try:
        jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices))
    except RuntimeError as error:
        return error
    jax.config.update("jax_platforms", "cpu")  # no effect once a backend runs
    return None


def _devices() -> list[Any]:
    return _chosen or jax.devices()


def ambient_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of the surrounding `jax.set_mesh`, concrete if possible, else that of a `with mesh:`, else None."""
    concrete = jax.sharding.get_mesh() if outside_trace() else None
    if concrete is not None and not concrete.empty:
        return concrete
    abstract = jax.sharding.get_abstract_mesh()
    return _mesh_of_with() if abstract.empty else abstract


def _mesh_of_with() -> Mesh | None:
    """The mesh of a surrounding `with mesh:`, JAX's older way, which only constraints of bare specs still read."""
    asked = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec())
    try:
        [eqn] = jax.make_jaxpr(asked)(np.float32(0)).eqns
    except (RuntimeError, ValueError):  # there is none
        return None
    mesh = getattr(eqn.params.get("sharding"), "mesh", None)
    return mesh if isinstance(mesh, Mesh) and not mesh.empty else None


def outside_trace() -> bool:
    """Return whether nothing is being traced: only then can a concrete mesh be asked for or set."""
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return False
    return True


def mesh_of(leaves: Sequence[Any]) -> Mesh | AbstractMesh | None:
    """The mesh that the shardings of `leaves` name, or None.

    Inside `jit` the types of arrays name it, without devices; a leaf that names the devices too wins.

    Raises:
      MeshError: If two leaves live on different meshes.
    """
    found: Mesh | AbstractMesh | None = None
    for leaf in leaves:
        here = _lives_on(leaf)
        if here is None:
            continue
        if found is None or (isinstance(found, AbstractMesh) and found == here.abstract_mesh):
            found = here
        elif found != here and found.abstract_mesh != here:
            raise MeshError(
                "the arguments live on two meshes, so the mesh cannot be read off them.",
                got=[mesh_text(found.shape) + _devices_text(found), mesh_text(here.shape) + _devices_text(here)],
                advice="mesh=mesh, the one to run on; arrays that lie on the other are moved there",
            )
    return found


def check_mesh(mesh: Any, call: str) -> None:
    """Complain about a `mesh=` that is not a mesh."""
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        rule = f"mesh is a jax.sharding.Mesh or an AbstractMesh, not {kind_of(mesh)}."
        raise MeshError(rule, call=call, advice="as in mesh=spmd.make_mesh(dp=2, tp=4)")


def mesh_for(mesh: Any, leaves: Sequence[Any], call: str) -> Mesh | AbstractMesh:
    """The mesh of a call: the one given, else that of its arrays, else that of `jax.set_mesh`.

    Raises:
      MeshError: If there is none, or what is given is not a mesh.
    """
    check_mesh(mesh, call)
    found = mesh if mesh is not None else mesh_of(leaves) or ambient_mesh()
    if found is None:
        arrays = " no array lives on one," if leaves else ""
        rule = f"the call has no mesh: none was given,{arrays} and jax.set_mesh does not surround it."
        raise MeshError(rule, call=call, advice="as in mesh=spmd.make_mesh(dp=2, tp=4)")
    return with_sizes(found, dict(resized.value)) if resized.value else found


resized = Ambient("resized", ())  # other sizes of mesh axes, in pairs, for a trace that shows what depends on them


def with_sizes(mesh: Mesh | AbstractMesh, sizes: Mapping[str, int]) -> AbstractMesh:
    """The same mesh with other sizes of some axes; it has no devices, and only traces."""
    shape = tuple(sizes.get(name, n) for name, n in mesh.shape.items())
    return AbstractMesh(shape, mesh.axis_names, axis_types=mesh.axis_types)


def sizes_for(mesh: Any, call: str) -> dict[str, int]:
    """The sizes of the mesh axes where no devices are needed: of a mesh, of a dict, else of `jax.set_mesh`.

    Raises:
      MeshError: If there is none, or what is given does not say sizes.
    """
    if mesh is None or isinstance(mesh, Mesh | AbstractMesh):
        return dict(mesh_for(mesh, [], call).shape)
    named = isinstance(mesh, Mapping) and mesh
    if not named or not all(isinstance(axis, str) and is_int(size, 1) for axis, size in mesh.items()):
        got = f"{dict(mesh)}" if isinstance(mesh, Mapping) else kind_of(mesh)
        rule = f"mesh is a Mesh, an AbstractMesh or a dict of axis names and positive sizes, not {got}."
        raise MeshError(rule, call=call, advice='as in mesh={"dp": 2, "tp": 4}')
    return {axis: int(size) for axis, size in mesh.items()}


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """A context without a mesh, for a `shard_map` that is given its own.

    JAX writes the context mesh into the jaxpr, and `checkify` fails where that is not the manual one of the body.
    """
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _lives_on(leaf: Any) -> Mesh | AbstractMesh | None:
    if isinstance(leaf, jax.core.Tracer):
        sharding = getattr(jax.typeof(leaf), "sharding", None)
    else:
        sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return sharding.mesh


def check_alive(arrays: Iterable[tuple[str, Any]], call: str) -> None:
    """No array is used whose buffer somebody else has.

    Raises:
      PlacementError: With all that are gone.
    """
    gone = [f"{path}: {x.dtype.name}{list(x.shape)}" for path, x in arrays if _compat.deleted(x)]
    if gone:
        rule = "an array is used whose buffer was given away: it was donated to an earlier call, or deleted."
        advice = "use what that call returned; or do not donate it there"
        raise PlacementError(rule, call=call, got=gone, advice=advice)


def check_arguments_alive(args: Any, kwargs: Any, call: str) -> None:
    """`check_alive` for the arguments of a call."""
    if any(map(_compat.deleted, jax.tree.leaves((args, kwargs)))):
        check_alive(named_arguments(args, kwargs), call)


def named_arguments(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of the arguments of a call, named `argument[0]['w']`, `argument['w']`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
    return ((f"argument{jax.tree_util.keystr(path[1:])}", x) for path, x in leaves)


def whole_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding | SingleDeviceSharding | None:
    """Return where reference mode has its arrays outside `jit`: on the first device of the mesh. Under `jax.set_mesh`
    they are on each device of that mesh, because JAX refuses to combine arrays on fewer devices with others there."""
    if outside_trace() and not (around := jax.sharding.get_mesh()).empty:
        return NamedSharding(around, PartitionSpec())
    # not the device itself, with which device_put keeps the type that an array had on an Explicit mesh
    return SingleDeviceSharding(mesh.devices.flat[0]) if isinstance(mesh, Mesh) else None


def lies_whole(x: Any, mesh: Mesh | AbstractMesh) -> bool:
    """Return whether a value is where reference mode has its arrays, or cannot be brought there."""
    if not isinstance(x, jax.Array) or not outside_trace():
        return True
    wanted = whole_sharding(mesh)
    if isinstance(x, jax.core.Tracer):  # of a gradient that is taken outside `jit`
        return not isinstance(wanted, NamedSharding)
    typed = jax.typeof(x).sharding.mesh
    if isinstance(wanted, NamedSharding):
        return x.sharding == wanted or (not x.committed and typed.empty)
    return wanted is None or (typed.empty and x.sharding.device_set == wanted.device_set)


def made_whole(x: Any, mesh: Mesh | AbstractMesh) -> Any:
    """An array outside `jit` as reference mode wants it.

    Raises:
      ModeError: If other processes hold parts of it.
    """
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        rule = "reference mode runs on one device, and this array spans processes."
        raise ModeError(rule, got=[f"{x.dtype.name}{list(x.shape)}"], advice='spmd.mode("auto")')
    wanted = whole_sharding(mesh)
    return x if wanted is None else jax.device_put(x, wanted)


def _devices_text(mesh: Mesh | AbstractMesh) -> str:
    if not isinstance(mesh, Mesh):
        return ""
    return f" of devices {_ids_text([device.id for device in mesh.devices.flat])}"
