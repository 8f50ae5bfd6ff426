"""Layers as functions on arrays: weights in, mesh axes by keyword, the communication in the docstring."""

from spmd.nn.norm import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
