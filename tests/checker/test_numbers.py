"""Differences of two sets of numbers: what they are called, how large they are, and what they look like."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.checker._numbers import compared, labelled, pulled, wide

X = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)


def allowed(path, values):
    return 1e-5 + 1e-5 * np.abs(values)


def test_results_and_gradients_are_those_of_jax():
    """Keywords, trees, integers, static numbers; along cotangents that depend on the shapes of the results alone."""

    def fn(params, ids, *, scale, power):
        y = params["w"][ids] * scale
        return {"y": y**power, "ids": ids + 1}

    args = {"w": jnp.asarray(X), "b": jnp.ones(2)}, jnp.array([2, 0])
    program, given = pulled(fn, args, {"scale": 2.0, "power": 3}, static={"power"})
    found = jax.jit(program)(*given)
    np.testing.assert_array_equal(found["result"]["ids"], [3, 1])
    np.testing.assert_allclose(found["result"]["y"], (X[[2, 0]] * 2.0) ** 3, rtol=1e-5)
    again, _ = pulled(lambda p, i: fn(p, i, scale=2.0, power=3)["y"], args)
    (args_gradient, kwargs_gradient) = found["gradient"]
    by = again(*_)["gradient"][0][0]["w"]
    touched = np.abs(np.asarray(args_gradient[0]["w"])).sum(1) > 0
    assert touched.tolist() == [True, False, True, False] and args_gradient[1] is None
    assert not np.asarray(args_gradient[0]["b"]).any() and kwargs_gradient["scale"] is not None
    np.testing.assert_allclose(args_gradient[0]["w"], by, rtol=1e-5), "the same cotangents"
    assert kwargs_gradient["power"] is None


def test_without_gradients_there_are_none():
    program, given = pulled(lambda x: x * 2, (jnp.ones(3),), grad=False)
    assert list(program(*given)) == ["result"]


def test_equal_numbers_do_not_differ():
    tree = {"result": (X, np.arange(3), np.array([np.nan, np.inf]))}
    assert compared(tree, tree, allowed) == []
    assert compared({"result": X}, {"result": X + 1e-6}, allowed) == []


WRONG = {
    "twice": (2 * X, "factor", 2.0),
    "a third": (X / 3, "factor", 1 / 3),
    "turned round": (-X, "factor", -1.0),
    "rows in another order": (X[::-1], "permuted", True),
    "of another shape": (X.T, "largest", None),
    "of another dtype": (X.astype(np.float16), "largest", None),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_difference_looks_like(name):
    got, field, value = WRONG[name]
    [found] = compared({"result": got}, {"result": X}, allowed)
    if isinstance(value, float):
        assert getattr(found, field) == pytest.approx(value)
    else:
        assert getattr(found, field) == value
    if name == "rows in another order":
        assert found.factor is None


def test_numbers_of_a_difference():
    got = X.copy()
    got[1, 2] += 0.5
    got[3, 3] += 0.25
    [found] = compared({"result": got}, {"result": X}, allowed)
    assert found.largest == pytest.approx(0.5, rel=1e-5) and (found.wrong, found.size) == (2, 20)
    assert found.allowed == pytest.approx(1e-5 + 1e-5 * abs(X[1, 2]), rel=1e-3)
    assert found.factor is None and not found.permuted
    assert found.counts == ("0.5", f"{found.allowed:.3g}", "2 of 20")


def test_integers_are_equal_or_not():
    [found] = compared({"result": np.array([1, 2])}, {"result": np.array([1, 3])}, lambda *_: 1e9)
    assert found.wrong == 1 and found.allowed == 0


def test_nan_in_place_of_a_number_differs():
    got = X.copy()
    got[0, 0] = np.nan
    [found] = compared({"result": got}, {"result": X}, allowed)
    assert found.wrong == 1


def test_names():
    tree = {"result": [X], "gradient": (({"w": X}, X), {"scale": X})}
    names = [labelled(path, ("params",)) for path, _ in jax.tree.leaves_with_path(tree)]
    assert sorted(names) == ["gradient of args[1]", "gradient of params['w']", "gradient of scale", "result[0]"]
    assert wide(np.float16(1)).dtype == np.float64 and wide(np.complex64(1)).dtype == np.complex128
