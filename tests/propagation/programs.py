"""Programs without kernels, which the compiler divides: by hand, of the examples in auto mode, and drawn from seeds."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from spmd import Layout

SIZES = {"b": 16, "s": 16, "d": 32, "f": 64, "h": 8, "k": 8, "l": 3, "v": 64, "n": 16, "e": 32}


@dataclass(frozen=True)
class Plain:
    """A program: `make(mesh)` gives a function and its arguments."""

    name: str
    kind: str
    make: Callable[[Any], tuple[Callable[..., Any], Sequence[Any]]]


PLAIN: list[Plain] = []


def struct(mesh: Any, layout: str, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    found = Layout(layout)
    shape = tuple(SIZES[name] for name in found.names)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=found.sharding(mesh))


def by_hand(layouts: str, dtypes: str = "") -> Callable[[Any], Any]:
    """Enter a function of arrays that lie like this."""

    def enter(fn: Any) -> Any:
        def make(mesh: Any) -> Any:
            given = [one.strip() for one in layouts.split(",")]
            kinds = dtypes.split() or ["float32"] * len(given)
            return fn, [struct(mesh, one, kind) for one, kind in zip(given, kinds, strict=True)]

        PLAIN.append(Plain(fn.__name__, "by hand", make))
        return fn

    return enter


# --- by hand --------------------------------------------------------------------------------------------------


@by_hand("b/dp d, d f/tp, f/tp d")
def mlp(x, w, v):
    return jax.nn.gelu(x @ w) @ v


@by_hand("b/dp d, d f/tp, f/tp d")
def mlp_gradient(x, w, v):
    return jax.grad(lambda w, v: jnp.sum(mlp(x, w, v) ** 2), argnums=(0, 1))(w, v)


@by_hand("b/dp d, d/dp f/tp, f/tp d/dp")
def fsdp(x, w, v):
    return mlp(x, w, v)


@by_hand("b/dp d, d/dp f/tp, f/tp d/dp")
def fsdp_gradient(x, w, v):
    return mlp_gradient(x, w, v)


@by_hand("b/dp d, d f/tp")
def sorted_batch(x, w):
    return jnp.sort(jnp.tanh(x @ w), axis=0)


@by_hand("b/dp d, d f/tp, f/tp d")
def mlp_sorted(x, w, v):
    return jnp.sort(mlp(x, w, v), axis=0)


@by_hand("b/dp s d")
def normed(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


@by_hand("b/dp s d/tp")
def normed_over_devices(x):
    return normed(x)


@by_hand("b/dp d/tp")
def softmax_over_devices(x):
    return jax.nn.softmax(x, -1)


@by_hand("b/dp s d, d h/tp k, d h/tp k, d h/tp k, h/tp k d")
def attention(x, q, k, v, o):
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in (q, k, v))
    scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k), -1)
    return jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", scores, v), o)


@by_hand("b/dp s d, d h/tp k, d h/tp k, d h/tp k, h/tp k d")
def attention_gradient(x, q, k, v, o):
    return jax.grad(lambda q, o: attention(x, q, k, v, o).sum(), argnums=(0, 1))(q, o)


@by_hand("v/tp d, b/dp s", "float32 int32")
def looked_up(table, ids):
    return table[ids]


@by_hand("v/tp d, b/dp s", "float32 int32")
def looked_up_gradient(table, ids):
    return jax.grad(lambda t: (t[ids] ** 2).sum())(table)


@by_hand("b/dp d, l d f/tp, l f/tp d")
def layers(x, w, v):
    return jax.lax.scan(lambda x, wv: (x + jnp.tanh(x @ wv[0]) @ wv[1], None), x, (w, v))[0]


@by_hand("b/dp d, l d f/tp, l f/tp d")
def layers_gradient(x, w, v):
    return jax.grad(lambda w: layers(x, w, v).sum())(w)


@by_hand("b/dp d, l d/dp f/tp, l f/tp d/dp")
def layers_fsdp_gradient(x, w, v):
    step = jax.checkpoint(lambda x, wv: (x + jnp.tanh(x @ wv[0]) @ wv[1], None))
    return jax.grad(lambda w: jax.lax.scan(step, x, (w, v))[0].sum())(w)


@by_hand("l b/dp d, d/dp f/tp")
def micro_batches(x, w):
    return jax.lax.scan(lambda total, one: (total + jnp.sum(jnp.tanh(one @ w), 0), None), jnp.zeros(64), x)[0]


@by_hand("b/dp s d")
def transposed(x):
    return jnp.transpose(x, (1, 0, 2)).reshape(16, 16 * 32)


@by_hand("b/dp d/tp, b/dp d/tp")
def concatenated(x, y):
    return jnp.concatenate([x, y], axis=1) * 2


@by_hand("b/dp d")
def cumulated(x):
    return jnp.cumsum(x, axis=0)


@by_hand("b/dp d/tp")
def total(x):
    return jnp.sum(x), jnp.max(x, axis=0)


@by_hand("b/dp d, d/tp f")
def contracted(x, w):
    return x @ w


# --- the examples in auto mode --------------------------------------------------------------------------------


def _in_auto(name: str, make: Callable[[Any], tuple[Any, Sequence[Any]]]) -> None:
    def built(mesh: Any) -> Any:
        fn, args = make(mesh)

        def auto(*given: Any) -> Any:
            with spmd.mode("auto"):
                return fn(*given)

        return auto, args

    PLAIN.append(Plain(name, "example in auto mode", built))


def _kernel(pattern: str, body: Any, gradient: bool = False) -> Callable[[Any], Any]:
    def make(mesh: Any) -> Any:
        kernel = spmd.kernel(pattern, mesh=mesh)(body)
        layouts = [one.strip() for one in pattern.partition("->")[0].split(",")]
        args = [struct(mesh, one) for one in layouts]
        if not gradient:
            return kernel, args
        last = len(args) - 1
        return (lambda *given: jax.grad(lambda w: kernel(*given[:-1], w).sum())(given[last])), args

    return make


def _mlp(x, w, v):
    x = spmd.all_gather(x, "b/dp s/tp d -> b/dp s d")
    h = jax.nn.gelu(spmd.einsum(x, spmd.all_gather(w, "d/dp f/tp -> d f/tp"), "b/dp s d, d f/tp -> b/dp s f/tp"))
    v = spmd.all_gather(v, "f/tp d/dp -> f/tp d")
    return spmd.einsum(h, v, "b/dp s f/tp, f/tp d -> b/dp s/tp d")


def _pattern_of_mlp(x, w, v):
    return spmd.nn.mlp(x, w, v, tp="tp")


def _norm(x, scale):
    return spmd.nn.rms_norm(x, scale)


def _softmax(x):
    return spmd.softmax(x, "b/dp [d/tp]")


def _mean(x):
    return spmd.reduce(x, "b/dp d/tp -> d/tp", "mean")


def _relayout(x):
    return spmd.relayout(x, "b/dp d/tp -> b/tp d/dp")


def _shifted(x):
    return x + spmd.shift(x, "[b/dp] d", 1)


_MLP = "b/dp s/tp d, d/dp f/tp, f/tp d/dp -> b/dp s/tp d"
_in_auto("readme_mlp", _kernel(_MLP, _mlp))
_in_auto("readme_mlp_gradient", _kernel(_MLP, _mlp, gradient=True))
_in_auto("column_and_row", _kernel("b/dp s d, d f/tp, f/tp d -> b/dp s d", _pattern_of_mlp))
_in_auto("column_and_row_gradient", _kernel("b/dp s d, d f/tp, f/tp d -> b/dp s d", _pattern_of_mlp, gradient=True))
_in_auto("rms_norm", _kernel("b/dp s d, d -> b/dp s d", _norm))
_in_auto("rms_norm_gradient", _kernel("b/dp s d, d -> b/dp s d", _norm, gradient=True))
_in_auto("softmax", _kernel("b/dp d/tp -> b/dp d/tp", _softmax))
_in_auto("mean", _kernel("b/dp d/tp -> d/tp", _mean))
_in_auto("relayout", _kernel("b/dp d/tp -> b/tp d/dp", _relayout))
_in_auto("shifted", _kernel("b/dp d -> b/dp d", _shifted))


def _examples() -> Any:
    folder = str(Path(__file__).resolve().parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    import llama405b

    return llama405b


def _llama(layers: int, gradient: bool) -> Callable[[Any], Any]:
    def make(mesh: Any) -> Any:
        example = _examples()
        named = spmd.make_mesh(devices=getattr(mesh, "devices", None), abstract=not hasattr(mesh, "devices"), **AXES)
        sizes = {"l": layers, "m": 32, "h": 8, "g": 4, "k": 8, "f": 64, "v": 128}
        loss = example.make_loss(named)
        params, _, _, tokens, labels = example.arguments(named, sizes, batch=8, length=16)
        return (jax.grad(loss) if gradient else loss), (params, tokens, labels)

    return make


AXES = {"dp": 2, "fsdp": 2, "tp": 2}
_in_auto("llama_loss", _llama(2, gradient=False))
_in_auto("llama_gradient", _llama(2, gradient=True))


# --- drawn ----------------------------------------------------------------------------------------------------


def drawn(seed: int) -> Plain:
    """A chain of operations on matrices, whose arguments lie as it happens."""
    rng = random.Random(seed)
    places = [("dp", ""), ("", "tp"), ("dp", "tp"), ("tp", "dp"), ("", ""), ("dp/tp", "")]
    steps = [rng.choice(sorted(_STEPS)) for _ in range(rng.randint(2, 5))]
    layouts = []
    for names in ("b d", *(_STEPS[step][0] for step in steps if _STEPS[step][0])):
        axes = rng.choice(places)
        parts = [f"{name}/{axis}" if axis else name for name, axis in zip(names.split(), axes, strict=True)]
        layouts.append(" ".join(parts))
    gradient = rng.random() < 0.4

    def run(x: Any, *weights: Any) -> Any:
        rest = iter(weights)
        for step in steps:
            x = _STEPS[step][1](x, next(rest)) if _STEPS[step][0] else _STEPS[step][1](x)
        return x

    def make(mesh: Any) -> Any:
        fn = (lambda x, *w: jax.grad(lambda x: (run(x, *w) ** 2).sum())(x)) if gradient else run
        return fn, [struct(mesh, one) for one in layouts]

    return Plain(f"drawn {seed}: {' '.join(steps)}{' gradient' if gradient else ''}", "drawn", make)


_STEPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "dot": ("d n", lambda x, w: jnp.tanh(x @ w) @ w.T),
    "add": ("b d", lambda x, y: x + y),
    "square": ("d e", lambda x, w: x @ w),
    "tanh": ("", jnp.tanh),
    "sort": ("", lambda x: jnp.sort(x, axis=0)),
    "softmax": ("", lambda x: jax.nn.softmax(x, -1)),
    "norm": ("", lambda x: x - x.mean(0, keepdims=True)),
    "cumsum": ("", lambda x: jnp.cumsum(x, 0)),
    "flip": ("", lambda x: x[::-1]),
    "fold": ("", lambda x: jnp.tanh(x.reshape(8, 2, 32)).reshape(16, 32)),
    "loop": ("", lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x * 2 - x.mean(0, keepdims=True), x)),
}


def programs(count: int = 26) -> Iterator[Plain]:
    """The programs that the page counts: those by hand, those of the examples, and as many as it says that are drawn."""
    yield from PLAIN
    yield from map(drawn, range(count))
