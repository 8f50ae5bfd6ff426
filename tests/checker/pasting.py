"""Paste the fixes of a message into the wrong body, again and again until nothing is said: what a user would do. And
what is asked of what runs then: the numbers and gradients of one device, and no byte more than the compiler sends."""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.errors import SpmdError
from spmd.inspect import collectives
from tests.errors.registry import fixes_of

SENDS = ("all_gather", "all_to_all", "relayout")


def said(kernel: Any, args: Sequence[Any]) -> str:
    """What is said of a kernel: the error of its first call, or the findings of `spmd.check`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what no numbers can be had
            jax.eval_shape(kernel, *args)
    except SpmdError as error:
        return str(error)
    except (TypeError, ValueError) as error:  # JAX's own
        return repr(error)
    found = spmd.check(kernel, *args)
    return str(found) if found else ""


def mended(make: Callable[[Any], Any], body: Any, names: Sequence[str], args: Sequence[Any]) -> tuple[Any, list[str]]:
    """The body with each fix that is a call on one of its arguments in place of the argument, and these fixes. None in
    place of the body where they do not mend it."""
    pasted: list[str] = []
    for _ in range(4):
        text = said(make(body), args)
        lines = _on_arguments(text, names)
        if not text or not lines:
            return (body if not text else None), pasted
        body, pasted = _with(body, names, lines), [*pasted, *lines.values()]
    return None, pasted


def _on_arguments(text: str, names: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in fixes_of(text):
        call = re.match(r"spmd\.[\w.]+\((\w+), ", line)
        if call and call[1] in names:
            found.setdefault(call[1], line)
    return found


def _with(body: Any, names: Sequence[str], lines: dict[str, str]) -> Any:
    def new(*args: Any) -> Any:
        known = dict(zip(names, args, strict=True))
        made = {name: eval(line, {"spmd": spmd, "jnp": jnp, **known}) for name, line in lines.items()}
        return body(*(made.get(name, known[name]) for name in names))

    return new


def sent(kernel: Any, args: Sequence[Any], of: Sequence[str] = ()) -> int:
    """The bytes that a kernel sends forward; those of some lines, if they are given."""
    calls = [line.removeprefix("spmd.") for line in of]
    lines = spmd.explain(kernel, *args, compiled=False).collectives
    patterns = [re.findall(r'"([^"]*)"', call)[0] for call in calls]
    return sum(one.bytes * one.count for one in lines if not of or any(f'"{p}"' in one.text for p in patterns))


def pulled(kernel: Any, args: Sequence[Any], kwargs: Any = None, mode: str = "explicit") -> list[Any]:
    """The results of a kernel that are no whole numbers, and the gradients of its arguments along cotangents that
    differ everywhere."""
    leaves, structure = jax.tree.flatten(tuple(args))
    moves = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    places = [i for i, x in enumerate(leaves) if moves(x)]

    def of(*chosen: Any) -> Any:
        full = {**dict(enumerate(leaves)), **dict(zip(places, chosen, strict=True))}
        out = getattr(kernel, mode)(*jax.tree.unflatten(structure, list(full.values())), **(kwargs or {}))
        return [x for x in jax.tree.leaves(out) if moves(x)]

    out, pull = jax.vjp(of, *(np.asarray(leaves[i]) for i in places))
    back = pull([np.cos(np.arange(x.size)).reshape(x.shape).astype(x.dtype) for x in out])
    return [*map(np.asarray, (*out, *back))]


def check_pasted(kernel: Any, args: Sequence[Any], kwargs: Any = None, *, sends_more: bool = False) -> None:
    """Compare a mended kernel with itself on one device, forward and backward, and its bytes with the compiler's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        here, there = (pulled(kernel, args, kwargs, mode) for mode in ("explicit", "reference"))
    for one, other in zip(here, there, strict=True):
        scale = np.abs(other).max(initial=1.0)
        np.testing.assert_allclose(one / scale, other / scale, rtol=2e-5, atol=2e-5)
    bytes_of = {}
    for how in ("explicit", "auto"):
        with spmd.mode(how):
            bytes_of[how] = collectives(kernel, *args, **(kwargs or {})).total_bytes
    assert sends_more or bytes_of["explicit"] <= bytes_of["auto"], bytes_of
