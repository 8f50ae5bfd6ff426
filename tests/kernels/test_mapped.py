"""A kernel under `jax.vmap` over a dimension that the mesh divides: it stays divided, and so do gradients."""

import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import VmapWarning
from tests.fresh import run_python
from tests.sampler import Sampler, seeds

MESH = spmd.make_mesh(dp=2, tp=2, ep=2)


def body(x, w):
    return jnp.sin(x) * spmd.reduce(x * w, "d/tp -> scalar") + w


def plain(x, w):
    return jnp.sin(x) * (x * w).sum() + w


def squares(fn):
    return lambda x, w: (fn(x, w) ** 2).sum()


# What is done with a function of a row and weights, under a vmap of both or of one.
TRANSFORMS = {
    "values": lambda fn, vmap: vmap(fn),
    "twice": lambda fn, vmap: vmap(lambda x, w: fn(2 * fn(x, w), w) + x),
    "gradient around": lambda fn, vmap: jax.grad(squares(vmap(fn)), (0, 1)),
    "gradient of each": lambda fn, vmap: vmap(jax.grad(squares(fn), (0, 1))),
    "gradient by weights": lambda fn, vmap: vmap(jax.grad(squares(fn), 1)),
    "value and gradient": lambda fn, vmap: vmap(jax.value_and_grad(squares(fn))),
    "tangents": lambda fn, vmap: vmap(lambda x, w: jax.jvp(fn, (x, w), (w, x))),
    "linearized": lambda fn, vmap: vmap(lambda x, w: jax.linearize(fn, x, w)[1](w, x)),
    "jacobian": lambda fn, vmap: vmap(jax.jacfwd(fn, (0, 1))),
    "hessian": lambda fn, vmap: vmap(jax.hessian(squares(fn))),
    "gradient of gradients": lambda fn, vmap: jax.grad(squares(vmap(jax.grad(squares(fn)))), (0, 1)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("seed", seeds(6))
def test_what_vmap_maps_stays_divided(seed, name):
    """Weights have rows of their own, or are the same for all; then the gradient of each row is asked of them too."""
    sampler = Sampler(seed)
    axes = sampler.choice(["dp", ("dp", "ep"), "ep"])
    places = sampler.choice([(0, 0), (0, None), (1, 0), (1, None)])
    rows = {0: P(axes, "tp"), 1: P("tp", axes), None: P("tp")}
    kernel = spmd.kernel("d/tp, d/tp -> d/tp", mesh=MESH, boundary=sampler.choice(["move", "error"]))(body)
    x, w = (sampler.array({0: (4, 6), 1: (6, 4), None: (6,)}[place], whole=False) / 3 for place in places)
    given = [jax.device_put(y, NamedSharding(MESH, rows[place])) for y, place in zip((x, w), places, strict=True)]
    run = lambda fn: TRANSFORMS[name](fn, lambda of_row: jax.vmap(of_row, places))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = jax.tree.leaves(run(kernel)(*given))
    for one, wanted in zip(found, jax.tree.leaves(run(plain)(x, w)), strict=True):
        scale = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(one, wanted, atol=1e-4 * scale, rtol=1e-4)
        if one.ndim and "around" not in name and name != "gradient of gradients":
            assert one.sharding.spec[0] == axes, f"the rows lie as {one.sharding.spec}"
    # in jit nothing is known of Auto axes, and numbers are the same
    again = jax.tree.leaves(jax.jit(run(kernel.auto if kernel.boundary == "error" else kernel))(*given))
    for one, other in zip(again, found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3, rtol=1e-3)


def test_rows_that_do_not_divide_are_gathered():
    """The batch of one argument is divided over dp, that of another over ep, and together they do not divide it."""
    kernel = spmd.kernel("d/tp, d/tp -> d/tp", mesh=MESH)(body)
    x, w = np.ones((2, 6), np.float32), np.full((2, 6), 2, np.float32)
    put = lambda y, axis: jax.device_put(y, NamedSharding(MESH, P(axis, "tp")))
    with pytest.warns(VmapWarning, match=r'jax.vmap\(fn, spmd_axis_name=\("dp", "ep"\)\)'):
        found = jax.vmap(kernel)(put(x, "dp"), put(w, "ep"))
    np.testing.assert_allclose(found, jax.vmap(plain)(x, w), rtol=1e-6)


def test_types_and_trees_under_vmap():
    """Integers, a key, a number and a tree of results."""
    mesh = MESH

    @spmd.kernel(
        in_layouts=({"x": "d/tp", "n": "scalar"}, "scalar"), out_layouts={"y": "d/tp", "sum": "scalar"}, mesh=mesh
    )
    def fn(tree, by):
        y = tree["x"] * by
        return {"y": y, "sum": spmd.reduce(y, "d/tp -> scalar") + tree["n"]}

    x = jax.device_put(np.arange(24).reshape(4, 6), NamedSharding(mesh, P("dp", "tp")))
    found = jax.vmap(lambda x, n: fn({"x": x, "n": n}, 3))(x, jnp.arange(4))
    np.testing.assert_array_equal(found["y"], 3 * np.asarray(x))
    np.testing.assert_array_equal(found["sum"], 3 * np.asarray(x).sum(1) + np.arange(4))
    assert found["y"].sharding.spec == P("dp", "tp") and found["y"].dtype == x.dtype


def test_explicit_axes_are_kept_by_jax_itself():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    kernel = spmd.kernel("d/tp -> d/tp", mesh=mesh)(lambda x: 2 * x)
    x = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P("dp", "tp")))
    assert jax.vmap(kernel)(x).sharding.spec == P("dp", "tp")


PROGRAM = """
import os, sys
os.environ["XLA_FLAGS"] = f"--xla_dump_to={sys.argv[1]} --xla_dump_hlo_as_text"
import jax, jax.numpy as jnp, numpy as np, spmd
spmd.use_cpu_devices(8)
mesh = spmd.make_mesh(dp=2, tp=4)
body = lambda x, w: jnp.sin(x) * spmd.reduce(x * w, "d/tp -> scalar")
fn = spmd.kernel("d/tp, d/tp -> d/tp", mesh=mesh)(body)
counting = spmd.kernel("d/tp, d/tp -> d/tp", mesh=mesh)(lambda x, w: body(x, w) * spmd.axis_size("dp"))
x, w = (spmd.shard(np.ones(shape, np.float32), lies, mesh=mesh) for shape, lies in (((4, 8), "b/dp d/tp"), (8, "d/tp")))
loss = lambda x, w: (fn(x, w) ** 2).sum()
jax.vmap(fn)(x, x)
jax.grad(lambda x: (jax.vmap(fn)(x, x) ** 2).sum())(x)
jax.vmap(jax.grad(loss))(x, x)
jax.vmap(jax.value_and_grad(loss), (0, None))(x, w)
def gathers(x):
    return jax.vmap(counting)(x, x)
jax.jit(gathers)(x)
jax.jit(lambda x: jax.vmap(fn)(x, x))(x)
jax.jit(jax.grad(lambda x: (jax.vmap(fn)(x, x) ** 2).sum()))(x)
jax.jit(jax.vmap(jax.grad(loss)))(x, x)
"""


def test_no_row_is_sent(tmp_path: Path):
    """Each program that XLA compiled, for calls outside of jit and inside: sums over tp, and nothing along dp. Only what
    names dp itself has its rows gathered inside jit."""
    script, dumped = tmp_path / "program.py", tmp_path / "hlo"
    script.write_text(PROGRAM)
    done = run_python(str(script), str(dumped))
    assert done.returncode == 0, done.stderr
    compiled = {one.name: one.read_text() for one in dumped.glob("*after_optimizations.txt")}
    sends = {
        name: re.findall(r"= \S+ ((?:all|reduce|collective)-[a-z-]+)\(.*?replica_groups=(.*?), (?:use|dim)", text)
        for name, text in compiled.items()
    }
    gathered = [found for name, found in sends.items() if "gathers" in name]
    assert any(verb.startswith("all-gather") for found in gathered for verb, _ in found), "else nothing is compared"
    kept = [(name, *one) for name, found in sends.items() if "gathers" not in name for one in found]
    assert {verb.removesuffix("-start") for _, verb, _ in kept} == {"all-reduce"}
    ours = [groups for name, _, groups in kept if "jit_kernel" in name]  # the others sum the losses of all rows
    over_tp = ("{{0,1,2,3},{4,5,6,7}}", "[2,4]<=[8]", "{'tp'}")  # as compilers write it
    assert len(ours) >= 4 and all(one.endswith(over_tp) for one in ours), ours


def test_jit_warns_only_where_the_body_names_what_may_divide_rows():
    """There the rows are gathered, unless a vmap says how they lie. Elsewhere the compiler knows it."""
    named = spmd.kernel("d/tp -> d/tp", mesh=MESH)(lambda x: x * spmd.axis_size("dp"))
    other = spmd.kernel("d/tp -> d/tp", mesh=MESH)(lambda x: x * 2)
    x = jax.device_put(np.ones((4, 6), np.float32), NamedSharding(MESH, P("dp", "tp")))
    with pytest.warns(
        VmapWarning, match="(?s)inside jax.jit nothing shows whether dp, ep divide it.*the body names some"
    ):
        assert jax.jit(jax.vmap(named))(x).sharding.spec == P(None, "tp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run in (
            jax.vmap(named, spmd_axis_name="dp"),
            jax.vmap(other),
            jax.vmap(jax.grad(lambda x: (named(x) ** 2).sum()), spmd_axis_name="dp"),
        ):
            assert jax.jit(run)(x).sharding.spec == P("dp", "tp")
        inner = jax.jit(jax.vmap(jax.vmap(other)))(x[None])
        assert inner.sharding.spec == P(None, "dp", "tp")
