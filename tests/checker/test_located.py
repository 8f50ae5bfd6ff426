"""Where numbers alone find a mistake, they name the line at which values stop fitting any layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from tests.checker.twins.registry import load

MESH = spmd.make_mesh(dp=2, tp=4)
ROWS = jax.ShapeDtypeStruct((8, 12), "float32")


def said(fn: Callable[..., Any], *args: Any) -> Any:
    """The one finding on a program that types do not see through."""
    [finding] = spmd.check(fn, *args)
    assert finding.kind == "numbers"
    return finding


def line(body: Callable[..., Any]) -> str:
    """The line of a body that says `# here`."""
    lines, first = inspect.getsourcelines(body)
    [at] = [first + i for i, text in enumerate(lines) if text.rstrip().endswith("# here")]
    return f"test_located.py:{at} "


def kernel(body: Callable[..., Any]) -> Any:
    return spmd.kernel("b/dp d -> b/dp d", mesh=MESH)(body)


def neighbour(x):
    up = jnp.sin(x) * 2.0
    sent = lax.ppermute(up, "dp", [(0, 1)])
    every = jnp.where(lax.axis_index("dp") == 0, x * x.shape[0], sent)  # here
    return jnp.cos(every) + x


def in_a_loop(x):
    def step(carry, _):
        once = carry + jnp.tanh(x)
        return once / x.shape[0], None  # here

    return lax.scan(step, x, length=3)[0]


def in_a_call(x):
    return jax.jit(lambda x: jnp.exp(x) + 1.0)(x) / x.shape[0]  # here


def in_a_late_round(x):
    def step(carry, i):
        wrong = jnp.where(i == 11, jnp.tanh(carry) / x.shape[0], carry)  # here
        return jnp.sin(wrong), None

    return lax.scan(step, x, jnp.arange(17))[0]


def in_a_late_round_of_a_while(x):
    def step(state):
        x_, i = state
        wrong = jnp.where(i > 6, jnp.tanh(x_) / x.shape[0], x_)  # here
        return 0.9 * wrong, i + 1

    return lax.while_loop(lambda state: state[1] < 9, step, (x, 0))[0]


@pytest.mark.parametrize("body", [in_a_loop, in_a_call, in_a_late_round, in_a_late_round_of_a_while])
def test_the_line_is_named(body: Any) -> None:
    finding = said(kernel(body), ROWS)
    assert line(body) in finding.line, finding
    assert any(one.startswith("from ") and "values fit no layout" in one for one in finding.got)


def test_a_verb_between_does_not_hide_the_line() -> None:
    """A verb over one device leaves equations out, so some have none beside them on one device."""

    def transposed(x):
        mean = jnp.tanh(x) / x.shape[0]  # here
        return spmd.all_to_all(mean, "b/dp d -> b d/dp")

    finding = said(spmd.kernel("b/dp d -> b d/dp", mesh=MESH)(transposed), ROWS)
    assert line(transposed) in finding.line, finding
    [number] = [one for one in finding.got if "the number " in one]
    assert number.endswith("the number 4 is 8 on one device: it depends on the size of a block")
    assert line(transposed) in number and "spmd.size" in finding.advice


def test_what_the_line_reads_is_named_too() -> None:
    """A padded block has another size than the padded array, so nobody can say whether it is right."""

    def smoothed(x):
        own = jnp.pad(jnp.tanh(x), ((1, 1), (0, 0)))  # here
        flux = spmd.stencil.halo(x, "b/dp d -> 1+b/dp+1 d") * own
        return flux[2:] - flux[:-2]

    finding = said(kernel(smoothed), ROWS)
    [read] = [one for one in finding.got if one.startswith("it reads values that are not complete")]
    assert line(smoothed) in read and line(smoothed) not in finding.line, finding


def test_a_value_of_another_size_does_not_hide_the_line() -> None:
    """A margin makes a block of another size. What was wrong before it is wrong all the same."""

    def walled(x):
        x = spmd.roll(x, "[b/dp] d", 3)
        wall = jnp.where(jnp.arange(x.shape[0])[:, None] == 0, 0, x)  # here
        wide = spmd.stencil.halo(wall, "b/dp d -> 1+b/dp+1 d")
        return wide[2:] - wide[:-2]

    [finding] = spmd.check(kernel(walled), ROWS)
    assert line(walled) in finding.line


def test_what_is_off_by_the_size_of_an_axis_is_not_blamed_on_what_meets() -> None:
    """Types cannot know that the signs of a ring belong to its blocks. But then no factor would explain all numbers."""

    def loss(x, y):
        n, me, sums = lax.axis_size("dp"), lax.axis_index("dp"), 0 * x[:, 0]
        for i in range(n):
            signs = jnp.where((me - i) % n == me, 2 * jnp.eye(x.shape[0]) - 1, -1.0)
            sums = sums - jax.nn.log_sigmoid(x @ y.T * signs).sum(1)
            y = lax.ppermute(y, "dp", [(j, (j + 1) % n) for j in range(n)])
        return lax.psum(sums.mean(), "dp")  # here

    kernel = spmd.kernel("b/dp d, b/dp d -> scalar", mesh=spmd.make_mesh(dp=4))(loss)
    finding = said(kernel, ROWS, ROWS)
    assert line(loss) in finding.line and "4 times too large: the size of dp" in str(finding)


def test_a_reference_that_one_device_agrees_with_names_the_line() -> None:
    """The equations of a reference are others. Those of the same program on one device are compared."""

    def build(mesh):
        def norms(x):
            squares = jnp.exp(lax.psum((x * x).sum(1), "tp"))
            mean = lax.psum(squares.mean(), "dp")  # here
            return x / mean

        return jax.shard_map(norms, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))

    reference = lambda x: x / jnp.exp((x * x).sum(1)).mean()
    [finding] = spmd.check(build(MESH), ROWS, reference=reference, build=build)
    place, text = finding.line.partition(" ")[0].rsplit(":", 1)
    assert finding.kind == "numbers" and place.endswith("test_located.py"), finding
    assert Path(__file__).read_text().splitlines()[int(text) - 1].endswith("# here")
    [elsewhere] = spmd.check(build(MESH), ROWS, reference=reference)
    assert "fit no layout" in str(finding) and "fit no layout" not in str(elsewhere)


@jax.custom_vjp
def total(x):
    return spmd.psum(x, "d {U:dp} -> d")


def total_forward(x):
    return total(x), None


def total_backward(_, g):
    each = g / lax.axis_size("dp")
    return (lax.pcast(each, "dp", to="varying"),)


total.defvjp(total_forward, total_backward)


def test_the_line_of_a_derivative_is_named() -> None:
    """The results are right. The backward rule divides by the devices, which only the gradient shows."""

    def sums(x):
        return total(jnp.sin(x).sum(0))  # here

    finding = said(spmd.kernel("b/dp d -> d", mesh=MESH)(sums), ROWS)
    assert line(sums) in finding.line, finding


def test_the_line_in_the_second_of_two_kernels() -> None:
    first = kernel(lambda x: x * 2.0)
    second = kernel(in_a_call)
    assert line(in_a_call) in said(lambda x: second(first(x)).sum(), ROWS).line


def test_indices_of_a_divided_table_are_innocent() -> None:
    """They fit no layout, and what is made of them does: in the forward pass. The gradient of the table is a scatter by
    them, of a cotangent that is wrong because of another line."""

    def loss(table, w, ids):
        low = ids - lax.axis_index("tp") * table.shape[0]
        own = (low >= 0) & (low < table.shape[0])
        x = lax.psum(jnp.where(own[:, None], table[jnp.where(own, low, 0)], 0), "tp")
        h = jnp.tanh(x) @ w
        y = lax.pmean(jnp.sin(h) @ w.T, "tp")  # here
        return lax.psum((y * y).sum(), "dp")

    run = spmd.kernel("v/tp d, d f/tp, b/dp -> scalar", mesh=MESH)(loss)
    structs = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 6), (6, 8))]
    finding, *_ = spmd.check(jax.value_and_grad(run, (0, 1)), *structs, jax.ShapeDtypeStruct((8,), "int32"))
    assert line(loss) in finding.line, finding


def test_most_lines_of_mistakes_that_only_numbers_see() -> None:
    """The line that is marked, or one next to it."""
    near = 0
    unseen = [pair for pair in load().values() if pair.unseen]
    for pair in unseen:
        [finding, *_] = spmd.check(pair.kernel(pair.mistaken), *pair.arguments()) or [None]
        if finding is None:  # test_twins says which
            continue
        file, marked = pair.place.split(":")
        place = finding.line.split(" ")[0]
        near += place.split(":")[0].endswith(file) and abs(int(place.split(":")[1]) - int(marked)) <= 1
    assert near >= 13, (near, len(unseen))  # of 22


# -------------------- suspicions beside a mistake


def mean_of_copies(x):
    whole = lax.all_gather(x, "dp", tiled=True)
    scale = lax.pmean(jnp.log(1 + whole**2).sum(), "dp")  # right: a sum of copies, and divided
    return x * scale - lax.psum(x.mean(), "dp")  # here


def diagonal_of_a_block(x):
    turned = jnp.linalg.solve(jnp.diag(2 + x[:, 0] ** 2), x)  # right: each row is for itself
    return turned - lax.psum(turned.mean(), "dp")  # here


@pytest.mark.parametrize("body", [mean_of_copies, diagonal_of_a_block])
def test_a_harmless_suspicion_does_not_take_the_blame(body: Any) -> None:
    [finding] = spmd.check(kernel(body), ROWS)
    assert finding.kind == "numbers" and line(body) in finding.line


def test_the_sum_that_a_gradient_adds_is_told_and_not_what_comes_of_it() -> None:
    @spmd.kernel("d f, b/dp d -> d f", mesh=MESH)
    def step(w, x):
        grad = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
        return lax.pmean(grad, "dp")

    [finding] = spmd.check(step, jax.ShapeDtypeStruct((12, 3), "float32"), ROWS)
    assert finding.kind == "gradient" and "test_located.py" in str(finding)


def test_a_suspicion_where_values_differ_stays() -> None:
    @spmd.kernel("b/dp d -> b/dp d", mesh=MESH)
    def worst(x):
        largest = x.max()
        return x - largest

    findings = spmd.check(worst, ROWS)
    assert [one.kind for one in findings] != ["numbers"] and findings


def test_a_fix_is_printed_where_the_other_operand_is_known() -> None:
    """Completing one of two sums only gives wrong numbers, and nobody sees it any more."""
    ring = lambda n: [(i, (i + 1) % n) for i in range(n)]

    @spmd.kernel("b/dp, b/dp -> scalar", mesh=MESH)
    def centre(p, m):
        p = jnp.concatenate([lax.ppermute(p[-1:], "dp", ring(2)), p[:-1]])
        return lax.pmean((m * p).sum() / m.sum(), "dp")

    rows = jax.ShapeDtypeStruct((8,), "float32")
    [finding] = spmd.check(centre, rows, rows)
    assert not finding.fixes and "the other operand differs along dp" in str(finding)


def test_a_fix_under_vmap_names_the_dimensions_of_the_string() -> None:
    centred = spmd.kernel("b/dp d -> b/dp d", mesh=MESH)(lambda x: x - x.mean(0, keepdims=True))
    many = jax.ShapeDtypeStruct((3, 8, 12), "float32")
    assert not [fix for one in spmd.check(jax.vmap(centred), many) for fix in one.fixes if "-> b" in str(fix)]


def test_a_string_that_does_no_harm_is_not_blamed() -> None:
    """The gradient of a gathered copy is a term of a sum. It is equal on all devices, and types suspect it."""

    def step(square: Callable[..., Any]) -> Any:
        @spmd.kernel("d/tp, b/dp d -> d/tp, scalar", mesh=MESH)
        def body(w, x):
            whole = spmd.all_gather(w, "d/tp -> d")
            loss = lambda w: spmd.reduce((x @ w) ** 2, "b/dp -> scalar", "mean")
            g = spmd.psum_scatter(spmd.grad(loss)(whole), "d {U:tp} -> d/tp")
            return g, square(g)

        return body

    def averaged(g):
        return lax.pmean((g**2).sum(), "tp")  # here

    row = jax.ShapeDtypeStruct((12,), "float32")
    assert line(averaged) in said(step(averaged), row, ROWS).line
    assert not spmd.check(step(lambda g: spmd.reduce(g**2, "d/tp -> scalar")), row, ROWS)
