"""Random wrong calls: how many of them end in an error that is not of this package.

python -m tests.benchmarks.wrong_calls --calls 3000 --seed 0

A right call is drawn, outside of a kernel or in a body, and one or two of its arguments become something else. An error
is told if it is of this package, or if Python itself refuses the call since an argument is missing or unknown.
Everything else is raw: an error of JAX, of NumPy or of Python from inside of the package, which does not say what to
write.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import random
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import spmd

X = np.linspace(0.1, 1, 128, dtype=np.float32).reshape(8, 16)
W = np.linspace(0.1, 1, 256, dtype=np.float32).reshape(16, 16)
IDS = np.arange(8, dtype=np.int32)
Q = np.ones((4, 8, 4, 4), np.float32)
spmd.use_cpu_devices(8)
KEY = jax.random.key(0)


class Given(NamedTuple):
    """A right call: the path of what is called, its arguments, and whether it stands in a body."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inside: bool


def given(name: str, *args: Any, inside: bool = True, **kwargs: Any) -> Given:
    return Given(name, args, kwargs, inside)


def square(x: Any) -> Any:
    return (x * x).sum()


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array of the call, which a body gets as a shard of this layout."""

    value: Any
    layout: str = "b/dp d"


A, B, I = Argument(X), Argument(W, "d f/tp"), Argument(IDS, "b/dp")
WHOLE, SUMMED, KEYS = Argument(X, "b d"), Argument(X, "b d"), Argument(KEY, "scalar")
HEADS = Argument(Q, "b/dp s h/tp k")
CUBE = Argument(W, "x/dp y")

BODIES = [
    given("all_gather", A, "b/dp d -> b d"),
    given("all_gather", A, "b/dp d -> b d", to="invarying"),
    given("reduce", A, "b/dp d -> b/dp 1", "max"),
    given("einsum", A, A, "b/dp d, b/dp e -> d e {U:dp}"),
    given("all_to_all", A, "b/dp d -> b d/dp"),
    given("split", WHOLE, "b d -> b/dp d"),
    given("defer", WHOLE, "b d -> b d {R:dp}"),
    given("relayout", A, "b/dp d -> b d/dp", prefer="collectives"),
    given("ppermute", A, "[b/dp] d", [(0, 1), (1, 0)]),
    given("shift", A, "[b/dp] d", 1, wrap=True),
    given("einsum", A, B, "b/dp d, d f/tp -> b/dp f/tp", precision=None),
    given("reduce", A, "b/dp d -> d", "mean"),
    given("rearrange", A, "b/dp (h k) -> b/dp h k", h=4),
    given("repeat", A, "b/dp d -> b/dp d r", r=2),
    given("softmax", A, "b/dp [d]"),
    given("argmax", A, "b/dp [d]"),
    given("sort", A, "[b/dp] d", descending=True),
    given("argsort", A, "b/dp [d]"),
    given("top_k", A, "b/dp [d]", 2),
    given("cumsum", A, "[b/dp] d", reverse=False),
    given("flip", A, "[b/dp] d"),
    given("roll", A, "[b/dp] d", 3),
    given("take", B, I, "[d] f/tp, b/dp -> b/dp f/tp"),
    given("scatter_add", A, I, "b/dp d, b/dp -> [v] d", v=8),
    given("iota", "b/dp"),
    given("zeros", "b/dp d", "float32"),
    given("full", "b/dp d", 2.0, "float32"),
    given("ones", "b/dp d"),
    given("linspace", 0.0, 1.0, "b/dp"),
    given("size", "b"),
    given("local_size", "b/dp"),
    given("offset", "b/dp"),
    given("axis_index", "dp"),
    given("axis_size", ("dp", "tp")),
    given("annotate", A, "b/dp d"),
    given("assert_equal", WHOLE, "dp", "it is whole"),
    given("grad", square, loss="{U:dp}"),
    given("value_and_grad", square, 0, loss="{U:dp}"),
    given("cond", True, square, square, A),
    given("local", square, "b/dp d -> scalar"),
    given("opaque", square, "b/dp d -> scalar"),
    given("exchange", A, I, "[b/dp] d", capacity=4),
    given("debug_print", "x is {}", A),
    given("meshgrid", I, Argument(IDS, "c/tp"), "b/dp, c/tp -> b/dp c/tp"),
    given("typeof", A),
    given("fft.fft", A, "b/dp [d] -> b/dp kd", norm="ortho"),
    given("fft.rfft", A, "b/dp [d] -> b/dp kd"),
    given("fft.dct", A, "b/dp [d] -> b/dp kd", type=2),
    given("fft.fftfreq", "b/dp", 1.0),
    given("stencil.halo", A, "b/dp d -> 1+b/dp+1 d", edge="zero"),
    given("stencil.diff", A, "[b/dp] d"),
    given("stencil.convolve", A, [1.0, 2.0, 1.0], "[b/dp] d"),
    given("random.normal", KEYS, "b/dp d", b=8, d=4),
    given("random.uniform", KEYS, "b/dp d", minval=0.0, maxval=2.0, b=8, d=4),
    given("random.bernoulli", KEYS, "b/dp", p=0.3, b=8),
    given("linalg.qr", CUBE, "[x/dp] [y]"),
    given("nn.column_linear", A, B, tp="tp"),
    given("nn.row_linear", WHOLE, Argument(W, "d f"), tp=None),
    given("nn.mlp", A, B, Argument(W, "f/tp d"), tp="tp"),
    given("nn.rms_norm", A, Argument(W[0], "d"), eps=1e-6),
    given("nn.layer_norm", A, Argument(W[0], "d"), Argument(W[0], "d")),
    given("nn.embedding", I, Argument(W, "v/tp d"), tp="tp"),
    given("nn.cross_entropy", A, I, label_smoothing=0.1, dp="dp"),
    given("nn.dot_product_attention", HEADS, HEADS, HEADS, causal=True, tp="tp"),
    given("nn.dropout", A, KEYS, "b/dp d", rate=0.1),
    given("nn.rotary_frequencies", 8, theta=10000.0),
    given("parallel.ring_attention", HEADS, HEADS, HEADS, cp=None, tp="tp", causal=True),
    given("parallel.router", A, Argument(W, "d e"), k=2),
    given("parallel.sequence_positions", 8, "contiguous", cp="dp"),
    given("parallel.global_norm", [A, B], ["b/dp d", "d f/tp"]),
]


def outside(mesh: Any, folder: Path) -> list[Given]:
    kernel = spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: 2 * x)
    placed = spmd.shard(X, "b/dp d", mesh=mesh)
    make = lambda name, *args, **kwargs: given(name, *args, inside=False, **kwargs)
    return [
        make("make_mesh", dp=2, tp=4),
        make("Layout", "b/dp d"),
        make("Pattern", "b/dp d -> b d", arrow=True),
        make("AxisMapping", {"b": "dp", "d": None}),
        make("shard", {"x": X}, {"x": "b/dp d"}, mesh=mesh),
        make("shard", X, "b/dp d", mesh=mesh, mapping=None),
        make("init", square, "b/dp d", mesh=mesh),
        make("from_function", lambda i, j: i + j, "x/dp y", x=8, y=8, mesh=mesh),
        make("from_process_local", X, "b/dp d", mesh=mesh),
        make("kernel", "b/dp d -> b/dp d", mesh=mesh, boundary="move", static=(), axes=None),
        make("match_layouts", {"a": X, "b": W}, {"a": "b d", "b": "d f"}),
        make("plan", "b/dp d -> b d/dp", sizes={"b": 8, "d": 16}, mesh=mesh, dtype="float32"),
        make("axis_mapping", {"b": "dp"}, merge=False),
        make("mode", "auto", constrain="all"),
        make("explain", kernel, placed, compiled=False),
        make("check", kernel, placed, strict=False),
        make("propagate", square, placed, mesh=mesh, layouts="b/dp d"),
        make("visualize", placed),
        make("typeof", placed),
        make("scope", square, mapping=None),
        make("custom_vjp", square, (0,)),
        make("accelerators.hardware", "h100"),
        make("cluster.my_rows", "b/dp d", (8, 16), mesh=mesh),
        make("cluster.batches", X, "b/dp d", batch=4, seed=0, mesh=mesh, prefetch=0),
        make("cluster.guard", 100, {"w": placed}, every=100),
        make("cluster.checkpoints", folder / "run", keep=3, timeout_seconds=60),
        make("cluster.write_zarr", folder / "u.zarr", placed, "b d", overwrite=True),
        make("cluster.read_zarr", folder / "u.zarr", "b/dp d", mesh=mesh, dtype=None),
        make("testing.assert_sharded", placed, 0.02, layouts="b/dp d"),
        make("parallel.fsdp_layouts", {"w": X}, {"w": "b d"}, fsdp="dp", mesh=mesh, min_size=1),
        make("parallel.clip_by_global_norm", 1.0, {"w": "b d"}),
        make("parallel.pipeline_schedule", 2, 4, 1, "forward"),
        make("parallel.sequence_order", 16, 2, "zigzag"),
        make("haliax.pspec_for", ("b", "d"), {"b": "dp", "d": None}),
        make("kernel.call", kernel, placed),
        make("kernel.call", kernel, X),
        make("kernel.reference", kernel, X),
        make("kernel.auto", kernel, placed),
        make("kernel.lower", kernel, placed),
    ]


def is_key(value: Any) -> bool:
    value = value.value if isinstance(value, Argument) else value
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


class Odd:
    """A class that nothing knows."""


def near_to(value: Any) -> list[Any]:
    """What is nearly this value, and is not right."""
    near: list[Any] = []
    if isinstance(value, str):
        near = [f"{value} ", value[: len(value) // 2], value.replace("dp", "tp"), value.replace("/", " "), value * 2]
        near += [
            value.replace("->", ","),
            value.upper(),
            f"{value} -> {value}",
            [value],
            (value, value),
            value.encode(),
        ]
    if isinstance(value, bool | int | float):
        near = [-value, value + 0.5, 10**20, f"{value}", [value], np.float32(value), np.ones(3), None, 1j, float("nan")]
    if isinstance(value, Argument | np.ndarray | jax.Array) and not is_key(value):
        raw = np.atleast_1d(getattr(value, "value", value))
        raw = raw if raw.dtype.kind in "fic" else X  # what took the place of another argument may be anything
        near = [
            raw[:1],
            raw[None],
            raw.astype(np.int32),
            raw > 0,
            raw + 1j,
            raw[:3],
            raw[:0],
            [value, value],
            {"x": value},
        ]
        near += [
            raw.tolist(),
            raw.astype("int64"),
            raw.astype(str),
            jax.random.key(0),
            jax.ShapeDtypeStruct((8,), "int8"),
        ]
    if isinstance(value, Mapping):
        near = [list(value.items()), list(value), {**value, "more": 3}, {}, {3: "b"}, dict.fromkeys(value)]
    if isinstance(value, tuple | list):
        near = [*value, [*value, *value], set(map(repr, value)), [None], dict(enumerate(value))]
    if callable(value):
        near = [value(X) if value is square else 3, lambda: None, lambda *args: None, lambda x: "text", len]
    return near


def odd(dice: random.Random, value: Any, mesh: Any) -> Any:
    """Something else than `value`: near it, or anything."""
    near = near_to(value)
    far: list[Any] = [None, 3, -1, 0, 2.5, True, "", "b", "dp", "b/dp d -> b d", "a b c", b"b", (), [], {}, [1, "a"]]
    far += [
        {"b": 2},
        Odd,
        Odd(),
        object(),
        print,
        lambda x: x,
        mesh,
        jax.P("dp"),
        spmd.Layout("b/dp d"),
        np.dtype("int8"),
    ]
    far += [
        np.zeros((2, 2)),
        np.array("text"),
        np.array([None]),
        jnp.ones(3),
        X[:, :3],
        range(3),
        slice(2),
        ...,
        Path("a"),
    ]
    far += [float("inf"), 2**70, "é", "b\0", frozenset("ab"), iter("ab"), jax.random.key(1), np.ma.ones(3), "b/dp/dp d"]
    return dice.choice(near if near and dice.random() < 0.5 else far)


def wrong(dice: random.Random, right: Given, mesh: Any) -> Given:
    """A call in which one or two arguments are something else, missing, or too many."""
    args, kwargs = list(right.args), dict(right.kwargs)
    for _ in range(dice.choice([1, 1, 2])):
        places: list[Any] = [*range(len(args)), *kwargs]
        how = dice.random()
        if how < 0.8 and places:
            place = dice.choice(places)
            holder: Any = args if isinstance(place, int) else kwargs
            holder[place] = odd(dice, holder[place], mesh)
        elif how < 0.87 and args:
            args.pop(dice.randrange(len(args)))
        elif how < 0.92:
            args.insert(dice.randint(0, len(args)), odd(dice, None, mesh))
        elif how < 0.96 and len(args) > 1:
            dice.shuffle(args)
        else:
            kwargs[dice.choice(["dp", "tp", "b", "axis", "mesh", "layout", "dtype", "x"])] = odd(dice, None, mesh)
    return Given(right.name, tuple(args), kwargs, right.inside)


def called(name: str) -> Callable[..., Any]:
    """What has this path in the package; a method of a kernel is given the kernel."""
    if name == "kernel.call":
        return lambda kernel, *args, **kwargs: kernel(*args, **kwargs)
    if name.startswith("kernel."):
        return lambda kernel, *args, **kwargs: getattr(kernel, name.partition(".")[2])(*args, **kwargs)
    found: Any = spmd
    for part in name.split("."):
        found = getattr(found, part)
    return found


def run(one: Given, mesh: Any) -> None:
    """Make the call. In a body, arrays are the kernel's arguments."""
    fn = called(one.name)
    if not one.inside:
        if one.name.startswith("kernel.") and not isinstance(one.args[0] if one.args else None, spmd.Kernel):
            return
        made = fn(*one.args, **one.kwargs)
        if hasattr(made, "__enter__") and one.name in ("mode", "axis_mapping"):
            with made:
                pass
        return
    arrays: list[Argument] = []

    def numbered(value: Any) -> Any:
        if isinstance(value, Argument):
            arrays.append(value)
            return Place(len(arrays) - 1)
        if isinstance(value, list):
            return [numbered(x) for x in value]
        return {k: numbered(x) for k, x in value.items()} if type(value) is dict else value

    args, kwargs = [numbered(x) for x in one.args], {k: numbered(x) for k, x in one.kwargs.items()}

    def filled(value: Any, shards: Sequence[Any]) -> Any:
        if isinstance(value, Place):
            return shards[value.index]
        if isinstance(value, list):
            return [filled(x, shards) for x in value]
        return {k: filled(x, shards) for k, x in value.items()} if type(value) is dict else value

    def body(*shards: Any) -> Any:
        fn(*[filled(x, shards) for x in args], **{k: filled(x, shards) for k, x in kwargs.items()})
        return jnp.zeros(())

    held = arrays or [A]
    pattern = f"{', '.join(one.layout for one in held)} -> scalar"
    spmd.kernel(pattern, mesh=mesh, check="off")(parameters(body, len(held)))(*[one.value for one in held])


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the shard of an argument comes."""

    index: int


def parameters(body: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The body with so many parameters of its own, as kernels have them."""
    names = ", ".join(f"x{i}" for i in range(count))
    return eval(f"lambda {names}: body({names})", {"body": body})


HERE = os.path.abspath(__file__)


def is_raw(error: BaseException, name: str) -> bool:
    """Return whether an error is neither of this package nor Python's own of a call that does not fit a signature."""
    if type(error).__module__.partition(".")[0] == "spmd":
        return False
    refused = isinstance(error, TypeError) and re.match(
        rf"(\w+\.)*{name.rpartition('.')[2]}\(\) (got|takes|missing)", f"{error}"
    )
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return not refused and os.path.abspath(last) != HERE


def place_of(error: BaseException) -> str:
    """The line of the package where an error left it, and its kind."""
    frames = [
        one
        for one in traceback.extract_tb(error.__traceback__)
        if "/spmd/" in one.filename and "/tests/" not in one.filename
    ]
    where = f"{frames[-1].filename.rpartition('/spmd/')[2]}:{frames[-1].lineno}" if frames else "outside"
    return f"{where} {type(error).__name__}"


class Raw(NamedTuple):
    """A call that ended in a raw error."""

    seed: str
    call: Given
    error: BaseException


def raw_calls(count: int, seed: int) -> Iterator[Raw | None]:
    """For each of so many random calls: what ended in a raw error, or None."""
    mesh, filtering = spmd.make_mesh(dp=2, tp=4), jax.config.jax_traceback_filtering
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        jax.config.update("jax_traceback_filtering", "off")
        warnings.simplefilter("ignore")
        right = [*BODIES, *outside(mesh, Path(folder))]
        try:
            for number in range(count):
                dice = random.Random(f"{seed}:{number}")
                one = wrong(dice, dice.choice(right), mesh)
                try:
                    run(one, mesh)
                except Exception as error:
                    yield Raw(f"{seed}:{number}", one, error) if is_raw(error, one.name) else None
                else:
                    yield None
        finally:
            jax.config.update("jax_traceback_filtering", filtering)


def not_right(mesh: Any, folder: Path) -> list[str]:
    """The right calls that fail, which are none."""
    found = []
    for one in [*BODIES, *outside(mesh, folder)]:
        try:
            run(one, mesh)
        except Exception as error:
            found.append(f"{one.name}: {type(error).__name__}: {error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=40)
    asked = parser.parse_args()
    found = [one for one in raw_calls(asked.calls, asked.seed) if one is not None]
    places = collections.defaultdict(list)
    for one in found:
        places[place_of(one.error)].append(one)
    print(
        f"{len(found)} of {asked.calls} calls end in raw errors ({100 * len(found) / asked.calls:.1f} %), at {len(places)} places"
    )
    for where, some in sorted(places.items(), key=lambda one: -len(one[1]))[: asked.show]:
        first = some[0]
        said = (str(first.error) or "").split("\n")[0][:90]
        print(f"{len(some):4} {where:55} {first.call.name}: {said}")


if __name__ == "__main__":
    main()
