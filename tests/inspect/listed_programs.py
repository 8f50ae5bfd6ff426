"""Programs whose listing is pinned in `listings.txt`, one for each way to write one.

`@listed(shapes)` is around what `spmd.check` is asked about.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd import all_gather, einsum, nn
from tests.inspect.listed_helpers import centred

MESH = spmd.make_mesh(dp=2, tp=4)
PROGRAMS = {}


def listed(*shapes, name=""):
    def register(fn):
        structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        PROGRAMS[name or fn.__name__] = fn, structs
        return fn

    return register


@listed((4, 8, 16), (16, 32), (32, 16))
@spmd.kernel("b/dp s/tp d, d/dp f/tp, f/tp d/dp -> b/dp s/tp d", mesh=MESH)
def mlp(x, w_in, w_out):
    x = all_gather(x, "b/dp s/tp d -> b/dp s d")
    w_in = all_gather(w_in, "d/dp f/tp -> d f/tp")
    h = jax.nn.gelu(einsum(x, w_in, "b/dp s d, d f/tp -> b/dp s f/tp"))
    w_out = all_gather(w_out, "f/tp d/dp -> f/tp d")
    return einsum(h, w_out, "b/dp s f/tp, f/tp d -> b/dp s/tp d")


@listed((4, 8, 16), (16, 32), (32, 16))
def gradients_of_a_kernel(x, w_in, w_out):
    def loss(x):
        out = mlp(x, w_in, w_out)
        return (out**2).mean()

    value, slope = jax.value_and_grad(loss)(x)
    return value, x - slope


@listed((8, 16), (16, 12))
def a_raw_shard_map(x, w):
    def product(
        x,
        w,
    ):
        part = x @ w
        whole = lax.psum(part, "tp")
        return whole, whole.max(0)

    where = {"mesh": MESH, "in_specs": (P("dp", "tp"), P("tp")), "out_specs": (P("dp"), P("dp"))}
    return jax.shard_map(product, **where)(x, w)


@listed((4, 8, 16), (16, 32), (32, 16))
@spmd.kernel("b/dp s/tp d, d f/tp, f/tp d -> b/dp s/tp d", mesh=MESH)
def a_layer_and_a_helper(x, w_in, w_out):
    x += nn.mlp(x, w_in, w_out, tp="tp", sp="tp")
    y, size = centred(x.sum(2)), x.shape[0]
    if (total := y.sum()).ndim == 0:
        y = y * lax.psum(total, ("dp", "tp")) / size
    return x + 0 * y[:, :, None]


@listed((4, 16), (16, 16))
@spmd.kernel("b/dp d, d e -> b/dp e", mesh=MESH)
def loops(x, w):
    @jax.checkpoint
    def block(x):
        h = x @ w
        return jnp.sin(h)

    total = x[0, 0] * 0
    for part in (x, x.sum(1), jnp.tanh(x)):
        total = total + part.sum()
    for _ in range(2):
        x = block(x)
    return x + 0 * lax.psum(total, "dp")


@listed((4, 6, 16))
@spmd.kernel("b/dp s d/tp -> b/dp", mesh=MESH)
def a_scan(x):
    def step(carry, column):
        new = carry + column
        return new, new.sum(1)

    last, sums = lax.scan(step, x[:, 0], x.transpose(1, 0, 2))
    m = last.max(axis=1)
    return lax.pmax(m, "tp") + lax.psum(sums[0], "tp")


@listed((4, 16))
@spmd.kernel("b/dp d/tp -> b/dp", mesh=MESH)
def branches(x):
    gate = lax.axis_index("dp") > 0
    y = lax.cond(gate, lambda x: x * 2, lambda x: x[:, ::-1], x)
    top, where = lax.top_k(x, 2)
    a, (b, c) = x + 1, (x.sum(1), x[0])
    small, other = jnp.split(x, 2, axis=1)
    assert {one.ndim for one in (top, where, a, small, other)} == {c.ndim + 1}
    return lax.psum(y.sum(1) + b * 0, "tp")


@listed((8, 16))
@spmd.kernel("b/dp d/tp -> b/dp", mesh=MESH)
def a_wrong_one(x):
    norms = jnp.sqrt(jnp.sum(x**2, axis=1))
    return lax.psum(norms, "tp")


@listed((8, 16))
@spmd.kernel("b/dp d/tp -> b/dp", mesh=MESH)
def a_forgotten_psum(x):
    squares = x**2
    return squares.sum(1)


@listed((8, 16), (16, 12))
@spmd.kernel("b/dp d, d f -> d f", mesh=MESH)
def a_gradient_in_the_body(x, w):
    loss = lambda w: ((x @ w) ** 2).sum()
    value, g = jax.value_and_grad(loss)(lax.pcast(w, "dp", to="varying"))
    return w - lax.psum(g, "dp") * lax.psum(value, "dp")


NOWHERE = """
def without_source(x):
    y = jnp.sum(x**2, axis=1)
    return lax.psum(y, "tp")
"""
names = {"jnp": jnp, "lax": lax}
exec(compile(NOWHERE, "<nowhere>", "exec"), names)
listed((8, 16))(spmd.kernel("b/dp d/tp -> b/dp", mesh=MESH)(names["without_source"]))

ready_made = lambda x, a, b: nn.mlp(x, a, b, tp="tp")  # the library's own lines are not shown
listed((4, 8, 16), (16, 32), (32, 16), name="a layer alone")(
    spmd.kernel("b/dp s d, d f/tp, f/tp d -> b/dp s d", mesh=MESH)(ready_made)
)
