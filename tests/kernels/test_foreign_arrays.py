"""Arrays of strings, objects, dates, records and long floats: JAX has none of them, and each call says so itself."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import parallel

ARRAYS = {
    "strings": np.array(["a", "b"]),
    "objects": np.array([1, None], dtype=object),
    "dates": np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[D]"),
    "bytes": np.array([b"a", b"b"]),
    "records": np.zeros(2, dtype=[("a", "f4")]),
    "long floats": np.zeros(2, np.longdouble),
}


def inside(body):
    """A call in the body of a kernel, on an array that it closes over."""
    return lambda mesh, array: spmd.kernel("b -> b", mesh=mesh)(lambda x: body(array, x))(np.ones(2))


def after_a_good_call(mesh, array):
    kernel = spmd.kernel("b -> b", mesh=mesh)(lambda x: x)
    kernel(np.ones(2))
    return kernel(array)


CALLS = {
    "shard": lambda mesh, a: spmd.shard(a, "b", mesh=mesh),
    "shard of a tree": lambda mesh, a: spmd.shard({"a": a, "b": np.ones(2)}, "b", mesh=mesh),
    "init": lambda mesh, a: spmd.init(lambda: a, "b", mesh=mesh)(),
    "from_process_local": lambda mesh, a: spmd.from_process_local(a, "b", mesh=mesh),
    "from_function": lambda mesh, a: spmd.from_function(lambda i: a, "b", b=2, mesh=mesh),
    "an argument": lambda mesh, a: spmd.kernel("b -> b", mesh=mesh)(lambda x: x)(a),
    "an argument later": after_a_good_call,
    "explain": lambda mesh, a: spmd.explain(spmd.kernel("b -> b", mesh=mesh)(lambda x: x), a),
    "Layout.of": lambda mesh, a: spmd.Layout.of(a, "b"),
    "typeof": lambda mesh, a: spmd.typeof(a),
    "a result": inside(lambda a, x: a),
    "reduce": inside(lambda a, x: spmd.reduce(a, "b -> b")),
    "psum": inside(lambda a, x: spmd.psum(a, "b {U:dp} -> b")),
    "annotate": inside(lambda a, x: spmd.annotate(a, "b")),
    "assert_equal": inside(lambda a, x: spmd.assert_equal(a, "dp", why="it is")),
    "cond": inside(lambda a, x: spmd.cond(True, lambda a: x, lambda a: x, a)),
    "grad": inside(lambda a, x: spmd.grad(lambda a: spmd.reduce(x, "b -> scalar"))(a)),
    "full": inside(lambda a, x: spmd.full("b", a[0])),
    "linspace": inside(lambda a, x: spmd.linspace(a[0], 1, "b")),
    "local": inside(lambda a, x: spmd.local(lambda y: y, "b -> b")(a)),
    "gather": inside(lambda a, x: parallel.gather(a, "b/dp", "b")),
    "global_norm": inside(lambda a, x: parallel.global_norm(a, "b")),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_call_says_which_dtype_jax_lacks(call) -> None:
    mesh = spmd.make_mesh(dp=2)
    for name, array in ARRAYS.items():
        if call in ("full", "linspace") and name in ("objects", "dates", "records", "strings", "bytes"):
            continue  # an element of these is an object of Python, or a number
        with pytest.raises(spmd.LayoutError) as caught:
            CALLS[call](mesh, array)
        text = str(caught.value)
        assert str(array.dtype) in text, text
        assert not any(word in text for word in ("<function", "stage", "lambda>.", "jit")), text
        assert len(text.strip().split("\n")) > 1  # the call, and the rule


@pytest.mark.parametrize("value", ["abc", b"abc", None, np.array("abc")[()]])
def test_full_takes_a_number(value) -> None:
    with pytest.raises(spmd.LayoutError, match="not an array|which JAX does not have"):
        spmd.kernel("-> b", b=2, mesh=spmd.make_mesh(dp=2))(lambda: spmd.full("b", value))()


def test_what_has_no_layout_stays_as_it_is() -> None:
    mesh = spmd.make_mesh(dp=2)
    tree = {"names": ARRAYS["strings"], "x": np.ones(2)}
    assert spmd.shard(tree, {"x": "b/dp"}, mesh=mesh)["names"] is tree["names"]
    assert spmd.layouts(tree, {"x": "b/dp"})["names"] is None
    found = spmd.init(lambda: {**tree, "x": jnp.ones(2)}, {"x": "b/dp"}, mesh=mesh)()
    assert found["names"] is tree["names"]
