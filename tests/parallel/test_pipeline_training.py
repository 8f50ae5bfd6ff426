"""Losses of pipelines, whose gradients are made in the forward pass: numbers, what is sent, and what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import nn, parallel
from spmd.parallel.schedule import Tick, Ticks
from tests.sampler import rare, share

OUTS = (0, 1, 2, 3)
ORDERS = ("1f1b", "eager-1f1b", "zb-h1")


def normal(seed, *shape):
    return (0.3 * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def model(sizes, v=None, m=5, *, remat=False, order="1f1b"):
    """Residual blocks whose hidden units tp divides, with weights that rest divided over fsdp, and a head."""
    mesh = spmd.make_mesh(**{"dp": 1, "fsdp": 1, "tp": 1} | sizes)
    lead = "p/pp" if v is None else "v p/pp"

    def block(w, x):
        return x + nn.mlp(x, spmd.all_gather(w[0], "d/fsdp f/tp -> d f/tp"), w[1], activation=jnp.tanh, tp="tp")

    def loss(head, y, target):
        error = spmd.einsum(y, head, "b/dp/fsdp d, d -> b/dp/fsdp") - target
        return spmd.reduce(error**2, "b/dp/fsdp -> {U:dp,fsdp}")

    @spmd.kernel(f"{lead} d/fsdp f/tp, {lead} f/tp d, d, m b/dp/fsdp d, m b/dp/fsdp -> scalar", mesh=mesh)
    def run(w_in, w_out, head, x, targets):
        stage = jax.checkpoint(block) if remat else block
        options = {"pp": "pp", "data": ("dp", "fsdp"), "repeats": v, "order": order}
        return parallel.pipeline_loss(stage, loss, (w_in, w_out), head, x, targets, **options)

    def plain(w_in, w_out, head, x, targets):
        for a, b in zip(w_in.reshape(-1, 4, 6), w_out.reshape(-1, 6, 4), strict=True):
            x = x + jnp.tanh(x @ a) @ b
        return ((x @ head - targets) ** 2).sum()

    lead_sizes = (mesh.shape["pp"],) if v is None else (v, mesh.shape["pp"])
    shapes = [(*lead_sizes, 4, 6), (*lead_sizes, 6, 4), (4,), (m, 4, 4), (m, 4)]
    return run, plain, [normal(i, *shape) for i, shape in enumerate(shapes)]


def close(found, wanted, tolerance=2e-5):
    for one, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, right, rtol=tolerance, atol=tolerance * np.abs(right).max())


MESHES = [
    ({"dp": 2, "pp": 2, "tp": 2}, None, 5, "zb-h1"),
    ({"pp": 2, "fsdp": 2, "tp": 2}, 2, 4, "1f1b"),
    ({"pp": 4, "tp": 2}, None, 3, "1f1b"),
    ({"pp": 4, "dp": 2}, 2, 4, "1f1b"),
    ({"pp": 1, "fsdp": 2}, 2, 3, "1f1b"),
    ({"pp": 4, "fsdp": 2}, None, 3, "zb-h1"),
    ({"pp": 3, "tp": 2}, None, 7, "zb-h1"),
    ({"pp": 1, "tp": 2}, 1, 2, "zb-h1"),
    ({"pp": 4, "tp": 2}, None, 6, "eager-1f1b"),
    ({"pp": 3, "fsdp": 2}, 2, 6, "eager-1f1b"),
]


@pytest.mark.parametrize(("sizes", "v", "m", "order"), share(MESHES, times=2))
def test_value_and_gradients(sizes, v, m, order):
    """Those of whole arrays in all modes; the value also where nothing is differentiated."""
    run, plain, args = model(sizes, v, m, order=order)
    wanted = jax.jit(jax.value_and_grad(plain, OUTS))(*args)
    for mode in (run, run.auto, run.reference):
        close(jax.jit(jax.value_and_grad(mode, OUTS))(*args), wanted)
    close(jax.jit(run)(*args), wanted[0])
    assert not spmd.check(run, *args)
    assert not spmd.check(jax.grad(lambda *args: run(*args), OUTS), *args), "a gradient raises no alarm"


@pytest.mark.parametrize("order", share(ORDERS))
def test_remat_bfloat16_and_inside_a_kernel(order):
    """Sums of gradients are kept in float32; `spmd.value_and_grad` differentiates it inside the kernel."""
    mesh = spmd.make_mesh(pp=2)
    run, plain, args = model({"pp": 2, "dp": 2}, None, 8, remat=True, order=order)
    close(jax.jit(jax.value_and_grad(run, OUTS))(*args), jax.value_and_grad(plain, OUTS)(*args))

    @spmd.kernel("p/pp d, m b d -> scalar, p/pp d", mesh=mesh)
    def inside(w, x):
        stage = lambda w, x: x * w[None]
        loss = lambda _, y, t: y.sum()
        total = lambda w: parallel.pipeline_loss(stage, loss, w, None, x, None, pp="pp", order=order)
        return spmd.value_and_grad(total)(w)

    w, x = jnp.ones((2, 3), jnp.bfloat16), jnp.full((260, 1, 3), 1, jnp.bfloat16)
    value, gradient = jax.jit(inside)(w, x)
    assert value == 780
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient, np.full((2, 3), 260, np.float32))  # in bfloat16 256 + 1 is 256


@pytest.mark.parametrize(("v", "order"), share([(None, "zb-h1"), (2, "1f1b")]))
def test_keys_and_integers_are_those_of_the_pipeline(v, order):
    """Dropout draws the same masks; integers go from stage to stage, and targets have no gradient."""
    mesh = spmd.make_mesh(pp=2)
    lead, sizes = ("p/pp", (2,)) if v is None else ("v p/pp", (v, 2))

    def stage(w, carry):
        x, count, key = carry
        return jnp.tanh(nn.dropout(x, key, "b d", rate=0.25) * w[None]), count + 1, jax.random.split(key)[1]

    def one(head, y, target):
        return ((y[0] @ head) * y[1].astype(target.dtype) * target).sum()

    def by(pipe):
        @spmd.kernel(f"{lead} d, d, m b d, m b, m, m -> scalar", mesh=mesh)
        def run(w, head, x, target, count, keys):
            return pipe(w, head, (x, count, keys), target)

        return run

    options = {"pp": "pp", "repeats": v, "order": order}
    new = by(lambda w, head, x, t: parallel.pipeline_loss(stage, one, w, head, x, t, **options))
    old = by(
        lambda *a: jax.vmap(one, (None, 0, 0))(
            a[1], parallel.pipeline(stage, a[0], a[2], pp="pp", repeats=v), a[3]
        ).sum()
    )
    keys = jax.random.split(jax.random.key(0), 4)
    args = normal(0, *sizes, 3), normal(1, 3), normal(2, 4, 2, 3), normal(3, 4, 2), np.zeros(4, np.int32), keys
    close(*(jax.jit(jax.value_and_grad(run, (0, 1, 2)))(*args) for run in (new, old)))
    assert not np.any(jax.jit(jax.grad(new, 3))(*args))


def compiled(m, argnums=(0, 1), order="1f1b"):
    """A pipeline of four stages and the same by `pipeline`, which keeps inputs."""
    mesh, pattern = spmd.make_mesh(pp=4, tp=2), "p/pp d f/tp, p/pp f/tp d, m b d, m b -> scalar"
    stage = lambda w, x: x + nn.mlp(x, *w, tp="tp", activation=jnp.tanh)
    loss = lambda _, y, target: ((y.sum(-1) - target) ** 2).sum()

    @spmd.kernel(pattern, mesh=mesh)
    def new(w_in, w_out, x, target):
        return parallel.pipeline_loss(stage, loss, (w_in, w_out), None, x, target, pp="pp", order=order)

    @spmd.kernel(pattern, mesh=mesh)
    def old(w_in, w_out, x, target):
        return loss(None, parallel.pipeline(stage, (w_in, w_out), x, pp="pp"), target)

    shapes = (4, 32, 64), (4, 64, 32), (m, 32, 32), (m, 32)
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    where = [layout.sharding(mesh) for layout in spmd.Pattern(pattern).inputs]
    return [jax.jit(jax.grad(run, argnums), in_shardings=where).lower(*args).compile() for run in (new, old)], mesh


def temporaries(program) -> int:
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("order", share(ORDERS))
@rare
def test_memory_does_not_grow_with_microbatches(order):
    """Temporaries of 8 and of 64 micro-batches: the same number of bytes here, six times as many with `pipeline`."""
    kept = [[temporaries(one) for one in compiled(m, order=order)[0]] for m in (8, 64)]
    assert kept[0][0] == kept[1][0]
    assert kept[1][1] - kept[0][1] >= 2 * 56 * 4 * 32 * 32, "of each further micro-batch, its input and its result"


@pytest.mark.parametrize(
    ("order", "formula"), [("1f1b", 2 * (6 + 3)), ("eager-1f1b", 2 * (6 + 3)), ("zb-h1", 3 * 6 + 3)]
)
def test_what_is_sent(order, formula):
    """Two permutes in each tick, and one psum of the gradient of x; a stage's own psum is in a branch."""
    m, (new, _), mesh = 6, *compiled(6, (0, 1, 2), order)
    report = spmd.inspect.collectives(new, mesh=mesh)
    ticks, size = parallel.pipeline_schedule(4, m, order=order).ticks, 4 * 32 * 32
    assert ticks == formula
    hops = [one for one in report if one.kind == "ppermute"]
    assert all(one.exact and one.axes == ("pp",) for one in hops)
    assert sum(one.total_bytes for one in hops) == 2 * ticks * size
    sums = [one for one in report if one.kind == "psum" and one.axes == ("pp",)]
    assert all(one.exact for one in sums)
    assert sum(one.total_bytes for one in sums) == 2 * m * size * 3 / 4
    assert {one.axes for one in report} == {("pp",), ("tp",)}


WRONG = [("1f1b", entry) for entry in ("input", "put_input", "put_cotangent", "put_x")]
WRONG += [("zb-h1", entry) for entry in ("kept", "delayed", "put_own", "put_kept", "put_delayed", "kind")]


def test_without_gradients_there_are_forward_steps_alone():
    """One permute in each of v m + p - 1 ticks, and the psum of the loss."""
    run, _, args = model({"pp": 4, "tp": 2}, 2, 4)
    report = spmd.inspect.collectives(jax.jit(run), *args, mesh=spmd.make_mesh(pp=4, fsdp=1, tp=2))
    assert report.counts["ppermute"] == 2 * 4 + 3


@pytest.mark.parametrize(("order", "entry"), share(WRONG))
def test_a_wrong_table_is_noticed(order, entry, monkeypatch):
    plain = Ticks.of

    def ticks(schedule):
        found = plain(schedule)
        place = Tick._fields.index(entry)
        found.table[..., place] = np.roll(found.table[..., place], 1, 0)
        return found

    monkeypatch.setattr(Ticks, "of", staticmethod(ticks))
    run, plain_loss, args = model({"pp": 2}, 2 if order == "1f1b" else None, 4, order=order)
    with pytest.raises(AssertionError):
        close(jax.jit(jax.value_and_grad(run, OUTS))(*args), jax.value_and_grad(plain_loss, OUTS)(*args))
