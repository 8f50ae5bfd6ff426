"""Arrays with margins, by `np.pad`: what halos and stencils are compared with."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.jaxprs import equations
from tests.sampler import dice

EDGES = {  # the modes of `np.pad` that give the same
    "periodic": {"mode": "wrap"},
    "zero": {"mode": "constant"},
    "edge": {"mode": "edge"},
    "symmetric": {"mode": "symmetric"},
    "antisymmetric": {"mode": "symmetric"},  # and minus that
    "reflect": {"mode": "reflect"},
    "antireflect": {"mode": "reflect", "reflect_type": "odd"},
}
ENDS = [*(edge for edge in EDGES if edge != "periodic"), 3, -2.0]  # those of one end, which the other may not have
DTYPES = ("float32", "bfloat16", "int32", "bool", "complex64")


def numbers(seed: int, shape: tuple[int, ...], dtype: str = "float32"):
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype))


def padded(x, margins, edges):
    """The whole array by `np.pad`, or `jnp.pad` where it is traced: a dimension and an end at a time."""
    xp = np if isinstance(x, np.ndarray) else jnp
    for dim, (widths, ends) in enumerate(zip(margins, edges, strict=True)):
        sides = [side(xp, x, dim, widths[at], ends[at], at) for at in (0, 1)]
        x = xp.concatenate([sides[0], x, sides[1]], axis=dim)
    return x


def side(xp, x, dim: int, width: int, edge, at: int):
    how = EDGES.get(edge) or {"mode": "constant", "constant_values": edge}
    wide = xp.pad(x, [((width, 0) if at == 0 else (0, width)) if i == dim else (0, 0) for i in range(x.ndim)], **how)
    part = xp.split(wide, [width if at == 0 else x.shape[dim]], axis=dim)[at]
    return -part if edge == "antisymmetric" else part


def sample(seed: Any) -> tuple:
    """A mesh, the axes and sizes of x and y, their margins, their edges as pairs, and as the call says them."""
    draw = dice(seed)
    mesh = draw.choice([{"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 3, "b": 2}, {"a": 8, "b": 1}, {"a": 1, "b": 5}])
    places = draw.choice(
        [(("a",), ("b",)), (("a", "b"), ()), ((), ("b", "a")), (("b",), ("a",)), (("a",), ()), ((), ("b",))]
    )
    blocks = [int(np.prod([mesh[axis] for axis in axes], dtype=int)) for axes in places]
    shape = tuple(n * draw.choice([1, 2, 3, 5]) for n in blocks)
    dtype = draw.choice(DTYPES)
    known = [edge for edge in EDGES if dtype != "bool" or not edge.startswith("anti")]
    ends = [edge for edge in ENDS if dtype != "bool" or edge in known]
    if draw.random() < 0.5:
        edge = draw.choice(known)
        edges = [(edge, edge)] * 2
    else:
        low, high = draw.choice(ends), draw.choice(ends)
        one = draw.choice(known)
        edge = {"x": (low, high), "y": one}
        edges = [(low, high), (one, one)]
    margins = [(draw.choice([0, 1, 2, 4]), draw.choice([0, 1, 3])) for _ in places]
    margins = margins if any(map(any, margins)) else [(1, 0), (0, 2)]
    for dim, ends in enumerate(edges):  # no mirror is wider than the array
        most = [shape[dim] - 1 if "reflect" in str(e) else shape[dim] if "sym" in str(e) else 9 for e in ends]
        margins[dim] = tuple(map(min, margins[dim], most))
    if not any(map(any, margins)):
        edges, edge, margins = [("edge", "edge")] * 2, "edge", [(1, 0), (0, 2)]
    return mesh, places, shape, margins, edges, edge, dtype


def texts(places, margins) -> tuple[str, str]:
    plain = ["/".join((name, *axes)) for name, axes in zip("xy", places, strict=True)]
    wide = [
        (f"{low}+" if low else "") + t + (f"+{high}" if high else "")
        for t, (low, high) in zip(plain, margins, strict=True)
    ]
    return " ".join(plain), " ".join(wide)


def neighbourhood(u, margins, n):
    """A sum over the neighbourhood, diagonals too, with a weight for every place: a product, for small programs."""
    rows = sum((3 * i - 5) * u[i : i + n[0]] for i in range(sum(margins[0]) + 1))
    return sum((7 * j * j - 2) * rows[:, j : j + n[1]] for j in range(sum(margins[1]) + 1))


def inner_body(jaxpr):
    """The body of the shard_map in it."""
    return next(eqn.params["jaxpr"] for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map")
