"""Results and gradients of a program as numbers, and how two sets of them differ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from spmd import _compat
from spmd._trees.leaves import is_key, wrapped

T = TypeVar("T")

LOCAL_SIZE = 'a size from .shape is that of a shard: spmd.size("b") is that of the whole'
BLOCKS = (
    'rearrange(x, "(c l)/a -> c/a l", c=spmd.axis_size("a")) makes blocks a dimension;\n'
    'shift(x, "[c/a] l", 1) moves them; spmd.reduce(x, "n/a d -> d", "mean") is a mean over devices'
)
_INFINITE = 1e30  # a larger number stands for infinity, as the least float32 does in a mask
_SAME = 1e-5  # of a number that is the same to the bit: it was not rounded, and its terms may have been
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, float, complex)


def pulled(
    fn: Callable[..., Any], args: Any, kwargs: Any = None, *, grad: bool = True, static: Collection[Any] = ()
) -> tuple[Callable[..., dict[str, Any]], tuple[list[Any], list[Any]]]:
    """A function of arrays to the results of `fn`, and to the gradients of its floating-point arguments.

    The pull-back is taken along random cotangents, which depend on the shapes of the results alone. They lie as the
    results do.

    Args:
      fn: The program.
      args: Its positional arguments.
      kwargs: Its keyword arguments.
      grad: Whether gradients are asked for.
      static: Positions and keywords of arguments that stay as they are, numbers included.

    Returns:
      The function, and the arrays to call it with, or structs of them.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs or {})))
    leaves = [x for _, x in paths]
    free = [i for i, (path, _) in enumerate(paths) if _at(path) not in static]
    arrays = [i for i in free if isinstance(leaves[i], _ARRAYS)]
    moving = [i for i in arrays if grad and jnp.issubdtype(jnp.result_type(leaves[i]), jnp.inexact)]
    rest = [i for i in arrays if i not in moving]

    def program(given: Any, fixed: Any) -> dict[str, Any]:
        def of(*given: Any) -> Any:
            filled = {**dict(zip(moving, given, strict=True)), **dict(zip(rest, fixed, strict=True))}
            args, kwargs = jax.tree.unflatten(structure, [filled.get(i, x) for i, x in enumerate(leaves)])
            return wrapped(fn(*args, **kwargs))

        if not moving:
            return {"result": _plain(of())}
        out, pull = jax.vjp(of, *given)
        draws = np.random.default_rng(0)
        gradients = pull(jax.tree.map(lambda y: _cotangent(y, draws), out))
        whole = [None] * len(leaves)
        for i, g in zip(moving, gradients, strict=True):
            whole[i] = g
        return {"result": _plain(out), "gradient": jax.tree.unflatten(structure, whole)}

    return program, ([leaves[i] for i in moving], [leaves[i] for i in rest])


def _at(path: Any) -> Any:
    """Return which argument a leaf of `(args, kwargs)` belongs to: a position or a keyword."""
    return getattr(path[1], "idx", getattr(path[1], "key", None))


def _plain(tree: Any) -> Any:
    """Arrays as they can be read: keys as the integers that they are made of, partial sums added up."""

    def one(x: Any) -> Any:
        if is_key(x):
            return jax.random.key_data(x)
        sharding = getattr(jax.typeof(x), "sharding", None)
        if sharding is None or not sharding.spec.unreduced:
            return x
        return jax.sharding.reshard(x, sharding.update(spec=P(*_compat.partitions(sharding.spec))))

    return jax.tree.map(one, tree)


def _cotangent(y: Any, draws: np.random.Generator) -> Any:
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        return np.zeros(y.shape, jax.dtypes.float0)
    drawn = draws.normal(size=y.shape)
    if jnp.issubdtype(y.dtype, jnp.complexfloating):
        drawn = drawn + 1j * draws.normal(size=y.shape)
    return _lying(jnp.asarray(drawn, y.dtype), getattr(jax.typeof(y), "sharding", None))


def _lying(cotangent: Any, sharding: Any) -> Any:
    """The cotangent of a result that lies so, where its type says it: on Explicit axes. A partial sum has a copy."""
    spec = getattr(sharding, "spec", None)
    if spec is None or not (any(_compat.partitions(spec)) or spec.unreduced):
        return cotangent
    return jax.sharding.reshard(cotangent, sharding.update(spec=P(*_compat.partitions(spec), reduced=spec.unreduced)))


@dataclass(frozen=True)
class Difference:
    """How an array differs from what was expected.

    Attributes:
      path: Where it stands in what `pulled` gives; `labelled` says it in words.
      got: Its dtype and shape.
      wanted: Those expected.
      largest: The largest difference; None where dtypes or shapes differ, as the next four.
      allowed: What is allowed there.
      wrong: How many elements differ by more.
      size: How many there are.
      factor: What all elements are multiplied by, if it is one number.
      permuted: Whether the same numbers are there in another order.
    """

    path: tuple[Any, ...]
    got: str
    wanted: str
    largest: float | None = None
    allowed: float | None = None
    wrong: int = 0
    size: int = 0
    factor: float | None = None
    permuted: bool = False

    def how(self, cause: Cause | None = None) -> str:
        """Return what all elements have in common; "" if nothing is known."""
        if self.got != self.wanted:
            return f"{self.got}, not {self.wanted}"
        if self.factor is None or math.isclose(self.factor, 1, rel_tol=1e-3):
            return "the same numbers in another order" if self.permuted else ""
        times = abs(self.factor)
        if self.factor < -1e-6:
            return "the sign is wrong" if math.isclose(times, 1, rel_tol=1e-3) else f"times {self.factor:.3g}"
        if times < 1e-6:
            return "all zero"
        text = f"{times:.4g} times too large" if times > 1 else f"{1 / times:.4g} times too small"
        return text if cause is None else f"{text}: the size of {' times that of '.join(cause.axes)}"

    @property
    def counts(self) -> tuple[str, str, str]:
        """The three numbers, as a table shows them."""
        if self.largest is None:
            return "-", "-", "-"
        return f"{self.largest:.3g}", f"{self.allowed:.3g}", f"{self.wrong} of {self.size}"


@dataclass(frozen=True)
class Cause:
    """What the sizes of axes say of a factor: which axes, and whether the numbers are too large by them."""

    axes: tuple[str, ...]
    large: bool


def cause_of(factors: Sequence[tuple[Mapping[str, int], float | None]]) -> Cause | None:
    """The axes whose sizes explain a factor, which is given for each mesh."""
    for axes in subsets(list(factors[0][0])):
        for large in (True, False):
            powers = [math.prod(mesh[a] for a in axes) ** (1 if large else -1) for mesh, _ in factors]
            pairs = zip(factors, powers, strict=True)
            if all(x is not None and math.isclose(x, power, rel_tol=0.01) for (_, x), power in pairs):
                return Cause(axes, large)
    return None


def subsets(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """All choices of at least one of these, the smallest first."""
    return itertools.chain.from_iterable(itertools.combinations(items, k + 1) for k in range(len(items)))


def advice_on(differences: Sequence[Difference], causes: Sequence[Cause]) -> str | None:
    """Return what mistake gives such numbers, if that is known."""
    if causes:
        axes = "/".join(causes[0].axes)
        if causes[0].large:
            return (
                f"a mean over {axes} instead of a sum; or a sum over {axes} only of what differs there;\n{LOCAL_SIZE}"
            )
        return f"a sum over {axes} instead of a mean; or one division less by a size;\n{LOCAL_SIZE}"
    if differences and all(one.permuted for one in differences):
        return "blocks are put together in another order than they were divided, or come from another device"
    return None


def labelled(path: tuple[Any, ...], params: Sequence[str] = ()) -> str:
    """Return what a message calls an array of `pulled`'s: `result[0]`, `gradient of w['scale']`, or
    `gradient of args[0]` if the parameter's name is not known."""
    root, *rest = path
    if root.key == "result":
        return f"result{keystr(tuple(rest))}"
    where, at, *rest = rest
    if where.idx == 1:
        return f"gradient of {at.key}{keystr(tuple(rest))}"
    name = params[at.idx] if at.idx < len(params) else f"args[{at.idx}]"
    return f"gradient of {name}{keystr(tuple(rest))}"


def compared(got: Any, wanted: Any, allowed: Callable[[Any, np.ndarray, np.ndarray], Any]) -> list[Difference]:
    """Compare two trees of arrays of one structure, leaf by leaf; NaN equals NaN.

    Args:
      got: The arrays.
      wanted: Those expected.
      allowed: From the path of an array, its values and those expected, in double precision, to the difference that is
        allowed, for each element. Integers and booleans are equal.

    Returns:
      What differs.
    """
    found = []
    expected: Mapping[Any, Any] = dict(jax.tree.leaves_with_path(wanted))
    for path, x in jax.tree.leaves_with_path(got):
        y = expected[path]
        kinds = f"{x.dtype}{list(x.shape)}", f"{y.dtype}{list(y.shape)}"
        if kinds[0] != kinds[1]:
            found.append(Difference(path, *kinds))
            continue
        pair = wide(x), wide(y)
        exact = not jnp.issubdtype(x.dtype, jnp.inexact)
        limit = np.broadcast_to(0.0 if exact else allowed(path, *pair), pair[1].shape)
        with np.errstate(invalid="ignore"):  # inf - inf
            gap = np.abs(pair[0] - pair[1])
            wrong = ~((gap <= limit) | (pair[0] == pair[1]) | (np.isnan(pair[0]) & np.isnan(pair[1])))
        if wrong.any():
            worst = np.unravel_index(np.argmax(np.where(wrong, np.nan_to_num(gap, nan=np.inf), 0)), wrong.shape)
            clear = bool(gap[worst] > 5 * limit[worst])  # otherwise rounding hides a factor
            how = _factor(*pair, limit) if clear else None, clear and _permuted(*pair, limit)
            sizes = float(gap[worst]), float(limit[worst]), int(wrong.sum()), wrong.size
            found.append(Difference(path, *kinds, *sizes, *how))
    return found


def largest(x: np.ndarray) -> float:
    """The largest finite number."""
    return float(np.where(np.abs(x) < _INFINITE, np.abs(x), 0).max(initial=0))


def rounded(x: np.ndarray, y: np.ndarray) -> float:
    """How large the numbers are that may differ by rounding: -1e9 in a mask does not, and hides no difference."""
    return max(largest(np.where(x != y, y, 0)), _SAME * largest(y))


def wide(x: Any) -> np.ndarray:
    """The same numbers in double precision."""
    return np.asarray(x, np.complex128 if np.asarray(x).dtype.kind == "c" else np.float64)


def _factor(got: np.ndarray, wanted: np.ndarray, limit: np.ndarray) -> float | None:
    """The real number that `got` is `wanted` times, if there is one."""
    if not (np.isfinite(got).all() and np.isfinite(wanted).all()) or not np.vdot(wanted, wanted).real:
        return None
    factor = float(np.vdot(wanted, got).real / np.vdot(wanted, wanted).real)
    room = 2 * limit * max(abs(factor), 1)
    return factor if (np.abs(got - factor * wanted) <= room).all() else None


def _permuted(got: np.ndarray, wanted: np.ndarray, limit: np.ndarray) -> bool:
    if got.size < 2 or not limit.min() >= 0:
        return False
    pairs = zip(np.sort(got, axis=None), np.sort(wanted, axis=None), strict=True)
    return all(abs(a - b) <= 2 * limit.max() for a, b in pairs)
