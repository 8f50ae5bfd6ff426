"""Gradients inside kernels, of complete losses or declared partial sums, and custom rules with matching types."""

from __future__ import annotations

import contextlib
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
from spmd._python.named import ByName
from spmd._trees.leaves import kind_of
from spmd.comm import _lax
from spmd.comm._keywords import check_array, misfit
from spmd.errors import LayoutError, ReplicationError
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


def _differentiated(name: str, fn: Any, argnums: Argnums, loss: str, has_aux: bool) -> Callable[..., Any]:
    if not callable(fn):
        rule = f"{name} takes a function to a scalar loss, not {kind_of(fn)}."
        raise LayoutError(rule, call=f"{name}(...)", advice=f"as in {name}(loss_fn)(w)")
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
    if not isinstance(loss, str) or not re.fullmatch(r"\s*(scalar)?\s*(\{U:[^{}]*\})?\s*", loss):
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
    """The axes along which JAX typed each primal argument varying, for the backward rule."""

    axes: tuple[frozenset[str], ...]


jax.tree_util.register_static(_Types)


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
        self.nondiff = tuple(nondiff_argnums)
        self._python = inspect.signature(fn)

        # The rules run when the kernel is differentiated, which may be long after its body was traced. So the frame of
        # the call travels with it as a static argument.
        def framed(frame: Frame | None, *args: Any) -> Any:
            return fn(*args)

        self._inner = jax.custom_vjp(framed, nondiff_argnums=(0, *(i + 1 for i in self.nondiff)))
        functools.update_wrapper(self, fn)

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Set the rules: `fwd(*args) -> (out, kept)`, `bwd(*nondiff, kept, cotangent) -> cotangents`."""
        nondiff = self.nondiff
        scope = CallName(_text("custom_vjp", self, ""), "custom_vjp")

        def forward(frame: Frame | None, *args: Any) -> Any:
            with contextlib.nullcontext() if frame is None else frame.enter():
                out, kept = fwd(*args)
            primals = [a for i, a in enumerate(args) if i not in nondiff]
            axes = tuple(_compat.varying_axes(x) | _compat.unreduced_axes(x) for x in jax.tree.leaves(primals))
            return out, (kept, _Types(axes))

        def backward(frame: Frame | None, *args: Any) -> Any:
            *fixed, (kept, types), cotangent = args
            with contextlib.nullcontext() if frame is None else frame.enter():
                out = bwd(*fixed, kept, cotangent)
                if frame is None or not frame.explicit:
                    return out
                with jax.named_scope(scope):
                    return _summed(out, types.axes, frame)

        self._inner.defvjp(forward, backward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            bound = self._python.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        return self._inner(try_frame(), *args)


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
