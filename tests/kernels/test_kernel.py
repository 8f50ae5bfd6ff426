"""Kernels are functions: pickled and copied by name; and they let go of what they were called with."""

import copy
import functools
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import haliax

X = np.ones((4, 8), np.float32)
MESH = spmd.make_mesh(dp=2, abstract=True)


@spmd.kernel("b/dp d -> b/dp d", mesh=MESH)
def double(x):
    return x * 2


class Model:
    @spmd.kernel("b/dp d -> b/dp d", mesh=MESH, static="self")
    def forward(self, x):
        return x + 1


renamed = spmd.kernel("b/dp d -> b/dp d", mesh=MESH)(lambda x: x)


@spmd.custom_vjp
def with_rule(x):
    return x


@haliax.named_jit
def named(x):
    return x


make = spmd.init(lambda: jnp.zeros(8), "b/dp", mesh=MESH)

AT_THE_TOP = [double, Model.forward, renamed, with_rule, named, make, [double], functools.partial(double, X)]


@pytest.mark.parametrize("value", AT_THE_TOP, ids=lambda value: type(value).__name__)
def test_pickles_and_copies(value):
    pickled = [pickle.loads(pickle.dumps(value, protocol)) for protocol in (2, pickle.HIGHEST_PROTOCOL)]
    for copied in (*pickled, copy.copy(value), copy.deepcopy(value)):
        if isinstance(value, list):
            assert copied[0] is value[0]
        elif isinstance(value, functools.partial):
            assert copied.func is value.func
        else:
            assert copied is value


def test_a_pickled_call():
    """As `concurrent.futures` sends it: the function, bound to what it is called with."""
    reference = pickle.loads(pickle.dumps(double.reference))
    np.testing.assert_array_equal(reference(X), 2 * X)


def test_a_local_kernel():
    local = spmd.kernel("b/dp d -> b/dp d", mesh=MESH)(lambda x: x)
    assert copy.deepcopy({"kernel": local})["kernel"] is local
    with pytest.raises(
        pickle.PicklingError, match=r"by its name in a module.*\n.*made inside a function\nadvice: make it"
    ):
        pickle.dumps(local)


def test_static_arguments_are_let_go():
    """Those of the last 256 calls are kept."""
    mesh = spmd.make_mesh(dp=2)
    traced = []

    class Config:
        pass

    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh, static="config")
    def body(x, config):
        traced.append(1)
        return x

    kept = Config()
    alive = []
    for _ in range(260):
        config = Config()
        alive.append(weakref.ref(config))
        body.reference(X, config)
        body.reference(X, kept)
    del config
    jax.clear_caches()
    gc.collect()
    assert sum(one() is not None for one in alive) <= 255
    count = len(traced)
    body.reference(X, kept)  # what is used again and again stays; the compiled program went with JAX's caches
    assert len(traced) <= count + 1


def test_a_notebook_shows_what_goes_in_and_out():
    mesh = spmd.make_mesh(dp=2, tp=4)
    html = spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)(lambda x: x.sum(1))._repr_html_()
    assert "b/dp d/tp" in html and "dp=2, tp=4" in html and "<td" in html
    anywhere = spmd.kernel(in_layouts=({"w": "d/tp"},), out_layouts="scalar")(lambda tree: tree["w"].sum())
    assert "in force where it is called" in anywhere._repr_html_() and "d/tp" in anywhere._repr_html_()
