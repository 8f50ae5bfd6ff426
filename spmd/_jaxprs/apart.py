"""Code of others inside a `shard_map`, traced where JAX does not ask along which mesh axes values vary.

JAX asks that of each result in the body of a `shard_map`. A Pallas call has to answer in its `out_shape`, and those of
libraries do not. JAX keeps what it asks by thread. So such code is traced in a thread of its own, backward too, and the
body runs the equations.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from spmd._jaxprs.walker import equations

# What `with` blocks of JAX change in a trace. A thread begins without them.
_SETTINGS = (
    "enable_x64",
    "default_matmul_precision",
    "default_prng_impl",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "debug_nans",
    "debug_infs",
    "softmax_custom_jvp",
    "threefry_partitionable",
)

Around = Callable[[], contextlib.AbstractContextManager[Any]]


def traced_apart(fn: Callable[..., Any], args: Sequence[Any], around: Around) -> tuple[Any, Any]:
    """Trace a function of arrays in a thread of its own.

    Args:
      fn: The function.
      args: Its arguments.
      around: What the thread enters before.

    Returns:
      The closed jaxpr, and the structure of the result.
    """
    types = map(jax.typeof, args)
    structs = [jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type) for one in types]
    settings = [(getattr(jax, name), getattr(jax.config, f"jax_{name}")) for name in _SETTINGS]
    mesh = jax.sharding.get_abstract_mesh()

    def run() -> tuple[Any, Any]:
        with contextlib.ExitStack() as stack:
            for setting, value in settings:
                stack.enter_context(setting(value))
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
            stack.enter_context(around())
            return jax.make_jaxpr(fn, return_shape=True)(*structs)

    with ThreadPoolExecutor(1) as thread:
        jaxpr, shapes = thread.submit(contextvars.copy_context().run, run).result()
    return jaxpr, jax.tree.structure(shapes)


def run_apart(
    fn: Callable[..., Any],
    args: Sequence[Any],
    around: Around,
    check: Callable[[Any], None],
    entered: Callable[[Any], Any],
) -> Any:
    """The result of a function that is traced apart. If it has a derivative of its own, that is traced so too.

    Args:
      fn: A function of arrays.
      args: Its arguments.
      around: What the thread enters before.
      check: Gets the jaxpr.
      entered: From a value that the function closes over to that value as another argument.
    """
    jaxpr, structure = traced_apart(fn, args, around)
    check(jaxpr)
    closed = [i for i, x in enumerate(jaxpr.consts) if isinstance(x, jax.core.Tracer)]
    given = (*(entered(jaxpr.consts[i]) for i in closed), *args)

    def run(*given: Any) -> list[Any]:
        consts = _filled(jaxpr.consts, closed, given[: len(closed)])
        return jaxpr_as_fun(jaxpr.replace(consts=consts))(*given[len(closed) :])

    own = any(eqn.primitive.name.startswith("custom_vjp") for eqn in equations(jaxpr))
    outs = (_derived(run, given, jaxpr.out_avals, around) if own else run)(*given)
    return jax.tree.unflatten(structure, outs)


def _derived(fn: Callable[..., Any], args: Sequence[Any], outs: Sequence[Any], around: Around) -> Callable[..., Any]:
    """A function of arrays like these to arrays like these, whose derivative is traced apart."""
    moving, real = ([i for i, x in enumerate(some) if jnp.issubdtype(x.dtype, jnp.inexact)] for some in (args, outs))
    still = lambda some: [np.zeros(x.shape, jax.dtypes.float0) for x in some]

    def again(fn: Callable[..., Any], *args: Any) -> Any:
        jaxpr, structure = traced_apart(fn, args, around)
        return jax.tree.unflatten(structure, jaxpr_as_fun(jaxpr)(*args))

    @jax.custom_vjp
    def run(*args: Any) -> Any:
        return fn(*args)

    def forward(*args: Any) -> tuple[Any, Any]:
        def pulled(*args: Any) -> tuple[Any, Any]:
            return jax.vjp(lambda *chosen: fn(*_filled(args, moving, chosen)), *(args[i] for i in moving))

        return again(pulled, *args)

    def backward(pull: Any, cotangents: Any) -> tuple[Any, ...]:
        residuals, structure = jax.tree.flatten(pull)

        def pulled(*given: Any) -> Any:
            chosen = given[len(residuals) :]
            return jax.tree.unflatten(structure, given[: len(residuals)])(_filled(still(outs), real, chosen))

        found = again(pulled, *residuals, *(cotangents[i] for i in real))
        return tuple(_filled(still(args), moving, found))

    run.defvjp(forward, backward)
    return run


def _filled(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values, with others in these places."""
    found = list(values)
    for i, x in zip(places, others, strict=True):
        found[i] = x
    return found
