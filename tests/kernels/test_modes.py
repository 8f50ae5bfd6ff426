"""Modes and mappings: what retraces, and what one body means under several."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.errors import CommunicationError, LayoutError, ModeError
from spmd.inspect import collectives
from spmd.testing import Mismatch, assert_same_on_any_mesh
from tests.sampler import Sampler, seeds

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
W = np.linspace(-2, 1, 128, dtype=np.float32).reshape(8, 16)


def test_a_jitted_step_is_traced_again_in_each_mode(mesh):
    seen = []

    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
    def body(x):
        seen.append(x.shape)
        return 2 * x

    step = jax.jit(lambda x: body(x) + 1)
    for _ in range(2):
        for mode in ("explicit", "auto", "reference"):
            with spmd.mode(mode):
                np.testing.assert_allclose(step(X), 2 * X + 1)
    assert seen == [(2, 8), (4, 8), (4, 8)]
    with spmd.mode("auto", constrain="signature"):
        np.testing.assert_allclose(step(X), 2 * X + 1)
    assert len(seen) == 4


def test_a_training_step_in_every_mode(mesh):
    """One jitted step, the same losses."""

    @spmd.kernel("b/dp s/tp d, d f -> scalar", mesh=mesh)
    def loss(x, w):
        h = jnp.tanh(spmd.einsum(x, w, "b/dp s/tp d, d f -> b/dp s/tp f"))
        return spmd.reduce(h**2, "b/dp s/tp f -> scalar", "mean")

    @jax.jit
    def step(w, x):
        value, gradient = jax.value_and_grad(loss, 1)(x, w)
        return w - 0.1 * gradient, value

    x = np.random.default_rng(0).standard_normal((4, 8, 8), np.float32)
    runs = {}
    for mode in ("explicit", "auto", "reference"):
        with spmd.mode(mode):
            w, losses = jnp.asarray(W), []
            for _ in range(4):
                w, value = step(w, x)
                losses.append(float(value))
        runs[mode] = losses
    assert runs["explicit"] == pytest.approx(runs["reference"], rel=1e-5)
    assert runs["auto"] == pytest.approx(runs["reference"], rel=1e-5)
    assert runs["explicit"][-1] < runs["explicit"][0]


def test_one_call_in_another_mode(mesh):
    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
    def body(x):
        seen.append(x.shape)
        return x

    seen = []
    body(X), body.auto(X), body.reference(X), body.explicit(X)
    assert seen == [(2, 8), (4, 8), (4, 8)]
    with spmd.mode("reference"):
        body.explicit(X)
        assert seen[3:] == [(2, 8)]


def test_what_auto_constrains(mesh):
    """With `constrain="signature"` the compiler is free inside."""

    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
    def body(x):
        return spmd.relayout(spmd.relayout(x, "b/dp d -> b d/tp") * 2, "b d/tp -> b/dp d")

    struct = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=spmd.Layout("b/dp d").sharding(mesh))
    with spmd.mode("auto"):
        assert len(collectives(body, struct)) > 0
    with spmd.mode("auto", constrain="signature"):
        assert len(collectives(body, struct)) == 0


# -------------------- mappings

PLANS = {
    "data": {"batch": ("dp", "tp"), "embed": None, "mlp": None},
    "tensor": {"batch": "dp", "embed": None, "mlp": "tp"},
    "nothing": {"batch": None, "embed": None, "mlp": None},
    "other way": {"batch": "tp", "embed": None, "mlp": "dp"},
}


def ffn_under(mesh, mapping, **options):
    @spmd.kernel("batch embed, embed mlp, mlp embed -> batch embed", mesh=mesh, mapping=mapping, **options)
    def ffn(x, w_in, w_out):
        w_in, w_out = (
            spmd.all_gather(w_in, "embed mlp -> embed/1 mlp"),
            spmd.all_gather(w_out, "mlp embed -> mlp embed/1"),
        )
        h = jnp.tanh(spmd.einsum(x, w_in, "batch embed/1, embed/1 mlp -> batch mlp"))
        return spmd.einsum(h, w_out, "batch mlp, mlp embed/1 -> batch embed/1")

    return ffn


@pytest.mark.parametrize("plan", PLANS)
def test_one_kernel_under_several_mappings(mesh, plan):
    ffn = ffn_under(mesh, spmd.AxisMapping(PLANS[plan]))
    x = np.ones((8, 8), np.float32) * X[:1]
    wanted = np.tanh(x @ W) @ W.T
    for mode in ("explicit", "auto", "reference"):
        with spmd.mode(mode):
            np.testing.assert_allclose(ffn(x, W, W.T), wanted, rtol=1e-4, atol=1e-5)
    lies = spmd.Layout("batch embed").resolve(spmd.AxisMapping(PLANS[plan])).sharding(mesh)
    assert ffn(x, W, W.T).sharding.is_equivalent_to(lies, 2)


def test_arguments_with_a_mapping_of_their_own(mesh):
    """FSDP: weights at rest divided over the data axis too, gathered inside."""
    at_rest = spmd.AxisMapping({"batch": None, "embed": "dp", "mlp": "tp"})
    ffn = ffn_under(mesh, spmd.AxisMapping(PLANS["tensor"]), arg_mapping={"w_in": at_rest, "w_out": at_rest})
    x = np.ones((8, 8), np.float32) * X[:1]
    with pytest.raises(CommunicationError, match=r'the array holds "embed/dp mlp/tp", and is read as "embed mlp/tp"'):
        ffn(x, W, W.T)  # the body must name what differs from the kernel's mapping

    @spmd.kernel("batch embed, embed mlp -> batch mlp", mesh=mesh, mapping=PLANS["tensor"], arg_mapping={"w": at_rest})
    def up(x, w):
        return spmd.einsum(x, spmd.all_gather(w, "embed/dp mlp -> embed mlp"), "batch embed, embed mlp -> batch mlp")

    np.testing.assert_allclose(up(x, W), x @ W, rtol=1e-5)
    assert collectives(up, x, W).counts["all_gather"] >= 1


AMBIENT = ({"batch": "dp", "embed": None}, {"batch": None, "embed": "tp"}, {"batch": "dp", "embed": "tp", "x": "tp"})


def lies(rules, names="batch embed"):
    return spmd.Layout(names).resolve(spmd.AxisMapping(rules))


def test_a_kernel_obeys_the_ambient_mapping(mesh):
    """As `shard` does: an array that `shard` placed is not moved, and another mapping is another program."""
    seen = []

    @spmd.kernel("batch embed -> batch embed", mesh=mesh)
    def double(x):
        seen.append(x.shape)
        return 2 * spmd.annotate(x, "batch embed")

    step = jax.jit(lambda x: double(x) + 1)
    for _ in range(2):
        for rules in AMBIENT:
            with spmd.axis_mapping(rules):
                x = spmd.shard(X, "batch embed", mesh=mesh)
                for _ in range(2):  # warm too
                    assert double(x).sharding.is_equivalent_to(lies(rules).sharding(mesh), 2)
                assert not collectives(double, x).counts and not collectives(double.auto, x).counts
                np.testing.assert_array_equal(step(x), 2 * X + 1)
                np.testing.assert_array_equal(double.reference(x), 2 * X)
                np.testing.assert_array_equal(jax.grad(lambda x: double(x).sum())(x), np.full_like(X, 2))
            assert lies(rules).local_shape(X.shape, mesh) in seen
    assert len(seen) < 30  # each is traced for each mapping, and no more
    np.testing.assert_array_equal(double(X), 2 * X)  # without a mapping a bare name is whole
    assert double(X).sharding.is_fully_replicated


def test_the_mapping_of_a_kernel_holds_over_the_ambient_one(mesh):
    own = spmd.kernel("batch embed -> batch embed", mesh=mesh, mapping={"batch": "tp", "embed": None})(lambda x: x)
    at_rest = {"w": spmd.AxisMapping({"embed": "dp", "mlp": "tp"})}
    rests = spmd.kernel("batch embed, embed mlp -> batch mlp", mesh=mesh, arg_mapping=at_rest)(
        lambda x, w: spmd.einsum(
            x, spmd.all_gather(w, "embed/dp mlp -> embed mlp"), "batch embed, embed mlp -> batch mlp"
        )
    )
    with spmd.axis_mapping({"batch": "dp", "embed": None, "mlp": "tp"}):
        assert own(X).sharding.spec == jax.P("tp")
        out = rests(X, W)
        assert out.sharding.spec == jax.P("dp", "tp")
        np.testing.assert_allclose(out, X @ W, rtol=1e-5)


def test_a_nested_kernel_under_an_ambient_mapping(mesh):
    inner = spmd.kernel("batch embed -> batch embed", mesh=mesh)(lambda x: spmd.annotate(3 * x, "batch embed"))
    outer = spmd.kernel("batch embed -> batch embed", mesh=mesh)(lambda x: inner(x) + 1)
    for rules in AMBIENT:
        with spmd.axis_mapping(rules):
            for mode in ("explicit", "auto", "reference"):
                np.testing.assert_array_equal(getattr(outer, mode)(X), 3 * X + 1)


def test_names_that_the_ambient_mapping_does_not_know(mesh):
    wrong = spmd.kernel("bacth embed -> bacth embed", mesh=mesh)(lambda x: x)
    said = spmd.kernel("b/dp d/1 -> b/dp d/1", mesh=mesh)(lambda x: spmd.annotate(x, "b/dp s"))  # s: whole, in a body
    with spmd.axis_mapping({"batch": "dp", "embed": None, "model": "nowhere"}):  # a rule that nothing uses is none
        with pytest.raises(LayoutError, match="the surrounding mapping has no rule for bacth.*did you mean 'batch'"):
            wrong(X)
        with pytest.raises(LayoutError, match="has no rule for bacth; did you mean 'batch'"):
            spmd.plan("bacth/dp embed -> bacth embed/dp", sizes={"bacth": 8, "embed": 8}, mesh=mesh)
        with pytest.raises(LayoutError, match="has no rule for bacth; did you mean 'batch'"):
            spmd.visualize("bacth embed", (8, 8), mesh=mesh)
        with spmd.axis_mapping(None):
            np.testing.assert_array_equal(wrong(X), X)
        assert said(X).sharding.spec == jax.P("dp")


def test_a_plan_obeys_the_mapping_around_it(mesh):
    """What `relayout` would do in the same place."""
    sizes, text = {"batch": 8, "embed": 8}, "batch embed -> batch/1 embed/dp"
    with spmd.axis_mapping({"batch": "dp", "embed": None}):
        outside = spmd.plan(text, sizes=sizes, mesh=mesh)
    assert (outside.source.short, [step.kind for step in outside.steps]) == ("batch/dp embed", ["all_to_all"])
    found = []

    def body(x):
        found.append(spmd.plan(text, sizes=sizes, mesh=mesh))
        return spmd.relayout(x, text)

    run = spmd.kernel("batch embed -> batch/1 embed/dp", mesh=mesh, mapping={"batch": "dp", "embed": None})(body)
    assert collectives(run, X).counts == {"all_to_all": 1} and found[0] == outside


def test_a_step_under_another_ambient_mapping_places_anew(mesh):
    placed = jax.jit(lambda x: spmd.shard(2 * x, "rows cols", mesh=mesh))
    for rows, spec in (("dp", jax.P("dp")), (None, jax.P()), ("tp", jax.P("tp"))):
        with spmd.axis_mapping({"rows": rows, "cols": None}):
            assert placed(X).sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)


# -------------------- bodies that count devices

MEETS = {  # what a row makes of a block, how it is put together, and what that is on whole arrays
    "sum": (lambda x, y: x * y.sum(0, keepdims=True), jnp.add, lambda x: x * x.sum(0)),
    "max": (lambda x, y: 0 * x + y.max(0, keepdims=True), jnp.maximum, lambda x: 0 * x + x.max(0)),
    "square": (lambda x, y: jnp.einsum("nm,km->nm", x, y**2), jnp.add, lambda x: x * (x**2).sum(0)),
}


def ring(pattern, what, turn, rounds, by, axis="a"):
    """A block for each device, which all devices see one after another: a dimension of the array, or not."""
    meet, join, _ = MEETS[what]
    meet = jax.vmap(meet) if "c/a" in pattern else meet

    def body(x):
        n = spmd.axis_size(axis)
        x = spmd.rearrange(x, turn, c=n) if turn else x

        def step(carry, _):
            found, y = carry
            y = spmd.shift(y, pattern, by)
            return (join(found, meet(x, y)), y), None

        first = meet(x, x)
        if rounds == "all":  # the own block comes last
            first = jnp.full_like(first, -jnp.inf if what == "max" else 0.0)
        (out, _), _ = jax.lax.scan(step, (first, x), None, length=n if rounds == "all" else n - 1)
        return spmd.rearrange(out, " -> ".join(turn.split(" -> ")[::-1])) if turn else out

    return body


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("seed", seeds(12))
def test_a_ring_means_one_thing_or_is_refused(seed, blocks):
    """With a dimension of blocks all modes are one program. Without it, whole arrays go round as often as blocks would,
    which only a maximum forgives."""
    sampler = Sampler(seed)
    what, rounds, by = sampler.choice([*MEETS]), sampler.choice(["all", "others"]), sampler.choice([1, -1])
    sizes = sampler.choice([{"a": 4}, {"a": 2, "b": 2}, {"b": 2, "a": 3}])
    turn, pattern = ("(c l)/a m/b -> c/a l m/b", "[c/a] l m/b") if blocks else ("", "[n/a] m/b")
    if "b" not in sizes:
        turn, pattern = turn.replace("/b", ""), pattern.replace("/b", "")
    whole = "n/a m/b" if "b" in sizes else "n/a m"
    body = ring(pattern, what, turn, rounds, by)
    kernel = spmd.kernel(f"{whole} -> {whole}", mesh=spmd.make_mesh(**sizes))(body)
    x = sampler.array((12, 4), whole=False)
    same = functools.partial(np.testing.assert_allclose, desired=MEETS[what][2](x), rtol=1e-4, atol=1e-4)
    same(kernel(x))
    if blocks or what == "max":
        for mode in ("auto", "reference"):
            same(getattr(kernel, mode)(x))
        assert_same_on_any_mesh(kernel, x)
        assert spmd.check(kernel, x).verdict.kind in ("proved", "tested")
        return
    for call in (kernel.auto, kernel.reference, jax.jit(kernel.reference), jax.grad(lambda x: kernel.auto(x).sum())):
        with pytest.raises(ModeError, match=r"axis_size counts devices at tests/kernels/test_modes.py:\d+ \(ring"):
            call(x)
    with pytest.raises(Mismatch, match=r"means something else in auto and reference mode"):
        assert_same_on_any_mesh(kernel, x)
    for _ in range(2):  # what JAX has traced is not traced again, and the line is known all the same
        told = spmd.check(kernel, x)
        assert told.verdict.kind == "not tested" and not told
        assert "counts devices at tests/kernels/test_modes.py:" in str(told) and "makes blocks a dimension" in str(told)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_mean_over_devices(mesh, blocks):
    """By hand it divides by the number of devices, and on whole arrays there is one."""

    @spmd.kernel("b/dp d -> d", mesh=mesh)
    def mean(x):
        if blocks:
            return spmd.reduce(x, "b/dp d -> d", "mean")
        return spmd.psum(x.mean(0), "d {U:dp} -> d") / spmd.axis_size("dp")

    np.testing.assert_allclose(mean(X), X.mean(0), atol=1e-6)
    if blocks:
        np.testing.assert_allclose(mean.reference(X), X.mean(0), atol=1e-6)
        return
    with pytest.raises(ModeError, match="result: 2 times too small: the size of dp"):
        mean.reference(X)
    with spmd.mode("auto"), pytest.raises(ModeError, match="spmd.reduce"):
        mean(X)


def test_calls_of_one_kernel_in_several_threads_have_their_own_numbers(mesh):
    """What a refusal says of the numbers of a call is said of that call, whichever others run meanwhile."""
    kernel = spmd.kernel("n/dp m -> n/dp m", mesh=mesh)(ring("[n/dp] m", "sum", "", "all", 1, "dp"))

    def told(x):
        with pytest.raises(ModeError) as caught:
            kernel.reference(x)
        return str(caught.value)

    given = [np.float32(10**i) * X for i in range(4)]
    alone = [told(x) for x in given]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [*pool.map(told, given)] == alone and len({*alone}) == 4


def test_a_check_that_is_off_does_not_ask_what_modes_mean(mesh):
    body = lambda x: spmd.psum(x.mean(0), "d {U:dp} -> d") / spmd.axis_size("dp")
    kernel = spmd.kernel("b/dp d -> d", mesh=mesh, check="off")(body)
    np.testing.assert_allclose(kernel.reference(X), X.mean(0) / 2, atol=1e-6)


def test_layers_count_devices_and_are_believed(mesh):
    """What a layer of ours asks is not asked for once more: its own tests compare the modes."""
    traced = []
    count = spmd.kernel("b/dp s/tp d, d f/tp -> b/dp s f/tp", mesh=mesh)(
        lambda x, w: (traced.append(x.shape), spmd.nn.column_linear(x, w, tp="tp", sp="tp"))[1]
    )
    count.reference(np.ones((2, 4, 8), np.float32), W)
    assert len(traced) == 1
