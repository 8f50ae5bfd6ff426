"""Devices that are not here: what the compiler is asked for, and what is said if it is not there."""

import types

import jax
import pytest
from jax.experimental import topologies

import spmd
from spmd import topology_devices
from spmd.errors import MeshError


@pytest.fixture
def asked(monkeypatch):
    """The questions to JAX, which gives virtual CPU devices for an answer."""
    found = []

    def get_topology_desc(name, platform, **facts):
        found.append((name, platform, facts))
        return types.SimpleNamespace(devices=jax.devices())

    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    return found


@pytest.fixture
def described(tmp_path):
    file = tmp_path / "h100.txtpb"
    file.write_text("a GPU")
    return file


@pytest.mark.parametrize(
    ("count", "per_host", "topology"), [(8, 8, "1x1x8"), (4, 8, "1x1x4"), (16384, 8, "1x2048x8"), (8, 4, "1x2x4")]
)
def test_gpus_fill_their_hosts(asked, described, count, per_host, topology):
    assert topology_devices(described, count, per_host=per_host) == jax.devices()
    assert asked == [("cuda", "cuda", {"target_config": "a GPU", "topology": topology})]


def test_a_slice_of_tpus_is_named(asked):
    mesh = spmd.make_mesh(dp=2, tp=4, devices=topology_devices("v5p:2x2x2"))
    assert topology_devices("v5p:2x2x2", 8) == list(mesh.devices.flat)
    assert asked == [("v5p:2x2x2", "tpu", {})] * 2 and mesh.size == 8


def test_what_the_compiler_does_not_know(monkeypatch, described):
    def refuses(name, platform, **facts):
        raise jax.errors.JaxRuntimeError("FAILED_PRECONDITION")

    monkeypatch.setattr(topologies, "get_topology_desc", refuses)
    for target, count, said in ((described, 8, "target_config/specs"), ("v9:1x1", None, "v5p:2x2x2")):
        with pytest.raises(MeshError, match=r"does not know this target[\s\S]*" + said) as caught:
            topology_devices(target, count)
        assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
