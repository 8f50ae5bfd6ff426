"""What is fused, and what stands in memory."""

import jax
import jax.numpy as jnp

from spmd.inspect._program import ANYWHERE
from spmd.inspect._values import Buffer, Value, chained, ending_bytes, sliced, stacked, through

X = jnp.ones((4, 6))


def equation(fn, *args):
    [eqn] = jax.make_jaxpr(fn)(*args).eqns
    return eqn


def test_elementwise_work_is_a_chain_and_another_name_is_not():
    one, other = Buffer(96.0), Buffer(96.0)
    ins = [Value(buffers=frozenset({one})), Value(buffers=frozenset({other}))]
    assert chained(equation(jnp.add, X, X), ins) == (frozenset({one, other}), True)
    assert chained(equation(lambda x: x.reshape(24), X), ins[:1]) == (frozenset({one}), False)


def test_buffers_are_read_once_and_each_result_is_written():
    buffer = Buffer(96.0)
    chain = Value(buffers=frozenset({buffer}), chain=True)
    assert ending_bytes([(chain, 96.0), (chain, 48.0)]) == 96 + 48 + 96
    assert ending_bytes([(Value(buffers=frozenset({buffer})), 96.0)]) == 0


def test_an_open_buffer_takes_the_result_in():
    product = Buffer(96.0, open=True)
    assert ending_bytes([(Value(buffers=frozenset({product}), chain=True), 96.0)]) == 0


def test_a_result_goes_into_the_smallest_buffer_that_has_room():
    """Whatever the order of a set, which goes by addresses."""
    found = set()
    for _ in range(50):
        buffers = frozenset(Buffer(nbytes, open=True) for nbytes in (64.0, 96.0, 200.0))
        found.add(ending_bytes([(Value(buffers=buffers, chain=True), 96.0)]))
    assert found == {64.0 + 200.0}


def test_elementwise_results_lie_with_their_operands():
    lies, scalar = Value((("dp",), ()), "x"), Value(ANYWHERE)
    [out] = through(equation(lambda x: jnp.exp(x), X), [lies])
    assert out.place == (("dp",), ())
    [out] = through(equation(lambda x: x * jnp.float32(2), X), [lies, scalar])
    assert out.place == (("dp",), ())
    [out] = through(equation(lambda x: x.T, X), [lies])
    assert out.place == ((), ("dp",))
    [out] = through(equation(jnp.add, X, X), [lies, Value(((), ("tp",)))])
    assert out.place is None


def test_a_scan_takes_slices_and_stacks_them():
    value = Value(((), ("dp",)), "w")
    assert sliced(value) == Value((("dp",),), "w", 1) and stacked(sliced(value)).place == ((), ("dp",))
    assert sliced(Value((("dp",), ()), "w")).place is None  # the loop's own dimension is divided
