"""Programs in which the types of mesh axes change on the way: `auto_axes`, `explicit_axes`, `shard_map` over some axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import spmd
from spmd import propagate
from spmd.errors import SpmdError
from tests.propagation.frozen import run, same
from tests.sampler import share

TYPED, AUTO, SOME = (
    jax.make_mesh((2, 4), ("dp", "tp"), axis_types=types)
    for types in ((AxisType.Explicit,) * 2, (AxisType.Auto,) * 2, (AxisType.Explicit, AxisType.Auto))
)
P = PartitionSpec
PROGRAMS = {}


def program(mesh, *specs, shapes="8 16, 16 16", dtypes="float32 float32 float32"):
    """Enter a function of arrays that lie so."""

    def enter(fn):
        sizes = [tuple(map(int, one.split())) for one in shapes.split(",")]
        given = zip(sizes, specs, dtypes.split(), strict=False)
        args = [jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec)) for size, spec, dtype in given]
        PROGRAMS[fn.__name__] = fn, args, mesh
        return fn

    return enter


ROWS, COLUMNS, BOTH = P("dp", None), P(None, "tp"), P("dp", "tp")


@jax.sharding.auto_axes
def layer(x, w):
    return jnp.tanh(x @ w)


@program(TYPED, ROWS, COLUMNS)
def a_layer(x, w):
    return layer(x, w, out_sharding=BOTH)


@program(TYPED, ROWS, COLUMNS)
def a_gradient(x, w):
    return jax.value_and_grad(lambda x, w: (layer(x, w, out_sharding=BOTH) ** 2).sum(), argnums=(0, 1))(x, w)


@program(TYPED, ROWS, COLUMNS)
def a_gradient_with_recomputation(x, w):
    def loss(x, w):
        y = jax.checkpoint(lambda x, w: layer(x, w, out_sharding=BOTH))(x, w)
        return (layer(y, w.T, out_sharding=ROWS) ** 2).mean()

    return jax.value_and_grad(loss, argnums=1)(x, w)


@program(TYPED, ROWS, P(None, None, "tp"), shapes="8 16, 3 16 16")
def a_gradient_through_a_loop(x, w):
    step = lambda x, w: (layer(x, w, out_sharding=ROWS), None)
    return jax.grad(lambda w: (jax.lax.scan(step, x, w)[0] ** 2).sum())(w)


@program(TYPED, ROWS, shapes="8 8")
def a_gradient_through_a_branch(x):
    sides = (lambda x: layer(x, x, out_sharding=ROWS), lambda x: x)
    return jax.grad(lambda x: jax.lax.cond(x.sum() > 0, *sides, x).sum())(x)


@jax.sharding.auto_axes
def attention(q, k, v):
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), v)


@program(TYPED, P("dp", None, None), COLUMNS, shapes="4 8 16, 16 16")
def a_gradient_of_attention(x, w):
    def loss(w):
        q = jnp.einsum("bsd,dh->bsh", x, w, out_sharding=P("dp", None, "tp"))
        y = attention(q, q, q, out_sharding=P("dp", None, "tp"))
        return (jnp.einsum("bsh,dh->bsd", y, w, out_sharding=P("dp", None, None)) ** 2).mean()

    return jax.value_and_grad(loss)(w)


@program(TYPED, P("tp", "dp"), ROWS, shapes="16 8, 4 8", dtypes="float32 int32")
def a_gradient_of_a_table(table, ids):
    take = jax.sharding.auto_axes(lambda w, ids: w[ids], out_sharding=P("dp", None, None))
    return jax.grad(lambda table: (take(table, ids) ** 2).mean())(table)


@program(TYPED, ROWS, P(None, None))
def a_part_of_the_axes(x, w):
    half = jax.sharding.auto_axes(lambda x, w: jnp.tanh(x @ w)[:4], axes="tp", out_sharding=P(None, "tp"))
    return jax.grad(lambda w: (half(jax.sharding.reshard(x, P(None, None)), w) ** 2).mean())(w)


@program(SOME, P("dp"), P())
def a_mesh_of_both_types(x, w):
    return jax.value_and_grad(lambda x, w: jnp.tanh(x @ w).sum())(x, w)


@program(AUTO, BOTH, shapes="8 8")
def types_inside(x):
    return jax.sharding.explicit_axes(lambda x: jnp.sin(x) @ jnp.ones((8, 8)), in_sharding=BOTH)(x).sum()


def over_dp(body, *specs, out):
    return jax.shard_map(body, mesh=AUTO, in_specs=specs, out_specs=out, axis_names={"dp"})


@program(AUTO, BOTH, shapes="8 8")
def an_index(x):
    return over_dp(lambda x: x * jax.lax.axis_index("dp").astype(x.dtype), P("dp"), out=P("dp"))(x)


@program(AUTO, BOTH, shapes="8 8")
def an_index_of_no_operand(x):
    """The equation `shard_map` has no operand."""
    i = over_dp(lambda: jax.lax.axis_index("dp")[None].astype("float32"), out=P("dp"))()
    y = jax.lax.with_sharding_constraint(x, NamedSharding(AUTO, P(None, None)))
    return (x.reshape(2, 4, 8) * i[:, None, None]).sum() + jnp.sort(y, 0)[0].sum()


@program(AUTO, BOTH, shapes="8 8")
def a_gradient_beside_an_index_of_no_operand(x):
    return jax.grad(an_index_of_no_operand)(x)


@program(AUTO, BOTH, shapes="8 8")
def random_numbers_of_each_group(x):
    def body(x):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("dp"))
        return x + jax.random.normal(key, x.shape)

    return over_dp(body, P("dp"), out=P("dp"))(x)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_is_planned_listed_and_priced(name):
    """They ended in an IndexError or in an AssertionError of JAX, where constraints were tried for what they cost."""
    fn, args, mesh = PROGRAMS[name]
    with jax.set_mesh(mesh):
        plan = propagate(fn, *args)
        for shown in (plan, plan.source(), *plan.costs, spmd.explain(fn, *args, compiled=False)):
            assert str(shown)
    assert not plan.moves or all(one.where for one in plan.moves)


@pytest.mark.parametrize("name", share(PROGRAMS, always=("a_gradient", "a_gradient_of_attention")))
def test_what_is_frozen_has_the_numbers_of_the_program(name):
    fn, args, mesh = PROGRAMS[name]
    rng = np.random.default_rng(0)
    real = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    drawn = [rng.normal(size=x.shape) if real(x) else rng.integers(0, 5, size=x.shape) for x in args]
    with jax.set_mesh(mesh):
        try:
            text = propagate(fn, *args).freeze("frozen")
        except SpmdError as error:
            assert "is not written as a kernel yet" in str(error)
            return
        wanted = jax.jit(fn)(
            *[jax.device_put(x.astype(to.dtype), to.sharding) for x, to in zip(drawn, args, strict=True)]
        )
    kernel = run(text, spmd.make_mesh(dp=2, tp=4))
    same(wanted, kernel(*[x.astype(to.dtype) for x, to in zip(drawn, args, strict=True)]), 1e-4)


def test_a_constraint_inside_of_auto_axes_is_asked_for_as_the_text_says():
    def product(put):
        inner = jax.sharding.auto_axes(lambda x, w: put(jnp.tanh(x)) @ w)
        return lambda x, w: inner(x, w, out_sharding=P(None, None))

    of = lambda spec, *shape: jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(TYPED, spec))
    args = of(P(None, "dp"), 16, 32), of(P(None, None), 32, 64)
    with jax.set_mesh(TYPED):
        plan = propagate(product(lambda x: x), *args, layouts="b d, d f")
        [cost] = plan.costs
        names = {"jax": jax, "spmd": spmd}
        mended = product(lambda x: eval(cost.constraint.text, names | {"x": x}))
        assert propagate(mended, *args).total_bytes == cost.constraint.bytes < plan.total_bytes


def test_a_constraint_that_does_not_fit_leaves_the_plan_as_it_was():
    """Half of the equations stayed, and later ones had no number."""
    fn, args, mesh = PROGRAMS["a_gradient_of_attention"]
    with jax.set_mesh(mesh):
        plan = propagate(fn, *args)
        equations = list(plan.traced.equations)
        asks = {id(equations[0]): {0: NamedSharding(mesh, P(None, None, None, "dp"))}}
        with pytest.raises(ValueError, match="rank|dim"):
            plan.again(asks)
    assert plan.traced.equations == equations and str(plan)
