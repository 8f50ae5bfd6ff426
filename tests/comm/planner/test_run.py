"""A plan that runs: each device ends with its block, and cotangents of copies are added up once."""

import random

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd.comm.planner._route import Request
from spmd.comm.planner._run import run
from tests.comm.cases import device_mesh
from tests.comm.test_resharding import placements
from tests.sampler import seeds

MESHES = [{"x": 2, "y": 2, "z": 2}, {"x": 2, "y": 4}, {"x": 1, "y": 3, "z": 2}]
SHAPE = (24, 48)


def kernel(request: Request, copies: tuple[str, ...]):
    """The plan in a `shard_map`. A result that is typed varying along `copies` leaves with its copies stacked."""
    mesh = device_mesh(dict(request.mesh))
    spec = lambda placement: [axes or None for axes in placement]

    def body(x):
        x = x.sum(0) if request.summed else x
        x = run(x, request, frozenset(copies))
        return x[None] if copies else x

    ins = P(request.summed, *spec(request.source)) if request.summed else P(*spec(request.source))
    outs = P(copies, *spec(request.target)) if copies else P(*spec(request.target))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs))


def check(request: Request, copies: tuple[str, ...] = ()):
    sizes, rng = dict(request.mesh), np.random.default_rng(0)
    parts = int(np.prod([sizes[a] for a in request.summed], dtype=int))
    given = rng.integers(-9, 9, (parts, *SHAPE) if request.summed else SHAPE).astype(np.float32)
    whole = given.sum(0) if request.summed else given
    out, pull = jax.vjp(kernel(request, copies), given)
    np.testing.assert_array_equal(out, np.broadcast_to(whole, out.shape))
    by = rng.integers(-9, 9, out.shape).astype(np.float32)
    back = by.sum(0) if copies else by  # each copy brings a part of the cotangent
    np.testing.assert_array_equal(jax.jit(pull)(by)[0], np.broadcast_to(back, given.shape))


@pytest.mark.parametrize("seed", seeds(4))
def test_values_and_gradients(seed):
    dice = random.Random(seed)
    mesh = dice.choice(MESHES)
    source, target = (dice.choice(placements(tuple(mesh))) for _ in range(2))
    here, there = ({a for axes in side for a in axes} for side in (source, target))
    copies = tuple(a for a in mesh if a in here - there and dice.random() < 0.5)
    summed = tuple(a for a in mesh if a not in here | there and dice.random() < 0.5)
    prefer = dice.choice(["collectives", "bytes"])
    check(Request(SHAPE, tuple(mesh.items()), source, target, summed, prefer=prefer), copies)


CUBE = (("x", 2), ("y", 2), ("z", 2))
CASES = {
    "a gather to copies of two types": (Request(SHAPE, CUBE, (("x", "y"), ()), ((), ())), ("y",)),
    "a gather of two dimensions": (Request(SHAPE, CUBE, (("x",), ("y",)), ((), ())), ("x",)),
    "slices over an axis that nobody names": (Request(SHAPE, CUBE, ((), ("x", "y")), (("x",), ("y",))), ()),
    "an exchange that leaves copies": (Request(SHAPE, CUBE, (("y", "x"), ()), ((), ("y",))), ("x",)),
    "rounds of sends": (Request(SHAPE, CUBE, (("x",), ("y", "z")), (("z", "y"), ()), prefer="bytes"), ("x",)),
    "a sum that lands": (Request(SHAPE, CUBE, (("x",), ()), ((), ("x",)), ("y",)), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_of_each_kind(name):
    check(*CASES[name])


def test_a_wrong_gradient_would_be_noticed():
    """Meta-test: copies that are each given the whole cotangent make it twice as large."""
    request = Request(SHAPE, CUBE, (("x",), ()), ((), ()))
    mesh = device_mesh(dict(CUBE))
    wrong = jax.shard_map(
        lambda x: jax.lax.all_gather(x, "x", tiled=True)[None], mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    by = np.ones((2, *SHAPE), np.float32)
    ours, theirs = (jax.vjp(fn, np.zeros(SHAPE, np.float32))[1](by)[0] for fn in (kernel(request, ("x",)), wrong))
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, 2)
