"""`shard`, `init` and `from_process_local`: inside jit and outside alike, on meshes of every type."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd import Layout, init, shard
from spmd.inspect import collectives
from tests import simulator as sim
from tests.sampler import mixed, share

KINDS = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Auto, AxisType.Explicit),
    "mixed the other way": (AxisType.Explicit, AxisType.Auto),
}
SIZES = {"dp": 2, "tp": 4}


def mesh_of(kind: str = "auto"):
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=KINDS[kind])


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def lies(x, layout: str) -> None:
    """Every device holds its block, and no more."""
    blocks = sim.blocks_of(x, x.sharding.mesh)
    wanted = sim.scatter(np.asarray(x), layout, SIZES)
    assert {device: block.shape for device, block in blocks.items()} == {d: b.shape for d, b in wanted.items()}
    assert all((blocks[device] == wanted[device]).all() for device in wanted)


LAYOUTS = ["a b", "a/dp b", "a b/tp", "a/dp b/tp", "a/tp/dp b", "a b/dp/tp", "(a/dp k) b"]

# An Auto axis before an Explicit one in a dimension: inside jit JAX has no way to say it.
NOT_INSIDE = {("a/tp/dp b", "mixed the other way"), ("a b/dp/tp", "mixed")}

# -------------------- shard


@pytest.mark.parametrize(("layout", "kind"), share(mixed(LAYOUTS, KINDS)))
def test_shard_outside_and_inside_jit(layout, kind) -> None:
    mesh = mesh_of(kind)
    x = numbers(16, 8)
    plain = layout.replace("(a/dp k)", "a/dp")
    outside = shard(x, layout, mesh=mesh)
    lies(outside, plain)
    if (layout, kind) in NOT_INSIDE:
        with pytest.raises(spmd.errors.PlacementError, match="Explicit axes of a dimension stand before the Auto ones"):
            jax.jit(lambda x: shard(x, layout, mesh=mesh))(x)
        return
    inside = jax.jit(lambda x: shard(2 * x, layout, mesh=mesh))(x)
    lies(inside, plain)
    assert (np.asarray(outside) == x).all() and (np.asarray(inside) == 2 * x).all()
    moved = jax.jit(lambda x: shard(x, layout, mesh=mesh))(shard(x, "a/tp b/dp", mesh=mesh))
    lies(moved, plain)
    gradient = jax.jit(jax.grad(lambda x: (shard(x, layout, mesh=mesh) ** 2).sum()))(x)
    assert (np.asarray(gradient) == 2 * x).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_mesh_is_found(kind) -> None:
    """In the array's own sharding, else around the call."""
    mesh = mesh_of(kind)
    x = shard(numbers(8, 4), "a/dp b", mesh=mesh)
    lies(shard(x, "a b/tp"), "a b/tp")
    lies(jax.jit(lambda x: shard(x, "a b/tp", mesh=mesh))(x), "a b/tp")
    with jax.set_mesh(mesh):
        lies(shard(numbers(8, 4), "a/tp b"), "a/tp b")
        lies(jax.jit(lambda x: shard(x, "a/tp b"))(numbers(8, 4)), "a/tp b")
        lies(jax.jit(lambda x: shard(x, "a/tp b", mesh=mesh))(numbers(8, 4)), "a/tp b")


def test_under_an_ambient_mesh_of_another_kind() -> None:
    with jax.set_mesh(mesh_of("explicit")):
        lies(shard(numbers(8, 4), "a/dp b", mesh=mesh_of()), "a/dp b")


def test_trees() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        w: "d/dp f/tp"  # noqa: F722
        scale: "d"  # noqa: F821, UP037

    mesh = mesh_of()
    tree = {"layer": Layer(numbers(4, 8), numbers(4)), "steps": [numbers(8), numbers(16)], "name": "adam", "no": None}
    placed = shard(tree, {"layer": Layer, "steps": "n/tp", "name": None, "no": None}, mesh=mesh)
    lies(placed["layer"].w, "d/dp f/tp")
    lies(placed["layer"].scale, "d")
    lies(placed["steps"][1], "n/tp")
    assert placed["name"] == "adam" and placed["no"] is None
    by_rule = shard(tree["layer"], lambda t: spmd.match_layouts(t, {"w": "d f/tp", "scale": "d/dp"}), mesh=mesh)
    lies(by_rule.w, "d f/tp")
    lies(shard([numbers(8, 2, 2), numbers(4)], "n/dp ...", mesh=mesh)[0], "n/dp _ _")


def test_kernels_take_what_shard_gives() -> None:
    mesh = mesh_of()
    kernel = spmd.kernel("a/dp b -> a/dp b", mesh=mesh, boundary="error")(lambda x: 2 * x)
    x = numbers(8, 4)
    assert (np.asarray(kernel(shard(x, "a/dp b", mesh=mesh))) == 2 * x).all()
    with pytest.raises(spmd.errors.PlacementError):
        kernel(shard(x, "a b/dp", mesh=mesh))


def test_no_communication_where_it_lies_so_already() -> None:
    mesh = mesh_of()
    x = shard(numbers(8, 4), "a/dp b", mesh=mesh)
    again = shard(x, "a/dp b", mesh=mesh)
    assert again.unsafe_buffer_pointer if len(again.devices()) == 1 else again.sharding == x.sharding
    assert not collectives(jax.jit(lambda x: shard(x, "a/dp b", mesh=mesh)), x)
    assert collectives(jax.jit(lambda x: shard(x, "a b", mesh=mesh)), x, mesh=mesh).counts == {"all_gather": 1}


def test_in_reference_mode_everything_stays_on_one_device() -> None:
    mesh = mesh_of()
    with spmd.mode("reference"):
        x = shard(shard(numbers(8, 4), "a/dp b", mesh=mesh), "a b/tp", mesh=mesh)
        assert x.devices() == {mesh.devices.flat[0]}
        made = init(lambda key: jax.random.normal(key, (8, 4)), "a/dp b", mesh=mesh)(jax.random.key(0))
        assert made.devices() == {mesh.devices.flat[0]}
        data = spmd.from_process_local(numbers(8, 4), "a/dp b", mesh=mesh)
        assert data.devices() == {mesh.devices.flat[0]}


def test_mappings() -> None:
    mesh = mesh_of()
    rules = {"embed": "dp", "mlp": "tp", "layers": None}
    for x in (
        shard(numbers(3, 8, 4), "layers embed mlp", mesh=mesh, mapping=rules),
        jax.jit(lambda x: shard(x, "layers embed mlp", mesh=mesh, mapping=rules))(numbers(3, 8, 4)),
    ):
        lies(x, "l e/dp m/tp")
    with spmd.axis_mapping(rules):
        lies(shard(numbers(8, 4), "embed mlp", mesh=mesh), "e/dp m/tp")
        lies(shard(numbers(8, 4), "embed/1 mlp", mesh=mesh), "e m/tp")
        lies(shard(numbers(8, 4), "embed mlp", mesh=mesh, mapping={"embed": None, "mlp": "dp"}), "e m/dp")


# -------------------- init


def parameters(key):
    first, second = jax.random.split(key)
    return {"w": jax.random.normal(first, (64, 128)), "deep": [jax.random.normal(second, (4, 256)), jnp.ones(8)]}


WHERE = {"w": "d/dp f/tp", "deep": ["d f/dp/tp", "d/tp"]}


@pytest.mark.parametrize("kind", KINDS)
def test_init_creates_sharded(kind) -> None:
    """The values are those of one device; no device ever holds a whole array."""
    mesh = mesh_of(kind)
    make = init(parameters, WHERE, mesh=mesh)
    made = make(jax.random.key(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), made, parameters(jax.random.key(0)))
    lies(made["w"], "d/dp f/tp")
    lies(made["deep"][0], "d f/dp/tp")
    lies(made["deep"][1], "d/tp")
    for leaf in jax.tree.leaves(made):
        assert {shard.data.size for shard in leaf.addressable_shards} != {leaf.size}


def test_no_buffer_is_as_large_as_the_whole() -> None:
    """From the compiled program: neither its memory nor any shape in its text."""
    mesh = mesh_of()
    size = 1 << 20
    make = init(lambda key: jax.random.normal(key, (1024, 1024)), "d/dp f/tp", mesh=mesh)
    compiled = make.lower(jax.random.key(0)).compile()
    memory = compiled.memory_analysis()
    used = memory.output_size_in_bytes + memory.temp_size_in_bytes + memory.argument_size_in_bytes
    assert memory.output_size_in_bytes < 4 * size // 8 + 1024
    assert used < 4 * size
    text = compiled.as_text()
    assert "[1024,1024]" not in text and f"[{size}]" not in text and "[512,256]" in text
    naive = jax.jit(lambda key: jax.random.normal(key, (1024, 1024))).lower(jax.random.key(0)).compile()
    assert "[1024,1024]" in naive.as_text()
    assert not collectives(compiled, mesh=mesh)


def test_abstract() -> None:
    mesh = mesh_of()
    make = init(parameters, WHERE, mesh=mesh)
    abstract = make.abstract(jax.random.key(0))
    made = make(jax.random.key(0))
    same = lambda a, b: (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    assert all(jax.tree.leaves(jax.tree.map(same, abstract, made)))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract))
    on_nothing = init(parameters, WHERE, mesh=spmd.make_mesh(dp=8, tp=8, abstract=True))
    assert on_nothing.abstract(jax.random.key(0))["w"].sharding.spec == P("dp", "tp")


def test_abstract_does_not_run_the_function() -> None:
    runs = []

    def fn(key):
        jax.debug.callback(lambda: runs.append(1))
        return jax.random.normal(key, (8,))

    init(fn, "d/dp", mesh=mesh_of()).abstract(jax.random.key(0))
    jax.effects_barrier()
    assert not runs


def test_init_compiles_once_and_takes_arguments() -> None:
    mesh = mesh_of()
    traces = []

    def fn(key, scale, *, bias=0.0):
        traces.append(1)
        return scale * jax.random.normal(key, (8, 4)) + bias

    make = init(fn, "a/dp b", mesh=mesh)
    first = make(jax.random.key(1), 2.0, bias=1.0)
    before = len(traces)
    second = make(jax.random.key(2), 2.0, bias=1.0)
    assert len(traces) <= before + 1  # shapes are asked again, nothing is compiled again
    assert first.sharding == second.sharding
    inside = jax.jit(lambda key: make(key, 2.0))(jax.random.key(1))
    lies(inside, "a/dp b")


def test_a_key_of_another_mesh() -> None:
    key = jax.device_put(jax.random.key(0), jax.devices()[3])
    lies(init(parameters, WHERE, mesh=mesh_of())(key)["w"], "d/dp f/tp")


def test_init_under_mappings() -> None:
    mesh = mesh_of()
    make = init(lambda key: jax.random.normal(key, (8, 16)), "embed mlp", mesh=mesh)
    for rules, layout in (({"embed": "dp", "mlp": "tp"}, "e/dp m/tp"), ({"embed": None, "mlp": "dp"}, "e m/dp")):
        with spmd.axis_mapping(rules):
            lies(make(jax.random.key(0)), layout)


def test_init_finds_the_ambient_mesh() -> None:
    with jax.set_mesh(mesh_of()):
        lies(init(lambda key: jax.random.normal(key, (8, 16)), "a/dp b")(jax.random.key(0)), "a/dp b")


# -------------------- data of each process


@pytest.mark.parametrize("kind", KINDS)
def test_from_process_local(kind) -> None:
    """With one process its part is the whole."""
    mesh = mesh_of(kind)
    batch = {"tokens": numbers(16, 4).astype(np.int32), "mask": numbers(16)}
    placed = spmd.from_process_local(batch, {"tokens": "b/dp s", "mask": "b/dp/tp"}, mesh=mesh)
    lies(placed["tokens"], "b/dp s")
    lies(placed["mask"], "b/dp/tp")
    assert placed["tokens"].dtype == np.int32
    assert placed["tokens"].sharding == NamedSharding(mesh, Layout("b/dp s").spec)


def test_from_process_local_of_arrays_and_lists() -> None:
    mesh = mesh_of()
    lies(spmd.from_process_local(jnp.ones((8, 2)), "b/tp s", mesh=mesh), "b/tp s")
    with spmd.axis_mapping({"batch": ("dp", "tp")}):
        lies(spmd.from_process_local([numbers(8)], "batch", mesh=mesh)[0], "b/dp/tp")


@pytest.mark.parametrize("jitted", [False, True])
def test_partial_sums_between_kernels(jitted) -> None:
    """On Explicit axes they are types of arrays, which `shard` makes, keeps and sums, of whole and of divided ones."""
    mesh = mesh_of("explicit")
    x, w = numbers(4, 8), numbers(8, 12)

    @spmd.kernel("b/dp f/tp, f/tp d -> b/dp d {U:tp}", mesh=mesh)
    def partial(x, w):
        return spmd.einsum(x, w, "b/dp f/tp, f/tp d -> b/dp d {U:tp}")

    @spmd.kernel("b/dp d {U:tp} -> b/dp d", mesh=mesh)
    def summed(x):
        return spmd.psum(x, "b/dp d {U:tp} -> b/dp d")

    to = lambda x, layout: (jax.jit(shard, static_argnums=1) if jitted else shard)(x, layout)
    with jax.set_mesh(mesh):
        found = partial(x, w)
        for layout in ("b/dp d", "b d/tp", "b/tp d"):
            lies(to(found, layout), layout)
            np.testing.assert_array_equal(to(found, layout), x @ w)
        for one in (found, shard(x @ w, "b/dp d"), jnp.asarray(x @ w)):
            kept = to(one, "b/dp d {U:tp}")
            assert kept.sharding.spec.unreduced == {"tp"}
            np.testing.assert_array_equal(summed(kept), x @ w)


def test_the_comparison_can_fail() -> None:
    x = shard(numbers(16, 8), "a/dp b", mesh=mesh_of())
    for wrong in ("a b", "a b/dp", "a/tp b"):
        with pytest.raises(AssertionError):
            lies(x, wrong)


# -------------------- leaves that are not arrays, and arrays without dimensions

MODULES = {
    "mlp": lambda key: eqx.nn.MLP(8, 8, 16, 2, key=key),
    "dropout": lambda key: eqx.nn.Sequential([eqx.nn.Linear(8, 8, key=key), eqx.nn.Dropout(0.5)]),
    "lambda": lambda key: (eqx.nn.Linear(8, 8, key=key), eqx.nn.Lambda(lambda x: x), {"name": "a", "rate": 0.1}),
}


@pytest.mark.parametrize("module", share(MODULES))
@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
def test_init_of_ordinary_modules(module, mode) -> None:
    """Arrays are created in their places, all else stays as the function made it."""
    mesh, key, make = mesh_of(), jax.random.key(0), MODULES[module]
    layouts = lambda tree: spmd.match_layouts(tree, {"**/weight": "o/tp i/dp", "**/bias": "o/tp"})
    plain = jax.tree.leaves(make(key))
    with spmd.mode(mode):
        made = jax.tree.leaves(init(make, layouts, mesh=mesh)(key))
        inside = jax.jit(lambda key: eqx.filter(init(make, layouts, mesh=mesh)(key), eqx.is_array))(key)
    shapes = jax.tree.leaves(init(make, layouts, mesh=mesh).abstract(key))
    for x, y, shape in zip(plain, made, shapes, strict=True):
        if eqx.is_array(x):
            assert np.allclose(x, y, rtol=1e-6) and shape.sharding.spec[0] == "tp"
            assert mode == "reference" or y.sharding.spec[0] == "tp"
        else:
            assert type(x) is type(y) is type(shape)
            assert not isinstance(x, (bool, float, str)) or x == y == shape
    assert all(np.allclose(x, y) for x, y in zip(filter(eqx.is_array, plain), jax.tree.leaves(inside), strict=True))
    compiled = init(make, layouts, mesh=mesh).lower(key).compile()(key)
    assert len(jax.tree.leaves(compiled)) == sum(map(eqx.is_array, plain))


def test_init_takes_arguments_that_are_no_arrays() -> None:
    make = init(
        lambda key, act, config: {"w": act(jax.random.normal(key, (8, config["width"].stop)))}, "d f/tp", mesh=mesh_of()
    )
    key = jax.random.key(0)
    assert make(key, jnp.tanh, {"width": range(16)})["w"].sharding.spec == P(None, "tp")
    found = make(key, config={"width": range(16)}, act=jnp.exp)["w"]
    assert (found > 0).all() and make.abstract(key, jnp.exp, {"width": range(4)})["w"].shape == (8, 4)
    with pytest.raises(spmd.errors.LayoutError, match="must be hashable"):
        make(key, jnp.exp, {"width": {1, 2}})


def test_a_number_is_placed_where_it_has_a_layout_of_its_own() -> None:
    mesh = mesh_of()
    make = init(lambda: {"step": 0, "rate": 0.5, "w": jnp.ones(8)}, {"step": "scalar", "w": "d/dp"}, mesh=mesh)
    made = make()
    assert made["rate"] == 0.5 and isinstance(made["rate"], float)
    assert made["step"].sharding == NamedSharding(mesh, P()) and make.abstract()["step"].dtype == jnp.int32
    for number in (3, 2.5, True, 1j):
        placed = shard(number, "scalar", mesh=mesh)
        assert placed == number and placed.sharding == NamedSharding(mesh, P())
        assert placed.dtype == jnp.asarray(number).dtype
        assert jax.jit(lambda x=number: shard(x, "scalar", mesh=mesh))() == number
        with spmd.mode("reference"):
            assert shard(number, "scalar", mesh=mesh) == number
    with spmd.mode("reference"):
        assert spmd.from_process_local({"x": numbers(8), "name": "a"}, {"x": "b/dp"}, mesh=mesh)["name"] == "a"


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-3),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), 2),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "muon": optax.contrib.muon(1e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_arrays_without_dimensions_are_scalar_unasked(optimizer) -> None:
    """By rules, under one layout for all, and where a tree of layouts does not mention them."""
    optimizer, mesh, params = OPTIMIZERS[optimizer], mesh_of(), {"w": numbers(256, 256)}
    state = jax.eval_shape(optimizer.init, params)
    rules = {f"**/{'/'.join(map(str, path))}": "..." for path in _paths_of_matrices(state)}
    for layouts in (spmd.match_layouts(state, rules), "... _"):
        found = init(optimizer.init, layouts, mesh=mesh)(params)
        small = [x for x in jax.tree.leaves(found) if x.ndim == 0]
        assert small and all(x.sharding == NamedSharding(mesh, P()) for x in small)
    assert spmd.shard({"a": numbers(4), "n": np.int32(1)}, {"a": "b/dp"}, mesh=mesh)["n"].sharding.spec == P()


def _paths_of_matrices(tree):
    return [
        [jax.tree_util.keystr((key,), simple=True) for key in path]
        for path, leaf in jax.tree.leaves_with_path(tree)
        if leaf.ndim
    ]
