"""Rows of a divided table, with zeros for those of other devices: what completes them, and what does not need it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd

TABLE, IDS, OWN = np.ones((8, 4), np.float32), np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32)


def counted(table: Any, ids: Any) -> Any:
    return ids - lax.axis_index("tp") * table.shape[0]


def masked(table: Any, ids: Any) -> Any:
    here = counted(table, ids)
    mine = (here >= 0) & (here < table.shape[0])
    return jnp.where(mine[:, None], table[jnp.clip(here, 0, table.shape[0] - 1)], 0.0)


def own_block(x: Any) -> Any:
    size = x.shape[0] // lax.axis_size("tp")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("tp") * size, size)


def local_gradient(table: Any, ids: Any) -> Any:
    return jax.grad(lambda t: jnp.sum(masked(t, ids) ** 2))(table)


def written_back(table: Any, ids: Any) -> Any:
    here = counted(table, ids)
    return table.at[jnp.where(here < 0, table.shape[0], here)].add(masked(table, ids), mode="drop")


def by_one_hot(table: Any, ids: Any) -> Any:
    return jax.nn.one_hot(counted(table, ids), table.shape[0]).T @ masked(table, ids)


RIGHT = {
    "a sum": ("s d", lambda t, i, own: lax.psum(masked(t, i), "tp")),
    "a sum in blocks": ("s/tp d", lambda t, i, own: lax.psum_scatter(masked(t, i), "tp", tiled=True)),
    "the only ones above zero": ("s d", lambda t, i, own: lax.pmax(masked(jnp.exp(t), i), "tp")),
    "gathered": ("s d", lambda t, i, own: lax.pmax(lax.all_gather(masked(t, i), "tp").sum(0), "tp")),
    "terms by declaration": ("s d", lambda t, i, own: spmd.psum(masked(t, i), "s d {U:tp} -> s d")),
    "a function of all": ("s d", lambda t, i, own: lax.psum(jnp.tanh(masked(t, i)), "tp")),
    "ids of each device's own rows": ("v/tp d", lambda t, i, own: masked(t, own)),
    "own ids cut out before": ("v/tp d", lambda t, i, own: masked(t, own_block(i))),
    "known numbers": ("v/tp d", lambda t, i, own: own_block(masked(t, jnp.arange(8)))),
    "a gradient": ("v/tp d", lambda t, i, own: local_gradient(t, i)),
    "back into the table": ("v/tp d", lambda t, i, own: written_back(t, i)),
    "back by a product": ("v/tp d", lambda t, i, own: by_one_hot(t, i)),
}
WRONG = {
    "rolled": ("s d", lambda t, i, own: lax.psum(spmd.roll(masked(t, i), "[s] d", 1), "tp")),
    "its own block": ("s/tp d", lambda t, i, own: own_block(masked(t, i))),
    "a function of its own block": ("s/tp d", lambda t, i, own: jnp.tanh(own_block(masked(t, i))) + 1.0),
    "blocks of another dimension": ("s d/tp", lambda t, i, own: own_block(masked(t, i).T).T),
}


def found(result: str, body: Any) -> list[str]:
    kernel = spmd.kernel(f"v/tp d, s, v/tp -> {result}", mesh=spmd.make_mesh(tp=4), check="off")(body)
    return [one.kind for one in spmd.check(kernel, TABLE, IDS, OWN)]


@pytest.mark.parametrize("name", RIGHT)
def test_what_completes_rows_or_needs_no_others_is_accepted(name: str) -> None:
    assert found(*RIGHT[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_rows_of_other_devices_that_are_missing_are_found(name: str) -> None:
    assert found(*WRONG[name]) == ["pending"]


def test_the_message_names_the_take() -> None:
    kernel = spmd.kernel("v/tp d, s -> s/tp d", mesh=spmd.make_mesh(tp=4), check="off")(
        lambda t, i: own_block(masked(t, i))
    )
    [one] = spmd.check(kernel, TABLE, IDS)
    assert "a take of rows, with zeros for those of other devices, was done on each device's own piece along tp" in str(
        one
    )
    assert "lax.psum or lax.psum_scatter over tp, which adds up what the devices have" in str(one)


A = np.arange(32.0, dtype=np.float32).reshape(4, 8)

# What a device leaves out by its number is a term of a sum; the elements of a block left out by their position are not.
TERMS = {
    "where": (1, lambda x: jnp.where(spmd.axis_index("tp") == 0, x, 0)),
    "a product": (1, lambda x: x * (lax.axis_index("tp") == 0).astype(x.dtype)),
    "in another type": (1, lambda x: jnp.where(lax.axis_index("tp") > 0, 0.0, x).astype(jnp.float32)),
    "two devices": (2, lambda x: jnp.where(lax.axis_index("tp") < 2, x, jnp.zeros_like(x))),
}
BLOCKS = {
    "all of them": lambda x: 2 * x,
    "by position": lambda x: jnp.where(spmd.iota("k/tp", k=8) < 3, x, 0),
    "with ones": lambda x: jnp.where(lax.axis_index("tp") == 0, x, 1),
}


def summed_over_tp(term: Any) -> Any:
    return spmd.kernel("m/dp k/tp -> m/dp l", mesh=spmd.make_mesh(dp=2, tp=4), l=2)(
        lambda x: spmd.psum(term(x), "m/dp l {U:tp} -> m/dp l")
    )


@pytest.mark.parametrize("name", TERMS)
def test_a_block_that_one_device_gives_to_all_is_a_term(name: str) -> None:
    devices, term = TERMS[name]
    kernel = summed_over_tp(term)
    assert not spmd.check(kernel, A)
    np.testing.assert_array_equal(kernel(A), A.reshape(4, 4, 2)[:, :devices].sum(1))
    [sent] = spmd.explain(kernel, A, compiled=False).collectives
    assert (sent.kind, sent.axes) == ("psum", ("tp",))


@pytest.mark.parametrize("name", BLOCKS)
def test_other_blocks_are_no_terms(name: str) -> None:
    [one] = spmd.check(summed_over_tp(BLOCKS[name]), A)
    assert one.rule == '"{U:tp}" says that each device along tp holds one term of a sum, but each holds a block.'
