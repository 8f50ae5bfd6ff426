"""What every device holds: collectives, bodies, loops and branches of the simulator against the compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd._compat import varying_type
from spmd._jaxprs.walker import Role, equations, held, walk
from spmd.checker import _simulator
from spmd.checker._primitives import NotSimulated, numbers_of
from spmd.checker._simulator import Parted, held_number, simulate
from spmd.comm._lax import to_invarying
from tests.checker import test_primitives
from tests.checker.harness import mesh, varying
from tests.checker.twins.registry import load
from tests.sampler import rare, share

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
BOTH = ("dp", "tp")
TURNED = ("tp", "dp")
AROUND = [(i, (i + 1) % 4) for i in range(4)]


def mapped(body: Callable[..., Any], *specs: Any, out: Any = P(BOTH)) -> Callable[..., Any]:
    specs = specs or (P("dp", "tp"),)
    return jax.shard_map(lambda *a: jax.tree.map(varying, body(*a)), mesh=mesh(), in_specs=specs, out_specs=out)


def agrees(fn: Callable[..., Any], *args: Any) -> None:
    """The simulator computes what the compiled program computes."""
    outs, faults = simulate(jax.make_jaxpr(fn)(*args), [held_number(x) for x in args], 10**8)[:2]
    assert not faults
    for one, two in zip(outs, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(one, np.asarray(held_number(two)), rtol=1e-4, atol=1e-5)


def test_a_number_of_the_program_is_rounded_to_its_type() -> None:
    """One that is given to a `jit` is a Python number in the jaxpr, and one that stands in the code is not."""
    x = jnp.ones(3)
    for fn in (lambda x: x * (1 / 3), lambda x: jax.jit(lambda x, n: x * n)(x, 1 / 3)):
        [found] = simulate(jax.make_jaxpr(fn)(x), [held_number(x)], 10**8).outs
        assert (found == float(np.float32(1 / 3))).all()


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "psum": lambda x: (lax.psum(x, "tp"), lax.psum(x, BOTH), lax.psum(x.sum(), TURNED)),
    "extremes": lambda x: (lax.pmax(x, "dp"), lax.pmin(x, BOTH)),
    "signed bits": lambda x: lax.pmax(lax.bitcast_convert_type(x, "int32"), "dp"),
    "mean": lambda x: lax.pmean(x, BOTH),
    "gathers": lambda x: (
        lax.all_gather(x, "tp", axis=1, tiled=True),
        lax.all_gather(x, TURNED, axis=0, tiled=True),
        lax.all_gather(x, BOTH, axis=1),
        lax.all_gather(x, "dp", axis=0, to="invarying"),
    ),
    "scatters": lambda x: (
        lax.psum_scatter(x, "tp", scatter_dimension=0, tiled=True),
        lax.psum_scatter(x, TURNED, scatter_dimension=0, tiled=True),
        lax.psum_scatter(x, "dp", scatter_dimension=1),
    ),
    "exchanges": lambda x: (
        lax.all_to_all(x, "tp", 0, 1, tiled=True),
        lax.all_to_all(x, BOTH, 0, 1, tiled=True),
        lax.all_to_all(x, TURNED, 0, 1, tiled=True),
        lax.all_to_all(x[:4], "tp", 0, 1),
        lax.all_to_all(x.reshape(2, 4, 2), "dp", 0, 2),
    ),
    "permutes": lambda x: (
        lax.ppermute(x, "tp", AROUND),
        lax.ppermute(x, BOTH, [(i, (i + 3) % 8) for i in range(7)]),
        lax.ppermute(x, BOTH, [(0, 5), (5, 1)]),
    ),
    "places": lambda x: (varying(lax.axis_index("dp")), varying(lax.axis_index(TURNED))),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name: str) -> None:
    flat = lambda x: [y.reshape(1, -1) for y in jax.tree.leaves(COLLECTIVES[name](x))]
    agrees(mapped(flat), X)


def test_a_reduction_within_groups() -> None:
    """JAX takes groups only where it does not check types, so the numbers are known here."""
    machine = _simulator.Simulator(100)
    machine.sizes = {"dp": 2, "tp": 4}
    x = np.arange(8.0).reshape(2, 4)
    out = _simulator._within(machine, x, ("tp",), [[0, 2], [1, 3]], np.sum)
    np.testing.assert_array_equal(out, [[2, 4, 2, 4], [10, 12, 10, 12]])


def test_rows_from_anywhere_to_anywhere() -> None:
    """No CPU has a ragged all-to-all. Device i sends its row j to device j."""
    machine = _simulator.Simulator(100)
    machine.sizes = {"tp": 2}
    rows, out = np.array([[1.0, 2.0], [3.0, 4.0]]), np.zeros((2, 2))
    begins, sizes = np.array([[0, 1]] * 2), np.ones((2, 2), int)
    targets = np.array([[0, 0], [1, 1]])
    eqn = type("Eqn", (), {"params": {"axis_name": "tp"}, "primitive": None})
    [found] = _simulator._ragged(machine, eqn, [rows, out, begins, sizes, targets, sizes])
    np.testing.assert_array_equal(found, [[1, 3], [2, 4]])


def test_bodies_in_bodies() -> None:
    def body(x):
        inner = lambda v: lax.psum(v, "tp") * lax.axis_index("dp").astype(v.dtype)
        return jax.shard_map(inner, in_specs=P("tp"), out_specs=P(), axis_names={"tp"})(x)

    outer = jax.shard_map(body, mesh=mesh(), in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    with jax.set_mesh(mesh()):
        agrees(outer, X)


def test_loops() -> None:
    def body(x):
        carry, rows = lax.scan(
            lambda c, r: (c + r.sum() * lax.axis_index("tp").astype(r.dtype), c * r), varying(x[0, 0]), x, reverse=True
        )
        _, none = lax.scan(lambda c, _: (c, x[0]), carry, None, length=0)
        more = lax.while_loop(lambda c: c.sum() < 30, lambda c: c + jnp.abs(x).sum() + 1, varying(jnp.zeros(())))
        return carry[None], rows, more[None], none

    agrees(mapped(body), X)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_a_reduction_by_code_of_ones_own(dims: tuple[int, ...]) -> None:
    """Of two arrays at once, one of which is the same on all devices, with places that differ."""

    def further(one: Any, other: Any) -> Any:
        moved = one[0] < other[0]
        return jnp.where(moved, other[0], one[0]), jnp.where(moved, other[1] * 0.5, one[1])

    def body(x):
        first = varying(x[0, 0] + lax.axis_index("tp").astype(x.dtype))
        found = lax.reduce((x, varying(jnp.ones_like(x))), (first, varying(jnp.float32(3))), further, dims)
        return [y.reshape(1, -1) for y in found]

    agrees(mapped(body), X)


def test_a_loop_that_is_mapped() -> None:
    """Each element ends for itself, and all go on while one does."""

    def body(x):
        def halved(row):
            return lax.while_loop(
                lambda r: jnp.abs(r).max() > 0.5, lambda r: r / 2, row * (lax.axis_index("tp") + 1).astype(row.dtype)
            )

        return jax.vmap(halved)(x), jax.vmap(jax.vmap(halved))(jnp.stack([x, 8 * x]).reshape(2, *x.shape))[1]

    agrees(mapped(body), X)


def test_branches() -> None:
    def body(x):
        which = lax.axis_index("dp") * 2 + lax.axis_index("tp")
        same = lax.cond(lax.psum(1, "tp") > 3, lambda: x, lambda: -x)
        return lax.switch(
            which,
            [lambda: x, lambda: x * 2, lambda: x - 1.0],
        ), same

    agrees(mapped(body), X)


def test_devices_that_part_before_a_collective() -> None:
    def body(x):
        return lax.cond(lax.axis_index("tp") > 0, lambda: varying(lax.psum(x, "tp")), lambda: varying(x))

    with pytest.raises(Parted) as caught:
        simulate(jax.make_jaxpr(mapped(body))(X), [X], 10**6)
    fault = caught.value.fault
    assert (fault.kind, fault.axes, fault.eqn.primitive.name) == ("divergent", ("tp",), "cond")
    along = lambda x: lax.cond(lax.axis_index("dp") > 0, lambda: varying(lax.psum(x, "tp")), lambda: varying(x))
    agrees(mapped(along), X)  # all along tp decide alike


def test_elements_of_a_mapped_loop_wait_for_each_other() -> None:
    """The loop runs as long as one element goes on, on each device as often."""

    def body(x):
        def summed(n):
            return lax.while_loop(
                lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] + lax.psum(x.sum(), "tp")), (n, n * 0.0)
            )

        mine = lax.axis_index("tp")
        rounds = varying(jnp.where(mine % 2 == 0, jnp.array([1.0, 3.0]), jnp.array([3.0, 1.0])))
        return varying(jax.vmap(summed)(rounds)[1])

    agrees(mapped(body), X)


def test_copies_that_are_not_equal() -> None:
    """What is said to be equal is compared where it leaves the body."""
    body = lambda x: to_invarying(x[0], BOTH)
    run = jax.shard_map(body, mesh=mesh(), in_specs=P("dp", "tp"), out_specs=P())
    [_], [fault] = simulate(jax.make_jaxpr(run)(X), [X], 10**6)[:2]
    assert (fault.kind, fault.axes, fault.output) == ("copies", BOTH, 0)


def test_partial_sums_that_leave() -> None:
    explicit = mesh(kind=jax.sharding.AxisType.Explicit)
    spec = P("dp", unreduced={"tp"})
    run = jax.shard_map(
        lambda x: lax.pcast(x.sum(1), "tp", to="unreduced"), mesh=explicit, in_specs=P("dp", "tp"), out_specs=spec
    )
    with jax.set_mesh(explicit):
        given = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=jax.NamedSharding(explicit, P("dp", "tp")))
        [out] = simulate(jax.make_jaxpr(run)(given), [X], 10**6).outs
    np.testing.assert_allclose(out, X.sum(1), rtol=1e-5)


@pytest.mark.parametrize("limit", ["numbers", "rounds"])
def test_too_much_is_said(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_simulator, "_ROUNDS", 3)
    fn = {"numbers": jnp.sin, "rounds": lambda x: lax.while_loop(lambda x: x.sum() < 1e9, lambda x: x + 1, x)}[limit]
    most = 10 if limit == "numbers" else 10**6
    with pytest.raises(NotSimulated, match="too many" if limit == "numbers" else "does not end"):
        simulate(jax.make_jaxpr(fn)(X), [X], most)


def test_a_tracer_is_no_constant() -> None:
    def outer(y):
        with pytest.raises(NotSimulated, match="closes over"):
            simulate(jax.make_jaxpr(lambda x: x * y)(X), [X], 10**6)
        return y

    jax.jit(outer)(1.0)


def test_it_runs_while_another_program_is_traced() -> None:
    def outer(y):
        assert simulate(jax.make_jaxpr(jnp.linalg.cholesky)(np.eye(2)), [np.eye(2)], 10**6)[0][0].shape == (2, 2)
        return y

    jax.jit(outer)(1.0)


PAIRS = [pair for pair in load().values() if pair.predicate is None]


@pytest.mark.parametrize("pair", share(PAIRS, times=2), ids=lambda pair: pair.name)
def test_twins_hold_what_the_compiled_ones_hold(pair: Any) -> None:
    """Right and wrong bodies, in plain JAX, with gradients."""
    args = pair.arguments()
    floats = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)] if not pair.no_gradient else []
    for body in (pair.correct, pair.mistaken):

        def program(*args: Any, body: Any = body) -> Any:
            def scored(*chosen: Any) -> Any:
                full = [*args]
                for i, x in zip(floats, chosen, strict=True):
                    full[i] = x
                outs = jax.tree.leaves(pair.shard_map(body)(*full))
                real = [o for o in outs if jnp.issubdtype(o.dtype, jnp.floating)]
                return sum(((o * jnp.cos(o)).sum().astype(jnp.float32) for o in real), jnp.zeros(())), outs

            if not floats:
                return scored()[1]
            grads, outs = jax.grad(scored, tuple(range(len(floats))), has_aux=True)(*(args[i] for i in floats))
            return grads, outs

        try:
            jaxpr = jax.make_jaxpr(program)(*args)
            outs = simulate(jaxpr, [held_number(x) for x in args], 10**8).outs
        except (ValueError, TypeError, NotSimulated):  # JAX refuses it, or Pallas is in it
            continue
        held = {str(getattr(v.aval, "dtype", "")) for eqn in equations(jaxpr) for v in eqn.outvars}
        rough = not held.isdisjoint(("bfloat16", "float16"))
        for one, two in zip(outs, jax.tree.leaves(jax.jit(program)(*args)), strict=True):
            wanted = np.asarray(held_number(two))
            scale = np.abs(np.nan_to_num(wanted)).max(initial=0)
            np.testing.assert_allclose(
                one, wanted, rtol=3e-2 if rough else 5e-3, atol=(3e-2 if rough else 1e-3) * scale
            )


def test_a_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**_simulator.Simulator.rules, "psum": _simulator.Simulator.rules["pmax"]}
    wrong |= {"psum_invariant": wrong["psum"]}
    monkeypatch.setattr(_simulator.Simulator, "rules", wrong)
    with pytest.raises(AssertionError):
        agrees(mapped(functools.partial(lax.psum, axis_name="tp")), X)


class Typed(_simulator.Simulator):
    """A run that keeps the primitives whose results differ where JAX types them equal."""

    def equation(self, eqn: Any, operands: Any) -> Any:
        outs = super().equation(eqn, operands)
        scalars = any(
            part.role == Role.SCALARS for one in self.callers for part in held(one)
        )  # which have no such types
        typed = self.sizes and "jaxpr" not in eqn.params and not scalars
        for var, x in zip(eqn.outvars, outs, strict=True) if typed else ():
            numbers = numbers_of(x)
            differs = x.shape[0] > 1 and not np.allclose(numbers, numbers[:1], equal_nan=True)
            if differs and "d" not in varying_type(var.aval):
                self.mistyped = {*getattr(self, "mistyped", ()), eqn.primitive.name}
        return outs


@rare
def test_only_a_sort_is_typed_equal_where_it_differs() -> None:
    """Of every primitive that the simulator knows, with each operand differing alone."""
    one = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    found: set[str] = set()
    for name in test_primitives.ON_DEVICES:
        fn, args = test_primitives.PROGRAMS[name]
        for own in range(len(args)):
            stacked = [np.stack([x, x[::-1]]) if i == own else x for i, x in enumerate(args)]

            def body(*given: Any, own: int = own, fn: Any = fn) -> Any:
                outs = fn(*(x[0] if i == own else x for i, x in enumerate(given)))
                return [varying(y, "d")[None] for y in jax.tree.leaves(outs)]

            specs = tuple(P("d") if i == own else P() for i in range(len(args)))
            jaxpr = jax.make_jaxpr(jax.shard_map(body, mesh=one, in_specs=specs, out_specs=P("d")))(*stacked)
            machine = Typed(10**8)
            with _simulator._arithmetic():
                walk(jaxpr, [held_number(x) for x in stacked], machine)
            found |= getattr(machine, "mistyped", set())
    assert found == {"sort"}


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_of_a_few_rounds(reverse: bool) -> None:
    """The first two, and the last; between them stands what the second one made."""
    run = lambda x: lax.scan(lambda n, row: (n + 1, 2 * row), 0, x, reverse=reverse)
    rows = np.arange(6, dtype=np.float32)
    count, found = simulate(jax.make_jaxpr(run)(rows), [held_number(rows)], 10**6, rounds={6: 3, 5: 1}).outs
    assert count == 3 and found.tolist() == ([0, 8, 8, 8, 8, 10] if reverse else [0, 2, 2, 2, 2, 10])
    whole, found = simulate(jax.make_jaxpr(run)(rows), [held_number(rows)], 10**6, rounds={5: 3, 7: 3}).outs
    assert whole == 6 and found.tolist() == (2 * rows).tolist()


def test_a_loop_that_a_test_ends_of_a_few_rounds() -> None:
    run = lambda n: lax.while_loop(lambda n: n < 100, lambda n: n + 1, n)
    few, whole = (simulate(jax.make_jaxpr(run)(0), [np.int32(0)], 10**6, rounds=how).outs for how in ({0: 7}, {}))
    assert few[0] == 7 and whole[0] == 100
