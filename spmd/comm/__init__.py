"""Communication: the verbs, each exactly one kind of collective; `relayout` for any other change."""

from spmd.comm.collectives import all_gather, all_to_all, defer, psum, psum_scatter, split
from spmd.comm.permute import ppermute, shift
from spmd.comm.relayout import relayout

__all__ = [
    "all_gather",
    "all_to_all",
    "defer",
    "ppermute",
    "psum",
    "psum_scatter",
    "relayout",
    "shift",
    "split",
]
