"""Programs of other libraries with a kernel inside, as `docs/pages/existing-programs.md` lists them.

Each is written once, for any function `mlp` of whole arrays. With the kernel, in each mode, it must find the numbers that
it finds with plain JAX. All packages are in the `test` extra; where one is not installed, its program is skipped.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd import all_gather, einsum, parallel
from spmd.modes import MODES
from tests.sampler import share

PAGE = Path(__file__).resolve().parents[1] / "docs/pages/existing-programs.md"
Mlp = Callable[[Any, Any, Any], Any]
LAYOUTS = {"w_in": "d/dp f/tp", "w_out": "f/tp d/dp"}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8, 8)).astype(np.float32)
WEIGHTS = {"w_in": RNG.normal(size=(8, 16)).astype(np.float32), "w_out": RNG.normal(size=(16, 8)).astype(np.float32)}
PROGRAMS: dict[str, Callable[[Mlp], Any]] = {}


def program(name: str) -> Callable[..., Any]:
    """A program under its name in the page's table: from an `mlp` to numbers."""

    def register(run: Callable[[Mlp], Any]) -> Callable[[Mlp], Any]:
        PROGRAMS[name] = run
        return run

    return register


def plain(x: Any, w_in: Any, w_out: Any) -> Any:
    return jax.nn.gelu(x @ w_in) @ w_out


def body(x: Any, w_in: Any, w_out: Any) -> Any:
    x = all_gather(x, "b/dp s/tp d -> b/dp s d")
    w_in = all_gather(w_in, "d/dp f/tp -> d f/tp")
    h = jax.nn.gelu(einsum(x, w_in, "b/dp s d, d f/tp -> b/dp s f/tp"))
    return einsum(h, all_gather(w_out, "f/tp d/dp -> f/tp d"), "b/dp s f/tp, f/tp d -> b/dp s/tp d")


def mesh_of() -> Any:
    return spmd.make_mesh(dp=2, tp=4)


def kernel_of(fn: Any) -> Any:
    return spmd.kernel("b/dp s/tp d, d/dp f/tp, f/tp d/dp -> b/dp s/tp d", mesh=mesh_of())(fn)


def steps(step: Callable[..., Any], *state: Any) -> Any:
    """The losses of three steps."""
    losses, now = [], list(state)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as their users have it
        for _ in range(3):
            *now, loss = step(*now)
            losses.append(loss)
    return jnp.stack(losses)


# -------------------- modules


@program("Equinox: `filter_jit`")
def equinox_module(mlp: Mlp) -> Any:
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        norm: Any
        w_in: Any
        w_out: Any
        name: str = eqx.field(static=True, default="block")

        def __call__(self, x: Any) -> Any:
            return x + mlp(jax.vmap(jax.vmap(self.norm))(x), self.w_in, self.w_out)

    optimizer = optax.adamw(1e-2)

    @eqx.filter_jit
    def step(block: Any, state: Any) -> Any:
        loss, gradient = eqx.filter_value_and_grad(lambda block: (block(X) ** 2).mean())(block)
        updates, state = optimizer.update(gradient, state, block)
        return eqx.apply_updates(block, updates), state, loss

    block = Block(eqx.nn.RMSNorm(8, use_bias=False), *map(jnp.asarray, WEIGHTS.values()))
    return steps(step, block, optimizer.init(eqx.filter(block, eqx.is_array)))


@program("Flax NNX: `nnx.jit`, `nnx.Optimizer`")
def nnx_module(mlp: Mlp) -> Any:
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.RMSNorm(8, rngs=nnx.Rngs(0))
            self.w_in, self.w_out = (nnx.Param(jnp.asarray(w)) for w in WEIGHTS.values())

        def __call__(self, x: Any) -> Any:
            return x + mlp(self.norm(x), self.w_in[...], self.w_out[...])

    @nnx.jit
    def step(block: Any, optimizer: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda block: (block(X) ** 2).mean())(block)
        optimizer.update(block, gradient)
        return loss

    block = Block()
    optimizer = nnx.Optimizer(block, optax.adamw(1e-2), wrt=nnx.Param)
    return steps(lambda: (step(block, optimizer),))


@program("Flax linen: `nn.compact`, `nn.remat`, `TrainState`")
def linen_module(mlp: Mlp) -> Any:
    nn, train_state = pytest.importorskip("flax.linen"), pytest.importorskip("flax.training.train_state")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            weights = [self.param(name, lambda _, w=w: jnp.asarray(w)) for name, w in WEIGHTS.items()]
            return x + mlp(nn.LayerNorm()(x), *weights)

    model = nn.remat(Block)()
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), X), tx=optax.adamw(1e-2)
    )

    @jax.jit
    def step(state: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda params: (state.apply_fn(params, X) ** 2).mean())(state.params)
        return state.apply_gradients(grads=gradient), loss

    return steps(step, state)


@program("Keras on JAX: `Layer`, `fit`")
def keras_layer(mlp: Mlp) -> Any:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("keras has another backend than jax")

    class Mixer(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            for name, w in WEIGHTS.items():
                start = keras.initializers.Constant(w)
                setattr(self, name, self.add_weight(shape=w.shape, initializer=start, name=name))

        def call(self, x: Any) -> Any:
            return x + mlp(x, self.w_in.value, self.w_out.value)

    model = keras.Sequential([keras.Input(X.shape[1:], batch_size=4), Mixer()])
    model.compile(optimizer=keras.optimizers.SGD(1e-2), loss="mse")
    found = model.fit(X, np.zeros_like(X), batch_size=4, epochs=3, shuffle=False, verbose=0)
    return jnp.asarray(found.history["loss"])


@program("Penzai: `pz.nn.Layer`, selectors")
def penzai_layer(mlp: Mlp) -> Any:
    pz = pytest.importorskip("penzai.pz")

    @pz.pytree_dataclass
    class Mixer(pz.nn.Layer):
        w_in: Any
        w_out: Any

        def __call__(self, x: Any, **_: Any) -> Any:
            return mlp(x, self.w_in, self.w_out)

    model = pz.nn.Sequential([pz.nn.Identity(), Mixer(*map(jnp.asarray, WEIGHTS.values()))])
    halved = pz.select(model).at_instances_of(Mixer).apply(lambda layer: jax.tree.map(lambda w: w / 2, layer))

    @jax.jit
    def step(model: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda model: (model(X) ** 2).mean())(model)
        return jax.tree.map(lambda w, g: w - 0.1 * g, model, gradient), loss

    return steps(step, halved)


# -------------------- optimizers, types, data


def trained(mlp: Mlp, optimizer: Any) -> Any:
    def step(weights: Any, state: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (mlp(X, w["w_in"], w["w_out"]) ** 2).mean())(weights)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    weights, state = WEIGHTS, None
    if mlp is not plain:  # the state lies as the layouts say, also where its rank is not the parameter's
        mesh = mesh_of()
        weights = spmd.shard(WEIGHTS, LAYOUTS, mesh=mesh)
        lay = lambda state: parallel.state_layouts(state, WEIGHTS, LAYOUTS)
        state = spmd.init(optimizer.init, lay, mesh=mesh)(weights)
    return steps(jax.jit(step), weights, optimizer.init(WEIGHTS) if state is None else state)


@program("optax: `adafactor`, whose `v_row` has another rank than its parameter")
def adafactor(mlp: Mlp) -> Any:
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    rows = jax.tree.leaves_with_path(jax.eval_shape(optimizer.init, WEIGHTS))
    assert {leaf.ndim for path, leaf in rows if ".v_row" in jax.tree_util.keystr(path)} == {1}
    return trained(mlp, optimizer)


@program("optax: `chain`, `clip_by_global_norm`, `MultiSteps`")
def accumulating(mlp: Mlp) -> Any:
    return trained(mlp, optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), 2))


@program("jaxtyping and beartype: around a kernel and on its body")
def typed(mlp: Mlp) -> Any:
    jaxtyping, beartype = pytest.importorskip("jaxtyping"), pytest.importorskip("beartype")

    def checked(fn: Any, *names: str) -> Any:
        """The function, with a type for each argument and for its result."""
        types = [jaxtyping.Float[jax.Array, text] for text in names]
        fn.__name__ = "typed"  # of which jaxtyping makes a signature
        fn.__annotations__ = dict(zip(("x", "w_in", "w_out", "return"), types, strict=True))
        return jaxtyping.jaxtyped(typechecker=beartype.beartype)(fn)

    args = tuple(map(jnp.asarray, (X, *WEIGHTS.values())))
    around = checked(lambda x, w_in, w_out: mlp(x, w_in, w_out), "b s d", "d f", "f d", "b s d")
    wrong = checked(lambda x, w_in, w_out: mlp(x, w_in, w_out), "b s d", "d f", "f d", "b s f")
    with pytest.raises(jaxtyping.TypeCheckError):
        wrong(*args)
    if mlp is plain:
        return around(*args), around(*args)
    # of shards: a name that is divided has one size in x and another in a weight
    inner = checked(lambda x, w_in, w_out: body(x, w_in, w_out), "b s d", "_ f", "f _", "b s d")
    return around(*args), jax.jit(kernel_of(inner))(*args)


@program("chex: `dataclass`, assertions, `assert_max_traces`")
def chex_dataclass(mlp: Mlp) -> Any:
    chex = pytest.importorskip("chex")

    @chex.dataclass(frozen=True)
    class Weights:
        w_in: Any
        w_out: Any

    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(weights: Weights) -> Any:
        out = mlp(X, weights.w_in, weights.w_out)
        chex.assert_shape(out, X.shape)
        return out

    weights = Weights(**{name: jnp.asarray(w) for name, w in WEIGHTS.items()})
    if mlp is not plain:
        weights = spmd.shard(weights, Weights(**LAYOUTS), mesh=mesh_of())
    chex.assert_trees_all_close(step(weights), step(weights))
    chex.assert_tree_all_finite(weights)
    return step(weights)


@program("grain: `MapDataset`, shuffled and batched")
def grain_data(mlp: Mlp) -> Any:
    grain = pytest.importorskip("grain")
    data = grain.MapDataset.source(np.concatenate([X, 2 * X])).shuffle(seed=1).batch(4, drop_remainder=True)
    found = []
    for batch in data.to_iter_dataset():
        placed = batch if mlp is plain else spmd.shard(batch, "b/dp s/tp d", mesh=mesh_of())
        found.append(mlp(placed, *WEIGHTS.values()))
    assert len(found) == 2
    return found


@program("Orbax: `StandardCheckpointer`")
def orbax_checkpoint(mlp: Mlp) -> Any:
    import tempfile

    orbax = pytest.importorskip("orbax.checkpoint")
    weights = {name: jnp.asarray(w) for name, w in WEIGHTS.items()}
    target = weights
    if mlp is not plain:
        mesh = mesh_of()
        weights = spmd.shard(WEIGHTS, LAYOUTS, mesh=mesh)
        target = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding), weights)
    with tempfile.TemporaryDirectory() as folder, orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/one", weights)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(f"{folder}/one", target)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, back, weights))
    return mlp(X, back["w_in"], back["w_out"])


# -------------------- the tests


@pytest.mark.parametrize("name", share(PROGRAMS))
def test_with_a_kernel_it_finds_what_plain_jax_finds(name):
    right = PROGRAMS[name](plain)
    for mode in MODES:
        with spmd.mode(mode):
            found = PROGRAMS[name](kernel_of(body))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), found, right)


def test_the_flash_attention_of_jax():
    """Interpreted, as there is no accelerator, on whole rows of the heads of each device."""
    attention = pytest.importorskip("jax.experimental.pallas.ops.gpu.attention")
    flash = lambda q, k, v: attention.mha(q, k, v, None, interpret=True)
    dense = lambda q, k, v: jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k)), v)
    pattern = "b/dp s h/tp d, b/dp s h/tp d, b/dp s h/tp d -> b/dp s h/tp d"
    kernel = spmd.kernel(pattern, mesh=mesh_of())(spmd.opaque(flash, pattern, reference=dense))
    q, k, v = (RNG.normal(size=(2, 16, 4, 16)).astype(np.float32) for _ in range(3))
    scored = lambda fn: jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), (0, 1, 2))
    for mode in MODES:
        run = getattr(kernel, mode)
        np.testing.assert_allclose(run(q, k, v), dense(q, k, v), rtol=1e-4, atol=1e-5)
        for one, two in zip(scored(run)(q, k, v), scored(dense)(q, k, v), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)
    assert spmd.inspect.collectives(kernel, q, k, v).counts == {}
    verdict = spmd.check(kernel, q, k, v).verdict
    assert verdict.kind == "tested" and "The reference stands in for the opaque code" in str(verdict)


def test_the_page_lists_them():
    assert set(PROGRAMS) <= set(re.findall(r"^\| ([^|]+?) \|", PAGE.read_text(), re.MULTILINE))
