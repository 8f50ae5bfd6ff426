"""What kernels say of wrong trees, sizes, statics and results, word for word; tests/errors has the rest."""

from __future__ import annotations

import textwrap

import jax
import numpy as np
import pytest

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
        w, dimension 0: d has two sizes: 5 here, and 6 from x, dimension 1.
        got: mesh dp=2, tp=4
        advice: use another name, or _, for another dimension: the signature binds d for the whole body
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
        - x, dimension 0: b of size 5 does not divide into the 2 blocks of dp; pad b by 1 to 6
        - w, dimension 1: f of size 10 does not divide into the 4 blocks of tp; pad f by 2 to 12
        - mesh dp=2, tp=4
        """,
    ),
    "a size in a tree": (
        lambda: spmd.kernel(**TREE, mesh=mesh())(tree_body)(*on((4, 6)), {"w": on((6, 10))[0]}),
        errors.SizeError,
        """
        tree_body: kernel(in_layouts=('b/dp d', {'w': 'd f/tp'}), out_layouts=b/dp d)
        p['w'], dimension 1: f of size 10 does not divide into the 4 blocks of tp.
        got: mesh dp=2, tp=4
        advice: pad f by 2 to 12
        """,
    ),
    "the structure of a tree": (
        lambda: spmd.kernel(**TREE, mesh=mesh())(tree_body)(*on((4, 6)), {"v": on((6, 8))[0]}),
        errors.LayoutError,
        """
        tree_body: kernel(in_layouts=('b/dp d', {'w': 'd f/tp'}), out_layouts=b/dp d)
        p does not have the structure of its layouts.
        got:
        - p['v']: an array float32[6,8] has no layout; there are layouts for 'w'
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
        - x, dimension 1: (h k) of size 6 does not divide into the 4 blocks of tp; pad (h k) by 2 to 8
        - x, dimension 1: the size 6 does not divide by h=4
        - mesh dp=2, tp=4
        """,
    ),
    "a size keyword that is not a size": (
        lambda: run("b/dp -> b/dp", identity, (4,), h=0),
        errors.LayoutError,
        """
        identity: kernel("b/dp -> b/dp")
        h, a keyword that binds a size, is an int of at least 1, not 0.
        advice: axes={"h": ...} renames a mesh axis
        """,
    ),
    "no result": (
        lambda: run(ROWS, lambda x: None, (4, 6)),
        errors.LayoutError,
        """
        <lambda>: kernel("b/dp d -> b/dp d")
        the body returned None, and the right side declares results.
        advice: return them
        """,
    ),
    "a result that is not an array": (
        lambda: run(ROWS, lambda x: "no", (4, 6)),
        errors.LayoutError,
        """
        <lambda>: kernel("b/dp d -> b/dp d")
        the body's results do not have the structure that the right side declares.
        got: result: the layout 'b/dp d' is for an array, but here is a leaf of type str
        """,
    ),
    "boundary": (
        lambda: spmd.kernel(ROWS, mesh=mesh(), boundary="error")(identity)(
            spmd.shard(np.ones((4, 8)), "b d/tp", mesh=mesh())
        ),
        errors.PlacementError,
        """
        identity: kernel("b/dp d -> b/dp d")
        an argument does not lie as its layout says, and boundary="error" forbids moving it.
        got: x: P(None, 'tp'); wanted "b/dp d"
        advice: shard(x, layout) before the call
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
        static names 'kimd', which is not an argument of two; did you mean 'kind'?
        got: arguments: x, kind
        """,
    ),
    "layouts without spaces": (
        lambda: run("bd,df/tp->bd", lambda x, w: x, (8, 16), (16, 4)),
        errors.LayoutError,
        """
        <lambda>: kernel("bd,df/tp->bd")
                          ^^
        the arguments do not fit the signature.
        got:
        - x of shape (8, 16): "bd" has 1 dimension, not 2; names are separated by spaces: "b d"
        - w of shape (16, 4): "df/tp" has 1 dimension, not 2
        - mesh dp=2, tp=4
        """,
    ),
    "rules over paths for a tree": (
        lambda: spmd.kernel(in_layouts=({"**/w": "d"}, "d"), out_layouts="d", mesh=mesh())(lambda p, x: x)(
            {"mlp": {"w": np.ones(4)}}, np.ones(4)
        ),
        errors.LayoutError,
        """
        <lambda>: kernel(in_layouts=({'**/w': 'd'}, 'd'), out_layouts=d)
        p does not have the structure of its layouts.
        got:
        - p['mlp']: a dict with 'w' has no layout; there are layouts for '**/w'
        - p: a layout for '**/w', but here is a dict with 'mlp'; rules over paths are for layouts: lambda tree: spmd.layouts(tree, {...})
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
    "a margin at the boundary": (
        lambda: run("1+b/dp+1 -> 1+b/dp+1", identity, (8,)),
        errors.LayoutError,
        """
        identity: kernel("1+b/dp+1 -> 1+b/dp+1")
        "1+b/dp+1" has a margin: shards with margins overlap, so no array outside a kernel has them.
        """,
    ),
    "a mesh that is none": (
        lambda: spmd.kernel("b -> b", mesh={"dp": 2}),
        errors.MeshError,
        """
        kernel(...)
        mesh is a jax.sharding.Mesh or an AbstractMesh, not a dict.
        advice: as in mesh=spmd.make_mesh(dp=2, tp=4)
        """,
    ),
    "a raw collective in auto mode": (
        lambda: spmd.kernel("b/dp -> b", mesh=mesh())(lambda x: jax.lax.psum(x, "dp")).auto(np.ones(4)),
        errors.ModeError,
        """
        <lambda>: kernel("b/dp -> b")
        a raw jax.lax collective needs the per-shard view, and in auto mode the body sees whole arrays.
        got: at PLACE (<lambda>)
        advice: an spmd operation, or spmd.local(fn, "in -> out") around the raw code
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
