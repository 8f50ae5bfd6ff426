"""Programs in the spirit of JAX's page on `shard_map`, as raw code: no finding, and the numbers of one device.

Each section of that page is here: maps and their specs, the collectives, products of matrices with and without
overlap, and the ways to divide a network. The programs are written anew.
"""

from __future__ import annotations

import functools
import pathlib
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from tests.conftest import case_count
from tests.sampler import first_seed

RING, GRID = {"i": 8}, {"x": 4, "y": 2}
PROGRAMS = {}
DRAWN = np.random.default_rng(0).standard_normal


def floats(*shape):
    return jnp.asarray(DRAWN(shape) / 4, jnp.float32)


def page(plain, *shapes, mesh=RING, ins: Any = P("i"), outs: Any = P("i")):
    """A body of a map, and what it computes in plain JAX on whole arrays."""

    def keep(body):
        PROGRAMS[body.__name__] = body, plain, shapes, mesh, ins, outs
        return body

    return keep


def up(count):
    return [(i, (i + 1) % count) for i in range(count)]


def down(count):
    return [(i, (i - 1) % count) for i in range(count)]


# --- maps and their specs ----------------------------------------------------------------------------------------


@page(lambda x: jnp.sin(x) * 2, (16, 3))
def elementwise(x):
    return jnp.sin(x) * 2


@page(lambda a, b: a @ b, (8, 16), (16, 4), mesh=GRID, ins=(P("x", "y"), P("y", None)), outs=P("x", None))
def product_of_blocks(a, b):
    return lax.psum(a @ b, "y")


@page(lambda x: jnp.tile(x, (4, 2)), (3, 5), mesh=GRID, ins=P(), outs=P("x", "y"))
def copies_put_side_by_side(x):
    return x


@page(lambda x: x.reshape(4, 2, 2, 2).sum((0, 2)), (8, 4), mesh=GRID, ins=P("x", "y"), outs=P())
def blocks_added_up(x):
    return lax.psum(x, ("x", "y"))


# --- the collectives ---------------------------------------------------------------------------------------------


@page(lambda x: x.reshape(8, 2).sum(0), (16,), outs=P())
def everybody_gets_the_sum(x):
    return lax.psum(x, "i")


@page(lambda x: x.reshape(4, 2, 4).sum(0), (8, 4), mesh=GRID, ins=P("x", "y"), outs=P(None, "y"))
def sum_along_rows(x):
    return lax.psum(x, "x")


@page(lambda x: jnp.tile(x, 8), (16,))
def everybody_gets_all(x):
    return lax.all_gather(x, "i", tiled=True)


@page(lambda x: jnp.tile(x.reshape(8, 2), (8, 1)), (16,))
def everybody_gets_a_stack(x):
    return lax.all_gather(x, "i", tiled=False)


@page(lambda x: x.reshape(8, 16).sum(0), (128,))
def everybody_gets_a_part_of_the_sum(x):
    return lax.psum_scatter(x, "i", tiled=True)


@page(lambda x: jnp.roll(x, 2, 0), (16, 3))
def blocks_go_round(x):
    return lax.ppermute(x, "i", up(8))


@page(lambda x: x.reshape(8, 8).T.reshape(-1), (64,))
def blocks_are_exchanged(x):
    return lax.all_to_all(x, "i", 0, 0, tiled=True)


@page(lambda x: x.reshape(8, 2).max(0), (16,), outs=P())
def everybody_gets_the_maximum(x):
    return lax.pmax(x, "i")


# --- products of matrices ----------------------------------------------------------------------------------------

ROWS = (P("i", None), P("i", None))
SHARED = (P(None, "i"), P("i", None))


@page(lambda a, b: a @ b, (16, 24), (24, 5), ins=ROWS)
def gathered_then_multiplied(a, b):
    return a @ lax.all_gather(b, "i", tiled=True)


def columns(a, step, size):
    return lax.dynamic_slice_in_dim(a, step * size, size, 1)


@page(lambda a, b: a @ b, (16, 24), (24, 5), ins=ROWS)
def multiplied_as_blocks_arrive(a, b):
    count, me = lax.axis_size("i"), lax.axis_index("i")
    total = columns(a, me, b.shape[0]) @ b
    for step in range(1, count):
        b = lax.ppermute(b, "i", up(count))
        total += columns(a, (me - step) % count, b.shape[0]) @ b
    return total


@page(lambda a, b: a @ b, (16, 24), (24, 5), ins=ROWS)
def multiplied_as_blocks_arrive_in_a_loop(a, b):
    count, me = lax.axis_size("i"), lax.axis_index("i")

    def turn(step, carry):
        total, b = carry
        total += columns(a, (me - step) % count, b.shape[0]) @ b
        return total, lax.ppermute(b, "i", up(count))

    start = lax.pcast(jnp.zeros((a.shape[0], b.shape[1])), "i", to="varying")
    return lax.fori_loop(0, count, turn, (start, b))[0]


@page(lambda a, b: a @ b, (16, 32), (32, 5), ins=ROWS)
def multiplied_as_halves_arrive_from_both_sides(a, b):
    count, me, half = lax.axis_size("i"), lax.axis_index("i"), b.shape[0] // 2
    low, high = b[:half], b[half:]
    total = columns(a, 2 * me, half) @ low + columns(a, 2 * me + 1, half) @ high
    for step in range(1, count):
        low, high = lax.ppermute(low, "i", up(count)), lax.ppermute(high, "i", down(count))
        total += columns(a, 2 * ((me - step) % count), half) @ low
        total += columns(a, 2 * ((me + step) % count) + 1, half) @ high
    return total


@page(lambda a, b: a @ b, (16, 24), (24, 5), ins=SHARED, outs=P())
def multiplied_then_summed(a, b):
    return lax.psum(a @ b, "i")


@page(lambda a, b: a @ b, (16, 24), (24, 5), ins=SHARED)
def multiplied_then_scattered(a, b):
    return lax.psum_scatter(a @ b, "i", tiled=True)


@page(lambda a, b: a @ b, (16, 24), (24, 5), ins=SHARED)
def sums_that_go_round(a, b):
    count, me, size = lax.axis_size("i"), lax.axis_index("i"), a.shape[0] // lax.axis_size("i")
    part = lambda step: lax.dynamic_slice_in_dim(a, (me - step) % count * size, size) @ b
    total = part(1)
    for step in range(2, count + 1):
        total = lax.ppermute(total, "i", up(count)) + part(step)
    return total


# --- networks ----------------------------------------------------------------------------------------------------

WIDTHS = ((16, 8), (8, 8), (8, 8), (16, 8))  # the inputs, two layers, the targets


def network(x, *layers):
    return functools.reduce(lambda x, w: jnp.tanh(x @ w), layers, x)


def mean_square(x, first, second, targets):
    return jnp.mean(jnp.sum((network(x, first, second) - targets) ** 2, -1))


@page(mean_square, *WIDTHS, ins=(P("i"), P(), P(), P("i")), outs=P())
def divided_data(x, first, second, targets):
    return lax.pmean(mean_square(x, first, second, targets), "i")


@page(mean_square, *WIDTHS, ins=P("i"), outs=P())
def divided_data_and_weights(x, first, second, targets):
    @functools.partial(jax.checkpoint, policy=lambda prim, *_, **__: prim.name != "all_gather")
    def layer(x, w):
        return jnp.tanh(x @ lax.all_gather(w, "i", tiled=True))

    y = layer(layer(x, first), second)
    return lax.pmean(jnp.mean(jnp.sum((y - targets) ** 2, -1)), "i")


@page(mean_square, *WIDTHS, ins=(P(None, "i"), P("i"), P("i"), P(None, "i")), outs=P())
def divided_features(x, first, second, targets):
    for w in (first, second):
        x = jnp.tanh(lax.psum_scatter(x @ w, "i", scatter_dimension=1, tiled=True))
    return lax.psum(jnp.mean(jnp.sum((x - targets) ** 2, -1)), "i")


SPREAD = (P("x", "y"), P(("y", "x")), P(("y", "x")), P("x", "y"))


@page(mean_square, *WIDTHS, mesh=GRID, ins=SPREAD, outs=P())
def divided_data_weights_and_features(x, first, second, targets):
    for w in (first, second):
        w = lax.all_gather(w, "x", tiled=True)
        x = jnp.tanh(lax.psum_scatter(x @ w, "y", scatter_dimension=1, tiled=True))
    return lax.pmean(lax.psum(jnp.mean(jnp.sum((x - targets) ** 2, -1)), "y"), "x")


def in_turn(x, layers):
    return functools.reduce(lambda x, w: jnp.tanh(x @ w), layers, x)


@page(in_turn, (12, 6), (8, 6, 6), ins=(P(), P("i")), outs=P())
def one_layer_on_each_device(x, w):
    count, me, parts = lax.axis_size("i"), lax.axis_index("i"), x.reshape(4, -1, x.shape[-1])
    now = lax.pcast(jnp.zeros_like(parts[0]), "i", to="varying")
    done = []
    for tick in range(count + 3):
        now = jnp.where(me == 0, parts[min(tick, 3)], now)
        now = jnp.tanh(now @ w[0])
        done.append(now)
        now = lax.ppermute(now, "i", up(count))
    last = jnp.concatenate(done[count - 1 :])
    return lax.psum(jnp.where(me == count - 1, last, 0), "i")


LOSSES = [name for name, (_, plain, *_) in PROGRAMS.items() if plain is mean_square]
SAMPLE = random.Random(first_seed()).sample(list(PROGRAMS), min(case_count(), len(PROGRAMS)))


def made(name):
    body, plain, shapes, sizes, ins, outs = PROGRAMS[name]
    mapped = jax.shard_map(body, mesh=spmd.make_mesh(**sizes), in_specs=ins, out_specs=outs)
    return mapped, plain, [floats(*shape) for shape in shapes]


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_accepted(name):
    mapped, _, args = made(name)
    assert not spmd.check(mapped, *args)


@pytest.mark.parametrize("name", LOSSES)
def test_its_gradient_is_accepted(name):
    mapped, _, args = made(name)
    assert not spmd.check(jax.grad(mapped, argnums=(1, 2)), *args)


@pytest.mark.parametrize("name", SAMPLE)
def test_it_is_right(name):
    """Values, and gradients of the losses; all programs with SPMD_TEST_CASES=100."""
    mapped, plain, args = made(name)
    pairs = [(jax.jit(mapped)(*args), plain(*args))]
    if name in LOSSES:
        both = (jax.grad(fn, argnums=(1, 2)) for fn in (mapped, plain))
        pairs += zip(*(jax.jit(fn)(*args) for fn in both), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_page_says_how_many() -> None:
    page = pathlib.Path("docs/pages/checker.md").read_text()
    assert f"{len(PROGRAMS)} programs in the spirit of" in page
