"""`spmd.fused`: what explain counts of a function that is meant to be one kernel, and that nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import nn, parallel
from tests.inspect.harness import written

B, S, H, G, K = 2, 64, 4, 2, 16
Q, KV = 4 * B * S * H * K, 4 * B * S * G * K  # bytes of queries, and of keys or of values
ONCE = 2 * Q + 2 * KV  # what a kernel reads and writes: queries, keys, values and the result
HEADS = [jax.ShapeDtypeStruct((B, S, n, K), jnp.float32) for n in (H, G, G)]
ABSTRACT = spmd.make_mesh(dp=1, abstract=True)


def layer(**options):
    body = functools.partial(nn.dot_product_attention, **options)
    return spmd.kernel("b s h k, b s g k, b s g k -> b s h k", mesh=ABSTRACT)(lambda q, k, v: body(q, k, v))


def both(fn):
    """The result, and the gradients of all arguments."""

    def run(*args):
        out, pull = jax.vjp(fn, *args[:-1])
        return out, pull(args[-1])

    return run


def traffic(fn, *args):
    return written(fn, args, {}, ABSTRACT).hbm_bytes


# --- memory and work ---------------------------------------------------------------------------------------------

SCORES = 4 * B * H * S * S


def standing(fn, *args):
    """The bytes that stand with kernels, and as the program is written."""
    found = written(fn, args, {}, ABSTRACT)
    return found.standing_bytes, found.opened_bytes


def test_nothing_inside_a_kernel_stands():
    """Forward, and with gradients: what is kept is the result, which the product behind it needs too."""
    kernel, opened = standing(layer(causal=True), *HEADS)
    assert kernel == 0 and SCORES <= opened <= 2 * SCORES + Q

    def loss(q, k, v, w):
        return jnp.tanh(attend(q, k, v) @ w).sum()

    attend = layer(causal=True)
    w = jax.ShapeDtypeStruct((K, K), jnp.float32)
    kernel, opened = standing(jax.grad(loss, (0, 1, 2, 3)), *HEADS, w)
    assert Q <= kernel <= 4 * Q and opened >= 2 * SCORES


@pytest.mark.parametrize("again", [False, True])
def test_a_loop_keeps_the_results_of_a_kernel_and_not_its_scores(again):
    attend = layer(causal=True)
    step = lambda x, _: (jnp.sin(attend(x, x[:, :, :G], x[:, :, G:])), None)
    step = jax.checkpoint(step) if again else step

    def run(times, x):
        return jax.grad(lambda x: jax.lax.scan(step, x, length=times)[0].sum())(x)

    (nine, opened), (five, less) = (standing(functools.partial(run, times), HEADS[0]) for times in (9, 5))
    # The carry; else the operands and the result of the kernel, and what the sine needs.
    assert nine - five == 4 * (Q if again else ONCE + Q)
    assert again or opened - less >= 4 * SCORES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_multiplies_numbers_of_the_type_that_enters_it(dtype):
    """Two products forward and four backward, though the cotangents of the scores are written in float32."""
    heads = [jax.ShapeDtypeStruct(x.shape, dtype) for x in HEADS]
    product = 2.0 * B * H * S * S * K
    attend = layer(causal=True)
    assert dict(written(attend, heads, {}, ABSTRACT).matmul_flops) == {dtype: 2 * product}
    assert dict(written(both(attend), (*heads, heads[0]), {}, ABSTRACT).matmul_flops) == {dtype: 6 * product}


# --- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
def test_attention_counts_its_operands_and_results(mode):
    """Forward each once. Backward operands, result and cotangents are read, and cotangents written: twice as much."""
    attend = layer(causal=True)
    attend = attend if mode == "explicit" else getattr(attend, mode)
    assert traffic(attend, *HEADS) == ONCE
    assert traffic(both(attend), *HEADS, HEADS[0]) == 3 * ONCE


def test_what_is_kept_for_the_backward_pass_of_a_loop_counts_nothing():
    """Scores go through the loop as stacks. Besides the kernels, three cotangents are added to that of the stream."""
    attend = layer(causal=True)

    def run(times, x):
        step = lambda x, _: (attend(x, x[:, :, :G], x[:, :, G:]), None)
        return jax.grad(lambda x: jax.lax.scan(step, x, length=times)[0].sum())(x)

    nine, five = (traffic(functools.partial(run, times), HEADS[0]) for times in (9, 5))
    assert nine - five == 4 * (3 * ONCE + ONCE)


def test_a_layer_that_is_computed_again_runs_the_kernel_again():
    project = spmd.kernel("b s h k, b s g k, b s g k, k j -> b s h j", mesh=ABSTRACT)(
        jax.checkpoint(lambda q, k, v, w: nn.dot_product_attention(q, k, v, causal=True) @ w)
    )
    w = jax.ShapeDtypeStruct((K, K), jnp.float32)
    product = 2 * Q + 4 * K * K
    # The product and its two gradients; the product itself is not needed again.
    assert traffic(both(project), *HEADS, w, HEADS[0]) == 4 * ONCE + 3 * product


def test_masks_are_operands_and_causality_is_not():
    mask = jax.ShapeDtypeStruct((H, S, S), bool)
    masked = spmd.kernel("b s h k, b s g k, b s g k, h s t -> b s h k", mesh=ABSTRACT)(
        lambda q, k, v, mask: nn.dot_product_attention(q, k, v, mask=mask, causal=True, window=5)
    )
    assert traffic(masked, *HEADS, mask) == ONCE + H * S * S
    numbers = jax.ShapeDtypeStruct((B, S), jnp.int32)
    packed = spmd.kernel("b s h k, b s g k, b s g k, b s -> b s h k", mesh=ABSTRACT)(
        lambda q, k, v, segments: nn.dot_product_attention(q, k, v, segments=segments)
    )
    assert traffic(packed, *HEADS, numbers) == ONCE + 4 * B * S


def test_another_implementation_counts_as_it_is_written():
    scores = 4 * B * H * S * S
    assert traffic(layer(causal=True, implementation="xla"), *HEADS) > ONCE + 4 * scores


def test_a_hop_of_a_ring_is_a_kernel():
    """Each hop reads its queries, the keys and values that are here, and what was found so far, and writes that."""
    ring = {}
    for cp in (2, 3):
        mesh = spmd.make_mesh(cp=cp, abstract=True)
        attend = spmd.kernel("b s/cp h k, b s/cp g k, b s/cp g k -> b s/cp h k", mesh=mesh)(
            lambda q, k, v: parallel.ring_attention(q, k, v, cp="cp")
        )
        heads = [jax.ShapeDtypeStruct((B, cp * S, n, K), jnp.float32) for n in (H, G, G)]
        found = written(attend, heads, {}, mesh)
        ring[cp] = found.hbm_bytes
    state = 2 * (Q + 2 * Q // K)  # read and written: the sum, its maximum and total in float32
    sent = 2 * 2 * KV  # by the permute that brings the keys
    assert ring[3] - ring[2] == Q + 2 * KV + state + sent
    assert found.left_out["attention"] > 0


def cache_of(slots, heads, dtype, *names):
    arrays = {name: jax.ShapeDtypeStruct((B, slots, heads, K), dtype) for name in names}
    layouts = dict.fromkeys(names, "b t g k") | {"positions": "b t"}
    return arrays | {"positions": jax.ShapeDtypeStruct((B, slots), jnp.int32)}, layouts


def test_attention_over_a_cache_reads_the_cache_once():
    """In bfloat16, which is converted inside."""
    cache, layouts = cache_of(S, G, jnp.bfloat16, "k", "v")
    kernel = spmd.kernel(in_layouts=("b s h k", layouts, "b s"), out_layouts="b s h k", mesh=ABSTRACT)
    q, at = (jax.ShapeDtypeStruct((B, 1, *more), dtype) for *more, dtype in ((H, K, jnp.float32), (jnp.int32,)))
    given = (q, cache, at)
    every = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((given, q)))
    assert traffic(kernel(nn.cached_attention), *given) == every


def test_attention_over_latents_has_no_traffic_of_scores():
    """What a slot of the cache costs is the same for any number of heads."""

    def slots_cost(heads):
        sizes = (8, heads, K), (8, K), (K - 4, heads, K - 4), (K - 4, heads, 3), (heads, 3, 8)
        weights = nn.LatentWeights(*(jnp.zeros(size) for size in sizes))

        @spmd.kernel(in_layouts=("b s d", cache_of(1, 1, float, "k")[1], "b s"), out_layouts="b s d", mesh=ABSTRACT)
        def step(x, cache, at):
            return nn.cached_latent_attention(x, weights, cache, at, frequencies=nn.rotary_frequencies(4))[0]

        x, at = jax.ShapeDtypeStruct((B, 1, 8), jnp.float32), jax.ShapeDtypeStruct((B, 1), jnp.int32)
        many, few = (traffic(step, x, cache_of(n, 1, jnp.float32, "k")[0], at) for n in (3 * S, 2 * S))
        return many - few

    assert slots_cost(2) == slots_cost(8)


# --- a function of one's own ---------------------------------------------------------------------------------------


@spmd.fused("a norm")
def norm(x, scale=1.0):
    return scale * x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def test_a_function_of_ones_own(mesh):
    """Whatever it has inside. The names that are assumed, and how much they leave out, are told."""
    x = np.random.default_rng(0).normal(size=(8, 64, 64)).astype(np.float32)
    chain = lambda x: norm(jnp.sort(norm(x) @ norm(x)))
    plain = lambda x: norm.__wrapped__(jnp.sort(norm.__wrapped__(x) @ norm.__wrapped__(x)))
    whole = spmd.fused("a chain")(plain)
    found = spmd.explain(whole, x, mesh=ABSTRACT, hardware="h100", compiled=False)
    assert found.written.hbm_bytes == 2 * x.nbytes
    assert found.time.kernels == ("a chain",)
    assert "256 KiB at 3.35 TB/s; inside a chain 774 KiB" in found.table(200)
    assert found.written.left_out["a chain"] == pytest.approx(traffic(plain, x) - 2 * x.nbytes, rel=0.01)
    assert traffic(chain, x) == 2 * (2 * x.nbytes) + 3 * x.nbytes + 2 * x.nbytes + 2 * x.nbytes
    np.testing.assert_array_equal(jax.jit(whole)(x), jax.jit(plain)(x))


def test_a_kernel_in_a_kernel_is_a_part_of_it():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    whole = spmd.fused("a chain")(lambda x: norm(jnp.sort(norm(x) @ x)))
    size = 4 * 64 * 64
    assert traffic(whole, x) == 2 * size
    assert traffic(both(whole), x, x) == 6 * size
    assert set(written(both(whole), (x, x), {}, ABSTRACT).left_out) == {"a chain"}


def test_the_program_stays_as_it_is(mesh):
    """Values and gradients, forward-mode derivatives, and the compiled program under vmap."""
    x = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)

    def runs(fn):
        pushed = lambda x: jax.jvp(fn, (x,), (x,))
        return jax.jit(lambda x: (jax.grad(lambda x: fn(x)[0].sum())(x), jax.vmap(fn)(x), pushed(x)))

    marked, plain = runs(norm), runs(norm.__wrapped__)
    for one, other in zip(*(jax.tree.leaves(run(x)) for run in (marked, plain)), strict=True):
        np.testing.assert_array_equal(one, other)
    texts = [run.lower(x).compile().cost_analysis() for run in (marked, plain)]
    assert texts[0]["flops"] == texts[1]["flops"] and texts[0]["bytes accessed"] == texts[1]["bytes accessed"]


def test_layouts_stay_known(mesh):
    """What is known of an argument is known inside, so that a wrong string is refused there."""

    @spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)
    def total(x):
        return spmd.fused("a sum")(lambda x: spmd.reduce(x, "b/dp d/tp -> b/dp"))(x)

    x = np.ones((4, 8), np.float32)
    np.testing.assert_array_equal(total(x), x.sum(1))

    @spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)
    def wrong(x):
        return spmd.fused("a sum")(lambda x: spmd.reduce(x, "b/tp d/dp -> b/tp"))(x)

    with pytest.raises(spmd.errors.SpmdError, match="b/dp d/tp"):
        wrong(x)
