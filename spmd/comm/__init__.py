"""Communication: verbs, of which each is one kind of collective; `relayout` for all other changes; and its `plan`."""

from spmd.comm.collectives import all_gather, all_to_all, defer, ppermute, psum, psum_scatter, shift, split
from spmd.comm.plans import plan, relayout

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
