"""Layers as functions on arrays: weights in, mesh axes by keyword, the communication in the docstring."""

from spmd.nn.dropout import dropout
from spmd.nn.embedding import embedding, unembedding
from spmd.nn.linear import column_linear, gated_mlp, mlp, qkv_linear, row_linear
from spmd.nn.loss import cross_entropy, linear_cross_entropy
from spmd.nn.norm import layer_norm, rms_norm

__all__ = [
    "column_linear",
    "cross_entropy",
    "dropout",
    "embedding",
    "gated_mlp",
    "layer_norm",
    "linear_cross_entropy",
    "mlp",
    "qkv_linear",
    "rms_norm",
    "row_linear",
    "unembedding",
]
