"""Every public layer and every example means the same on any mesh, by `assert_same_on_any_mesh`.

The layers of the registry have their test in `test_layers.py`. Here are all others, and the examples. A few of them run
by default; all of them if SPMD_TEST_CASES is large.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import nn, parallel
from spmd.testing import assert_same_on_any_mesh
from tests.conftest import FULL_CASES, case_count
from tests.layers import CASES, register_all
from tests.sampler import first_seed

register_all()
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

Program = tuple[Any, tuple[Any, ...], dict[str, Any]]
PROGRAMS: dict[str, Callable[[], Program]] = {}
EXAMPLE_PROGRAMS: dict[str, Callable[[], Program]] = {}

# Names of `nn` and `parallel` without a program of their own here: how else they are held, or why they are not.
ELSEWHERE = {
    "kv_cache": "cached_attention",
    "kv_cache_append": "cached_attention",
    "rotary_frequencies": "rotary_embedding",
    "sequence_order": "ring_attention_balanced",
    "sequence_positions": "rotary_embedding",
    **dict.fromkeys(("ClipByGlobalNorm", "MoEReport", "Routing", "PipelineSchedule", "FSDPLayouts", "ZeroLayouts"), ""),
    "LatentWeights": "",
    **dict.fromkeys(("fsdp_layouts", "mapped_layouts", "state_layouts", "pipeline_schedule"), ""),  # compute no arrays
}


def program(fn: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[fn.__name__] = fn
    return fn


def example(fn: Callable[[], Program]) -> Callable[[], Program]:
    EXAMPLE_PROGRAMS[fn.__name__] = fn
    return fn


def struct(*shape: int, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def drawn(programs: dict[str, Any], count: int) -> list[str]:
    order = np.random.default_rng(first_seed()).permutation(sorted(programs))
    return [str(name) for name in order[: max(count, 1)]]


# -------------------- layers


@program
def attention_mask() -> Program:
    @spmd.kernel("b/dp s/cp, b/dp t -> b/dp s/cp t", mesh=spmd.make_mesh(dp=2, cp=4))
    def mask(of_queries: Any, of_keys: Any) -> Any:
        at = spmd.iota("s/cp")[None], spmd.iota("t")[None]
        return nn.attention_mask(at, causal=True, window=3, segments=(of_queries, of_keys))

    return mask, (struct(64, 512, dtype="int32"), struct(64, 512, dtype="int32")), {}


@program
def pipeline_loss() -> Program:
    return _pipeline_loss("1f1b")


@program
def eager_pipeline_loss() -> Program:
    return _pipeline_loss("eager-1f1b")


@program
def pipeline_loss_with_weights_apart() -> Program:
    return _pipeline_loss("zb-h1")


def _pipeline_loss(order: str) -> Program:
    def build(mesh: Any) -> Callable[..., Any]:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(spmd.einsum(x, w, "b/dp d, d e -> b/dp e")), None

        def loss(head: Any, y: Any, target: Any) -> Any:
            error = spmd.einsum(y, head, "b/dp d, d -> b/dp") - target
            return spmd.reduce(error**2, "b/dp -> {U:dp}")

        @spmd.kernel("p/pp l d e, d, m b/dp d, m b/dp -> scalar", mesh=mesh)
        def run(w: Any, head: Any, x: Any, targets: Any) -> Any:
            stage = lambda w, x: jax.lax.scan(layer, x, w)[0]
            return parallel.pipeline_loss(stage, loss, w, head, x, targets, pp="pp", data="dp", order=order)

        return lambda w, *more: run(w.reshape(mesh.shape["pp"], -1, *w.shape[1:]), *more)

    return build, (struct(8, 4, 4), struct(4), struct(3, 8, 4), struct(3, 8)), {"mesh": spmd.make_mesh(dp=2, pp=4)}


@program
def spread_heads() -> Program:
    """Each device has what its queries look at: two heads on four devices, and the same use of them on one."""

    @spmd.kernel("h/tp k, g k -> h/tp k", mesh=spmd.make_mesh(tp=4))
    def attended(queries: Any, heads: Any) -> Any:
        mine = nn.spread_heads(heads, tp="tp")
        return queries * jnp.repeat(mine, queries.shape[0] // mine.shape[0], 0)

    return attended, (struct(8, 6), struct(2, 6)), {}


@program
def balance_bias() -> Program:
    """After a router whose tokens are divided."""

    @spmd.kernel("b/dp s d, d e, e -> e", mesh=spmd.make_mesh(dp=4))
    def bias(x: Any, w: Any, bias: Any) -> Any:
        chosen = parallel.router(x, w, k=2, bias=bias)
        counts = jax.nn.one_hot(chosen.experts, w.shape[1]).sum((0, 1, 2))
        load = spmd.psum(counts, "e {U:dp} -> e")
        return parallel.balance_bias(bias, load / spmd.reduce(load, "e -> scalar"))

    return bias, (struct(64, 6, 8), struct(8, 4), struct(4)), {}


LAYOUTS = {"experts": "e/ep d/dp", "w": "d/dp f", "norm": "d"}
TREE = {"experts": struct(64, 512), "w": struct(512, 128), "norm": struct(512)}


@program
def global_norm() -> Program:
    @spmd.kernel(in_layouts=(LAYOUTS,), out_layouts="scalar", mesh=spmd.make_mesh(ep=2, dp=4))
    def norm(tree: Any) -> Any:
        return parallel.global_norm(tree, LAYOUTS)

    return norm, (TREE,), {}


@program
def clip_by_global_norm() -> Program:
    @spmd.kernel(in_layouts=(LAYOUTS,), out_layouts=LAYOUTS, mesh=spmd.make_mesh(ep=2, dp=4))
    def clipped(tree: Any) -> Any:
        clip = parallel.clip_by_global_norm(1.0, LAYOUTS)
        return clip.update(tree, clip.init(tree))[0]

    return clipped, (TREE,), {}


@program
def reduce_gradients() -> Program:
    @spmd.kernel("b/dp/fsdp d, b/dp/fsdp f -> d/fsdp f", mesh=spmd.make_mesh(dp=2, fsdp=4))
    def outer(x: Any, y: Any) -> Any:
        return parallel.reduce_gradients(x.T @ y, "d/fsdp f", "d f", data=("dp", "fsdp"))

    return outer, (struct(512, 64), struct(512, 32)), {}


@pytest.mark.parametrize("name", drawn(PROGRAMS, case_count() // 3))
def test_layer(name):
    kernel, args, options = PROGRAMS[name]()
    assert_same_on_any_mesh(kernel, *args, **options)


def test_every_public_layer_is_held():
    public = {*nn.__all__, *parallel.__all__}
    known = {name.partition(" ")[0] for name in CASES} | PROGRAMS.keys()
    assert public - known == ELSEWHERE.keys(), "a layer has a case of the registry, a program here, or a reason"
    assert {one for one in ELSEWHERE.values() if one} <= CASES.keys()


# -------------------- examples


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """The examples import each other, and have the promotion rules of users."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
    finally:
        sys.path.remove(str(EXAMPLES))


def module(name: str) -> Any:
    return importlib.import_module(name)


SMALL = {"vocabulary": 28, "layers": 4, "d": 24, "heads": 4, "kv_heads": 2, "head": 6, "hidden": 20}


def transformer_of(mesh: dict[str, int], **config: Any) -> Program:
    """Loss and gradients, of tokens in their order. The gradients are results, and are not differentiated again."""
    transformer = module("transformer")
    c = transformer.Config(**SMALL, **config)

    def build(mesh: Any) -> Callable[..., Any]:
        model = transformer.Transformer(c, mesh)
        parts = mesh.shape.get("cp", 1)

        def step(params: Any, tokens: Any, labels: Any) -> Any:
            order = parallel.sequence_order(tokens.shape[1], parts, model.placement)
            return model.loss_and_gradients(params, tokens[:, order], labels[:, order])

        return step

    params = transformer.new_weights(c, jax.random.key(0))
    draws = np.random.default_rng(1)
    tokens, labels = (draws.integers(low, SMALL["vocabulary"], (8, 16), np.int32) for low in (0, -1))
    return build, (params, tokens, labels), {"mesh": spmd.make_mesh(**mesh), "grad": False}


@example
def transformer() -> Program:
    return transformer_of({"fsdp": 2, "cp": 2, "tp": 2})


@example
def train_moe_long() -> Program:
    """The model of this example: experts, in stages, over long sequences."""
    return transformer_of({"pp": 2, "ep": 2, "cp": 2}, experts=4, chunks=1, micro=2)


@example
def train_lm() -> Program:
    lm = module("train_lm")
    c = lm.read_flags(["--layers=2", "--d=64", "--hidden=48", "--groups=8", "--head=4", "--accumulate=2"])
    params = jax.eval_shape(lambda key: lm.new_parameters(key, c), jax.random.key(0))
    windows = np.random.default_rng(2).integers(0, 256, (16, 17)).astype(np.int32)
    return lm.loss_and_gradients, (params, windows, c), {"mesh": spmd.make_mesh(dp=2, tp=4), "grad": False}


@example
def llama405b() -> Program:
    """The loss with the sizes of 405B parameters: its names become small."""
    llama = module("llama405b")
    mesh = spmd.make_mesh(dp=16, fsdp=128, tp=8, abstract=True)
    sizes = {"l": 126, "m": 16384, "h": 128, "g": 8, "k": 128, "f": 53248, "v": 128256}
    params, *_, tokens, labels = llama.arguments(mesh, sizes, batch=2048, length=8192)
    return llama.make_loss(mesh), (params, tokens, labels), {"mesh": spmd.make_mesh(dp=2, fsdp=2, tp=2)}


@example
def decode() -> Program:
    """What is written after prompts, sampled too; the cache has its slots in the order of the mesh, and stays inside."""
    decode = module("decode")
    c = decode.Config(**{**SMALL, "layers": 2})
    params = decode.Decoder.of(c, spmd.make_mesh(one=1), slots=16).model.init(jax.random.key(0))

    def build(mesh: Any) -> Callable[..., Any]:
        decoder = decode.Decoder.of(c, mesh, slots=16, temperature=0.8)
        read, write = decoder.kernels
        parts = mesh.shape["cp"]

        def written(params: Any, prompts: Any, lengths: Any, keys: Any) -> Any:
            order = parallel.sequence_order(prompts.shape[1], parts, decoder.model.placement)
            cache, first = read(params, prompts[:, order], lengths, keys[0])
            _, second = write(params, cache, first, lengths, keys[1])
            return first, second

        return written

    prompts = np.random.default_rng(3).integers(0, c.vocabulary, (4, 8), np.int32)
    args = params, prompts, np.array([8, 1, 3, 6], np.int32), jax.random.split(jax.random.key(2), 2)
    return build, args, {"mesh": spmd.make_mesh(dp=2, cp=2, tp=2), "grad": False}


@example
def summa() -> Program:
    example = module("summa")
    kernel = spmd.kernel(example.GRID, mesh=spmd.make_mesh(r=2, c=4))(lambda a, b: example.summa(a, b, 2))
    return kernel, (struct(512, 512), struct(512, 512)), {}


@example
def gaussian_process() -> Program:
    example = module("gaussian_process")

    def build(mesh: Any) -> Callable[..., Any]:
        return spmd.kernel(example.GRID, mesh=mesh)(example.likelihood)

    t = np.linspace(0, 4, 16, dtype=np.float32)
    return build, (t, np.sin(3 * t), np.float32(0.7)), {"mesh": spmd.make_mesh(a=4), "rtol": 1e-3}


@example
def waves() -> Program:
    example = module("waves")

    def build(mesh: Any) -> Callable[..., Any]:
        box = example.Box(16, 8, mesh)

        def run(scale: Any) -> Any:
            u, v = box.advance(*(scale * x for x in box.start()), 3)
            return u, v, box.energy(u, v)

        return run

    return build, (jnp.float32(1.5),), {"mesh": spmd.make_mesh(a=2, b=4)}


@example
def spectral_flow() -> Program:
    example = module("spectral_flow")

    def build(mesh: Any) -> Callable[..., Any]:
        flow = example.Flow(8, 50.0, 0.02, mesh)

        def run(scale: Any) -> Any:
            u, gone = flow.advance(scale * flow.start(), jnp.zeros(()), 2)
            return u, gone, flow.measured(u)[:2], flow.vorticity(u)

        return run

    return build, (jnp.float32(1.5),), {"mesh": spmd.make_mesh(a=2, b=2), "rtol": 1e-4}


@example
def particle_mesh() -> Program:
    example = module("particle_mesh")
    times = jnp.array([0.1, 0.5])

    def build(mesh: Any) -> Callable[..., Any]:
        universe = example.Universe(8, mesh, sigma=0.3)
        return lambda white: universe.evolve(white, times)

    white = jnp.cos(jnp.arange(512.0) ** 2).reshape(8, 8, 8)
    return build, (white,), {"mesh": spmd.make_mesh(a=2, b=2), "rtol": 1e-3, "atol": 1e-4}


QUICK = ("summa", "waves")  # of these is the one that always runs
CHOSEN = EXAMPLE_PROGRAMS if case_count() > FULL_CASES else {name: EXAMPLE_PROGRAMS[name] for name in QUICK}


@pytest.mark.parametrize("name", drawn(CHOSEN, case_count() // 6))
def test_example(name):
    with importing():
        kernel, args, options = EXAMPLE_PROGRAMS[name]()
        assert_same_on_any_mesh(kernel, *args, **options)


def test_every_example_is_held():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert EXAMPLE_PROGRAMS.keys() == scripts - {"text_bytes"}  # plain NumPy
