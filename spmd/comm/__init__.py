"""Communication: verbs, of which each is one kind of collective; `relayout` for all other changes; and its `plan`."""

from spmd.comm.collectives import all_gather, all_to_all, defer, psum, psum_scatter, split
from spmd.comm.permute import ppermute, shift
from spmd.comm.plans import plan
from spmd.comm.resharding import relayout

__all__ = [
    "all_gather",
    "all_to_all",
    "defer",
    "plan",
    "ppermute",
    "psum",
    "psum_scatter",
    "relayout",
    "shift",
    "split",
]
