"""The user's line: of equations in loops, in JAX's own functions and in gradients, and of errors."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from spmd._jaxprs.lines import is_transposed, line_of, short_file, short_line
from spmd._jaxprs.walker import Domain, walk

X = jnp.ones((4, 4))


def line(function, text: str) -> int:
    """The line of a function of this file on which a text stands."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, one in enumerate(lines) if text in one)


class Lines(Domain):
    """The line of each equation that is walked, by its primitive."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def constant(self, var, value):
        return None

    def join(self, one, other):
        return None

    def step(self, eqn, operands):
        self.found.setdefault(eqn.primitive.name, set()).add(line_of(eqn, self.callers))
        return [None] * len(eqn.outvars)


def lines_of(function, *args):
    jaxpr = jax.make_jaxpr(function)(*args)
    found = Lines()
    walk(jaxpr, [None] * len(args), found)
    return found.found


def program(x):
    y = jnp.sin(x)  # one
    z, _ = lax.scan(lambda c, r: (c + jnp.cos(r), None), y, x[None])  # two
    chosen = jnp.where(z > 0, z, 0.0)  # three
    return jax.jit(lambda v: jnp.tanh(v))(chosen)  # four


@pytest.mark.parametrize(
    ("primitive", "text"), [("sin", "# one"), ("cos", "# two"), ("select_n", "# three"), ("tanh", "# four")]
)
def test_each_equation_has_the_users_line(primitive, text):
    program(X)  # JAX has its own functions in a cache by now, with the lines of that call
    [found] = lines_of(program, X)[primitive]
    file, _, rest = found.partition(":")
    assert file.endswith("test_lines.py") and rest.partition(" ")[0] == str(line(program, text))
    assert rest.endswith(")") and "(" in rest, "and the name of the function"


def test_the_backward_pass_is_known():
    def loss(x):
        return jnp.sin(x).sum()

    forward = jax.make_jaxpr(loss)(X).eqns
    backward = jax.make_jaxpr(lambda x: jax.vjp(loss, x)[1](1.0))(X).eqns
    assert not any(map(is_transposed, forward))
    assert any(map(is_transposed, backward)) and not is_transposed(
        next(e for e in backward if e.primitive.name == "cos")
    )
    assert is_transposed(forward[0], [next(e for e in backward if is_transposed(e))]), "what it holds belongs to it"


def test_a_line_of_a_package_names_the_users_line_that_called_it():
    def clipped(tree):
        return optax.tree.norm(tree)  # here

    found = {text for lines in lines_of(clipped, {"w": X}).values() for text in lines}
    called = f", called at {short_file(__file__)}:{line(clipped, '# here')} ("
    assert found and all("optax" in text.partition(" (")[0] and called in text for text in found), found
    assert {text.number for text in found} == {line(clipped, "# here")}
    assert {short_line(text) for text in found} == {f"test_lines.py:{line(clipped, '# here')}"}
    assert all("called at" not in text for lines in lines_of(program, X).values() for text in lines)
