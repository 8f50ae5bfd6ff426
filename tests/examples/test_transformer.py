"""The reference transformer: one training step is the same under every product of parallelisms."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import spmd
from tests.sampler import rare, share

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROWS, LENGTH = 8, 16
SIZES = {"vocabulary": 28, "layers": 4, "d": 24, "heads": 4, "kv_heads": 2, "head": 6, "hidden": 20}
TOKENS, LABELS = (
    np.random.default_rng(0).integers(low, SIZES["vocabulary"], (ROWS, LENGTH), np.int32) for low in (0, -1)
)

DENSE = {"chunks": 2}
MOE = {"experts": 4, "chosen": 2, "chunks": 1}
IN_STAGES = {"micro": 2, "chunks": 1}
WITHOUT_SP = {"stream": None}

# What is computed, where, and changes to the mapping. No token is dropped, so that groups do not matter.
PRODUCTS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "dp": (DENSE, {"dp": 8}, {}),
    "fsdp": (DENSE, {"fsdp": 8}, {}),
    "hsdp x tp x sp": (DENSE, {"dp": 2, "fsdp": 2, "tp": 2}, {}),
    "tp x sp, half a key head each": (DENSE, {"tp": 4}, {}),
    "cp": ({**DENSE, "chunks": 1}, {"cp": 4}, {}),
    "cp by all-to-alls x tp x sp": ({**DENSE, "context": "ulysses"}, {"cp": 2, "tp": 2}, {}),
    "fsdp x cp x tp x sp": (DENSE, {"fsdp": 2, "cp": 2, "tp": 2}, {}),
    "pp": (IN_STAGES, {"pp": 4}, {}),
    "pp x dp x tp": (IN_STAGES, {"pp": 2, "dp": 2, "tp": 2}, WITHOUT_SP),
    "pp x fsdp x tp x sp": (IN_STAGES, {"pp": 2, "fsdp": 2, "tp": 2}, {}),
    "ep": (MOE, {"ep": 4}, {}),
    "dp x ep x tp": (MOE, {"dp": 2, "ep": 2, "tp": 2}, WITHOUT_SP),
    "fsdp x ep x tp x sp": (MOE, {"fsdp": 2, "ep": 2, "tp": 2}, {}),
    "cp x ep x tp x sp": (MOE, {"cp": 2, "ep": 2, "tp": 2}, {}),
    "pp x ep x cp": ({**MOE, **IN_STAGES}, {"pp": 2, "ep": 2, "cp": 2}, {}),
}


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """The example."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("transformer")
    finally:
        sys.path.remove(str(EXAMPLES))


class Steps:
    """Loss, gradient norm and gradients of one step."""

    def __init__(self, module: Any):
        self.module = module
        self.weights: dict[Any, Any] = {}
        self.known: dict[Any, Any] = {}

    def __call__(self, config: dict[str, Any], mesh: dict[str, int], changes: Any = (), mode: str = "explicit") -> Any:
        model = self.model(config, mesh, changes)
        with spmd.mode(mode):
            params = spmd.shard(self.new_weights(model.c), model.layouts, mesh=model.mesh)
            tokens, labels = (model.place(x) for x in (TOKENS, LABELS))
            step = jax.jit(lambda *args: step_of(model, *args))
            return jax.tree.map(np.asarray, step(params, tokens, labels))

    def model(self, config: dict[str, Any], mesh: dict[str, int], changes: Any = ()) -> Any:
        module = self.module
        return module.Transformer(
            module.Config(**SIZES, **config), spmd.make_mesh(**mesh), module.MAPPING.merge(dict(changes))
        )

    def new_weights(self, c: Any) -> Any:
        if c.experts not in self.weights:
            self.weights[c.experts] = jax.jit(lambda key: self.module.new_weights(c, key))(jax.random.key(0))
        return self.weights[c.experts]

    def on_one_device(self, config: dict[str, Any]) -> Any:
        """Chunks are of no account on one device, nor how attention reaches over several; micro-batches to experts."""
        free = ("context", "chunks") if "experts" in config else ("context", "chunks", "micro")
        config = {name: value for name, value in config.items() if name not in free}
        key = tuple(sorted(config.items()))
        if key not in self.known:
            self.known[key] = self(config, {"one": 1})
        return self.known[key]


def step_of(model: Any, *args: Any) -> Any:
    loss, report, gradients = model.loss_and_gradients(*args)
    return loss, optax.global_norm(gradients), (report, gradients)


@pytest.fixture(scope="module")
def steps(module) -> Steps:
    return Steps(module)


def compare(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found[:2], wanted[:2], rtol=1e-5)
    leaves = zip(jax.tree_util.tree_leaves_with_path(found[2]), jax.tree.leaves(wanted[2]), strict=True)
    for (path, a), b in leaves:
        assert a.shape == b.shape and a.dtype == np.float32
        off = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-3)
        assert off < 1e-5, f"{jax.tree_util.keystr(path)}: off by {off:.1e} of its largest element"


@pytest.mark.parametrize("name", share(PRODUCTS, times=3))
def test_every_product_computes_what_one_device_does(steps, name):
    config, mesh, changes = PRODUCTS[name]
    compare(steps(config, mesh, changes), steps.on_one_device(config))


@pytest.mark.parametrize(
    ("name", "mode"),
    share([("fsdp x cp x tp x sp", "auto"), ("dp x ep x tp", "auto"), ("cp x ep x tp x sp", "reference")]),
)
@rare  # every layer of it runs in every mode: test_layers.py
def test_other_modes(steps, name, mode):
    config, mesh, changes = PRODUCTS[name]
    compare(steps(config, mesh, changes, mode), steps.on_one_device(config))


@pytest.mark.parametrize(("rounds", "order"), share([(None, [0, 1, 2, None]), (2, [0, 2, 1, None])]))
@rare
def test_uneven_stages(module, rounds, order):
    """Three layers on two stages: the fourth slot does nothing, and its weights get no gradient. With rounds, the stack
    is in the order of the stages."""
    sizes, found = {**SIZES, "layers": 3}, []
    weights = jax.jit(lambda key: module.new_weights(module.Config(**sizes), key))(jax.random.key(0))

    def in_slots(tree: Any) -> Any:
        rows = lambda x: np.stack([np.zeros(x.shape[1:], x.dtype) if i is None else np.asarray(x[i]) for i in order])
        return {**tree, "layers": jax.tree.map(rows, tree["layers"])}

    staged = module.Config(**sizes, micro=4, slots=4, rounds=rounds)
    for c, mesh, params in (
        (module.Config(**sizes), {"one": 1}, weights),
        (staged, {"pp": 2, "dp": 2, "tp": 2}, in_slots({**weights})),
    ):
        model = module.Transformer(c, spmd.make_mesh(**mesh))
        params = spmd.shard(params, model.layouts, mesh=model.mesh)
        tokens, labels = (model.place(x) for x in (TOKENS, LABELS))
        loss, _, gradients = jax.jit(model.loss_and_gradients)(params, tokens, labels)
        found.append((loss, jax.tree.map(np.asarray, gradients)))
    (loss, wanted), (other, gradients) = found
    np.testing.assert_allclose(other, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, in_slots(wanted))


def test_axes_of_size_one_change_nothing(module):
    """A mesh of a search has all axes. With pp=1 there is no pipeline, which would keep the inputs of all layers."""
    c, found = module.Config(**SIZES, **DENSE), []
    for mesh in ({"fsdp": 2}, {"dp": 1, "fsdp": 2, "cp": 1, "tp": 1, "ep": 1, "pp": 1}):
        model = module.Transformer(c, spmd.make_mesh(**mesh, abstract=True))
        params = jax.eval_shape(lambda key: module.new_weights(c, key), jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32)
        found.append(spmd.explain(model.loss_and_gradients, params, tokens, tokens))
    one, other = ((it.memory.peak, it.counts, it.total_bytes, it.written.flops) for it in found)
    assert one == other


def test_a_step_sends_what_the_formulas_say(steps):
    """FSDP x tensor x sequence parallel: nothing but weights, the stream, the loss's numbers and the norms' gradients."""
    model = steps.model(DENSE, {"fsdp": 2, "tp": 2})
    c, half = model.c, 1 / 2  # (n - 1)/n on either axis
    params = spmd.shard(steps.new_weights(c), model.layouts, mesh=model.mesh)
    args = (params, model.place(TOKENS), model.place(LABELS))
    found = spmd.inspect.collectives(model.loss_and_gradients, *args).by_axis()
    size = lambda *names: sum(4 * (params["layers"].get(n, params.get(n))).size for n in names)
    matrices, tables = size("query", "key", "value", "out", "gate", "up", "down"), size("embed", "unembed")
    stream = 4 * ROWS // 2 * LENGTH * c.d
    numbers = 24 * ROWS // 2 * LENGTH
    norms = size("norm_attention", "norm_mlp", "norm")
    scalars = 2 * 2 * 4  # the loss's sum and count
    assert found["fsdp"].total_bytes == (3 * matrices + 2 * tables) / 2 * half + scalars * half
    assert found["tp"].total_bytes == (8 * c.layers + 4) * stream * half + numbers * half
    assert found["fsdp/tp"].total_bytes == 2 * norms * 3 / 4 and set(found) == {"fsdp", "tp", "fsdp/tp"}


@rare
def test_steps_with_an_optimizer(module, steps):
    """The state stays where it was, and three steps lead where they lead on one device."""
    ends = []
    for mesh in ({"fsdp": 2, "tp": 2}, {"one": 1}):
        model = steps.model({"chunks": 1}, mesh)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax needs them
            optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
            state = model.new_state(jax.random.key(0), optimizer)
            step = model.train_step(optimizer)
            before = jax.tree.map(lambda x: x.sharding, state)
            for _ in range(3):
                state, report = step(state, model.place(TOKENS), model.place(LABELS))
        jax.tree.map(lambda x, was: x.sharding.is_equivalent_to(was, x.ndim) or pytest.fail(str(was)), state, before)
        ends.append((float(report["loss"]), float(report["gradient_norm"])))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-4)
