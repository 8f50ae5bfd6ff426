"""One contract for gradients: taken inside or outside a kernel, in every mode, they are those of one device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import all_gather, defer, einsum, psum, psum_scatter, reduce
from spmd.inspect import collectives
from spmd.modes import MODES
from tests.sampler import share


@dataclass(frozen=True)
class Program:
    """A loss in strings, and the same on whole arrays in NumPy or jnp."""

    layouts: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    loss: Callable[..., Any]
    truth: Callable[..., Any]
    diff: tuple[int, ...]  # the arguments that are differentiated


def softmax(xp, x):
    e = xp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# A vocabulary and a router that no axis divides: over tp, the loss is nothing but a gathered copy.


def undivided_loss(x, w, router, head):
    h = jnp.tanh(einsum(all_gather(x, "b/dp s/tp d -> b/dp s d"), w, "b/dp s d, d f -> b/dp s f"))
    logits = einsum(h, head, "b/dp s f, f v -> b/dp s v")
    nll = jax.nn.logsumexp(logits, axis=-1) - logits[..., 0]
    gates = jax.nn.softmax(einsum(h, router, "b/dp s f, f e -> b/dp s e"), axis=-1)
    usage = reduce(gates, "b/dp s e -> e", "mean")
    return reduce(nll, "b/dp s -> scalar", "mean") + reduce(usage**2, "e -> scalar")


def undivided_truth(xp, x, w, router, head):
    h = xp.tanh(x @ w)
    logits = h @ head
    top = logits.max(-1)
    nll = xp.log(xp.exp(logits - top[..., None]).sum(-1)) + top - logits[..., 0]
    usage = softmax(xp, h @ router).mean((0, 1))
    return nll.mean() + (usage**2).sum()


# A mean over shards, of data that two axes divide.


def mean_loss(x, w):
    return reduce((x * w[None, None]) ** 2, "b/dp s/tp d -> scalar", "mean")


def mean_truth(xp, x, w):
    return ((x * w[None, None]) ** 2).mean()


# Replicated parameters beside divided ones.


def replicated_loss(x, scale, w_in, w_out, bias):
    h = all_gather(x * scale[None, None], "b/dp s/tp d -> b/dp s d")
    h = jnp.tanh(einsum(h, all_gather(w_in, "d/dp f/tp -> d f/tp"), "b/dp s d, d f/tp -> b/dp s f/tp"))
    y = einsum(h, all_gather(w_out, "f/tp d/dp -> f/tp d"), "b/dp s f/tp, f/tp d -> b/dp s/tp d")
    return reduce((x + y + bias[None, None]) ** 2, "b/dp s/tp d -> scalar", "mean")


def replicated_truth(xp, x, scale, w_in, w_out, bias):
    y = xp.tanh((x * scale[None, None]) @ w_in) @ w_out
    return ((x + y + bias[None, None]) ** 2).mean()


# A mean over what a mask keeps; devices keep unequal numbers.


def masked_loss(x, mask, w):
    per_token = jnp.tanh(einsum(x, w, "b/dp s/tp d, d -> b/dp s/tp")) ** 2
    return reduce(per_token * mask, "b/dp s/tp -> scalar") / reduce(mask, "b/dp s/tp -> scalar")


def masked_truth(xp, x, mask, w):
    return ((xp.tanh(x @ w) ** 2) * mask).sum() / mask.sum()


STREAM = "b/dp s/tp d"
PROGRAMS = {
    "undivided vocabulary and router": Program(
        (STREAM, "d f", "f e", "f v"),
        ((4, 8, 6), (6, 10), (10, 4), (10, 12)),
        undivided_loss,
        undivided_truth,
        (0, 1, 2, 3),
    ),
    "local means": Program((STREAM, "d"), ((4, 8, 6), (6,)), mean_loss, mean_truth, (0, 1)),
    "replicated parameters": Program(
        (STREAM, "d", "d/dp f/tp", "f/tp d/dp", "d"),
        ((4, 8, 6), (6,), (6, 8), (8, 6), (6,)),
        replicated_loss,
        replicated_truth,
        (0, 1, 2, 3, 4),
    ),
    "masked means": Program((STREAM, "b/dp s/tp", "d"), ((4, 8, 6), (4, 8), (6,)), masked_loss, masked_truth, (0, 2)),
}


def values_of(program: Program) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in program.shapes]
    if program.loss is masked_loss:
        mask = np.zeros(program.shapes[1], np.float32)
        mask[0] = 1  # whole rows on one device, single tokens on the others
        mask[1, 3] = mask[3, 7] = 1
        values[1] = mask
    return values


def run(kernel, mode, *args):
    with spmd.mode(mode):
        return kernel(*args)


def close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, wanted)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_truth_is_true(name):
    """jnp's gradients, which the others are compared with, against differences of NumPy's float64 values."""
    program = PROGRAMS[name]
    values = [v.astype(np.float64) for v in values_of(program)]
    gradients = jax.jit(jax.grad(lambda *a: program.truth(jnp, *a), program.diff))(*values_of(program))
    rng = np.random.default_rng(3)
    step = 1e-5
    for argument, gradient in zip(program.diff, gradients, strict=True):
        direction = rng.standard_normal(values[argument].shape)
        moved = [
            program.truth(np, *[v + sign * step * direction if i == argument else v for i, v in enumerate(values)])
            for sign in (1, -1)
        ]
        np.testing.assert_allclose(
            (np.asarray(gradient) * direction).sum(), (moved[0] - moved[1]) / (2 * step), rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", share(PROGRAMS))
def test_gradients_inside_and_outside(name, mode):
    """Both ways, in this mode, equal those of one device."""
    program = PROGRAMS[name]
    values = values_of(program)
    mesh = spmd.make_mesh(dp=2, tp=4)
    wanted = jax.jit(jax.value_and_grad(lambda *a: program.truth(jnp, *a), program.diff))(*values)
    np.testing.assert_allclose(wanted[0], program.truth(np, *[v.astype(np.float64) for v in values]), rtol=1e-5)

    loss = spmd.kernel(in_layouts=program.layouts, out_layouts="scalar", mesh=mesh)(program.loss)
    outside = jax.jit(jax.value_and_grad(loss, program.diff))
    close(run(outside, mode, *values), wanted)

    body = lambda *args: spmd.value_and_grad(program.loss, program.diff)(*args)
    gradient_layouts = tuple(program.layouts[i] for i in program.diff)
    inside = spmd.kernel(in_layouts=program.layouts, out_layouts=("scalar", gradient_layouts), mesh=mesh)
    close(run(inside(_fixed_arity(body, len(values))), mode, *values), wanted)


def _fixed_arity(fn, count):
    """A kernel reads its parameters off the signature; these bodies take any number."""
    names = ", ".join(f"a{i}" for i in range(count))
    return eval(f"lambda {names}: fn({names})", {"fn": fn})


@pytest.mark.parametrize("sizes", share([{"dp": 1, "tp": 8}, {"dp": 8, "tp": 1}, {"dp": 1, "tp": 1}]), ids=str)
def test_gradients_do_not_depend_on_the_mesh(sizes):
    """Axes of one device, too."""
    program = PROGRAMS["replicated parameters"]
    shapes = ((8, 8, 8), (8,), (8, 8), (8, 8), (8,))
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    wanted = jax.jit(jax.value_and_grad(lambda *a: program.truth(jnp, *a), program.diff))(*values)
    loss = spmd.kernel(in_layouts=program.layouts, out_layouts="scalar", mesh=spmd.make_mesh(**sizes))(program.loss)
    close(jax.value_and_grad(loss, program.diff)(*values), wanted)


# -------------------- one reduction per step


def micro_step(batches, mask, w, scale):
    """Gradients of the mean over all kept tokens of all micro-batches, reduced once, after the loop."""
    count = reduce(mask, "m b/dp -> scalar")
    w = all_gather(w, "d/dp f/tp -> d f/tp")
    scale = defer(scale, "d -> d {R:dp,tp}")

    def loss(parameters, x, kept):
        w, scale = parameters
        h = einsum(x * scale[None], w, "b/dp d, d f/tp -> b/dp f/tp")
        return (jnp.tanh(h) ** 2 * kept[:, None]).sum() / count

    def step(total, batch):
        value, gradient = spmd.value_and_grad(loss, loss="{U:dp,tp}")((w, scale), *batch)
        return jax.tree.map(jnp.add, total, (value, gradient)), None

    start = spmd.zeros("{U:dp,tp}"), (spmd.zeros("d f/tp {U:dp}"), spmd.zeros("d {U:dp,tp}"))
    (value, (dw, dscale)), _ = jax.lax.scan(step, start, (batches, mask))
    return (
        psum(value, "{U:dp,tp} -> scalar"),
        psum_scatter(dw, "d f/tp {U:dp} -> d/dp f/tp"),
        psum(dscale, "d {U:dp,tp} -> d"),
    )


MICRO = "m b/dp d, m b/dp, d/dp f/tp, d -> scalar, d/dp f/tp, d"


def micro_truth(xp, batches, mask, w, scale):
    x = batches.reshape(-1, batches.shape[-1]) * scale[None]
    return (xp.tanh(x @ w) ** 2 * mask.reshape(-1)[:, None]).sum() / mask.sum()


def micro_values():
    rng = np.random.default_rng(5)
    mask = (rng.random((6, 4)) < 0.6).astype(np.float32)
    shapes = ((6, 4, 8), (8, 12), (8,))
    batches, w, scale = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return batches, mask, w, scale


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches(mode):
    """Accumulated over micro-batches with unequal counts: the gradient of the whole batch."""
    kernel = spmd.kernel(MICRO, mesh=spmd.make_mesh(dp=2, tp=4))(micro_step)
    values = micro_values()
    value, gradients = jax.value_and_grad(lambda *a: micro_truth(jnp, *a), (2, 3))(*values)
    np.testing.assert_allclose(value, micro_truth(np, *[v.astype(np.float64) for v in values]), rtol=1e-5)
    close(run(kernel, mode, *values), (value, *gradients))


def test_micro_batches_reduce_once():
    """One gather before the loop; after it one scatter, and all-reduces of what is replicated; none inside."""
    kernel = spmd.kernel(MICRO, mesh=spmd.make_mesh(dp=2, tp=4))(micro_step)
    report = collectives(kernel, *micro_values())
    assert report.counts["all_gather"] == 1 and report.counts["psum_scatter"] == 1
    assert all(one.count == 1 for one in report)


def test_an_argument_is_known_in_the_function_that_is_differentiated():
    def loss(w):
        return reduce(all_gather(w, "m/tp/dp -> m") ** 2, "m -> scalar")

    mesh = spmd.make_mesh(dp=2, tp=4)
    step = spmd.kernel("m/dp/tp -> m/dp/tp", mesh=mesh)(lambda w: spmd.grad(loss)(w))
    with pytest.raises(spmd.errors.SpmdError, match=r'holds "m/dp/tp", and is read as "m/tp/dp"') as raised:
        step(jnp.arange(16.0))
    assert 'relayout(w, "m/dp/tp -> m/tp/dp")' in str(raised.value), "the argument is called by its name"


@pytest.mark.parametrize("said", ["{U:dp}", "{U:tp}"])
def test_a_loss_that_is_partly_declared_is_told_all_its_axes(said):
    def step(x, loss):
        value, g = spmd.value_and_grad(lambda x: reduce(x**2, "b/dp d/tp -> {U:dp,tp}"), loss=loss)(x)
        return spmd.psum(value, "{U:dp,tp} -> scalar"), g

    kernel = spmd.kernel("b/dp d/tp -> scalar, b/dp d/tp", mesh=spmd.make_mesh(dp=2, tp=4))
    x = jnp.arange(32.0).reshape(4, 8)
    with pytest.raises(spmd.errors.ReplicationError, match=r'advice: loss="\{U:dp,tp\}" if the sum is meant'):
        kernel(lambda x: step(x, said))(x)
    value, gradient = kernel(lambda x: step(x, "{U:dp,tp}"))(x)
    np.testing.assert_allclose(value, (x**2).sum())
    np.testing.assert_allclose(gradient, 2 * x)


def test_a_complete_loss_may_be_called_scalar():
    kernel = spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=2))
    step = kernel(lambda x: spmd.grad(lambda x: reduce(x**2, "b/dp d -> scalar"), loss="scalar")(x))
    np.testing.assert_allclose(step(jnp.ones((4, 3))), 2 * np.ones((4, 3)))


# -------------------- rules around a gather whose copy leaves the kernel


def gathered(x):
    return all_gather(x, "d/tp -> d")


def made(function, forward, backward):
    found = spmd.custom_vjp(function)
    found.defvjp(forward, backward)
    return found


scattered = lambda _, g: (psum_scatter(g, "d {U:tp} -> d/tp"),)
BY_RULE = made(gathered, lambda x: (gathered(x), None), scattered)


def several(w, x, n):
    y = gathered(x * w)
    return y, (y * n).sum(), x


def several_back(kept, cotangents):
    w, x, n = kept
    of_copy, of_sum, of_block = cotangents
    [block] = scattered(None, of_copy + of_sum * n)
    return (block * x).sum(), block * w + of_block, None


BY_RULES = made(several, lambda *args: (several(*args), args), several_back)
# The body is given both, or what they mean on whole arrays.
MEANT = lambda x: x, lambda w, x, n: (x * w, (x * w * n).sum(), x)
RULES = {
    "the copy": ("d/tp -> d", lambda w, x, one, _: one(w * x)),
    "an equal scalar": ("d/tp -> scalar", lambda w, x, one, _: (one(w * x) ** 2).sum()),
    "twice": ("d/tp -> d", lambda w, x, one, _: one(jnp.sin(w * x)) * one(x)),
    "for divided data too": ("d/tp -> d, d/tp", lambda w, x, one, _: (lambda y: (y, w * x * y.sum()))(one(x))),
    "for divided data alone": ("d/tp -> d/tp", lambda w, x, one, _: w * x * one(x).sum()),
    "in jit": ("d/tp -> d", lambda w, x, one, _: jax.jit(one)(jnp.sin(w * x))),
    "in remat": ("d/tp -> d", lambda w, x, one, _: jax.checkpoint(one)(jnp.sin(w * x))),
    "in a loop": (
        "d/tp -> d",
        lambda w, x, one, _: jax.lax.scan(lambda c, _: (c * 0.5, one(c)), jnp.sin(w * x), length=2)[1].sum(0),
    ),
    "several results": ("d/tp -> d, scalar, d/tp", lambda w, x, _, more: more(w, x, 3)),
}


def cosines(out):
    return sum((i + 1) * jnp.cos(one).sum() for i, one in enumerate(jax.tree.leaves(out)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_of_a_copy_that_leaves(name, mode, mesh):
    """The function is typed by what the kernel chose, and the rule by a copy that varies: both are served."""
    pattern, body = RULES[name]
    kernel = spmd.kernel(f"scalar, {pattern}", mesh=mesh)(lambda w, x: body(w, x, BY_RULE, BY_RULES))
    w, x = np.float32(0.7), np.sin(np.arange(8, dtype=np.float32))
    want = jax.grad(lambda *args: cosines(body(*args, *MEANT)), argnums=(0, 1))(w, x)
    with spmd.mode(mode):
        found = jax.grad(lambda *args: cosines(kernel(*args)), argnums=(0, 1))(w, x)
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_rule_that_gathers_to_invarying_is_given_the_whole_cotangent(mesh):
    whole = lambda x: all_gather(x, "d/tp -> d", to="invarying")
    own = made(whole, lambda x: (whole(x), None), lambda _, g: (spmd.split(g, "d -> d/tp"),))
    kernel = spmd.kernel("d/tp -> d", mesh=mesh)(own)
    x = np.arange(8, dtype=np.float32)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.cos(kernel(x)).sum())(x), -np.sin(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("around", [lambda fn: fn, jax.jit])
def test_jaxs_own_rule_is_told_what_to_write(around, mesh):
    own = jax.custom_vjp(gathered)
    own.defvjp(lambda x: (gathered(x), None), scattered)
    kernel = spmd.kernel("d/tp -> d", mesh=mesh)(own)
    with pytest.raises(TypeError) as raised:
        around(jax.grad(lambda x: kernel(x).sum()))(np.arange(8, dtype=np.float32))
    assert any("spmd.custom_vjp knows that" in note for note in raised.value.__notes__)
