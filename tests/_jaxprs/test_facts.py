"""Names that know what they name keep what they know in every jaxpr."""

import jax
import jax.numpy as jnp
import pytest

from spmd import _compat
from spmd._jaxprs.facts import CallName, KernelName, Leaf, one_line
from spmd._jaxprs.walker import equations
from spmd.language import Layout

CALL = CallName('psum(x, "b {U:tp} -> b")', "psum", "b {U:tp} -> b")


def scoped(x):
    with jax.named_scope(CALL):
        return jnp.sin(x)


@pytest.mark.parametrize(
    "program",
    [
        scoped,
        jax.jit(scoped),
        jax.vmap(scoped),
        jax.grad(lambda x: scoped(x).sum()),
        jax.checkpoint(scoped),
        lambda x: jax.lax.scan(lambda c, _: (scoped(c), None), x, length=2)[0],
    ],
    ids=["plain", "jit", "vmap", "grad", "checkpoint", "scan"],
)
def test_the_scope_of_a_call_is_found_again(program):
    jaxpr = jax.make_jaxpr(program)(jnp.ones(3))
    names = [name for eqn in equations(jaxpr.jaxpr) for _, name in _compat.name_stack(eqn)]
    assert any(name is CALL for name in names)


def test_a_call_on_several_lines_is_one_line_that_knows_as_much():
    call = one_line(CallName('einsum(x, w, "b d,\n  d f -> b f")', "einsum", "b d,\n  d f -> b f"))
    assert call == 'einsum(x, w, "b d, d f -> b f")'
    assert (call.verb, call.pattern) == ("einsum", "b d, d f -> b f")
    assert type(one_line("a\nb")) is str


def test_a_kernel_has_a_name_that_a_profile_can_show():
    leaf = Leaf("x", Layout("b/dp"))
    assert KernelName("mlp", (leaf,)).arguments == (leaf,)
    assert KernelName("<lambda>") == "kernel" and KernelName("<lambda>").arguments == ()
