"""Sampled calls: a mesh of any types of axes, an argument held anywhere, any ambient mesh, mode and transformation."""

import contextlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from tests.sampler import dice, seeds

MESHES = (
    ((2, 4), ("x", "y")),
    ((2, 2, 2), ("x", "y", "z")),
    ((4, 2), ("x", "y")),
    ((8,), ("x",)),
    ((1, 8), ("x", "y")),
    ((2, 1, 4), ("x", "y", "z")),
)
TYPES = (AxisType.Auto, AxisType.Explicit)


def layout_of(rng: Any, names: list[str], axes: tuple[str, ...]) -> str:
    place: dict[str, list[str]] = {n: [] for n in names}
    for axis in rng.sample(axes, len(axes)):
        target = rng.choice([*names, None])
        if target:
            place[target].append(axis)
    return " ".join("/".join([n, *place[n]]) for n in names) or "scalar"


class Case:
    """One sampled call of a kernel that doubles its argument on the way to another layout."""

    def __init__(self, seed: Any):
        rng = dice(seed)
        shape, axes = rng.choice(MESHES)
        self.kinds = tuple(rng.choice(TYPES) for _ in axes)
        self.mesh = jax.make_mesh(shape, axes, axis_types=self.kinds, devices=jax.devices()[: int(np.prod(shape))])
        names = rng.choice(([], ["a"], ["a", "b"], ["a", "b", "c"]))
        self.src, self.dst, self.lies = (layout_of(rng, names, axes) for _ in range(3))
        self.x = np.arange(8 ** len(names), dtype=np.float32).reshape((8,) * len(names))
        self.held = rng.choice(("numpy", "one device", "sharded", "sharded", "replicated"))
        self.ambient = rng.choice((None, None, "its own", "another"))
        self.other = jax.make_mesh((8,), ("q",), axis_types=(rng.choice(TYPES),))
        self.mode = rng.choice(("explicit", "explicit", "auto", "reference"))
        self.how = rng.choice(("call", "call", "jit", "gradient", "vmap"))
        if self.how in ("gradient", "vmap") and self.ambient == "another":
            self.ambient = None  # the operations around the kernel are JAX's own, and want their arrays' mesh
        if self.how != "call" and self.held == "one device":
            self.held = "numpy"  # a jit around the kernel decides on its devices before we see its argument
        self.device = rng.choice(jax.devices())

    def __str__(self) -> str:
        mesh = ", ".join(f"{a}={n} {k.name}" for (a, n), k in zip(self.mesh.shape.items(), self.kinds, strict=True))
        return (
            f'"{self.src} -> {self.dst}" on ({mesh}), {self.held} "{self.lies}", ambient {self.ambient}, '
            f"{self.mode} {self.how}"
        )

    def argument(self):
        if self.held == "numpy":
            return self.x
        if self.held == "one device":
            return jax.device_put(self.x, self.device)
        spec = P() if self.held == "replicated" else spmd.Layout(self.lies).spec
        return jax.device_put(self.x, NamedSharding(self.mesh, spec))

    def kernel(self):
        if spmd.Layout(self.src) == spmd.Layout(self.dst):
            body = lambda v: v * 2
        else:
            body = lambda v: spmd.relayout(v, f"{self.src} -> {self.dst}", to="invarying") * 2
        return spmd.kernel(f"{self.src} -> {self.dst}", mesh=self.mesh)(body)

    def run(self):
        kernel, x = self.kernel(), self.argument()
        ambient = {"its own": self.mesh, "another": self.other}.get(self.ambient)
        with contextlib.nullcontext() if ambient is None else jax.set_mesh(ambient), spmd.mode(self.mode):
            if self.how == "call":
                return kernel(x)
            if self.how == "jit":
                return jax.jit(lambda v: kernel(v))(x)
            if self.how == "gradient":
                return jax.jit(jax.grad(lambda v: (kernel(v) ** 2).sum() / 4))(x)
            return jax.jit(lambda v: jax.vmap(kernel)(v[None]).reshape(v.shape))(self.x)


def check(case: Case) -> None:
    out = case.run()
    np.testing.assert_allclose(out, 2 * case.x, rtol=1e-6, err_msg=str(case))
    if case.how == "call" and case.mode != "reference":
        wanted = NamedSharding(case.mesh, spmd.Layout(case.dst).spec)
        assert out.sharding.is_equivalent_to(wanted, out.ndim), f"{out.sharding} for {case}"


@pytest.mark.parametrize("seed", seeds(12))
def test_sampled_call(seed):
    check(Case(seed))
