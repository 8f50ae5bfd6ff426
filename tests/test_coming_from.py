"""The tables of "Coming from elsewhere": both sides of each row are run on the same data and compared.

The cells are read from the pages and evaluated, so a row cannot say something else than what is tested; a row without
a case fails. Haliax is compared with itself where it is installed, else with the few lines of NumPy below.
"""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd import Layout

ROOT = Path(__file__).parents[1]
PAGE = "docs/pages/coming-from.md"
SPMD = {name: getattr(spmd, name) for name in dir(spmd) if not name.startswith("_")}
JAX = {"jax": jax, "jnp": jnp, "lax": lax, "P": P}


def table(heading: str, path: str = PAGE) -> list[list[str]]:
    """The rows of the first table under a heading, cell by cell."""
    text = (ROOT / path).read_text().split(f"\n{heading}\n")[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert lines is not None
    rows = [re.split(r"(?<!\\) \| ", line.strip().strip("|").strip()) for line in lines[0].splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def numbers(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32))


def rows(heading: str) -> Any:
    found = table(heading)
    return pytest.mark.parametrize("row", found, ids=[row[0] for row in found])


# --- shard_map ----------------------------------------------------------------------------------------------

MESH = {"dp": 2, "tp": 4}
RING = {"cp": 4}
EACH = P(("dp", "tp"))  # another block on each device

# of a call of lax: the mesh, the array's shape and where its blocks lie; `n` is 2
CALLS: dict[str, tuple[dict[str, int], tuple[int, ...], P]] = {
    'lax.all_gather(x, "tp", axis=1, tiled=True)': (MESH, (8, 8), P("dp", "tp")),
    'lax.all_gather(x, "tp", axis=1, tiled=True, to="invarying")': (MESH, (8, 8), P("dp", "tp")),
    'lax.psum(x, "tp")': (MESH, (16,), EACH),
    'lax.psum_scatter(x, "tp", scatter_dimension=0, tiled=True)': (MESH, (64, 4), EACH),
    'lax.all_to_all(x, "tp", 2, 1, tiled=True)': (MESH, (2, 8, 8), P(None, "tp")),
    'lax.ppermute(x, "cp", [(0, 1), (1, 2), (2, 3), (3, 0)])': (RING, (2, 8), P(None, "cp")),
    'lax.pmean(x.mean(0), "dp")': (MESH, (8, 4), P("dp")),
    'lax.pmax(x.max(0), "dp")': (MESH, (8, 4), P("dp")),
    'lax.pcast(x, "dp", to="varying")': (MESH, (8,), P()),
    'lax.dynamic_slice_in_dim(x, lax.axis_index("tp") * n, n)': (MESH, (8, 2), P()),
}
# of what has no array: the pattern of a kernel that returns it, and the shape of its argument
BORN = {
    'lax.pcast(jnp.zeros(n), "dp", to="varying")': ("b/dp -> b/dp", (4,), MESH),
    'lax.axis_size("cp")': ("s/cp -> scalar", (8,), RING),
    'lax.axis_index("cp") + jnp.arange(1)': ("c/cp -> c/cp", (4,), RING),
    'lax.axis_index("cp") * n': ("s/cp -> c/cp", (8,), RING),
    'lax.axis_index("cp") * n + jnp.arange(n)': ("s/cp -> s/cp", (8,), RING),
}


def in_shard_map(body: Callable[..., Any], mesh: Any, spec: P) -> Any:
    """The body's blocks, stacked in the order of the devices."""
    stacked = lambda x: jax.tree.map(lambda y: jnp.asarray(y)[None], body(x))
    return jax.jit(jax.shard_map(stacked, mesh=mesh, in_specs=spec, out_specs=P(mesh.axis_names)))


def pullback(body: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """The gradient by a cotangent that differs wherever the value may."""

    def pulled(x):
        y, pull = jax.vjp(body, x)
        by = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        for i, axis in enumerate(spmd.typeof(y).varying):
            by = by * (lax.axis_index(axis).astype(y.dtype) + (i + 1.0))
        return pull(by)[0]

    return pulled


def sent(run: Any, x: Any, mesh: Any) -> list[tuple[str, tuple[str, ...], int]]:
    found = spmd.inspect.collectives(run, x, mesh=mesh)
    return sorted((one.kind, tuple(one.axes), one.total_bytes) for one in found)


def same_calls(one: str, two: str, shape: tuple[int, ...] = ()) -> None:
    sizes, usual, spec = CALLS[one]
    mesh, x = spmd.make_mesh(**sizes), numbers(*(shape or usual))
    bodies = [lambda x, text=text: eval(text, {**JAX, **SPMD, "x": x, "n": 2}) for text in (one, two)]
    runs = [in_shard_map(body, mesh, spec) for body in bodies]
    np.testing.assert_allclose(runs[0](x), runs[1](x), rtol=1e-6)
    assert sent(runs[0], x, mesh) == sent(runs[1], x, mesh)
    if "pmax" in one:
        return  # JAX's has no gradient
    pulls = [in_shard_map(pullback(body, mesh), mesh, spec) for body in bodies]
    np.testing.assert_allclose(pulls[0](x), pulls[1](x), rtol=1e-5)
    theirs, ours = (sent(run, x, mesh) for run in pulls)
    if "split" in two:  # the table says so
        [(kind, _, reduced), (other, _, gathered)] = *theirs, *ours
        assert (kind, other) == ("psum", "all_gather") and gathered < reduced
    else:
        assert theirs == ours


def same_births(one: str, two: str) -> None:
    pattern, shape, sizes = BORN[one]
    mesh, x = spmd.make_mesh(**sizes), numbers(*shape)
    source, target = map(Layout, pattern.split(" -> "))
    shaped = (lambda y: jnp.asarray(y)[None]) if "c/cp" in pattern and "arange" not in one else jnp.asarray
    theirs = jax.shard_map(
        lambda x: shaped(eval(one, {**JAX, "n": 2})), mesh=mesh, in_specs=source.spec, out_specs=target.spec
    )
    names = {"iota": spmd.iota, "zeros": spmd.zeros, "offset": spmd.offset, "axis_size": spmd.axis_size}
    kernel = spmd.kernel(pattern, mesh=mesh, **({"c": 4} if pattern.startswith("s/cp -> c") else {}))
    ours = kernel(lambda x: shaped(eval(two, names)))
    np.testing.assert_array_equal(jax.jit(theirs)(x), ours(x))
    assert sent(jax.jit(theirs), x, mesh) == sent(ours, x, mesh) == []


def same_programs() -> None:
    """`mesh`, `in_specs`, `out_specs`, and one pattern."""
    mesh = spmd.make_mesh(**MESH)
    body = lambda x, w: lax.psum(x @ w, "tp")
    theirs = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("dp", "tp"), P("tp", None)), out_specs=P("dp", None)))
    ours = spmd.kernel("b/dp d/tp, d/tp f -> b/dp f")(body)
    x, w = spmd.shard(numbers(4, 8), "b/dp d/tp", mesh=mesh), spmd.shard(numbers(8, 3), "d/tp f", mesh=mesh)
    np.testing.assert_array_equal(theirs(x, w), ours(x, w))
    found = [spmd.inspect.collectives(run, x, w, mesh=mesh) for run in (theirs, ours)]
    assert found[0].counts == found[1].counts == {"psum": 1}
    assert found[0].total_bytes == found[1].total_bytes


def same_specs(one: str, two: str) -> None:
    mesh = spmd.make_mesh(dp=2, fsdp=2)
    pairs = list(zip(code(one), code(two), strict=True))
    assert len(pairs) == 3
    for spec, layout in pairs:
        shape = (8,) * len(Layout(layout).dims)
        theirs = jax.NamedSharding(mesh, eval(spec, {"P": P}))
        assert Layout(layout).sharding(mesh).devices_indices_map(shape) == theirs.devices_indices_map(shape)


@rows("## From shard_map")
def test_shard_map(row: list[str]) -> None:
    one, two = row
    if one.startswith("`mesh`"):
        same_programs()
    elif one.startswith("`P("):
        same_specs(one, two)
    elif code(one)[0] in CALLS:
        same_calls(code(one)[0], code(two)[0])
    else:
        same_births(code(one)[0], code(two)[0])


def test_every_case_has_its_row() -> None:
    """A case whose row was reworded would test nothing."""
    told = [code(row[0])[0] for row in table("## From shard_map")]
    assert set(CALLS) <= set(told)
    assert set(BORN) - set(told) == {'lax.axis_index("cp") * n + jnp.arange(n)'}  # of the other table


COMPARED = [row for row in table("### Line by line") if code(row[1]) and code(row[2])]


@pytest.mark.parametrize("row", COMPARED, ids=[row[0] for row in COMPARED])
def test_readme(row: list[str]) -> None:
    what, one, two = row[0], code(row[1])[0], code(row[2])[0]
    if what == "placement of an argument":
        mesh = spmd.make_mesh(**MESH)
        theirs = jax.NamedSharding(mesh, eval(one, {"P": P}))
        assert Layout(two).sharding(mesh).devices_indices_map((8, 8, 8)) == theirs.devices_indices_map((8, 8, 8))
    elif one in BORN:
        same_births(one, two)
    elif "einsum" in one:
        mesh, h, w = spmd.make_mesh(**MESH), numbers(2, 4, 8), numbers(8, 3)
        specs = (P(None, None, "tp"), P("tp"))
        bodies = [lambda h, w, text=text: eval(text, {**JAX, **SPMD, "h": h, "w": w}) for text in (one, two)]
        runs = [jax.jit(jax.shard_map(b, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"))) for b in bodies]
        np.testing.assert_allclose(runs[0](h, w), runs[1](h, w), rtol=1e-5)
        found = [spmd.inspect.collectives(run, h, w, mesh=mesh) for run in runs]
        assert found[0].counts == found[1].counts == {"psum_scatter": 1}
        assert found[0].total_bytes == found[1].total_bytes
    elif "all_gather" in one:
        same_calls(one, two, (4, 8, 3))
    else:
        same_calls(one, two)
    assert len(COMPARED) == 6


def test_a_row_that_swaps_its_sides_is_noticed() -> None:
    """Meta-test: the same shapes and collectives, another program."""
    with pytest.raises(AssertionError):
        same_calls('lax.ppermute(x, "cp", [(0, 1), (1, 2), (2, 3), (3, 0)])', 'shift(x, "b [c/cp]", -1)')
    with pytest.raises(spmd.errors.SpmdError):
        same_calls('lax.all_to_all(x, "tp", 2, 1, tiled=True)', 'all_to_all(x, "b s h/tp -> b s/tp h")')


def test_what_goes_wrong_is_one_program_on_both_sides() -> None:
    """The bodies without collectives are the same text in raw JAX and in a kernel."""
    text = (ROOT / PAGE).read_text().split("### What goes wrong without a word")[1].split("## From Haliax")[0]
    programs = re.findall(r"raw\((lambda [^:]*: (?:(?!lax\.)[^()]|\([^()]*\))*?), \(?P\(", text)
    assert programs == ["lambda v: jnp.arange(v.size)", "lambda h, w: h @ w"]
    for program in programs:
        assert re.search(rf'attempt\("[^"]*", {re.escape(program)}, ', text), program


# --- Haliax -------------------------------------------------------------------------------------------------

SIZES = {"batch": 8, "embed": 4, "mlp": 6, "query": 3, "key": 5, "vocab": 10}


class Named:
    """An array with names for its dimensions."""

    def __init__(self, array: Any, names: Any) -> None:
        self.array, self.axes = array, tuple(SimpleNamespace(name=getattr(name, "name", name)) for name in names)

    @property
    def names(self) -> list[str]:
        return [axis.name for axis in self.axes]


def stand_in_of_placement() -> dict[str, Any]:
    rules: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def axis_mapping(mapping: dict[str, Any]) -> Any:
        rules.append(mapping)
        yield
        rules.pop()

    def placed(x: Named, mapping: dict[str, Any]) -> Named:
        spec = P(*(mapping.get(name) for name in x.names))
        mesh = jax.sharding.get_mesh()
        return Named(jax.device_put(x.array, jax.NamedSharding(mesh, spec)), x.names)

    def named_jit(fn: Any, in_axis_resources: Any, out_axis_resources: Any) -> Any:
        return lambda *args: placed(fn(*(placed(x, in_axis_resources) for x in args)), out_axis_resources)

    return {"axis_mapping": axis_mapping, "shard": lambda x: placed(x, rules[-1]), "named_jit": named_jit}


def stand_in() -> Any:
    """What Haliax's document says of the functions in the table, in NumPy."""

    def along(fn: Callable[..., Any], x: Named, axis: Any) -> Named:
        at = x.names.index(axis.name)
        return Named(fn(np.asarray(x.array), axis=at), [name for name in x.names if name != axis.name])

    def dot(x: Named, w: Named, axis: Any) -> Named:
        out = [name for name in dict.fromkeys([*x.names, *w.names]) if name != axis.name]
        letters = dict(zip(dict.fromkeys([*x.names, *w.names]), "abcdefg", strict=False))
        text = ["".join(letters[name] for name in names) for names in (x.names, w.names, out)]
        return Named(np.einsum(f"{text[0]},{text[1]}->{text[2]}", x.array, w.array), out)

    def softmax(x: Named, axis: Any) -> Named:
        return Named(jax.nn.softmax(x.array, axis=x.names.index(axis.name)), x.names)

    def take(x: Named, axis: str, ids: Named) -> Named:
        at = x.names.index(axis)
        return Named(
            np.take(np.asarray(x.array), np.asarray(ids.array), axis=at),
            [*x.names[:at], *ids.names, *x.names[at + 1 :]],
        )

    def rearrange(x: Named, names: Any) -> Named:
        return Named(np.transpose(x.array, [x.names.index(name) for name in names]), names)

    def flatten_axes(x: Named, old: Any, new: str) -> Named:
        at = x.names.index(old[0])
        assert x.names[at : at + len(old)] == list(old)
        names = [*x.names[:at], new, *x.names[at + len(old) :]]
        return Named(np.reshape(x.array, (*x.array.shape[:at], -1, *x.array.shape[at + len(old) :])), names)

    def unflatten_axis(x: Named, old: str, new: Any) -> Named:
        at = x.names.index(old)
        shape = (*x.array.shape[:at], *(axis.size for axis in new), *x.array.shape[at + 1 :])
        return Named(np.reshape(x.array, shape), [*x.names[:at], *(a.name for a in new), *x.names[at + 1 :]])

    return SimpleNamespace(
        Axis=lambda name, size: SimpleNamespace(name=name, size=size),
        named=Named,
        dot=dot,
        sum=lambda x, axis: along(np.sum, x, axis),
        mean=lambda x, axis: along(np.mean, x, axis),
        nn=SimpleNamespace(softmax=softmax),
        take=take,
        rearrange=rearrange,
        flatten_axes=flatten_axes,
        unflatten_axis=unflatten_axis,
        **stand_in_of_placement(),
    )


@pytest.fixture(scope="module")
def hax() -> Any:
    try:
        import haliax
    except ImportError:
        return stand_in()
    return haliax


def haliax_arrays(hax: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The variables of the table, as Haliax has them and as plain arrays."""
    axes = {name: hax.Axis(name, size) for name, size in SIZES.items()}
    shapes = {"x": "batch embed", "w": "embed mlp", "scores": "batch query key", "table": "vocab embed"}
    plain = {k: numbers(*(SIZES[name] for name in names.split())) for k, names in shapes.items()}
    named = {k: hax.named(plain[k], tuple(axes[name] for name in names.split())) for k, names in shapes.items()}
    plain["ids"] = jnp.asarray([3, 1, 4, 1, 5, 9, 2, 6])
    named["ids"] = hax.named(plain["ids"], (axes["batch"],))
    plain["pairs"] = numbers(8, 15)
    named["pairs"] = hax.named(plain["pairs"], (axes["batch"], hax.Axis("pairs", 15)))
    return {**{name.capitalize(): axis for name, axis in axes.items()}, **named}, plain


@rows("## From Haliax")
def test_haliax(row: list[str], hax: Any) -> None:
    left, right = code(row[0])[0], code(row[1])
    theirs, ours = haliax_arrays(hax)
    mesh = spmd.make_mesh(data=2)
    with jax.set_mesh(mesh):
        if left.startswith("hax.Axis"):
            assert eval(left, {"hax": hax}).size == SIZES["embed"]
            assert Layout("batch embed").global_shape(ours["x"].shape, mesh) == (8, SIZES["embed"])
        elif left.startswith("hax.named("):
            names = [axis.name for axis in eval(left, {"hax": hax, "x": ours["x"]}).axes]
            assert list(Layout(right[0].strip('"')).names) == names
        elif left == "hax.shard(x)" or left.startswith("with "):
            entered = {code(one)[0][:8]: code(two)[0] for one, two in table("## From Haliax") if "axis_map" in one}
            with eval('hax.axis_mapping({"batch": "data"})', {"hax": hax}):
                moved = hax.shard(theirs["x"]).array
            assert list(entered) == ["with hax"]
            with eval(entered["with hax"].removeprefix("with ").removesuffix(":"), {"spmd": spmd}):
                mine = spmd.shard(ours["x"], "batch embed", mesh=mesh)
            assert mine.sharding.is_equivalent_to(moved.sharding, 2) and len(mine.sharding.device_set) == 2
            np.testing.assert_array_equal(mine, moved)
        elif "named_jit" in left:
            rules = {"batch": "data", "embed": None, "mlp": None}
            f = lambda x, w: hax.dot(x, w, axis=theirs["Embed"])
            given = {name: axis for name, axis in rules.items() if axis}
            moved = eval(left, {"hax": hax, "f": f, "rules": given})(theirs["x"], theirs["w"]).array
            body = lambda x, w: spmd.einsum(x, w, "batch embed, embed mlp -> batch mlp")
            pattern = "batch embed, embed mlp -> batch mlp"
            mine = eval(right[0], {"kernel": spmd.kernel, "f": body, "rules": rules, "pattern": pattern})
            mine = mine.auto(*(jax.device_put(ours[k], jax.NamedSharding(mesh, P())) for k in "xw"))
            assert mine.sharding.is_equivalent_to(moved.sharding, 2)
            np.testing.assert_allclose(mine, moved, rtol=1e-5, atol=1e-6)
        else:
            want = eval(left, {"hax": hax, **theirs})
            body = lambda values: eval(right[0], {**SPMD, **values})
            found = spmd.kernel(in_layouts=("...",), out_layouts="...", mesh=mesh)(body)(ours)
            assert found.shape == want.array.shape
            np.testing.assert_allclose(found, want.array, rtol=1e-5, atol=1e-6)


# --- einops -------------------------------------------------------------------------------------------------

EINOPS = {"rearrange": (numbers(4, 16),), "repeat": (numbers(8),), "reduce": (numbers(4, 6),)}
EINOPS["einsum"] = (numbers(4, 6), numbers(6, 8))


@rows("## From einops")
def test_einops(row: list[str]) -> None:
    left, right = code(row[0])[0], code(row[1])
    verb = left.split("(")[0]
    mesh = spmd.make_mesh(**MESH)
    x = numbers(4, 6)
    if verb in EINOPS:
        args, names = EINOPS[verb], dict(zip("xw", EINOPS[verb], strict=False))
        want = eval(left, {verb: getattr(einops, verb), **names})
        whole = spmd.kernel(in_layouts=("...",) * len(args), out_layouts="...", mesh=mesh)(
            lambda *args: eval(left, {**SPMD, **dict(zip("xw", args, strict=False))})
        )
        np.testing.assert_allclose(whole(*args), want, rtol=1e-5)
        written = re.search(r'"([^"]+)"', left)
        assert written is not None
        divided = left.replace(written[1], right[0])
        sizes = {key: int(n) for key, n in re.findall(r", (\w)=(\d+)", left)}
        kernel = spmd.kernel(right[0], mesh=mesh, **sizes)(
            lambda *args: eval(divided, {**SPMD, **dict(zip("xw", args, strict=False))})
        )
        np.testing.assert_allclose(kernel(*args), want, rtol=1e-5)
        if "never communicates" in row[1]:
            assert spmd.inspect.collectives(kernel, *args, mesh=mesh).counts == {}
    elif left == "...":
        want = einops.rearrange(x, "... d -> d ...")
        kernel = spmd.kernel("b/dp d -> d b/dp", mesh=mesh)(lambda x: spmd.rearrange(x, "... d -> d ..."))
        np.testing.assert_array_equal(kernel(x), want)
    elif left == "1":
        assert code(row[0]) == ["1", "()"]
        kernel = spmd.kernel("b d -> b 1 d", mesh=mesh)(lambda x: spmd.rearrange(x, f"b d -> b {right[0]} d"))
        for unit in code(row[0]):
            np.testing.assert_array_equal(kernel(x), einops.rearrange(x, f"b d -> b {unit} d"))
    elif left == "b d ->":
        for pattern in (left, right[0]):
            kernel = spmd.kernel("b d -> scalar", mesh=mesh)(lambda x, p=pattern: spmd.reduce(x, p, "sum"))
            np.testing.assert_allclose(kernel(x), einops.reduce(x, left, "sum"), rtol=1e-5)
    else:
        assert row[1] == "none" and not {*code(row[0])} & {*dir(spmd)}
