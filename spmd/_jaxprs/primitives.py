"""What JAX calls its primitives, and ours: one table, which all rooms read."""

from __future__ import annotations

# The collectives by the names of their verbs: what the devices of an axis enter together. JAX picks one by type.
_VERBS = {
    "psum": "psum psum_invariant unreduced_psum",
    "pmax": "pmax unreduced_pmax",
    "pmin": "pmin unreduced_pmin",
    "all_gather": "all_gather all_gather_invariant all_gather_reduced",
    "psum_scatter": "reduce_scatter unreduced_reduce_scatter psum_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "ppermute",
    "pbroadcast": "pbroadcast pbroadcast_dynamic",
    "pgather": "pgather",
    "psend": "psend",
    "precv": "precv",
}
# Of these there are asynchronous ones, which begin with the operands and give the result in the end.
_BEGUN = [name for verb in ("psum", "all_gather", "psum_scatter", "all_to_all", "ppermute", "pbroadcast")
          for name in _VERBS[verb].split()]  # fmt: skip
COLLECTIVES = {name: verb for verb, names in _VERBS.items() for name in names.split()}
COLLECTIVES |= {f"{name}_start": COLLECTIVES[name] for name in _BEGUN}
DONE = frozenset(f"{name}_done" for name in _BEGUN)


def of_verbs(*verbs: str) -> frozenset[str]:
    """The collectives of some verbs.

    >>> sorted(of_verbs("all_to_all"))
    ['all_to_all', 'all_to_all_start']
    """
    return frozenset(name for name, verb in COLLECTIVES.items() if verb in verbs)


def kind_of(name: str) -> str:
    """The kind of a collective, by its name in jaxprs or in what XLA makes of them. Any reduction is a psum.

    >>> kind_of("pmax"), kind_of("all_reduce"), kind_of("reduce_scatter_start")
    ('psum', 'psum', 'psum_scatter')
    """
    verb = COLLECTIVES.get(name, name)
    return "psum" if verb in ("pmax", "pmin", "all_reduce", "reduce_and") else verb
