"""Gathers that become invarying by themselves: numbers, gradients, what is sent, and where that is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd import all_gather
from tests.kernels.harness import close
from tests.sampler import seeds, share

MESHES = ({"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}, {"dp": 1, "tp": 8}, {"dp": 8, "tp": 1}, {"dp": 1, "tp": 1})
EVERY = len(seeds()) > 99  # all meshes, and calls outside `jit`: see tests/README.md
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
Y = np.linspace(-2, 1, 64, dtype=np.float32).reshape(8, 8)


def returned(x, to=None):
    return all_gather(x, "s/tp d -> s d", to=to)


def computed_with(x, to=None):
    return jnp.tanh(2 * all_gather(jnp.sin(x), "s/tp d -> s d", to=to))


def two_axes(x, to=None):
    return all_gather(x, "s/dp d/tp -> s d", to=to)


def one_axis_stays(x, to=None):
    return all_gather(x, "s/dp d/tp -> s/dp d", to=to)


def by_relayout(x, to=None):
    return spmd.relayout(x, "s/dp/tp d -> s d/dp", to=to)


def by_a_transform(x, to=None):
    return spmd.fft.fft(x, "x/tp y -> kx ky", to=to).real


def from_a_start(x, to=None):
    """A loop whose carry is a copy from the start."""
    whole = all_gather(x, "s/tp d -> s d", to=to)
    return lax.scan(lambda c, _: (jnp.tanh(2 * c), None), whole, None, length=3)[0]


def in_a_carry(x, to=None):
    """A loop whose carry becomes a copy."""
    step = lambda c, row: (c + all_gather(row, "s/tp -> s", to=to), None)
    return lax.scan(step, jnp.zeros(8, x.dtype), x.T)[0]


def in_a_while(x, to=None):
    step = lambda i, c: c + (i + 1) * lax.stop_gradient(all_gather(x, "s/tp d -> s d", to=to))
    return lax.fori_loop(0, 3, step, jnp.zeros((8, 8), x.dtype))


def stacked(x, to=None):
    return lax.scan(lambda c, row: (c, all_gather(row, "s/tp -> s", to=to)), 0.0, x.T)[1]


def in_remat(x, to=None):
    return jax.checkpoint(lambda x: jnp.sin(all_gather(jnp.sin(x), "s/tp d -> s d", to=to)))(x)


def in_a_jit(x, to=None):
    gather = jax.jit(lambda x: all_gather(x, "s/tp d -> s d", to=to))
    return gather(x) + gather(jnp.sin(x))


def in_a_vmap(x, to=None):
    return jax.vmap(lambda x: all_gather(x, "s/tp -> s", to=to), 1, 1)(x)


def predicate(x, to=None):
    whole = all_gather(x, "s/tp d -> s d", to=to)
    return lax.cond(whole.sum() > 0, lambda: jnp.ones(3), lambda: jnp.zeros(3))


def of_our_cond(x, to=None):
    whole = all_gather(x, "s/tp d -> s d", to=to)
    return spmd.cond(whole.sum() > 0, lambda: whole, lambda: 2 * whole)


def and_free_uses(x, to=None):
    """Uses by equal data, and of a stopped gradient, pay nothing."""
    whole = all_gather(x, "s/tp d -> s d", to=to)
    return jnp.sin(whole), x @ lax.stop_gradient(whole)


def and_a_cheap_use(x, to=None):
    """One number is summed backward, in place of the reduce-scatter of the whole."""
    whole = all_gather(x, "s/tp d -> s d", to=to)
    return whole, x * whole.sum()


def and_two_cheap_uses(x, to=None):
    """The compiler puts the two sums together."""
    whole = all_gather(x, "s/tp d -> s d", to=to)
    return whole, x * whole[0, 0] + x * whole[0, 1]


BODIES = {
    "s/tp d -> s d": (returned, computed_with, from_a_start, in_a_while, in_remat, in_a_jit, in_a_vmap, of_our_cond),
    "s/dp d/tp -> s d": (two_axes,),
    "s/dp d/tp -> s/dp d": (one_axis_stays,),
    "s/dp/tp d -> s d/dp": (by_relayout,),
    "x/tp y -> kx ky": (by_a_transform,),
    "s/tp d -> s": (in_a_carry,),
    "s/tp d -> d s": (stacked,),
    "s/tp d -> k": (predicate,),
    "s/tp d -> s d, s/tp d": (and_free_uses, and_a_cheap_use, and_two_cheap_uses),
}
PROGRAMS = [(pattern, fn) for pattern, fns in BODIES.items() for fn in fns]
FIRST = MESHES[0]


def kernel(pattern, fn, sizes=FIRST, **options):
    return spmd.kernel(pattern, mesh=spmd.make_mesh(**sizes), **options)(fn)


def pulled(run, x):
    """Values and the gradient of a program."""
    out, pull = jax.vjp(run, x)
    [gradient] = pull(jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape), out))
    return out, gradient


@pytest.mark.parametrize(
    ("pattern", "fn"),
    share(PROGRAMS, always=[one for one in PROGRAMS if one[1].__name__ in ("and_a_cheap_use", "in_a_carry")]),
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_it_is_the_program_that_says_so(pattern, fn):
    """Values and gradients are those of one device. Forward and backward, the compiled program has the collectives and
    the bytes of the one that says `to="invarying"`."""
    for sizes in MESHES if EVERY else MESHES[:1]:
        run, written = (kernel(pattern, body, sizes) for body in (fn, lambda x: fn(x, "invarying")))
        one, two = compiled(run), compiled(written)
        wanted = jax.jit(functools.partial(pulled, run.reference))(X)
        close(one(X), wanted, 1e-4)
        assert sent(one, run.mesh) == sent(two, run.mesh)
        if EVERY:
            close(compiled(run.auto)(X), wanted, 1e-4)
            close(pulled(run, X), wanted, 1e-4)


def compiled(run):
    return jax.jit(functools.partial(pulled, run)).lower(X).compile()


def sent(program, mesh):
    found = spmd.inspect.collectives(program, mesh=mesh)
    return found.counts, found.total_bytes


def test_a_copy_that_leaves_sends_nothing_backward():
    run = kernel("s/tp d -> s d", returned)
    assert spmd.inspect.collectives(run, X).counts == {"all_gather": 1}
    whole = spmd.shard(X, "s d", mesh=run.mesh)
    back = spmd.inspect.collectives(lambda x, g: jax.vjp(run, x)[1](g), spmd.shard(X, "s/tp d", mesh=run.mesh), whole)
    assert back.counts == {}


# --- what is chosen ------------------------------------------------------------------------------------------


def test_two_equal_calls_on_one_line_are_two_calls():
    """One leaves the kernel. The other one is used by divided data, and keeps its reduce-scatter."""
    fn = lambda x: (all_gather(x, "s/tp d -> s d"), x @ all_gather(x, "s/tp d -> s d"))
    run = kernel("s/tp d -> s d, s/tp d", fn)
    close(pulled(run, X), pulled(run.reference, X), 1e-4)
    assert [one.text.gather.chosen for one in spmd.explain(run, X).collectives if one.text.gather] == [True, False]
    back = spmd.inspect.collectives(lambda x: pulled(run, x), X).counts
    assert back["psum_scatter"] == 1
    assert "psum" not in back


def test_a_call_in_a_function_is_one_call_for_each_line_that_calls_it():
    def gather(x):
        return all_gather(x, "s/tp d -> s d")

    def fn(x):
        kept = gather(x)
        used = gather(x)
        return kept, x @ used

    run = kernel("s/tp d -> s d, s/tp d", fn)
    assert spmd.inspect.collectives(lambda x: pulled(run, x), X).counts["psum_scatter"] == 1


def test_a_kernel_inside_a_kernel():
    inner = kernel("s/tp d -> s d", returned)
    run = kernel("s/tp d -> s d", lambda x: 1 + inner(x))
    close(pulled(run, X), pulled(run.reference, X))
    assert spmd.inspect.collectives(lambda x: pulled(run, x), X).counts.get("psum") is None


def test_integers_have_no_gradient_to_pay():
    def fn(x, y):
        whole = all_gather(x, "s/tp d -> s d")
        return whole, y @ whole

    run = kernel("s/tp d, b/tp s -> s d, b/tp d", fn)
    numbers = np.arange(64).reshape(8, 8)
    close(run(numbers, numbers), run.reference(numbers, numbers))
    with pytest.raises(spmd.errors.ReplicationError, match="costs more backward"):
        run(X, X)


def test_to_overrides():
    with pytest.raises(spmd.errors.ReplicationError, match="leaves the kernel whole"):
        kernel("s/tp d -> s d", lambda x: returned(x, "varying"))(X)
    assert "was chosen" not in str(spmd.explain(kernel("s/tp d -> s d", lambda x: returned(x, "invarying")), X))


def test_explain_says_where_it_was_chosen():
    run = kernel("s/tp d -> s d", returned)
    said = spmd.explain(run, X).table(200)
    [line] = [i for i, line in enumerate(said.splitlines()) if '"s/tp d -> s d"' in line and "all_gather" in line]
    assert 'to="invarying" was chosen' in said.splitlines()[line + 1]
    assert (
        'to="invarying" was chosen'
        not in spmd.explain(kernel("s/tp d -> s/tp d", lambda x: x @ returned(x)), X).table()
    )


def test_check_is_as_quiet():
    assert not spmd.check(kernel("s/tp d -> s d", returned), X)
    assert not spmd.check(jax.grad(lambda x: kernel("s/tp d -> s d", computed_with)(x).sum()), X)


# --- what is traced ------------------------------------------------------------------------------------------


def counted(pattern, fn):
    traces = []

    def body(x):
        traces.append(1)
        return fn(x)

    return kernel(pattern, body), traces


def test_only_a_program_that_jax_refuses_is_traced_again():
    run, traces = counted("s/tp d -> s/tp d", lambda x: x @ returned(x))
    run(X)
    assert len(traces) == 1
    run, traces = counted("s/tp d -> s d", returned)
    run(X)
    assert len(traces) == 3  # refused, asked why, and as it is now
    run(X)
    assert len(traces) == 3
    jax.jit(run)(X)  # the choice is known: no further diagnosis
    assert len(traces) == 4


# --- what is refused -----------------------------------------------------------------------------------------


def paying(x, y, to=None):
    whole = all_gather(x, "s/tp d -> s d", to=to)
    return whole, y @ whole


def paying_later(x, y, to=None):
    whole = jnp.sin(all_gather(x, "s/tp d -> s d", to=to))
    return 2 * whole, jnp.tanh(y @ jax.checkpoint(jnp.cos)(whole))


def paying_in_a_loop(x, y, to=None):
    whole = all_gather(x, "s/tp d -> s d", to=to)
    return whole, lax.scan(lambda y, _: (y * whole[0, 0], None), y, None, length=2)[0]


def paying_in_a_branch(x, y, to=None):
    whole = all_gather(x, "s/tp d -> s d", to=to)
    return whole, lax.cond(whole.sum() > 0, lambda: y @ whole, lambda: y)


def paying_in_one_round(x, y, to=None):
    """One call, two copies: what the gradient of both would send does not excuse what one of them sends."""
    for use in (lambda w: w, lambda w: y @ w):
        whole = all_gather(x, "s/tp d -> s d", to=to)
        out = use(whole)
    return whole, out


PAYING = (paying, paying_later, paying_in_a_loop, paying_in_a_branch, paying_in_one_round)


@pytest.mark.parametrize("fn", share(PAYING), ids=lambda fn: fn.__name__)
def test_a_program_that_another_use_pays_for_is_refused(fn):
    """And rightly: with the price ignored, the backward pass sends more, or more often, than with a gather for each."""
    pattern = f"s/tp d, b/tp s -> s d, b/tp {'s' if fn is paying_in_a_loop else 'd'}"
    with pytest.raises(spmd.errors.ReplicationError, match="costs more backward") as caught:
        kernel(pattern, fn)(X, Y)
    assert any('to="varying": a reduce-scatter over tp' in line for line in caught.value.fault.got)

    def both(x, y):
        return fn(x, y, "invarying")[0], fn(x, y, "varying")[1]

    slow = kernel(pattern, lambda x, y: fn(x, y, "invarying"))
    close(slow(X, Y), kernel(pattern, both)(X, Y))
    slow, best = (backward(run) for run in (slow, kernel(pattern, both)))
    assert slow["psum"][0] > best.get("psum_scatter", (0, 0))[0] or slow["psum"][1] > best["psum_scatter"][1]


def backward(run):
    """How many collectives of each kind a pull back has, and their bytes, loops multiplied out."""
    pull = lambda x, y: jax.vjp(run, x, y)[1](jax.tree.map(lambda y: y, run(x, y)))
    found = {}
    for one in spmd.inspect.collectives(pull, X, Y):
        if one.kind in ("psum", "psum_scatter"):
            count, size = found.get(one.kind, (0, 0))
            found[one.kind] = count + one.count, size + one.total_bytes
    return found


def test_the_prices_are_what_is_sent():
    with pytest.raises(spmd.errors.ReplicationError) as caught:
        kernel("s/tp d, b/tp s -> s d, b/tp d", paying)(X, Y)
    said = " ".join(caught.value.fault.got)
    scattered, summed = 256 * 3 // 4, 2 * 256 * 3 // 4
    assert f"a reduce-scatter over tp, {scattered} B" in said
    assert f"an all-reduce over tp, {summed} B" in said
    for to, kind, size in (("varying", "psum_scatter", scattered), ("invarying", "psum", summed)):
        run = kernel("s/tp d, b/tp s -> b/tp d", lambda x, y, to=to: paying(x, y, to)[1])
        assert backward_of_one(run)[kind] == (1, size)


def backward_of_one(run):
    pull = lambda x, y, g: jax.vjp(run, x, y)[1](g)[0]
    lies = [spmd.shard(a, lay, mesh=run.mesh) for a, lay in ((X, "s/tp d"), (Y, "b/tp s"), (Y, "b/tp d"))]
    return {one.kind: (one.count, one.total_bytes) for one in spmd.inspect.collectives(pull, *lies)}


def gathered_in_the_loss(x):
    """Typed varying, the raw gradient would be four times as large: it must not depend on what else is returned."""

    def loss(x):
        whole = all_gather(x, "s/tp d -> s d")
        return (whole**2).sum(), whole

    return jax.grad(loss, has_aux=True)(x)


def gradient_of_a_copy(x):
    whole = all_gather(x, "s/tp d -> s d")
    return lax.pmean(jax.grad(lambda w: (w * x.sum()).sum())(whole), "tp"), whole


def raw_gather(x):
    return lax.all_gather(x, "tp", tiled=True)


@pytest.mark.parametrize(
    ("pattern", "fn"),
    [("s/tp d -> s/tp d, s d", gathered_in_the_loss), ("s/tp d -> s d, s d", gradient_of_a_copy),
     ("s/tp d -> s d", raw_gather)],
)  # fmt: skip
def test_what_is_not_certain_stays_an_error(pattern, fn):
    with pytest.raises(spmd.errors.ReplicationError, match="a gathered copy leaves the kernel whole"):
        kernel(pattern, fn)(X)


def test_a_gradient_that_has_nothing_to_do_with_the_copy():
    def fn(x):
        loss = lambda x: ((x**2).sum(), all_gather(x, "s/tp d -> s d"))
        return spmd.grad(loss, loss="{U:tp}", has_aux=True)(x)

    run = kernel("s/tp d -> s/tp d, s d", fn)
    close(run(X), (2 * X, X))


# --- random programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(3))
def test_random_programs_are_refused_or_as_good_as_written(seed):
    """Copies that leave the kernel, that equal data use, and that divided data use. What is accepted has the numbers of
    one device, and backward sends no more than a gather for each of both; what is refused would send no less."""
    rng = np.random.default_rng(seed)
    uses = rng.integers(0, 4, size=rng.integers(1, 4))

    def fn(x, y, kept=None, used=None):
        outs = []
        for use in uses:
            whole = all_gather(x, "s/tp d -> s d", to=kept)
            again = whole if used is None else all_gather(x, "s/tp d -> s d", to=used)
            outs.append((jnp.sin(whole), whole.sum(0), y @ again, y * again[0].sum())[use])
        return (all_gather(x, "s/tp d -> s d", to=kept), *outs)

    right = ["s d", *(("s d", "d", "b/tp d", "b/tp s")[use] for use in uses)]
    pattern = f"s/tp d, b/tp s -> {', '.join(right)}"
    run, written = kernel(pattern, fn), kernel(pattern, lambda x, y: fn(x, y, "invarying", "varying"))
    there = sum(size for _, size in backward(written).values())
    try:
        jax.eval_shape(run, X, Y)
    except spmd.errors.ReplicationError as error:
        assert "costs more backward" in str(error)
        slow = kernel(pattern, lambda x, y: fn(x, y, "invarying"))
        assert sum(size for _, size in backward(slow).values()) >= there
        return
    loss = lambda run: jax.jit(jax.value_and_grad(lambda x: sum(jnp.sin(z).sum() for z in run(x, Y))))
    close(loss(run)(X), loss(run.reference)(X), 1e-4)
    assert sum(size for _, size in backward(run).values()) <= there


@pytest.mark.parametrize("calls", range(12))
def test_a_call_is_known_again_while_python_warms_up(calls, mesh):
    """CPython 3.11 specialises a function after some calls, and then names another instruction of the same call: here,
    for one number of calls before, between the two traces of the kernel."""
    names: dict = {"all_gather": all_gather}
    exec("def called(code, names):\n    return eval(code, names)", names)
    for _ in range(calls):
        names["called"]("None", {})

    def body(x):
        return names["called"]('all_gather(x, "s/tp d -> s d")', names | {"x": x})

    assert jax.eval_shape(spmd.kernel("s/tp d -> s d", mesh=mesh)(body), X).shape == X.shape


# --- what types suspect in a program that JAX refuses ----------------------------------------------------------


ROW = np.random.default_rng(5).normal(size=32).astype(np.float32)


def of_all(x):
    return all_gather(x, "k/tp -> k")


def argmax_in_two_phases(x, best):
    place = lax.axis_index("tp") * x.shape[0] + x.argmax().astype(np.int32)
    return of_all(place[None])[getattr(of_all(getattr(x, best)()[None]), best.replace("max", "argmax"))()]


# Each device does something to its own block, and all then do it to what they have; and what that is on one device.
IN_TWO_PHASES = {
    "max": (lambda x: of_all(x.max()[None]).max(), np.max),
    "argmax": (lambda x: argmax_in_two_phases(x, "max"), np.argmax),
    "top_k": (lambda x: lax.top_k(of_all(lax.top_k(x, 2)[0]), 2)[0], lambda x: np.sort(x)[:-3:-1]),
    "sort": (lambda x: jnp.sort(of_all(jnp.sort(x))), np.sort),
    "logsumexp": (lambda x: jax.nn.logsumexp(of_all(jax.nn.logsumexp(x)[None])), lambda x: np.log(np.exp(x).sum())),
    "stacked": (lambda x: of_all(jnp.stack([x.max(), -x.min()]))[::2].max(), np.max),
}
HALF_DONE = {
    "max": lambda x: of_all(x.max()[None]).sum(),
    "argmax": lambda x: of_all(x.argmax()[None]).max(),
    "top_k": lambda x: of_all(lax.top_k(x, 2)[0])[:2],
    "sort": lambda x: of_all(jnp.sort(x)),
    "logsumexp": lambda x: of_all(jax.nn.logsumexp(x)[None]).max(),
    "stacked": lambda x: of_all(jnp.stack([x.max(), -x.min()])).mean(),
}


@pytest.mark.parametrize("name", IN_TWO_PHASES)
def test_numbers_decide_on_what_types_suspect_there(name):
    """One element per device is a layout too, of a dimension that the axis makes."""
    fn, meant = IN_TWO_PHASES[name]
    rest = "k" if name in ("top_k", "sort") else "scalar"
    two = kernel(f"n/tp -> {rest}", fn)
    np.testing.assert_allclose(two(ROW), meant(ROW), rtol=1e-5)
    found = spmd.check(two, ROW)
    assert not found and found.verdict.kind == "tested"
    half = kernel(f"n/tp -> {rest}", HALF_DONE[name])
    with pytest.raises(spmd.errors.ReplicationError) as caught:
        half(ROW)
    assert caught.value.findings and spmd.check(half, ROW).verdict.kind == "wrong"


def test_a_suspicion_is_told_where_no_other_trace_is_accepted():
    """What is wrong in the body says more than that a result differs."""
    with pytest.raises(spmd.errors.ReplicationError, match="take tanh after the sum is complete"):
        kernel("n/tp -> scalar", lambda x: jnp.tanh(x.sum()))(ROW)
