"""What the tests of `explain` share."""

import functools
import types

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import spmd
from spmd import explain
from spmd.inspect import CollectiveReport, Explanation, collectives
from tests.inspect.programs import arguments, make_loss

DEVICES = spmd.make_mesh(dp=2, tp=4)


def written(fn, args, kwargs, mesh=None):
    """What `explain` says that a program does, before it is compiled."""
    return explain(fn, *args, mesh=mesh, compiled=False, **kwargs).written


def f32(*shape, spec=None, mesh=DEVICES):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=None if spec is None else NamedSharding(mesh, spec))


@functools.cache
def compiled_gradient() -> Explanation:
    return explain(make_loss(DEVICES), *arguments(DEVICES, "float32"), hardware="h100")


def tally(items) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """Times and bytes by kind and axes; a collective that XLA combined counts once per operand. (An all-to-all of one
    array may have an operand per device.)"""
    found: dict = {}
    for one in items:
        times, sent = found.get((one.kind, one.axes), (0, 0))
        each = 1 if one.kind == "all_to_all" else len(getattr(one, "operands", (None,)))
        found[one.kind, one.axes] = (times + one.count * each, sent + one.total_bytes)
    return found


def agree(fn, *args, mesh) -> None:
    """`fn` sends what it says, no more and no less."""
    view = written(fn, args, {}, mesh)
    assert view.exact
    assert tally(view.collectives) == tally(collectives(fn, *args, mesh=mesh))


def of_text(text: str, mesh=None) -> CollectiveReport:
    """The collectives of a compiled program of which only the text is known, as of another compiler."""
    return collectives(types.SimpleNamespace(as_text=lambda: text), mesh=mesh)
