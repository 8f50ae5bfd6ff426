"""Devices of machines that are not here, to compile for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from spmd._trees.leaves import kind_of, not_int
from spmd.errors import MeshError

_DESCRIPTION = ".txtpb"  # how the names of XLA's descriptions of GPUs end
_WHERE = "https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs"


def topology_devices(target: str | os.PathLike[str], count: int | None = None, *, per_host: int = 8) -> list[Any]:
    """Devices of a machine that is not here, to compile for. Nothing runs on them.

    The compilers for GPUs and TPUs need no such device. On a mesh of these devices `spmd.explain` shows what such a
    compiler makes of a program: the collectives that it runs, and the memory that it needs. No communication.

    The compiler must be installed: `pip install "jax[cuda13]"` for GPUs, on Linux, or `pip install "jax[tpu]"`. Where
    no such device is, call `spmd.use_cpu_devices(1)` first, so that JAX does not look for one.

    Args:
      target: For GPUs the file with XLA's description of one, such as `h100_sxm.txtpb`: they lie in
        `xla/backends/gpu/target_config/specs` of https://github.com/openxla/xla. For TPUs the name of a slice:
        "v5p:2x2x2".
      count: The number of devices. The name of a slice of TPUs says it too, and may say it alone.
      per_host: The GPUs of one host.

    Returns:
      The devices, for `spmd.make_mesh(devices=...)`.

    Raises:
      MeshError: If the compiler is not installed or does not know the target, if the file does not exist, if the GPUs
        do not fill their hosts, or if the slice has another number of TPUs.

    Example:
      >>> import spmd
      >>> devices = spmd.topology_devices("v5p:2x2x2")  # doctest: +SKIP
      >>> mesh = spmd.make_mesh(dp=2, tp=4, devices=devices)  # doctest: +SKIP
    """
    shown = os.fspath(target) if isinstance(target, os.PathLike) else target
    call = f"topology_devices({shown!r}{'' if count is None else f', {count!r}'})"
    if not isinstance(target, str | os.PathLike):
        rule = f"the target is a file or the name of a slice, not {kind_of(target)}."
        raise MeshError(rule, call=call, advice='"h100_sxm.txtpb", or "v5p:2x2x2"')
    if Path(target).suffix == _DESCRIPTION:
        return _devices(call, "cuda", "cuda", _gpus(call, Path(target), count, per_host))
    if ":" not in os.fspath(target):
        rule = f"the target is a file that ends with {_DESCRIPTION}, or the name of a slice of TPUs with its shape."
        raise MeshError(rule, call=call, advice=f'"v5p:2x2x2", or the description of a GPU, such as one of {_WHERE}')
    found = _devices(call, os.fspath(target), "tpu", {})
    if count not in (None, len(found)):
        rule = f"the slice has {len(found)} TPUs, not {count}."
        raise MeshError(rule, call=call, advice="another slice, or no count")
    return found


def _gpus(call: str, file: Path, count: Any, per_host: Any) -> dict[str, str]:
    """Return what JAX's compiler for GPUs wants to know."""
    fault = not_int("count, the number of GPUs,", count, 1) or not_int("per_host, the GPUs of one host,", per_host, 1)
    if fault:
        raise MeshError(fault, call=call, advice="as in count=8")
    hosts, left = divmod(count, per_host)
    if left and hosts:
        rule = f"{count} GPUs do not fill hosts of {per_host}."
        raise MeshError(rule, call=call, advice="another count, or per_host=")
    if not file.is_file():
        rule = "the file does not exist."
        raise MeshError(rule, call=call, advice=f"a description of the GPU, such as one of {_WHERE}")
    topology = f"1x{hosts}x{per_host}" if hosts else f"1x1x{count}"  # slices, hosts, devices of a host
    return {"target_config": file.read_text(), "topology": topology}


def _devices(call: str, name: str, platform: str, facts: dict[str, str]) -> list[Any]:
    try:
        return list(topologies.get_topology_desc(name, platform, **facts).devices)
    except jax.errors.JaxRuntimeError as error:
        rule = "the compiler does not know this target."
        advice = f"one of {_WHERE}" if facts else 'a slice such as "v5p:2x2x2"'
        raise MeshError(rule, call=call, advice=advice) from error
    except (NotImplementedError, RuntimeError) as error:
        extra, what = ("cuda13", "GPU") if facts else ("tpu", "TPU")
        rule = f"the compiler for {what}s is not there."
        advice = f'pip install "jax[{extra}]"; and where there is no {what}, spmd.use_cpu_devices(1) first'
        raise MeshError(rule, call=call, advice=advice) from error
