"""Arrays of strings, objects, dates, records and long floats, and integers beyond int32: each call says so itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import parallel

ARRAYS = {
    "strings": np.array(["a", "b"]),
    "long strings": np.array(["a", "b"], np.dtypes.StringDType()),
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
        if call in ("full", "linspace") and name in ("objects", "dates", "records", "strings", "long strings", "bytes"):
            continue  # an element of these is an object of Python, or a number
        if call == "Layout.of" and name == "long strings":
            continue  # JAX has such arrays, and this asks where they are
        with pytest.raises(spmd.errors.LayoutError) as caught:
            CALLS[call](mesh, array)
        text = str(caught.value)
        assert str(array.dtype) in text, text
        assert not any(word in text for word in ("<function", "stage", "lambda>.", "jit")), text
        assert len(text.strip().split("\n")) > 1  # the call, and the rule


@pytest.mark.parametrize("value", ["abc", b"abc", None, np.array("abc")[()]])
def test_full_takes_a_number(value) -> None:
    with pytest.raises(spmd.errors.LayoutError, match="not an array|JAX does not compute with"):
        spmd.kernel("-> b", b=2, mesh=spmd.make_mesh(dp=2))(lambda: spmd.full("b", value))()


def test_what_has_no_layout_stays_as_it_is() -> None:
    mesh = spmd.make_mesh(dp=2)
    tree = {"names": ARRAYS["strings"], "x": np.ones(2)}
    assert spmd.shard(tree, {"x": "b/dp"}, mesh=mesh)["names"] is tree["names"]
    assert spmd.match_layouts(tree, {"x": "b/dp"})["names"] is None
    found = spmd.init(lambda: {**tree, "x": jnp.ones(2)}, {"x": "b/dp"}, mesh=mesh)()
    assert found["names"] is tree["names"]


# --- integers of Python ----------------------------------------------------------------------------------------


def on_scalars(body):
    """A call in the body of a kernel on a number that it closes over."""
    return lambda mesh, n: spmd.kernel("b/dp -> b/dp", mesh=mesh)(lambda x: (body(n, x), x)[1])(jnp.ones(2))


NUMBERS = {
    "shard": lambda mesh, n: spmd.shard(n, "scalar", mesh=mesh),
    "shard of a tree": lambda mesh, n: spmd.shard({"n": n}, {"n": "scalar"}, mesh=mesh),
    "from_process_local": lambda mesh, n: spmd.from_process_local(n, "scalar", mesh=mesh),
    "init": lambda mesh, n: spmd.init(lambda: n, "scalar", mesh=mesh)(),
    "an abstract init": lambda mesh, n: spmd.init(lambda: n, "scalar", mesh=mesh).abstract(),
    "explicit": lambda mesh, n: spmd.kernel("scalar -> scalar", mesh=mesh)(lambda x: x)(n),
    "auto": lambda mesh, n: spmd.kernel("scalar -> scalar", mesh=mesh)(lambda x: x).auto(n),
    "reference": lambda mesh, n: spmd.kernel("scalar -> scalar", mesh=mesh)(lambda x: x).reference(n),
    "trace": lambda mesh, n: spmd.kernel("scalar -> scalar", mesh=mesh)(lambda x: x).trace(n),
    "under jit": lambda mesh, n: jax.jit(lambda: spmd.kernel("scalar -> scalar", mesh=mesh)(lambda x: x)(n))(),
    "explain": lambda mesh, n: spmd.explain(spmd.kernel("scalar -> scalar", mesh=mesh)(lambda x: x), n),
    "a result": lambda mesh, n: spmd.kernel("b/dp -> scalar", mesh=mesh)(lambda x: n)(jnp.ones(2)),
    "from_function": lambda mesh, n: spmd.from_function(lambda i: n, "b", b=2, mesh=mesh),
    "typeof": lambda mesh, n: spmd.typeof(n),
    "full": on_scalars(lambda n, x: spmd.full("b/dp", n)),
    "linspace": on_scalars(lambda n, x: spmd.linspace(0, n, "b/dp")),
    "annotate": on_scalars(lambda n, x: spmd.annotate(n, "scalar")),
    "psum": on_scalars(lambda n, x: spmd.psum(n, "{U:dp} -> scalar")),
    "einsum": on_scalars(lambda n, x: spmd.einsum(n, x, "scalar, b/dp -> b/dp")),
    "repeat": on_scalars(lambda n, x: spmd.repeat(n, "scalar -> c", c=3)),
    "cond": on_scalars(lambda n, x: spmd.cond(n, lambda: 1, lambda: 2)),
    "grad": on_scalars(lambda n, x: spmd.grad(lambda n: spmd.reduce(x, "b/dp -> scalar"))(n)),
    "random": on_scalars(lambda n, x: spmd.random.uniform(jax.random.key(0), "b/dp", maxval=n)),
}


@pytest.mark.parametrize("n", [2**31, -(2**40), 2**70])
@pytest.mark.parametrize("call", NUMBERS)
def test_the_call_says_that_an_integer_is_too_large(call, n) -> None:
    with pytest.raises(spmd.errors.LayoutError, match="an int that int(32|64) does not hold") as caught:
        NUMBERS[call](spmd.make_mesh(dp=2), n)
    assert ("jax_enable_x64" in str(caught.value)) == (abs(n) < 2**63)
    assert str(abs(n)) not in str(caught.value)


def test_a_large_integer_lies_nowhere() -> None:
    with pytest.raises(spmd.errors.LayoutError, match="reads an array, and this is of type int"):
        spmd.Layout.of(2**40, "scalar")


def test_integers_that_become_floats_or_stay_outside_may_be_large() -> None:
    mesh = spmd.make_mesh(dp=2)
    full = lambda: spmd.full("b/dp", 2**70, jnp.float32)
    rolled = lambda: spmd.roll(spmd.iota("b/dp"), "[b/dp]", 2**40 + 1)
    made = spmd.kernel("-> b/dp, b/dp", b=2, mesh=mesh)(lambda: (full(), rolled()))()
    assert [one.tolist() for one in made] == [[2.0**70] * 2, [1, 0]]
    tree = spmd.shard({"step": 2**40, "x": np.ones(2)}, {"x": "b/dp"}, mesh=mesh)
    assert tree["step"] == 2**40
    assert spmd.shard(tree, "b/dp", mesh=mesh)["step"] == 2**40
    found = spmd.kernel(in_layouts=({"x": "b/dp"},), out_layouts="b/dp", mesh=mesh)(lambda t: t["x"] * float(t["step"]))
    assert found(tree).tolist() == [2.0**40] * 2
