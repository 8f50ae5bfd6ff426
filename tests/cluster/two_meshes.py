"""Two processes of two devices: arrays go from meshes of some devices to meshes of others."""

import random
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import spmd

SHAPE = (12, 24)
CASES: dict[str, tuple[list[int], dict[str, int], list[int], dict[str, int]]] = {
    "to the other process": ([0, 1], {"x": 2}, [2, 3], {"p": 2}),
    "some of both": ([0, 1, 2], {"x": 3}, [1, 2, 3], {"p": 3}),
    "another order": ([0, 1, 2, 3], {"x": 2, "y": 2}, [3, 1, 0, 2], {"p": 4}),
    "to one device": ([0, 1, 2, 3], {"x": 4}, [2], {"p": 1}),
    "from one device": ([0], {"x": 1}, [0, 1, 2, 3], {"p": 2, "q": 2}),
    "halves to thirds": ([0, 3], {"x": 2}, [1, 2, 3], {"p": 3}),
    "the same": ([2, 3], {"x": 2}, [2, 3], {"x": 2}),
}
DTYPES = ["float32", "bfloat16", "int8", "bool", "complex64", "float8_e4m3fn", "int4", "uint32"]


def placed(whole: Any, layout: str, mesh: Any) -> Any:
    sharding = spmd.Layout(layout).sharding(mesh)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype)


def check(out: Any, whole: Any, mesh: Any, layout: str) -> None:
    assert out.sharding == spmd.Layout(layout).sharding(mesh) and out.dtype == whole.dtype and out.shape == whole.shape
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    assert [shard.device for shard in out.addressable_shards] == here
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])


def layout(dice: random.Random, axes: dict[str, int]) -> str:
    dims: list[list[str]] = [["a"], ["b"]]
    for axis in dice.sample(list(axes), dice.randint(0, len(axes))):
        dice.choice(dims).append(axis)
    return " ".join("/".join(one) for one in dims)


def main(seed: int) -> None:
    spmd.cluster.initialize()
    devices = np.array(sorted(jax.devices(), key=lambda one: one.id))
    dice = random.Random(seed)
    for name, (first, before, second, after) in CASES.items():
        mesh, to = (
            Mesh(devices[ids].reshape(tuple(sizes.values())), tuple(sizes))
            for ids, sizes in ((first, before), (second, after))
        )
        for _ in range(3):
            source, target = layout(dice, before), layout(dice, after)
            dtype = dice.choice(DTYPES)
            whole = (
                np.random.default_rng(seed)
                .integers(0, 2 if dtype == "bool" else 7, SHAPE)
                .astype(jax.numpy.dtype(dtype))
            )
            x = placed(whole, source, mesh)
            out = spmd.relayout(x, f"{source} -> {target}", to=to)
            check(out, whole, to, target)
            print(name, source, target, dtype)
    trees(devices)
    print("done")


def trees(devices: Any) -> None:
    """Weights of a trainer on one process go to a sampler on the other, and are deleted."""
    mesh, to = Mesh(devices[:2], ("dp",)), Mesh(devices[2:], ("tp",))
    weights = {"in": np.ones((8, 16), np.float32), "out": np.full((16, 8), 2, np.float32), "scale": np.float32(3)}
    where = {"in": ("a/dp b", "a b/tp"), "out": ("a/dp b", "a/tp b"), "scale": ("scalar", "scalar")}
    tree = {name: placed(np.asarray(x), where[name][0], mesh) for name, x in weights.items()}
    patterns = {name: " -> ".join(ends) for name, ends in where.items()}
    moved = spmd.relayout(tree, patterns, to=to, donate=True)
    for name, x in weights.items():
        check(moved[name], np.asarray(x), to, where[name][1])
        assert tree[name].is_deleted()
    none = spmd.relayout(placed(np.zeros((0, 4), np.int32), "a b", mesh), "a b -> a b/tp", to=to)
    check(none, np.zeros((0, 4), np.int32), to, "a b/tp")
    assert spmd.plan(patterns["in"], a=8, b=16, mesh=mesh, to=to).lower_bound == 8 * 8 * 4
    try:
        keys = jax.random.wrap_key_data(placed(np.zeros((4, 2), np.uint32), "a/dp b", mesh))
    except ValueError:  # this process sees none of them
        return
    try:
        spmd.relayout(keys, "a/dp -> a/tp", to=to)
    except spmd.errors.CommunicationError as error:
        print(error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
