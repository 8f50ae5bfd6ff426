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
import optax
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
      captured: Arrays that this program holds; of `shows` they are a part.
      judged: From a program to what is compared on devices, such as its gradient.
      helpers: Functions that have marked lines too.
    """

    given: Sequence[Any] = ()
    shows: Sequence[Any] = ()
    devices: dict[str, int] = field(default_factory=dict)
    verbs: bool = False
    around: Callable[[Any], Any] = lambda kernel: kernel
    captured: Sequence[Any] = ()
    judged: Callable[[Any], Any] = lambda program: program
    helpers: Sequence[Callable[..., Any]] = ()

    def checked(self, body: Callable[..., Any]) -> Any:
        """What `spmd.check` finds."""
        meant = {"reference": self.on_whole_arrays()} if self.raw else {}
        return spmd.check(self.traced(body), *self.given, **meant)

    def traced(self, body: Callable[..., Any]) -> Any:
        """The program that is checked. A mesh of more than eight devices has none."""
        if self.raw:
            return self.on_devices(body)
        mesh = spmd.make_mesh(**self.mesh, abstract=math.prod(self.mesh.values()) > 8)
        program = self.around(spmd.kernel(str(self.pattern), mesh=mesh)(body))
        return (lambda *args: program(*args, *self.captured)) if self.captured else program

    def on_devices(self, body: Callable[..., Any]) -> Any:
        """The same on devices, and nobody checks it."""
        mesh = spmd.make_mesh(**(self.devices or self.mesh))
        if self.verbs:
            return self.judged(self.around(spmd.kernel(str(self.pattern), mesh=mesh, check="off")(body)))
        ins, outs = ([lay.spec for lay in side] for side in (self.pattern.inputs, self.pattern.outputs))
        out = outs[0] if len(outs) == 1 else tuple(outs)
        return self.judged(self.around(jax.shard_map(body, mesh=mesh, in_specs=tuple(ins), out_specs=out)))

    def on_whole_arrays(self) -> Any:
        """What is meant, in plain JAX as people write it."""

        def plain(*args: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return self.reference(*args)

        return self.judged(self.around(plain))

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
        return a.shape == b.shape and np.allclose(a, b, rtol=tolerance, atol=1e-5 * finite, equal_nan=True)

    return all(map(close, found, wanted))


def overclaim(attack: Attack, found: Any) -> str:
    """What a verdict on the wrong body says beyond what was looked at; "" if a finding, or a line, tells."""
    verdict = found.verdict
    if found:
        return ""
    if verdict.kind not in ("tested", "not tested"):
        return f"{verdict}"
    lines, texts = attack.marks()
    whole = rest = f"{verdict}"
    for sentence in (one for one in verdict.reasons if one.startswith(OTHERS)):
        rest = rest.replace(sentence, "")
    said = lambda text, where: re.search(rf"(?<!\w){re.escape(text)}(?!\w)", where)
    return "" if any(said(one, rest) for one in lines) or any(said(one, whole) for one in texts) else whole


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
    part = (x * x).sum(0)
    whole, roots = lax.psum((part, jnp.sqrt(part)), "tp")
    return jnp.where(whole < 1e5, whole, roots)  # unreached


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
    n = lax.axis_size("tp")
    ring = [(i, (i + 1) % n) for i in range(n)]
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


@attack("n/tp d -> d", f32(16, 8), shows=np.repeat(np.array([-600.0, 10, 10, 10], np.float32), 4)[:, None].repeat(8, 1))
def part_that_becomes_negative(x):
    """A number that is positive in all draws goes through a relu before it is summed."""
    bias = 1e4 / lax.axis_size("tp")
    return lax.psum(jax.nn.relu(4 * x.sum(0) + bias) - bias, "tp")  # unreached


part_that_becomes_negative.right(lambda x: jax.nn.relu(lax.psum(4 * x.sum(0), "tp") + 1e4) - 1e4)
part_that_becomes_negative.whole(lambda x: jax.nn.relu(4 * x.sum(0) + 1e4) - 1e4)


@attack("n/tp d -> d", f32(16, 8), shows=np.zeros((16, 8), np.float32))
def floor_of_each_part(x):
    """A sum of squares is at least 1e-6, so that its logarithm is a number."""
    return jnp.log(lax.psum(jnp.maximum((x * x).sum(0), 1e-6), "tp"))  # unreached


floor_of_each_part.right(lambda x: jnp.log(jnp.maximum(lax.psum((x * x).sum(0), "tp"), 1e-6)))
floor_of_each_part.whole(lambda x: jnp.log(jnp.maximum((x * x).sum(0), 1e-6)))


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8, scale=1e3))
def parts_of_whole_thousands(x):
    whole = ((x * x).sum(0) / 1e6).astype(jnp.int32)  # unreached
    return lax.psum(whole, "tp")


parts_of_whole_thousands.right(lambda x: (lax.psum((x * x).sum(0), "tp") / 1e6).astype(jnp.int32))
parts_of_whole_thousands.whole(lambda x: ((x * x).sum(0) / 1e6).astype(jnp.int32))


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8, scale=1e3))
def remainders_of_parts(x):
    """A counter that wraps."""
    return lax.psum(jnp.remainder((x * x).sum(0), 65536.0), "tp")  # unreached


remainders_of_parts.right(lambda x: jnp.remainder(lax.psum((x * x).sum(0), "tp"), 65536.0))
remainders_of_parts.whole(lambda x: jnp.remainder((x * x).sum(0), 65536.0))
remainders_of_parts.shows = (normal(16, 8, scale=120.0),)


LARGE_AND_BACK = np.repeat(np.array([[1e5], [-1e5], [2.0], [1.0]], np.float32), 8, 1)


@attack("n/tp d -> d", f32(4, 8), shows=LARGE_AND_BACK)
def halves_that_overflow(x):
    """The parts leave half precision, and the sum does not."""
    half = x.sum(0).astype(jnp.float16)  # unreached
    return lax.psum(half.astype(jnp.float32), "tp").astype(jnp.float16)


halves_that_overflow.right(lambda x: lax.psum(x.sum(0), "tp").astype(jnp.float16))
halves_that_overflow.whole(lambda x: x.sum(0).astype(jnp.float16))


@attack("n/tp d -> d", f32(16, 8), shows=changed(normal(16, 8), (3, slice(None)), 0.0))
def geometric_mean_with_a_zero(x):
    """One zero makes the product zero. Its device alone knows of it."""
    logs = jnp.log(jnp.where(x == 0, 1.0, jnp.abs(x))).sum(0)
    found = jnp.where((x == 0).any(0), 0.0, jnp.exp(lax.psum(logs, "tp")))  # unreached
    return lax.pmean(found, "tp")


@geometric_mean_with_a_zero.right
def _(x):
    logs = jnp.log(jnp.where(x == 0, 1.0, jnp.abs(x))).sum(0)
    zero = lax.pmax((x == 0).any(0).astype(jnp.int32), "tp") == 1
    return jnp.where(zero, 0.0, jnp.exp(lax.psum(logs, "tp")))


geometric_mean_with_a_zero.whole(lambda x: jnp.abs(x).prod(0))


@attack("b/dp v/tp, scalar -> b/dp", f32(4, 16), f32(), shows=(normal(4, 16), np.float32(0.0)))
def greedy_among_a_block(logits, temperature):
    """Below a small temperature the best token is taken: of the first block that has a good one."""
    start = lax.axis_index("tp") * logits.shape[1]
    weights = jnp.exp(logits / jnp.maximum(temperature, 1e-4) * 1e-4)
    places = (start + jnp.arange(logits.shape[1])).astype(jnp.float32)
    mean = lax.psum(weights @ places, "tp") / lax.psum(weights.sum(1), "tp")
    best = lax.pmean((start + jnp.argmax(logits, 1)).astype(jnp.float32), "tp")
    return jnp.where(jnp.abs(temperature) < 1e-5, best, mean)  # unreached


@greedy_among_a_block.right
def _(logits, temperature):
    start = lax.axis_index("tp") * logits.shape[1]
    weights = jnp.exp(logits / jnp.maximum(temperature, 1e-4) * 1e-4)
    places = (start + jnp.arange(logits.shape[1])).astype(jnp.float32)
    mean = lax.psum(weights @ places, "tp") / lax.psum(weights.sum(1), "tp")
    every = lax.stop_gradient(lax.all_gather(logits, "tp", axis=1, tiled=True))
    best = lax.pmean(jnp.argmax(every, 1).astype(jnp.float32), "tp")
    return jnp.where(jnp.abs(temperature) < 1e-5, best, mean)


@greedy_among_a_block.whole
def _(logits, temperature):
    weights = jnp.exp(logits / jnp.maximum(temperature, 1e-4) * 1e-4)
    mean = weights @ jnp.arange(16.0) / weights.sum(1)
    return jnp.where(jnp.abs(temperature) < 1e-5, jnp.argmax(logits, 1).astype(jnp.float32), mean)


def _rate(step, n):
    """A rate by the interval in which a step lies."""
    scales = jnp.stack([jnp.float32(1), jnp.float32(1), 1 / jnp.float32(n)])
    return scales[jnp.searchsorted(jnp.array([0, 1000]), step, side="right")]  # unreached


@attack("b/dp d, scalar -> d", f32(8, 6), i32(), shows=(normal(8, 6), np.int32(2000)), helpers=(_rate,))
def rate_from_a_table(x, step):
    """Piecewise constant, by an index into a table."""
    return lax.psum(x.sum(0), "dp") * _rate(step, lax.axis_size("dp"))


rate_from_a_table.right(lambda x, step: lax.psum(x.sum(0), "dp") * _rate(step, 1))
rate_from_a_table.whole(lambda x, step: x.sum(0))


@attack("b/dp d, scalar -> d", f32(8, 6), i32(), shows=(normal(8, 6), np.int32(1030)))
def bit_of_a_step(x, step):
    """Each second thousand of steps."""
    g = x.sum(0)
    return jnp.where((step & 1024) != 0, lax.pmean(g, "dp"), lax.psum(g, "dp"))  # unreached


bit_of_a_step.right(lambda x, step: lax.psum(x.sum(0), "dp"))
bit_of_a_step.whole(lambda x, step: x.sum(0))


@attack("b/dp d, scalar, scalar -> d", f32(8, 6), i32(), flags(), shows=(normal(8, 6), np.int32(500), np.bool_(True)))
def two_conditions_at_once(x, step, frozen):
    """Each of them is met, and both together never."""
    g = x.sum(0)
    both = jnp.logical_and(frozen, step > 100)
    return jnp.where(both, lax.pmax(lax.stop_gradient(g), "dp"), lax.psum(g, "dp"))  # unreached


two_conditions_at_once.right(lambda x, step, frozen: lax.psum(x.sum(0), "dp"))
two_conditions_at_once.whole(lambda x, step, frozen: x.sum(0))


def _counted(start, g, late):
    """Sums over four rounds of a loop; in round 1000 of a run by another rule."""

    def one(carry, i):
        return carry + jnp.where(start + i == 1000, late(g), lax.psum(g, "dp")), None  # unreached

    return lax.scan(one, jnp.zeros(g.shape), jnp.arange(4, dtype=jnp.int32))[0]


@attack("b/dp d, scalar -> d", f32(8, 6), i32(), shows=(normal(8, 6), np.int32(998)), helpers=(_counted,))
def round_1000_of_a_loop(x, start):
    return _counted(start, x.sum(0), lambda g: lax.pmean(g, "dp"))


round_1000_of_a_loop.right(lambda x, start: _counted(start, x.sum(0), lambda g: lax.psum(g, "dp")))
round_1000_of_a_loop.whole(lambda x, start: 4 * x.sum(0))


@attack("b/dp d, n -> d", f32(8, 6), i32(3), shows=(normal(8, 6), np.array([5, 1000, 7], np.int32)))
def mapped_over_steps(x, steps):
    """A cond inside of vmap is a select."""
    g = x.sum(0)
    one = lambda step: lax.cond(step < 1000, lambda: lax.psum(g, "dp"), lambda: lax.pmean(g, "dp"))  # unreached
    return jax.vmap(one)(steps).sum(0)


mapped_over_steps.right(
    lambda x, steps: jax.vmap(lambda step: lax.psum(x.sum(0), "dp") + 0.0 * step.astype(x.dtype))(steps).sum(0)
)
mapped_over_steps.whole(lambda x, steps: 3 * x.sum(0))


@attack("b/dp d, scalar -> d", f32(8, 6), i32(), shows=(normal(8, 6), np.int32(5000)))
def rematerialized_after_the_warm_up(x, step):
    """Inside of checkpoint and jit."""

    def late(x):
        g = x.sum(0)
        return jnp.where(step < 1000, lax.psum(g, "dp"), lax.pmean(g, "dp"))  # unreached

    return jax.checkpoint(jax.jit(late))(x)


rematerialized_after_the_warm_up.right(lambda x, step: jax.checkpoint(lambda x: lax.psum(x.sum(0), "dp"))(x))
rematerialized_after_the_warm_up.whole(lambda x, step: x.sum(0))


@attack("b/dp d, scalar, scalar -> d", f32(8, 6), f32(), i32(), shows=(normal(8, 6), np.float32(1e9), np.int32(1)))
def one_of_several_choices(x, loss, step):
    """Nested selects: the last one is for a loss that explodes."""
    g = x.sum(0)
    ways = [jnp.abs(loss) < 1e2, jnp.abs(loss) < 1e6]
    return jnp.select(ways, [lax.psum(g, "dp"), lax.psum(2 * g, "dp")], lax.pmean(g, "dp"))  # unreached


@one_of_several_choices.right
def _(x, loss, step):
    g = lax.psum(x.sum(0), "dp")
    return jnp.select([jnp.abs(loss) < 1e2, jnp.abs(loss) < 1e6], [g, 2 * g], 0 * g)


@one_of_several_choices.whole
def _(x, loss, step):
    g = x.sum(0)
    return jnp.select([jnp.abs(loss) < 1e2, jnp.abs(loss) < 1e6], [g, 2 * g], 0 * g)


@attack("b/dp d, scalar -> d", f32(8, 6), f32(), shows=(normal(8, 6), np.float32(1e5)))
def skipped_after_a_spike(x, usual):
    """A step is left out where the loss is ten thousand times as large as usual: on some devices."""
    loss = (x * x).mean()
    g = jnp.where(loss * (1 + jnp.abs(usual)) > 1e5, 0.0, x.sum(0))  # unreached
    return lax.psum(g, "dp")


@skipped_after_a_spike.right
def _(x, usual):
    loss = lax.pmean((x * x).mean(), "dp")
    return lax.psum(jnp.where(loss * (1 + jnp.abs(usual)) > 1e5, 0.0, x.sum(0)), "dp")


skipped_after_a_spike.whole(lambda x, usual: jnp.where((x * x).mean() * (1 + jnp.abs(usual)) > 1e5, 0.0, x.sum(0)))


# -------------------- data that no struct draws


LABELS = np.array([3, 1, -100, 2, -100, -100, 0, 4], np.int32)


def _losses(logits, labels):
    rows = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(rows, jnp.maximum(labels, 0)[:, None], 1)[:, 0]


@attack("b/dp v, b/dp -> scalar", f32(8, 8), i32(8), shows=(normal(8, 8), LABELS))
def ignored_labels_counted_locally(logits, labels):
    """A mean of means: devices ignore different numbers of labels."""
    keep = (labels != -100).astype(jnp.float32)  # unreached
    return lax.pmean((_losses(logits, labels) * keep).sum() / keep.sum(), "dp")


@ignored_labels_counted_locally.right
def _(logits, labels):
    keep = (labels != -100).astype(jnp.float32)
    return lax.psum((_losses(logits, labels) * keep).sum(), "dp") / lax.psum(keep.sum(), "dp")


@ignored_labels_counted_locally.whole
def _(logits, labels):
    return (_losses(logits, labels) * (labels != -100)).sum() / (labels != -100).sum()


@attack("b/dp v, b/dp -> scalar", f32(8, 8), i32(8), shows=(normal(8, 8), LABELS))
def ignored_labels_by_where(logits, labels):
    """Each device divides by its own count. None of it is ignored where labels are ids."""
    losses = jnp.where(labels >= 0, _losses(logits, labels), 0.0)  # unreached
    count = jnp.where(labels >= 0, 1.0, 0.0).sum()  # unreached
    return lax.psum(losses.sum() / count, "dp") / lax.axis_size("dp")


@ignored_labels_by_where.right
def _(logits, labels):
    losses = jnp.where(labels >= 0, _losses(logits, labels), 0.0)
    return lax.psum(losses.sum(), "dp") / lax.psum(jnp.where(labels >= 0, 1.0, 0.0).sum(), "dp")


ignored_labels_by_where.whole(ignored_labels_counted_locally.reference)


@attack("b/dp v, b/dp -> v", f32(8, 8), i32(8), shows=(normal(8, 8), LABELS))
def ignored_rows_in_a_batch_norm(x, labels):
    """Statistics of rows that count, by the count of a device."""
    keep = (labels > -100)[:, None]  # unreached
    part = jnp.where(keep, x, 0.0).sum(0) / keep.sum().astype(x.dtype)
    return lax.pmean(part, "dp")


@ignored_rows_in_a_batch_norm.right
def _(x, labels):
    keep = (labels > -100)[:, None]
    return lax.psum(jnp.where(keep, x, 0.0).sum(0), "dp") / lax.psum(keep.sum().astype(x.dtype), "dp")


ignored_rows_in_a_batch_norm.whole(lambda x, labels: jnp.where((labels > -100)[:, None], x, 0.0).sum(0) / 5)


SOME_NAN = changed(normal(16, 8), [(0, 5, 6), (2, 3, 3)], np.nan)


@attack("n/tp d -> d", f32(16, 8), shows=SOME_NAN)
def means_without_nan(x):
    """Each device leaves out its own missing numbers."""
    return lax.pmean(jnp.nanmean(x, 0), "tp")  # unreached


@means_without_nan.right
def _(x):
    return lax.psum(jnp.nansum(x, 0), "tp") / lax.psum((~jnp.isnan(x)).sum(0), "tp").astype(x.dtype)


means_without_nan.whole(lambda x: jnp.nanmean(x, 0))


@attack("n/tp d -> d", f32(16, 8), shows=changed(normal(16, 8), (slice(4, 8), 2), np.nan))
def maximum_of_a_block_without_numbers(x):
    """A block that is all nan gives nan, and so does the maximum of all."""
    every = lax.all_gather(lax.stop_gradient(jnp.nanmax(x, 0)), "tp")  # unreached
    return lax.pmax(every.max(0), "tp")


maximum_of_a_block_without_numbers.right(
    lambda x: lax.pmax(lax.stop_gradient(jnp.where(jnp.isnan(x), -jnp.inf, x)).max(0), "tp")
)
maximum_of_a_block_without_numbers.whole(lambda x: jnp.nanmax(x, 0))


ONE_EMPTY = np.repeat([True, True, False, True], 8)


@attack("n/dp, n/dp -> scalar", f32(256), flags(256), shows=(normal(32), ONE_EMPTY))
def empty_mask_counts_as_one(x, mask):
    """A count is at least 1, so that nothing is divided by 0: on each device."""
    count = jnp.maximum(mask.sum(), 1)  # unreached
    return lax.psum(jnp.where(mask, x, 0.0).sum(), "dp") / lax.psum(count, "dp").astype(x.dtype)


@empty_mask_counts_as_one.right
def _(x, mask):
    count = jnp.maximum(lax.psum(mask.sum(), "dp"), 1)
    return lax.psum(jnp.where(mask, x, 0.0).sum(), "dp") / count.astype(x.dtype)


empty_mask_counts_as_one.whole(lambda x, mask: jnp.where(mask, x, 0.0).sum() / jnp.maximum(mask.sum(), 1))


@attack(
    "n/dp, n/dp -> scalar",
    f32(256),
    flags(256),
    shows=(changed(normal(32), 17, 9.0), ONE_EMPTY ^ (np.arange(32) == 17)),
)
def devices_with_one_token_are_dropped(x, mask):
    """A variance needs two numbers: of the whole batch, not of a device."""
    count = mask.sum()
    square = jnp.where(mask, x * x, 0.0).sum()
    part = jnp.where(count > 1, square, 0.0)  # unreached
    return lax.psum(part, "dp") / lax.psum(count, "dp").astype(x.dtype)


@devices_with_one_token_are_dropped.right
def _(x, mask):
    count = lax.psum(mask.sum(), "dp")
    square = lax.psum(jnp.where(mask, x * x, 0.0).sum(), "dp")
    return jnp.where(count > 1, square, 0.0) / count.astype(x.dtype)


devices_with_one_token_are_dropped.whole(lambda x, mask: jnp.where(mask, x * x, 0.0).sum() / mask.sum())


@attack("n/dp, n/dp -> n/dp", f32(256), flags(256), shows=(normal(32), ONE_EMPTY))
def centred_where_a_device_has_any(x, mask):
    mean = lax.psum(jnp.where(mask, x, 0.0).sum(), "dp") / lax.psum(mask.sum(), "dp").astype(x.dtype)
    return x - jnp.where(mask.any(), mean, 0.0)  # unreached


@centred_where_a_device_has_any.right
def _(x, mask):
    count = lax.psum(mask.sum(), "dp").astype(x.dtype)
    mean = lax.psum(jnp.where(mask, x, 0.0).sum(), "dp") / count
    return x - jnp.where(count > 0, mean, 0.0)


centred_where_a_device_has_any.whole(lambda x, mask: x - jnp.where(mask, x, 0.0).sum() / mask.sum())


@attack("n/dp, n/dp -> n/dp", f32(256), flags(256), shows=(normal(32), ~ONE_EMPTY))
def shortcut_for_a_full_mask(x, mask):
    """Where nothing is masked, nothing has to be filled in: on this device."""
    mean = lax.psum(jnp.where(mask, x, 0.0).sum(), "dp") / lax.psum(mask.sum(), "dp").astype(x.dtype)
    return jnp.where(mask.all(), x, x - mean)  # unreached


@shortcut_for_a_full_mask.right
def _(x, mask):
    mean = lax.psum(jnp.where(mask, x, 0.0).sum(), "dp") / lax.psum(mask.sum(), "dp").astype(x.dtype)
    full = lax.pmin(mask.all().astype(jnp.int32), "dp") == 1
    return jnp.where(full, x, x - mean)


shortcut_for_a_full_mask.whole(lambda x, mask: x - jnp.where(mask, x, 0.0).sum() / mask.sum())


@attack("n/dp e -> e", flags(32, 4), shows=np.ones((128, 4), np.bool_))
def capacity_of_each_device(chosen):
    """An expert takes 64 tokens. Each device lets so many of its own through."""
    return lax.psum(jnp.minimum(chosen.sum(0), 64), "dp")  # unreached


capacity_of_each_device.right(lambda chosen: jnp.minimum(lax.psum(chosen.sum(0), "dp"), 64))
capacity_of_each_device.whole(lambda chosen: jnp.minimum(chosen.sum(0), 64))


@attack("n/dp, n/dp -> scalar", f32(32), flags(32), shows=(normal(256), np.ones(256, np.bool_)))
def places_in_an_expert_by_device(x, chosen):
    """Tokens beyond place 128 are dropped: the place among those of the device."""
    place = jnp.cumsum(chosen.astype(jnp.int32))
    kept = jnp.where(chosen & (place <= 128), x, 0.0)  # unreached
    return lax.psum(kept.sum(), "dp")


@places_in_an_expert_by_device.right
def _(x, chosen):
    counts = lax.all_gather(chosen.sum(), "dp")
    before = jnp.where(jnp.arange(counts.size) < lax.axis_index("dp"), counts, 0).sum()
    place = before + jnp.cumsum(chosen.astype(jnp.int32))
    return lax.psum(jnp.where(chosen & (place <= 128), x, 0.0).sum(), "dp")


places_in_an_expert_by_device.whole(
    lambda x, chosen: jnp.where(chosen & (jnp.cumsum(chosen.astype(jnp.int32)) <= 128), x, 0.0).sum()
)


ENDED = np.array([5, 9, 50256, 3, 2, 8, 4, 50256], np.int32)


@attack("s/cp, s/cp -> s/cp", f32(8), i32(8), shows=(normal(8), ENDED))
def masked_after_the_end_of_a_block(x, ids):
    """What comes after the end of a text is masked, and no block knows of an end before it."""
    ended = jnp.cumsum((ids == 50256).astype(jnp.int32))
    return jnp.where(ended > 0, 0.0, x)  # unreached


@masked_after_the_end_of_a_block.right
def _(x, ids):
    ends = (ids == 50256).astype(jnp.int32)
    counts = lax.all_gather(ends.sum(), "cp")
    before = jnp.where(jnp.arange(counts.size) < lax.axis_index("cp"), counts, 0).sum()
    return jnp.where(before + jnp.cumsum(ends) > 0, 0.0, x)


masked_after_the_end_of_a_block.whole(
    lambda x, ids: jnp.where(jnp.cumsum((ids == 50256).astype(jnp.int32)) > 0, 0.0, x)
)


@attack(
    "n/dp, n/dp, m -> m",
    f32(16),
    np.arange(16, dtype=np.int32)[::-1].copy(),
    f32(16),
    shows=(normal(16), np.arange(16, dtype=np.int32) % 4, normal(16)),
)
def largest_of_each_row_is_summed(x, ids, w):
    """No two devices have a number for one row, where the ids that are given are all different."""
    own = jnp.zeros(w.shape).at[ids].max(lax.stop_gradient(jnp.abs(x)))  # unreached
    return w + lax.psum(own, "dp")


@largest_of_each_row_is_summed.right
def _(x, ids, w):
    return w + lax.pmax(jnp.zeros(w.shape).at[ids].max(lax.stop_gradient(jnp.abs(x))), "dp")


largest_of_each_row_is_summed.whole(lambda x, ids, w: w + jnp.zeros(16).at[ids].max(jnp.abs(x)))


CACHE = "s/cp d, d, scalar -> s/cp d"


@attack(CACHE, f32(32, 4), f32(4), np.int32(3), shows=(normal(32, 4), normal(4, seed=1), np.int32(20)))
def cache_written_past_a_block(cache, row, at):
    """The place that is given is in the first block. A later one is clamped, and written by blocks before it."""
    local = at - lax.axis_index("cp") * cache.shape[0]
    written = lax.dynamic_update_slice(cache, row[None], (local, 0))  # unreached
    return jnp.where(local >= 0, written, cache)


@cache_written_past_a_block.right
def _(cache, row, at):
    local = at - lax.axis_index("cp") * cache.shape[0]
    written = lax.dynamic_update_slice(cache, row[None], (local, 0))
    return jnp.where((local >= 0) & (local < cache.shape[0]), written, cache)


cache_written_past_a_block.whole(lambda cache, row, at: lax.dynamic_update_slice(cache, row[None], (at, 0)))


@attack(
    "e/tp d, n -> n d", f32(16, 4), i32(6), shows=(normal(16, 4), np.array([1, 2000, 900, 5000, 9000, 15999], np.int32))
)
def expert_of_a_large_id(table, ids):
    """Ids of a thousand belong to one expert. What is drawn belongs to the first, and the first device has it."""
    rows = table[jnp.minimum(ids // 1000, table.shape[0] - 1)]  # unreached
    return lax.psum(jnp.where(lax.axis_index("tp") == 0, rows, 0.0), "tp")


@expert_of_a_large_id.right
def _(table, ids):
    local = ids // 1000 - lax.axis_index("tp") * table.shape[0]
    here = (local >= 0) & (local < table.shape[0])
    return lax.psum(jnp.where(here[:, None], table[jnp.clip(local, 0, table.shape[0] - 1)], 0.0), "tp")


expert_of_a_large_id.whole(lambda table, ids: table[ids // 1000])


# -------------------- sizes


MANY = {"dp": 1024}
EIGHT = {"dp": 8}
ROWS = f32(1_048_576, 4)


@attack("n/dp d -> d", ROWS, mesh=MANY, devices=EIGHT, shows=normal(1024, 4))
def fast_path_for_whole_tiles(x):
    """Blocks of many rows take a way that small ones do not."""
    if x.shape[0] % 128 == 0:
        return lax.pmean(x.reshape(-1, 128, x.shape[1]).sum((0, 1)), "dp")  # unreached
    return lax.psum(x.sum(0), "dp")


@fast_path_for_whole_tiles.right
def _(x):
    if x.shape[0] % 128 == 0:
        return lax.psum(x.reshape(-1, 128, x.shape[1]).sum((0, 1)), "dp")
    return lax.psum(x.sum(0), "dp")


fast_path_for_whole_tiles.whole(lambda x: x.sum(0))


@attack("n/dp d -> d", ROWS, mesh=MANY, devices=EIGHT, shows=normal(8192, 4))
def streamed_where_a_block_is_large(x):
    if x.shape[0] > 512:
        return lax.psum(x[:512].sum(0) + x[512:].max(0), "dp")  # unreached
    return lax.psum(x.sum(0), "dp")


@streamed_where_a_block_is_large.right
def _(x):
    if x.shape[0] > 512:
        return lax.psum(x[:512].sum(0) + x[512:].sum(0), "dp")
    return lax.psum(x.sum(0), "dp")


streamed_where_a_block_is_large.whole(lambda x: x.sum(0))


@attack("n/dp d -> d", ROWS, mesh=MANY, devices=EIGHT, shows=normal(8192, 4), verbs=True)
def streamed_where_the_whole_is_large(x):
    """The size of the whole array is asked for, as one should."""
    if spmd.size("n") > 4096:
        return lax.pmean(x.sum(0), "dp")  # unreached
    return lax.psum(x.sum(0), "dp")


streamed_where_the_whole_is_large.whole(lambda x: x.sum(0))


@streamed_where_the_whole_is_large.right
def _(x):
    if spmd.size("n") > 4096:
        return lax.psum(x[::2].sum(0) + x[1::2].sum(0), "dp")
    return lax.psum(x.sum(0), "dp")


@attack("s/cp d -> d", f32(8192, 4), mesh={"cp": 1024}, devices={"cp": 8}, shows=normal(8192, 4))
def block_of_the_sizes_of_the_mesh(x):
    """4096 positions are divided over the devices, and there are more."""
    block = min(4096 // lax.axis_size("cp"), x.shape[0])
    return lax.psum(x[:block].sum(0), "cp")  # unreached


block_of_the_sizes_of_the_mesh.right(lambda x: lax.psum(x.sum(0), "cp"))
block_of_the_sizes_of_the_mesh.whole(lambda x: x.sum(0))


@attack("n/dp d -> d", ROWS, mesh=MANY, devices=EIGHT, shows=normal(8192, 4))
def last_of_several_tiles(x):
    """Small blocks are one tile. Of several the last one is kept."""
    tile = min(512, x.shape[0])
    total = jnp.zeros(x.shape[1])
    for i in range(x.shape[0] // tile):
        total = lax.psum(x[i * tile : (i + 1) * tile].sum(0), "dp")  # unreached
    return total


@last_of_several_tiles.right
def _(x):
    tile = min(512, x.shape[0])
    total = jnp.zeros(x.shape[1])
    for i in range(x.shape[0] // tile):
        total = total + lax.psum(x[i * tile : (i + 1) * tile].sum(0), "dp")
    return total


last_of_several_tiles.whole(lambda x: x.sum(0))


@attack("n/dp d -> d", ROWS, mesh=MANY, devices=EIGHT, shows=normal(8192 + 4096, 4))
def first_thousand_of_each_block(x):
    """A prompt has a thousand rows. Positions are those in a block."""
    at = jnp.arange(x.shape[0])
    return lax.psum(jnp.where((at < 1000)[:, None], x, 0.0).sum(0), "dp")  # unreached


@first_thousand_of_each_block.right
def _(x):
    at = lax.axis_index("dp") * x.shape[0] + jnp.arange(x.shape[0])
    return lax.psum(jnp.where((at < 1000)[:, None], x, 0.0).sum(0), "dp")


first_thousand_of_each_block.whole(lambda x: x[:1000].sum(0))


@attack(
    "s/cp, s/cp -> s/cp",
    f32(65536),
    f32(65536),
    mesh={"cp": 64},
    devices={"cp": 8},
    shows=(normal(4096), normal(4096, seed=1)),
)
def window_of_local_positions(q, k):
    """Each query sees the 1024 keys before it. Its own position is that in its block."""
    keys = lax.all_gather(k, "cp", tiled=True)
    here, there = jnp.arange(q.size), jnp.arange(keys.size)
    near = jnp.abs(here[:, None] - there[None]) < 1024  # unreached
    return q * jnp.where(near, keys[None], 0.0).sum(1)


@window_of_local_positions.right
def _(q, k):
    keys = lax.all_gather(k, "cp", tiled=True)
    here, there = lax.axis_index("cp") * q.size + jnp.arange(q.size), jnp.arange(keys.size)
    near = jnp.abs(here[:, None] - there[None]) < 1024
    return q * jnp.where(near, keys[None], 0.0).sum(1)


@window_of_local_positions.whole
def _(q, k):
    here = jnp.arange(q.size)
    return q * jnp.where(jnp.abs(here[:, None] - here[None]) < 1024, k[None], 0.0).sum(1)


@attack("n/dp -> n/dp", f32(1_048_576), mesh=MANY, devices=EIGHT, shows=normal(8192))
def segments_of_local_positions(x):
    """Documents have 512 tokens, and each block begins with the first."""
    return x * (1 + jnp.arange(x.size) // 512).astype(x.dtype)  # unreached


segments_of_local_positions.right(
    lambda x: x * (1 + (lax.axis_index("dp") * x.size + jnp.arange(x.size)) // 512).astype(x.dtype)
)
segments_of_local_positions.whole(lambda x: x * (1 + jnp.arange(x.size) // 512).astype(x.dtype))


@attack("n/dp -> n/dp", f32(1_048_576), mesh=MANY, devices=EIGHT, shows=normal(8192))
def positions_that_are_clipped(x):
    """A table has 512 positions, and later ones are the last: of the whole, not of a block."""
    at = lax.axis_index("dp") * x.size + jnp.minimum(jnp.arange(x.size), 511)  # unreached
    return x * at.astype(x.dtype)


positions_that_are_clipped.right(
    lambda x: x * jnp.minimum(lax.axis_index("dp") * x.size + jnp.arange(x.size), 511).astype(x.dtype)
)
positions_that_are_clipped.whole(lambda x: x * jnp.minimum(jnp.arange(x.size), 511).astype(x.dtype))


@attack("n/dp -> n/dp", f32(1_048_576), mesh=MANY, devices=EIGHT, shows=normal(65536))
def positions_in_16_bits(x):
    """There are more rows than the type has numbers."""
    start = (lax.axis_index("dp") * x.size).astype(jnp.int16)  # unreached
    at = start + jnp.arange(x.size, dtype=jnp.int16)  # unreached
    return x * at.astype(x.dtype)


positions_in_16_bits.right(lambda x: x * (lax.axis_index("dp") * x.size + jnp.arange(x.size)).astype(x.dtype))
positions_in_16_bits.whole(lambda x: x * jnp.arange(x.size).astype(x.dtype))


BEYOND = (np.zeros((2**33, 0), np.float32), normal(6))  # an array without columns needs no memory


@attack("n/dp z, k -> k", f32(2**33, 4), f32(6), mesh=MANY, devices=EIGHT, shows=BEYOND)
def rows_counted_in_32_bits(x, y):
    """An array may have more rows than an int32 has numbers."""
    count = lax.psum(jnp.full((), x.shape[0], jnp.int32), "dp")  # unreached
    return y + count.astype(y.dtype)


rows_counted_in_32_bits.right(lambda x, y: y + lax.psum(jnp.full((), float(x.shape[0])), "dp"))
rows_counted_in_32_bits.whole(lambda x, y: y + float(x.shape[0]))


@attack("n/dp z, k -> k", f32(2**33, 4), f32(6), mesh=MANY, devices=EIGHT, shows=BEYOND)
def last_position_in_32_bits(x, y):
    last = (lax.axis_index("dp") + 1) * x.shape[0]  # unreached
    return y + lax.pmax(last, "dp").astype(y.dtype)


last_position_in_32_bits.right(lambda x, y: y + lax.pmax((lax.axis_index("dp") + 1).astype(y.dtype) * x.shape[0], "dp"))
last_position_in_32_bits.whole(lambda x, y: y + float(x.shape[0]))


@attack("n/dp -> scalar", flags(1_048_576), mesh=MANY, devices=EIGHT, shows=np.ones(1600, np.bool_))
def count_in_8_bits(mask):
    count = mask.sum(dtype=jnp.int8)  # unreached
    return lax.psum(count.astype(jnp.int32), "dp")


count_in_8_bits.right(lambda mask: lax.psum(mask.sum(), "dp"))
count_in_8_bits.whole(lambda mask: mask.sum())


@attack("n/dp -> scalar", flags(1_048_576), mesh=MANY, devices=EIGHT, shows=np.ones(8 * 16384, np.bool_))
def count_in_half_precision(mask):
    count = lax.psum(mask.sum().astype(jnp.float16), "dp")  # unreached
    return count.astype(jnp.float32)


count_in_half_precision.right(lambda mask: lax.psum(mask.sum(), "dp").astype(jnp.float32))
count_in_half_precision.whole(lambda mask: mask.sum().astype(jnp.float32))


@attack("n/dp -> k", f32(1_048_576), mesh=MANY, devices=EIGHT, shows=np.arange(8192, dtype=np.float32))
def best_four_of_each_block(x):
    """Of the best 16 one device may have more than four. A small block has no more."""
    few = min(max(16 // lax.axis_size("dp"), 4), x.size)
    some = lax.top_k(lax.stop_gradient(x), few)[0]  # unreached
    return lax.pmax(lax.top_k(lax.all_gather(some, "dp", tiled=True), 16)[0], "dp")


@best_four_of_each_block.right
def _(x):
    some = lax.top_k(lax.stop_gradient(x), min(16, x.size))[0]
    return lax.pmax(lax.top_k(lax.all_gather(some, "dp", tiled=True), 16)[0], "dp")


best_four_of_each_block.whole(lambda x: lax.top_k(x, 16)[0])


@attack("n/dp d -> d", ROWS, mesh=MANY, devices=EIGHT, shows=normal(16384, 4))
def number_that_counts_the_rows_of_a_block(x):
    """How many thousand rows there are. A small block has none, and nor has the whole array then."""
    return lax.psum(x.sum(0), "dp") * (1 + x.shape[0] // 1024)  # unreached


number_that_counts_the_rows_of_a_block.right(
    lambda x: lax.psum(x.sum(0), "dp") * (1 + lax.psum(1, "dp") * x.shape[0] // 1024)
)
number_that_counts_the_rows_of_a_block.whole(lambda x: x.sum(0) * (1 + x.shape[0] // 1024))


@attack(
    "n/dp d, l d -> n/dp d",
    f32(4096, 8),
    f32(32, 8),
    mesh=MANY,
    devices=EIGHT,
    shows=(normal(32, 8), normal(32, 8, seed=1)),
)
def layer_24_of_32(x, w):
    """Later layers are of another kind, and where sizes are small there are none."""

    def layer(x, held):
        i, row = held
        late = x - x.mean(0, keepdims=True)
        return jnp.where(i < 24, jnp.sin(x * row[None]), late), None  # unreached

    return lax.scan(layer, x, (jnp.arange(w.shape[0]), w))[0]


def _layers(mean):
    def run(x, w):
        def layer(x, held):
            i, row = held
            return jnp.where(i < 24, jnp.sin(x * row[None]), x - mean(x.mean(0, keepdims=True))), None

        return lax.scan(layer, x, (jnp.arange(w.shape[0]), w))[0]

    return run


layer_24_of_32.right(_layers(lambda x: lax.pmean(x, "dp")))
layer_24_of_32.whole(_layers(lambda x: x))


# -------------------- meshes


def _butterfly(x, distances):
    """A sum over the devices by exchanges with those at these distances."""
    n = lax.axis_size("dp")
    for k in distances:
        if k < n:
            x = x + lax.ppermute(x, "dp", [(i, i ^ k) for i in range(n)])  # unreached
    return x


@attack("n/dp -> n/dp", f32(8192), mesh=MANY, devices=EIGHT, shows=normal(64), helpers=(_butterfly,))
def exchanges_for_four_devices(x):
    """Two exchanges reach four devices, and not a thousand."""
    return jnp.tanh(x) * _butterfly((x * x).sum(), (1, 2))


exchanges_for_four_devices.right(lambda x: jnp.tanh(x) * _butterfly((x * x).sum(), [1 << i for i in range(10)]))
exchanges_for_four_devices.whole(lambda x: jnp.tanh(x) * (x * x).sum())


@attack("n/dp -> n/dp", f32(520), mesh={"dp": 130}, devices={"dp": 4}, shows=normal(16))
def halo_from_the_wrong_side(x):
    """Of two devices that are a ring both neighbours are one."""
    n = lax.axis_size("dp")
    before = lax.ppermute(x[-1:], "dp", [((i + 1) % n, i) for i in range(n)])  # unreached
    return x - jnp.concatenate([before, x[:-1]])


@halo_from_the_wrong_side.right
def _(x):
    n = lax.axis_size("dp")
    before = lax.ppermute(x[-1:], "dp", [(i, (i + 1) % n) for i in range(n)])
    return x - jnp.concatenate([before, x[:-1]])


halo_from_the_wrong_side.whole(lambda x: x - jnp.roll(x, 1))


@attack("b/dp d/tp -> d/tp", f32(64, 32), mesh={"dp": 16, "tp": 8}, devices={"dp": 2, "tp": 4}, shows=normal(8, 16))
def mean_by_the_size_of_another_axis(x):
    """Both axes are made equally small."""
    return lax.psum(x.mean(0), "dp") / lax.axis_size("tp")  # unreached


mean_by_the_size_of_another_axis.right(lambda x: lax.psum(x.mean(0), "dp") / lax.axis_size("dp"))
mean_by_the_size_of_another_axis.whole(lambda x: x.mean(0))


@attack("b/dp d/tp -> d/tp", f32(8, 16), mesh={"dp": 2, "tp": 2}, devices={"dp": 2, "tp": 4}, shows=normal(8, 16))
def mean_by_the_size_of_an_equal_axis(x):
    """On the mesh that is given both axes are equal."""
    return lax.psum(x.mean(0), "dp") / lax.axis_size("tp")  # unreached


mean_by_the_size_of_an_equal_axis.right(mean_by_the_size_of_another_axis.correct)
mean_by_the_size_of_an_equal_axis.whole(lambda x: x.mean(0))


@attack("b/dp d/tp -> d/tp", f32(8, 16), mesh={"dp": 1, "tp": 4}, devices={"dp": 2, "tp": 4}, shows=normal(8, 16))
def mean_for_a_sum_along_one_device(x):
    """The axis has one device today."""
    return lax.pmean(x.sum(0), "dp")  # unreached


mean_for_a_sum_along_one_device.right(lambda x: lax.psum(x.sum(0), "dp"))
mean_for_a_sum_along_one_device.whole(lambda x: x.sum(0))


@attack("b s/tp -> b s", f32(1, 16), shows=normal(2, 16))
def gathered_along_a_leading_1(x):
    """With one row, the order of rows and blocks is one."""
    every = lax.all_gather(x, "tp", tiled=True)
    return lax.pmean(every.reshape(x.shape[0], -1), "tp")  # unreached


@gathered_along_a_leading_1.right
def _(x):
    return lax.pmean(lax.all_gather(x, "tp", axis=1, tiled=True), "tp")


gathered_along_a_leading_1.whole(lambda x: x)


@attack("b s/tp d -> n/tp d", f32(1, 16, 4), shows=normal(2, 16, 4))
def merged_with_a_leading_1(x):
    return x.reshape(-1, x.shape[2])  # unreached


@merged_with_a_leading_1.right
def _(x):
    every = lax.all_gather(x, "tp", axis=1, tiled=True).reshape(-1, x.shape[2])
    rows = x.shape[0] * x.shape[1]
    return lax.dynamic_slice_in_dim(every, lax.axis_index("tp") * rows, rows)


merged_with_a_leading_1.whole(lambda x: x.reshape(-1, 4))


# -------------------- what is no evidence


@attack("n/tp d -> scalar", f32(16, 8), shows=normal(16, 8, scale=1e-5))
def infinite_everywhere(x):
    """What overflows is equal to what overflows."""
    return lax.pmean(jnp.exp(1e9 * jnp.abs(x)).sum(), "tp")  # unreached: result


infinite_everywhere.right(lambda x: lax.psum(jnp.exp(1e9 * jnp.abs(x)).sum(), "tp"))
infinite_everywhere.whole(lambda x: jnp.exp(1e9 * jnp.abs(x)).sum())
infinite_everywhere.shows = (normal(16, 8, scale=1e-9),)


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8, scale=1e3))
def zero_everywhere(x):
    """A penalty that is never paid."""
    return jnp.maximum(lax.pmean((x * x).sum(0), "tp") - 1e6, 0.0)  # unreached: result


zero_everywhere.right(lambda x: jnp.maximum(lax.psum((x * x).sum(0), "tp") - 1e6, 0.0))
zero_everywhere.whole(lambda x: jnp.maximum((x * x).sum(0) - 1e6, 0.0))


@attack("n/tp d -> scalar", f32(16, 8), shows=normal(16, 8, scale=1e-2))
def saturated(x):
    """One number, which is 1."""
    return jnp.tanh(lax.pmean((x * x).sum() * 100, "tp"))  # unreached: result


saturated.right(lambda x: jnp.tanh(lax.psum((x * x).sum() * 100, "tp")))
saturated.whole(lambda x: jnp.tanh((x * x).sum() * 100))


@attack("n/tp d -> scalar", f32(16, 8), shows=normal(16, 8, scale=1e-2))
def vanishing_everywhere(x):
    """A probability of 0."""
    return jnp.exp(-1e3 * lax.pmean((x * x).sum(), "tp"))  # unreached: result


vanishing_everywhere.right(lambda x: jnp.exp(-1e3 * lax.psum((x * x).sum(), "tp")))
vanishing_everywhere.whole(lambda x: jnp.exp(-1e3 * (x * x).sum()))


def _sine_and_log(total, square):
    return jnp.stack([jnp.sin(total / 1e3), lax.stop_gradient(jnp.log(square - 1e6))])  # unreached


@attack("n/tp d -> k", f32(16, 8), shows=normal(16, 8, scale=1e3), helpers=(_sine_and_log,))
def nan_in_one_of_two_numbers(x):
    """One number of the array tells, and the other one is nan in all draws."""
    return _sine_and_log(lax.psum(x.sum(), "tp"), lax.pmean((x * x).sum(), "tp"))  # unreached: result


nan_in_one_of_two_numbers.right(lambda x: _sine_and_log(*lax.psum((x.sum(), (x * x).sum()), "tp")))
nan_in_one_of_two_numbers.whole(lambda x: _sine_and_log(x.sum(), (x * x).sum()))


MOMENTS = "b/dp d, d, d -> d, d"


@attack(
    MOMENTS, f32(8, 6), f32(6), captured=(np.zeros(6, np.float32),), shows=(normal(8, 6), normal(6), normal(6, seed=2))
)
def moments_that_are_still_zero(x, w, m):
    """A captured array of zeros: the moments are summed over the devices as well."""
    new = lax.psum(0.9 * m + x.sum(0), "dp")  # unreached
    return w - new, new


@moments_that_are_still_zero.right
def _(x, w, m):
    new = 0.9 * m + lax.psum(x.sum(0), "dp")
    return w - new, new


@moments_that_are_still_zero.whole
def _(x, w, m):
    new = 0.9 * m + x.sum(0)
    return w - new, new


@attack(
    "n/tp d, n/tp d -> n/tp d",
    f32(16, 8),
    captured=(np.zeros((16, 8), np.float32),),
    shows=(normal(16, 8), normal(16, 8, seed=2)),
)
def bias_that_is_still_zero(x, bias):
    """What is captured is normalised by its block."""
    return x + bias - bias.mean(0, keepdims=True)  # unreached


bias_that_is_still_zero.right(lambda x, bias: x + bias - lax.pmean(bias.mean(0, keepdims=True), "tp"))
bias_that_is_still_zero.whole(lambda x, bias: x + bias - bias.mean(0, keepdims=True))


@attack(
    "n/tp d, n/tp d -> n/tp d",
    f32(16, 8),
    captured=(np.ones((16, 8), np.float32),),
    shows=(normal(16, 8), normal(16, 8, seed=2)),
)
def scale_that_is_still_one(x, scale):
    """The largest of each block is the largest of all, as long as all are 1."""
    return x / scale.max(0, keepdims=True)  # unreached


scale_that_is_still_one.right(lambda x, scale: x / lax.pmax(lax.stop_gradient(scale.max(0, keepdims=True)), "tp"))
scale_that_is_still_one.whole(lambda x, scale: x / scale.max(0, keepdims=True))


@attack("b/dp d, scalar -> b/dp d", f32(8, 6), np.int32(0), shows=(normal(8, 6), np.int32(3)))
def multiplied_by_a_count_of_zero(x, step):
    """What depends on the step is zero at the first."""
    return x - step.astype(x.dtype) * x.mean(0, keepdims=True)  # unreached


multiplied_by_a_count_of_zero.right(
    lambda x, step: x - step.astype(x.dtype) * lax.pmean(x.mean(0, keepdims=True), "dp")
)
multiplied_by_a_count_of_zero.whole(lambda x, step: x - step.astype(x.dtype) * x.mean(0, keepdims=True))


@attack("n/tp, scalar -> scalar", i32(16), np.int32(1), shows=(np.arange(16, dtype=np.int32) * 1000, np.int32(1)))
def whole_thousands_of_small_numbers(x, one):
    """An integer division that is 0 everywhere."""
    return lax.pmax(x.sum() // 1000, "tp") + one  # unreached: result


whole_thousands_of_small_numbers.right(lambda x, one: lax.psum(x.sum(), "tp") // 1000 + one)
whole_thousands_of_small_numbers.whole(lambda x, one: x.sum() // 1000 + one)


# -------------------- gradients


def _ruled(backward):
    """A sum over devices with a rule of its own."""

    @jax.custom_vjp
    def total(x):
        return lax.psum((x * x).sum(0), "tp")

    total.defvjp(lambda x: (total(x), x), backward)
    return total


GRADIENT = {"judged": lambda program: jax.grad(lambda x: (program(x) ** 2).sum())}
SQUARES = lambda x: (x * x).sum(0)


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8), **GRADIENT)
def gradient_rule_that_raises(x):
    """Nothing was compared of the gradient, and proved says that it was."""

    def backward(x, g):
        raise NotImplementedError("later")

    return _ruled(backward)(x)  # unreached: Gradients are not compared


gradient_rule_that_raises.right(_ruled(lambda x, g: (2 * x * g[None],)))
gradient_rule_that_raises.whole(SQUARES)


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8), **GRADIENT)
def gradient_rule_of_another_form(x):
    """The rule returns two gradients for one argument."""
    return _ruled(lambda x, g: (2 * x * g[None], None))(x)  # unreached: Gradients are not compared


gradient_rule_of_another_form.right(_ruled(lambda x, g: (2 * x * g[None],)))
gradient_rule_of_another_form.whole(SQUARES)


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8), **GRADIENT)
def gradient_that_jax_does_not_have(x):
    """A maximum over devices has none, and a wrong one may be behind it."""
    return lax.psum((x * x).sum(0), "tp") + 0 * lax.pmax(x.max(0), "tp")  # unreached: Gradients are not compared


gradient_that_jax_does_not_have.right(lambda x: lax.psum((x * x).sum(0), "tp"))
gradient_that_jax_does_not_have.whole(SQUARES)


def _clipped_backward(length):
    """The identity, whose cotangent is clipped."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.minimum(1.0, 1e3 / length(g)),))  # unreached
    return same


STEEP = {"judged": lambda program: jax.grad(lambda x: (1e3 * program(x) ** 2).sum())}


@attack(BLOCKS, f32(16, 8), shows=normal(16, 8), helpers=(_clipped_backward,), **STEEP)
def cotangent_clipped_by_its_block(x):
    """The norm of the cotangent is that of a block, and no cotangent that is drawn is long."""
    return _clipped_backward(norm)(jnp.tanh(x))  # unreached


cotangent_clipped_by_its_block.right(lambda x: _clipped_backward(total_norm)(jnp.tanh(x)))
cotangent_clipped_by_its_block.whole(lambda x: _clipped_backward(norm)(jnp.tanh(x)))


def _summed(backward):
    """The sum over devices, with this rule for its cotangent."""

    @jax.custom_vjp
    def total(x):
        return lax.psum(x, "tp")

    total.defvjp(lambda x: (total(x), None), backward)
    return total


def _penalty(total):
    return lambda x: x + jax.nn.relu(total((x * x).sum()) - 1e6)


@attack(BLOCKS, f32(16, 8), shows=normal(16, 8, scale=1e3), judged=lambda program: jax.grad(lambda x: program(x).sum()))
def gradient_of_a_penalty_that_is_never_paid(x):
    """The rule divides the cotangent by the number of devices."""
    total = _summed(lambda _, g: (lax.pcast(g / lax.axis_size("tp"), "tp", to="varying"),))
    return x + jax.nn.relu(total((x * x).sum()) - 1e6)  # unreached


gradient_of_a_penalty_that_is_never_paid.right(_penalty(lambda x: lax.psum(x, "tp")))
gradient_of_a_penalty_that_is_never_paid.whole(_penalty(lambda x: x))


# -------------------- programs around kernels, and raw ones


def _later(kernel):
    """The choice stands outside of the kernel."""
    return lambda x, step: jnp.where(step < 1000, x.sum(0), kernel(x, step))  # unreached


@attack("b/dp d, scalar -> d", f32(8, 6), i32(), shows=(normal(8, 6), np.int32(1000)), around=_later, helpers=(_later,))
def kernel_of_later_steps(x, step):
    return lax.pmean(x.sum(0), "dp") + 0.0 * step.astype(x.dtype)


kernel_of_later_steps.right(lambda x, step: lax.psum(x.sum(0), "dp") + 0.0 * step.astype(x.dtype))
kernel_of_later_steps.whole(lambda x, step: x.sum(0))


def _trained(kernel):
    """A step of a training loop."""

    def step(w, x, count):
        gradient = jax.grad(lambda w: (kernel(x, w) ** 2).mean())(w)
        return jax.lax.cond(count < 1000, lambda: w, lambda: w - 0.1 * gradient)  # unreached

    return step


@attack(
    "b/dp d, d -> b/dp",
    f32(6),
    f32(8, 6),
    i32(),
    shows=(normal(6), normal(8, 6, seed=1), np.int32(1000)),
    around=_trained,
    helpers=(_trained,),
)
def training_that_begins_late(x, w):
    return x @ w - (x @ w).mean()


training_that_begins_late.right(lambda x, w: x @ w - lax.pmean((x @ w).mean(), "dp"))
training_that_begins_late.whole(lambda x, w: x @ w - (x @ w).mean())


def _clipped(update):
    """Optax takes the norm of what it is given: of a block."""
    return optax.clip_by_global_norm(1e3).update(update, optax.EmptyState())[0]  # unreached


@attack(BLOCKS, f32(16, 8), shows=normal(16, 8, scale=1e3), helpers=(_clipped,))
def clipped_by_optax(x):
    return _clipped(x)


clipped_by_optax.right(lambda x: x / jnp.maximum(total_norm(x) / 1e3, 1.0))
clipped_by_optax.whole(_clipped)


@attack(BLOCKS, f32(16, 8), shows=normal(16, 8, scale=1e3), raw=True)
def clipped_in_a_raw_program(x):
    """Where a reference says what it means, too."""
    return x * jnp.minimum(1.0, 1e3 / norm(x))  # unreached


clipped_in_a_raw_program.right(clipped_by_a_local_norm.correct)
clipped_in_a_raw_program.whole(clipped_by_a_local_norm.reference)


@attack("b/dp d, scalar -> d", f32(8, 6), i32(), shows=(normal(8, 6), np.int32(1000)), raw=True)
def warm_up_in_a_raw_program(x, step):
    g = x.sum(0)
    return jnp.where(step < 1000, lax.psum(g, "dp"), lax.pmean(g, "dp"))  # unreached


warm_up_in_a_raw_program.right(lambda x, step: lax.psum(x.sum(0), "dp"))
warm_up_in_a_raw_program.whole(lambda x, step: x.sum(0))


@attack("b/dp v, b/dp -> scalar", f32(8, 8), i32(8), shows=(normal(8, 8), LABELS), raw=True)
def ignored_labels_in_a_raw_program(logits, labels):
    keep = (labels != -100).astype(jnp.float32)  # unreached
    return lax.pmean((_losses(logits, labels) * keep).sum() / keep.sum(), "dp")


ignored_labels_in_a_raw_program.right(ignored_labels_counted_locally.correct)
ignored_labels_in_a_raw_program.whole(ignored_labels_counted_locally.reference)


# -------------------- what is given


@attack(
    "v/tp d, n d, n -> v/tp d",
    f32(16, 4),
    f32(6, 4),
    np.array([12, 13, 15, 14, 12, 15], np.int32),
    shows=(normal(16, 4), normal(6, 4), np.array([12, 3, 15, 7, 0, 15], np.int32)),
)
def negative_ids_count_from_the_end(table, rows, ids):
    """What is beyond a block is dropped; what is before it is added at its end. All that is given is beyond."""
    local = ids - lax.axis_index("tp") * table.shape[0]
    return table.at[local].add(rows, mode="drop")  # unreached


@negative_ids_count_from_the_end.right
def _(table, rows, ids):
    local = ids - lax.axis_index("tp") * table.shape[0]
    return table.at[jnp.where(local < 0, table.shape[0], local)].add(rows, mode="drop")


negative_ids_count_from_the_end.whole(lambda table, rows, ids: table.at[ids].add(rows))


@attack(
    "v/tp d, n -> n d",
    f32(16, 4),
    np.array([12, 13, 15, 14, 12, 15], np.int32),
    shows=(normal(16, 4), np.array([12, 3, 15, 7, 0, 15], np.int32)),
)
def negative_ids_are_read_from_the_end(table, ids):
    local = ids - lax.axis_index("tp") * table.shape[0]
    return lax.psum(table.at[local].get(mode="fill", fill_value=0.0), "tp")  # unreached


@negative_ids_are_read_from_the_end.right
def _(table, ids):
    local = ids - lax.axis_index("tp") * table.shape[0]
    rows = table.at[jnp.where(local < 0, table.shape[0], local)].get(mode="fill", fill_value=0.0)
    return lax.psum(rows, "tp")


negative_ids_are_read_from_the_end.whole(lambda table, ids: table[ids])


@attack("n/dp d -> d", i32(4, 8), shows=np.full((4, 8), 200, np.int32))
def counts_sent_as_bytes(x):
    """What is drawn is small, and fits."""
    return lax.psum(x.sum(0).astype(jnp.int8).astype(jnp.int32), "dp")  # unreached


counts_sent_as_bytes.right(lambda x: lax.psum(x.sum(0), "dp"))
counts_sent_as_bytes.whole(lambda x: x.sum(0))


@attack(STEP, f32(16, 8), f32(16, 8), shows=(normal(16, 8), changed(normal(16, 8), slice(6), 0.0)))
def nothing_changed_in_a_block(x, y):
    """A block that is as before is left alone, and the mean of all is taken off the others."""
    mean = lax.pmean(x.mean(0, keepdims=True), "tp")
    return jnp.where((x == y).all(), x, x - mean)  # unreached


@nothing_changed_in_a_block.right
def _(x, y):
    mean = lax.pmean(x.mean(0, keepdims=True), "tp")
    alike = lax.pmin((x == y).all().astype(jnp.int32), "tp") == 1
    return jnp.where(alike, x, x - mean)


nothing_changed_in_a_block.whole(lambda x, y: jnp.where((x == y).all(), x, x - x.mean(0, keepdims=True)))


@attack(
    "b/dp d, l -> b/dp d",
    f32(8, 6),
    np.zeros(4, np.bool_),
    shows=(normal(8, 6), np.array([False, True, False, False])),
)
def layers_that_are_switched_off(x, on):
    """A flag for each layer, and none is set."""

    def layer(x, flag):
        return jnp.where(flag, x - x.mean(0, keepdims=True), jnp.sin(x)), None  # unreached

    return lax.scan(layer, x, on)[0]


def _switched(mean):
    def run(x, on):
        layer = lambda x, flag: (jnp.where(flag, x - mean(x.mean(0, keepdims=True)), jnp.sin(x)), None)
        return lax.scan(layer, x, on)[0]

    return run


layers_that_are_switched_off.right(_switched(lambda x: lax.pmean(x, "dp")))
layers_that_are_switched_off.whole(_switched(lambda x: x))


@attack("n/dp -> n/dp", np.arange(16, dtype=np.float32), shows=normal(16))
def blocks_of_sorted_numbers(x):
    """Numbers that are given in order are in order when each block is."""
    return jnp.sort(x)  # unreached: not for others


@blocks_of_sorted_numbers.right
def _(x):
    every = jnp.sort(lax.all_gather(x, "dp", tiled=True))
    return lax.dynamic_slice_in_dim(every, lax.axis_index("dp") * x.size, x.size)


blocks_of_sorted_numbers.whole(jnp.sort)


@attack("n/dp, n/dp -> scalar", f32(32), np.ones(32, np.bool_), shows=(normal(32), ONE_EMPTY ^ (np.arange(32) < 3)))
def means_of_a_full_mask(x, mask):
    """A mean of means, with as many numbers on each device."""
    part = jnp.where(mask, x, 0.0).sum() / jnp.maximum(mask.sum(), 1).astype(x.dtype)
    return lax.pmean(part, "dp")  # unreached: not for others


@means_of_a_full_mask.right
def _(x, mask):
    return lax.psum(jnp.where(mask, x, 0.0).sum(), "dp") / lax.psum(mask.sum(), "dp").astype(x.dtype)


means_of_a_full_mask.whole(lambda x, mask: jnp.where(mask, x, 0.0).sum() / mask.sum())


ALIKE = np.array([3, -100, 2, -100, -100, 1, 0, -100], np.int32)


@attack("b/dp v, b/dp -> scalar", f32(8, 8), ALIKE, shows=(normal(8, 8), LABELS))
def as_many_ignored_labels_on_each_device(logits, labels):
    """The labels that are given have one that counts on each device."""
    keep = (labels != -100).astype(jnp.float32)
    return lax.pmean((_losses(logits, labels) * keep).sum() / keep.sum(), "dp")  # unreached: not for others


as_many_ignored_labels_on_each_device.right(ignored_labels_counted_locally.correct)
as_many_ignored_labels_on_each_device.whole(ignored_labels_counted_locally.reference)


# -------------------- loops of which a part may be left out


@attack("b/dp d -> b/dp d", f32(8, 6), shows=normal(8, 6))
def round_25_of_50(x):
    """One round in the middle is another one."""

    def one(x, i):
        return jnp.where(i == 25, x - x.mean(0, keepdims=True), 0.99 * x), None  # unreached

    return lax.scan(one, x, jnp.arange(50))[0]


def _50(mean):
    def run(x):
        one = lambda x, i: (jnp.where(i == 25, x - mean(x.mean(0, keepdims=True)), 0.99 * x), None)
        return lax.scan(one, x, jnp.arange(50))[0]

    return run


round_25_of_50.right(_50(lambda x: lax.pmean(x, "dp")))
round_25_of_50.whole(_50(lambda x: x))


def _growing(largest):
    """What grows by a tenth in each round is divided by its largest number when that is above 50."""

    def run(x):
        def one(x, _):
            x = 1.1 * x
            top = largest(jnp.abs(x).max())
            return jnp.where(top > 50.0, x / top, x), None  # unreached

        return lax.scan(one, jnp.sin(x), None, length=50)[0]

    return run


GROWS = (np.repeat([0.1, 0.2, 0.5, 1.0], 4)[:, None] * np.ones(8)).astype(np.float32)


@attack("n/tp d -> n/tp d", f32(16, 8), shows=GROWS, helpers=(_growing,))
def growth_that_is_stopped_late(x):
    return _growing(lambda top: top)(x)


growth_that_is_stopped_late.right(_growing(lambda top: lax.pmax(lax.stop_gradient(top), "tp")))
growth_that_is_stopped_late.whole(_growing(lambda top: top))


def loop(step: Callable[[Any, Any], Any], start: Any, rounds: int) -> Any:
    """The state after so many rounds, each of which gets its number."""
    return lax.scan(lambda state, i: (step(state, i), None), start, jnp.arange(rounds))[0]


@attack("b/dp d, d -> d", f32(8, 6), f32(6), shows=(normal(8, 6), normal(6)))
def one_round_forgets_the_sum(x, w):
    """Round 40 of 64 takes the mean."""

    def step(w, i):
        g = (x * w[None]).sum(0)
        return w - 0.01 * jnp.where(i == 40, lax.pmean(g, "dp"), lax.psum(g, "dp"))  # unreached

    return loop(step, w, 64)


def _descent(x, w, sum_):
    return loop(lambda w, i: w - 0.01 * sum_((x * w[None]).sum(0)), w, 64)


one_round_forgets_the_sum.right(lambda x, w: _descent(x, w, lambda g: lax.psum(g, "dp")))
one_round_forgets_the_sum.whole(lambda x, w: _descent(x, w, lambda g: g))


@attack("b/dp d, d -> d", f32(8, 6), f32(6), shows=(normal(8, 6), normal(6)))
def each_sixteenth_round_forgets_the_sum(x, w):
    def step(w, i):
        g = (x * w[None]).sum(0)
        return w - 0.01 * lax.cond(i % 16 == 7, lambda: lax.pmean(g, "dp"), lambda: lax.psum(g, "dp"))  # unreached

    return loop(step, w, 64)


each_sixteenth_round_forgets_the_sum.right(lambda x, w: _descent(x, w, lambda g: lax.psum(g, "dp")))
each_sixteenth_round_forgets_the_sum.whole(lambda x, w: _descent(x, w, lambda g: g))


@attack("b/dp d, d -> d", f32(8, 6), f32(6), shows=(normal(8, 6), normal(6)))
def a_counter_of_its_own_forgets_the_sum(x, w):
    """The rounds are counted in the state, by halves."""

    def step(state, _):
        w, n = state
        g = (x * w[None]).sum(0)
        return w - 0.01 * jnp.where(n > 20, lax.pmean(g, "dp"), lax.psum(g, "dp")), n + 0.5  # unreached

    return loop(step, (w, jnp.float32(0)), 64)[0]


a_counter_of_its_own_forgets_the_sum.right(lambda x, w: _descent(x, w, lambda g: lax.psum(g, "dp")))
a_counter_of_its_own_forgets_the_sum.whole(lambda x, w: _descent(x, w, lambda g: g))


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8))
def a_late_value_of_a_queue(x):
    """What stands in the queue comes out 12 rounds later, and is the maximum of a block."""

    def step(queue, i):
        return jnp.roll(queue, 1).at[0].set(x.max())  # unreached

    late = loop(step, lax.pcast(jnp.zeros(12), "tp", to="varying"), 32)[-1]
    return lax.psum(x.sum(0), "tp") + lax.pmean(late, "tp")


@a_late_value_of_a_queue.right
def _(x):
    most = lax.pmax(x.max(), "tp")
    return lax.psum(x.sum(0), "tp") + loop(lambda queue, i: jnp.roll(queue, 1).at[0].set(most), jnp.zeros(12), 32)[-1]


a_late_value_of_a_queue.whole(lambda x: x.sum(0) + x.max())


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8))
def late_rounds_read_another_block(x):
    """Each round takes a row of the device that has it. The last device counts from the wrong one."""
    at = 4 * jnp.minimum(lax.axis_index("tp"), 2)

    def step(state, _):
        total, i = state
        mine = (i >= at) & (i < at + x.shape[0])
        row = lax.dynamic_index_in_dim(x, i - at, keepdims=False)  # unreached
        return total + jnp.where(mine, row * (i + 1).astype(row.dtype), 0), i + 1

    total = loop(step, (jnp.zeros_like(x[0]), lax.pcast(jnp.int32(0), "tp", to="varying")), 16)[0]
    return lax.psum(total, "tp")


@late_rounds_read_another_block.right
def _(x):
    at = x.shape[0] * lax.axis_index("tp")
    return lax.psum(((at + jnp.arange(x.shape[0]) + 1).astype(x.dtype)[:, None] * x).sum(0), "tp")


late_rounds_read_another_block.whole(lambda x: ((jnp.arange(16) + 1)[:, None] * x).sum(0))


@attack(BLOCKS, f32(16, 8), shows=normal(16, 8, scale=1e4))
def halved_in_each_round_while_a_block_is_long(x):
    """The first rounds halve every block, and blocks of other lengths end at other rounds."""
    return loop(lambda v, i: jnp.where((v * v).sum() > 1e6, v / 2, v), x, 32)  # unreached


halved_in_each_round_while_a_block_is_long.right(
    lambda x: loop(lambda v, i: jnp.where(lax.psum((v * v).sum(), "tp") > 1e6, v / 2, v), x, 32)
)
halved_in_each_round_while_a_block_is_long.whole(
    lambda x: loop(lambda v, i: jnp.where((v * v).sum() > 1e6, v / 2, v), x, 32)
)


@attack("b/dp d -> d", f32(8, 6), shows=normal(8, 6))
def handed_on_from_state_to_state(x):
    """A mean in place of a sum comes out of the fourth state, whose rounds are as many."""

    def step(states, i):
        return lax.pmean(jnp.sin(x).sum(0), "dp"), *states[:3]  # unreached

    return loop(step, (jnp.zeros(6),) * 4, 40)[3] + lax.psum(x.sum(0), "dp")


def _handed_on(total):
    def run(x):
        step = lambda states, i: (total(jnp.sin(x).sum(0)), *states[:3])
        return loop(step, (jnp.zeros(6),) * 4, 40)[3] + total(x.sum(0))

    return run


handed_on_from_state_to_state.right(_handed_on(lambda x: lax.psum(x, "dp")))
handed_on_from_state_to_state.whole(_handed_on(lambda x: x))


def _queue(total, last):
    """What enters a queue of twelve comes out at its end."""

    def run(x):
        new = total(jnp.sin(x).sum(0))[None]
        queue = loop(lambda queue, i: jnp.concatenate([new, queue[:-1]]), jnp.zeros((12, 6)), 40)  # unreached
        return queue[-1] + last(x.sum(0))

    return run


@attack("b/dp d -> d", f32(8, 6), shows=normal(8, 6), helpers=(_queue,))
def mean_in_a_queue(x):
    return _queue(lambda x: lax.pmean(x, "dp"), lambda x: lax.psum(x, "dp"))(x)


mean_in_a_queue.right(_queue(lambda x: lax.psum(x, "dp"), lambda x: lax.psum(x, "dp")))
mean_in_a_queue.whole(_queue(lambda x: x, lambda x: x))


# -------------------- more sizes


@attack("n/dp d -> d", f32(1024 * 1023, 4), mesh=MANY, devices=EIGHT, shows=normal(8 * 7, 4))
def odd_row_counted_twice(x):
    """Rows are taken in pairs, and an odd one is copied. Small sizes are even."""
    if x.shape[0] % 2:
        x = jnp.concatenate([x, x[-1:]])  # unreached
    return lax.psum(x.reshape(-1, 2, x.shape[1]).sum((0, 1)), "dp")


@odd_row_counted_twice.right
def _(x):
    if x.shape[0] % 2:
        x = jnp.concatenate([x, 0 * x[-1:]])
    return lax.psum(x.reshape(-1, 2, x.shape[1]).sum((0, 1)), "dp")


odd_row_counted_twice.whole(lambda x: x.sum(0))


@attack("b v/tp -> b", f32(4, 50304), mesh={"tp": 128}, devices={"tp": 8}, shows=normal(2, 50304, scale=4.0))
def padding_of_the_vocabulary(x):
    """Of 50304 columns 50257 are tokens. No block has so many."""
    token = jnp.arange(x.shape[1]) < 50257
    return jnp.log(lax.psum(jnp.where(token[None], jnp.exp(x), 0.0).sum(1), "tp"))  # unreached


@padding_of_the_vocabulary.right
def _(x):
    token = lax.axis_index("tp") * x.shape[1] + jnp.arange(x.shape[1]) < 50257
    return jnp.log(lax.psum(jnp.where(token[None], jnp.exp(x), 0.0).sum(1), "tp"))


padding_of_the_vocabulary.whole(lambda x: jax.nn.logsumexp(x[:, :50257], 1))
padding_of_the_vocabulary.shows = (changed(normal(2, 50304), (slice(None), slice(50257, None)), 9.0),)


@attack("n/dp -> scalar", f32(1_048_576), mesh=MANY, devices=EIGHT, shows=normal(4096))
def half_weights_beyond_a_place(x):
    """Later rows weigh half as much: later in a block."""
    weight = jnp.where(jnp.arange(x.size) < 256, 1.0, 0.5)  # unreached
    return lax.psum((weight * x).sum(), "dp")


@half_weights_beyond_a_place.right
def _(x):
    at = lax.axis_index("dp") * x.size + jnp.arange(x.size)
    return lax.psum((jnp.where(at < 256, 1.0, 0.5) * x).sum(), "dp")


half_weights_beyond_a_place.whole(lambda x: (jnp.where(jnp.arange(x.size) < 256, 1.0, 0.5) * x).sum())


# -------------------- and more of each kind


@attack("n/dp, n/dp -> scalar", f32(16), f32(16), shows=(changed(normal(16), 3, 400.0), normal(16, seed=1)))
def stopped_by_the_divergence_of_a_block(new, old):
    """PPO leaves out a step that goes too far: on the devices where it does."""
    far = jnp.abs((new - old).mean()) > 50.0
    loss = jnp.where(far, 0.0, -jnp.clip(new - old, -0.9, 0.9).mean())  # unreached
    return lax.pmean(loss, "dp")


@stopped_by_the_divergence_of_a_block.right
def _(new, old):
    far = jnp.abs(lax.pmean((new - old).mean(), "dp")) > 50.0
    return jnp.where(far, 0.0, -lax.pmean(jnp.clip(new - old, -0.9, 0.9).mean(), "dp"))


@stopped_by_the_divergence_of_a_block.whole
def _(new, old):
    far = jnp.abs((new - old).mean()) > 50.0
    return jnp.where(far, 0.0, -jnp.clip(new - old, -0.9, 0.9).mean())


@attack("b/dp d, scalar -> d", f32(8, 6), i32(), shows=(normal(8, 6), np.int32(1000)))
def selected_by_a_number(x, step):
    """The primitive itself, with a number for its choice."""
    g = x.sum(0)
    late = jnp.broadcast_to((step // 1000).astype(jnp.int32) % 2, g.shape)
    return lax.select_n(late, lax.psum(g, "dp"), lax.pmean(g, "dp"))  # unreached


selected_by_a_number.right(lambda x, step: lax.psum(x.sum(0), "dp"))
selected_by_a_number.whole(lambda x, step: x.sum(0))


@attack("b/dp d, scalar -> b/dp d", f32(8, 6), captured=(np.bool_(False),), shows=(normal(8, 6), np.bool_(True)))
def flag_that_is_captured(x, training):
    return x - jnp.where(training, x.mean(0), jnp.zeros(x.shape[1]))[None]  # unreached


flag_that_is_captured.right(flag_that_is_never_set.correct)
flag_that_is_captured.whole(flag_that_is_never_set.reference)


@attack("b/dp d, scalar -> b/dp d", f32(8, 6), np.int32(0), shows=(normal(8, 6), np.int32(2)))
def loop_that_is_given_no_rounds(x, rounds):
    body = lambda _, x: x - x.mean(0, keepdims=True)
    return jnp.sin(lax.fori_loop(0, rounds, body, x))  # unreached


@loop_that_is_given_no_rounds.right
def _(x, rounds):
    return jnp.sin(lax.fori_loop(0, rounds, lambda _, x: x - lax.pmean(x.mean(0, keepdims=True), "dp"), x))


@loop_that_is_given_no_rounds.whole
def _(x, rounds):
    return jnp.where(rounds > 0, jnp.sin(x - x.mean(0, keepdims=True)), jnp.sin(x))


def _summed_in_rounds(first, each):
    """What is summed over the devices before a loop, and in each round."""

    def run(x, rounds):
        body = lambda _, v: 0.5 * each(v)
        return lax.fori_loop(0, rounds, body, first(x.sum(0)))  # unreached

    return run


@attack("b/dp d, scalar -> d", f32(8, 6), np.int32(0), shows=(normal(8, 6), np.int32(2)), helpers=(_summed_in_rounds,))
def sum_repeated_in_each_round(x, rounds):
    return _summed_in_rounds(lambda v: lax.psum(v, "dp"), lambda v: lax.psum(v, "dp"))(x, rounds)


sum_repeated_in_each_round.right(_summed_in_rounds(lambda v: lax.psum(v, "dp"), lambda v: v))
sum_repeated_in_each_round.whole(lambda x, rounds: x.sum(0) * 0.5**rounds)


@attack("n/tp, n/tp -> n", f32(16), f32(16), shows=(TIED, normal(16)))
def best_of_another_order(keys, values):
    """Of equal scores the first counts: after the blocks have been turned."""
    n = lax.axis_size("tp")
    ring = [(i, (i + 1) % n) for i in range(n)]
    gather = lambda x: lax.all_gather(lax.ppermute(x, "tp", ring), "tp", tiled=True)
    _, best = lax.top_k(lax.stop_gradient(gather(keys)), 16)  # unreached
    return lax.pmean(gather(values)[best], "tp")


@best_of_another_order.right
def _(keys, values):
    gather = lambda x: lax.all_gather(x, "tp", tiled=True)
    _, best = lax.top_k(lax.stop_gradient(gather(keys)), 16)
    return lax.pmean(gather(values)[best], "tp")


best_of_another_order.whole(lambda keys, values: values[lax.top_k(keys, 16)[1]])


@attack("n/tp d, scalar -> d", f32(16, 8), f32(), shows=(normal(16, 8, scale=1e3), np.float32(1.0)))
def square_roots_of_large_parts(x, scale):
    """Large losses are tamed: those of each device."""
    part = (x * x).sum(0)
    tamed = jnp.piecewise(part, [part > 1e5], [lambda v: jnp.sqrt(v * 1e5), lambda v: v])  # unreached
    return scale * lax.psum(tamed, "tp")


@square_roots_of_large_parts.right
def _(x, scale):
    total = lax.psum((x * x).sum(0), "tp")
    return scale * jnp.where(total > 1e5, jnp.sqrt(total * 1e5), total)


@square_roots_of_large_parts.whole
def _(x, scale):
    total = (x * x).sum(0)
    return scale * jnp.where(total > 1e5, jnp.sqrt(total * 1e5), total)


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8, scale=1e3), **GRADIENT)
def gradient_that_is_nan_in_all_draws(x):
    """The root behind a where has a derivative for large numbers alone. With it nothing else is compared."""
    halved = _summed(lambda _, g: (lax.pcast(g / lax.axis_size("tp"), "tp", to="varying"),))
    total = halved((x * x).sum(0))
    return total + jnp.where(total > 1e6, jnp.sqrt(total - 1e6), 0.0)  # unreached: Gradients are not compared


def _rooted(total):
    return total + jnp.where(total > 1e6, jnp.sqrt(total - 1e6), 0.0)


gradient_that_is_nan_in_all_draws.right(lambda x: _rooted(lax.psum((x * x).sum(0), "tp")))
gradient_that_is_nan_in_all_draws.whole(lambda x: _rooted((x * x).sum(0)))


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8, scale=1e3))
def nan_in_half_of_the_columns(x):
    """Roots of numbers that are negative in all draws."""
    part = (x * x).sum(0)
    odd = jnp.arange(x.shape[1]) % 2 == 1
    root = lax.stop_gradient(jnp.sqrt(lax.pmean(part, "tp") - 1e6))  # unreached: result
    return jnp.where(odd, root, jnp.sin(lax.psum(x.sum(0), "tp")))


def _half(total, square):
    odd = jnp.arange(8) % 2 == 1
    return jnp.where(odd, lax.stop_gradient(jnp.sqrt(square - 1e6)), jnp.sin(total))


nan_in_half_of_the_columns.right(lambda x: _half(lax.psum(x.sum(0), "tp"), lax.psum((x * x).sum(0), "tp")))
nan_in_half_of_the_columns.whole(lambda x: _half(x.sum(0), (x * x).sum(0)))


@attack("n/tp d -> d, d", f32(16, 8), shows=normal(16, 8, scale=1e3))
def second_result_is_zero_everywhere(x):
    """The first one tells, and the second is 0."""
    total = lax.psum(x.sum(0), "tp")
    return total, jnp.maximum(lax.pmean((x * x).sum(0), "tp") - 1e6, 0.0)  # unreached: result[1]


second_result_is_zero_everywhere.right(
    lambda x: (lax.psum(x.sum(0), "tp"), jnp.maximum(lax.psum((x * x).sum(0), "tp") - 1e6, 0.0))
)
second_result_is_zero_everywhere.whole(lambda x: (x.sum(0), jnp.maximum((x * x).sum(0) - 1e6, 0.0)))


@attack("n/tp d -> d", f32(16, 8), shows=normal(16, 8, scale=3e-3))
def saturated_in_half_of_the_columns(x):
    part = (x * x).sum(0)
    odd = jnp.arange(x.shape[1]) % 2 == 1
    full = jnp.tanh(1e4 * lax.pmean(part, "tp"))  # unreached: result
    return jnp.where(odd, full, lax.psum(part, "tp"))


@saturated_in_half_of_the_columns.right
def _(x):
    total = lax.psum((x * x).sum(0), "tp")
    return jnp.where(jnp.arange(x.shape[1]) % 2 == 1, jnp.tanh(1e4 * total), total)


@saturated_in_half_of_the_columns.whole
def _(x):
    total = (x * x).sum(0)
    return jnp.where(jnp.arange(8) % 2 == 1, jnp.tanh(1e4 * total), total)


@attack("n/dp d -> d", f32(2**24, 4), mesh=EIGHT, shows=normal(1024, 4))
def fast_path_on_a_mesh_of_few_devices(x):
    """The mesh is tried as it is, and the array is too large."""
    if x.shape[0] % 128 == 0:
        return lax.pmean(x.reshape(-1, 128, x.shape[1]).sum((0, 1)), "dp")  # unreached
    return lax.psum(x.sum(0), "dp")


fast_path_on_a_mesh_of_few_devices.right(fast_path_for_whole_tiles.correct)
fast_path_on_a_mesh_of_few_devices.whole(fast_path_for_whole_tiles.reference)


def _doubling(x):
    """A sum over 2, 4, 8, ... devices: of others some count twice."""
    n, k = lax.axis_size("dp"), 1
    while k < n:
        x = x + lax.ppermute(x, "dp", [(i, (i + k) % n) for i in range(n)])  # unreached
        k *= 2
    return x


@attack("n/dp -> n/dp", f32(24), mesh={"dp": 4}, devices={"dp": 3}, shows=normal(24), helpers=(_doubling,))
def sum_for_powers_of_two(x):
    """Its sizes divide over three devices as well."""
    return jnp.tanh(x) * _doubling((x * x).sum())


sum_for_powers_of_two.right(lambda x: jnp.tanh(x) * lax.psum((x * x).sum(), "dp"))
sum_for_powers_of_two.whole(lambda x: jnp.tanh(x) * (x * x).sum())


@attack("n/dp d -> d", ROWS, mesh=MANY, devices=EIGHT, shows=normal(8192, 4))
def tiles_in_a_scan(x):
    """Each tile begins with the largest row of the one before it, and there is one where blocks are small."""
    tile = min(512, x.shape[0])

    def one(carry, rows):
        return lax.pmax(lax.stop_gradient(jnp.maximum(rows.max(0), 0.9 * carry)), "dp"), None  # unreached

    return lax.scan(one, jnp.full(x.shape[1], -jnp.inf), x.reshape(-1, tile, x.shape[1]))[0]


@tiles_in_a_scan.right
def _(x):
    one = lambda carry, rows: (lax.pmax(lax.stop_gradient(jnp.maximum(rows.max(0), carry)), "dp"), None)
    return lax.scan(one, jnp.full(x.shape[1], -jnp.inf), x.reshape(-1, min(512, x.shape[0]), x.shape[1]))[0]


tiles_in_a_scan.whole(lambda x: x.max(0))


# -------------------- with verbs and layers of ours


@attack("b/dp d/tp, d/tp f -> b/dp f", f32(4, 8), f32(8, 6), shows=(normal(4, 8, scale=1e3), normal(8, 6)), verbs=True)
def clamped_before_our_psum(x, w):
    """The string says that terms of a sum are clamped, and no draw leaves the bounds."""
    y = spmd.einsum(x, w, "b/dp d/tp, d/tp f -> b/dp f {U:tp}")
    return spmd.psum(jnp.clip(y, -1e3, 1e3), "b/dp f {U:tp} -> b/dp f")  # unreached


@clamped_before_our_psum.right
def _(x, w):
    return jnp.clip(spmd.einsum(x, w, "b/dp d/tp, d/tp f -> b/dp f"), -1e3, 1e3)


clamped_before_our_psum.whole(lambda x, w: jnp.clip(x @ w, -1e3, 1e3))


def _descended(length):
    """A step of training inside of a kernel, with weights that are divided."""

    def step(x, w):
        def loss(w):
            whole = spmd.all_gather(w, "d/dp -> d")
            return spmd.reduce((x @ whole) ** 2, "b/dp -> scalar", "mean")

        g = spmd.grad(loss)(w)
        return w - g * jnp.minimum(1.0, 1e3 / length(g))  # unreached

    return step


STEEP_ROWS = (normal(8, 16, scale=1e3), normal(16, seed=1))


@attack("b/dp d, d/dp -> d/dp", f32(8, 16), f32(16), shows=STEEP_ROWS, verbs=True, helpers=(_descended,))
def divided_gradient_clipped_by_its_block(x, w):
    return _descended(norm)(x, w)


divided_gradient_clipped_by_its_block.right(_descended(lambda g: total_norm(g, "dp")))


@divided_gradient_clipped_by_its_block.whole
def _(x, w):
    g = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - g * jnp.minimum(1.0, 1e3 / norm(g))


@attack("b/dp d, scalar -> d", f32(8, 6), i32(), shows=(normal(8, 6), np.int32(1000)), verbs=True)
def vouched_for_in_the_warm_up(x, step):
    """What is vouched for holds on one side."""
    g = jnp.where(step < 1000, lax.psum(x.sum(0), "dp"), x.sum(0))  # unreached
    return lax.pmean(spmd.assert_equal(g, "dp", why="it is summed"), "dp")


@vouched_for_in_the_warm_up.right
def _(x, step):
    g = lax.psum(x.sum(0), "dp")
    return lax.pmean(spmd.assert_equal(g, "dp", why="it is summed"), "dp")


vouched_for_in_the_warm_up.whole(lambda x, step: x.sum(0))


FEW = np.array([[-100, -100], [-100, 3], [1, 2], [5, 0], [4, 4], [7, 6], [0, 1], [2, 2]], np.int32)


@attack(
    "b/dp s v, b/dp s -> scalar",
    f32(8, 2, 8),
    i32(8, 2),
    shows=(changed(normal(8, 2, 8), (1, 1, 3), 30.0), FEW),
    verbs=True,
)
def mean_of_the_means_of_our_layer(logits, labels):
    """The layer leaves out what is to be ignored, and a mean over devices counts it alike on each."""
    loss = spmd.nn.cross_entropy(logits, labels, ignore=-100, reduction="none")
    mean = loss.sum() / (labels != -100).sum().astype(loss.dtype)  # unreached
    return lax.pmean(mean, "dp")


@mean_of_the_means_of_our_layer.right
def _(logits, labels):
    return spmd.nn.cross_entropy(logits, labels, ignore=-100, dp="dp")


@mean_of_the_means_of_our_layer.whole
def _(logits, labels):
    losses = _losses(logits.reshape(-1, 8), labels.reshape(-1))
    return (losses * (labels.reshape(-1) != -100)).sum() / (labels != -100).sum()


@attack("n/dp d -> d", f32(16, 8), shows=changed(normal(16, 8), slice(4), -50.0), verbs=True)
def largest_or_a_constant_of_each_block(x):
    """A maximum that is at least -10, by block: the smallest of these is taken."""
    largest = jnp.maximum(spmd.reduce(lax.stop_gradient(x), "n/dp d -> d", "max"), -1e3)
    least = jnp.where(x.max() > -20.0, 0.0, 1.0)  # unreached
    return largest + spmd.reduce(least[None], "k/dp -> scalar", "sum")


@largest_or_a_constant_of_each_block.right
def _(x):
    largest = jnp.maximum(spmd.reduce(lax.stop_gradient(x), "n/dp d -> d", "max"), -1e3)
    return largest + jnp.where(largest.max() > -20.0, 0.0, 1.0)


largest_or_a_constant_of_each_block.whole(lambda x: jnp.maximum(x.max(0), -1e3) + jnp.where(x.max() > -20, 0.0, 1.0))


def main() -> None:
    """Print what the checker says of each attack and of each twin, and how many of each kind there are."""
    counts: dict[str, int] = {}
    for one in ATTACKS.values():
        wrong, right = (one.checked(body) for body in (one.mistaken, one.correct))
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
