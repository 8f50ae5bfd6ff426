"""What kernels say of wrong declarations and arguments, word for word."""

from __future__ import annotations

import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd import errors


def mesh(**axes):
    return spmd.make_mesh(**(axes or {"dp": 2, "tp": 4}))


def linear(x, w):
    return spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")


def identity(x):
    return x


def two(x, kind="a"):
    return x


def tree_body(x, p):
    return x


def on(*shapes):
    return [np.ones(shape, np.float32) for shape in shapes]


def run(pattern, body, *shapes, **options):
    options.setdefault("mesh", mesh())
    return spmd.kernel(pattern, **options)(body)(*on(*shapes))


LINEAR = "b/dp d, d f/tp -> b/dp f/tp"
ROWS = "b/dp d -> b/dp d"
TREE = {"in_layouts": ("b/dp d", {"w": "d f/tp"}), "out_layouts": "b/dp d"}

CASES = {
    "a size contradicts another": (
        lambda: run(LINEAR, linear, (4, 6), (5, 8)),
        errors.SizeError,
        """
        linear: kernel("b/dp d, d f/tp -> b/dp f/tp")
                                ^
        d is 5 in w, dimension 0, but 6 in x, dimension 1.
        got: mesh dp=2, tp=4
        """,
    ),
    "sizes that do not divide, all at once": (
        lambda: run(LINEAR, linear, (5, 6), (6, 10)),
        errors.SizeError,
        """
        linear: kernel("b/dp d, d f/tp -> b/dp f/tp")
                        ^^^^
        the arguments do not fit the signature.
        got:
        - x, dimension 0: b/dp has size 5, which dp = 2 does not divide; pad it by 1 to 6
        - w, dimension 1: f/tp has size 10, which tp = 4 does not divide; pad it by 2 to 12
        - mesh dp=2, tp=4
        """,
    ),
    "a rank": (
        lambda: run(LINEAR, linear, (4, 6, 1), (6, 8)),
        errors.LayoutError,
        """
        linear: kernel("b/dp d, d f/tp -> b/dp f/tp")
                        ^^^^
        x of shape (4, 6, 1): "b/dp d" has 2 dimensions.
        got: mesh dp=2, tp=4
        """,
    ),
    "a size in a tree": (
        lambda: spmd.kernel(**TREE, mesh=mesh())(tree_body)(*on((4, 6)), {"w": on((6, 10))[0]}),
        errors.SizeError,
        """
        tree_body: kernel(in_layouts=('b/dp d', {'w': 'd f/tp'}), out_layouts=b/dp d)
        p['w'], dimension 1: f/tp has size 10, which tp = 4 does not divide; pad it by 2 to 12.
        got: mesh dp=2, tp=4
        """,
    ),
    "the structure of a tree": (
        lambda: spmd.kernel(**TREE, mesh=mesh())(tree_body)(*on((4, 6)), {"v": on((6, 8))[0]}),
        errors.LayoutError,
        """
        tree_body: kernel(in_layouts=('b/dp d', {'w': 'd f/tp'}), out_layouts=b/dp d)
        p does not have the structure of its layouts.
        got:
        - p['v']: no layout among 'w', but here is an array float32[6,8]
        - p: a layout for 'w', but here is a dict with 'v'
        """,
    ),
    "a size keyword": (
        lambda: run("b/dp (h k)/tp -> b/dp (h k)/tp", identity, (4, 6), h=4),
        errors.SizeError,
        """
        identity: kernel("b/dp (h k)/tp -> b/dp (h k)/tp")
                               ^^^^^^^^
        the arguments do not fit the signature.
        got:
        - x, dimension 1: (h k)/tp has size 6, which tp = 4 does not divide; pad it by 2 to 8
        - x, dimension 1: the size 6 is not h=4 * k=?
        - mesh dp=2, tp=4
        """,
    ),
    "a size keyword that is no size": (
        lambda: run("b/dp -> b/dp", identity, (4,), h=0),
        errors.LayoutError,
        """
        identity: kernel("b/dp -> b/dp")
        the keyword h binds a size, a positive int, not 0; mesh axes are renamed with axes=.
        fix: axes={"h": ...}
        """,
    ),
    "the first program anyone writes": (
        lambda: run("x/i -> x", lambda x: spmd.all_gather(x, "x/i -> x"), (8,), mesh=mesh(i=4)),
        errors.ReplicationError,
        """
        <lambda>: kernel("x/i -> x")
        a gathered copy leaves the kernel whole: gather it to="invarying", so that JAX too knows that it is equal.
        got:
        - result is a gathered copy on i (gathered at PLACE (<lambda>.<locals>.<lambda>))
        - mesh i=4
        fix: all_gather(x, "x/i -> x", to="invarying")
        """,
    ),
    "a result that differs": (
        lambda: run("b/dp -> m", lambda x: x * 2, (8,)),
        errors.ReplicationError,
        """
        result of <lambda>: kernel("b/dp -> m")
                                            ^
        "m" says that the value is equal on dp, but it differs along dp.
        got:
        - an output: float32[4]
        - made from argument x, which is divided by P('dp')
        fix: all_gather(x, "m/dp -> m") if it is divided,
             psum(x, "m {U:dp} -> m") if each device holds one term of a sum
        """,
    ),
    "the structure of the results": (
        lambda: run("b/dp d -> b/dp d, scalar", identity, (4, 6)),
        errors.LayoutError,
        """
        identity: kernel("b/dp d -> b/dp d, scalar")
        the body's results do not have the structure that the right side declares.
        got: result: layouts for '0', '1' (a tuple), but here is an array float32[2,6]
        """,
    ),
    "no result": (
        lambda: run(ROWS, lambda x: None, (4, 6)),
        errors.LayoutError,
        """
        <lambda>: kernel("b/dp d -> b/dp d")
        the body returned None, and the right side declares results.
        fix: return them
        """,
    ),
    "a result that is no array": (
        lambda: run(ROWS, lambda x: "no", (4, 6)),
        errors.LayoutError,
        """
        <lambda>: kernel("b/dp d -> b/dp d")
        the body's results do not have the structure that the right side declares.
        got: result: the layout 'b/dp d' is for an array, but here is a leaf of type str
        """,
    ),
    "the size of a result": (
        lambda: run(ROWS, lambda x: x[:1], (4, 6)),
        errors.SizeError,
        """
        <lambda>: kernel("b/dp d -> b/dp d")
                          ^^^^
        b is 2 in result, dimension 0, but 4 in x, dimension 0.
        got: mesh dp=2, tp=4
        """,
    ),
    "another layout than declared": (
        lambda: run("b d -> b/dp d", identity, (4, 6)),
        errors.ReplicationError,
        """
        identity: kernel("b d -> b/dp d")
        a result has another layout than the right side declares.
        got: result holds "b d" (argument x); declared "b/dp d"
        fix: split(x, "b d -> b/dp d")
        """,
    ),
    "boundary": (
        lambda: spmd.kernel(ROWS, mesh=mesh(), boundary="error")(identity)(
            spmd.shard(np.ones((4, 8)), "b d/tp", mesh=mesh())
        ),
        errors.PlacementError,
        """
        identity: kernel("b/dp d -> b/dp d")
        an argument lies elsewhere than its layout says, and boundary="error" forbids moving it.
        got: x: P(None, 'tp'); wanted "b/dp d"
        fix: shard(x, layout) before the call
        """,
    ),
    "too many layouts": (
        lambda: spmd.kernel("b/dp, d -> b/dp", mesh=mesh())(identity),
        errors.LayoutError,
        """
        identity: kernel("b/dp, d -> b/dp")
        identity has 1 array argument, and the left side 2 layouts.
        got: arguments: x
        fix: one layout per argument; static=(...) for those that are no arrays
        """,
    ),
    "too few arguments": (
        lambda: run(LINEAR, linear, (4, 6)),
        errors.LayoutError,
        """
        linear: kernel("b/dp d, d f/tp -> b/dp f/tp")
        the arguments do not fit linear(x, w): missing a required argument: 'w'.
        """,
    ),
    "a static argument that does not exist": (
        lambda: spmd.kernel("b -> b", mesh=mesh(), static="kimd")(two),
        errors.LayoutError,
        """
        two: kernel("b -> b")
        static names 'kimd', which is no argument of two; did you mean 'kind'?
        got: arguments: x, kind
        """,
    ),
    "a donated static argument": (
        lambda: spmd.kernel("b -> b", mesh=mesh(), donate="kind")(two),
        errors.LayoutError,
        """
        two: kernel("b -> b")
        kind is static, so it has no buffer to donate.
        """,
    ),
    "an axis": (
        lambda: run("b/dq -> b/dq", identity, (4,)),
        errors.MeshError,
        """
        identity: kernel("b/dq -> b/dq")
                            ^^
        the mesh has no axis 'dq'; did you mean 'dp'?
        got: mesh dp=2, tp=4
        """,
    ),
    "several factors divided at the boundary": (
        lambda: run("(b/dp s/tp) -> (b/dp s/tp)", identity, (8,), b=2),
        errors.LayoutError,
        """
        identity: kernel("(b/dp s/tp) -> (b/dp s/tp)")
        "(b/dp s/tp)" divides several factors of one dimension: that is legal inside a kernel, not at its boundary, where a device holds one block of each dimension.
        fix: two dimensions, and rearrange inside
        """,
    ),
    "a margin at the boundary": (
        lambda: run("1+b/dp+1 -> 1+b/dp+1", identity, (8,)),
        errors.LayoutError,
        """
        identity: kernel("1+b/dp+1 -> 1+b/dp+1")
        "1+b/dp+1" has a margin: shards with margins overlap, so no array outside a kernel has them.
        """,
    ),
    "a partial sum at the boundary": (
        lambda: run("b -> b {U:tp}", identity, (8,)),
        errors.ModeError,
        """
        identity: kernel("b -> b {U:tp}")
        {U:} and {R:} in a kernel's own signature need a mesh whose axes are all AxisType.Explicit: elsewhere JAX cannot say that an array outside is a partial sum.
        got: mesh dp (AxisType.Auto), tp (AxisType.Auto)
        fix: psum before the value leaves the kernel
        """,
    ),
    "no pattern": (
        lambda: spmd.kernel(identity),
        errors.LayoutError,
        """
        kernel(fn)
        a kernel needs its pattern before the function.
        fix: @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
        """,
    ),
    "a mesh that is none": (
        lambda: spmd.kernel("b -> b", mesh={"dp": 2}),
        errors.MeshError,
        """
        kernel(...)
        mesh is a jax.sharding.Mesh or an AbstractMesh, not dict.
        fix: mesh=spmd.make_mesh(dp=2, tp=4)
        """,
    ),
    "a raw collective in auto mode": (
        lambda: spmd.kernel("b/dp -> b", mesh=mesh())(lambda x: jax.lax.psum(x, "dp")).auto(np.ones(4)),
        errors.ModeError,
        """
        <lambda>: kernel("b/dp -> b")
        a raw jax.lax collective needs the per-shard view, and in auto mode the body sees whole arrays.
        got: at PLACE
        fix: an spmd operation, or spmd.local(fn, "in -> out") around the raw code
        """,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_message(name):
    fails, kind, wanted = CASES[name]
    with pytest.raises(kind) as caught:
        fails()
    assert type(caught.value) is kind
    text = str(caught.value).split("\n--------------------")[0].strip("\n")
    text = "\n".join(_without_place(line) for line in text.split("\n"))
    assert text == textwrap.dedent(wanted).strip("\n")


def _without_place(line: str) -> str:
    """Lines of this file change."""
    words = [w if "test_messages.py:" not in w else "PLACE" for w in line.split(" ")]
    return " ".join(words)


def test_values_are_never_shown():
    secret = 31415926.0
    x = np.full((5, 6), secret, np.float32)
    with pytest.raises(errors.SizeError) as caught:
        spmd.kernel(ROWS, mesh=mesh())(identity)(x)
    assert "31415" not in str(caught.value)


def test_errors_of_the_body_are_the_users_own():
    """What JAX or the body says is not dressed up."""
    with pytest.raises(ZeroDivisionError):
        run(ROWS, lambda x: x / (1 // 0), (4, 6))
    with pytest.raises(TypeError, match="dot_general requires"):
        run(ROWS, lambda x: x @ np.ones((3, 3), np.float32), (4, 6))


def test_an_error_leaves_nothing_behind():
    """The same kernel works afterwards."""
    kernel = spmd.kernel(ROWS, mesh=mesh())(identity)
    for _ in range(2):
        with pytest.raises(errors.SizeError):
            kernel(*on((5, 6)))
        assert kernel(*on((4, 6))).sharding.is_equivalent_to(jax.NamedSharding(mesh(), P("dp")), 2)
    with pytest.raises(errors.ModeError):
        spmd.psum(np.ones(3), "n {U:dp} -> n")
