"""Programs as a user writes them, for `pyright` and `mypy` in their strict modes. Nobody runs them.

Both report a `type: ignore` that is not needed, so each of these lines shows that a wrong call is refused.
"""

from __future__ import annotations

from typing import Any, assert_type

import jax

import spmd
from spmd import all_gather, einsum

mesh = spmd.make_mesh(dp=2, tp=4)


@spmd.kernel("b/dp s/tp d, d/dp f/tp, f/tp d/dp -> b/dp s/tp d", mesh=mesh)
def mlp(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    x = all_gather(x, "b/dp s/tp d -> b/dp s d")
    w_in = all_gather(w_in, "d/dp f/tp -> d f/tp")
    h = jax.nn.gelu(einsum(x, w_in, "b/dp s d, d f/tp -> b/dp s f/tp"))
    w_out = all_gather(w_out, "f/tp d/dp -> f/tp d")
    return einsum(h, w_out, "b/dp s f/tp, f/tp d -> b/dp s/tp d")


def calls(x: jax.Array, w: jax.Array) -> None:
    assert_type(mlp(x, w, w), jax.Array)
    assert_type(mlp(x, w_in=w, w_out=w), jax.Array)
    assert_type(mlp.reference(x, w, w), jax.Array)
    assert_type(mlp.on(mesh)(x, w, w), jax.Array)
    mlp(1, 2, 3)  # type: ignore[arg-type]
    mlp(x, w)  # type: ignore[call-arg]
    mlp(x, w, weights=w)  # type: ignore[call-arg]


class Model:
    """A kernel as a method: its instance is the first argument."""

    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh, static="self")
    def double(self, x: jax.Array) -> jax.Array:
        return 2 * x

    def twice(self, x: jax.Array) -> jax.Array:
        assert_type(self.double(x), jax.Array)
        self.double(x, x)  # type: ignore[call-arg]
        return self.double(self.double(x))


Params = dict[str, jax.Array]


def loss(params: Params, x: jax.Array) -> jax.Array:
    y = spmd.nn.mlp(x, params["in"], params["out"], tp="tp")
    return spmd.reduce(y * y, "b/dp d -> {U:dp}", "sum")


@spmd.kernel(in_layouts=({"in": "d f/tp", "out": "f/tp d"}, "b/dp d"), out_layouts={"in": "d f/tp", "out": "f/tp d"})
def step(params: Params, x: jax.Array) -> Params:
    whole = spmd.psum(params, "d {U:dp} -> d")
    assert_type(whole, Params)  # a verb on a tree gives a tree like it
    value, gradients = spmd.value_and_grad(loss, loss="{U:dp}")(params, x)
    assert_type(value, jax.Array)
    spmd.grad(loss)(params)  # type: ignore[call-arg]
    return {name: params[name] - 0.1 * gradients[name] for name in params}


def tools(x: jax.Array) -> None:
    assert_type(spmd.softmax(x, "b/dp [s]"), jax.Array)
    assert_type(spmd.fft.rfft(x, "b/dp [s] -> b/dp [s]"), jax.Array)
    assert_type(spmd.shard(x, "b/dp s", mesh=mesh), jax.Array)
    assert_type(spmd.nn.column_linear(x, (x, x), tp="tp"), tuple[jax.Array, jax.Array])
    spmd.sofmax(x, "b/dp [s]")  # type: ignore[attr-defined]
    spmd.nn.layernorm(x, x)  # type: ignore[attr-defined]
    spmd.reduce(x, "b/dp s -> s", "avg")  # type: ignore[arg-type]
    spmd.all_gather(x, "b/dp s -> b s", to="varing")  # type: ignore[arg-type]
    spmd.relayout(x, "b/dp s -> b s/dp", prefer="speed")  # type: ignore[arg-type]
    spmd.fft.fft(x, "b/dp s -> b/dp k", norm="unitary")  # type: ignore[arg-type]
    spmd.kernel("b/dp s -> b/dp s", boundary="forbid")  # type: ignore[arg-type]
    spmd.kernel("b/dp s -> b/dp s", check="on")  # type: ignore[arg-type]
    with spmd.mode("automatic"):  # type: ignore[arg-type]
        spmd.nn.cross_entropy(x, x, reduction="avg")  # type: ignore[arg-type]
    layout: spmd.Layout = spmd.Layout("b/dp s")
    found = spmd.check(mlp, x, x, x)
    text: str = str(found) + str(layout)
    print(text, spmd.explain(mlp, x, x, x))


@spmd.kernel("n/a d, n/a -> v/a d, n/a, n/a d, n/a", mesh=mesh, v=16)
def simulated(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    table, outside = spmd.scatter_add(x, ids, "n/a d, n/a -> [v/a] d")
    rows, owner, stayed = spmd.exchange(x, ids, "[n/a] d", capacity=4)
    assert_type((rows, owner), tuple[jax.Array, jax.Array])
    assert_type(spmd.exchange({"p": x}, ids, "[n/a] d", capacity=4)[0], Params)
    assert_type(outside + stayed, jax.Array)
    assert_type(spmd.argsort(x, "[n/a] d"), jax.Array)
    wide = spmd.stencil.halo(x, "n/a d -> 1+n/a+1 d")
    assert_type(spmd.stencil.deposit(wide, "1+n/a+1 d -> n/a d"), jax.Array)
    spmd.stencil.deposit(wide, 3)  # type: ignore[arg-type]
    spmd.exchange(x, ids, "[n/a] d")  # type: ignore[call-arg]
    return table, owner, rows, spmd.sort(ids, "[n/a]")


def solved(b: Params, x: jax.Array, weights: Params) -> None:
    """What gets a tree gives a tree of that type."""
    assert_type(spmd.linalg.cg(lambda u: u, b, "x/a"), tuple[Params, jax.Array])
    assert_type(spmd.linalg.gmres(lambda u: u, x, "x/a"), tuple[jax.Array, jax.Array, jax.Array])
    routing = spmd.parallel.router(x, x, k=2)
    assert_type(spmd.parallel.moe(x, routing, x, x, x)[0], jax.Array)
    assert_type(spmd.parallel.pipeline(lambda w, u: u, weights, x, pp="pp"), jax.Array)


def fresh(key: jax.Array, width: int = 8) -> Params:
    return {"in": jax.random.normal(key, (8, width))}


def made(key: jax.Array) -> None:
    assert_type(mesh.devices.size, int)
    abstract = spmd.make_mesh(dp=512, tp=8, abstract=True)
    assert_type(abstract, jax.sharding.AbstractMesh)
    new = spmd.init(fresh, {"in": "d f/tp"}, mesh=mesh)
    assert_type(new(key, width=4), Params)
    new("key")  # type: ignore[arg-type]


def build(mesh: jax.sharding.AbstractMesh) -> tuple[Any, list[Any]]:
    struct: Any = jax.ShapeDtypeStruct  # JAX has no types for its arguments
    return mlp.on(mesh), [struct(shape, "float32") for shape in ((512, 64), (64, 256), (256, 64))]


def chosen() -> dict[str, int]:
    found = spmd.search(build, devices=64, axes=("dp", "tp"), hardware="h100", top=3)
    assert_type(found, spmd.searcher.Search)
    spmd.search(build, axes=("dp", "tp"), hardware="h100")  # type: ignore[call-arg]
    return dict(found.best.mesh)


def train(params: Params, batches: list[jax.Array]) -> Params:
    for batch in batches:
        params = step(params, batch)
    return params


def library(fn: spmd.Kernel[[jax.Array], jax.Array], x: jax.Array, **more: Any) -> jax.Array:
    return fn(x)
