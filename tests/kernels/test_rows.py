"""Rows of a divided dimension, under `jax.vmap` and in loops inside a kernel: a number of a row is that row's own."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.errors import ReplicationError, SpmdError
from spmd.inspect import collectives
from tests.sampler import Sampler, mixed, seeds, share

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32) / 4


def total(row):
    return spmd.reduce(row, "d/tp -> scalar")


# How a carry starts, what a step makes of it, and what repeats the step.
STARTS = {"copies": lambda row: spmd.zeros("{R:dp}"), "a sum": total, "made": lambda row: jnp.zeros_like(total(row))}
STEPS = {
    "a sum": lambda row: lambda c: c / 2 + total(row),
    "a sum of what is carried": lambda row: lambda c: jnp.tanh(c) + total(row * c),
    "a mean": lambda row: lambda c: c + spmd.reduce(row + c, "d/tp -> scalar", "mean"),
    "a maximum": lambda row: lambda c: jnp.sin(c) + spmd.reduce(row, "d/tp -> scalar", "max"),
}
LOOPS = {
    "scan": lambda step, c: lax.scan(lambda c, _: (step(c), None), c, None, length=3)[0],
    "fori": lambda step, c: lax.fori_loop(0, 3, lambda i, c: step(c), c),
    "remat": lambda step, c: lax.scan(jax.checkpoint(lambda c, _: (step(c), None)), c, None, length=3)[0],
    "written out": lambda step, c: step(step(step(c))),
}
ROWS = {"vmap": jax.vmap, "map": lambda fn: lambda x: lax.map(fn, x)}


def over_rows(rows, loop, start, step):
    return lambda x: ROWS[rows](lambda row: LOOPS[loop](STEPS[step](row), STARTS[start](row)))(x)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("seed", seeds(24))
def test_a_loop_for_each_row(mesh, seed, rows):
    """In `vmap` and in `map`; values, gradients, and nothing is sent over the axis that divides the rows."""
    sampler = Sampler(seed)
    loop, start, step = (sampler.choice([*known]) for known in (LOOPS, STARTS, STEPS))
    kernel = spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)(over_rows(rows, loop, start, step))
    both = lambda fn: jax.jit(jax.value_and_grad(lambda x: (fn(x) ** 2 * jnp.arange(1.0, 5.0)).sum()))(X)
    for one, wanted in zip(both(kernel), both(kernel.reference), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(kernel(X), kernel.reference(X), rtol=1e-4, atol=1e-5)
    assert spmd.check(kernel, X).verdict.kind in ("proved", "tested")
    sent = collectives(kernel, X)
    assert all(one.axes == ("tp",) for one in sent), str(sent)


W = np.random.default_rng(1).normal(size=8).astype(np.float32)

# A gradient that is taken in the body: its pattern, and of a function of a row and weights what the body computes.
INSIDE = {
    "by rows": (
        "b/dp d/tp, d/tp -> b/dp d/tp",
        lambda fn, rows: lambda x, w: spmd.grad(lambda x: (rows(fn, x, w) ** 2).sum(), loss="{U:dp}")(x),
    ),
    "by weights": (
        "b/dp d/tp, d/tp -> d/tp",
        lambda fn, rows: lambda x, w: spmd.grad(lambda w: spmd.reduce(rows(fn, x, w) ** 2, "b/dp -> scalar"))(w),
    ),
    "by weights, linear": (
        "b/dp d/tp, d/tp -> d/tp",
        lambda fn, rows: lambda x, w: spmd.grad(lambda w: spmd.reduce(rows(fn, x, w), "b/dp -> scalar"))(w),
    ),
    "parts by weights": (
        "b/dp d/tp, d/tp -> d/tp",
        lambda fn, rows: lambda x, w: spmd.grad(lambda w: rows(fn, x, w).sum(), loss="{U:dp}")(w),
    ),
    "of each row": (
        "b/dp d/tp, d/tp -> b/dp d/tp",
        lambda fn, rows: (
            lambda x, w: rows(
                lambda row, w: spmd.grad(lambda w: fn(row, w) ** 2, loss="{U:dp}")(w),
                x,
                spmd.defer(w, "d/tp -> d/tp {R:dp}"),
            )
        ),
    ),
}


@pytest.mark.parametrize(("inside", "start"), share(mixed(INSIDE, STARTS)))
@pytest.mark.parametrize("seed", seeds(6))
def test_a_gradient_of_loops_that_is_taken_in_the_body(mesh, seed, inside, start):
    """JAX leaves out what a gradient does not need, and with it notes on rows. They stay rows nonetheless."""
    sampler = Sampler(seed)
    loop, step, rows = (sampler.choice([*known]) for known in (LOOPS, STEPS, ROWS))
    pattern, make = INSIDE[inside]
    of_row = lambda row, w: LOOPS[loop](STEPS[step](row * w), STARTS[start](row * w))
    every = lambda fn, x, w: ROWS[rows](lambda row: fn(row, w))(x)
    kernel = spmd.kernel(pattern, mesh=mesh)(make(of_row, every))
    try:
        found = kernel(X, W)
    except ReplicationError as error:
        assert rows == "map" and 'spmd.zeros("{R:dp}")' in str(error), "of lax.map JAX knows no rows"
        return
    np.testing.assert_allclose(found, kernel.reference(X, W), rtol=1e-3, atol=1e-4)
    assert spmd.check(kernel, X, W).verdict.kind in ("proved", "tested")


def test_copies_under_vmap(mesh):
    """A whole dimension of a gathered copy: each device has all rows, and they leave as the string says."""
    gathered = lambda x: jax.vmap(total)(spmd.all_gather(x, "b/dp d/tp -> b d/tp"))
    whole = spmd.kernel("b/dp d/tp -> b", mesh=mesh)(gathered)
    again = spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)(lambda x: spmd.split(gathered(x), "b -> b/dp"))
    mean = spmd.kernel("b/dp d/tp -> scalar", mesh=mesh)(lambda x: gathered(x).mean())
    weights = jnp.arange(1.0, 5.0)
    for kernel in (whole, again):
        np.testing.assert_allclose(kernel(X), X.sum(1), rtol=1e-5, atol=1e-6)
        gradient = jax.grad(lambda x, kernel=kernel: (kernel(x) * weights).sum())(X)
        np.testing.assert_allclose(gradient, np.broadcast_to(np.arange(1.0, 5.0)[:, None], X.shape), rtol=1e-5)
    np.testing.assert_allclose(mean(X), X.sum(1).mean(), rtol=1e-5, atol=1e-6)


def test_a_scalar_of_copies_is_closed_beside_rows(mesh):
    """What is left open for the rows is closed where it leaves the kernel as a scalar."""

    @spmd.kernel("b/dp d/tp -> b/dp, scalar", mesh=mesh)
    def both(x):
        rows = lax.map(lambda row: jnp.tanh(total(row)), x)
        copies = spmd.all_gather(x, "b/dp d/tp -> b d/tp")
        return rows, spmd.reduce(copies, "b d/tp -> scalar", "max")

    rows, largest = both(X)
    np.testing.assert_allclose(rows, np.tanh(X.sum(1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(largest, X.max())


def test_a_kernel_in_a_kernel_has_its_rows(mesh):
    inner = spmd.kernel("d/tp -> scalar", mesh=mesh)(lambda row: jnp.tanh(total(row)))
    outer = spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)(lambda x: lax.map(inner, x))
    np.testing.assert_allclose(outer(X), np.tanh(X.sum(1)), rtol=1e-5, atol=1e-6)


def test_no_loop_of_rows_ends_in_an_error_of_jax(mesh):
    """A carry of another type is refused with the line that starts it; `spmd_axis_name` is no help around a loop."""
    starts = {**STARTS, "a number": lambda row: jnp.float32(0), "zeros": lambda row: spmd.zeros("scalar")}
    told = set()
    for start, step, name in itertools.product(starts, ("a sum", "a sum of what is carried"), (None, "dp")):
        body = lambda row, start=start, step=step: LOOPS["scan"](STEPS[step](row), starts[start](row))
        fn = lambda x, body=body, name=name: jax.vmap(body, spmd_axis_name=name)(x)
        kernel = spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)(fn)
        slope = lambda run: jax.jit(jax.grad(lambda x: run(x).sum()))
        try:
            np.testing.assert_allclose(kernel(X), kernel.reference(X), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(slope(kernel)(X), slope(kernel.reference)(X), rtol=1e-4, atol=1e-4)
        except SpmdError as error:
            assert 'spmd.zeros("{R:dp}")' in str(error) or "without spmd_axis_name" in str(error)
            told.add((start, name))
    assert {("a number", None), ("zeros", None), ("a sum", "dp")} <= told and ("a sum", None) not in told


def test_each_row_has_a_loss_of_its_own(mesh):
    """Under vmap the message names what makes it so, and it is right."""
    slope = lambda row, w: spmd.grad(lambda w: total(row * w) ** 2)(w)
    kernel = spmd.kernel("b/dp d/tp, d/tp -> b/dp d/tp", mesh=mesh)
    with pytest.raises(ReplicationError, match=r'advice: jax.vmap\(fn, spmd_axis_name="dp"\), if each row has a loss'):
        kernel(jax.vmap(slope, (0, None)))(X, X[0])
    named = kernel(jax.vmap(slope, (0, None), spmd_axis_name="dp"))
    wanted = jax.vmap(jax.grad(lambda w, row: (row * w).sum() ** 2), (None, 0))(X[0], X)
    np.testing.assert_allclose(named(X, X[0]), wanted, rtol=1e-4, atol=1e-5)
