"""`spmd.haliax`: placement by names and its mappings, name by name of the Haliax document."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding

import spmd
from spmd import haliax as hax
from tests.sampler import seeds

RULES = {"batch": "data", "embed": None, "mlp": "tp", "vocab": ("tp", "data")}
X = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(data=2, tp=4)


def spec(x: Any) -> tuple[Any, ...]:
    """The axes of each dimension, whole ones at the end left out: as JAX may or may not print them."""
    entries = [*x.sharding.spec]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


class Linear(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    width: int

    def __call__(self, x):
        return x @ self.weight + self.bias


class Named(eqx.Module):
    weight: "embed mlp"  # noqa: F722
    bias: "mlp"  # noqa: F821, UP037
    width: int


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(12, 8, rngs=rngs)
        self.name = "block"

    def __call__(self, x):
        return self.linear(x)


def by_path(path: str) -> str:
    return {"linear/kernel": "embed mlp", "linear/bias": "mlp"}[path]


# -------------------- shard and its relatives


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("inside", [False, True])
def test_shard_inside_and_outside_jit(kind, inside):
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(kind,) * 2)
    for given in ({"mapping": RULES, "mesh": mesh}, {"mesh": mesh}, {"mapping": RULES}, {}):

        def place(x, given=given):
            return hax.shard(x, "batch mlp", **given)

        with jax.set_mesh(mesh), hax.axis_mapping(RULES):
            out = (jax.jit(place) if inside else place)(X)
        assert spec(out) == ("data", "tp")
        np.testing.assert_array_equal(out, X)


def test_shard_takes_the_mesh_of_the_array_and_keeps_gradients(mesh):
    x = spmd.shard(X, "a/tp b", mesh=mesh)
    assert spec(hax.shard(x, "batch embed", RULES)) == ("data",)
    assert spec(jax.jit(lambda x: hax.shard(x, "batch mlp", RULES))(x)) == ("data", "tp")

    def loss(x):
        return (hax.shard(x, "batch mlp", RULES, mesh) ** 2).sum()

    for fn in (loss, jax.jit(loss)):
        np.testing.assert_array_equal(jax.grad(fn)(jnp.asarray(X)), 2 * X)


def test_auto_sharded_does_nothing_without_a_mapping(mesh):
    x = jnp.asarray(X)
    assert hax.auto_sharded(x, "batch mlp") is x  # no mesh needed either
    assert hax.auto_sharded(x, "no such names") is x
    with hax.axis_mapping(RULES):
        assert spec(hax.auto_sharded(x, "batch mlp", mesh)) == ("data", "tp")
        with hax.axis_mapping(None):
            assert hax.auto_sharded(x, "batch mlp", mesh) is x


def test_shard_with_axis_mapping(mesh):
    assert spec(hax.shard_with_axis_mapping(X, "batch mlp", {"batch": "tp", "mlp": None}, mesh)) == ("tp",)
    with jax.set_mesh(mesh):
        assert spec(hax.shard_with_axis_mapping(X, "batch embed", RULES)) == ("data",)


def test_zeros_are_created_in_their_place(mesh):
    with hax.axis_mapping(RULES):
        zeros = spmd.init(lambda: jnp.zeros((8, 12)), "batch mlp", mesh=mesh)
        assert spec(zeros()) == ("data", "tp") and not zeros().any()
        shard_bytes = 8 * 12 * 4 // 8
        assert zeros.lower().compile().memory_analysis().output_size_in_bytes == shard_bytes


TREE = {"w": np.ones((12, 8), np.float32), "bs": [np.ones(8, np.float32), np.ones(4, np.float32)], "name": "mlp"}


@pytest.mark.parametrize(
    "names",
    [
        {"w": "embed mlp", "bs": "mlp", "name": None},
        {"w": "embed mlp", "bs": ["mlp", "mlp"], "name": None},
        lambda path: "embed mlp" if path == "w" else "mlp",
        {"w": "embed mlp", "bs": lambda path: {"0": "mlp", "1": "mlp"}[path], "name": None},
    ],
)
def test_names_of_a_tree(names, mesh):
    out = hax.shard(TREE, names, RULES, mesh)
    assert spec(out["w"]) == (None, "tp")
    assert [spec(b) for b in out["bs"]] == [("tp",), ("tp",)]
    assert out["name"] == "mlp"
    np.testing.assert_array_equal(out["w"], TREE["w"])


@pytest.mark.parametrize("names", [Named, lambda path: {"weight": "embed mlp", "bias": "mlp"}[path]])
def test_equinox_modules(names, mesh):
    module = Linear(jnp.ones((12, 8)), jnp.ones(8), 8)
    placed = hax.shard(module, names, RULES, mesh)
    assert isinstance(placed, Linear) and placed.width == 8
    assert (spec(placed.weight), spec(placed.bias)) == ((None, "tp"), ("tp",))
    inside = eqx.filter_jit(lambda module: hax.shard(module, names, RULES, mesh))(module)
    assert (spec(inside.weight), spec(inside.bias)) == ((None, "tp"), ("tp",))


def test_nnx_modules_and_their_states(mesh):
    block = NnxBlock(nnx.Rngs(0))
    with hax.axis_mapping(RULES):
        placed = hax.shard(block, by_path, mesh=mesh)
        state = hax.shard(nnx.state(block), by_path, mesh=mesh)
    assert isinstance(placed, NnxBlock) and placed.name == "block"
    merged = nnx.merge(nnx.graphdef(block), state)
    for one in (placed, merged):
        assert (spec(one.linear.kernel[...]), spec(one.linear.bias[...])) == ((None, "tp"), ("tp",))
        np.testing.assert_allclose(one(X), block(X), rtol=1e-5)


def test_reference_mode_keeps_all_on_one_device(mesh):
    with spmd.mode("reference"), warnings.catch_warnings():
        warnings.simplefilter("error")
        out = hax.shard(jnp.ones((2048, 256)), "embed other", {"embed": None, "other": None}, mesh)
    assert len(out.sharding.device_set) == 1


# -------------------- mappings


def test_mappings_nest_and_merge():
    with hax.axis_mapping({"batch": "data", "embed": "tp"}):
        assert hax.physical_axis_name("embed") == "tp"
        with hax.axis_mapping({"embed": None}):
            assert hax.physical_axis_name("embed") is None
            with pytest.raises(spmd.errors.LayoutError, match="no rule for batch"):
                hax.physical_axis_name("batch")
        with hax.axis_mapping({"embed": None}, merge=True, mlp=("data", "tp")):  # the inner one holds
            assert hax.physical_axis_name("batch") == "data"
            assert hax.physical_axis_name("embed") is None
            assert hax.physical_axis_name("mlp") == ("data", "tp")
        with hax.axis_mapping({"embed": "data"}, embed="tp"):  # keywords hold
            assert hax.physical_axis_name("embed") == "tp"
        assert hax.physical_axis_name("embed") == "tp"
    with pytest.raises(spmd.errors.LayoutError, match="no mapping"):
        hax.physical_axis_name("embed")


def test_a_mapping_stays_in_its_thread():
    found: dict[str, Any] = {}
    entered, asked = threading.Event(), threading.Event()

    def other():
        found["there, before"] = hax.auto_sharded("untouched", "a b")
        with hax.axis_mapping({"embed": "tp"}):
            found["there"] = hax.physical_axis_name("embed")
            entered.set()
            asked.wait(10)

    with hax.axis_mapping({"embed": "data"}):
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
        found["here"] = hax.physical_axis_name("embed")
        asked.set()
        thread.join()
    assert found == {"there, before": "untouched", "there": "tp", "here": "data"}


def test_a_compiled_function_follows_the_mapping(mesh):
    traces = []

    @jax.jit
    def place(x):
        traces.append(1)
        return hax.shard(x, "batch mlp", mesh=mesh)

    for rules, wanted, count in ((RULES, ("data", "tp"), 1), ({"batch": "tp", "mlp": None}, ("tp",), 2), (RULES, 0, 2)):
        with hax.axis_mapping(rules):
            out = place(X)
        assert len(traces) == count
        assert wanted in (0, spec(out))


def block_of(rank: int, axes: tuple[str, ...], shape: dict[str, int]) -> tuple[int, int]:
    """Which of how many blocks the device with this number holds, worked out from its place on the mesh."""
    place = dict(zip(shape, np.unravel_index(rank, tuple(shape.values())), strict=True))
    index, count = 0, 1
    for axis in axes:
        index, count = index * shape[axis] + int(place[axis]), count * shape[axis]
    return index, count


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("inside", [False, True])
def test_sampled_mappings(seed, inside):
    """Every device holds what its place on the mesh says, and the queries agree."""
    rng = np.random.default_rng(seed)
    shape = dict(zip("pqr", [(2, 2, 2), (4, 1, 2), (1, 8, 1), (2, 4, 1)][rng.integers(4)], strict=True))
    mesh, names = spmd.make_mesh(**shape), ["batch", "embed", "mlp"][: rng.integers(1, 4)]
    owners = rng.integers(-1, len(names), 3)  # which dimension each axis divides
    order = rng.permutation(list("pqr"))  # one for all rules: no axis divides two dimensions
    rules = {n: tuple(a for a, o in zip(order, owners, strict=True) if o == i) for i, n in enumerate(names)}
    rules = {n: None if not axes else axes[0] if len(axes) == 1 else axes for n, axes in rules.items()}
    sizes, whole = [], []
    with hax.axis_mapping(rules), jax.set_mesh(mesh):
        sizes = [hax.round_axis_for_partitioning(n, int(rng.integers(1, 20))) for n in names]
        whole = rng.normal(size=sizes).astype(rng.choice([np.float32, np.int32, np.float16]))
        place = lambda x: hax.shard(x, " ".join(names))
        out = (jax.jit(place) if inside else place)(whole)
        assert out.sharding.is_equivalent_to(hax.sharding_for_axis(" ".join(names)), out.ndim)
        assert NamedSharding(mesh, hax.pspec_for(" ".join(names))) == hax.sharding_for_axis(" ".join(names))
    ids = [device.id for device in mesh.devices.flat]
    for piece in out.addressable_shards:
        wanted = whole
        for dim, name in enumerate(names):
            axes = rules[name] or ()
            index, count = block_of(ids.index(piece.device.id), (axes,) if isinstance(axes, str) else axes, shape)
            wanted = np.split(wanted, count, dim)[index]
        np.testing.assert_array_equal(piece.data, wanted)


# -------------------- what is whole

BIG = np.zeros((1024, 512), np.float32)
WARNING = """\
shard(tree, names)
a big array is whole on every device: none of its names divides it.
got:
- tree['w']: float32[1024, 512], 2 MiB
- mapping: embed -> whole, mlp -> whole, batch -> data
advice: "embed": "data" in the mapping for one of its names, or big=... to allow it"""
WHOLE = {"embed": None, "mlp": None, "batch": "data"}


def place_big(mesh, **options):
    return hax.shard({"w": BIG, "b": BIG[0], "t": BIG}, {"w": "embed mlp", "b": "mlp", "t": "batch mlp"}, WHOLE, mesh)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, lambda fn: hax.named_jit(fn, WHOLE)])
def test_a_big_array_that_stays_whole_is_reported(wrap, mesh):
    with pytest.warns(hax.WholeArrayWarning) as caught:
        wrap(lambda: place_big(mesh))()
    [warning] = caught
    assert str(warning.message) == WARNING
    assert warning.filename == __file__  # the caller's line


def test_auto_sharded_and_the_older_name_report_at_the_callers_line(mesh):
    with pytest.warns(hax.WholeArrayWarning) as caught, hax.axis_mapping(WHOLE):
        hax.auto_sharded(BIG, "embed mlp", mesh)
        hax.shard_with_axis_mapping(BIG, "embed mlp", WHOLE, mesh)
    assert [warning.filename for warning in caught] == [__file__] * 2


def test_nothing_is_reported_of_what_is_small_divided_or_allowed(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hax.shard(BIG[:512], "embed mlp", WHOLE, mesh)  # 1 MiB
        hax.shard(BIG, "batch mlp", WHOLE, mesh)
        hax.shard(BIG, "embed mlp", WHOLE, mesh, big=BIG.nbytes)
        hax.shard(BIG, "embed mlp", WHOLE, spmd.make_mesh(data=1))  # one device: nothing to divide over
        place_small = jax.jit(lambda x: hax.shard(x, "embed mlp", WHOLE, mesh, big=BIG.nbytes))
        place_small(BIG)
    with pytest.warns(hax.WholeArrayWarning):
        hax.shard(BIG[:513], "embed mlp", WHOLE, mesh)


def test_constants_inside_jit_without_devices_at_hand(mesh):
    """Under `jax.set_mesh` a trace knows the mesh without its devices."""
    with jax.set_mesh(mesh):
        out = jax.jit(lambda: hax.shard(X, "batch mlp", RULES))()
        gradient = jax.grad(jax.jit(lambda x: (x * hax.shard(X, "batch mlp", RULES)).sum()))(jnp.ones_like(X))
    assert spec(out) == ("data", "tp")
    np.testing.assert_array_equal(gradient, X)


# -------------------- what the module says is taken as names


class Pair(eqx.Module):
    w: "embed mlp"  # noqa: F722
    v: "mlp"  # noqa: F821, UP037


def test_names_of_every_kind_everywhere(mesh):
    rules = {"embed": "data", "mlp": None}
    tree = Pair(jnp.ones((8, 4)), jnp.ones(4))
    kinds = [Pair, Pair("embed mlp", "mlp"), {"w": "embed mlp", "v": "mlp"}.__getitem__]
    for names in kinds:
        with hax.axis_mapping(rules), jax.set_mesh(mesh):
            placed = [
                hax.shard(tree, names),
                hax.auto_sharded(tree, names),
                hax.shard_with_axis_mapping(tree, names, rules),
                hax.named_jit(lambda tree: tree, rules, in_names=(names,), out_names=names)(tree),
                hax.fsdp(lambda tree: tree, rules, rules, in_names={"tree": names}, out_names=names)(tree),
            ]
        assert {spec(one.w) for one in placed} == {("data",)}
    for names, of in [(Pair, dict), ({"w": "embed mlp", "v": "mlp"}, dict), (kinds[1], vars)]:
        specs, shardings = hax.pspec_for(names, rules), hax.sharding_for_axis(names, rules, mesh)
        assert of(specs) == {"w": jax.P("data", None), "v": jax.P(None)}
        assert {key: one.spec for key, one in of(shardings).items()} == of(specs)
