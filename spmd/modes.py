"""Where a body runs: the mode, the mesh, the mapping and the sizes that its kernel bound.

All of it sits in `jax.make_user_context` values, so that a function already compiled by `jax.jit` is traced
again when one of them changes.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, ParamSpec, TypeVar, get_args, overload

import jax
from jax.sharding import AbstractMesh, Mesh

from spmd import _compat
from spmd._python.ambient import Ambient
from spmd._trees.arguments import explained
from spmd.errors import ModeError, check_one_of
from spmd.language import AxisMapping, Size, axes_tuple, mesh_text

__all__ = [
    "Frame",
    "ambient_mapping",
    "ambient_mode",
    "axis_mapping",
    "current_frame",
    "inner",
    "mode",
    "scope",
    "try_frame",
]

P = ParamSpec("P")
R = TypeVar("R")

Mode = Literal["explicit", "auto", "reference"]
MODES = get_args(Mode)
Constrain = Literal["all", "signature"]
CONSTRAIN = get_args(Constrain)
_CALLERS = object()  # the mapping of whoever calls

_mode = Ambient("mode", ("explicit", "all"))
_mapping = Ambient("axis_mapping", None)
interpreted = Ambient("interpreted", False)  # whether a trace is for numbers, which no opaque code has
counting: contextvars.ContextVar[dict[str, None] | None] = contextvars.ContextVar("counting", default=None)
"""The lines of a body on whole arrays that ask how many devices there are, while somebody wants to know."""
closings: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("closings", default=None)
"""The calls of a body that close axes which they do not name, as they are traced."""
_frame = jax.make_user_context(None)
_entered: weakref.WeakValueDictionary[tuple[Any, ...], Frame] = weakref.WeakValueDictionary()
_met: set[str] = set()  # of any kernel: a function that JAX has traced before is not run again, and meets nothing


@dataclass(frozen=True, eq=False)
class Frame:
    """What a kernel's body knows about where it runs. Two frames that know the same share traces.

    Attributes:
      mode: "explicit", "auto" or "reference".
      mesh: The mesh, concrete or abstract; only auto mode needs it, the sizes are in `sizes`.
      sizes: Mesh axes with their sizes, in mesh order.
      mapping: The kernel's `AxisMapping`, or None.
      renames: The kernel's `axes=` keyword, sorted.
      bound: The name of each dimension that the signature bound, with its global size.
      constrain: In auto mode, whether every layout is a constraint or only the signature's.
      island: Whether this is a per-shard island inside a body that runs on whole arrays.
      watched: Keywords of the kernel that its signature does not name: only a string of the body can mean them.
      diagnosing: Whether the body is traced once more only to explain an error: gathers then say what they are.
      invarying: The calls that gather `to="invarying"` though the user did not say so: see `place`.
      rows: The calls that close rows of a loop or of `jax.vmap`, which are therefore left open: see `place`.
      keeping: Whether notes on what is closed outlive gradients: for a trace that only asks for these.
      stages: Mesh axes along which `jax.vmap` hides a divided dimension: arrays there are not copies of each other.
      left: Mesh axes that the kernel leaves to the compiler; `sizes` does not have them.
      explicit: Whether arrays here are one device's shards, and operations emit their own collectives.
      axis_names: The mesh axes, in mesh order.
      known: The sizes of `bound`, by name.
      alike: The names that have the size of another one: a string may take one for the other, and fit.
    """

    mode: str
    mesh: Mesh | AbstractMesh | None
    sizes: tuple[tuple[str, int], ...]
    mapping: AxisMapping | None = None
    renames: tuple[tuple[str, Any], ...] = ()
    bound: tuple[tuple[str, Size], ...] = ()
    constrain: str = "all"
    island: bool = False
    watched: frozenset[str] = frozenset()
    diagnosing: bool = False
    invarying: frozenset[Any] = frozenset()
    rows: frozenset[Any] = frozenset()
    keeping: bool = False
    stages: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    explicit: bool = field(init=False, repr=False)
    axis_names: tuple[str, ...] = field(init=False, repr=False)
    known: dict[str, Size] = field(init=False, repr=False)
    alike: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "explicit", self.mode == "explicit")
        object.__setattr__(self, "axis_names", tuple(dict(self.sizes)))
        object.__setattr__(self, "known", dict(self.bound))
        sizes = [one.size for _, one in self.bound]
        alike = frozenset(name for name, one in self.bound if sizes.count(one.size) > 1 < one.size)
        object.__setattr__(self, "alike", alike)

    def axis_size(self, axes: str | tuple[str, ...]) -> int:
        """The number of devices along one mesh axis, or the product over several."""
        total = 1
        known = dict(self.sizes)
        for axis in axes_tuple(axes):
            total *= known[axis]
        return total

    def met(self, names: Iterable[str]) -> None:
        """Remember which of the watched keywords the body means."""
        _met.update(self.watched.intersection(names))

    @property
    def unmet(self) -> frozenset[str]:
        """The watched keywords that no body has meant yet."""
        return self.watched - _met

    def renamed(self, axes: str | Iterable[str] | None) -> tuple[str, ...]:
        """Mesh axes that the body names, as the mesh calls them: the kernel's `axes=` applied."""
        new = dict(self.renames)
        found: list[str] = []
        axes = axes_tuple(axes)
        self.met(axes)
        for axis in axes:
            one = new.get(axis, axis)
            found += axes_tuple(one)
        return tuple(found)

    def in_mesh_order(self, axes: Any) -> tuple[str, ...]:
        """`axes` in the order of the mesh, as messages and JAX's collectives want them."""
        return tuple(filter(set(axes).__contains__, self.axis_names))

    def describe(self) -> str:
        left = f"; {', '.join(self.left)} {'is' if len(self.left) == 1 else 'are'} the compiler's (auto=)"
        return mesh_text(dict(self.sizes)) + (left if self.left else "")

    def replace(self, **changes: Any) -> Frame:
        return replace(self, **changes)

    def enter(self) -> contextlib.AbstractContextManager[Any]:
        """Make this the frame that operations see.

        JAX hashes it for each of its caches, thousands of times in one trace. So of all frames that know the same, one
        is entered, and it is compared by identity.
        """
        return _frame(_entered.setdefault(_parts(self), self))


_parts = operator.attrgetter(*(one.name for one in fields(Frame) if one.init))  # all that a frame is given


def try_frame() -> Frame | None:
    """The frame of the kernel being traced, or of the user's own `shard_map`; None elsewhere."""
    frame = _frame.value
    if frame is not None:
        return frame
    here = jax.sharding.get_abstract_mesh()
    manual = here.manual_axes
    if not manual:
        return None
    sizes = tuple((name, here.shape[name]) for name in here.axis_names if name in manual)
    return Frame("explicit", here, sizes)


def current_frame(who: str) -> Frame:
    """The frame of the kernel being traced.

    Raises:
      ModeError: Outside a kernel.
    """
    frame = try_frame()
    if frame is None:
        raise ModeError(
            f"{who} reads layouts, so it runs inside a kernel (or inside your own "
            f"jax.shard_map), and none is being traced.",
            advice='put it in a function decorated with @spmd.kernel("... -> ...", mesh=mesh)',
        )
    return frame


@explained
@contextlib.contextmanager
def mode(name: Mode, *, constrain: Constrain = "all") -> Iterator[None]:
    """Run the kernels that are called inside the block in another mode.

    The mode is part of JAX's own trace cache key, so a `jax.jit`ted step that is called in one mode and then in another
    is traced again. It holds in its thread until the block ends. A generator that yields inside the block leaves its
    caller in this mode. Context managers need that. Elsewhere, end the block before `yield`. A kernel that another
    coroutine calls while this one is suspended inside the block is an error.

    Communication: none of its own.

    Args:
      name: "explicit" (`jax.shard_map`, the collectives that the strings say), "auto" (whole arrays, each
        layout a `with_sharding_constraint`, the compiler chooses) or "reference" (whole arrays, one device).
      constrain: In auto mode, "all" constrains every operation's result, "signature" only the arguments and
        results of kernels.

    Returns:
      A context manager.

    Raises:
      ModeError: On an unknown name.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> @spmd.kernel("b/dp -> b/dp", mesh=spmd.make_mesh(dp=2))
      ... def held(x):
      ...     return x * 0 + spmd.local_size("b/dp")
      >>> with spmd.mode("reference"):
      ...     print(held(jnp.ones(4)))
      [4. 4. 4. 4.]
    """
    check_one_of("mode", name, MODES, error=ModeError)
    check_one_of("constrain", constrain, CONSTRAIN, error=ModeError)
    with _mode((name, constrain)):
        yield


def ambient_mode() -> tuple[str, str]:
    """The mode that `with mode(...)` chose, and what auto mode constrains."""
    return _mode.value


@contextlib.contextmanager
def axis_mapping(mapping: Any, *, merge: bool = False, **rules: Any) -> Iterator[AxisMapping | None]:
    """Place named dimensions by rules, in all calls inside the block that have bare names.

    `shard`, `init`, `from_process_local`, `from_function`, `visualize`, `plan` and every kernel read it, unless they
    have a mapping of their own. A bare name is placed by its rule, `name/axis` as it is written, and `name/1` is whole.
    A bare name without a rule is an error. A rule that nothing uses is not an error. In the body of a kernel the
    kernel's mapping holds. There a name without a rule, which the signature does not have, is whole. Like the mode, the
    mapping is part of JAX's trace cache key, and holds in its thread.

    Communication: none of its own.

    Args:
      mapping: An `AxisMapping`, a dict of rules such as `{"batch": "dp", "mlp": "tp", "embed": None}`, or
        None to forget the surrounding one.
      merge: Add these rules to the surrounding mapping instead of replacing it; where both have one, these hold.
      **rules: Further rules, `embed="tp"`. They override those of `mapping`.

    Returns:
      A context manager, which gives the mapping that holds inside.

    Raises:
      LayoutError: On a malformed rule.

    Example:
      >>> import spmd
      >>> with spmd.axis_mapping({"batch": "dp"}) as mapping:
      ...     print(mapping.get("batch"))
      ('dp',)
    """
    value = None if mapping is None and not rules else AxisMapping.of(mapping).merge(rules)
    if merge and value is not None and _mapping.value is not None:
        value = _mapping.value.merge(value)
    with _mapping(value):
        yield value


def ambient_mapping() -> AxisMapping | None:
    """The mapping of the surrounding `with axis_mapping(...)`."""
    return _mapping.value


@overload
def scope(fn: Callable[P, R]) -> Callable[P, R]: ...
@overload
def scope(*, mapping: None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def scope(fn: Callable[P, R] | None = None, *, mapping: Any = _CALLERS) -> Any:
    """Give a library function a scope of its own: the names in its strings are not its caller's.

    Inside a kernel, names of the signature are bound to their global sizes. A function that is called from
    many kernels uses its own names, so `@scope` hides the caller's names during the call. The mesh and the
    mode stay, and so does the kernel's mapping, whose names are the vocabulary of a whole model. A function that
    takes mesh axes by keyword hides the mapping too, with `@scope(mapping=None)`. In its strings a bare name is then
    whole, whatever the caller's mapping says of that name. A function among the arguments
    (an activation, `attend=` of an attention layer) is the caller's, and runs with the caller's names. A jitted
    function does not keep the caller's names.

    Communication: none of its own.

    Args:
      fn: A function written with `spmd` operations.
      mapping: None hides the kernel's mapping. By default the mapping stays.

    Returns:
      The function. Call it inside kernels as before.

    Raises:
      ModeError: If `mapping` is a mapping.

    Example:
      >>> import spmd
      >>> @spmd.scope
      ... def double(x):
      ...     return 2 * x
      >>> double(3)
      6
    """
    if mapping is not None and mapping is not _CALLERS:
        raise ModeError(
            "scope takes mapping=None, which hides the kernel's mapping, and no other mapping.",
            call="scope(mapping=...)",
            advice="@scope(mapping=None), or @scope",
        )
    if fn is None:
        return functools.partial(_scoped, hide_mapping=mapping is None)
    return _scoped(fn, hide_mapping=mapping is None)


def _scoped(fn: Callable[P, R], hide_mapping: bool) -> Callable[P, R]:
    @explained
    @functools.wraps(fn)
    def scoped(*args: P.args, **kwargs: P.kwargs) -> R:
        frame = _frame.value
        if frame is None or not (frame.bound or (hide_mapping and frame.mapping is not None)):
            return fn(*args, **kwargs)
        inner = frame.replace(bound=(), mapping=None if hide_mapping else frame.mapping)
        run: Callable[..., R] = fn  # with its own parameters, some of them wrapped
        given = [_callers_own(one, frame) for one in args]
        named = {name: _callers_own(one, frame) for name, one in kwargs.items()}
        with inner.enter():
            return run(*given, **named)

    return scoped


def _callers_own(value: Any, caller: Frame) -> Any:
    """A function that the caller hands in, with the caller's names around it when it is called."""
    if not isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return value

    @functools.wraps(value)
    def called(*args: Any, **kwargs: Any) -> Any:
        frame = _frame.value
        if frame is None:
            return value(*args, **kwargs)
        with frame.replace(bound=caller.bound, mapping=caller.mapping).enter():
            return value(*args, **kwargs)

    return called


def inner(fn: Callable[P, R]) -> Callable[P, R]:
    """A string operation as another one calls it: its strings name the mesh's own axes, and nothing of the caller's.

    No mapping, no `axes=` of the kernel, which have been applied already, and no sizes.
    """

    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        frame = _frame.value
        if frame is None or not (frame.bound or frame.renames or frame.mapping is not None):
            return fn(*args, **kwargs)
        with frame.replace(bound=(), renames=(), mapping=None, watched=frozenset()).enter():
            return fn(*args, **kwargs)

    return called


def outermost() -> tuple[tuple[str, str], AxisMapping | None] | None:
    """The ambient mode and mapping where nothing else surrounds the caller; None inside a kernel or a `shard_map`.

    Every warm call of a kernel asks this, so it is one function.
    """
    if _frame.value is not None or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    return _mode.value, _mapping.value


EVERYWHERE = "everywhere"  # among the places: each call of the body


def enter_body(fn: Callable[..., R], args: Iterable[Any]) -> R:
    """Call the body of a kernel. `place` knows this function, and so where the body begins."""
    return fn(*args)


def place() -> tuple[Any, ...] | None:
    """The place in the traced body from which this is called. None if no kernel is being traced.

    It is the same in each trace of the body: the code of each function from the body on and the call in it, without
    those of JAX, which may hold a trace of before.
    """
    found: list[Any] = []
    end, here = 0, inspect.currentframe()
    while here is not None:
        if here.f_code is enter_body.__code__:
            end = len(found)  # the outermost kernel is the one that is traced again
        if not _compat.in_jax(here.f_code.co_filename):
            found.append((here.f_code, _position(here)))
        here = here.f_back
    return tuple(found[:end]) or None


def _position(frame: types.FrameType) -> tuple[int | None, ...]:
    """Return where in the source a function is. Its instruction would not do: CPython 3.11 names another one of the
    same call as soon as it has specialised the function, which may happen between two traces."""
    code, at = frame.f_code, frame.f_lasti
    found = next(itertools.islice(code.co_positions(), at // 2, None), (None,))
    return (at,) if None in found else found


def no_frame() -> contextlib.AbstractContextManager[Any]:
    """Forget the frame, for code that runs outside the body's own axes."""
    return _frame(None)


def inside_kernel() -> bool:
    """Return whether a kernel's body is being traced (not merely a `shard_map` of the user's own)."""
    return _frame.value is not None
