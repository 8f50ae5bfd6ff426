"""Which primitives round: what they do to the parts of a sum is not what they do to the sum."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import numpy as jnp


def rounds(eqn: Any) -> bool:
    """Whether a conversion or a quotient rounds to whole numbers, or drops some of their bits."""
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if eqn.primitive.name == "div":
        return not jnp.issubdtype(target, np.inexact)
    if jnp.issubdtype(source, np.integer) and jnp.issubdtype(target, np.integer):
        return jnp.iinfo(target).bits < jnp.iinfo(source).bits
    return not jnp.issubdtype(target, np.inexact)
