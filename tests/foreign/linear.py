"""Products of divided matrices."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.foreign.registry import draw, foreign


@foreign("vllm-project/tpu-inference tpu_inference/layers/common/linear.py:119", lambda x, w: x @ w.T, tp=4)
def row_linear(mesh):
    def wrapper(x, w):
        out = jnp.einsum("bd,fd->bf", x, w)
        return lax.psum(out, axis_name="tp")

    fn = jax.shard_map(
        wrapper, mesh=mesh, in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P(None, None), check_vma=False
    )
    return jax.jit(fn), (draw(6, 16), draw(8, 16))


def _dequantized(x, w, scale):
    return x @ (w * scale[:, None]).T


@foreign("vllm-project/tpu-inference tpu_inference/layers/common/linear.py:214", _dequantized, data=2, model=4)
def quantized_row_linear(mesh):
    def quantized(x, w_q, w_s):
        return jnp.einsum("bd,fd->bf", x, w_q) * w_s[None]

    def wrapper(x, w_q, w_s):
        output = quantized(x, w_q, w_s)
        return lax.psum(output, axis_name="model")

    specs = (P("data", "model"), P(None, "model"), P(None))
    fn = jax.shard_map(wrapper, mesh=mesh, in_specs=specs, out_specs=P("data", None), check_vma=False)
    return jax.jit(fn), (draw(4, 16), draw(8, 16), draw(8))


@foreign("sgl-project/sglang-jax python/sgl_jax/srt/kernels/quantized_matmul/kernel.py:138", lambda x, w: x @ w.T, tp=4)
def scattered_row_linear(mesh):
    reduce_axis = "tp"

    def matmul(x, w):
        out = lax.dot_general(x, w, dimension_numbers=(((1,), (1,)), ((), ())))
        return lax.psum_scatter(out, axis_name=reduce_axis, scatter_dimension=0, tiled=True)

    fn = jax.shard_map(matmul, mesh=mesh, in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P("tp", None))
    return jax.jit(fn), (draw(8, 16), draw(6, 16))


def _gated(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


@foreign("sgl-project/sglang-jax python/sgl_jax/srt/kernels/fused_mlp.py:176", _gated, data=2, tensor=4)
def gated_mlp(mesh):
    def local(x, gate, up, down):
        h = jax.nn.silu(x @ gate) * (x @ up)
        y_loc = h @ down
        return jax.lax.psum(y_loc, axis_name="tensor")

    specs = (P("data"), P(None, "tensor"), P(None, "tensor"), P("tensor"))
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
    return jax.jit(fn), (draw(4, 8), draw(8, 12), draw(8, 12, seed="up"), draw(12, 8))


@foreign("AI-Hypercomputer/maxtext src/maxtext/layers/pipeline.py:1107", _gated, stays=1, fsdp=4)
def fsdp_mlp(mesh):
    def gathered(x, axis_name, axis_idx):
        return jax.lax.all_gather(x, axis_name=axis_name, axis=axis_idx, tiled=True)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("fsdp"), P("fsdp"), P("fsdp"), P(None, "fsdp")), out_specs=P("fsdp"))
    def step(x, gate, up, down):
        gate, up = gathered(gate, "fsdp", 0), gathered(up, "fsdp", 0)
        return (jax.nn.silu(x @ gate) * (x @ up)) @ gathered(down, "fsdp", 1)

    return jax.jit(step), (draw(8, 8), draw(8, 12), draw(8, 12, seed="up"), draw(12, 8))


@foreign("erfanzar/EasyDeL easydel/layers/linears/_linear_quantized.py:485", lambda x, w: x @ w, tp=4)
def gathered_inputs(mesh):
    def local(inputs, kernel):
        full = jax.lax.all_gather(inputs, "tp", axis=-1, tiled=True)
        return full @ kernel

    fn = jax.shard_map(
        local, mesh=mesh, in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P(None, "tp"), check_vma=False
    )
    return jax.jit(fn), (draw(6, 8), draw(8, 12))


@foreign(
    "AI-Hypercomputer/maxtext src/maxtext/examples/shmap_collective_matmul.py:113",
    lambda x, w: jnp.einsum("bse,ehd->bshd", x, w),
    fsdp=2,
    tensor=4,
)
def collective_matmul(mesh):
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("fsdp", "tensor", None), P(None, "tensor", None)),
        out_specs=P("fsdp", None, "tensor", None),
        check_vma=False,
    )
    def matmul(activations, weights):
        axis_size = jax.lax.psum(1, axis_name="tensor")
        axis_index = jax.lax.axis_index(axis_name="tensor")
        chunk = activations.shape[1]
        shape = (activations.shape[0], chunk * axis_size, *weights.shape[1:])
        accum = jnp.zeros(shape, activations.dtype)
        update = jnp.einsum("bse,ehd->bshd", activations, weights)
        accum = jax.lax.dynamic_update_slice(accum, update, (0, axis_index * chunk, 0, 0))
        forward, backward = jnp.split(activations, 2, axis=1)
        up = [(j, (j + 1) % axis_size) for j in range(axis_size)]
        down = [(j, (j - 1) % axis_size) for j in range(axis_size)]
        forward = jax.lax.ppermute(forward, axis_name="tensor", perm=up)
        backward = jax.lax.ppermute(backward, axis_name="tensor", perm=down)

        def step(i, carry):
            accum, forward, backward = carry
            one = jnp.einsum("bse,ehd->bshd", forward, weights)
            two = jnp.einsum("bse,ehd->bshd", backward, weights)
            at = ((axis_index - i - 1) % axis_size) * chunk
            to = ((axis_index + i + 1) % axis_size) * chunk + chunk // 2
            accum = jax.lax.dynamic_update_slice(accum, one, (0, at, 0, 0))
            accum = jax.lax.dynamic_update_slice(accum, two, (0, to, 0, 0))
            forward = jax.lax.ppermute(forward, axis_name="tensor", perm=up)
            backward = jax.lax.ppermute(backward, axis_name="tensor", perm=down)
            return accum, forward, backward

        return jax.lax.fori_loop(0, axis_size - 1, step, (accum, forward, backward))[0]

    return jax.jit(matmul), (draw(4, 16, 6), draw(6, 4, 3))


@foreign("AI-Hypercomputer/maxtext src/maxtext/kernels/megablox/ops.py:801", lambda x, g: x.T @ g, fsdp=4)
def weight_gradient(mesh):
    def local(x, g):
        dw = x.T @ g
        return jax.lax.psum_scatter(dw, "fsdp", scatter_dimension=0, tiled=True)

    fn = jax.shard_map(local, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"))
    return jax.jit(fn), (draw(8, 12), draw(8, 5))
