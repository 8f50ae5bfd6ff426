"""Wrong calls of rings, of Ulysses and of placements of a sequence."""

import jax.numpy as jnp

import spmd
from spmd import parallel
from tests.errors.registry import bad

HEADS = "b s h k, b s g k -> b s h k"


def run(mesh, body, signature=HEADS, q=(2, 8, 4, 2), k=(2, 8, 2, 2)):
    return spmd.kernel(signature, mesh=mesh)(body)(jnp.ones(q), jnp.ones(k))


RING = "b s/dp h k, b s/dp g k -> b s/dp h k"


bad(
    an_unknown_placement=lambda mesh: run(
        mesh, lambda q, k: parallel.ring_attention(q, k, k, cp="dp", placement="zig-zag"), RING
    ),
    a_ring_in_negative_chunks=lambda mesh: run(
        mesh, lambda q, k: parallel.ring_attention(q, k, k, cp="dp", chunk=-3), RING
    ),
)


@bad
def a_ring_with_segments_for_queries_and_keys(mesh):
    at = jnp.zeros((2, 4), int)
    run(mesh, lambda q, k: parallel.ring_attention(q, k, k, cp="dp", segments=(at, at)), RING)


@bad
def zigzag_of_what_does_not_divide(mesh):
    body = lambda q, k: parallel.ring_attention(q, k, k, cp="dp", placement="zigzag")
    run(mesh, body, RING, q=(2, 6, 4, 2), k=(2, 6, 2, 2))


bad(
    stripes_of_what_does_not_divide=lambda mesh: spmd.kernel("s/dp -> s/dp", mesh=mesh)(
        lambda x: parallel.place_sequence(x, "striped", cp="dp", axis=0)
    )(jnp.ones(6)),
)


@bad
def causal_across_sequences(mesh):
    ring = lambda q, k: parallel.ring_attention(q, k, k, cp="dp", causal=True)
    run(mesh, ring, "b s/dp h k, b t/dp g k -> b s/dp h k", k=(2, 4, 2, 2))


bad(
    ring_key_heads_that_serve_unequally=lambda mesh: run(
        mesh, lambda q, k: parallel.ring_attention(q, k, k, cp="dp"), RING, q=(2, 8, 5, 2)
    ),
    too_few_heads_for_ulysses=lambda mesh: run(
        mesh, lambda q, k: parallel.ulysses_attention(q, k, k, cp="dp"), RING, q=(2, 8, 1, 2), k=(2, 8, 1, 2)
    ),
    a_balanced_order_for_nobody=lambda mesh: run(
        mesh, lambda q, k: parallel.ulysses_attention(q, k, k, cp="dp", placement="zigzag"), RING
    ),
    chunks_for_nobody=lambda mesh: run(mesh, lambda q, k: parallel.ulysses_attention(q, k, k, cp="dp", chunk=2), RING),
)


@bad
def a_kernel_in_a_ring(mesh):
    where = {"cp": "dp", "ring": "tp", "implementation": "cudnn"}
    run(mesh, lambda q, k: parallel.ulysses_attention(q, k, k, **where), RING.replace("s/dp", "s/tp/dp"))
