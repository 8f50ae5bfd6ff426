"""What differs between JAX versions, used as its callers do: types, tracers, and primitives of our own in every transform."""

import functools
import inspect
import json
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd import _compat
from tests.ops.harness import counts, make_mesh, run

X = np.arange(8.0, dtype=np.float32).reshape(4, 2)


def inside(body, *, sizes=None, ins=P("a"), outs=P("a"), x=X):
    """The body in a `shard_map`, traced."""
    run = jax.shard_map(body, mesh=make_mesh(sizes or {"a": 2, "b": 2}), in_specs=ins, out_specs=outs)
    return jax.jit(run)(x)


def test_types_of_values():
    seen = []

    def body(x):
        whole = lax.psum(x, "a")
        seen.append([_compat.varying_axes(v) for v in (x, whole, _compat.pvary(whole, ("b", "a")))])
        seen.append([_compat.varying_type(jax.typeof(v)) for v in (x, whole)])
        seen.append((_compat.manual_axes(), _compat.manual_sizes(("a", "b", "c"))))
        part = _compat.to_unreduced(x, ("a",))
        seen.append((_compat.unreduced_axes(part), _compat.varying_axes(part)))
        return x

    inside(body)
    assert seen[0] == [{"a"}, set(), {"a", "b"}] and seen[1] == seen[0][:2]
    assert seen[2] == (("a", "b"), (2, 2, 0)), "an axis that is not manual has no size"
    assert seen[3] == ({"a"}, set())
    assert not _compat.varying_axes(jnp.ones(2)) and _compat.manual_axes() == ()


def test_changed_types():
    def body(x):
        aval = jax.typeof(x)
        wide = _compat.with_varying(aval, ("b",), (3,))
        assert wide.shape == (3,) and set(wide.manual_axis_type.varying) == {"a", "b"}
        assert not _compat.without_varying(wide, ("a", "b")).manual_axis_type.varying
        reduced = _compat.as_reduced(aval, ("a",)).manual_axis_type
        assert set(reduced.reduced) == {"a"} and not reduced.varying
        part = jax.typeof(_compat.to_unreduced(x, ("a",)))
        terms = _compat.as_terms(part, ("a",)).manual_axis_type
        assert set(terms.varying) == {"a"} and not terms.unreduced
        return x

    inside(body)


def test_a_copy_that_varies_gives_its_gradients_back_as_a_sum():
    """`pvary` sends nothing, and its transpose is a psum, along axes of size 1 too."""
    for size in (1, 2):
        sizes = {"a": size}

        def body(w, x):
            return (_compat.pvary(w, ("a",)) * x).sum()[None]

        mapped = jax.shard_map(body, mesh=make_mesh(sizes), in_specs=(P(), P("a")), out_specs=P("a"))
        value, pull = jax.vjp(mapped, jnp.float32(2), X)
        np.testing.assert_allclose(np.asarray(value).sum(), 2 * X.sum())
        np.testing.assert_allclose(pull(jnp.ones(size))[0], X.sum())


def test_tracers_of_gradients_and_batches():
    seen = []

    def look(x):
        seen.append((_compat.primal(x) is not None, np.shape(_compat.concrete(x))))
        return (x**2).sum()

    jax.grad(look)(jnp.asarray(X))
    look(jnp.asarray(X))
    assert seen == [(True, X.shape), (False, X.shape)]
    found = []

    def batched(x):
        found.append(_compat.mapped(x)[1])
        return x

    jax.vmap(batched, in_axes=1)(jnp.asarray(X))
    jax.vmap(jax.vmap(batched, in_axes=1), in_axes=0)(jnp.ones((2, 3, 4)))
    assert [set(dims) for dims in found] == [{1}, {0, 2}], "the dimensions of the array around both"
    x = jnp.ones(3)
    assert not _compat.deleted(x)
    x.delete()
    assert _compat.deleted(x)


NOTE = _compat.identity_primitive("test_note")


def test_a_note_is_the_identity_in_everything():
    def noted(x):
        return NOTE.bind(x * 2, why="a test", mapped=())

    np.testing.assert_array_equal(noted(X), 2 * X)
    np.testing.assert_array_equal(jax.jit(noted)(X), 2 * X)
    np.testing.assert_array_equal(jax.grad(lambda x: noted(x).sum())(X), np.full_like(X, 2))
    np.testing.assert_array_equal(jax.vmap(noted, in_axes=1)(X), 2 * X.T)
    assert "test_note" not in jax.jit(noted).lower(X).as_text(), "nothing is left of it"
    [note] = [e for e in jax.make_jaxpr(jax.vmap(noted, in_axes=1, out_axes=1))(X).eqns if e.primitive is NOTE]
    assert (note.params["why"] == "a test" and note.params["mapped"] == (0,)) or note.params["mapped"] == (1,)


def times(x, n, *, by):
    return x * by * n


THREE = _compat.linear_primitive(
    "test_times",
    abstract=lambda x, n, **_: x,
    run=times,
    transpose=lambda cotangent, *, by, **_: cotangent * by * 5,
    batch=lambda args, dims, **params: (times(*args, **params), dims[0]),
)


def test_a_linear_primitive_in_every_transform():
    """Its second operand is an index, which has no gradient; here it is always 5."""
    fn = lambda x: THREE.bind(x, jnp.float32(5), by=3.0)
    np.testing.assert_allclose(jax.jit(fn)(X), 15 * X)
    value, tangent = jax.jvp(fn, (X,), (X + 1,))
    np.testing.assert_allclose(value, 15 * X)
    np.testing.assert_allclose(tangent, 15 * (X + 1))
    np.testing.assert_allclose(jax.grad(lambda x: (fn(x) * X).sum())(X), 15 * X)
    np.testing.assert_allclose(jax.grad(lambda x: (fn(fn(x)) * X).sum())(X), 225 * X)
    np.testing.assert_allclose(jax.vmap(fn)(X), 15 * X)
    np.testing.assert_allclose(jax.jvp(lambda x: fn(x) * 0 + x, (X,), (jnp.ones_like(X),))[1], 1)


ALONE = {
    "psum_invariant": ("psum", P(None), lambda x: lax.psum(x, "b")),
    "all_gather": ("all_gather", P("b"), lambda x: lax.all_gather(x, "b", tiled=True)),
    "reduce_scatter": ("psum_scatter", P("b"), lambda x: lax.psum_scatter(x, "b", tiled=True)),
}


@pytest.mark.parametrize("name", ALONE)
def test_collectives_of_one_device(name):
    """Values, types and gradients are those of JAX's own, and nothing is sent."""
    _, outs, theirs = ALONE[name]
    sizes = {"a": 2, "b": 1}
    ours = functools.partial(_compat.alone, name, axes=("b",))

    def mapped(fn):
        varying = lambda x: fn(_compat.pvary(x, ("b",)))
        return jax.shard_map(varying, mesh=make_mesh(sizes), in_specs=P("b"), out_specs=outs)

    def every(fn):
        """The value, the gradient, and both ways to put a batch."""
        batched = [jax.vmap(mapped(fn), in_axes=1, out_axes=out)(np.stack([X, 2 * X], 1)) for out in (0, 2)]
        return mapped(fn)(X), jax.vjp(mapped(fn), X)[1](X + 1), batched

    found, wanted = jax.jit(lambda: (every(ours), every(theirs)))()
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, two)
    body = lambda x: _compat.pvary(ours(x), ("b",))
    assert counts(body, sizes, ["n/b d"], "n/b d", X) == {}
    np.testing.assert_array_equal(run(body, sizes, ["n/b d"], "n/b d")(X), X)


def test_one_device_is_known():
    found = []
    inside(
        lambda x: (found.append((_compat.of_one(("b",)), _compat.of_one(("a",)), _compat.of_one(()))), x)[1],
        sizes={"a": 2, "b": 1},
    )
    assert found == [(True, False, False)]


def test_what_no_result_needs_is_left_out():
    def program(x):
        jnp.sin(x)
        return lax.scan(lambda c, _: (c * 2, jnp.cos(c)), x, None, length=3)[0]

    closed = jax.make_jaxpr(program)(1.0)
    live = _compat.live_jaxpr(closed.jaxpr)
    assert "sin" in str(closed) and "cos" in str(closed)
    assert "sin" not in str(live) and "cos" not in str(live) and "mul" in str(live)


def test_names_around_an_equation():
    def program(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.sin(x)

    [eqn] = jax.make_jaxpr(program)(1.0).eqns
    assert _compat.name_stack(eqn) == (("Scope", "outer"), ("Scope", "inner"))
    transforms = [_compat.name_stack(e) for e in jax.make_jaxpr(jax.grad(program))(1.0).eqns]
    assert any(("Transform", "jvp") in names for names in transforms)


def test_files_of_jax():
    assert _compat.in_jax(inspect.getfile(jax.jit)) and _compat.in_jax(inspect.getfile(jnp))
    assert not _compat.in_jax(__file__) and not _compat.in_jax(json.__file__)


def test_layouts_in_memory_change_no_numbers():
    for fn in (_compat.row_major, _compat.apart):
        np.testing.assert_array_equal(jax.jit(fn)(X.T), X.T)


@pytest.mark.parametrize(
    ("kind", "cpu", "gpu"),
    [("cpu", True, False), ("NVIDIA H200", False, True), ("TPU v5p", False, False), ("", True, False)],
)
def test_what_the_mesh_around_runs_on(kind, cpu, gpu) -> None:
    """Kernels of GPUs are asked for there only: TPUs have others."""
    device = types.SimpleNamespace(device_kind=kind) if kind else None
    around = types.SimpleNamespace(abstract_device=device, shape={"x": 2})
    with mock.patch("jax.sharding.get_abstract_mesh", return_value=around):
        assert (_compat.on_cpu(), _compat.runs_on_gpu()) == (cpu, gpu)
