"""Layers as functions on arrays: weights in, mesh axes by keyword, the communication in the docstring."""

from spmd._python.rooms import open_room
from spmd.nn.attention import (
    attention_mask,
    dot_product_attention,
    multi_head_attention,
    rotary_embedding,
    rotary_frequencies,
    spread_heads,
)
from spmd.nn.cache import cached_attention, kv_cache, kv_cache_append
from spmd.nn.latent import LatentWeights, cached_latent_attention, latent_attention
from spmd.nn.linear import column_linear, gated_mlp, mlp, qkv_linear, row_linear
from spmd.nn.loss import (
    cross_entropy,
    embedding,
    entropy,
    kl_divergence,
    linear_cross_entropy,
    token_logprobs,
    unembedding,
)
from spmd.nn.norm import dropout, layer_norm, rms_norm

__all__ = [
    "LatentWeights",
    "attention_mask",
    "cached_attention",
    "cached_latent_attention",
    "column_linear",
    "cross_entropy",
    "dot_product_attention",
    "dropout",
    "embedding",
    "entropy",
    "gated_mlp",
    "kl_divergence",
    "kv_cache",
    "kv_cache_append",
    "latent_attention",
    "layer_norm",
    "linear_cross_entropy",
    "mlp",
    "multi_head_attention",
    "qkv_linear",
    "rms_norm",
    "rotary_embedding",
    "rotary_frequencies",
    "row_linear",
    "spread_heads",
    "token_logprobs",
    "unembedding",
]

open_room(globals())
