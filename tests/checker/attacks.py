"""Attacks: wrong programs that try to be called right, because no draw shows what is wrong. Beside each stands its twin.

    @attack("n/tp d -> n/tp d", f32(16, 8), shows=normal(16, 8, scale=1e3))
    def clipped_by_a_local_norm(x):
        return x * jnp.minimum(1.0, 1e3 / norm(x))  # unreached

    clipped_by_a_local_norm.right(lambda x: x * jnp.minimum(1.0, 1e3 / jnp.sqrt(lax.psum((x * x).sum(), "tp"))))
    clipped_by_a_local_norm.whole(lambda x: x * jnp.minimum(1.0, 1e3 / norm(x)))

`spmd.check` gets the arguments behind the pattern: structs, or arrays. On them nothing is wrong, or on what is drawn for
them. On the arguments `shows` the wrong body is wrong, and the right one right: plain JAX says so, on devices. What the
verdict has to name, if nothing is found, is a line with the comment `# unreached`. Behind a colon may stand a text that
the verdict may have in its place: `# unreached: gradient`.

`python -m tests.checker.attacks` prints what the checker says of each.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import spmd
from spmd.language import Pattern
from tests.checker.twins.registry import Pair

ATTACKS: dict[str, Attack] = {}

# Sentences that are no word about a side that no draw took: a suspicion that is not cleared is a finding.
OTHERS = ("Types suspect", "Types lose", "Gradients are not compared")


@dataclass
class Attack(Pair):
    """A wrong body, a right one, and what both compute on whole arrays.

    Attributes:
      given: What `spmd.check` is given.
      shows: Arguments on which the wrong body is wrong.
      devices: The mesh on which it is, where `mesh` has too many devices for a test.
      verbs: Whether bodies have verbs of ours, which run in a kernel alone.
      around: From a kernel to the program that is checked.
      helpers: Functions that have marked lines too.
    """

    given: Sequence[Any] = ()
    shows: Sequence[Any] = ()
    devices: dict[str, int] = field(default_factory=dict)
    verbs: bool = False
    around: Callable[[Any], Any] = lambda kernel: kernel
    helpers: Sequence[Callable[..., Any]] = ()

    def program(self, body: Callable[..., Any]) -> Any:
        """What is checked. A mesh of more than eight devices has none."""
        mesh = spmd.make_mesh(**self.mesh, abstract=math.prod(self.mesh.values()) > 8)
        return self.around(spmd.kernel(str(self.pattern), mesh=mesh)(body))

    def on_devices(self, body: Callable[..., Any]) -> Any:
        """The same on devices, and nobody checks it."""
        mesh = spmd.make_mesh(**(self.devices or self.mesh))
        if self.verbs:
            return self.around(spmd.kernel(str(self.pattern), mesh=mesh, check="off")(body))
        ins, outs = ([lay.spec for lay in side] for side in (self.pattern.inputs, self.pattern.outputs))
        out = outs[0] if len(outs) == 1 else tuple(outs)
        return self.around(jax.shard_map(body, mesh=mesh, in_specs=tuple(ins), out_specs=out))

    def marks(self) -> tuple[list[str], list[str]]:
        """The lines that are marked, `attacks.py:12`, and the texts that may stand for them."""
        lines, texts = [], []
        for fn in (self.mistaken, *self.helpers):
            written, first = inspect.getsourcelines(fn)
            for number, line in enumerate(written, first):
                if found := re.search(r"# unreached(?:: (.*))?$", line.rstrip()):
                    lines.append(f"attacks.py:{number}")
                    texts += [found[1]] if found[1] else []
        return lines, texts


def attack(
    pattern: str,
    *given: Any,
    shows: Any,
    mesh: dict[str, int] | None = None,
    **how: Any,
) -> Callable[[Callable[..., Any]], Attack]:
    """Register a wrong body. Without `mesh`, one axis has four devices, and of two the first one two."""

    def register(body: Callable[..., Any]) -> Attack:
        name, read = body.__name__, Pattern(pattern)
        assert name not in ATTACKS, f"two attacks are named {name}"
        axes = list(dict.fromkeys(axis for layout in read.layouts for axis in layout.axes))
        sizes = mesh or dict(zip(axes[::-1], (4, 2), strict=False))
        shown = shows if isinstance(shows, tuple) else (shows,)
        ATTACKS[name] = Attack(name, read, sizes, {}, body, given=given, shows=shown, **how)
        return ATTACKS[name]

    return register


# -------------------- arguments


def struct(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(jnp.float32, *shape)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(jnp.int32, *shape)


def flags(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(jnp.bool_, *shape)


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def changed(x: np.ndarray, at: Any, value: Any) -> np.ndarray:
    """The same array with another value somewhere."""
    x = x.copy()
    x[at] = value
    return x


# -------------------- what is said of them


def outcome(attack: Attack, fn: Callable[..., Any]) -> list[np.ndarray] | str:
    """The results for what shows the mistake, or the error."""
    try:
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*attack.shows))]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def same(found: Any, wanted: Any, tolerance: float = 1e-3) -> bool:
    """Whether results are equal but for rounding. Infinite numbers are equal to themselves."""
    if isinstance(found, str) or isinstance(wanted, str) or len(found) != len(wanted):
        return False

    def close(a: np.ndarray, b: np.ndarray) -> bool:
        finite = np.abs(b[np.isfinite(b)]).max(initial=1e-30)
        return a.shape == b.shape and np.allclose(a, b, rtol=0, atol=tolerance * finite, equal_nan=True)

    return all(map(close, found, wanted))


def overclaim(attack: Attack, found: Any) -> str:
    """What a verdict on the wrong body says beyond what was looked at; "" if a finding, or a line, tells."""
    verdict = found.verdict
    if found:
        return ""
    if verdict.kind not in ("tested", "not tested"):
        return f"{verdict}"
    lines, texts = attack.marks()
    reasons = [*verdict.unreached, *(one for one in verdict.reasons if not one.startswith(OTHERS))]
    named = any(re.search(rf"\b{re.escape(line)}\b", one) for line in lines for one in reasons)
    told = any(re.search(rf"\b{re.escape(text)}\b", one) for text in texts for one in (*verdict.unreached, *verdict.reasons))
    return "" if named or told else f"{verdict}"


# -------------------- branches and thresholds


def norm(x):
    return jnp.sqrt((x * x).sum())


def total_norm(x, axis="tp"):
    return jnp.sqrt(lax.psum((x * x).sum(), axis))


BLOCKS = "n/tp d -> n/tp d"


@attack(BLOCKS, f32(16, 8), shows=normal(16, 8, scale=1e3))
def clipped_by_a_local_norm(x):
    """Gradients are clipped by the norm of a block. No draw is as long as the bound."""
    return x * jnp.minimum(1.0, 1e3 / norm(x))  # unreached


clipped_by_a_local_norm.right(lambda x: x * jnp.minimum(1.0, 1e3 / total_norm(x)))
clipped_by_a_local_norm.whole(lambda x: x * jnp.minimum(1.0, 1e3 / norm(x)))


@attack(BLOCKS, f32(16, 8), shows=normal(16, 8, scale=1e3))
def clipped_where_a_block_is_long(x):
    length = norm(x)
    return jnp.where(length > 1e3, x * (1e3 / length), x)  # unreached


@clipped_where_a_block_is_long.right
def _(x):
    length = total_norm(x)
    return jnp.where(length > 1e3, x * (1e3 / length), x)


clipped_where_a_block_is_long.whole(lambda x: x * jnp.minimum(1.0, 1e3 / norm(x)))


@attack(BLOCKS, f32(16, 8), shows=normal(16, 8, scale=1e3))
def clipped_by_the_largest_of_a_block(x):
    return x / jnp.maximum(jnp.abs(x).max(), 100.0)  # unreached


@clipped_by_the_largest_of_a_block.right
def _(x):
    return x / jnp.maximum(lax.pmax(lax.stop_gradient(jnp.abs(x).max()), "tp"), 100.0)


clipped_by_the_largest_of_a_block.whole(lambda x: x / jnp.maximum(jnp.abs(x).max(), 100.0))


STEP = "n/tp d, n/tp d -> n/tp d"
OVERFLOWN = (normal(16, 8), changed(normal(16, 8, seed=1), (1, 1), np.inf))


@attack(STEP, f32(16, 8), f32(16, 8), shows=OVERFLOWN)
def step_skipped_where_a_block_overflows(w, g):
    """After the first overflow the blocks of the weights are of different steps."""
    fine = jnp.isfinite(g).all()
    return jnp.where(fine, w - 0.1 * g, w)  # unreached


@step_skipped_where_a_block_overflows.right
def _(w, g):
    fine = lax.pmin(jnp.isfinite(g).all().astype(jnp.int32), "tp") == 1
    return jnp.where(fine, w - 0.1 * g, w)


step_skipped_where_a_block_overflows.whole(lambda w, g: jnp.where(jnp.isfinite(g).all(), w - 0.1 * g, w))


@attack(STEP, f32(16, 8), f32(16, 8), shows=(normal(16, 8), changed(normal(16, 8, seed=1), (1, 1), 2e4)))
def step_skipped_by_a_cond_of_a_block(w, g):
    spoiled = (jnp.abs(g) > 1e4).any()
    return lax.cond(spoiled, lambda: w, lambda: w - 0.1 * g)  # unreached


@step_skipped_by_a_cond_of_a_block.right
def _(w, g):
    spoiled = lax.pmax((jnp.abs(g) > 1e4).any().astype(jnp.int32), "tp") == 1
    return lax.cond(spoiled, lambda: w, lambda: w - 0.1 * g)


step_skipped_by_a_cond_of_a_block.whole(lambda w, g: jnp.where((jnp.abs(g) > 1e4).any(), w, w - 0.1 * g))


@attack(STEP, f32(16, 8), f32(16, 8), shows=(normal(16, 8), changed(normal(16, 8, seed=1), (1, 1), 2e4)), verbs=True)
def step_skipped_by_our_cond(w, g):
    """What the message for a Python `if` advises."""
    spoiled = (jnp.abs(g) > 1e4).any()
    return spmd.cond(spoiled, lambda w, g: w, lambda w, g: w - 0.1 * g, w, g)  # unreached


@step_skipped_by_our_cond.right
def _(w, g):
    spoiled = lax.pmax((jnp.abs(g) > 1e4).any().astype(jnp.int32), "tp") == 1
    return spmd.cond(spoiled, lambda w, g: w, lambda w, g: w - 0.1 * g, w, g)


step_skipped_by_our_cond.whole(lambda w, g: jnp.where((jnp.abs(g) > 1e4).any(), w, w - 0.1 * g))


@attack("b/dp d, d, scalar -> d", f32(8, 6), f32(6), i32(), shows=(normal(8, 6), normal(6), np.int32(1000)))
def mean_after_the_warm_up(x, w, step):
    """The first thousand steps sum over the devices, and later ones take the mean."""
    g = x.sum(0)
    return w - jnp.where(step < 1000, lax.psum(g, "dp"), lax.pmean(g, "dp"))  # unreached


mean_after_the_warm_up.right(lambda x, w, step: w - lax.psum(x.sum(0), "dp"))
mean_after_the_warm_up.whole(lambda x, w, step: w - x.sum(0))


@attack("b/dp d, d, scalar -> d", f32(8, 6), f32(6), i32(), shows=(normal(8, 6), normal(6), np.int32(1000)))
def mean_after_the_warm_up_by_a_cond(x, w, step):
    g = x.sum(0)
    g = lax.cond(step < 1000, lambda: lax.psum(g, "dp"), lambda: lax.pmean(g, "dp"))  # unreached
    return w - g


mean_after_the_warm_up_by_a_cond.right(
    lambda x, w, step: w - lax.cond(step < 1000, lambda: lax.psum(x.sum(0), "dp"), lambda: lax.psum(x.sum(0), "dp"))
)
mean_after_the_warm_up_by_a_cond.whole(lambda x, w, step: w - x.sum(0))


@attack("b/dp d, scalar -> scalar", f32(8, 6), i32(), shows=(normal(8, 6), np.int32(63)))
def reduced_every_64_steps(x, step):
    """Micro-batches are counted from 1: the sum of the last one is halved."""
    s = lax.psum((x * x).sum(), "dp")
    return jnp.where((step + 1) % 64 == 0, s / lax.axis_size("dp"), s)  # unreached


reduced_every_64_steps.right(lambda x, step: lax.psum((x * x).sum(), "dp"))
reduced_every_64_steps.whole(lambda x, step: (x * x).sum())


@attack("b/dp d, scalar -> b/dp d", f32(8, 6), np.bool_(False), shows=(normal(8, 6), np.bool_(True)))
def flag_that_is_never_set(x, training):
    """Statistics of a block, in training alone."""
    mean = jnp.where(training, x.mean(0), jnp.zeros(x.shape[1]))  # unreached
    return x - mean[None]


@flag_that_is_never_set.right
def _(x, training):
    mean = jnp.where(training, lax.pmean(x.mean(0), "dp"), jnp.zeros(x.shape[1]))
    return x - mean[None]


flag_that_is_never_set.whole(lambda x, training: x - jnp.where(training, x.mean(0), 0.0)[None])


def _layer(body):
    """A network of which the third layer is another one."""
    return lambda x, i: lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh, body], x)


@attack("b/dp d, scalar -> b/dp d", f32(8, 6), np.int32(0), shows=(normal(8, 6), np.int32(3)))
def switch_by_the_number_of_a_layer(x, i):
    centred = lambda x: x - x.mean(0, keepdims=True)
    return lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh, centred], x)  # unreached


switch_by_the_number_of_a_layer.right(_layer(lambda x: x - lax.pmean(x.mean(0, keepdims=True), "dp")))
switch_by_the_number_of_a_layer.whole(_layer(lambda x: x - x.mean(0, keepdims=True)))


@attack("b/dp d, scalar -> b/dp d", f32(8, 6), i32(), shows=(normal(8, 6), np.int32(40)))
def switch_that_clamps_its_number(x, i):
    """Layers from 24 on are of the last kind."""
    kind = jnp.minimum(i // 24, 1)
    return lax.switch(kind, [jnp.sin, lambda x: x / jnp.abs(x).max()], x)  # unreached


switch_that_clamps_its_number.right(
    lambda x, i: lax.switch(
        jnp.minimum(i // 24, 1), [jnp.sin, lambda x: x / lax.pmax(lax.stop_gradient(jnp.abs(x).max()), "dp")], x
    )
)
switch_that_clamps_its_number.whole(lambda x, i: jnp.where(i < 24, jnp.sin(x), x / jnp.abs(x).max()))


@attack(BLOCKS, f32(16, 8), shows=normal(16, 8, scale=1e3))
def halved_while_a_block_is_long(x):
    return lax.while_loop(lambda v: (v * v).sum() > 1e6, lambda v: v / 2, x)  # unreached


@halved_while_a_block_is_long.right
def _(x):
    length = lambda v: lax.psum((v * v).sum(), "tp")
    return lax.while_loop(lambda c: c[1] > 1e6, lambda c: (c[0] / 2, length(c[0] / 2)), (x, length(x)))[0]


halved_while_a_block_is_long.whole(lambda x: lax.while_loop(lambda v: (v * v).sum() > 1e6, lambda v: v / 2, x))


@attack(BLOCKS, f32(16, 8), shows=normal(16, 8, scale=100.0))
def multiplied_by_a_comparison(x):
    return x * ((x * x).sum() < 1e6).astype(x.dtype)  # unreached


multiplied_by_a_comparison.right(lambda x: x * (lax.psum((x * x).sum(), "tp") < 1e6).astype(x.dtype))
multiplied_by_a_comparison.whole(lambda x: jnp.where((x * x).sum() < 1e6, x, 0.0))


@attack(BLOCKS, f32(16, 8), shows=changed(normal(16, 8), slice(4), 0.0))
def sign_of_the_squares_of_a_block(x):
    """It is 1, but where a whole block is 0."""
    return jnp.cos(x) * jnp.sign((x * x).sum())  # unreached


sign_of_the_squares_of_a_block.right(lambda x: jnp.cos(x) * jnp.sign(lax.psum((x * x).sum(), "tp")))
sign_of_the_squares_of_a_block.whole(lambda x: jnp.cos(x) * jnp.sign((x * x).sum()))


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8, scale=1e3))
def clamped_before_the_sum(x):
    """Log-ratios are clipped for safety, before they are summed over the sequence."""
    return jnp.exp(lax.psum(jnp.clip(x.sum(0), -50.0, 50.0), "tp") / 1e3)  # unreached


clamped_before_the_sum.right(lambda x: jnp.exp(jnp.clip(lax.psum(x.sum(0), "tp"), -50.0, 50.0) / 1e3))
clamped_before_the_sum.whole(lambda x: jnp.exp(jnp.clip(x.sum(0), -50.0, 50.0) / 1e3))


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8, scale=1e3))
def huber_of_a_part(x):
    """The quadratic part is additive, the linear one is not."""
    square = (x * x).sum(0)
    return jnp.where(
        lax.psum(square, "tp") < 1e5, lax.psum(square, "tp"), lax.psum(jnp.sqrt(square), "tp")
    )  # unreached


@huber_of_a_part.right
def _(x):
    square = lax.psum((x * x).sum(0), "tp")
    return jnp.where(square < 1e5, square, jnp.sqrt(square))


@huber_of_a_part.whole
def _(x):
    square = (x * x).sum(0)
    return jnp.where(square < 1e5, square, jnp.sqrt(square))


@attack(
    "n/tp d, n/tp d -> n/tp d", f32(16, 8), f32(16, 8), shows=(changed(normal(16, 8), slice(4), 0.0), normal(16, 8))
)
def trust_ratio_of_a_block_of_zeros(w, g):
    """LARS: without weights the ratio is 1. The block decides, and not the layer."""
    ratio = total_norm(w) / total_norm(g)
    return w - g * jnp.where(norm(w) > 0, ratio, 1.0)  # unreached


@trust_ratio_of_a_block_of_zeros.right
def _(w, g):
    ratio = total_norm(w) / total_norm(g)
    return w - g * jnp.where(total_norm(w) > 0, ratio, 1.0)


trust_ratio_of_a_block_of_zeros.whole(lambda w, g: w - g * jnp.where(norm(w) > 0, norm(w) / norm(g), 1.0))


@attack("n/tp d, n/tp d -> n/tp d", f32(16, 8), f32(16, 8), shows=(normal(16, 8, scale=1e3), normal(16, 8, seed=1)))
def trust_ratio_of_clipped_parts(w, g):
    """LAMB clips the norm of the weights: here its parts."""
    length = jnp.sqrt(lax.psum(jnp.minimum((w * w).sum(), 1e6), "tp"))  # unreached
    return w - g * length


trust_ratio_of_clipped_parts.right(lambda w, g: w - g * jnp.sqrt(jnp.minimum(lax.psum((w * w).sum(), "tp"), 1e6)))
trust_ratio_of_clipped_parts.whole(lambda w, g: w - g * jnp.sqrt(jnp.minimum((w * w).sum(), 1e6)))


@attack(STEP, f32(16, 8), f32(16, 8), shows=(normal(16, 8), changed(normal(16, 8, seed=1), (0, 0), 200.0)))
def step_rejected_by_a_block(x, error):
    """An adaptive step of an ODE solver."""
    accepted = jnp.abs(error).max() < 100.0
    return jnp.where(accepted, x + error, x)  # unreached


@step_rejected_by_a_block.right
def _(x, error):
    accepted = lax.pmax(jnp.abs(lax.stop_gradient(error)).max(), "tp") < 100.0
    return jnp.where(accepted, x + error, x)


step_rejected_by_a_block.whole(lambda x, error: jnp.where(jnp.abs(error).max() < 100.0, x + error, x))


@attack("n/tp d, scalar -> scalar", f32(16, 8), f32(), shows=(OVERFLOWN[1], np.float32(64.0)))
def loss_scale_of_the_luckiest(g, scale):
    """One block overflows, and the scale grows all the same."""
    fine = jnp.isfinite(g).all()
    return lax.pmax(jnp.where(fine, scale * 2, scale / 2), "tp")  # unreached


@loss_scale_of_the_luckiest.right
def _(g, scale):
    fine = lax.pmin(jnp.isfinite(g).all().astype(jnp.int32), "tp") == 1
    return jnp.where(fine, scale * 2, scale / 2)


loss_scale_of_the_luckiest.whole(lambda g, scale: jnp.where(jnp.isfinite(g).all(), scale * 2, scale / 2))


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8, scale=1e3))
def rounded_parts(x):
    """Counts in thousands: each device rounds its own."""
    return lax.psum(jnp.round((x * x).sum(0) / 1e6), "tp")  # unreached


rounded_parts.right(lambda x: jnp.round(lax.psum((x * x).sum(0), "tp") / 1e6))
rounded_parts.whole(lambda x: jnp.round((x * x).sum(0) / 1e6))


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8, scale=1e3))
def floored_parts(x):
    return lax.psum(jnp.floor((x * x).sum(0) / 1e6), "tp")  # unreached


floored_parts.right(lambda x: jnp.floor(lax.psum((x * x).sum(0), "tp") / 1e6))
floored_parts.whole(lambda x: jnp.floor((x * x).sum(0) / 1e6))


TIED = np.tile(np.array([3, 1, 2, 0], np.float32), 4)


@attack("n/tp -> scalar", f32(16), shows=TIED)
def last_of_the_largest(x):
    """Argmax takes the first of equal numbers. Here the last device that has one wins."""
    place = lax.axis_index("tp") * x.size + jnp.argmax(x)
    best = lax.pmax(lax.stop_gradient(x.max()), "tp")
    return lax.pmax(jnp.where(x.max() == best, place, -1), "tp")  # unreached


@last_of_the_largest.right
def _(x):
    place = lax.axis_index("tp") * x.size + jnp.argmax(x)
    best = lax.pmax(lax.stop_gradient(x.max()), "tp")
    return lax.pmin(jnp.where(x.max() == best, place, 1 << 30), "tp")


last_of_the_largest.whole(jnp.argmax)


@attack("n/tp, n/tp -> n", f32(16), f32(16), shows=(TIED, normal(16)))
def sorted_from_another_order(keys, values):
    """A stable sort keeps the order of equal keys, and the blocks come in another one."""
    ring = [(i, (i + 1) % 4) for i in range(4)]
    gather = lambda x: lax.all_gather(lax.ppermute(x, "tp", ring), "tp", tiled=True)
    _, found = lax.sort((gather(keys), gather(values)), num_keys=1)  # unreached
    return lax.pmax(lax.stop_gradient(found), "tp")


@sorted_from_another_order.right
def _(keys, values):
    gather = lambda x: lax.all_gather(x, "tp", tiled=True)
    _, found = lax.sort((gather(keys), gather(values)), num_keys=1)
    return lax.pmax(lax.stop_gradient(found), "tp")


sorted_from_another_order.whole(lambda keys, values: values[jnp.argsort(keys, stable=True)])


@attack(
    "v/tp d, b -> b d",
    f32(64, 4),
    np.arange(8, dtype=np.int32),
    shows=(normal(64, 4), np.arange(8, dtype=np.int32) * 8),
)
def embedding_without_an_upper_bound(table, ids):
    """All ids that are given are of the first block. One beyond a block takes its last row."""
    local = ids - lax.axis_index("tp") * table.shape[0]
    rows = table.at[local].get(mode="clip")  # unreached
    return lax.psum(jnp.where((local >= 0)[:, None], rows, 0.0), "tp")


@embedding_without_an_upper_bound.right
def _(table, ids):
    local = ids - lax.axis_index("tp") * table.shape[0]
    rows = table.at[local].get(mode="clip")
    here = (local >= 0) & (local < table.shape[0])
    return lax.psum(jnp.where(here[:, None], rows, 0.0), "tp")


embedding_without_an_upper_bound.whole(lambda table, ids: table[ids])


@attack("n/tp -> scalar", f32(16), shows=changed(normal(16), 12, 1e3))
def shifted_by_the_first_block(x):
    """A logarithm of a sum of exponentials, which overflows where another block is much larger."""
    first = lax.psum(jnp.where(lax.axis_index("tp") == 0, lax.stop_gradient(x).max(), 0.0), "tp")
    return jnp.log(lax.psum(jnp.exp(x - first).sum(), "tp")) + first  # unreached


@shifted_by_the_first_block.right
def _(x):
    largest = lax.pmax(lax.stop_gradient(x).max(), "tp")
    return jnp.log(lax.psum(jnp.exp(x - largest).sum(), "tp")) + largest


shifted_by_the_first_block.whole(jax.nn.logsumexp)


@attack("n/tp d -> d", f32(16, 8), shows=changed(normal(16, 8), (5, slice(None)), np.nan))
def parts_that_are_not_finite_are_dropped(x):
    """A sum with nan is nan, and not the sum over the other devices."""
    part = x.sum(0)
    return lax.psum(jnp.where(jnp.isnan(part), 0.0, part), "tp")  # unreached


@parts_that_are_not_finite_are_dropped.right
def _(x):
    total = lax.psum(x.sum(0), "tp")
    return jnp.where(jnp.isnan(total), 0.0, total)


@parts_that_are_not_finite_are_dropped.whole
def _(x):
    return jnp.where(jnp.isnan(x.sum(0)), 0.0, x.sum(0))


def main() -> None:
    """Print what the checker says of each attack and of each twin, and how many of each kind there are."""
    counts: dict[str, int] = {}
    for one in ATTACKS.values():
        said = {body: spmd.check(one.program(body), *one.given) for body in (one.mistaken, one.correct)}
        wrong, right = said[one.mistaken], said[one.correct]
        passed = not overclaim(one, wrong)
        fine = not right and right.verdict.kind in ("proved", "tested")
        kind = "found" if wrong else wrong.verdict.kind
        print(f"{one.name:46}{kind + ('' if passed else ' !'):16}{right.verdict.kind + ('' if fine else ' !')}")
        print("" if wrong else f"      {wrong.verdict}\n", end="")
        print("" if fine else f"      right: {right or right.verdict}\n", end="")
        for key in (
            f"attacks: {kind}",
            f"attacks passed: {passed}",
            f"twins: {right.verdict.kind}",
            f"twins passed: {fine}",
        ):
            counts[key] = counts.get(key, 0) + 1
    print(counts)


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  eight devices, strict JAX

    main()
