"""Gradients inside kernels, of complete losses or declared partial sums, and custom rules with matching types."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from spmd import _compat
from spmd._jaxprs.facts import CallName, GradientName, one_line
from spmd._jaxprs.walker import COMMUNICATES, Domain, Equation, axes_of, walk
from spmd._python.named import ByName
from spmd._trees.leaves import kind_of
from spmd.comm import _lax
from spmd.comm._keywords import check_array, misfit
from spmd.errors import LayoutError, ReplicationError, is_int
from spmd.language import Layout, axes_code, check_axes
from spmd.modes import Frame, current_frame, try_frame

P = ParamSpec("P")
R = TypeVar("R")

Argnums = int | Sequence[int]


def value_and_grad(
    fn: Callable[P, R], argnums: Argnums = 0, *, loss: str = "", has_aux: bool = False
) -> Callable[P, tuple[R, Any]]:
    """The value and gradient of a loss, inside a kernel, with the meaning of the whole program.

    Raw `jax.grad` inside `shard_map` differentiates the sum of the devices' scalars. The gradient of a loss that is a
    gathered copy comes out n times too big, and so does that of a local mean. Here the loss must be complete on each
    mesh axis, or a declared partial sum. It is complete if it is equal by JAX's own type, as the result of a `psum` or
    of `reduce(..., "... -> scalar")` is.

    The gradient has the layout of its argument. If the argument is equal by JAX's type, the gradient is summed over the
    devices (one all-reduce). If it is a gathered copy or deferred (`{R:}`), the gradient is a partial sum (`{U:}`). If
    it is divided, so is the gradient.

    Communication: the transposes of the collectives of `fn`, and one all-reduce per argument that is equal by
    JAX's type and used by divided data.

    Args:
      fn: A function to a scalar, or to `(scalar, aux)`.
      argnums: Which positional arguments to differentiate.
      loss: "" or "scalar" for a complete loss, "{U:dp}" or "{U:dp,tp}" for one that is a partial sum on these axes.
      has_aux: Whether `fn` returns auxiliary results too.

    Returns:
      A function to `(value, gradient)`, or `((value, aux), gradient)`.

    Raises:
      ReplicationError: If on some axis the loss is neither complete nor declared, or it is declared and equal.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("d, b/dp d -> scalar, d", mesh=mesh)
      ... def step(w, x):
      ...     def loss(w):
      ...         return spmd.reduce((x * w[None]) ** 2, "b/dp d -> scalar", "mean")
      ...     return spmd.value_and_grad(loss)(w)
      >>> value, gradient = step(jnp.ones(2), jnp.ones((8, 2)))
      >>> print(value, gradient)
      1.0 [1. 1.]
    """
    return _differentiated("value_and_grad", fn, argnums, loss, has_aux)


def _check_function(name: str, fn: Any, what: str, advice: str) -> None:
    if not callable(fn):
        raise LayoutError(f"{name} takes {what}, not {kind_of(fn)}.", call=f"{name}(...)", advice=advice)


def _differentiated(name: str, fn: Any, argnums: Argnums, loss: str, has_aux: bool) -> Callable[..., Any]:
    _check_function(name, fn, "a function to a scalar loss", f"as in {name}(loss_fn)(w)")
    marked = _loss_axes(loss, name)
    text = _text(name, fn, loss)

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        frame = current_frame(f"spmd.{name}")
        partial = frame.renamed(marked)
        check_axes(partial, dict(frame.sizes), call=text)

        @functools.wraps(fn)
        def checked(*inner: Any, **named: Any) -> Any:
            out = fn(*inner, **named)
            _check_loss(_loss_of(out, has_aux, text), frame, partial, text)
            return out

        for place, value in enumerate(args):
            for leaf in jax.tree.leaves(value) if place in np.atleast_1d(argnums) else ():
                check_array(leaf, f"argument {place}", misfit(text))
        with jax.named_scope(GradientName(one_line(text))):
            return jax.value_and_grad(checked, argnums, has_aux=has_aux)(*args, **kwargs)

    return differentiated


def grad(fn: Callable[P, Any], argnums: Argnums = 0, *, loss: str = "", has_aux: bool = False) -> Callable[P, Any]:
    """The gradient of a loss inside a kernel: `value_and_grad` without the value.

    Communication: as for `value_and_grad`.

    Args:
      fn: A function to a scalar, or to `(scalar, aux)`.
      argnums: Which positional arguments to differentiate.
      loss: "" or "scalar" for a complete loss, "{U:dp}" or "{U:dp,tp}" for a partial sum on these axes.
      has_aux: Whether `fn` returns auxiliary results too.

    Returns:
      A function to the gradient, or to `(gradient, aux)`.

    Raises:
      ReplicationError: If on some axis the loss is neither complete nor declared.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("b/dp -> b/dp", mesh=mesh)
      ... def gradient(x):
      ...     return spmd.grad(lambda x: spmd.reduce(x**2, "b/dp -> scalar", "sum"))(x)
      >>> print(gradient(jnp.arange(4.0)))
      [0. 2. 4. 6.]
    """
    both = _differentiated("grad", fn, argnums, loss, has_aux)

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return differentiated


def _loss_of(out: Any, has_aux: bool, text: str) -> Any:
    """The scalar among what the function returns. Anything else is an error."""
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise LayoutError("with has_aux=True the function returns (loss, aux).", call=text)
        out = out[0]
    elif isinstance(out, (tuple, list, dict)):
        rule = f"the loss is one scalar, and the function returns {kind_of(out)}."
        raise LayoutError(rule, call=text, fix="has_aux=True")
    return out


def _text(name: str, fn: Any, loss: str) -> str:
    tail = f', loss="{loss}"' if loss else ""
    return f"{name}({getattr(fn, '__name__', 'fn')}{tail})"


def _loss_axes(loss: str, name: str) -> tuple[str, ...]:
    if not isinstance(loss, str) or not re.fullmatch(r"(scalar)?\s*(\{U:[^{}]*\})?", loss.strip()):
        raise LayoutError(
            f'loss is "scalar" (complete) or a mark such as "{{U:dp}}" (a partial sum), not {loss!r}.',
            call=f"{name}(fn, ...)",
        )
    mark = loss.strip().removeprefix("scalar").strip()
    return Layout(mark).unreduced if mark else ()


def _check_loss(value: Any, frame: Frame, marked: tuple[str, ...], text: str) -> None:
    shape = getattr(value, "shape", ())
    if shape != ():
        raise ReplicationError(f"the loss is a scalar, and this one has shape {shape}.", call=text)
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise LayoutError(f"the loss is a real number, and this one is {jnp.result_type(value)}.", call=text)
    if not frame.explicit or frame.island:
        return
    varying = _compat.varying_axes(value) | _compat.unreduced_axes(value)
    loose = frame.in_mesh_order(varying - set(marked))
    equal = frame.in_mesh_order(set(marked) - varying)
    if loose:
        axes = ", ".join(loose)
        n = frame.axis_size(loose)
        whole = 'reduce(x, "<layout> -> scalar", "mean") as the last step; or '
        summed = f'loss="{{U:{",".join(frame.in_mesh_order({*marked, *loose}))}}}" if the sum is meant'
        if _compat.mapped(value)[1]:
            whole = f"jax.vmap(fn, spmd_axis_name={axes_code(loose)}), if each row has a loss of its own; or "
        raise ReplicationError(
            f"on {axes} the loss is neither complete nor a declared partial sum: jax.grad would differentiate the sum "
            f"of the {n} devices' scalars.",
            call=text,
            got=[f"the loss differs along {', '.join(frame.in_mesh_order(varying))}", frame.describe()],
            advice=summed if marked else whole + summed,
        )
    if equal:
        raise ReplicationError(
            f"the loss is declared a partial sum on {', '.join(equal)}, and it is equal there: the sum would count it "
            f"{frame.axis_size(equal)} times.",
            call=text,
            got=[frame.describe()],
            fix='loss=""',
        )


@dataclass(frozen=True)
class _Types:
    """The axes along which JAX typed each primal argument varying, and those along which the kernel chose that each
    result is invarying, for the backward rule."""

    axes: tuple[frozenset[str], ...]
    chosen: tuple[tuple[str, ...], ...]


jax.tree_util.register_static(_Types)


@dataclass(eq=False)
class _Called:
    """One call of a `custom_vjp`: its frame, and along which axes the kernel chose that each result is invarying."""

    frame: Frame | None
    chosen: tuple[tuple[str, ...], ...] = ()

    def run(self, fn: Callable[..., Any], *args: Any, plain: bool = True) -> Any:
        """Run `fn` in the frame. A rule knows copies that vary: what the kernel chooses is changed around it."""
        frame = self.frame
        if frame is None:
            return fn(*args)
        with (frame.replace(diagnosing=False, invarying=frozenset()) if plain else frame).enter():
            return fn(*args)

    def choose(self, fn: Callable[..., Any], args: Sequence[Any], out: Any) -> None:
        """Find out which results have the type that they have because the kernel chose it."""
        if self.frame is not None and self.frame.invarying:
            before, after = map(_varying, (jax.eval_shape(lambda *args: self.run(fn, *args), *args), out))
            order = self.frame.in_mesh_order
            self.chosen = tuple(order(one - other) for one, other in zip(before, after, strict=True))


def _varying(tree: Any) -> tuple[frozenset[str], ...]:
    return tuple(_compat.varying_axes(x) | _compat.unreduced_axes(x) for x in jax.tree.leaves(tree))


class custom_vjp(ByName):
    """`jax.custom_vjp` whose cotangents are summed to the types of their primals.

    If an argument is equal on an axis, JAX wants its cotangent to be equal there too. A backward rule computes each
    device's part. This class adds the parts up, unless the rule has already done so. All three functions may use `spmd`
    operations.

    Communication: in the backward pass one all-reduce for each argument that is equal on axes on which the cotangent
    that the rule returns varies.

    Args:
      fn: The function.
      nondiff_argnums: As in `jax.custom_vjp`.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> @spmd.custom_vjp
      ... def double(w, x):
      ...     return w * x
      >>> double.defvjp(lambda w, x: (w * x, (w, x)), lambda kept, g: ((g * kept[1]).sum(), g * kept[0]))
      >>> mesh = spmd.make_mesh(dp=4)
      >>> f = spmd.kernel("scalar, b/dp -> b/dp", mesh=mesh)(double)
      >>> print(jax.grad(lambda w: f(w, jnp.ones(8)).sum())(1.0))
      8.0

    References:
      https://docs.jax.dev/en/latest/notebooks/Custom_derivative_rules_for_Python_code.html
    """

    def __init__(self, fn: Callable[..., Any], nondiff_argnums: Sequence[int] = ()):
        _check_function("custom_vjp", fn, "a function of arrays", "as in custom_vjp(fn), and then its defvjp(fwd, bwd)")
        if not isinstance(nondiff_argnums, Sequence) or not all(map(is_int, nondiff_argnums)):
            rule = f"nondiff_argnums has the places of arguments, not {kind_of(nondiff_argnums)}."
            raise LayoutError(rule, call="custom_vjp(...)", advice="nondiff_argnums=(0,) for the first one")
        self.nondiff = tuple(nondiff_argnums)
        self._python = inspect.signature(fn)

        # The rules run when the kernel is differentiated, which may be long after its body was traced. So the frame of
        # the call travels with it as a static argument.
        def framed(called: _Called, *args: Any) -> Any:
            out = called.run(fn, *args, plain=False)
            called.choose(fn, args, out)
            return out

        self._inner = jax.custom_vjp(framed, nondiff_argnums=(0, *(i + 1 for i in self.nondiff)))
        functools.update_wrapper(self, fn)

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Set the rules: `fwd(*args) -> (out, kept)`, `bwd(*nondiff, kept, cotangent) -> cotangents`."""
        nondiff = self.nondiff
        scope = CallName(_text("custom_vjp", self, ""), "custom_vjp")

        def forward(called: _Called, *args: Any) -> Any:
            out, kept = called.run(fwd, *args)
            chosen = called.chosen or ((),) * len(jax.tree.leaves(out))
            out = _each(_lax.to_invarying, out, chosen)
            primals = [a for i, a in enumerate(args) if i not in nondiff]
            return out, (kept, _Types(_varying(primals), chosen))

        def backward(called: _Called, *args: Any) -> Any:
            *fixed, (kept, types), cotangent = args
            frame = called.frame

            def rule() -> Any:
                of_copy = _each(_lax.of_copies, cotangent, types.chosen)
                if any(types.chosen):
                    _check_rule(lambda g: bwd(*fixed, kept, g), of_copy, types, f"{scope}")
                out = bwd(*fixed, kept, of_copy)
                if frame is None or not frame.explicit:
                    return out
                with jax.named_scope(scope):
                    return _summed(out, types.axes, frame)

            return called.run(rule)

        self._inner.defvjp(forward, backward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            bound = self._python.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        return self._inner(_Called(try_frame()), *args)


class _Parts(Domain):
    """Which values hold parts of a cotangent that nothing has added up along some axes."""

    def __init__(self, axes: frozenset[str]) -> None:
        super().__init__()
        self.axes = axes

    def constant(self, var: Any, value: Any) -> bool:
        return False

    def join(self, one: bool, other: bool) -> bool:
        return one or other

    def step(self, eqn: Equation, operands: Sequence[bool]) -> list[bool]:
        sends = eqn.primitive.name in COMMUNICATES and not self.axes.isdisjoint(axes_of(eqn))
        return [any(operands) and not sends] * len(eqn.outvars)


def _check_rule(rule: Callable[[Any], Any], cotangent: Any, types: _Types, call: str) -> None:
    """Refuse a rule that would take the part of a cotangent for the whole: the function's result is a copy, which the
    kernel made invarying, and for the rule it is a copy that varies, of which each device has a part of the
    cotangent."""
    axes, is_none = frozenset().union(*types.chosen), lambda x: x is None  # of an integer
    traced = jax.make_jaxpr(lambda g: jax.tree.map(lambda x: 0.0 if x is None else x, rule(g), is_leaf=is_none))
    parts = walk(traced(cotangent), [bool(chosen) for chosen in types.chosen], _Parts(axes))
    if any(part and own & axes for part, own in zip(parts, types.axes, strict=False)):
        along = ", ".join(sorted(axes))
        rule_text = f"the result is a gathered copy that leaves the kernel, and the rule adds up nothing along {along}."
        advice = (
            'all_gather(..., to="invarying") in the function and in its forward rule, if the cotangent is the whole '
            f"one on each device;\nor psum_scatter or psum over {along} in the backward rule, if it is a part"
        )
        raise ReplicationError(rule_text, call=call, advice=advice)


def _each(change: Callable[[Any, tuple[str, ...]], Any], tree: Any, axes: Sequence[tuple[str, ...]]) -> Any:
    """A tree whose leaves are changed along axes of their own."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [change(x, a) if a else x for x, a in zip(leaves, axes, strict=True)])


def _summed(cotangents: Any, types: tuple[frozenset[str], ...], frame: Frame) -> Any:
    """Each cotangent summed over the axes on which it varies and its primal does not."""
    leaves, structure = jax.tree.flatten(cotangents, is_leaf=lambda x: x is None)
    if len(leaves) != len(types):
        return cotangents  # JAX says what is wrong with the structure
    done = []
    for leaf, axes in zip(leaves, types, strict=True):
        if leaf is None or not hasattr(leaf, "dtype"):
            done.append(leaf)
            continue
        extra = frame.in_mesh_order((_compat.varying_axes(leaf) | _compat.unreduced_axes(leaf)) - axes)
        done.append(_compat.pvary(_lax.psum(leaf, extra) if extra else leaf, frame.in_mesh_order(axes)))
    return jax.tree.unflatten(structure, done)
