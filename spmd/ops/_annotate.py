"""What a body states about its values and its work, and what it may ask: layouts, equality, types, kernels, prints."""

from __future__ import annotations

import contextlib
import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from spmd import _compat
from spmd._jaxprs.facts import FusedName, PerShardName, WindowName, one_line
from spmd._trees.arguments import explained
from spmd._trees.leaves import is_array, is_key, kind_of
from spmd.comm._call import open_call
from spmd.comm._keywords import as_array, check_array, misfit
from spmd.comm._marks import assert_equal_p, fused_p, known_as, mark, tag_of
from spmd.errors import LayoutError, SpmdError
from spmd.language import Layout
from spmd.modes import current_frame, try_frame
from spmd.ops._sizes import named_axes

T = TypeVar("T")


def annotate(x: T, layout: str, /, **names: Any) -> T:
    """State the layout of a value and have it checked: `annotate(x, "b/dp s d")`.

    Use it for values that plain JAX code made; the layouts of results of `spmd` operations are known already. Rank and
    sizes are checked on the spot. The pass after the trace checks where the value is equal and where it is different.
    In auto mode the layout is a sharding constraint.

    Communication: none in explicit mode, forward and backward. In auto mode the compiler moves the value there.

    Args:
      x: An array, or a pytree of arrays of this layout.
      layout: Its layout; `{U:tp}` declares a partial sum.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The same values.

    Raises:
      LayoutError: If the rank does not fit.
      SizeError: If a size does not fit.
      ReplicationError: If the value is different where the layout says equal, or equal where it says different.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("b/dp d -> b/dp", mesh=mesh)
      ... def norms(x):
      ...     squares = spmd.annotate(x * x, "b/dp d")
      ...     return jnp.sqrt(squares.sum(1))
      >>> print(norms(jnp.ones((4, 9))))
      [3. 3. 3. 3.]
    """
    call = open_call("annotate", layout, names, arrays=(x,), arrow=False, example='annotate(x, "b/dp d")', also={})

    def leaf(path: Any, value: Any) -> Any:
        own = call.fork()
        array = own.operand(value, name=call.label(path)).x
        shape = jnp.shape(value)
        array = array if array.shape == shape else array.reshape(shape)
        return mark(array, call.src, call.text, role="annotate", frame=call.frame)

    return jax.tree.map_with_path(leaf, x)


def assert_equal(x: T, axes: str | Sequence[str], why: str) -> T:
    """Vouch that a value is equal along mesh axes where no check can see it: `assert_equal(x, "cp", why="...")`.

    A value that travelled round a whole ring, or that was summed without a collective, may have become equal by
    arithmetic. This tells the check after the trace so. Nothing is compared at run time, and JAX's own type does not
    change. In the modes on whole arrays it does nothing.

    Communication: none, forward and backward.

    Args:
      x: An array or a pytree of arrays.
      axes: A mesh axis, or several.
      why: The reason, for the reader.

    Returns:
      The same values.

    Raises:
      MeshError: If the mesh has no such axis.
      LayoutError: If no reason is given.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=2)
      >>> @spmd.kernel("s/cp -> s/cp", mesh=mesh)
      ... def centred(x):
      ...     mine = x.sum()
      ...     other = jax.lax.ppermute(mine, "cp", [(0, 1), (1, 0)])
      ...     total = spmd.assert_equal(mine + other, "cp", why="both devices add the same two numbers")
      ...     return x - spmd.annotate(total, "scalar") / spmd.size("s")
      >>> print(centred(jnp.array([1.0, 2.0, 3.0, 6.0])))
      [-2. -1.  0.  3.]
    """
    call = f"assert_equal(x, {axes!r})"
    frame = current_frame("spmd.assert_equal")
    if not isinstance(why, str) or not why.strip():
        raise LayoutError("assert_equal needs the reason why the value is equal.", call=call, advice='why="..."')
    chosen = frame.in_mesh_order(named_axes(axes, frame, call))
    if not frame.explicit:
        return x
    fail = misfit(call)
    return jax.tree.map(lambda v: assert_equal_p.bind(as_array(v, "the value", fail), axes=chosen, why=why), x)


def per_shard(why: str) -> _PerShard:
    """State that code is meant per shard: `with spmd.per_shard("each device augments its own images"):`.

    The check after the trace reports what is done to a piece of an array as if it were the whole: a sort of each
    device's block, positions that start at zero on each device, one random key for all. Where that is what you mean,
    say so and why. The check then reports nothing inside the block, and knows nothing of what the block makes.
    `explain` lists the line and the reason. Nothing else changes: JAX's own check stays on, and so do the layouts that
    you write. In auto and reference mode the body sees whole arrays, so the same code works on the whole and may give
    other numbers; `spmd.local` runs code per shard in all modes.

    Communication: none, forward and backward.

    Args:
      why: The reason, for the reader.

    Returns:
      A context manager, which is also a decorator: `per_shard("why")(fn)` is `fn`, and all of it is meant per shard.

    Raises:
      LayoutError: If no reason is given.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2)
      >>> @spmd.kernel("n/dp -> n/dp", mesh=mesh)
      ... def runs(x):
      ...     with spmd.per_shard("sorted runs, which a later step merges"):
      ...         return jnp.sort(x)
      >>> print(runs(jnp.array([4, 1, 3, 2])))
      [1 4 2 3]
    """
    if not isinstance(why, str) or not why.strip():
        got = [] if isinstance(why, str) else [f"why: {kind_of(why)}"]
        rule = "per_shard needs the reason why each device may compute with its own shard."
        raise LayoutError(rule, call="per_shard(...)", got=got, advice='per_shard("why"), with the reason in words')
    return _PerShard(PerShardName(why))


class _PerShard(contextlib.ContextDecorator):
    """The scope of `per_shard`; as a decorator it is opened anew for each call."""

    def __init__(self, name: PerShardName) -> None:
        self.name = name
        self.open = contextlib.ExitStack()

    def _recreate_cm(self) -> _PerShard:
        return _PerShard(self.name)

    def __enter__(self) -> None:
        self.open.enter_context(jax.named_scope(self.name))

    def __exit__(self, *raised: object) -> None:
        self.open.close()


@explained
def debug_print(fmt: str, *arrays: Any, **named: Any) -> None:
    """Print values while the program runs. In explicit mode each device prints, with its place on the mesh.

    A line reads `[dp=0 tp=3] loss 1.5`, and lines come in any order. If a body sees whole arrays, the line is printed
    once, without a place.

    Communication: none in explicit mode. In the modes on whole arrays these are brought to the host.

    Args:
      fmt: A format string as of `jax.debug.print`: `"loss {}"`, `"{x} {y}"`.
      *arrays: What fills `{}`.
      **named: What fills `{x}`.

    Raises:
      ModeError: Outside a kernel; use `jax.debug.print` there.
      LayoutError: If the string does not come first, or its braces do not match the values.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=1)
      >>> @spmd.kernel("b/dp -> b/dp", mesh=mesh)
      ... def body(x):
      ...     spmd.debug_print("sum {}", x.sum())
      ...     return x
      >>> _ = body(jnp.arange(4)); jax.effects_barrier()
      [dp=0] sum 6
    """
    frame = current_frame("spmd.debug_print")
    _check_format(fmt, arrays, named)
    place: dict[str, Any] = {}
    if frame.explicit:
        place = {f"_at_{axis}": jax.lax.axis_index(axis) for axis in frame.axis_names}
        shown = " ".join(f"{axis}={{_at_{axis}}}" for axis in frame.axis_names)
        fmt = f"[{shown}] {fmt}"
    jax.debug.print(fmt, *arrays, **named, **place)


def _check_format(fmt: Any, arrays: Sequence[Any], named: Mapping[str, Any]) -> None:
    """The string comes first, and each pair of braces has its value."""
    call, advice = "debug_print(...)", 'a format string, then the values: debug_print("loss {}", loss)'
    if not isinstance(fmt, str):
        rule = f"the format string comes first, and this is {kind_of(fmt)}."
        raise LayoutError(rule, call=call, advice=advice)
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(fmt) if name is not None]
    except ValueError as error:
        raise LayoutError(f"this is not a format string: {error}.", call=call, advice=advice) from None
    roots = [re.split(r"[.\[]", name)[0] for name in fields]
    given = {*map(str, range(len(arrays))), *named}
    lacking = [name for name in roots if name and name not in given]
    if lacking or roots.count("") > len(arrays):
        shown = f"{{{lacking[0]}}}" if lacking else "{}"
        got = [f"by position: {len(arrays)}; by name: {', '.join(named) or 'none'}"]
        raise LayoutError(f"no value fills {shown}.", call=call, got=got, advice=advice)
    used = {str(i) for i in range(roots.count(""))} | set(roots)
    if unused := given - used:
        raise LayoutError(f"no braces show the value {sorted(unused)[0]}.", call=call, advice=advice)


@dataclass(frozen=True)
class ValueType:
    """What is known of a value: its JAX type, and the layout that `spmd` gave it.

    Attributes:
      shape: Its shape here. In explicit mode this is the shape of one device's shard.
      dtype: Its dtype.
      layout: The layout if the value is an argument or the direct result of an `spmd` operation, else None.
      varying: Mesh axes along which JAX types it varying, in mesh order. A gathered copy is varying too.
      unreduced: Mesh axes along which JAX types it unreduced.
      reduced: Mesh axes along which JAX types it reduced.
    """

    shape: tuple[int, ...]
    dtype: Any
    layout: Layout | None
    varying: tuple[str, ...]
    unreduced: tuple[str, ...]
    reduced: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.dtype}[{','.join(map(str, self.shape))}]"]
        if self.layout is not None:
            parts.append(f'"{self.layout.short}"')
        kinds = (("V", self.varying), ("U", self.unreduced), ("R", self.reduced))
        marks = ", ".join(f"{kind}:{','.join(axes)}" for kind, axes in kinds if axes)
        return " ".join([*parts, f"{{{marks}}}"] if marks else parts)


def typeof(x: Any) -> ValueType:
    """Return what is known of a value while it is traced: shape, dtype, layout, JAX's manual axis types.

    Communication: none.

    Args:
      x: An array.

    Returns:
      A `ValueType`. It prints as `float32[4,8] "b/dp s" {V:dp}`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2)
      >>> @spmd.kernel("b/dp s -> b/dp s", mesh=mesh)
      ... def body(x):
      ...     print(spmd.typeof(x))
      ...     return x
      >>> _ = body(jnp.ones((4, 3)))
      float32[2,3] "b/dp s" {V:dp}
    """
    check_array(x, "the value", misfit("typeof(x)"))
    kind = jax.typeof(x)
    frame = try_frame()
    known = tag_of(x)

    def order(axes: frozenset[str]) -> tuple[str, ...]:
        return tuple(sorted(axes)) if frame is None else frame.in_mesh_order(axes)

    return ValueType(
        tuple(kind.shape),
        kind.dtype,
        None if known is None else known[0],
        order(_compat.varying_axes(x)),
        order(_compat.unreduced_axes(x)),
        order(_compat.reduced_axes(x)),
    )


# --- what a program states about the kernels that its functions become ------------------------------------------------


P = ParamSpec("P")
R = TypeVar("R")


def fused(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """State that a function is one kernel on an accelerator, for `explain` and `search`: `@spmd.fused("attention")`.

    They then count its arguments and results as memory and as memory traffic, and nothing of what is inside. The
    attention layers say this of their scores, for which GPUs and TPUs have kernels. The program itself stays the same:
    it computes what the function says, and on a CPU, or where the compiler finds no such kernel, it does write what is
    inside. `Memory.opened` is what it then needs.

    The backward pass is one kernel too, as in flash attention: it reads the arguments, the results and the cotangents
    of the results, and writes the cotangents of the arguments. What the forward pass keeps for it from inside counts
    nothing: the kernel makes it again. Work is counted as it is written, forward and backward, with the products in the
    type of the numbers that enter the kernel. A kernel that skips what a causal mask hides makes half of the products.

    What the function reads from outside must be an argument; what it closes over is taken for computed inside. What
    has no gradient, such as a mask, is not counted again backward. One such function inside another is a part of it.
    Collectives inside count as always.

    Communication: none, forward and backward.

    Args:
      what: What kind of kernel it is, for the reader: `explain` says how much memory traffic stays inside.

    Returns:
      A decorator. The function takes and returns trees of arrays; other leaves stay as they are.

    Raises:
      LayoutError: If it is not said what kind of kernel it is.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> @spmd.fused("attention")
      ... def attention(q, k, v):
      ...     return jax.nn.softmax(q @ k.T) @ v
      >>> arrays = [jax.ShapeDtypeStruct((4096, 64), jnp.float32)] * 3
      >>> spmd.explain(attention, *arrays).written.hbm_bytes == 4 * 4096 * 64 * 4
      True

    References:
      Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691
    """
    if not isinstance(what, str) or not what.strip():
        rule = "fused needs the name of the kernel that this function stands for."
        got = [] if isinstance(what, str) else [f"what: {kind_of(what)}"]
        raise LayoutError(rule, call="fused(...)", got=got, advice='as in @spmd.fused("attention")')
    name = FusedName(one_line(what))

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            args, kwargs = _noted((args, kwargs), name, "enter")
            with jax.named_scope(name):  # for equations without operands too, such as positions
                out = fn(*args, **kwargs)
            return _noted(out, name, "leave")

        return run

    return decorate


def _noted(tree: Any, what: str, role: str) -> Any:
    """The same arrays, which enter or leave a kernel. What is known of their layouts stays known."""

    def leaf(x: Any) -> Any:
        if not is_array(x) or is_key(x):
            return x
        return known_as(x, fused_p.bind(x, what=what, role=role))

    return jax.tree.map(leaf, tree)


# --- `meanwhile`: what travels in the time in which something else is computed ---------------------------------------


X = TypeVar("X")
Y = TypeVar("Y")
W = TypeVar("W")
V = TypeVar("V")
_EXAMPLE = 'meanwhile(layer, x, lambda w: spmd.all_gather(w, "d/dp f -> d f"), w)'


def meanwhile(compute: Callable[[X], Y], x: X, move: Callable[[W], V], w: W, /) -> tuple[Y, V]:
    """Let something travel in the time in which something else is computed: `y, w = meanwhile(layer, x, gather, w)`.

    What travels begins when x is there, and not earlier. Whoever takes one of both results waits for both. In between
    the compiler may run them at the same time, and may not put either of them elsewhere. So the weights of the next
    layer are gathered while this one is computed, and those of the layer after it are not gathered yet. `explain` says
    what is computed in that time, and how much of the time of the collectives it covers.

    It is an order, and not a promise: whether a device computes while it sends depends on the hardware, the compiler
    and its flags. JAX has no asynchronous gather of its own. This is `jax.lax.optimization_barrier` around both. With
    JAX 0.10 there is no order between values of which only one is equal along an axis: its barrier would lose that.

    The backward pass has the same order, turned round: the gradient of w is reduced and scattered in the time in which
    that of x is computed. Under `jax.checkpoint`, `scan` and `vmap` it is what it is outside.

    Layouts: those of x and w, and of what both functions return.

    Communication: what both functions send, forward and backward, and nothing else.

    Args:
      compute: What is computed. It sends nothing, or what need not wait for `move`.
      x: Its argument, an array or a pytree.
      move: What travels, a verb or several.
      w: Its argument, an array or a pytree.

    Returns:
      What `compute` and `move` return.

    Raises:
      SpmdError: If `compute` or `move` is not a function.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("b/dp d, l d/dp f -> b/dp f", mesh=mesh)
      ... def layers(x, w):
      ...     gather = lambda w: spmd.all_gather(w, "d/dp f -> d f")
      ...     now = gather(w[0])
      ...     x, then = spmd.meanwhile(lambda x: jnp.tanh(x @ now), x, gather, w[1])
      ...     return jnp.tanh(x @ then)
      >>> layers(jnp.ones((4, 8)), jnp.ones((2, 8, 8))).shape
      (4, 8)
    """
    for name, fn in (("compute", compute), ("move", move)):
        if not callable(fn):
            rule = f"meanwhile takes two functions, each with its argument; {name} is {kind_of(fn)}."
            raise SpmdError(rule, call="meanwhile(compute, x, move, w)", advice=f"as in {_EXAMPLE}")
    name = WindowName()
    x, w = _together((x, w))
    with jax.named_scope(name):
        y = compute(x)
    with jax.named_scope(name.moves):
        v = move(w)
    return _together((y, v))


def _together(tree: Any) -> Any:
    """The same arrays, of which each is there when all are. What is known of their layouts stays known."""
    leaves, structure = jax.tree.flatten(tree)
    at = [i for i, x in enumerate(leaves) if is_array(x) and not is_key(x)]
    made = _compat.in_order([leaves[i] for i in at]) if at else []
    for i, new in zip(at, made, strict=True):
        leaves[i] = known_as(leaves[i], new)
    return jax.tree.unflatten(structure, leaves)


__all__ = ["meanwhile"]
