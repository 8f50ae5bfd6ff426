"""An assertion that a program means the same on any mesh, in results and gradients."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import spmd
from spmd import _compat
from spmd._jaxprs.errors import first_line
from spmd._jaxprs.traces import FlatProgram
from spmd._jaxprs.walker import equations, opened
from spmd._text import Table
from spmd._trees.leaves import described, held_dtype, is_array
from spmd.checker import NotShownWarning
from spmd.checker._arbiter import Trial, collecting, for_numbers
from spmd.checker._arguments import drawn, smaller
from spmd.checker._numbers import (
    BLOCKS,
    Cause,
    Difference,
    advice_on,
    cause_of,
    compared,
    labelled,
    largest,
    pulled,
    rounded,
    wide,
)
from spmd.checker._primitives import NotSimulated
from spmd.checker._simulator import Parted, held_number, simulate
from spmd.checker._verdict import apart_text, counted_text
from spmd.errors import LayoutError, MeshError, ReplicationError, SizeError, SpmdError
from spmd.kernels._kernel import Kernel
from spmd.kernels._plan import names_in
from spmd.mesh import check_arguments_alive, make_mesh, mesh_for, no_mesh, resized, with_sizes
from spmd.modes import Mode, counting, mode
from spmd.testing._assertions import Mismatch

_CALL = "assert_same_on_any_mesh(kernel, ...)"
_BUILD = "build(mesh), a function that makes the kernel for a mesh, where its meaning depends on the sizes of axes"
_WIDTH = 84  # a cause that does not fit stands below its row
_SHOWN = 20

# What rounding may do, as a part of the largest number of an array.
_SIMULATED = "float64, simulated"
_TOLERANCE = {_SIMULATED: 1e-6, "float64": 1e-9, "float32": 2e-5, "float16": 1e-2, "bfloat16": 4e-2}
_COARSEST = 0.25  # of eight bits and fewer
_SMALL = 1 / 20  # of the largest of all gradients: what is smaller than that is rounded as that is
_MOST_NUMBERS = 10**9  # that one run computes
# What the program makes of rounding its arguments may come so many times, but not as more than so much of the largest
# number: what rounding changes by more is not compared, and a wrong factor is never as small.
_TIMES, _MOST = 10, 0.02


def assert_same_on_any_mesh(
    kernel: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    meshes: Sequence[Any] | None = None,
    rtol: float | Mapping[str, float] | None = None,
    atol: float = 0.0,
    grad: bool = True,
    seed: int = 0,
    devices: bool = False,
    **kwargs: Any,
) -> None:
    """Assert that a kernel has the same results and gradients on its mesh, on one device, and on meshes between.

    A layout says how an array is divided, and not what it means: the same strings on a mesh whose axes all have size 1
    are plain JAX on whole arrays. What differs from that is wrong, whatever the types say. The program is traced in
    explicit mode on the mesh given, on a mesh of ones, and on meshes where one axis alone has its size (with one axis,
    where that has a divisor of its size). So the message says which axis is to blame. It is interpreted in double
    precision, as `spmd.check` does it. What cannot be interpreted, such as a callback, is compiled and run.

    Communication: none; with `devices=True` that of the program on each mesh, forward and backward. The gradients of
    all floating-point arguments are taken by one `jax.vjp` along random cotangents that lie as the results do. It runs
    in one process.

    Args:
      kernel: A kernel, or a function that calls kernels; or `build(mesh)`, which makes a function of whole arrays for a
        mesh. Use `build` for whatever depends on the sizes of axes outside of kernels: the stages of a pipeline, the
        groups of `moe`, `jax.shard_map`.
      *args: The arguments: arrays, or `jax.ShapeDtypeStruct`s, which get random values. Then the names in a kernel's
        signature also get the smallest distinct sizes that the meshes divide, as far as the body runs with them and no
        array with values has them. Random integers are indices of the smallest dimension.
      mesh: The mesh, where it is not that of the kernel, of the arguments or of `jax.set_mesh`.
      meshes: Other meshes in place of those between: `{"dp": 2}` for axes and sizes (all others have size 1), or a
        `jax.sharding.Mesh` with the same axes.
      rtol: What is allowed, as a part of the largest number of each array; or a dict of this by dtype. By default 1e-6.
        On devices 2e-5 for float32, 4e-2 for bfloat16, by the coarsest dtype in the whole program; and up to 2e-2 where
        as much comes from rounding the arguments in another way. Integers are equal.
      atol: What is allowed in addition.
      grad: Whether to compare gradients.
      seed: Draws other values.
      devices: Whether the program is compiled and run on the devices of each mesh.
      **kwargs: Keyword arguments of the kernel; differentiated too.

    Raises:
      Mismatch: Results or gradients differ, or the program fails on some mesh and not on the one given; or results
        are others in auto and reference mode, where a body counts devices and arrays are whole; or types suspect what
        hangs on a side of a choice that no draw takes. The message
        names the result or the argument whose gradient differs, on which meshes, by how much, and if all numbers have
        one factor, which sizes of axes that is.
      ReplicationError: A collective that not all of its devices reach. It is found before anything runs.
      MeshError: No mesh is given, or the mesh has one device.
      LayoutError: What is given is neither a kernel nor a function.
      SpmdError: All numbers of a result are NaN, so that nothing is compared.

    Example:
      >>> import jax, spmd
      >>> from spmd.testing import assert_same_on_any_mesh
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> @spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)
      ... def norm(x):
      ...     return spmd.reduce(x * x, "b/dp d/tp -> b/dp") ** 0.5
      >>> assert_same_on_any_mesh(norm, jax.ShapeDtypeStruct((512, 4096), "float32"))

      A sum where a mean is meant has the type of a mean:

      >>> @spmd.kernel("b/dp d -> d", mesh=mesh)
      ... def mean(x):
      ...     return spmd.psum(x.mean(0), "d {U:dp} -> d")
      >>> assert_same_on_any_mesh(mean, jax.ShapeDtypeStruct((512, 4096), "float32"))
      Traceback (most recent call last):
      ...
      spmd.testing._assertions.Mismatch: mean is not the same on every mesh.
      ...

      What depends on the number of stages is built for each mesh:

      >>> def build(mesh):
      ...     @spmd.kernel("p/pp l d f, m b d -> m b d", mesh=mesh)
      ...     def stages(w, x):
      ...         def stage(w, x):
      ...             return jax.lax.scan(lambda x, w: (jax.numpy.tanh(x @ w), None), x, w)[0]
      ...         return spmd.parallel.pipeline(stage, w, x, pp="pp")
      ...     return lambda layers, x: stages(layers.reshape(mesh.shape["pp"], -1, 3, 3), x)
      >>> layers, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 3, 3), (5, 2, 3)))
      >>> assert_same_on_any_mesh(build, layers, x, mesh=spmd.make_mesh(pp=4))
    """
    if not callable(kernel):
        rule = f"the first argument is a kernel, or build(mesh) that makes one, not {described(kernel)}."
        advice = "assert_same_on_any_mesh(kernel, x): a kernel and its arguments; it computes what it compares itself"
        raise LayoutError(rule, call=_CALL, advice=advice)
    check_arguments_alive(args, kwargs, _CALL)
    own = kernel.mesh if isinstance(kernel, Kernel) else None
    given = mesh_for(own if mesh is None else mesh, jax.tree.leaves((args, kwargs)), _CALL)
    grid = _grid(given, meshes)
    kernel = _builder(kernel, given, args, kwargs)
    made = _program_on(kernel, given)
    sizes: dict[str, tuple[int, int]] = {}
    if isinstance(made, Kernel) and lacks_values((args, kwargs)):
        with mode("explicit"):
            values, sizes = shrunk(functools.partial(_program_on, kernel), grid, args, kwargs)
        args, kwargs = tuple(values), {}
    program = _Program(kernel, made, given, (args, kwargs), grad, seed)
    try:
        runs = [program.run(one, first=one == given, devices=devices) for one in grid]
    except NotSimulated:
        runs = [program.run(one, first=one == given, devices=True) for one in grid]
    base = next(run for run in runs if run.mesh.size == 1)
    _check_compared(program, base)
    found = {run.mesh: _differences(run, base, rtol, atol) for run in runs if run is not base}
    if any(found.values()):
        raise Mismatch("\n".join(_text(program, base.mesh, found, sizes)))
    program.check_modes(base, rtol, atol)


@dataclass(frozen=True)
class _Run:
    """What a program gave on a mesh.

    Attributes:
      mesh: The mesh.
      arrays: The results and gradients.
      dtype: The coarsest dtype that it computed in.
      moved: How much each number of an array moves where the arguments are rounded; on a mesh of ones.
    """

    mesh: Any
    arrays: dict[str, Any]
    dtype: str
    moved: dict[Any, np.ndarray]


class _Program:
    """A kernel or what `build` made, with its arguments, to be run on one mesh after another.

    Args:
      kernel: What the user gave.
      made: The same for the mesh given.
      mesh: That mesh.
      given: Its arguments and keyword arguments, some without values.
      grad: Whether to take gradients.
      seed: Draws the values.
    """

    def __init__(self, kernel: Any, made: Any, mesh: Any, given: tuple[Any, Any], grad: bool, seed: int) -> None:
        self.kernel, self.grad, self.mesh = kernel, grad, mesh
        self.name = getattr(made, "__name__", type(made).__name__)
        self.builds = not isinstance(kernel, Kernel)
        if isinstance(made, Kernel):
            self.params, static = list(made.signature.params), made.signature.static
            self.static = {*static, *(i for i, name in enumerate(self.params) if name in static)}
        else:
            self.params, self.static = _parameters(made), set()
        self.specs = [_spec(x, mesh) for x in jax.tree.leaves(given)]
        self.given = drawn(given, seed)

    def run(self, mesh: Any, *, first: bool, devices: bool) -> _Run:
        """Results and gradients on a mesh.

        Raises:
          Mismatch: If it fails on this mesh; on the first one the error is the program's own.
          NotSimulated: If it cannot be interpreted.
        """
        sizes = tuple(mesh.shape.items())
        try:
            if devices:
                mesh = _concrete(mesh, self.mesh)
                kernels = resized(sizes) if self.builds else contextlib.nullcontext()
                with jax.set_mesh(mesh), kernels, mode("explicit"), jax.default_matmul_precision("highest"):
                    return self._run(mesh)
            quiet = isinstance(self.kernel, Kernel) and self.kernel.signature.check != "error"
            abstract = with_sizes(mesh, {})
            with for_numbers(mesh.shape, collect=quiet), use_abstract_mesh(abstract), warnings.catch_warnings():
                warnings.simplefilter("error", NotShownWarning)
                return self._simulated(abstract, self.grad)
        except NotSimulated:
            raise
        except NotShownWarning as error:
            raise Mismatch(f"{self.name} agrees on these meshes, and a mistake may hide:\n{error}") from error
        except Exception as error:
            own = first and not isinstance(error, SpmdError)
            if self.grad and own and self._is_traced_without_gradients(mesh):
                rule = "JAX does not differentiate this program, and gradients are compared too."
                got = [f"{type(error).__name__}: {first_line(error)}"]
                raise SpmdError(rule, call=_CALL, got=got, fix="grad=False") from error
            if first:
                error.add_note(f"So it is on the mesh given to assert_same_on_any_mesh: {_shown(mesh)}.")
                raise
            rule = f"{self.name} runs on the mesh given, and fails on {_shown(mesh)}."
            lines = [rule, f"{type(error).__name__}: {error}"]
            raise Mismatch("\n".join(lines + ([] if self.builds else [f"advice: {_BUILD}"]))) from error

    def check_modes(self, base: _Run, rtol: Any, atol: float) -> None:
        """Refuse a program that means something else in auto and reference mode than on all meshes.

        A program that reference mode refuses is heard of where it is called.
        """
        lines, mesh = dict[str, None](), with_sizes(self.mesh, {})
        token = counting.set(lines)

        def simulated(mode: Mode) -> _Run:
            with for_numbers(self.mesh.shape, mode), use_abstract_mesh(mesh):
                return self._simulated(mesh, grad=False)

        try:
            run = simulated("reference")
            base = base if base.dtype == _SIMULATED else replace(simulated("explicit"), mesh=base.mesh)
        except Exception:
            return
        finally:
            counting.reset(token)
        result = replace(base, arrays={"result": base.arrays["result"]})
        if found := _differences(run, result, rtol, atol):
            trial = Trial(self.mesh.shape, apart=tuple(found), counted=tuple(lines))
            rule = f"{self.name} means something else in auto and reference mode than on each mesh:"
            got = "\n- ".join([rule, *apart_text(trial), counted_text(lines)])
            raise Mismatch(f"{got}\nadvice: {BLOCKS}")

    def _is_traced_without_gradients(self, mesh: Any) -> bool:
        try:
            with no_mesh(), use_abstract_mesh(with_sizes(mesh, {})), mode("explicit"):
                fn, (args, kwargs) = _program_on(self.kernel, mesh), self.given
                program, arrays = pulled(fn, args, kwargs, grad=False, static=self.static)
                jax.eval_shape(program, *arrays)
        except Exception:
            return False
        return True

    def _on_devices(self, mesh: Mesh) -> tuple[Any, Any, Any]:
        """The program on a mesh, with its arguments there."""
        leaves, structure = jax.tree.flatten(self.given)
        placed = [_placed(x, spec, mesh) for x, spec in zip(leaves, self.specs, strict=True)]
        return (_program_on(self.kernel, mesh), *jax.tree.unflatten(structure, placed))

    def _simulated(self, mesh: Any, grad: bool) -> _Run:
        fn, (args, kwargs) = _program_on(self.kernel, mesh), self.given
        program, arrays = pulled(fn, args, kwargs, grad=grad, static=self.static)
        specs = {id(x): spec for x, spec in zip(jax.tree.leaves(self.given), self.specs, strict=True)}
        structs = jax.tree.map(lambda x: _struct(x, NamedSharding(mesh, specs[id(x)])), arrays)
        flat = FlatProgram.of(program, *structs)
        try:
            found = simulate(flat.jaxpr, list(map(held_number, jax.tree.leaves(arrays))), _MOST_NUMBERS)
        except Parted as error:
            _check_divergent(fn, args, kwargs)
            raise ReplicationError(f"{error}.", call=_CALL) from error
        if found.faults:
            axes = ", ".join(found.faults[0].axes)
            rule = f"{self.name}: a result is said to be equal along {axes}, and devices hold different numbers."
            raise Mismatch(f"{rule}\nadvice: spmd.check(...) has the line")
        return _Run(mesh, jax.tree.unflatten(flat.structure, found.outs), _SIMULATED, {})

    def _run(self, mesh: Mesh) -> _Run:
        fn, args, kwargs = self._on_devices(mesh)
        if self.builds or self.kernel.signature.check != "error":
            _check_divergent(fn, args, kwargs)
        program, arrays = pulled(fn, args, kwargs, grad=self.grad, static=self.static)
        traced = jax.jit(program).trace(*arrays)
        compiled, dtype = traced.lower().compile(), _coarsest(traced.jaxpr)
        found = jax.tree.map(np.asarray, compiled(*arrays))
        moved = {}
        if mesh.size == 1:
            again = jax.tree.leaves(compiled(*_rounded(arrays, dtype)))
            with np.errstate(invalid="ignore"):  # of infinities
                pairs = zip(jax.tree.leaves_with_path(found), again, strict=True)
                moved = {path: np.abs(wide(x) - wide(y)) for (path, x), y in pairs}
        return _Run(mesh, found, dtype, moved)


def _builder(kernel: Any, mesh: Any, args: Any, kwargs: Any) -> Any:
    """Return what makes the program for a mesh. A function of the arguments needs no other: its kernels take the mesh
    that the trial is on."""
    if isinstance(kernel, Kernel):
        return kernel
    fits = lambda *args, **kwargs: _binds(kernel, args, kwargs)
    if not fits(*args, **kwargs):
        return kernel
    if fits(mesh):
        with contextlib.suppress(Exception):  # of a function of arrays, which a mesh is not
            if callable(kernel(mesh)):
                return kernel
    return functools.wraps(kernel)(lambda mesh: kernel)


def _binds(fn: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def _program_on(kernel: Any, mesh: Any) -> Any:
    """The program on a mesh."""
    if isinstance(kernel, Kernel):
        return kernel.on(mesh)
    try:
        made = kernel(mesh)
    except TypeError as error:
        rule = "a function takes the arguments, or a mesh that it makes a program for, and this one takes neither."
        name = getattr(kernel, "__name__", type(kernel).__name__)
        advice = (
            "all arguments of the function; or a function of a mesh,\n"
            "as in assert_same_on_any_mesh(lambda mesh: lambda x: my_kernel.on(mesh)(x).sum(), x, mesh=mesh)"
        )
        raise LayoutError(rule, call=_CALL, got=[f"{name}(mesh): {error}"], advice=advice) from error
    if not callable(made):
        rule = f"build(mesh) makes a kernel, or a function that calls kernels, and it gave {type(made).__name__}."
        raise LayoutError(rule, call=_CALL, advice="a kernel, or lambda mesh: a function made for that mesh")
    return made


def _parameters(fn: Callable[..., Any]) -> list[str]:
    """The names of the positional parameters, as far as they are known."""
    try:
        known = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    named = itertools.takewhile(lambda one: one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD), known)
    return [one.name for one in named]


def _rounded(arrays: Any, dtype: str) -> Any:
    """Floating-point arrays with each number up or down by as much as this dtype rounds."""
    draws, eps = np.random.default_rng(3), float(jnp.finfo(dtype).eps)

    def one(x: Any) -> Any:
        if not is_array(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return np.asarray(x) * (1 + eps * draws.choice((-1, 1), np.shape(x))).astype(x.dtype)  # compiles nothing

    return jax.tree.map(one, arrays)


def _spec(x: Any, mesh: Mesh) -> P:
    """Return how an argument lies, for other meshes with the same axes."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.axis_names != mesh.axis_names:
        return P()
    return P(*_compat.partitions(sharding.spec))


def _struct(x: Any, sharding: NamedSharding) -> Any:
    """Return what an argument is traced as: NumPy's int64 as JAX holds it. A number keeps its weak type."""
    if not is_array(x):
        return x
    return jax.ShapeDtypeStruct(x.shape, held_dtype(x), sharding=sharding)


def _placed(x: Any, spec: P, mesh: Mesh) -> Any:
    return jax.device_put(x, NamedSharding(mesh, spec)) if is_array(x) else x


def _check_divergent(fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Find collectives that some devices do not reach, before they wait for each other.

    Kernels look for themselves when they are traced, unless they are told not to. A `shard_map` of the user's own does
    not.
    """
    if found := [str(one) for one in spmd.check(fn, *args, **kwargs) if one.kind == "divergent"]:
        raise ReplicationError("\n".join(found), call=_CALL)


# --- the meshes ---------------------------------------------------------------------------------------------


def _concrete(mesh: Any, given: Any) -> Mesh:
    """The mesh with devices: those of the mesh given, where these are enough."""
    if isinstance(mesh, Mesh):
        return mesh
    inside = isinstance(given, Mesh) and all(n <= given.shape[axis] for axis, n in mesh.shape.items())
    devices = given.devices[tuple(slice(n) for n in mesh.shape.values())] if inside else make_mesh(**mesh.shape).devices
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _grid(given: Any, meshes: Sequence[Any] | None) -> list[Any]:
    """The mesh given, the mesh of ones, and the others."""
    others = _between(dict(given.shape)) if meshes is None else list(meshes)
    ones = dict.fromkeys(given.shape, 1)
    made = [_resized(given, one) for one in (ones, *others)]
    found = list({tuple(one.shape.items()): one for one in (*made[::-1], given)}.values())[::-1]
    if len(found) == 1:
        rule = "a mesh of one device has nothing to be compared with."
        raise MeshError(rule, call=_CALL, got=[f"mesh {_shown(given)}"], advice="mesh=spmd.make_mesh(dp=2, tp=4)")
    return found


def _between(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Each axis alone; where there is only one, the largest part of it that divides it."""
    wide = {axis: n for axis, n in sizes.items() if n > 1}
    if len(wide) > 1:
        return [{axis: n} for axis, n in wide.items()]
    return [{axis: max(k for k in range(1, n) if n % k == 0)} for axis, n in wide.items()]


def _resized(given: Any, other: Any) -> Any:
    """The mesh given with other sizes of its axes."""
    if isinstance(other, Mesh) and other.axis_names == given.axis_names:
        return other
    if not isinstance(other, Mapping) or not set(other) <= set(given.axis_names):
        got = [f"{dict(other)}" if isinstance(other, Mapping) else type(other).__name__, f"mesh {_shown(given)}"]
        rule = "meshes are sizes by axis of the mesh given, or meshes with the same axes."
        raise MeshError(rule, call=_CALL, got=got, advice=f'meshes=[{{"{given.axis_names[0]}": 2}}]')
    return with_sizes(given, {axis: other.get(axis, 1) for axis in given.axis_names})


def _shown(mesh: Any) -> str:
    return ", ".join(f"{axis}={n}" for axis, n in mesh.shape.items())


# --- the comparison -----------------------------------------------------------------------------------------


def _coarsest(jaxpr: Any) -> str:
    """The floating-point dtype of the fewest bits that a program computes in."""
    made = [v for eqn in equations(jaxpr) for v in eqn.outvars]
    dtypes = {getattr(v.aval, "dtype", None) for v in (*opened(jaxpr)[0].invars, *made)}
    infos = [jnp.finfo(one) for one in dtypes if one is not None and jnp.issubdtype(one, jnp.inexact)]
    return max(infos, key=lambda one: float(one.eps)).dtype.name if infos else "float32"


def _check_compared(program: _Program, run: _Run) -> None:
    """Refuse what would hide every mistake: no result at all, or NaN everywhere, which equals itself."""
    if not jax.tree.leaves(run.arrays["result"]):
        rule = f"{program.name} returns no arrays, so nothing is compared."
        raise LayoutError(rule, call=_CALL, advice="a function that returns what it computes")
    for path, x in jax.tree.leaves_with_path(run.arrays):
        if x.size and x.dtype.kind in "fcV" and np.isnan(x.astype(np.complex128)).all():
            what = f"{program.name}, {labelled(path, program.params)}"
            rule = f"{what}: all numbers are NaN on one device, so nothing is compared."
            raise SpmdError(rule, call=_CALL, advice="arguments with values that the program is made for")


def _differences(run: _Run, base: _Run, rtol: Any, atol: float) -> list[Difference]:
    structures = [jax.tree.structure(one.arrays) for one in (run, base)]
    if structures[0] != structures[1]:
        rule = f"the program gives another tree on {_shown(run.mesh)} than on {_shown(base.mesh)}."
        raise Mismatch(f"{rule}\n- {structures[0]}\n- {structures[1]}\nadvice: {_BUILD}")
    simulated = run.dtype == _SIMULATED
    dtype = _SIMULATED if simulated else max((run.dtype, base.dtype), key=lambda one: float(jnp.finfo(one).eps))
    given = rtol.get(dtype) if isinstance(rtol, Mapping) else rtol
    part = _TOLERANCE.get(dtype, _COARSEST) if given is None else given
    gradients = max((largest(wide(x)) for x in jax.tree.leaves(base.arrays.get("gradient"))), default=0.0)

    def allowed(path: Any, x: np.ndarray, y: np.ndarray) -> Any:
        most, moved = largest(y), base.moved.get(path, np.zeros(()))
        shaken = (moved > 0) | (x != y)  # -1e9 in a mask is not, and hides no difference
        size = rounded(x, y) if simulated else largest(np.where(shaken, y, 0))
        size = max(most if given is not None else size, _SMALL * gradients * (path[0].key == "gradient"))
        more = 0.0 if given is not None or simulated else min(_TIMES * largest(moved), _MOST * most)
        return atol + max(part * size, more)

    found = compared(run.arrays, base.arrays, allowed)
    # of other shapes the gradients were taken along other cotangents
    return [one for one in found if one.got != one.wanted] or found


# --- the message --------------------------------------------------------------------------------------------


def _text(
    program: _Program, base: Any, found: Mapping[Any, list[Difference]], sizes: Mapping[str, tuple[int, int]]
) -> Iterator[str]:
    at = {(one.path, mesh): one for mesh, ones in found.items() for one in ones}
    paths = sorted(dict.fromkeys(path for path, _ in at), key=lambda path: path[0].key != "result")
    factor = lambda path, mesh: at[path, mesh].factor if (path, mesh) in at else 1.0
    causes = {path: cause_of([(mesh.shape, factor(path, mesh)) for mesh in found]) for path in paths}
    rows = []
    for path, mesh in itertools.product(paths, found):
        if one := at.get((path, mesh)):
            rows.append((labelled(path, program.params), _shown(mesh), *one.counts, one.how(causes[path])))
    more = [(f"and {len(rows) - _SHOWN} more",)] if len(rows) > _SHOWN else []
    head = ("", "mesh", "largest difference", "allowed", "elements", "")
    yield f"{program.name} is not the same on every mesh."
    yield f"compared with {_shown(base)}, where nothing is divided:"
    yield Table([*rows[:_SHOWN], *more], head, right=(2, 3, 4), below=(5,)).text(_WIDTH)
    if same := [_shown(mesh) for mesh, ones in found.items() if not ones]:
        yield f"the same: {'; '.join(same)}"
    for axis in base.axis_names:
        if len(found) > 1 and all(bool(ones) == (mesh.shape[axis] > 1) for mesh, ones in found.items()):
            yield f"It differs where {axis} has several devices, and nowhere else."
    if sizes:
        shown = (f"{name}={after}" for name, (_, after) in sizes.items())
        yield f"The names have smaller sizes here: {', '.join(shown)}."
    yield f"advice: {_advice(program, at.values(), [one for one in causes.values() if one])}"


def _advice(program: _Program, differences: Iterable[Difference], causes: Sequence[Cause]) -> str:
    if known := advice_on(list(differences), causes):
        return known
    lines = ["spmd.explain lists what is sent between devices, with its lines"]
    return "\n        ".join(lines if program.builds else [*lines, _BUILD])


# --- arguments without values, made small where a kernel allows it, and filled with random numbers ------------------


_NUMBERS = 2**26  # numbers that are drawn


def lacks_values(tree: Any) -> bool:
    """Return whether an array of a tree is a `jax.ShapeDtypeStruct`."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def shrunk(
    build: Callable[[Any], Kernel], meshes: Sequence[Any], args: Any, kwargs: Any
) -> tuple[list[Any], dict[str, tuple[int, int]]]:
    """The arguments of a kernel with its names at their smallest sizes.

    A name gets the smallest size that no other name has, with at least two rows for each device on each mesh. It
    keeps its size if the body fails with a smaller one, if an array with values has it, or a keyword of the kernel.

    Args:
      build: From a mesh to the kernel for it.
      meshes: The meshes on which it is going to run.
      args: Its positional arguments, some of them `jax.ShapeDtypeStruct`s.
      kwargs: Its keyword arguments.

    Returns:
      One argument for each parameter, and the sizes before and after of the names that have become smaller.
    """
    kernel = build(meshes[0])
    plan, leaves = kernel.prepared(args, kwargs)
    try:
        names = names_in(plan, leaves, meshes, lambda x: not isinstance(x, jax.ShapeDtypeStruct))
    except ValueError:
        return plan.rebuild(leaves), {}  # the run says what is wrong

    def allowed(given: Sequence[Any]) -> bool:
        try:
            with collecting(True):  # what is wrong in it is said by the run
                for mesh in meshes:
                    build(mesh).trace(*plan.rebuild(given))
        except Exception:  # of the body, which may raise anything
            return False
        return True

    given, sizes = smaller(names, leaves, allowed, max((_largest(x) + 1 for x in leaves), default=0))
    _check_drawable(kernel, plan.rebuild(given), sizes)
    return plan.rebuild(given), {name: (size, n) for (name, size), n in sizes.items() if n != size}


def _largest(x: Any) -> int:
    """The largest number of an array of signed integers, which may be an index."""
    indices = isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.signedinteger) and x.size
    return int(np.max(x)) if indices else -1


def _check_drawable(kernel: Kernel, values: Sequence[Any], sizes: Mapping[Any, int]) -> None:
    """Refuse arguments that are too large to be filled, unless the kernel itself refuses them."""
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(values) if isinstance(x, jax.ShapeDtypeStruct))
    if count > _NUMBERS:
        kernel.trace(*values)
        rule = "the body fails where the names have smaller sizes, and with these there are too many numbers to draw."
        got = [", ".join(f"{name}={size}" for (name, _), size in sizes.items()), f"{count:,} numbers in the arguments"]
        raise SizeError(rule, call=_CALL, got=got, advice="structs of small sizes that fit together, or arrays")
