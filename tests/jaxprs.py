"""What tests read off a traced program."""

from collections.abc import Iterator
from typing import Any

import jax


def is_jaxpr(x: Any) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, each before those of the jaxprs that it holds."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for held in filter(is_jaxpr, jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)):
            yield from equations(held)


def names_of(jaxpr: Any) -> list[str]:
    """The primitives of all equations."""
    return [eqn.primitive.name for eqn in equations(jaxpr)]
