"""Public programs, raw and as kernels: they give what whole arrays give, send the same, and raise no alarm.

`SPMD_TEST_CASES=7 python -m pytest tests/foreign` runs all of them; a twelfth is the default.
"""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from tests.foreign.registry import BODIES
from tests.sampler import rare, share

for kind in ("linear", "experts", "rings", "pipelines", "samplers", "transforms", "statistics", "caches"):
    importlib.import_module(f"tests.foreign.{kind}")

CLOSE = 3e-4
UNTOLD = {"pallas_alone", "pallas_then_sum", "distributed_top_k"}  # opaque, and an oracle with other results


def test_there_are_many_and_each_says_where_it_is_from():
    assert len(BODIES) >= 55
    assert all(re.fullmatch(r"[\w-]+/[\w-]+ [\w./-]+:\d+", body.like) for body in BODIES.values())
    assert len({body.like.split()[0] for body in BODIES.values()}) >= 10


def numbers(fn, args):
    """Results and gradients; results alone where JAX has no gradient of the program."""
    leaves, structure = jax.tree.flatten(args)
    moving = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

    def called(*given):
        filled = dict(zip(moving, given, strict=True))
        return fn(*jax.tree.unflatten(structure, [filled.get(i, x) for i, x in enumerate(leaves)]))

    def along(y):
        weights = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
        return weights.astype(y.dtype) if jnp.issubdtype(y.dtype, jnp.inexact) else np.zeros(y.shape, jax.dtypes.float0)

    def pulled(*given):
        out, pull = jax.vjp(called, *given)
        return {"result": out, "gradient": pull(jax.tree.map(along, out))}

    try:
        return jax.jit(pulled)(*(leaves[i] for i in moving))
    except Exception:
        return {"result": jax.jit(fn)(*args)}


def same(got, wanted):
    shared = {key: wanted[key] for key in got}
    most = max(float(jnp.abs(x).max(initial=0)) for x in jax.tree.leaves(shared))
    near = lambda a, b: np.allclose(a, b, rtol=CLOSE, atol=CLOSE * most, equal_nan=True)
    return all(jax.tree.leaves(jax.tree.map(near, got, shared)))


@pytest.fixture(autouse=True)
def rank_promotion():
    """Public code adds a row to a matrix."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(
    "name", share(BODIES, times=2, always=("gumbel_sample", "ring_attention", "switch_with_capacity"))
)
def test_a_public_program(name):
    body = BODIES[name]
    mesh = spmd.make_mesh(**body.sizes)
    fn, args = body.build(mesh)
    found = spmd.check(fn, *args, build=body.build)
    assert tuple(one.kind for one in found) == (body.finds or body.asks), found
    assert not body.asks or not any(one.certain for one in found)
    assert str(found.source()) and str(spmd.explain(fn, *args))
    told = spmd.check(fn, *args, reference=body.oracle)
    assert tuple(one.kind for one in told) == body.finds, told
    assert told.verdict.kind in ("proved", "tested") or body.finds or name in UNTOLD, told
    if body.finds:
        assert not np.array_equal(fn(*args), body.oracle(*args))
    else:
        assert same(numbers(fn, args), numbers(body.oracle, args))

    ported = spmd.port(body.target, mesh=mesh)
    assert not ported.differences, ported
    assert "results: equal" in ported.same and any(re.match("sent for results: .* in both", one) for one in ported.same)
    stays = [one for one in ported.said if not one.text]
    assert len(stays) == body.stays and all(one.why for one in stays), ported
    assert ("spmd.kernel(" in ported.text) != body.mapped, ported
    assert "check_" + "vma" not in ported.text or body.mapped
    kinds = {one.kind for one in ported.findings}
    assert kinds >= set(body.finds) if body.mapped else kinds == ({"numbers"} if body.own else set()), ported
    assert str(ported.findings.source()) and str(spmd.explain(ported.fn, *args)) and ported.text in str(ported)


def test_copies_that_differ_are_found_without_a_reference():
    """With JAX's checker off nobody else says that devices return different numbers for one."""

    def loss(x):
        return jnp.sum(x**2)

    for complete in (True, False):
        body = (lambda x: jax.lax.psum(loss(x), "dp")) if complete else loss
        raw = jax.shard_map(body, mesh=spmd.make_mesh(dp=4), in_specs=jax.P("dp"), out_specs=jax.P(), check_vma=False)
        found = spmd.check(raw, jax.ShapeDtypeStruct((8,), "float32"))
        assert [one.kind for one in found] == ([] if complete else ["numbers"])
    assert found[0].rule.startswith("output 0 of loss is said to be equal along dp, and devices hold different numbers")


@rare  # ops/test_exchange.py
def test_rows_that_public_code_sends_by_offsets_are_sent_by_their_owners():
    """Tokens go to their experts and come back, as `jax.lax.ragged_all_to_all` does it twice in
    AI-Hypercomputer/maxtext src/maxtext/layers/moe.py, vllm-project/tpu-inference tpu_inference/layers/jax/moe and
    marin-community/marin lib/levanter/src/levanter/grug/_moe/ep_ragged_all_to_all.py. A CPU cannot run that one."""
    experts = spmd.make_mesh(ep=4)

    @spmd.kernel("t/ep d, t/ep, e/ep d -> t/ep d", mesh=experts)
    def routed(x, chosen, w):
        n, t, held, me = spmd.axis_size("ep"), x.shape[0], w.shape[0], spmd.axis_index("ep")
        fill = lambda a, value=0: jnp.concatenate([a, jnp.full((t * (n - 1), *a.shape[1:]), value, a.dtype)])
        with spmd.per_shard("each device's own rows, which come back to it"):
            rows = {"x": fill(x), "e": fill(chosen[:, None]), "home": fill((me * t + jnp.arange(t))[:, None])}
            came, owner, _ = spmd.exchange(rows, fill(chosen // held, -1), "[s/ep] k", capacity=t)
            y = came["x"] * w[jnp.clip(came["e"][:, 0] - me * held, 0, held - 1)]
            home = jnp.where(owner >= 0, came["home"][:, 0] // t, -1)
            back, owner, _ = spmd.exchange({"y": y, "home": came["home"]}, home, "[s/ep] k", capacity=t)
            place = jnp.where(owner >= 0, back["home"][:, 0] - me * t, t)
            return jnp.zeros_like(x).at[place].set(back["y"], mode="drop")

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(16, 3)).astype("float32"), rng.normal(size=(8, 3)).astype("float32")
    chosen = rng.integers(0, 8, 16)
    plain = lambda x, w: x * w[chosen]
    np.testing.assert_allclose(routed(x, chosen, w), plain(x, w), rtol=1e-6)
    loss = lambda fn: jax.grad(lambda x, w: (fn(x, w) ** 2).sum(), argnums=(0, 1))(x, w)
    for got, wanted in zip(loss(lambda x, w: routed(x, chosen, w)), loss(plain), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    spmd.testing.assert_collectives(routed, (x, chosen, w), {"all_gather": {"ep": 2}, "all_to_all": {"ep": 4}})
