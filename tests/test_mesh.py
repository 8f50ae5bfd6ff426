"""Making meshes, and virtual CPU devices in programs of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import spmd
from spmd import make_mesh, use_cpu_devices
from spmd.errors import MeshError
from spmd.mesh import crossing, owners_text, sizes_for

ROOT = Path(__file__).resolve().parents[1]


def test_axes_in_the_order_written() -> None:
    mesh = make_mesh(tp=4, dp=2)
    assert isinstance(mesh, Mesh) and mesh.axis_names == ("tp", "dp") and mesh.devices.shape == (4, 2)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh == make_mesh(tp=4, dp=2) != make_mesh(dp=2, tp=4)


def test_fewer_devices_than_there_are() -> None:
    assert list(make_mesh(x=3).devices.flat) == jax.devices()[:3]
    assert make_mesh(x=1, y=1).size == 1


def test_devices_of_my_own() -> None:
    chosen = jax.devices()[2:6][::-1]
    mesh = make_mesh(a=2, b=2, devices=chosen)
    assert list(mesh.devices.flat) == chosen
    assert make_mesh(a=-1, devices=np.array(chosen)).shape == {"a": 4}


def test_the_rest() -> None:
    assert make_mesh(dp=-1, tp=2).shape == {"dp": 4, "tp": 2}
    assert make_mesh(dp=8, tp=-1).shape == {"dp": 8, "tp": 1}


def test_abstract() -> None:
    mesh = make_mesh(dp=64, tp=128, abstract=True)
    assert isinstance(mesh, AbstractMesh) and mesh.size == 64 * 128
    kernel = spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)(lambda x: spmd.reduce(x, "b/dp d/tp -> b/dp", "sum"))
    shape = jax.ShapeDtypeStruct((128, 256), np.float32)
    assert kernel.trace(shape).out_info.shape == (128,)


@pytest.mark.parametrize("name", ["scalar", "U", "None", "_x", "a1", "If"])
def test_names_that_strings_can_write(name) -> None:
    mesh = make_mesh(**{name: 2})
    run = spmd.kernel(f"n/{name} -> n", mesh=mesh)(lambda x: spmd.all_gather(x, f"n/{name} -> n", to="invarying"))
    np.testing.assert_array_equal(run(np.arange(4)), np.arange(4))


# -------------------- virtual CPU devices


def program(text: str, **environment: str) -> str:
    """What a fresh Python prints; the JAX settings of this one do not reach it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import jax, spmd\n" + text],
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_fresh_program_gets_them() -> None:
    """Importing starts no backend, so that a program may import first and ask for devices then; and ask twice."""
    text = """
import spmd.random, spmd.inspect
print(len(spmd.use_cpu_devices(7)), len(jax.devices()), spmd.make_mesh(dp=2, tp=3).size)
print(len(spmd.use_cpu_devices(4)), len(jax.devices()))
"""
    assert program(text) == "7 7 6\n4 7"


def test_a_backend_that_runs_with_fewer() -> None:
    text = """
jax.numpy.ones(3)
try:
    spmd.use_cpu_devices(8)
except spmd.errors.MeshError as error:
    print(error)
"""
    message = program(text)
    assert "JAX already runs with 1 CPU device; it cannot grow to 8." in message
    assert "advice: call spmd.use_cpu_devices(8)" in message


def test_a_backend_that_runs_with_enough() -> None:
    text = "jax.numpy.ones(3)\nprint(len(spmd.use_cpu_devices(8)), len(spmd.use_cpu_devices(2)))"
    assert program(text, JAX_NUM_CPU_DEVICES="8") == "8 2"
    assert program(text, XLA_FLAGS="--xla_force_host_platform_device_count=8") == "8 2"


def test_here_eight_are_enough() -> None:
    assert use_cpu_devices(8) == jax.devices() and use_cpu_devices(1) == jax.devices()[:1]


def test_sizes_are_those_of_a_mesh_of_a_dict_or_of_the_surroundings() -> None:
    mesh = make_mesh(dp=2, tp=4)
    for given in (mesh, mesh.abstract_mesh, {"dp": np.int32(2), "tp": 4}):
        assert sizes_for(given, "f") == {"dp": 2, "tp": 4}
    with jax.set_mesh(mesh):
        assert sizes_for(None, "f") == {"dp": 2, "tp": 4}
    for wrong, shown in (([2, 4], "a list"), ({}, "{}"), ({"dp": 0}, "{'dp': 0}"), ({"dp": True}, "{'dp': True}")):
        with pytest.raises(MeshError, match=re.escape(f"positive sizes, not {shown}.")):
            sizes_for(wrong, "f")


def test_no_axis_crosses_processes_in_one(mesh):
    assert crossing(mesh) == () == crossing(mesh.abstract_mesh)
    assert owners_text(mesh) == "process 0 has 0, 1, 2, 3, 4, 5, 6, 7"


def test_devices_of_many_processes_are_shortened():
    devices = np.array([SimpleNamespace(id=i, process_index=i // 10) for i in range(100)])
    found = owners_text(SimpleNamespace(devices=devices)).split("; ")
    assert found[0] == "process 0 has 0, 1, 2, 3, 4, 5, 6, 7, ..." and len(found) == 9 and found[-1] == "..."


class Node:
    """A device of a node or slice that is not here."""

    def __init__(self, number: int, inside: int):
        self.id, self.slice_index, self.process_index = number, inside, 0
        self.platform, self.device_kind = "gpu", "not here"


def test_devices_are_compared_few_times():
    """Each with those of its own hash: 8,000 devices are no 64 million comparisons."""
    compared = 0

    class Device(Node):
        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return self is other

        __hash__ = object.__hash__

    devices = [Device(number, 0) for number in range(2000)]
    with pytest.raises(MeshError, match="each device has one place"):
        make_mesh(dp=-1, devices=[*devices, devices[7]])
    assert compared < 20 * len(devices)


@pytest.mark.parametrize(
    ("axes", "inside"),
    [
        ({"dp": 4, "tp": 2}, {"tp"}),
        ({"dp": 2, "tp": 4}, {"tp"}),
        ({"dp": 8}, set()),
        ({"pp": 2, "dp": 2, "tp": 2}, {"dp", "tp"}),
    ],
)
def test_the_last_axes_stay_inside_a_node(monkeypatch, axes, inside):
    """`jax.make_mesh` takes no devices of several."""
    nodes = [Node(number, number % 2) for number in range(8)]  # not in order
    monkeypatch.setattr("spmd.mesh._devices", lambda: nodes)
    devices = spmd.make_mesh(**axes).devices
    for position, axis in enumerate(axes):
        groups = np.moveaxis(devices, position, -1).reshape(-1, axes[axis])
        crosses = any(len({one.slice_index for one in group}) > 1 for group in groups)
        assert crosses == (axis not in inside)
    assert sorted(one.id for one in devices.flat) == list(range(8))
