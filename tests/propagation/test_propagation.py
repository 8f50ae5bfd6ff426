"""`propagate`: the compiler's plan as text, as a listing, in budgets; on meshes that nobody has."""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

import spmd
from spmd import Layout, propagate
from spmd.errors import MeshError, SpmdError
from spmd.testing import Mismatch, assert_collectives
from tests.propagation.programs import mlp, mlp_sorted, struct
from tests.sampler import rare

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MESH = spmd.make_mesh(dp=2, tp=4, abstract=True)
MLP = ("b/dp d", "d f/tp", "f/tp d")


def at(*layouts):
    return [struct(MESH, one) for one in layouts]


def test_the_text_has_the_line_the_string_and_the_reason():
    plan = propagate(mlp_sorted, *at(*MLP), layouts="b d, d f, f d")
    assert [(one.kind, one.source, one.target, one.why) for one in plan.moves] == [
        ("psum", "b/dp d {U:tp}", "b/dp d", "dot_general adds up what is divided over tp"),
        ("all_to_all", "b/dp d", "b d/dp", "sort needs b whole"),
        ("all_to_all", "b d/dp", "b/dp d", "the result is to lie so"),
    ]
    assert plan.inputs == MLP
    assert "mlp_sorted on dp=2 tp=4: the compiler's plan, not compiled" in str(plan)
    assert "programs.py" in str(plan) and "^ sort needs b whole" in str(plan)


def test_the_source_has_layouts_beside_lines_and_moves_below():
    source = propagate(mlp_sorted, *at(*MLP), layouts="b d, d f, f d").source()
    blocks = {block.name: block for block in source.blocks}
    told = [(one.kind, one.rule) for line in blocks["mlp_sorted"].lines for one in line.findings]
    assert told == [
        ("all_to_all", '"b/dp d -> b d/dp" sends 512 B: sort needs b whole'),
        ("all_to_all", '"b d/dp -> b/dp d" sends 512 B: the result is to lie so'),
    ]
    [line] = [line for line in blocks["mlp"].lines if "gelu" in line.text]
    assert [value.layouts for value in line.values] == [("b/dp d",)]


def test_one_listing_for_what_is_written_and_what_the_compiler_does():
    """In the body of a kernel the layouts are those that strings say."""

    @spmd.kernel("b/dp d, d f/tp -> b/dp f/tp", mesh=MESH)
    def product(x, w):
        y = spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")
        return y * 2

    def program(x, w):
        y = product(x, w)
        z = jnp.sum(y, axis=1)
        return z * 2

    source = propagate(program, *at("b/dp d", "d f/tp"), layouts="b d, d f").source()
    lines = {line.text.strip(): line for block in source.blocks for line in block.lines}
    [inside] = lines['y = spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")'].values
    [outside] = lines["z = jnp.sum(y, axis=1)"].values
    assert (str(inside), outside.name, outside.layouts) == ("y  b/dp f/tp", "z", ("b/dp",))
    [finding] = lines["z = jnp.sum(y, axis=1)"].findings
    assert finding.kind == "psum"


def test_layouts_place_and_name_what_has_no_sharding():
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in at(*MLP)]
    plan = propagate(mlp, *shapes, mesh=MESH, layouts="b/dp d, d f/tp, f/tp d")
    assert plan.inputs == MLP and plan.counts == {"psum": 1} and plan.total_bytes == 1536
    names = propagate(mlp, *at(*MLP), layouts=["b d", None, "f d"])
    assert names.inputs == ("b/dp d", "32 64/tp", "f/tp d")


def test_arguments_that_nobody_uses_keep_their_place():
    plan = propagate(lambda x, unused, w: x @ w, *at("b/dp d", "b", "d e/tp"), layouts="b d, c, d e")
    assert plan.inputs == ("b/dp d", "c", "d e/tp")


def test_budgets_hold_for_plans():
    assert_collectives(mlp, at(*MLP), {"psum": {"tp": 1}}, bytes=1536, view="planned")
    with pytest.raises(Mismatch, match="dot_general adds up what is divided over tp"):
        assert_collectives(mlp, at(*MLP), {"all_gather": 1}, view="planned")
    with pytest.raises(MeshError, match='view="planned"'):
        assert_collectives(mlp, at(*MLP), {"psum": 1})


def test_a_budget_of_a_kernel_has_no_plan():
    body = spmd.kernel("b/dp d -> d", mesh=MESH)(lambda x: spmd.reduce(x, "b/dp d -> d", "sum"))
    with pytest.raises(SpmdError, match='view="written"'):
        assert_collectives(body, at("b/dp d"), {"psum": 1}, view="planned")


def test_what_is_left_open_is_said_and_counted():
    plan = propagate(lambda x: jnp.cumsum(x, 0), *at("b/dp d"))
    [one] = plan.open
    assert (one.operation, one.kind, one.axes, plan.moves) == ("cumsum", "open", ("dp",), ())
    assert (one.least, one.most, plan.total_bytes, plan.least_bytes, plan.most_bytes) == (0, 1024, 0, 0, 1024)
    assert "left open" in str(plan) and "with 1 open item: at least 0 B, at most 1 KiB" in " ".join(str(plan).split())
    assert plan.to_dict()["open"] and "open=1" in repr(plan)
    assert propagate(lambda x: jnp.cumsum(x, 1), *at("b/dp d")).open == ()


def test_explain_and_check_name_what_is_left_open():
    args = at("b/dp d")
    report = spmd.explain(lambda x: jnp.roll(x, 1, 0), *args)
    assert {one.operation for one in report.open} == {"slice", "concatenate"} and report.to_dict()["open"]
    assert "no collectives" not in str(report) and "open items: at least 0 B" in str(report)
    found = spmd.check(lambda x: jnp.cumsum(x, 0), *args)
    assert not found and "cumsum takes what lies over dp" in str(found)
    assert "takes" not in str(spmd.check(lambda x: jnp.cumsum(x, 1), *args))


def test_a_planned_budget_is_told_what_is_open():
    for program in (lambda x: jnp.cumsum(x, 0), lambda x: jnp.roll(x, 1, 0)):
        most = propagate(program, *at("b/dp d")).most_bytes
        with pytest.raises(Mismatch, match=f"allows nothing open(.|\n)*write open={most}"):
            assert_collectives(program, at("b/dp d"), {}, view="planned")
        with pytest.raises(Mismatch, match="the test allows"):
            assert_collectives(program, at("b/dp d"), {}, view="planned", open=most - 1)
        assert_collectives(program, at("b/dp d"), {}, view="planned", open=most)
    with pytest.raises(SpmdError, match="open=1536"):
        assert_collectives(mlp, at(*MLP), {}, view="planned", open="many")


def test_what_divides_by_code_of_its_own_is_opaque(mesh):
    @custom_partitioning
    def own(x):
        return jnp.sin(x)

    own.def_partition(None, None, sharding_rule="i j -> i j")
    x = struct(mesh, "b/dp d")
    plan = propagate(own, x)
    assert [(one.kind, one.least, one.most) for one in plan.open] == [("opaque", 0, None)]
    assert plan.most_bytes is None and "no bound is known" in str(plan)
    with pytest.raises(Mismatch, match="code of its own"):
        assert_collectives(own, (x,), {}, view="planned", open=10**9)


def test_a_sum_that_types_leave_open_is_counted_once(mesh):
    typed = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    place = lambda *dims, **more: jax.NamedSharding(typed, jax.P(*dims, **more))

    def program(x, w):
        y = jnp.einsum("bd,df->bf", x, w, out_sharding=place("dp", None, unreduced={"tp"}))
        return jax.sharding.reshard(y, place("dp", None))

    x = jax.ShapeDtypeStruct((16, 32), "float32", sharding=place("dp", "tp"))
    w = jax.ShapeDtypeStruct((32, 6), "float32", sharding=place("tp", None))
    assert_collectives(program, (x, w), {"psum": {"tp": 1}}, bytes=288, view="planned")
    assert_collectives(program, (x, w), {"psum": {"tp": 1}}, bytes=288)


def test_what_two_operations_want_is_sent_once():
    def program(x, y):
        return x + y, x * y

    plan = propagate(program, *at("b/tp d", "b d/tp"))
    assert [(one.kind, one.count) for one in plan.moves] == [("all_to_all", 1)]
    assert (plan.least_bytes, plan.total_bytes, plan.most_bytes) == (384, 384, 768)


def test_explicit_axes_and_kernels_on_devices(mesh):
    """A program on Explicit axes has its layouts in its types, and a mesh with devices is a mesh too."""
    typed = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def program(x):
        return jax.sharding.reshard(jnp.tanh(x), Layout("b d/dp").sharding(typed))

    x = jax.ShapeDtypeStruct((16, 32), "float32", sharding=Layout("b/dp d").sharding(typed))
    [move] = propagate(program, x, layouts="b d").moves
    assert (move.text, move.asked, move.why) == ('all_to_all("b/dp d -> b d/dp")', True, "a reshard asks for it")


def test_a_program_without_a_mesh_is_refused():
    with pytest.raises(MeshError, match="the program has no mesh"):
        propagate(jnp.sin, jnp.ones(3))
    with pytest.raises(MeshError, match="another mesh"):
        propagate(mlp, *at(*MLP), mesh=spmd.make_mesh(dp=8, abstract=True))
    with pytest.raises(SpmdError, match="the function itself"):
        propagate(jax.jit(mlp).trace(*at(*MLP)))


def normed(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale[None, None]


def attention(x, q, k, v, o):
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in (q, k, v))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / 8
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -1e9), -1)
    return jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", weights, v), o)


def loss_of_layers(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    for layer in params["layers"]:
        x = x + attention(normed(x, layer["scale"]), *layer["attention"])
        x = x + jax.nn.gelu(normed(x, layer["scale"]) @ layer["in"]) @ layer["out"]
    logits = jnp.sort(x, 0) @ params["embed"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -chosen.mean()


def test_thirty_lines_take_less_than_two_seconds():
    of = lambda layout, *shape, dtype="float32": jax.ShapeDtypeStruct(
        shape, dtype, sharding=Layout(layout).sharding(MESH)
    )
    heads, out = of("d h/tp k", 64, 8, 8), of("h/tp k d", 8, 8, 64)
    layer = {"scale": of("d", 64), "attention": [heads, heads, heads, out]}
    layer |= {"in": of("d f/tp", 64, 256), "out": of("f/tp d", 256, 64)}
    params = {"embed": of("v/tp d", 256, 64), "layers": [layer, layer]}
    jax.clear_caches()
    start = time.process_time()
    plan = propagate(jax.grad(loss_of_layers), params, of("b/dp s", 16, 33, dtype="int32"))
    text = str(plan.source())
    assert time.process_time() - start < 2
    assert "sort needs" in text and "reduce_sum adds up what is divided over tp" in " ".join(text.split())


@rare
def test_405b_on_16384_devices_takes_less_than_twenty_seconds(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    import llama405b

    mesh = spmd.make_mesh(dp=16, fsdp=128, tp=8, abstract=True)
    step = llama405b.make_step(llama405b.make_loss(mesh))
    args = llama405b.arguments(mesh, llama405b.SIZES, 2048, 8192)

    def auto(*given):
        with spmd.mode("auto"):
            return step(*given)

    start = time.process_time()
    plan = propagate(auto, *args)
    text = str(plan) + str(plan.source())
    assert time.process_time() - start < 20
    assert "b/dp/fsdp s/tp m -> b/dp/fsdp s m" in text
    gathers = [one for one in plan.moves if one.kind == "all_gather" and one.source == "m/fsdp f/tp"]
    assert {one.count for one in gathers} == {126} and not any(one.kind == "weight" for one in plan.costs)


def test_a_position_over_devices_gathers_what_each_has_found():
    """Shardy of JAX 0.12 does not sum positions, and XLA gathers them."""
    plan = propagate(lambda x: jnp.argmax(x, 1), *at("b/dp d/tp"))
    assert plan.open == () and {(one.kind, one.axes, one.bytes) for one in plan.moves} == {("all_gather", ("tp",), 96)}
    assert "argmax compares what each device has found over tp" in str(plan.moves[0])


def test_what_the_compiler_cannot_divide_is_gathered():
    for layout in ("b/dp d", "b d/tp", "b/dp d/tp"):
        plan = propagate(lambda x: jax.lax.top_k(x, 2), *at(layout))
        assert plan.open == () and {one.kind for one in plan.moves} == {"all_gather"}
    called = lambda x: jax.ffi.ffi_call("own", jax.typeof(x), vmap_method="broadcast_all")(x)
    [move] = propagate(called, *at("b/dp d")).moves
    assert (move.kind, move.bytes, move.why) == ("all_gather", 1024, "ffi_call needs the dimension of 16 whole")


def test_static_arguments_keys_and_constants():
    scaled = jax.jit(lambda x, n: x * n, static_argnums=1)
    assert propagate(scaled, *at("b/dp d"), 3).moves == ()
    key = jax.eval_shape(lambda: jax.random.key(0))
    drawn = propagate(lambda x, key: x + jax.random.normal(key, x.shape), *at("b/dp d"), key)
    with pytest.raises(SpmdError, match="a key of jax.random is not written"):
        drawn.freeze("f")
    table = jnp.arange(512.0).reshape(16, 32)
    with pytest.raises(SpmdError, match="is not written as a kernel yet"):
        propagate(lambda x: x + table, *at("b/dp d")).freeze("f")


def test_what_needs_devices_is_refused_and_explain_goes_on():
    def program(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((16, 32), "float32"), x)

    with pytest.raises(SpmdError, match="cannot be lowered and propagated without its devices"):
        propagate(program, *at("b/dp d"))
    report = spmd.explain(program, *at("b/dp d"))
    assert report.plan is None and "the compiler's plan" in str(report)
