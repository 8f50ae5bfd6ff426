"""Sizes, offsets and places: the same answers from strings in all modes, and errors that say what to do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd.errors import SizeError
from spmd.kernels import kernel
from spmd.mesh import make_mesh
from spmd.modes import MODES, Frame, scope
from spmd.ops import axis_index, axis_size, grad, local_size, offset, reduce, size

X = np.zeros((8, 6), np.float32)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(dp=2, tp=3)


def ask(mesh, question, mode="explicit", **options):
    """What a body is answered, as Python values seen while it is traced."""
    seen = []

    @kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh, **options)
    def body(x):
        seen.append(question())
        return x

    getattr(body, mode)(X)
    return seen[0]


def values(mesh, question, mode="explicit", spec="n/dp/tp -> n/dp/tp"):
    """One number per device, filled into its block of six."""

    @kernel(spec, mesh=mesh)
    def body(x):
        return x + question()

    return np.asarray(getattr(body, mode)(np.zeros(6, np.int32))).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_size_is_global_in_every_mode(mesh, mode):
    assert ask(mesh, lambda: (size("b"), size("b/dp"), size("d/tp"), size("(b d)"), size("5")), mode) == (
        8, 8, 6, 48, 5,
    )  # fmt: skip
    assert ask(mesh, lambda: size("s/tp", s=9), mode) == 9


@pytest.mark.parametrize("mode", MODES)
def test_size_of_a_dimension_of_an_array(mesh, mode):
    """A library function does not know the signature of the kernel; the array says how large its dimensions are."""
    seen = []

    @kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)
    def body(x):
        seen.append(scope(library)(x, "tp"))
        return x

    def library(x, axis):
        sizes = size(x, "... [v/axis]", axis=axis), size(x, "[n/dp] ...")
        return *sizes, size(x, "n/dp [(h k)/tp]", k=3)

    getattr(body, mode)(np.zeros((8, 18), np.float32))
    assert seen == [(18, 8, 18)]


@pytest.mark.parametrize("rules", [None, {"b": "dp", "d": "tp"}])
def test_a_function_handed_to_a_scope_keeps_its_names(mesh, rules):
    """Sizes of the signature, and the mapping: those of its caller, not of the scope that calls it."""
    seen = []

    @scope(mapping=None)
    def library(x, *more, fn):
        with pytest.raises(SizeError, match="b"):
            size("b")
        return scope(lambda fn: fn(x))(fn) + more[0](x)

    @kernel("b d -> b d" if rules else "b/dp d/tp -> b/dp d/tp", mesh=mesh, mapping=rules)
    def body(x):
        here = lambda v: (seen.append((size("b"), local_size("b"))), v)[1]
        return library(x, functools.partial(here), fn=here)

    body(X)
    assert seen == [(8, 4 if rules else 8)] * 2


def test_local_size_is_what_shape_says(mesh):
    question = lambda: (local_size("b/dp"), local_size("b"), local_size("(b k)/dp", k=3), local_size("b/tp", tp="dp"))
    assert ask(mesh, question) == (4, 8, 12, 4)
    assert ask(mesh, question, "auto") == (8, 8, 24, 8)
    assert ask(mesh, question, "reference") == (8, 8, 24, 8)


def test_offset(mesh):
    assert values(mesh, lambda: offset("v/dp/tp", v=12)) == [0, 2, 4, 6, 8, 10]
    assert values(mesh, lambda: offset("v/tp/dp", v=12)) == [0, 4, 8, 2, 6, 10]
    assert values(mesh, lambda: offset("(h/dp k)", h=4, k=5)) == [0, 0, 0, 10, 10, 10]
    assert values(mesh, lambda: offset("v", v=12)) == [0] * 6
    assert values(mesh, lambda: offset("v/dp", v=12), "auto") == [0] * 6
    assert values(mesh, lambda: offset("v/dp", v=12), "reference") == [0] * 6


def test_offset_is_an_int32_that_varies_with_the_axes(mesh):
    kind = ask(mesh, lambda: jax.typeof(offset("d/tp")))
    assert (str(kind.dtype), kind.shape, set(kind.manual_axis_type.varying)) == ("int32", (), {"tp"})
    with jax.enable_x64(True):
        assert ask(mesh, lambda: jax.typeof(offset("d/tp"))).dtype == jnp.int32


@pytest.mark.parametrize("mode", MODES)
def test_axis_size(mesh, mode):
    assert ask(mesh, lambda: (axis_size("dp"), axis_size(("dp", "tp")), axis_size(())), mode) == (2, 6, 1)


def test_axis_index(mesh):
    assert values(mesh, lambda: axis_index("tp")) == [0, 1, 2, 0, 1, 2]
    assert values(mesh, lambda: axis_index(("dp", "tp"))) == [0, 1, 2, 3, 4, 5]
    assert values(mesh, lambda: axis_index(("tp", "dp"))) == [0, 2, 4, 1, 3, 5]


def test_renames_of_the_kernel_hold(mesh):
    seen = []

    @kernel("b/x -> b/x", mesh=mesh, axes={"x": ("tp", "dp"), "y": None})
    def body(v):
        seen.append((axis_size("x"), axis_size("y"), local_size("b/x"), axis_size(())))
        return v + axis_index("x") + offset("b/x") + axis_index("y")

    out = body(np.zeros(12, np.int32))
    assert seen[0] == (6, 1, 2, 1)
    np.testing.assert_array_equal(out, np.repeat(np.arange(6), 2) * 3)


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [({"x": "tp"}, (3, 3)), ({"x": ("dp", "tp")}, (6, 3)), ({"x": None}, (1, 3)), ({"x": "tp", "tp": "dp"}, (3, 2))],
)
@pytest.mark.parametrize("mode", MODES)
def test_renames_hold_for_axes_that_are_handed_on(mesh, axes, wanted, mode):
    """A layer's `tp="x"` is the axis that the strings of its caller call x."""
    seen = []

    @scope(mapping=None)
    def layer(v, tp):
        seen.append((axis_size(tp), axis_size("tp"), size(v, "[n/a]", a=tp), local_size("n/a", n=24, a=(tp,))))
        return v

    @kernel("n/x -> n/x", mesh=mesh, axes=axes)
    def body(v):
        return layer(v, "x")

    getattr(body, mode)(np.zeros(12, np.float32))
    parts = wanted[0] if mode == "explicit" else 1
    assert seen[0] == (*wanted, 12, 24 // parts)  # and then on other meshes: does it mean the same in this mode?


def test_renames_hold_for_the_mark_of_a_loss(mesh):
    @kernel("b/x -> b/x", mesh=mesh, axes={"x": "tp"})
    def body(v):
        return grad(lambda v: reduce(v**2, "b/x -> {U:x}"), loss="{U:x}")(v)

    np.testing.assert_array_equal(body(np.arange(6, dtype=np.float32)), 2 * np.arange(6))


def test_in_the_users_own_shard_map(mesh):
    body = lambda x: x + axis_index("dp") + local_size("v/tp", v=6) + axis_size("tp")
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))
    assert mapped(np.zeros(2, np.int32)).tolist() == [5, 6]


def test_reference_frames_need_no_devices():
    with Frame("reference", None, (("dp", 1000),)).enter():
        assert (axis_size("dp"), local_size("b/dp", b=5000), offset("b/dp", b=5000)) == (1000, 5000, 0)
