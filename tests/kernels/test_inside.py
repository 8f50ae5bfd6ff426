"""Kernels inside the user's own shard_map, and kernels inside other kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import LayoutError, MeshError, ReplicationError
from spmd.modes import MODES
from tests.kernels.harness import W, X, close, plain

# -------------------- inside other kernels


@pytest.mark.parametrize("mode", MODES)
def test_nested_kernels_are_inlined(mesh, layer, mode):
    @spmd.kernel("b/dp d, l d f/tp -> b/dp d", mesh=mesh)
    def network(x, ws):
        for i in range(2):
            x = layer(x, ws[i])
        return x

    stack = np.stack([W, -W])
    with spmd.mode(mode):
        close(network(X, stack), plain(plain(X, W), -W))
        found = jax.grad(lambda s: network(X, s).sum())(stack)
    close(found, jax.grad(lambda s: plain(plain(X, s[0]), s[1]).sum())(stack))


def test_nothing_is_moved_inside(mesh, layer):
    @spmd.kernel("b/dp/tp d, d f/tp -> b/dp f", mesh=mesh)
    def outer(x, w):
        return layer(x, w)

    with pytest.raises(LayoutError, match=r'x holds "b/dp/tp d".*wanted "b/dp d"'):
        outer(np.ones((8, 8), np.float32), W)


def test_another_mesh_inside(layer):
    other = spmd.kernel("b/dp d, d f/tp -> b/dp f", mesh=spmd.make_mesh(dp=4, tp=2))(lambda x, w: layer(x, w))
    with pytest.raises(MeshError, match="on another mesh"):
        other(X, W)


def test_a_jitted_helper_is_traced_for_each_kernel(mesh):
    """The frame is part of what jit remembers: one helper, two meshes, three modes."""
    helper = jax.jit(lambda x: spmd.reduce(x, "n/tp -> scalar"))
    kernels = [spmd.kernel("n/tp -> scalar", mesh=m)(lambda x: helper(x)) for m in (mesh, spmd.make_mesh(tp=2))]
    for kernel in kernels * 2:
        for mode in MODES:
            with spmd.mode(mode):
                assert kernel(np.arange(8.0)) == 28


# -------------------- in the user's own shard_map


def test_in_a_shard_map_over_all_axes(mesh, layer):
    mapped = jax.jit(
        jax.shard_map(lambda x, w: 2 * layer(x, w), mesh=mesh, in_specs=(P("dp"), P(None, "tp")), out_specs=P("dp"))
    )
    close(mapped(X, W), 2 * plain(X, W))
    close(jax.grad(lambda w: mapped(X, w).sum())(W), jax.grad(lambda w: 2 * plain(X, w).sum())(W))


def test_a_wrong_body_in_a_shard_map(mesh):
    wrong = spmd.kernel("b/dp d -> b/dp", mesh=mesh)(lambda x: spmd.einsum(x * 1, "b/dp d -> b/dp"))
    mapped = jax.jit(jax.shard_map(wrong, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp", "tp")))
    with pytest.raises((ReplicationError, ValueError)):
        mapped(X)


def gathering(mesh, wrong=False):
    @spmd.kernel("b/dp d, d f/tp -> b/dp f", mesh=mesh)
    def body(x, w):
        h = jnp.tanh(spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp"))
        if wrong:
            return spmd.psum(spmd.all_gather(h, "b/dp f/tp -> b/dp f"), "b/dp f {U:tp} -> b/dp f")
        return spmd.all_gather(h, "b/dp f/tp -> b/dp f", to="invarying")

    return body


def mapped_over(axes, mesh, body):
    """`body` in a shard_map over some axes, and arguments typed as Explicit axes want them."""
    x_spec, w_spec = P("dp" if "dp" in axes else None), P(None, "tp" if "tp" in axes else None)
    fn = jax.shard_map(body, mesh=mesh, axis_names=axes, in_specs=(x_spec, w_spec), out_specs=x_spec)
    typed = [a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit]
    only = lambda spec: P(*[a if a in typed else None for a in spec])
    place = lambda v, spec: jax.device_put(v, jax.NamedSharding(mesh, only(spec)))
    return jax.jit(fn), place(X, x_spec), place(W, w_spec)


A, E = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize("kinds", [(A, A), (E, E), (A, E), (E, A)], ids=str)
@pytest.mark.parametrize("axes", [{"dp"}, {"tp"}], ids=str)
def test_in_a_shard_map_over_some_axes(axes, kinds):
    """The kernel maps the rest, and its body is checked there too."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=kinds)
    fn, x, w = mapped_over(axes, mesh, gathering(mesh))
    close(fn(x, w), plain(X, W))
    fn, x, w = mapped_over(axes, mesh, gathering(mesh, wrong=True))
    with pytest.raises(ReplicationError, match="leave out"):
        fn(x, w)


def test_a_tree_of_results_over_some_axes(mesh):
    """The structure of the results is known only after the body has run."""
    results = lambda tree: dict.fromkeys(tree, "b/dp d")
    inner = spmd.kernel(in_layouts=("b/dp d",), out_layouts=results, mesh=mesh)(lambda x: {"same": x, "twice": 2 * x})
    fn = jax.jit(jax.shard_map(inner, mesh=mesh, axis_names={"dp"}, in_specs=P("dp"), out_specs=P("dp")))
    found = fn(X)
    close(found["same"], X)
    close(found["twice"], 2 * X)


def test_gradients_over_some_axes_are_beyond_jax(mesh):
    """JAX cannot lower the gradient of a shard_map in a shard_map. When it can, this fails, and so much the better."""

    def raw(x, w):
        inner = jax.shard_map(
            lambda x, w: jnp.tanh(x @ w), in_specs=(P(), P(None, "tp")), out_specs=P(None, "tp"), axis_names={"tp"}
        )
        return inner(x, w)

    for body in (raw, gathering(mesh)):
        fn, x, w = mapped_over({"dp"}, mesh, body)
        with pytest.raises(ValueError, match="already bound by a parent"):
            jax.jit(jax.grad(lambda w, fn=fn, x=x: fn(x, w).sum()))(w)


def test_operations_in_a_shard_map_without_a_kernel(mesh):
    mapped = jax.jit(
        jax.shard_map(
            lambda x: spmd.psum(x.sum(), "{U:tp} -> scalar")[None], mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp")
        )
    )
    close(mapped(X), X.reshape(2, -1).sum(1))
