"""What the walk says of each equation: its text and line, loops and branches, what is moved around kernels, islands."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import run_state
from jax.sharding import PartitionSpec as P

import spmd
from spmd.inspect import collectives
from tests.inspect.harness import agree, written

HERE = os.path.basename(__file__)
MESH = {"dp": 2, "tp": 4}


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(**MESH)


# -------------------- text, line, phase


def one_of(view, **wanted):
    [found] = [c for c in view.collectives if all(getattr(c, key) == value for key, value in wanted.items())]
    return found


def line_of(text: str) -> str:
    """`file.py:12` of the only line of this file that ends with a comment."""
    with open(__file__) as file:
        [number] = [i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")]
    return f"{HERE}:{number}"


def make_block(mesh):
    @spmd.kernel("b/dp s/tp d, d/dp f/tp, f/tp d/dp -> b/dp s/tp d", mesh=mesh)
    def block(x, w_in, w_out):
        def body(x):
            x = spmd.all_gather(x, "b/dp s/tp d -> b/dp s d")  # the gather
            wide = spmd.all_gather(w_in, "d/dp f/tp -> d f/tp")
            h = spmd.einsum(x, wide, "b/dp s d, d f/tp -> b/dp s f/tp")
            w = spmd.all_gather(w_out, "f/tp d/dp -> f/tp d")
            total = spmd.einsum(h, "b/dp s f/tp -> b/dp s")  # dropped
            out = spmd.einsum(jnp.sin(h), w, "b/dp s f/tp, f/tp d -> b/dp s/tp d")  # the scatter
            return out * spmd.split(total, "b/dp s -> b/dp s/tp")[:, :, None]

        return jax.lax.scan(lambda x, _: (jax.checkpoint(body)(x), None), x, None, length=5)[0]

    return block


STRUCTS = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 8, 6), (6, 12), (12, 6))]


def test_each_has_its_text_its_line_and_its_phase(mesh):
    block = make_block(mesh)
    view = written(jax.grad(lambda *args: block(*args).sum(), (0, 1, 2)), STRUCTS, {})
    gather = {"text": 'all_gather(x, "b/dp s/tp d -> b/dp s d")', "where": line_of("the gather")}
    scatter = {"text": 'einsum(x, y, "b/dp s f/tp, f/tp d -> b/dp s/tp d")', "where": line_of("the scatter")}
    forward = one_of(view, phase="forward", kind="all_gather", **gather)
    assert (forward.axes, forward.count, forward.shape, forward.dtype) == (("tp",), 5, (2, 2, 6), "float32")
    assert forward.bytes == 2 * 2 * 6 * 4 * 3 and forward.total_bytes == 5 * forward.bytes
    again = one_of(view, phase="backward", kind="all_gather", recomputed=True, **gather)
    assert again.count == 5 and not forward.recomputed
    assert one_of(view, phase="backward", kind="psum_scatter", **gather).bytes == forward.bytes
    assert one_of(view, phase="backward", kind="all_gather", **scatter).count == 5
    assert not any(c.implicit for c in view.collectives if c.kind != "psum")


def test_a_dropped_name_is_an_implicit_reduction_of_its_line(mesh):
    view = written(make_block(mesh), STRUCTS, {})
    dropped = one_of(view, kind="psum", where=line_of("dropped"))
    assert dropped.implicit and dropped.text == 'einsum(x, "b/dp s f/tp -> b/dp s")' and dropped.axes == ("tp",)
    said = spmd.kernel("k/tp n -> n", mesh=mesh)(lambda a: spmd.psum(a.sum(0), "n {U:tp} -> n"))
    [psum] = written(said, [jax.ShapeDtypeStruct((4, 3), jnp.float32)], {}).collectives
    assert not psum.implicit and psum.text == 'psum(x, "n {U:tp} -> n")'


def test_raw_lax_and_gradients_of_equal_values(mesh):
    """What stands in no string is named by its lax call, or as what JAX adds."""

    @spmd.kernel("d, b/dp d -> b/dp d", mesh=mesh)
    def body(w, x):
        return x * w[None] * jax.lax.pmax(jax.lax.stop_gradient(x), "dp").sum()

    w, x = jax.ShapeDtypeStruct((6,), jnp.float32), jax.ShapeDtypeStruct((4, 6), jnp.float32)
    view = written(jax.grad(lambda w, x: body(w, x).sum()), (w, x), {})
    [raw, added] = view.collectives
    assert (raw.text, raw.kind, raw.primitive, raw.implicit, raw.phase) == (
        "lax.pmax",
        "psum",
        "pmax",
        False,
        "forward",
    )
    assert added.text == "gradient of a value equal on dp" and added.implicit and added.phase == "backward"


def test_axes_of_size_one_send_nothing():
    mesh = spmd.make_mesh(dp=1, tp=4)
    x = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    one = spmd.kernel("a/dp b -> a b", mesh=mesh)(lambda x: spmd.all_gather(x, "a/dp b -> a b", to="invarying"))
    assert written(one, (x,), {}).collectives == ()
    total = spmd.kernel("a/dp/tp b -> b", mesh=mesh)(lambda x: spmd.reduce(x, "a/dp/tp b -> b"))
    assert [c.axes for c in written(total, (x,), {}).collectives] == [("tp",)]
    agree(total, x, mesh=mesh)


# -------------------- loops, branches, dead code


def test_loops_and_branches_say_what_they_do_not_know(mesh):
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    turn = lambda x: spmd.shift(x, "[a/tp] b")

    @spmd.kernel("a/tp b -> a/tp b", mesh=mesh)
    def loop(x):
        return jax.lax.while_loop(lambda c: jax.lax.psum(c.sum(), "tp") < 9, turn, x)

    view = written(loop, [x], {})
    assert [(c.kind, c.count, c.exact) for c in view.collectives] == [("psum", 1, False), ("ppermute", 1, False)]
    assert not view.exact

    @spmd.kernel("a/tp b -> a/tp b", mesh=mesh)
    def branches(x):
        big = spmd.reduce(x, "a/tp b -> scalar") > 0
        return spmd.cond(big, turn, lambda x: spmd.relayout(turn(x), "a/tp b -> a b/tp").reshape(x.shape), x)

    found = [(c.kind, c.branch, c.exact) for c in written(branches, [x], {}).collectives]
    assert found[0] == ("psum", "", True) and ("ppermute", "branch 2 of 2", False) in found
    assert {branch for _, branch, _ in found[1:]} == {"branch 1 of 2", "branch 2 of 2"}


# -------------------- where arguments lie


def test_the_boundary_says_from_where_to_where(mesh):
    kernel = spmd.kernel("b/dp d/tp, n -> b/dp d/tp", mesh=mesh)(lambda x, n: x * n[0])
    at = lambda layout, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spmd.Layout(layout).sharding(mesh))
    there = at("b/dp d/tp", 4, 8), at("n", 3)
    assert written(kernel, there, {}).boundary == ()
    [moved] = written(jax.jit(lambda *args: kernel(*args)), (at("b/tp d/dp", 4, 8), at("n", 3)), {}).boundary
    assert (moved.text, moved.source, moved.target) == ("kernel: args[0]", "b/tp d/dp", "b/dp d/tp")
    cheapest = spmd.plan("b/tp d/dp -> b/dp d/tp", b=4, d=8, mesh=mesh).bytes
    assert moved.bytes == cheapest >= max_missing((4, 8), ("tp", "dp"), ("dp", "tp")) and moved.shape == (4, 8)
    [one, two] = written(kernel, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in there], {}).boundary
    assert one.source is None is one.bytes and (one.text, two.text) == ("kernel: x", "kernel: n")
    numbers = jnp.ones((4, 8)), np.ones(3, np.float32)
    [placed] = written(kernel, numbers, {}).boundary
    assert placed.source == "one device" and placed.bytes == 4 * 8 * 4 // 8


def test_the_boundary_names_what_vmap_would_keep(mesh):
    """A divided dimension that vmap maps is gathered if the body names its axes, unless vmap is told them."""
    easy, kernel = (
        spmd.kernel("d/tp -> d/tp", mesh=mesh)(body) for body in (lambda x: 2 * x, lambda x: spmd.axis_size("dp") * x)
    )
    at = lambda *spec: jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(*spec)))
    assert written(jax.vmap(easy), [at("dp", "tp")], {}).boundary == ()
    told = functools.partial(
        pytest.warns, spmd.errors.VmapWarning, match="shows whether dp divides it, and the body names it"
    )
    with told():
        [moved] = written(jax.vmap(kernel), [at("dp", "tp")], {}).boundary
    assert moved.note == 'jax.vmap(..., spmd_axis_name="dp") keeps a mapped dimension divided' and moved.bytes
    with told():
        assert moved.note in str(spmd.explain(jax.vmap(kernel), at("dp", "tp"))).replace("\n    ", " ")
    assert written(jax.vmap(kernel, spmd_axis_name="dp"), [at("dp", "tp")], {}).boundary == ()
    [moved] = written(jax.vmap(easy), [at("tp")], {}).boundary  # an axis of the kernel's own
    assert moved.note == ""


def test_the_boundary_names_the_kernel_that_stands_there(mesh):
    """Also while another of the same name, mesh and specs is alive, which calls its dimensions differently."""
    other = spmd.kernel("i/dp j/tp, k -> i/dp j/tp", mesh=mesh)(lambda x, n: x * n[0])
    kernel = spmd.kernel("b/dp d/tp, n -> b/dp d/tp", mesh=mesh)(lambda x, n: x + n[0])
    here = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=spmd.Layout("b/tp d/dp").sharding(mesh))
    for fn, names in ((other, "ij"), (kernel, "bd")):
        program = jax.jit(lambda *args, fn=fn: fn(*args))
        [moved] = written(program, (here, jax.ShapeDtypeStruct((3,), jnp.float32)), {}).boundary[:1]
        assert (moved.source, moved.target) == (f"{names[0]}/tp {names[1]}/dp", f"{names[0]}/dp {names[1]}/tp")


def max_missing(shape, old, new) -> int:
    """By enumeration: the bytes of the new block that the old one lacks, on the device that lacks most."""
    worst = 0
    for place in np.ndindex(*MESH.values()):
        at = dict(zip(MESH, place, strict=True))
        hold = []
        for axes in (old, new):
            block = np.zeros(shape, bool)
            steps = [n // MESH[a] for n, a in zip(shape, axes, strict=True)]
            block[tuple(slice(at[a] * s, (at[a] + 1) * s) for a, s in zip(axes, steps, strict=True))] = True
            hold.append(block)
        worst = max(worst, int((hold[1] & ~hold[0]).sum()))
    return 4 * worst


def test_between_kernels(mesh):
    """What leaves one kernel in another layout than the next one takes moves; a loop moves it each time."""
    first = spmd.kernel("a/tp b -> a/tp b", mesh=mesh)(lambda x: x)
    second = spmd.kernel("a b/tp -> a b/tp", mesh=mesh)(lambda x: x)
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=spmd.Layout("a/tp b").sharding(mesh))
    [moved] = written(lambda x: second(jnp.sin(first(x))), [x], {}).boundary
    assert (moved.source, moved.target, moved.bytes, moved.count) == ("a/tp b", "a b/tp", 8 * 4 * 4 // 4 * 3 // 4, 1)
    rows = jax.ShapeDtypeStruct((5, 8, 4), jnp.float32, sharding=spmd.Layout("l a/tp b").sharding(mesh))
    scan = lambda rows: jax.lax.scan(lambda c, x: (c, second(x)), 0, rows)[1]
    [moved] = written(scan, [rows], {}).boundary
    assert moved.count == 5 and moved.source == "a/tp b"


def test_arguments_of_a_scan_lie_as_their_slices_are_wanted(mesh):
    """Weights of all layers in one array, without shardings: one device holds what the layers' kernel divides."""
    kernel = spmd.kernel("a/dp b, b c/tp -> a/dp b", mesh=mesh)(
        lambda x, w: spmd.einsum(x * 1.0, spmd.all_gather(w, "b c/tp -> b c", to="invarying"), "a/dp b, b c -> a/dp b")
    )
    step = jax.checkpoint(lambda x, w: (kernel(x, jnp.sin(w)), None))
    loss = lambda ws, x: jax.lax.scan(step, x, ws)[0].sum()
    ws, x = jax.ShapeDtypeStruct((3, 6, 12), jnp.float32), jax.ShapeDtypeStruct((4, 6), jnp.float32)
    view = written(jax.value_and_grad(loss), (ws, x), {})
    assert view.arguments_bytes == 4 * (3 * 6 * 12 // 4 + 4 * 6 // 2)
    groups = jax.ShapeDtypeStruct((5, 3, 6, 12), jnp.float32)
    nested = lambda ws, x: jax.lax.scan(lambda x, w: jax.lax.scan(step, x, w), x, ws)[0]
    assert written(nested, (groups, x), {}).arguments_bytes == 4 * (5 * 3 * 6 * 12 // 4 + 4 * 6 // 2)


def test_the_shardings_of_a_jit_are_known(mesh):
    @spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)
    def doubled_where_it_lies(x):
        return x * 2

    lies = spmd.Layout("b/tp d").sharding(mesh)
    [moved] = written(
        jax.jit(doubled_where_it_lies, in_shardings=lies), [jax.ShapeDtypeStruct((4, 8), jnp.float32)], {}
    ).boundary
    assert (moved.source, moved.target) == ("b/tp d", "b/dp d/tp")


def test_of_a_dimension_that_is_unconstrained_nothing_is_known(mesh):
    kernel = spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: x * 2)
    lies = jax.NamedSharding(mesh, P(P.UNCONSTRAINED, "tp"))
    program = lambda x: kernel(jax.lax.with_sharding_constraint(x, lies))
    [moved] = written(program, [jax.ShapeDtypeStruct((4, 8), jnp.float32)], {}).boundary
    assert moved.source is None is moved.bytes


def test_the_boundary_names_dimensions_as_the_signature_does(mesh):
    """Under differentiation and in pytrees too."""
    at = lambda layout, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spmd.Layout(layout).sharding(mesh))

    def make(name):
        def gives(x, params):
            return x * params["scale"][None]

        gives.__name__ = name
        return gives

    layouts = ("... (h k)/tp", {"scale": "(h k)/tp"})
    wide = spmd.kernel(in_layouts=layouts, out_layouts="... (h k)/tp", mesh=mesh, h=4)(make("wide"))
    args = at("b/dp c/tp", 4, 8), {"scale": at("c/dp", 8)}
    loss = lambda x, params: wide(x, params).sum()
    found = {(one.text, one.source, one.target) for one in written(jax.value_and_grad(loss, 1), args, {}).boundary}
    assert found == {("wide: x", "_/dp (h k)/tp", "_ (h k)/tp"), ("wide: params['scale']", "(h k)/dp", "(h k)/tp")}


BODIES = {
    "alone": lambda kernel: kernel,
    "jit": lambda kernel: jax.jit(lambda x: kernel(x) * 2),
    "vmap": lambda kernel: jax.vmap(kernel),
    "grad": lambda kernel: jax.grad(lambda x: kernel(x).sum()),
    "scan": lambda kernel: lambda x: jax.lax.scan(lambda c, _: (c, kernel(x)), 0.0, length=3),
    "remat": lambda kernel: jax.grad(lambda x: jax.checkpoint(kernel)(x).sum()),
    "all": lambda kernel: jax.jit(
        jax.grad(
            lambda x: jax.lax.scan(lambda c, _: (c + jax.vmap(jax.checkpoint(kernel))(x).sum(), 0), 0.0, length=3)[0]
        )
    ),
}


@pytest.mark.parametrize("how", BODIES)
def test_kernels_of_one_name_and_line_are_told_apart(mesh, how):
    """A kernel's name carries its layouts through whatever JAX does to it."""
    for n in "abc":
        layout = f"... {n}/dp"
        kernel = spmd.kernel(f"{layout} -> {layout}", mesh=mesh)(lambda x: jnp.sin(x) * 2)
        given = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32, sharding=spmd.Layout("x y z/tp").sharding(mesh))
        found = written(BODIES[how](kernel), [given], {}).boundary
        assert found and {(one.source, one.target) for one in found} == {
            (f"_ _ {n}/tp", f"_ _ {n}/dp{'/tp' * (how == 'vmap')}")  # what divides it, the compiler keeps
        }


def test_explicit_axes_say_where_arrays_lie():
    typed = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    kernel = spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=typed)(lambda x: x * 2)
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=jax.NamedSharding(typed, P("tp")))
    [moved] = written(kernel, [x], {}).boundary
    assert (moved.source, moved.target) == ("_/tp _", "_/dp _/tp")
    [moved] = written(kernel.auto, [x], {}).boundary
    assert (moved.source, moved.target) == ("_/tp _", "_/dp _/tp")


# -------------------- modes, islands, meshes without devices


def test_the_other_modes_have_constraints_or_nothing(mesh):
    block = make_block(mesh)
    auto = written(block.auto, STRUCTS, {})
    assert auto.collectives == ()
    assert any(
        (c.text, c.layout, c.count) == ('all_gather(x, "b/dp s/tp d -> b/dp s d")', "b/dp s d", 5)
        and c.where == line_of("the gather")
        for c in auto.constraints
    )
    reference = written(block.reference, STRUCTS, {})
    assert reference.collectives == reference.constraints == ()


def test_islands(mesh):
    def host(x):  # what JAX cannot look into
        return jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @spmd.kernel("a/tp -> a/tp", mesh=mesh)
    def body(x):
        x = spmd.local(lambda v: jax.lax.ppermute(v, "tp", [(0, 1)]), "a/tp -> a/tp")(x)
        return spmd.opaque(host, "a/tp -> a/tp")(x)

    view = written(body, [jax.ShapeDtypeStruct((8,), jnp.float32)], {})
    assert [(i.text, i.opaque) for i in view.islands] == [
        ('local(fn, "a/tp -> a/tp")', False),
        ('opaque(host, "a/tp -> a/tp")', True),
    ]


def test_what_is_meant_per_shard_is_listed(mesh):
    """Once for each line that says so, however often the line runs."""

    def ordered(x):
        with spmd.per_shard("merged later"):  # the first line
            return jnp.sort(x) * 2

    @spmd.kernel("a/tp -> a/tp", mesh=mesh)
    def body(x):
        for _ in range(3):
            x = ordered(x)
        with spmd.per_shard("merged later"):  # the second line
            x = jnp.sin(x)
        return jax.lax.scan(lambda x, _: (spmd.per_shard("each step")(jnp.flip)(x), None), x, length=2)[0]  # the third

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    lines = [line_of(f"the {place}") for place in ("first line", "second line", "third")]
    expected = list(zip(["merged later", "merged later", "each step"], lines, strict=True))
    for fn, whole in ((body, False), (body.auto, True), (body.reference, True)):
        view = written(fn, [x], {})
        assert [(one.why, one.where) for one in view.per_shard] == expected
        assert {one.whole for one in view.per_shard} == {whole}
    backward = written(jax.grad(lambda x: body(x).sum()), [x], {}).per_shard
    assert {(one.why, one.where) for one in backward} == set(expected)
    around = written(spmd.per_shard("around a kernel")(body), [x], {}).per_shard
    assert [(one.why, one.whole) for one in around if one.why == "around a kernel"] == [("around a kernel", False)]
    text = str(spmd.explain(body, x, compiled=False))
    assert f"\nmeant per shard\n  {lines[0]}  merged later\n" in text
    assert f"{lines[0]}  merged later (here on whole arrays)\n" in str(spmd.explain(body.auto, x, compiled=False))
    assert written(body, [x], {}).to_dict()["per_shard"][0] == {
        "why": "merged later",
        "where": lines[0],
        "whole": False,
    }


def test_solvers_run_their_solver_only(mesh):
    """A solver holds its product and the transposes of both too, which nobody runs."""

    @spmd.kernel("a/tp -> a/tp", mesh=mesh)
    def body(x):
        def solve(_, b):
            return b - jax.lax.psum(b, "tp") * 0.5

        return jax.lax.custom_linear_solve(lambda v: v + jax.lax.psum(v, "tp"), x, solve, transpose_solve=solve)

    view = written(body, [jax.ShapeDtypeStruct((8,), jnp.float32)], {})
    assert [(c.kind, c.count) for c in view.collectives] == [("psum", 1)]


def test_what_nobody_looks_into_is_listed(mesh):
    """Jaxprs of a primitive that no table has: `explain` says so, and the check finds no fault."""

    def twice(ref):
        ref[...] = jax.lax.psum(ref[...], "tp") * 2

    @spmd.kernel("a/tp -> a/tp", mesh=mesh)
    def body(x):
        return run_state(twice)(x)

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    view = written(body, [x], {})
    assert [(i.text, i.opaque) for i in view.islands] == [("run_state", True)] and view.collectives == ()
    assert "run_state (not looked into)" in str(spmd.explain(body, x))


def test_constants_with_layouts(mesh):
    """A number that has a layout is a literal of the jaxpr, not a variable, and a literal has no hash."""

    @spmd.kernel("a/tp -> a/tp", mesh=mesh)
    def body(x):
        half = spmd.annotate(jnp.float32(0.5), "scalar")
        return x * half + spmd.zeros("scalar") + spmd.full("scalar", 2.0)

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    for fn in (body, body.auto, body.reference, jax.grad(lambda x: body(x).sum())):
        assert written(fn, [x], {}).collectives == ()


def test_the_compiled_program_carries_the_text(mesh):
    """Into `op_name`, as it stands, quotes and all: how the compiled are matched with the written."""
    compiled = collectives(make_block(mesh), *STRUCTS, mesh=mesh)
    texts = {c.text for c in written(make_block(mesh), STRUCTS, {}).collectives}
    assert len(texts) == 5
    assert all(any(text in c.op_name for text in texts) for c in compiled)


def test_no_devices_are_asked(monkeypatch):
    """On an abstract mesh of any size, with arguments that lie on it."""
    mesh = spmd.make_mesh(dp=256, tp=64, abstract=True)
    at = lambda layout, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spmd.Layout(layout).sharding(mesh))
    args = at("b/dp s/tp d", 512, 128, 6), at("d/dp f/tp", 768, 128), at("f/tp d/dp", 128, 768)
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("devices were asked for"))
    block = make_block(mesh)
    args = (at("b/dp s/tp d", 512, 128, 768), *args[1:])
    view = written(jax.jit(jax.grad(lambda *args: block(*args).sum(), (0, 1, 2))), args, {})
    assert view.mesh == {"dp": 256, "tp": 64} and view.boundary == ()
    gathers = [c for c in view.collectives if c.axes == ("dp",) and c.kind == "all_gather" and c.phase == "forward"]
    assert {c.bytes for c in gathers} == {4 * 768 * 128 // 64 * 255 // 256}
    assert view.arguments_bytes == 4 * (2 * 2 * 768 + 3 * 2 + 2 * 3) == view.outputs_bytes


def test_what_is_printed_has_no_result():
    def told(x):
        jax.debug.print("{} of {}", jax.lax.axis_index("dp"), 2)
        return x

    kernel = spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=2))(told)
    assert not spmd.explain(kernel, jnp.ones((4, 2))).collectives
