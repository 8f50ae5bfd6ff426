"""What branches and the ticks of a pipeline cost, against closed formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import parallel

# The dearest branch counts, and of a pipeline's ticks the dearest that some device runs.

D, B = 64, 32
ONE = 2 * B * D * D  # the FLOPs of one product
FLAT = spmd.accelerators.Hardware(
    "flat", {"float32": float(ONE)}, hbm_bandwidth=1e30, hbm_bytes=80e9, default=spmd.accelerators.Link(1e30)
)


def of(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def seconds(fn, *args, **options):
    """Priced with products alone, each of a second."""
    return spmd.explain(fn, *args, hardware=FLAT, compiled=False, **options)


def twice(w, x):
    return x @ w @ w


def once(w, x):
    return x @ w


# -------------------- an index that is not known


@pytest.mark.parametrize(("branches", "wanted"), [((once, twice), 2), ((twice, once), 2), ((once, once), 1)])
def test_the_dearest_branch_counts(branches, wanted):
    fn = lambda p, w, x: jax.lax.cond(p, *branches, w, x)
    found = seconds(fn, jax.ShapeDtypeStruct((), bool), of(D, D), of(B, D))
    assert found.time.compute == pytest.approx(wanted) and found.time.idle == 0
    assert found.written.matmul_flops == {"float32": wanted * ONE} and not found.written.exact


def test_the_dearest_of_branches_inside_branches():
    def fn(p, q, w, x):
        inner = lambda w, x: jax.lax.cond(q, twice, once, w, x @ w)
        return jax.lax.cond(p, inner, twice, w, x)

    truth = jax.ShapeDtypeStruct((), bool)
    found = seconds(fn, truth, truth, of(D, D), of(B, D))
    assert found.time.compute == pytest.approx(3) and found.written.matmul_flops == {"float32": 3 * ONE}


def test_a_collective_in_the_cheaper_branch_takes_no_time():
    """It is listed as taken, because on some input it runs."""
    mesh = spmd.make_mesh(tp=4, abstract=True)
    link = spmd.accelerators.Hardware(
        "slow", {"float32": 1e30}, hbm_bandwidth=1e30, hbm_bytes=80e9, default=spmd.accelerators.Link(1e6)
    )

    @spmd.kernel("a/tp b, scalar -> a/tp b", mesh=mesh)
    def turn(x, n):
        moved = lambda x: spmd.shift(spmd.shift(x, "[a/tp] b"), "[a/tp] b")
        return jax.lax.switch(n, [moved, lambda x: spmd.shift(x, "[a/tp] b")], x)

    found = spmd.explain(turn, of(8, 4), jax.ShapeDtypeStruct((), jnp.int32), hardware=link, compiled=False)
    assert [one.branch[:8] for one in found.collectives] == ["branch 1"] * 2 + ["branch 2"]
    assert found.time.by_axis == {"tp": pytest.approx(2 * found.collectives[0].bytes / 1e6)} and not found.exact


# -------------------- an index that is known on each device


def test_a_branch_by_the_number_of_the_device():
    """One of four devices multiplies twice, the others once: they wait half of the time."""
    mesh = spmd.make_mesh(pp=4, dp=2, abstract=True)

    @spmd.kernel("b/dp/pp d, d e -> b/dp/pp e", mesh=mesh)
    def run(x, w):
        with spmd.per_shard("the last stage has more to do"):
            return jax.lax.cond(jax.lax.axis_index("pp") == 3, twice, once, w, x)

    found = seconds(run, of(8 * B, D), of(D, D))
    assert found.time.compute == pytest.approx(2) and found.time.idle == pytest.approx(1 - 1.25 / 2)
    assert found.written.matmul_flops == {"float32": pytest.approx(1.25 * ONE)} and found.exact


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 1), (4, 4, 1), (4, 16, 1), (8, 16, 1), (2, 4, 2), (4, 16, 3)])
def test_the_bubble_of_a_table_is_that_of_the_paper(p, m, v):
    """1F1B, also interleaved, with forward and backward ticks that are as dear: (p-1) of v m + p - 1 ticks."""
    schedule = parallel.pipeline_schedule(p, m, v, "1f1b" if m == 4 else "eager-1f1b")
    kinds = {None: 0, "F": 1, "B": 2}
    steps = [[schedule.work(tick, stage) for stage in range(p)] for tick in range(schedule.ticks)]
    table = np.array([[kinds[one and one.part] for one in row] for row in steps], np.int32)
    mesh = spmd.make_mesh(pp=p, abstract=True)

    @spmd.kernel("d/1 e/1, p/pp b d -> p/pp b e", mesh=mesh)
    def run(w, x):
        def tick(x, row):
            kind = row[jax.lax.axis_index("pp")]
            return jax.lax.switch(kind, [lambda x: x, lambda x: x @ w, lambda x: x @ w.T], x), None

        with spmd.per_shard("a table of steps"):
            return jax.lax.scan(tick, x, jnp.asarray(table))[0]

    found = seconds(run, of(D, D), of(p, B, D))
    assert found.time.idle == pytest.approx((p - 1) / (v * m + p - 1))
    assert found.time.compute == pytest.approx(schedule.ticks)
    assert found.written.matmul_flops == {"float32": pytest.approx(2 * v * m * ONE)}


@pytest.mark.parametrize("order", ["1f1b", "eager-1f1b"])
@pytest.mark.parametrize(("p", "m"), [(3, 6), (4, 4), (4, 16), (8, 32)])
def test_a_pipeline_that_takes_steps_in_turn(p, m, order):
    """A forward step has one product, a backward step two, that of the last stage three, which begins with the forward
    step. In m ticks the last stage is in one. In m + p - 2 others some stage is in a backward step, and p are left.
    With ticks of one kind there are p - 1 backward steps without the last stage, and m + p - 2 forward steps."""
    mesh = spmd.make_mesh(pp=p, dp=2, abstract=True)

    @spmd.kernel("p/pp d e, m b/dp d -> scalar", mesh=mesh)
    def run(w, x):
        stage = lambda w, x: spmd.einsum(x, w, "b/dp d, d e -> b/dp e")
        loss = lambda head, y, target: spmd.reduce(y**2, "b/dp d -> {U:dp}")
        return parallel.pipeline_loss(stage, loss, w, None, x, None, pp="pp", data="dp", order=order)

    found = seconds(jax.grad(run), of(p, D, D), of(m, 2 * B, D))
    forward = 2 * (m + p - 2) + p if order == "1f1b" else 2 * (p - 1) + m + p - 2
    total, busy = 3 * m + forward, 3 * m  # all stages have as much work
    assert found.time.compute == pytest.approx(total)
    assert found.time.idle == pytest.approx(1 - busy / total) and found.exact
    assert found.written.matmul_flops == {"float32": pytest.approx(busy * ONE)}
    waiting = f"of it waiting       {found.time.idle * total:.3g} s"
    assert waiting.split() == next(line for line in str(found).splitlines() if "waiting" in line).split()[:5]


@pytest.mark.parametrize("m", [4, 6])
def test_collectives_in_a_branch_are_counted_by_its_steps(m):
    """A stage with tensor parallelism sums in each forward step: m times, not in each of 2(m + p - 1) ticks."""
    mesh = spmd.make_mesh(pp=2, tp=2)

    @spmd.kernel("p/pp d f/tp, p/pp f/tp d, m b d -> scalar", mesh=mesh)
    def run(w, v, x):
        def stage(w, x):
            y = jnp.tanh(spmd.einsum(x, w[0], "b d, d f/tp -> b f/tp"))
            return spmd.einsum(y, w[1], "b f/tp, f/tp d -> b d")

        loss = lambda head, y, target: (y**2).sum()
        return parallel.pipeline_loss(stage, loss, (w, v), None, x, None, pp="pp")

    args = of(2, 4, 4), of(2, 4, 4), of(m, 3, 4)
    found = spmd.explain(jax.grad(run, (0, 1)), *args, hardware="h100", compiled=m == 4)
    sums = [one for one in found.collectives if one.axes == ("tp",)]
    assert sums and all((one.count, one.exact) == (m, True) and one.branch for one in sums)
    assert found.exact
    assert {one.count for one in found.collectives if one.kind == "ppermute"} == {2 * (m + 1)}


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_table_of_so_many_rounds(n):
    """Also of none, as the last hop of a ring of two devices has, and of rows that grow evenly."""
    fn = lambda w, x: jax.lax.scan(lambda x, i: (jax.lax.cond(i % 2 == 0, twice, once, w, x), None), x, jnp.arange(n))
    found = seconds(lambda w, x: fn(w, x)[0], of(D, D), of(B, D))
    assert found.time.compute == pytest.approx(n + (n + 1) // 2)
