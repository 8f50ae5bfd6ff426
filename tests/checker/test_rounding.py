"""What rounds, by numbers: a conversion that does not round may be done to each part of a sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd.checker._table import rounds
from tests.sampler import share

DTYPES = ["float32", "bfloat16", "int8", "int16", "int32", "uint8", "complex64"]


def parts(dtype: str) -> list[np.ndarray]:
    """Parts whose sums show what rounding or wrapping around loses; each sum fits into int8 and into its own dtype."""
    values = [[0.5, 0.75, 1.5], [0.5, 0.25, 0.75]] if jnp.issubdtype(dtype, jnp.inexact) else [[300, 5], [-280, 3]]
    if dtype in ("int8", "uint8"):
        values = [[3, 200 if dtype == "uint8" else 100], [5, 100]]
    return [jnp.asarray(np.asarray(v), dtype) if dtype not in ("int8",) else jnp.asarray(v, "int8") for v in values]


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", share(DTYPES))
def test_what_does_not_round_is_linear(source, target):
    if source == "complex64" != target:
        return  # JAX takes the real part, which is linear, in an equation of its own
    convert = lambda x: lax.convert_element_type(x, target)
    eqns = jax.make_jaxpr(convert)(jnp.ones(2, source)).eqns
    one, two = parts(source)
    apart = convert(one) + convert(two)
    together = convert(one + two)
    if not eqns or not rounds(eqns[-1]):
        wide = jnp.float32 if target == "bfloat16" else target
        wraps = jnp.issubdtype(source, jnp.integer) and (one + two).astype("int32").tolist() != [
            int(a) + int(b) for a, b in zip(one, two, strict=True)
        ]
        assert wraps or np.allclose(np.asarray(apart, wide), np.asarray(together, wide)), f"{source} to {target}"
    elif jnp.issubdtype(source, jnp.inexact):
        assert not np.array_equal(apart, together), "it does round"


def test_a_quotient_of_whole_numbers_rounds():
    for dtype, wanted in (("int32", True), ("float32", False), ("complex64", False)):
        [eqn] = jax.make_jaxpr(lambda x: lax.div(x, x))(jnp.ones(2, dtype)).eqns
        assert rounds(eqn) is wanted


def test_a_narrower_integer_loses_bits():
    """What is wide again afterwards is not the sum any more."""
    there_and_back = lambda x: lax.convert_element_type(lax.convert_element_type(x, "int8"), "int32")
    one, two = jnp.int32(300), jnp.int32(0)
    narrow, wider = jax.make_jaxpr(there_and_back)(one).eqns
    assert rounds(narrow) and not rounds(wider)
    assert there_and_back(one) + there_and_back(two) != one + two
