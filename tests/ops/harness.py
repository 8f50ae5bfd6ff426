"""Running a body of operations in each mode, without kernels: `shard_map` written by hand."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from spmd.inspect import collectives
from spmd.language import Layout
from spmd.modes import Frame


@functools.cache
def _mesh(sizes: tuple[tuple[str, int], ...]) -> jax.sharding.Mesh:
    shape, names = tuple(n for _, n in sizes), tuple(a for a, _ in sizes)
    return jax.make_mesh(
        shape, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[: math.prod(shape)]
    )


def make_mesh(sizes: Mapping[str, int]) -> jax.sharding.Mesh:
    return _mesh(tuple(sizes.items()))


def frame(sizes: Mapping[str, int], mode: str = "reference", **more: Any) -> Frame:
    return Frame(mode, make_mesh(sizes), tuple(sizes.items()), **more)


def spec(layout: str) -> P:
    """The spec of a layout; with `{U:}` marks, of the parts stacked in a dimension in front."""
    seen = Layout(layout)
    bare = Layout.from_dims(seen.dims, reduced=()).spec
    return P(seen.unreduced, *bare) if seen.unreduced else bare


def run(
    body: Callable[..., Any],
    sizes: Mapping[str, int],
    ins: Sequence[str],
    outs: str | Sequence[str],
    mode: str = "explicit",
) -> Callable[..., Any]:
    """`body`, on whole arrays, in one mode. Inputs marked `{U:}` are given whole, and taken apart."""
    one = isinstance(outs, str)
    outs = [outs] if one else list(outs)
    if mode == "reference":
        return lambda *arrays: _entered(frame(sizes), body, *arrays)
    if mode == "auto":
        whole_array = jax.NamedSharding(make_mesh(sizes), P())
        jitted = jax.jit(lambda *arrays: _entered(frame(sizes, "auto"), body, *arrays), in_shardings=whole_array)

        def auto(*arrays: Any) -> Any:
            with jax.sharding.use_abstract_mesh(make_mesh(sizes).abstract_mesh):
                return jitted(*arrays)

        return auto
    marked = [bool(Layout(layout).unreduced) for layout in ins]

    def local(*arrays: Any) -> Any:
        blocks = [x[0] if m else x for x, m in zip(arrays, marked, strict=True)]
        results = body(*blocks)
        results = [results] if one else list(results)
        stacked = [y[None] if Layout(o).unreduced else y for y, o in zip(results, outs, strict=True)]
        return stacked[0] if one else tuple(stacked)

    out_specs = spec(outs[0]) if one else tuple(map(spec, outs))
    mapped = jax.jit(jax.shard_map(local, mesh=make_mesh(sizes), in_specs=tuple(map(spec, ins)), out_specs=out_specs))

    def whole(*arrays: Any) -> Any:
        results = mapped(*(apart(on_host(x), layout, sizes) for x, layout in zip(arrays, ins, strict=True)))
        results = [results] if one else list(results)
        added = [y.sum(0) if Layout(o).unreduced else y for y, o in zip(results, outs, strict=True)]
        return added[0] if one else tuple(added)

    whole.lower = lambda *arrays: mapped.lower(
        *(apart(x, layout, sizes) for x, layout in zip(arrays, ins, strict=True))
    )
    return whole


def on_host(x: Any) -> Any:
    """An array in NumPy: JAX divides one that lies on a device by a program for each shape, 30 ms of CPU time."""
    plain = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and len(x.devices()) == 1
    return np.asarray(x) if plain else x


def _entered(where: Frame, body: Callable[..., Any], *arrays: Any) -> Any:
    with where.enter():
        return body(*arrays)


def apart(x: Any, layout: str, sizes: Mapping[str, int]) -> Any:
    """`x` as the sum of parts, stacked in front, one per device of the `{U:}` axes."""
    axes = Layout(layout).unreduced
    if not axes:
        return x
    n = math.prod(sizes[axis] for axis in axes)
    weights = [1, 3, -2, 4, 5, -1, 2][: n - 1]
    parts = [x * np.asarray(w, x.dtype) for w in weights]
    parts.append(x * np.asarray(1 - sum(weights), x.dtype))
    return np.stack(parts) if isinstance(x, np.ndarray) else jnp.stack(parts)


def pulling(fn: Callable[..., Any], by: Any = None) -> Callable[..., tuple[Any, Any]]:
    """A compiled program: the value, and the gradients along the cotangent `by` (else the value itself).

    Integers have no gradient; those of the other arguments come as a tuple.
    """

    def both(*args: Any) -> tuple[Any, Any]:
        inexact = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def of(*moving: Any) -> Any:
            given = dict(zip(inexact, moving, strict=True))
            return fn(*(given.get(i, x) for i, x in enumerate(args)))

        value, pull = jax.vjp(of, *(args[i] for i in inexact))
        return value, pull(value if by is None else jnp.asarray(by, value.dtype))

    jitted = jax.jit(both)
    return lambda *args: jitted(*map(on_host, args))


def pulled(fn: Callable[..., Any], *args: Any, by: Any = None) -> tuple[Any, Any]:
    """The value and the gradients, for one call: a second one would be compiled again, `pulling` is not."""
    return pulling(fn, by)(*args)


def mapped_and_scanned(one: Callable[..., Any]) -> Callable[..., Any]:
    """A function of rows under `vmap`, and once more in a scan whose steps are computed again, added up."""

    def body(x: Any) -> Any:
        _, scanned = jax.lax.scan(jax.checkpoint(lambda c, row: (c, one(row))), 0, x)
        return jax.vmap(one)(x) + scanned

    return body


def counts(
    body: Callable[..., Any], sizes: Mapping[str, int], ins: Sequence[str], out: str, *arrays: Any
) -> dict[str, int]:
    """The collectives of the compiled explicit program: `{"psum tp": 1}`."""
    compiled = run(body, sizes, ins, out).lower(*arrays).compile()
    return tally(compiled, sizes)


def communicates(
    body: Callable[..., Any], sizes: Mapping[str, int], ins: Sequence[str], out: str, *arrays: Any
) -> bool:
    """Whether the explicit program has any collective, read off before it is compiled."""
    text = run(body, sizes, ins, out).lower(*arrays).as_text()
    return re.search(r"stablehlo\.(all_|reduce_scatter|collective_)", text) is not None


def backward_counts(
    body: Callable[..., Any], sizes: Mapping[str, int], ins: Sequence[str], out: str, *arrays: Any
) -> dict[str, int]:
    """The collectives of the whole vjp, with a cotangent in the output's layout."""
    mapped = jax.shard_map(body, mesh=make_mesh(sizes), in_specs=tuple(map(spec, ins)), out_specs=spec(out))

    def both(cotangent: Any, *arrays: Any) -> Any:
        value, pull = jax.vjp(mapped, *arrays)
        return value, pull(cotangent)

    shape = jax.eval_shape(mapped, *arrays)
    lie = lambda layout: jax.NamedSharding(make_mesh(sizes), spec(layout))
    jitted = jax.jit(both, in_shardings=(lie(out), *map(lie, ins)), out_shardings=(lie(out), tuple(map(lie, ins))))
    return tally(jitted.lower(np.ones(shape.shape, shape.dtype), *arrays).compile(), sizes)


def tally(compiled: Any, sizes: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in collectives(compiled, mesh=make_mesh(sizes)):
        key = f"{one.kind} {','.join(one.axes)}"
        found[key] = found.get(key, 0) + one.count * len(one.operands)
    return found


def blocks(sizes: Mapping[str, int], word: str) -> int:
    """In how many blocks the axes of `x/a/b` divide a dimension."""
    return math.prod(sizes[axis] for axis in word.split("/")[1:])


def sampled_vector(sampler: Any) -> tuple[dict[str, int], str, tuple[int, ...]]:
    """A mesh, and the layout and the shape of a vector on it: axes in either order, and of size 1."""
    mesh = sampler.choice([{"a": 2, "b": 4}, {"a": 3, "b": 2}, {"a": 1, "b": 4}])
    layout = sampler.choice(["x/a y/b", "x/b y", "x y/b/a", "x/a y"])
    return mesh, layout, tuple(blocks(mesh, word) * int(sampler.choice([1, 3])) for word in layout.split())


def wide(dtype: str) -> Any:
    """The context in which JAX has numbers of this type."""
    return jax.enable_x64(dtype in ("float64", "complex128"))


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    """Equal shapes, dtypes and values, up to rounding."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{a.shape} {a.dtype} against {b.shape} {b.dtype}"
    wide = [
        np.asarray(x).astype(np.float32 if np.asarray(x).dtype.kind == "V" else np.asarray(x).dtype) for x in (a, b)
    ]
    np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance)


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What `jax.lax.ragged_all_to_all` says that it does, by gathers of everything."""
    every = [jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)]
    me = jax.lax.axis_index(axis_name)
    for source in range(every[0].shape[0]):
        rows, start, count, base = (a[source] for a in every)
        j = jnp.arange(rows.shape[0])
        goes = (j < count[me]) & (count[me] == recv_sizes[source])  # nothing arrives if they do not agree
        at = jnp.where(goes, base[me] + j, output.shape[0])
        output = output.at[at].set(rows[jnp.where(goes, start[me] + j, 0)], mode="drop")
    return output
