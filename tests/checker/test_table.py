"""The maps of the table, taken at their word: along a label that passes, blocks of operands give blocks of the result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd._jaxprs.walker import equations
from spmd.checker._table import TABLE, groups
from tests.sampler import share

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(4, 6)).astype(np.float32) for _ in range(2))
Z = RNG.normal(size=(4, 6, 2)).astype(np.float32)
IMAGE, KERNEL = RNG.normal(size=(2, 4, 6)).astype(np.float32), RNG.normal(size=(2, 4, 3)).astype(np.float32)
SQUARE = (RNG.normal(size=(2, 4, 4)) + 4 * np.eye(4)).astype(np.float32)
TRIANGLE = np.tril(SQUARE).astype(np.float32)

# An operation for each kind of map, as a function of its blocks; the last equation is the one that is looked at.
OPERATIONS = {
    "exp": (lax.exp, X),
    "mul": (lax.mul, X, Y),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), Z),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), X[:, None]),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (x.shape[0], 3, x.shape[1]), (0, 2)), X),
    "rev": (lambda x: lax.rev(x, (0,)), X),
    "reduce_sum": (lambda x: lax.reduce_sum(x, (1,)), Z),
    "reduce_max": (lambda x: lax.reduce_max(x, (0, 1)), Z),
    "reduce_prod": (lambda x: lax.reduce_prod(x, (1,)), X),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), X),
    "cumsum": (lambda x: lax.cumsum(x, 1), X),
    "cummax": (lambda x: lax.cummax(x, 0), X),
    "sort": (lambda x: lax.sort(x, dimension=1), X),
    "dot_general": (lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))), X, Y.T.copy()),
    "batched dot_general": (lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))), Z, Z.transpose(0, 2, 1)),
    "conv_general_dilated": (lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME"), IMAGE, KERNEL),
    "reduce_window_sum": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"), X),
    "fft": (lambda x: lax.fft(x, "FFT", (x.shape[1],)), X.astype("complex64")),
    "triangular_solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), TRIANGLE, SQUARE),
}
REDUCERS = {"sum": sum, "max": lambda both: np.maximum(*both), "product": lambda both: both[0] * both[1]}


def looked_at(name):
    """The operation, its map, and its last equation."""
    fn, *args = OPERATIONS[name]
    eqn = list(equations(jax.make_jaxpr(fn)(*args)))[-1]
    assert eqn.primitive.name == name.split()[-1]
    return fn, args, TABLE[eqn.primitive.name].map(eqn), eqn


def in_blocks(fn, args, labels_of, label):
    """The results for each half of the dimensions with this label."""
    halves = []
    for half in range(2):
        cut = []
        for x, labels in zip(args, labels_of, strict=True):
            for d, one in enumerate(labels):
                x = np.split(x, 2, d)[half] if one == label else x
            cut.append(x)
        halves.append(np.asarray(fn(*cut)))
    return halves


@pytest.mark.parametrize("name", share(OPERATIONS))
def test_each_label_is_what_the_map_says(name):
    fn, args, made, _ = looked_at(name)
    whole = np.asarray(fn(*args))
    labels = {label for operand in made.operands for label in operand if label is not None}
    assert labels, "something corresponds"
    for label in labels:
        if any(
            args[i].shape[d] % 2 for i, one in enumerate(made.operands) for d, its in enumerate(one) if its == label
        ):
            continue
        if label in made.whole or made.reduced.get(label) == "position":
            continue  # the next test
        halves = in_blocks(fn, args, made.operands, label)
        if label in made.reduced:
            assert label not in made.result
            together = REDUCERS[made.reduced[label]](halves)
        else:
            together = np.concatenate(halves, list(made.result).index(label))
        np.testing.assert_allclose(together, whole, rtol=1e-4, atol=1e-5, err_msg=f"{name}, label {label}")


@pytest.mark.parametrize("name", ["rev", "cumsum", "cummax", "sort", "argmax", "fft", "reduce_window_sum"])
def test_what_is_needed_whole_is_another_thing_in_blocks(name):
    """Meta-test of the one above: these labels would fail there."""
    fn, args, made, _ = looked_at(name)
    [label] = {**made.whole, **made.reduced}
    halves = in_blocks(fn, args, made.operands, label)
    whole = np.asarray(fn(*args))
    together = halves[0] if name == "argmax" else np.concatenate(halves, list(made.result).index(label))
    assert not np.allclose(together, whole)


@pytest.mark.parametrize("name", OPERATIONS)
def test_maps_fit_the_shapes(name):
    _, _, made, eqn = looked_at(name)
    assert [len(labels) for labels in made.operands] == [v.aval.ndim for v in eqn.invars]
    assert len(made.result) <= eqn.outvars[0].aval.ndim
    assert set(TABLE[eqn.primitive.name].params) <= set(eqn.params), "what is remembered depends on these"


def reshapes():
    shapes = [(24,), (4, 6), (2, 3, 4), (2, 2, 6), (1, 24), (24, 1), (4, 1, 6), (8, 3), (2, 12), (1, 4, 6, 1)]
    return [(a, b) for a in shapes for b in shapes]


def test_runs_of_a_reshape_are_apart():
    """Each run keeps its number of elements, nothing is left over, and an element goes from a run to the same run."""
    for old, new in reshapes():
        runs = list(groups(old, new))
        assert [i for before, _ in runs for i in before] == list(range(len(old)))
        assert [j for _, after in runs for j in after] == list(range(len(new)))
        for before, after in runs:
            assert np.prod([old[i] for i in before]) == np.prod([new[j] for j in after])
            for k in range(1, len(before)):  # no run could be taken apart further
                front = np.prod([old[i] for i in before[:k]])
                assert all(np.prod([new[j] for j in after[:m]]) != front for m in range(1, len(after))) or front == 1
