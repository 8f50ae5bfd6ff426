"""`einsum`: values and gradients in all modes, collectives, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.errors import CommunicationError, LayoutError
from spmd.modes import MODES
from spmd.ops import einsum
from tests import simulator
from tests.ops.harness import backward_counts, close, counts, frame, pulled, run, tally
from tests.sampler import Sampler, share

MESH = {"dp": 2, "tp": 4}

SHAPES = (
    "b s d, d f -> b s f",
    "b f, f d -> b d",
    "b q h d, b k h d -> b h q k",
    "a b, b c, c d -> a d",
    "b d ->  d",
    "b d, d, b d -> b",
    "e c d, e d f -> e c f",
    "b (h k), h k d -> b d",
    "b s d, d h k -> b s (h k)",
    "a, b -> a b",
)


def random_call(sampler: Sampler, shape: str) -> tuple[dict[str, int], str, dict[str, int]]:
    """A mesh, `shape` with axes put on it, and sizes: every fate of a partial axis is among them."""
    mesh = sampler.mesh()
    inputs, (output,) = simulator.split_pattern(shape)
    leading = [n for i in (*inputs, output) for dim in simulator.read(i).dims for n, _ in dim[1:]]
    names = list(dict.fromkeys(n for i in inputs for n in simulator.read(i).names))
    axes: dict[str, list[str]] = {name: [] for name in names}
    right = {name: [] for name in simulator.read(output).names}
    gained: dict[str, list[str]] = {name: [] for name in right}
    marked, linear = [], []
    for axis in mesh:
        fate = sampler.choice(["name", "name", "name", "mark", "none"])
        if fate == "mark" and len(inputs) > 1:
            linear.append(axis)
        elif fate != "none":
            name = sampler.choice([n for n in names if n not in leading])
            axes[name].append(axis)
            if name in right:
                right[name].append(axis)
                continue
        if fate != "none" and (fate != "mark" or len(inputs) > 1):
            options = ["sum", "left", *(n for n in right if n not in leading)]
            land = sampler.choice(options)
            if land == "left":
                marked.append(axis)
            elif land != "sum":
                gained[land].append(axis)
    right = {name: [*kept, *gained[name]] for name, kept in right.items()}  # new axes are minor-most
    write = lambda layout, where: "scalar" if layout == "scalar" else " ".join(_words(layout, where))
    left = [write(i, axes) for i in inputs]
    if linear:
        left[0] += f" {{U:{','.join(linear)}}}"
    out = write(output, right)
    if marked:
        out = (out if out != "scalar" else "") + f" {{U:{','.join(marked)}}}"
    sizes = sampler.sizes(names, mesh, [*left, out])
    return mesh, f"{', '.join(left)} -> {out}", sizes


def _words(layout: str, axes: dict[str, list[str]]) -> list[str]:
    words = []
    for dim in simulator.read(layout).dims:
        inside = " ".join("/".join([name, *axes.get(name, [])]) for name, _ in dim)
        words.append(f"({inside})" if len(dim) > 1 else inside)
    return words


def shape_of(layout: str, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(int(np.prod([sizes[n] for n, _ in dim])) for dim in simulator.read(layout).dims)


def test_all_modes_agree_on_a_layer_and_its_gradient() -> None:
    sampler = Sampler(0)
    x, w = (jnp.asarray(sampler.array(s, whole=False)) for s in ((4, 8, 6), (6, 12)))
    value = {}
    for mode in MODES:
        fn = run(
            lambda x, w: einsum(x, w, "b/dp s d, d f/tp -> b/dp s f/tp"),
            MESH,
            ["b/dp s d", "d f/tp"],
            "b/dp s f/tp",
            mode,
        )
        value[mode] = pulled(fn, x, w)
    for mode in ("auto", "reference"):
        jax.tree.map(lambda a, b: close(a, b, 1e-4), value["explicit"], value[mode])


# --- collectives --------------------------------------------------------------------------------------------


COUNTS = [
    ("b/dp f/tp, f/tp d -> b/dp d", {"psum tp": 1}, {"psum tp": 1, "psum dp": 1}),
    (
        "b/dp f/tp, f/tp d -> b/dp d/tp",
        {"psum_scatter tp": 1},
        {"psum_scatter tp": 1, "all_gather tp": 1, "psum dp": 1},
    ),
    (
        "b/dp f/tp, f/tp d -> b/dp/tp d",
        {"psum_scatter tp": 1},
        {"psum_scatter tp": 1, "all_gather tp": 1, "psum dp": 1},
    ),
    ("b f/dp/tp, f/dp/tp d -> b d/tp", {"psum_scatter tp": 1, "psum dp": 1}, None),
    ("b/dp d, d f/tp -> b/dp f/tp", {}, {"psum tp": 1, "psum dp": 1}),
    ("b f/dp/tp, f/dp/tp d -> b d", {"psum dp,tp": 1}, {"psum dp,tp": 1}),
]


@pytest.mark.parametrize(("pattern", "forward", "both"), share(COUNTS))
def test_the_collectives_are_exactly_those_of_the_string(pattern: str, forward: dict, both: dict | None) -> None:
    inputs, (output,) = simulator.split_pattern(pattern)
    x, w = jnp.ones((8, 16)), jnp.ones((16, 24))
    body = lambda x, w: einsum(x, w, pattern)
    assert counts(body, MESH, inputs, output, x, w) == forward
    if both is not None:
        assert backward_counts(body, MESH, inputs, output, x, w) == both


def test_what_is_left_partial_costs_nothing() -> None:
    body = lambda x, w: einsum(x, w, "b f/tp, f/tp d -> b d {U:tp}")
    assert counts(body, MESH, ["b f/tp", "f/tp d"], "b d {U:tp}", jnp.ones((8, 16)), jnp.ones((16, 24))) == {}


def test_axes_of_size_one_behave_the_same() -> None:
    for mesh in ({"dp": 1, "tp": 1}, {"dp": 1, "tp": 4}):
        fn = run(
            lambda x, w: einsum(x, w, "b/dp f/tp, f/tp d -> b/dp d/tp"), mesh, ["b/dp f/tp", "f/tp d"], "b/dp d/tp"
        )
        close(fn(jnp.ones((2, 4)), jnp.ones((4, 8))), jnp.full((2, 8), 4.0))
        with frame(mesh).enter(), pytest.raises(CommunicationError, match="never gathers"):
            einsum(jnp.ones((2, 4)), jnp.ones((4, 8)), "b/dp f/tp, f/tp d -> b d")


def test_a_scalar_result() -> None:
    x = jnp.arange(8.0)
    body = lambda x, y: einsum(x, y, "a/tp, a/tp -> scalar")
    for mode in MODES:
        close(run(body, MESH, ["a/tp", "a/tp"], "scalar", mode)(x, x), jnp.dot(x, x))
    assert counts(body, MESH, ["a/tp", "a/tp"], "scalar", x, x) == {"psum tp": 1}


# --- with the rest of JAX -----------------------------------------------------------------------------------


def test_under_vmap_scan_remat_and_jvp() -> None:
    pattern = "b f/tp, f/tp d -> b d/tp"
    one = lambda x, w: einsum(x, w, pattern)

    def body(x, w):  # x: t b f
        mapped = jax.vmap(one, in_axes=(0, None))(x, w)
        _, scanned = jax.lax.scan(jax.checkpoint(lambda c, row: (c, one(row, w))), 0, x)
        _, tangent = jax.jvp(lambda w: one(x[0], w), (w,), (w,))
        return mapped + scanned + tangent[None]

    x, w = jnp.arange(24.0).reshape(2, 3, 4), jnp.arange(32.0).reshape(4, 8)
    fn = run(body, MESH, ["t b f/tp", "f/tp d"], "t b d/tp")
    expected = lambda x, w: 2 * (x @ w) + (x[0] @ w)[None]
    jax.tree.map(lambda a, b: close(a, b, 1e-3), pulled(fn, x, w), pulled(expected, x, w))


def test_ellipsis_stands_for_the_same_dimensions_everywhere() -> None:
    x, y, w = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 4, 8)), jnp.ones((8, 5))
    with frame(MESH).enter():
        assert einsum(x, w, "... d, d f -> f ...").shape == (5, 2, 3, 4)
        assert einsum(x, y, "... d/tp, ... d/tp -> ...").shape == (2, 3, 4)
        with pytest.raises(LayoutError, match="same dimensions in every operand"):
            einsum(x, y[0], "... d/tp, ... d/tp -> ...")


def test_the_dtype_asked_for_is_the_one_that_travels() -> None:
    body = lambda x, w: einsum(x, w, "b f/tp, f/tp d -> b d", preferred_element_type=jnp.float32)
    x, w = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16)
    fn = run(body, MESH, ["b f/tp", "f/tp d"], "b d")
    assert fn(x, w).dtype == jnp.float32
    assert "f32[2,3]" in fn.lower(x, w).compile().as_text()
    assert tally(fn.lower(x, w).compile(), MESH) == {"psum tp": 1}


def test_keywords_rename_axes_and_none_makes_it_local() -> None:
    body = lambda x, w: einsum(x, w, "b f/tp, f/tp d -> b d", tp=None)
    assert counts(body, MESH, ["b f", "f d"], "b d", jnp.ones((2, 8)), jnp.ones((8, 3))) == {}
    body = lambda x, w: einsum(x, w, "b f/a, f/a d -> b d", a=("dp", "tp"))
    assert counts(body, MESH, ["b f/dp/tp", "f/dp/tp d"], "b d", jnp.ones((2, 8)), jnp.ones((8, 3))) == {
        "psum dp,tp": 1
    }


# --- errors -------------------------------------------------------------------------------------------------


X, W = jnp.ones((4, 8)), jnp.ones((8, 12))


def test_the_comparison_can_fail() -> None:
    """A scatter in the wrong order of axes is noticed."""
    fn = run(lambda x: einsum(x, "b s/tp/dp -> b/tp/dp"), MESH, ["b s/tp/dp"], "b/dp/tp")
    x = jnp.arange(64.0).reshape(8, 8)
    with pytest.raises(AssertionError):
        close(fn(x), x.sum(1))
    right = run(lambda x: einsum(x, "b s/tp/dp -> b/tp/dp"), MESH, ["b s/tp/dp"], "b/tp/dp")
    close(right(x), x.sum(1))
