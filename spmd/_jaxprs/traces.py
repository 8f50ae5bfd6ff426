"""Traced functions with the structure of what they return, and code of others inside a `shard_map`.

JAX asks along which mesh axes each result varies in the body of a `shard_map`. A Pallas call has to answer in its
`out_shape`, and those of libraries do not. JAX keeps what it asks by thread. So such code is traced in a thread of its
own, backward too, and the body runs the equations.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

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


class FlatProgram(NamedTuple):
    """A traced function of arrays.

    Attributes:
      jaxpr: The jaxpr, closed: a function of the leaves of the arguments.
      structure: The structure of what the function returns.
    """

    jaxpr: Any
    structure: Any

    @classmethod
    def of(cls, fn: Callable[..., Any], *args: Any) -> Self:
        """Trace a function with these arguments, or structs of them."""
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        return cls(jaxpr, jax.tree.structure(shapes))

    def __call__(self, *args: Any) -> Any:
        return jax.tree.unflatten(self.structure, jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(args)))

    def given(self, consts: Sequence[Any]) -> Self:
        """Return the same function over other values in place of those that it closes over."""
        return self._replace(jaxpr=self.jaxpr.replace(consts=list(consts)))


def traced_apart(fn: Callable[..., Any], args: Sequence[Any], around: Around) -> FlatProgram:
    """Trace a function of arrays in a thread of its own.

    Args:
      fn: The function.
      args: Its arguments.
      around: What the thread enters before.
    """
    types = map(jax.typeof, args)
    structs = [jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type) for one in types]
    settings = [(getattr(jax, name), getattr(jax.config, f"jax_{name}")) for name in _SETTINGS]
    mesh = jax.sharding.get_abstract_mesh()

    def run() -> FlatProgram:
        with contextlib.ExitStack() as stack:
            for setting, value in settings:
                stack.enter_context(setting(value))
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
            stack.enter_context(around())
            return FlatProgram.of(fn, *structs)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, run).result()


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
    program = traced_apart(fn, args, around)
    check(program.jaxpr)
    consts = program.jaxpr.consts
    closed = [i for i, x in enumerate(consts) if isinstance(x, jax.core.Tracer)]
    given = (*(entered(consts[i]) for i in closed), *args)

    def run(*given: Any) -> list[Any]:
        return jax.tree.leaves(program.given(_filled(consts, closed, given[: len(closed)]))(*given[len(closed) :]))

    own = any(eqn.primitive.name.startswith("custom_vjp") for eqn in equations(program.jaxpr))
    outs = (_derived(run, given, program.jaxpr.out_avals, around) if own else run)(*given)
    return jax.tree.unflatten(program.structure, outs)


def _derived(fn: Callable[..., Any], args: Sequence[Any], outs: Sequence[Any], around: Around) -> Callable[..., Any]:
    """A function of arrays like these to arrays like these, whose derivative is traced apart."""
    moving, real = ([i for i, x in enumerate(some) if jnp.issubdtype(x.dtype, jnp.inexact)] for some in (args, outs))
    still = lambda some: [np.zeros(x.shape, jax.dtypes.float0) for x in some]

    again = lambda fn, *args: traced_apart(fn, args, around)(*args)

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
    chosen = dict(zip(places, others, strict=True))
    return [chosen.get(i, x) for i, x in enumerate(values)]
