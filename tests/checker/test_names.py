"""Dimensions of one size, and strings that take one for another: no number and no size shows it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.errors import ReplicationError, SpmdError
from spmd.modes import MODES
from tests.sampler import seeds, share

N = 8
AXES = {"dp": 2, "tp": 4}
MESH = spmd.make_mesh(**AXES)
CLOSED = np.ones((N, N), np.float32)  # what a body closes over


@dataclass(frozen=True)
class Program:
    """A body of square arrays.

    Attributes:
      pattern: Its signature.
      body: The body.
      said: What the wrong string calls the dimensions; "" of a right program.
      came: What they came as.
      how: What else the kernel is given.
      modes: Where it runs.
    """

    pattern: str
    body: Callable[..., Any]
    said: str = ""
    came: str = ""
    how: dict[str, Any] | None = None
    modes: Sequence[str] = MODES

    def structs(self) -> list[Any]:
        """Arguments: all names have one size, but for h, by which others are divided."""
        sizes = {"h": 2, "hd": 2 * N}
        left = self.pattern.partition("->")[0]
        each = [re.sub(r"/\w+", "", one).replace("(h d)", "hd").split() for one in left.split(",")]
        return [jax.ShapeDtypeStruct([sizes.get(name, N) for name in names], "float32") for names in each]

    def kernel(self) -> Any:
        return spmd.kernel(self.pattern, mesh=MESH, **self.how or {})(self.body)

    def trace(self, mode: str, structs: Sequence[Any] | None = None) -> None:
        with spmd.mode(mode), warnings.catch_warnings():
            warnings.simplefilter("error")
            self.kernel().trace(*(structs or self.structs()))

    def error(self, mode: str = "explicit") -> ReplicationError:
        with pytest.raises(ReplicationError) as caught:
            self.trace(mode)
        return caught.value


def einsum_of(x: Any, w: Any) -> Any:
    """The string of an `einsum` that takes a "b d" for a "d b"."""
    return spmd.einsum(x, w, "d b, d f -> b f")


def in_a_scan(x: Any, w: Any) -> Any:
    return lax.scan(lambda h, _: (jnp.tanh(h) * spmd.annotate(h, "d b").mean(), None), x, length=2)[0] @ w


def from_zeros(x: Any) -> Any:
    """A carry that begins without names, and gets those of what is added to it."""
    sums, _ = lax.scan(lambda h, _: (h + x, None), jnp.zeros_like(x), length=3)
    return spmd.reduce(sums, "d b -> d")


def in_a_branch(x: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda: x.T, lambda: jnp.zeros_like(x.T))


def tree(x: Any, w: Any) -> Any:
    """A verb of a tree, of which one leaf is turned."""
    made = spmd.all_gather({"w": w, "rest": (x,)}, "b/dp d -> b d", to="invarying")
    return made["w"], made["rest"][0].T


def masked(x: Any) -> Any:
    return jnp.where(x > 0, x, -jnp.inf).astype(jnp.bfloat16).T.astype(jnp.float32)


def through_reshape(x: Any) -> Any:
    return x.reshape(N, 2, N // 2).reshape(N, N)


@spmd.scope
def library(x: Any) -> Any:
    """A function of a library, whose names are its own: it is given a "d b", and calls it a "b d"."""
    return spmd.einsum(x, x, "b d, b d -> b d")


def own_names(x: Any, activation: Any) -> Any:
    """What a library is handed runs with the caller's names."""
    return spmd.scope(lambda x, fn: fn(x))(x, activation)


WRONG = {
    "the identity": Program("b d -> d b", lambda x: x, "d b", "b d"),
    "a transposition": Program("b d -> b d", lambda x: x.T, "b d", "d b"),
    "one that is divided": Program("b/dp d -> b/dp d", lambda x: spmd.relayout(x, "b/dp d -> b d/dp").T, "b/dp d", "d/dp b"),
    "elementwise code": Program("b d -> d b", lambda x: jax.nn.gelu(x * 2.0) + 1.0, "d b", "b d"),
    "a choice": Program("b d -> b d", masked, "b d", "d b"),
    "einsum": Program("b d, d f -> b f", einsum_of, "d b", "b d"),
    "einsum after code": Program("b d, d f -> b f", lambda x, w: einsum_of(jnp.tanh(x), w), "d b", "b d"),
    "its second operand": Program("b d, d f -> b f", lambda x, w: spmd.einsum(x, w, "b d, f d -> b f"), "f d", "d f"),
    "all_gather": Program("b/dp d -> d b", lambda x: spmd.all_gather(x, "d/dp b -> d b", to="invarying"), "d/dp b", "b/dp d"),
    "all_to_all": Program("b/dp d -> d b/dp", lambda x: spmd.all_to_all(x, "d/dp b -> d b/dp"), "d/dp b", "b/dp d"),
    "split": Program("b d -> d/dp b", lambda x: spmd.split(x, "d b -> d/dp b"), "d b", "b d"),
    "shift": Program("b/dp d -> b/dp d", lambda x: spmd.shift(x, "[d/dp] b", 1), "d/dp b", "b/dp d"),
    "reduce": Program("b d -> d", lambda x: spmd.reduce(x, "d b -> d"), "d b", "b d"),
    "a maximum": Program("b d -> d", lambda x: spmd.reduce(x, "d b -> d", "max"), "d b", "b d"),
    "psum": Program("b d, d f/tp -> d b", lambda x, w: spmd.psum(x @ w @ w.T, "d b {U:tp} -> d b"), "d b", "b d"),
    "psum_scatter": Program(
        "b f/tp, f/tp d -> d/tp b", lambda h, w: spmd.psum_scatter(h @ w, "d b {U:tp} -> d/tp b"), "d b", "b d"
    ),
    "jax.lax.psum": Program("b f/tp, f/tp d -> d b", lambda h, w: lax.psum(h @ w, "tp"), "d b", "b d", modes=MODES[:1]),
    "softmax": Program("b d -> b d", lambda x: spmd.softmax(x, "d [b]"), "d b", "b d"),
    "cumsum": Program("b d -> b d", lambda x: spmd.cumsum(x, "[d] b"), "d b", "b d"),
    "take": Program("v d, b s -> v b s", lambda e, i: spmd.take(e, i.astype(int), "[d] v, b s -> v b s"), "d v", "v d"),
    "the indices of take": Program(
        "v d, b s -> b s d", lambda e, i: spmd.take(e, i.astype(int), "[v] d, s b -> b s d"), "s b", "b s"
    ),
    "annotate": Program("b d -> b d", lambda x: spmd.annotate(jnp.exp(x), "d b"), "d b", "b d"),
    "rearrange": Program("b d -> b d", lambda x: spmd.rearrange(x, "d b -> b d"), "d b", "b d"),
    "the names of a result": Program("b d -> b d", lambda x: spmd.rearrange(x, "b d -> d b"), "b d", "d b"),
    "a norm": Program("b d -> d b", lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True), "d b", "b d"),
    "a product": Program("b d, d f -> f b", lambda x, w: x @ w, "f b", "b f"),
    "another name after a product": Program("b d, d f, k f -> k f", lambda x, w, _: x @ w, "k f", "b f"),
    "another name of an einsum": Program(
        "b d, d f, k f -> k f", lambda x, w, _: spmd.einsum(x, w, "b d, d f -> b f"), "k f", "b f"
    ),
    "another name in a string": Program(
        "b d, d f, k g -> b", lambda x, w, _: spmd.reduce(jnp.tanh(x @ w), "k f -> k"), "k f", "b f"
    ),
    "a sum over the other dimension": Program("b d -> d", lambda x: x.sum(1), "d", "b"),
    "a mean over the other dimension": Program("b d -> b", lambda x: x.mean(0), "b", "d"),
    "a position along the other dimension": Program("b d -> d", lambda x: jnp.argmax(x, 1), "d", "b"),
    "a closure": Program("b d -> b d", lambda x: einsum_of(x, CLOSED), "d b", "b d"),
    "a loop": Program("b d, d f -> b f", in_a_scan, "d b", "b d"),
    "a loop from zeros": Program("b d -> d", from_zeros, "d b", "b d"),
    "a branch": Program("b d -> b d", in_a_branch, "b d", "d b"),
    "vmap": Program("l b d -> l b", jax.vmap(lambda x: spmd.reduce(x, "d b -> d")), "d b", "b d"),
    "a loop over rows": Program("l b d -> l b", lambda x: lax.map(lambda x: spmd.reduce(x, "d b -> d"), x), "d b", "b d"),
    "a tree": Program("b/dp d, b/dp d -> b d, b d", tree, "b d", "d b"),
    "dots": Program("l b d -> l b", lambda x: spmd.reduce(x, "... d b -> ... d"), "... d b", "... b d"),
    "a mapping": Program("b d -> d", lambda x: spmd.reduce(x, "d b -> d"), "d b", "b d", {"mapping": {"b": None, "d": None}}),
    "factors": Program("b (h d) -> d h",
        lambda x: spmd.reduce(spmd.rearrange(x, "b (h d) -> b h d"), "d h b -> d h"), "d h b", "b h d", {"h": 2}),
    "a cycle": Program("a b c -> a b c", lambda x: x.transpose(1, 2, 0), "a b c", "b c a"),
    "one of three": Program("a b c -> a c b", lambda x: x, "a c b", "a b c"),
    "jit": Program("b d -> d", lambda x: jax.jit(lambda x: spmd.reduce(x, "d b -> d"))(x), "d b", "b d"),
    "remat": Program("b d -> d", lambda x: jax.checkpoint(lambda x: spmd.reduce(jnp.sin(x), "d b -> d"))(x), "d b", "b d"),
    "behind a library": Program("b d -> d", lambda x: spmd.reduce(library(x), "d b -> d"), "d b", "b d"),
    "after a verb whose code hides it": Program(
        "b d -> d/dp", lambda x: spmd.reduce(spmd.shift(spmd.split(x, "b d -> b/dp d"), "[b/dp] d", 1), "d/dp b -> d/dp"), "d/dp b", "b/dp d"
    ),
    "in a function that a library is given": Program(
        "b d -> d", lambda x: own_names(x, lambda x: spmd.reduce(x, "d b -> d")), "d b", "b d"
    ),
    "picked rows": Program("v d, b -> d b", lambda e, i: e[i.astype(int)], "d b", "b d"),
    "a gradient": Program("b d -> b d", lambda x: jax.grad(lambda x: (x**3).sum())(x).T, "b d", "d b"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, one in WRONG.items() for mode in one.modes])
def test_a_string_that_takes_a_dimension_for_another_one_is_found(name, mode):
    program = WRONG[name]
    [finding] = program.error(mode).findings
    assert (finding.kind, finding.certain) == ("name", True)
    assert (
        f'"{program.said}" is what the string calls the dimensions, and they came as "{program.came}"' in finding.rule
    )
    assert "test_names.py" in finding.line


@pytest.mark.parametrize("name", share(WRONG))
def test_check_finds_it_too(name):
    program = WRONG[name]
    found = spmd.check(program.kernel(), *program.structs())
    assert [(one.kind, one.certain) for one in found] == [("name", True)] and found.verdict.kind == "wrong"
    assert str(found[0].rule) == program.error().findings[0].rule
    kernel = program.kernel()
    step = jax.jit(lambda *args: jax.tree.map(jnp.sum, kernel(*args)))
    assert [one.kind for one in (*spmd.check(step, *program.structs()), *spmd.check(step, *program.structs()))] == [
        "name"
    ] * 2


@pytest.mark.parametrize(("name", "mode"), share([(name, mode) for name in WRONG for mode in MODES[1:]]))
def test_check_finds_it_where_arrays_are_whole(name, mode):
    program = WRONG[name]
    if mode in program.modes:
        run = getattr(program.kernel(), mode)
        for step in (run, jax.jit(run)):
            found = spmd.check(step, *program.structs())
            assert [(one.kind, one.certain) for one in found] == [("name", True)] and found.verdict.kind == "wrong"


@pytest.mark.parametrize("name", share(WRONG))
def test_check_finds_it_in_a_training_step(name):
    """What JAX keeps of a kernel for its derivative is given other arrays."""
    program = WRONG[name]
    kernel = program.kernel()
    total = lambda *args: sum(map(jnp.sum, jax.tree.leaves(kernel(*args))))
    with contextlib.suppress(TypeError):  # of integers, which have no derivative
        found = spmd.check(lambda *args: jax.value_and_grad(total)(*args), *program.structs())
        assert [(one.kind, one.certain) for one in found if one.kind == "name"] == [("name", True)]
    with pytest.raises(ReplicationError, match="only the sizes are equal"):
        jax.jit(jax.grad(total)).trace(*program.structs())


# --- right programs -----------------------------------------------------------------------------------------------


def cut_table(x: Any, table: Any) -> Any:
    """A table of as many rows as are needed: all of them here, so that the cut leaves no trace."""
    return spmd.einsum(x, table[: spmd.size("s")], "s d, s d -> s d")


def padded(x: Any, table: Any) -> Any:
    """Rows that are added up to the length of the table: none here."""
    rows = max(table.shape[0] - x.shape[0], 0)
    return spmd.einsum(jnp.pad(x, ((0, rows), (0, 0)))[: table.shape[0]], table, "m d, m d -> m d")


def attention(x: Any, wq: Any, wk: Any) -> Any:
    q, k = spmd.einsum(x, wq, "s d, d e -> s e"), spmd.einsum(x, wk, "s d, d e -> s e")
    scores = spmd.softmax(spmd.einsum(q, k, "s e, t e -> s t"), "s [t]")
    return spmd.einsum(scores, x, "s t, t d -> s d")


@spmd.scope
def turned(x: Any) -> Any:
    """Names of a library, which are the caller's in another order."""
    return spmd.rearrange(spmd.annotate(x, "d b"), "d b -> b d")


def filtered(u: Any, weights: Any) -> Any:
    """The names of a spectrum are those of a filter, and it is as long as the field."""
    spectrum = spmd.fft.fft(u, "x/dp y -> kx ky/dp")
    spectrum = spectrum * spmd.split(weights, "kx ky -> kx ky/dp").astype(spectrum.dtype)
    return spmd.fft.ifft(jnp.conj(spectrum), "kx ky/dp -> x/dp y").real


inner = spmd.kernel("d b -> d b", mesh=MESH)(lambda x: spmd.annotate(x * 2, "d b"))


RIGHT = {
    "the identity": Program("b d -> b d", lambda x: x),
    "a transposition": Program("b d -> d b", lambda x: x.T),
    "twice": Program("b d -> b d", lambda x: x.T.T),
    "einsum": Program("b d, d f -> b f", lambda x, w: spmd.einsum(x, w, "b d, d f -> b f")),
    "other names": Program("b d, d f -> b f", lambda x, w: spmd.einsum(x, w, "p q, q r -> p r")),
    "a turned weight": Program("b d, f d -> b f", lambda x, w: spmd.einsum(x, w.T, "b d, d f -> b f")),
    "a symmetric part": Program("n m -> n m", lambda x: (x + x.T) / 2),
    "products of a square matrix": Program("n m -> n m", lambda x: x @ x @ jnp.linalg.inv(x)),
    "a covariance": Program("b d -> d e", lambda x: x.T @ x),
    "attention": Program("s d, d e, d e -> s d", attention),
    "a table that is cut": Program("s d, m d -> s d", cut_table),
    "rows up to a table's": Program("s d, m d -> m d", padded),
    "a library": Program("b d -> b d", lambda x: turned(x).T),
    "a library that turns": Program("b d -> b d", lambda x: turned(turned(x))),
    "another kernel": Program("b d -> b d", lambda x: inner(inner(x))),
    "a size of a keyword": Program("b d -> b k", lambda x: x[:, :N], how={"k": N}),
    "dimensions made anew": Program("b d, d b -> d b", lambda x, w: jnp.sort(x.reshape(-1)).reshape(N, N) + w),
    "a permuted tree": Program("b d -> d b, b d", lambda x: (x.T, x)),
    "rows by index": Program("v d, b -> b d", lambda e, i: e[i.astype(int)]),
    "a column": Program("b d -> b", lambda x: x[:, 0]),
    "a row": Program("b d -> d", lambda x: x[0]),
    "a pad and a cut": Program("b d -> b d", lambda x: jnp.pad(x, ((1, 1), (0, 0)))[1:-1]),
    "halves": Program("b d -> b d", lambda x: jnp.concatenate(jnp.split(x, 2, axis=1)[::-1], axis=1)),
    "layers that give what they take": Program(
        "b d, l d f, f -> b d", lambda x, w, bias: lax.scan(lambda h, w: (jnp.tanh(h @ w + bias[None]), None), x, w)[0]
    ),
    "such layers one by one": Program("b d, d f -> b", lambda x, w: spmd.reduce(jnp.tanh(x @ w) @ w, "b d -> b")),
    "a transform that renames": Program("x/dp y, kx ky -> x/dp y", filtered),
    "positions": Program("b d -> d b", lambda x: x.T * spmd.iota("d").astype("float32")[:, None]),
    "layers in strings": Program(
        "b d, l d e -> b d",
        lambda x, w: functools.reduce(lambda h, i: jnp.tanh(spmd.einsum(h, w[i], "b d, d e -> b e")), range(3), x),
    ),
    "layers in strings, in a loop": Program(
        "b d, l d e -> b",
        lambda x, w: spmd.reduce(
            lax.scan(lambda h, w: (spmd.einsum(jnp.tanh(h), w, "b d, d e -> b e"), None), x, w)[0], "b d -> b"
        ),
    ),
    "a layer of a square weight": Program("b d, d e -> b d", lambda x, w: jax.nn.relu(x @ w)),
    "two layers of one string": Program(
        "b d, d f, d f -> b f",
        lambda x, w, v: jnp.tanh(spmd.einsum(jnp.tanh(spmd.einsum(x, w, "b d, d f -> b f")), v, "b d, d f -> b f")),
    ),
    "a sum of both sides": Program("b d -> b, d", lambda x: (x.sum(1), x.sum(0))),
    "a product of both sides": Program("b d, d b -> b f", lambda x, w: x @ w),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_silent(name, mode):
    RIGHT[name].trace(mode)


UNDECIDED = {
    "an inverse needs a square matrix": Program(
        "n m -> n", lambda x: jnp.linalg.inv(x)[0] + spmd.reduce(x, "m n -> n"), "m n", "n m"
    ),
    "a spectrum is as long as its field": Program(
        "x/dp y, kx ky -> kx/dp ky", lambda u, f: spmd.fft.fft(u, "x/dp y -> kx ky/dp").real.T, "kx/dp ky", "ky/dp kx"
    ),
    "an array of one size": Program(
        "b d -> d", lambda x: (x + CLOSED).mean() * spmd.reduce(x, "d b -> d"), "d b", "b d"
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", UNDECIDED)
def test_what_is_not_traced_at_other_sizes_may_be_meant(name, mode):
    program = UNDECIDED[name]
    with (
        spmd.mode(mode),
        pytest.warns(
            UserWarning, match="(?s)^meant by this name.*is what the string calls.*body fails.*Numbers do not tell"
        ),
    ):
        program.kernel().trace(*program.structs())
    [finding] = spmd.check(program.kernel(), *program.structs())
    assert (finding.kind, finding.certain) == ("name", False)
    assert str(spmd.check(program.kernel(), *program.structs()).verdict).startswith("meant by this name? 1 finding: ")
    assert (
        f'"{program.said}" is what the string calls the dimensions, and they came as "{program.came}"' in finding.rule
    )


def test_check_says_what_becomes_of_a_finding():
    turned = lambda check: spmd.kernel("b d -> b d", mesh=MESH, check=check)(lambda x: x.T)
    struct = jax.ShapeDtypeStruct((N, N), "float32")
    for mode in MODES:
        with spmd.mode(mode):
            with pytest.warns(UserWarning, match="only the sizes are equal"):
                turned("warn").trace(struct)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                turned("off").trace(struct)


def test_names_of_other_sizes_are_not_followed():
    """A kernel whose names have sizes of their own pays nothing: its sizes tell them apart. Neither does one without code
    between its strings, which says of each value what is known of it."""
    assert "spmd_names" not in str(RIGHT["einsum"].kernel().trace(*RIGHT["einsum"].structs()).jaxpr)
    program = Program("b d, d f -> b f", lambda x, w: spmd.einsum(jnp.sin(x), w, "b d, d f -> b f"))
    structs = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 3), (3, 5))]
    assert "spmd_names" in str(program.kernel().trace(*program.structs()).jaxpr)
    assert "spmd_names" not in str(program.kernel().trace(*structs).jaxpr)
    assert "spmd_names" not in str(program.kernel().lower(*program.structs()).as_text())


def test_a_kernel_inside_of_a_shard_map_is_looked_at():
    own = spmd.kernel("b/dp d -> b/dp d", mesh=MESH)(lambda x: spmd.annotate(jnp.sin(x), "d/dp b"))
    spec = jax.P("dp")
    mapped = jax.shard_map(lambda x: own(x), mesh=MESH, in_specs=spec, out_specs=spec)
    with pytest.raises(ReplicationError, match="only the sizes are equal"):
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((N, N), "float32"))
    assert [one.kind for one in spmd.check(mapped, jax.ShapeDtypeStruct((N, N), "float32"))] == ["name"]


# --- permuted names -------------------------------------------------------------------------------------------------


NAMES = ("b", "d", "f")


class Drawn:
    """A random right program of square arrays, as strings and steps, to be run with one string changed.

    Attributes:
      names: Those of the dimensions, the first of which may be divided.
      weights: The layouts of the arguments behind the first one: each pair of names.
      signature: The pattern of the kernel.
      steps: What is done to the first argument: the name of a verb and its string, or a function.
      held: The names of what each step is given, and whether a product has made them; -1 is the result.
    """

    def __init__(self, seed: int, names: Sequence[str] = NAMES) -> None:
        draws = np.random.default_rng(seed)
        divided = draws.integers(2)
        lies = lambda *names: " ".join(f"{one}/dp" if divided and one == self.names[0] else one for one in names)
        self.names, self.steps = list(names), []
        self.weights = [lies(*pair) for pair in itertools.permutations(names, 2)]
        first = a, b = names[:2]
        self.held, product = dict[int, tuple[str, str, bool]](), False
        for _ in range(draws.integers(2, 6)):
            [last] = [name for name in names if name not in (a, b)]
            weight = lies(b, last)
            self.held[len(self.steps)] = a, b, product
            kinds = ["einsum", "turn", "rearrange", "annotate", "sin", "softmax", "masked", "scan"]
            match kind := draws.choice([*kinds, *(["matmul"] if b != names[0] else [])]):  # else a partial sum is left
                case "turn" | "rearrange":
                    step = (
                        ("rearrange", f"{lies(a, b)} -> {lies(b, a)}")
                        if kind == "rearrange"
                        else ("code", jnp.transpose)
                    )
                    a, b = b, a
                case "einsum" | "matmul":
                    text = f"{lies(a, b)}, {weight} -> {lies(a, last)}"
                    step, b, product = (kind, text if kind == "einsum" else weight), last, True
                case "annotate" | "softmax":
                    step = (kind, lies(a, b) if kind == "annotate" else f"{lies(a)} [{lies(b)}]")
                case "scan":
                    step = ("code", lambda h: lax.scan(lambda h, _: (jnp.tanh(h), None), h, length=2)[0])
                case "masked":
                    step = ("code", lambda h: jnp.where(h > 0, h, jnp.zeros_like(h)))
                case _:
                    step = ("code", jnp.sin)
            self.steps.append((*step, weight))
        self.held[-1] = a, b, product
        self.signature = f"{lies(*first)}, {', '.join(self.weights)} -> {lies(a, b)}"

    def names_anew(self, place: int, order: Sequence[str]) -> bool:
        """Return whether a string gives a name to what a product has made, and takes it from no dimension that is here.
        An `einsum` has another operand, which no product has made."""
        (a, b, product), new = self.held[place], dict(zip(self.names, order, strict=True))
        return product and (place == -1 or self.steps[place][0] != "einsum") and new[a] != b and new[b] != a

    def strings(self) -> list[int]:
        """The places of strings that may be changed: those of steps, and -1 for the result."""
        return [-1, *(i for i, (kind, *_) in enumerate(self.steps) if kind not in ("code", "matmul"))]

    def kernel(self, place: int = -1, order: Sequence[str] | None = None) -> Any:
        """The program with the names of one string in another order."""
        new = dict(zip(self.names, order or self.names, strict=True))
        turned = lambda text: re.sub(r"\b[bdf]\b", lambda found: new[found[0]], text)
        left, _, right = self.signature.partition("->")
        signature = f"{left}->{turned(right)}" if place == -1 else self.signature

        def body(x: Any, *weights: Any) -> Any:
            known = dict(zip(self.weights, weights, strict=True))
            for i, (kind, text, weight) in enumerate(self.steps):
                text = turned(text) if i == place else text
                if kind == "code":
                    x = text(x)
                elif kind == "matmul":
                    x = x @ known[text]
                else:
                    x = getattr(spmd, kind)(x, *([known[weight]] if kind == "einsum" else []), text)
            return x

        return spmd.kernel(signature, mesh=MESH)(body)

    def judged(self, place: int, order: Sequence[str], mode: str) -> bool:
        """Return whether other sizes refuse the program with the names of one string in another order. One size for all
        names must say the same."""
        kernel = self.kernel(place, order)
        refused = self.fails(kernel, mode, 8, 16, 24) and not self.names_anew(place, order)
        assert self.fails(kernel, mode, 8, 8, 8) == refused, (mode, place, order, self.signature, self.steps)
        return refused

    def fails(self, kernel: Any, mode: str, *sizes: int) -> bool:
        """Return whether it is refused at these sizes."""
        long = dict(zip(self.names, sizes, strict=True))
        layouts = [" ".join(self.names[:2]), *self.weights]
        shapes = [[long[name] for name in one.replace("/dp", "").split()] for one in layouts]
        with spmd.mode(mode):
            try:
                kernel.trace(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
            except SpmdError:
                return True
        return False


@pytest.mark.parametrize("seed", seeds(30))
def test_of_all_permutations_those_are_found_that_other_sizes_refuse(seed):
    program, mode = Drawn(seed), MODES[seed % len(MODES)]
    every = itertools.product(program.strings(), itertools.permutations(NAMES))
    assert sum([program.judged(place, order, mode) for place, order in every]) > 0
    renamed = [Drawn(seed, order) for order in itertools.permutations(NAMES)]
    assert not any(one.fails(one.kernel(), mode, 8, 8, 8) for one in renamed), "names alone mean nothing"
