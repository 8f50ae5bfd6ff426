"""`check_rule`: which placements of an operation hold, against what algebra says of each."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.language import Pattern
from spmd.testing import Mismatch, Placement, check_rule
from tests.sampler import share

Rule = Callable[[Pattern, str], bool]


def sums(over: str) -> Rule:
    """Linear along each name: terms if the axis divides a name that is summed, and only then."""
    return lambda pattern, axis: (axis in pattern.outputs[0].unreduced) == _divides(pattern, axis, over)


def alone(*names: str) -> Rule:
    """Each element along these names is for itself, and along others all are read at once."""
    return lambda pattern, axis: (
        axis not in pattern.outputs[0].unreduced
        and (not _any(pattern, axis) or any(_divides(pattern, axis, name) for name in names))
    )


def _any(pattern: Pattern, axis: str) -> bool:
    return any(axis in layout.axes for layout in pattern.layouts)


def _divides(pattern: Pattern, axis: str, names: str) -> bool:
    return any(
        axis in layout.axes_of(name) for layout in pattern.layouts for name in names.split() if name in layout.names
    )


# A function on shards, its names, and what algebra says of a placement along one axis.
OPERATIONS: dict[str, tuple[Callable[..., Any], str, Rule]] = {
    "matmul": (lambda x, w: x @ w, "b d, d f -> b f", sums("d")),
    "product and function": (
        lambda x, w: jnp.tanh(x @ w),
        "b d, d f -> b f",
        lambda pattern, axis: not _divides(pattern, axis, "d") and axis not in pattern.outputs[0].unreduced,
    ),
    "sum": (lambda x: x.sum(1), "b d -> b", sums("d")),
    "sine": (jnp.sin, "b d -> b d", alone("b", "d")),
    "softmax": (lambda x: jax.nn.softmax(x, 1), "b d -> b d", alone("b")),
    "sort": (lambda x: jnp.sort(x, 0), "b d -> b d", alone("d")),
    "cumsum": (lambda x: jnp.cumsum(x, 1), "b d -> b d", alone("b")),
    "transposition": (lambda x: x.T, "b d -> d b", alone("b", "d")),
    "attention": (
        lambda q, k, v: jnp.einsum("bst,bte->bse", jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k), -1), v),
        "b s d, b t d, b t e -> b s e",
        lambda pattern, axis: (
            axis not in pattern.outputs[0].unreduced
            and not _divides(pattern, axis, "t")
            and not _divides(pattern, axis, "d")
        ),
    ),
}


@pytest.mark.parametrize(
    "axes", share([{"x": 2}, {"x": 3}, {"x": 2, "y": 3}, {"x": 2, "y": 2}, {"x": 1, "y": 2}]), ids=str
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_placement_holds_where_algebra_says_so(name: str, axes: dict[str, int]) -> None:
    fn, pattern, rule = OPERATIONS[name]
    found = check_rule(fn, pattern, mesh=axes)
    wide = [axis for axis, n in axes.items() if n > 1]
    for one in found:
        wanted = all(rule(one.pattern, axis) for axis in wide)
        assert one.holds is wanted, (str(one.pattern), one.why, wanted)
    names = len({name for layout in Pattern(pattern).layouts for name in layout.names})
    assert len(found) >= (names + 1) ** len(wide) and len({str(one.pattern) for one in found}) == len(found)


def test_what_is_declared_has_to_hold() -> None:
    rows = lambda x: x.sum(1)
    found = check_rule(rows, "b/dp d/tp -> b/dp {U:tp}")
    [declared] = [one for one in found if one.declared]
    assert declared.holds and found[0] is declared and found.mesh == {"dp": 2, "tp": 3}
    with pytest.raises(
        Mismatch, match=r'"b d/tp -> b" does not hold on mesh tp=2: .*equal on tp, and it differs'
    ) as raised:
        check_rule(rows, "b d/tp -> b")
    assert "b d/tp -> b {U:tp}            holds" in str(raised.value)


def test_a_pattern_without_axes_declares_nothing() -> None:
    found = check_rule(lambda x: x.sum(1), "b d -> b")
    assert not any(one.declared for one in found) and found.mesh == {"x": 2, "y": 3}
    assert "b/x d/y -> b/x {U:y}" in found.holding


def test_collectives_of_its_own_hold_where_they_are_written_for() -> None:
    total = lambda x: jax.lax.psum(x.sum(1), "tp")
    found = {str(one.pattern): one.holds for one in check_rule(total, "b d/tp -> b")}
    assert [pattern for pattern, holds in found.items() if holds] == ["b d/tp -> b"]


@pytest.mark.parametrize("sum_of_copies", [jax.lax.psum, jax.lax.pmean])
def test_a_wrong_derivative_does_not_hold(sum_of_copies: Callable[..., Any]) -> None:
    """Each device's gradient of a copy is a term of it, and a mean is no sum."""

    @jax.custom_vjp
    def scaled(x, w):
        return x * w[None]

    def back(kept, g):
        x, w = kept
        return g * w[None], sum_of_copies((g * x).sum(0), "x")

    scaled.defvjp(lambda x, w: (x * w[None], (x, w)), back)
    pattern = "b/x d, d -> b/x d"
    assert pattern in check_rule(scaled, pattern, grad=False).holding
    if sum_of_copies is jax.lax.psum:
        assert pattern in check_rule(scaled, pattern).holding
    else:
        with pytest.raises(Mismatch, match="does not hold on mesh x=2: gradient of args.1.: 2 times too small"):
            check_rule(scaled, pattern)


def test_a_derivative_that_fails_is_not_passed_over() -> None:
    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    def back(kept, g):
        raise RuntimeError("no derivative here")

    doubled.defvjp(lambda x: (2 * x, None), back)
    assert check_rule(doubled, "b/x -> b/x", grad=False).holding == ["b/x -> b/x", "b -> b"]
    with pytest.raises(Mismatch, match="no derivative here"):
        check_rule(doubled, "b/x -> b/x")


def host_sort(x: Any) -> Any:
    """A call that JAX knows nothing about."""
    return jax.pure_callback(lambda v: np.sort(v, -1), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_opaque_code_is_run_and_its_reference_is_not_asked() -> None:
    """The reference is right in all layouts, and the code only where rows are whole."""
    island = lambda x, pattern: spmd.opaque(host_sort, pattern, reference=lambda x: jnp.sort(x, -1))(x)
    found = check_rule(island, "b/dp n -> b/dp n", with_pattern=True, grad=False)
    assert {str(one.pattern): one.holds for one in found} == {
        "b/dp n -> b/dp n": True,
        "b n -> b n": True,
        "b n/dp -> b n/dp": False,
        "b n -> b n {U:dp}": False,
    }


def test_opaque_code_without_devices_is_not_tested() -> None:
    island = lambda x, pattern: spmd.opaque(host_sort, pattern, reference=jnp.sort)(x)
    found = check_rule(island, "b n -> b n", with_pattern=True, grad=False, mesh={"dp": 16})
    [divided] = [one for one in found if str(one.pattern) == "b/dp n -> b/dp n"]
    assert divided.holds is None and "16 devices are not here to run it" in divided.why
    with pytest.raises(Mismatch, match="16 devices are not here"):
        check_rule(island, "b/dp n -> b/dp n", with_pattern=True, grad=False, mesh={"dp": 16})


def test_arguments_sizes_and_dtypes() -> None:
    ids = np.array([0, 3, 1, 2, 3, 0], np.int32)
    table = jax.ShapeDtypeStruct((4, 6), jnp.bfloat16)
    found = check_rule(lambda table, ids: table[ids], "v d, n -> n d", table, ids, mesh={"x": 2})
    assert [str(one.pattern) for one in found if one.holds] == [
        "v d/x, n -> n d/x",
        "v d, n/x -> n/x d",
        "v d, n -> n d",
    ]
    seen: list[Any] = []
    check_rule(lambda x: seen.append(x.shape) or x, "b (h k) 3 -> b (h k) 3", mesh={"x": 2}, h=4, k=6)
    assert {shape[1] for shape in seen} == {24, 12} and {shape[-1] for shape in seen} == {3}


def test_a_reference_says_what_is_meant() -> None:
    """Alone on one device the mistake is there as well."""
    halved = lambda x: x.sum(0) / 2
    assert check_rule(halved, "b d -> d", mesh={"x": 3}).holding
    found = check_rule(halved, "b d -> d", mesh={"x": 3}, reference=lambda x: x.sum(0))
    assert found.holding == [] and "2 times too small" in str(found)


def test_how_it_looks() -> None:
    found = check_rule(lambda x: x.sum(1), "b/tp d -> b/tp")
    assert str(found) == (
        "b/tp d -> b/tp      declared  holds\n"
        "b d/tp -> b {U:tp}            holds\n"
        "b d -> b                      holds\n"
        'b d/tp -> b                   does not hold  result: "b" says equal on tp, and it differs there\n'
        "b d -> b {U:tp}               does not hold  result: 2 times too large: the size of tp"
    )
    again = pickle.loads(pickle.dumps(found))
    assert again == found and again.mesh == found.mesh and isinstance(again[0], Placement)
    assert "<table>" in found._repr_html_()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda: check_rule(cast("Any", 3), "b -> b"), "fn is a function, not an int"),
        (lambda: check_rule(jnp.sin, "... d -> ... d"), "each dimension has a name here"),
        (lambda: check_rule(jnp.sin, "_ d -> _ d"), "each dimension has a name here"),
        (lambda: check_rule(jnp.sin, "1+x/dp+1 -> x/dp"), "each dimension has a name here"),
        (lambda: check_rule(jnp.sin, "b {U:dp} -> b {U:dp}"), "arguments are blocks or copies here"),
        (lambda: check_rule(jnp.sin, "b/dp -> b/dp", mesh={"tp": 2}), "the mesh has no axis dp"),
        (lambda: check_rule(jnp.sin, "b -> b", np.ones(4), np.ones(4)), "1 layouts on the left, and there are 2"),
        (lambda: check_rule(jnp.sin, "b -> b", c=3), "no argument has a dimension c"),
    ],
)
def test_what_is_refused(how: Callable[[], Any], told: str) -> None:
    with pytest.raises(spmd.errors.SpmdError, match=told):
        how()
