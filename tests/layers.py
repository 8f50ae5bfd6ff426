"""One check for all ready-made layers: values and gradients against plain JAX, collectives against formulas.

A room registers its layers in its files `cases_*.py` (`tests/nn`, `tests/parallel`), each as an iterator over cases from
which a few are drawn:

    @cases("rms_norm")
    def _():
        for mesh, axes in placements("dp", "tp"):
            ...
            yield LayerCase(...)
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import Layout
from spmd.inspect import collectives
from spmd.modes import MODES
from spmd.testing import assert_same_on_any_mesh
from tests.conftest import FULL_CASES, case_count, in_slice
from tests.sampler import first_seed

TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}

Axes = str | tuple[str, ...] | None
# {"all_gather tp": (arrays that travel, bytes that one device sends)}; thirds of bytes are exact in formulas only
Traffic = dict[str, tuple[int, int | Fraction]]


@dataclass(frozen=True)
class LayerCase:
    """One layer on one mesh.

    Attributes:
      name: The layer's name in the registry; `label` says which case it is.
      fn: From the axes to the body: `lambda axes: lambda x, w: nn.column_linear(x, w, tp=axes["tp"])`.
      ins: The layouts of the arguments, with placeholder axes: `"b/dp s/sp d"`.
      outs: The layout of the result, or several.
      shapes: Global sizes of the names in the layouts.
      mesh: The sizes of the mesh axes.
      axes: What each placeholder stands for: a mesh axis, several, or None.
      reference: The same on whole arrays in plain jnp or NumPy, float32, written independently.
      forward: The formula, the collectives of the layer alone.
      backward: What a `jax.vjp` with a cotangent in the layout of the result adds to them.
      make: `make(rng, shapes) -> arguments`; absent, normal numbers. float32 is cast to the case's dtype.
      dtype: Of the arguments; `dtypes` are those that the sampler chooses from.
      out_dtype: Of the result; absent, `dtype`.
      tolerance: Relative to the largest number of each array; absent, by dtype.
      build: `build(case, mesh)`, a function of the same arguments with the same results on every mesh, where those of
        the layer itself depend on the sizes of axes; absent, the layer.
      label: Which variant of the layer it is; each is drawn before another of the same.
    """

    name: str
    fn: Callable[[Mapping[str, Axes]], Callable[..., Any]]
    ins: tuple[str, ...]
    outs: str | tuple[str, ...]
    shapes: Mapping[str, int]
    mesh: Mapping[str, int]
    axes: Mapping[str, Axes]
    reference: Callable[..., Any]
    forward: Callable[[LayerCase], Traffic]
    backward: Callable[[LayerCase], Traffic]
    make: Callable[[np.random.Generator, Sequence[tuple[int, ...]]], Sequence[Any]] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    dtype: str = "float32"
    out_dtype: str | None = None
    tolerance: float | None = None
    build: Callable[[LayerCase, Any], Callable[..., Any]] | None = None
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        mesh = "x".join(f"{axis}{n}" for axis, n in self.mesh.items())
        axes = ",".join(f"{k}={'/'.join(v) if isinstance(v, tuple) else v}" for k, v in self.axes.items() if v != k)
        return "-".join(part for part in (self.label, mesh, axes, self.dtype) if part)

    # --- what formulas are made of

    def n(self, placeholder: str) -> int:
        """The number of devices along a placeholder's axes."""
        return math.prod(self.mesh[axis] for axis in self._axes(placeholder))

    def block(self, layout: str, dtype: str | None = None) -> int:
        """Bytes of one device's block of an array of this layout.

        The CPU compiler makes collectives of bfloat16 in float32, so there an element counts 4 bytes.
        """
        bound = self.bound(layout)
        width = max(4, np.dtype(dtype or self.dtype).itemsize)
        elements = math.prod(self.shape(layout)) // math.prod(self.mesh[axis] for axis in bound.axes)
        return width * elements

    def shape(self, layout: str) -> tuple[int, ...]:
        """The global shape of an array of this layout."""
        return tuple(
            math.prod(atom.size or self.shapes[atom.name] for atom in dim.atoms) for dim in Layout(layout).dims
        )

    def bound(self, layout: str) -> Layout:
        """The layout with the mesh axes of this case."""
        found = Layout(layout)
        return found.bind(**{name: axes for name, axes in self.axes.items() if name in found.axis_names})

    def _axes(self, *placeholders: str) -> tuple[str, ...]:
        named = {}
        for one in placeholders:
            axes = self.axes.get(one, one)
            named |= dict.fromkeys((axes,) if isinstance(axes, str) else axes or ())
        return tuple(axis for axis in self.mesh if axis in named)

    def traffic(
        self, kind: str, over: str | Sequence[str], layout: str, times: int = 1, dtype: str | None = None
    ) -> Traffic:
        """The formula's entry for `times` collectives of one array each.

        `layout` is that of the larger side: the result of an all_gather, the operand of a psum_scatter, psum,
        all_to_all or ppermute.
        """
        axes = self._axes(*((over,) if isinstance(over, str) else over))
        n = math.prod(self.mesh[axis] for axis in axes)
        if n == 1 or times == 0:
            return {}
        axes = tuple(axis for axis in axes if self.mesh[axis] > 1)
        size = self.block(layout, dtype)
        sent = size if kind == "ppermute" else Fraction((2 if kind == "psum" else 1) * size * (n - 1), n)
        return {f"{kind} {','.join(axes)}": (times, times * sent)}


def total(*parts: Traffic) -> Traffic:
    """The sum of formulas."""
    out: Traffic = {}
    for part in parts:
        for key, (count, size) in part.items():
            before = out.get(key, (0, 0))
            out[key] = (before[0] + count, before[1] + size)
    return dict(sorted(out.items()))


def measured(program: Any, mesh: Any) -> Traffic:
    """What a compiled program sends, whatever the compiler combined; axes of one device are left out."""
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    report = collectives(program, mesh=mesh)
    assert report.exact and all(one.whole for one in report), report
    parts = []
    for one in report:
        arrays = 1 if one.kind == "all_to_all" else len(one.operands)  # an all_to_all may have an operand per block
        key = f"{one.kind} {','.join(axis for axis in one.axes if sizes[axis] > 1)}"
        parts.append({key: (one.count * arrays, one.total_bytes)})
    return total(*parts)


# -------------------- the registry


CASES: dict[str, tuple[Callable[[], Iterable[LayerCase]], int]] = {}


def cases(name: str, draw: int = FULL_CASES) -> Callable[..., Any]:
    """Register a layer: a function without arguments to all of its cases, of which a run draws `draw`.

    SPMD_TEST_CASES scales the number, as for all sampled tests, and SPMD_TEST_SEED draws others.
    """

    def register(make: Callable[[], Iterable[LayerCase]]) -> Callable[[], Iterable[LayerCase]]:
        assert name not in CASES, f"{name} is registered twice"
        CASES[name] = make, draw
        return make

    return register


def drawn(names: Iterable[str] | None = None) -> list[LayerCase]:
    """The cases of one run, of all layers or of these: by default one of each, with one of its dtypes."""
    found = []
    for name in CASES if names is None else names:
        make, draw = CASES[name]
        every = list(make())
        assert every and all(case.name == name for case in every), name
        count = case_count() if case_count() >= FULL_CASES else case_count() / 2  # a case is three modes, each compiled
        number = max(1, round(draw * count / FULL_CASES))
        found += [
            replace(case, dtype=case.dtypes[k % len(case.dtypes)])
            for k, case in enumerate(_chosen(every, number), first_seed())
        ]
    return found


def _chosen(every: list[LayerCase], number: int) -> Iterator[LayerCase]:
    """`number` cases in random order; each next one shows as much as it can of what has not been seen yet."""
    order = [
        every[i]
        for i in np.random.default_rng(zlib.crc32(every[0].name.encode()) + first_seed()).permutation(len(every))
    ]
    seen: set[Any] = set()
    for _ in range(min(number, len(order))):
        new = [sum(weight for what, weight in _features(case).items() if what not in seen) for case in order]
        case = order.pop(max(range(len(order)), key=new.__getitem__))
        seen |= _features(case).keys()
        yield case


def _features(case: LayerCase) -> dict[Any, int]:
    """What can go wrong by itself: a variant, and how many devices each pair of roles has; one device counts least."""
    parts = [(role, case.n(role) if axes else None, isinstance(axes, tuple)) for role, axes in case.axes.items()]
    weight = lambda n: 2 if n is None else 1 if n == 1 else 3
    pairs = itertools.combinations_with_replacement(parts, 2)
    return {case.label: 50} | {frozenset(pair): weight(pair[0][1]) * weight(pair[1][1]) for pair in pairs}


def placements(
    *roles: str, shared: Sequence[tuple[str, str]] = (), limit: int = 8
) -> Iterator[tuple[dict[str, int], dict[str, Axes]]]:
    """Every mesh of axes of sizes 1 to 4, at most 8 devices, with what each role is bound to.

    A role is bound to the mesh axis of its name, to two mesh axes at once (only the last role, on meshes that have
    room) or to None; `shared=[("sp", "tp")]` says that a role, where it is not None, lies on the axes of another.
    """
    own = [role for role in roles if role not in dict(shared)]
    for present in itertools.product((True, False), repeat=len(own)):
        used = [role for role, there in zip(own, present, strict=True) if there]
        for sizes in itertools.product((1, 2, 3, 4), repeat=len(used)):
            mesh = dict(zip(used, sizes, strict=True)) or {"x": 2}
            if not 1 < math.prod(mesh.values()) <= limit:
                continue
            axes: dict[str, Axes] = {role: role if role in used else None for role in own}
            variants = [(mesh, axes)]
            if used and mesh[used[-1]] == 4:
                last = used[-1]
                split = {k: v for k, v in mesh.items() if k != last} | {"x": 2, "y": 2}
                variants.append((split, axes | {last: ("x", "y")}))
            for one, bound in variants:
                for on in itertools.product((True, False), repeat=len(shared)):
                    extra = {a: bound[b] if yes else None for (a, b), yes in zip(shared, on, strict=True)}
                    if all(extra[a] is not None or not yes for (a, _), yes in zip(shared, on, strict=True)):
                        yield one, {**bound, **extra}


def fit(mesh: Mapping[str, int], axes: Mapping[str, Axes], **dims: tuple[int, ...]) -> dict[str, int]:
    """Sizes from `b=(3, "dp", "fsdp")`: 3 in each block, times the devices along these roles.

    Blocks of odd and distinct sizes hide no mistake.
    """

    def devices(role: str) -> int:
        bound = axes[role]
        return math.prod(mesh[axis] for axis in ((bound,) if isinstance(bound, str) else bound or ()))

    return {name: block * math.prod(map(devices, roles)) for name, (block, *roles) in dims.items()}


# -------------------- the checks


def check(case: LayerCase) -> None:
    """Everything that is asked of a layer; by default gradients inside of the kernel of a third of the cases."""
    args = arguments(case)
    cotangents = cotangents_of(case)
    truth = truth_of(case, args, cotangents)
    mesh = spmd.make_mesh(**case.mesh)
    kernel = kernel_of(case, mesh)
    lowered = jax.jit(pulled(kernel.explicit), **_shardings(case, mesh, args)).lower(args, cotangents)
    compiled = lowered.compile()
    placed = spmd.shard(list(args), [*map(case.bound, case.ins)], mesh=mesh)
    _close(case, "explicit", compiled(tuple(placed), _placed(case, mesh, cotangents)), truth)
    for mode in MODES[1:]:
        _close(case, mode, jax.jit(pulled(getattr(kernel, mode)))(args, cotangents), truth)
    if case_count() >= FULL_CASES or in_slice(str(case), first_seed(), 3):
        check_inside(case, mesh, args, cotangents, truth)
    forward = total(case.forward(case))
    alone = jax.jit(kernel.explicit).lower(*placed).compile()
    _agree("forward", measured(alone, mesh), forward)
    _agree("forward and backward", measured(compiled, mesh), total(forward, case.backward(case)))


def check_inside(case: LayerCase, mesh: Any, args: Any, cotangents: Any, truth: Any) -> None:
    """`spmd.value_and_grad` in the kernel, of the sum of all results times their cotangents."""
    moving = _moving(args)
    outs = _outs(case)
    body = case.fn(case.axes)

    def inside(*given: Any) -> Any:
        own, weights = given[: len(args)], given[len(args) :]

        def loss(*floats: Any) -> Any:
            results = body(*_merged(own, moving, floats))
            results = [results] if isinstance(case.outs, str) else results
            weighted = [y.astype(jnp.float32) * w for y, w in zip(results, weights, strict=True)]
            # scalars are complete already
            return sum(
                y if layout.is_scalar else spmd.reduce(y, f"{layout} -> scalar")
                for y, layout in zip(weighted, outs, strict=True)
            )

        return spmd.value_and_grad(loss, tuple(range(len(moving))))(*(own[i] for i in moving))

    ins = [*map(case.bound, case.ins)]
    kernel = spmd.kernel(in_layouts=(*ins, *outs), out_layouts=("scalar", tuple(ins[i] for i in moving)), mesh=mesh)
    values, gradients = truth
    value = sum(
        float(np.sum(np.asarray(y) * np.asarray(w, np.float32))) for y, w in zip(values, cotangents, strict=True)
    )
    scale = sum(
        float(np.sum(np.abs(np.asarray(y) * np.asarray(w, np.float32))))
        for y, w in zip(values, cotangents, strict=True)
    )
    wide = [w.astype(jnp.float32) for w in cotangents]
    mode = MODES[zlib.crc32(str(case).encode()) % 4 % 3]  # a kernel's own modes are compared elsewhere
    found, grads = jax.jit(getattr(kernel(inside), mode))(*args, *wide)
    assert abs(float(found) - value) <= tolerance_of(case) * (scale + 1e-3), f"{mode}, inside: {found} for {value}"
    for i, a, b in zip(moving, grads, gradients, strict=True):
        _near(case, a, b, f"{mode}, inside: gradient {i}")


def check_nested(case: LayerCase) -> None:
    """The layer under `vmap` in a rematerialised scan, on four sets of arguments: each as if it were alone."""
    mesh, moving, one = spmd.make_mesh(**case.mesh), _moving(arguments(case)), isinstance(case.outs, str)
    args = [_four(x) for x in arguments(case)]
    rows = lambda fn: jax.vmap(lambda *x: (fn(*x),) if one else tuple(fn(*x)))
    rest = [layout.prepend("turn row") for layout in _outs(case)]

    @spmd.kernel(in_layouts=[case.bound(text).prepend("turn row") for text in case.ins], out_layouts=rest, mesh=mesh)
    def nested(*args: Any) -> Any:
        turn = jax.checkpoint(rows(case.fn(case.axes)))
        return list(jax.lax.scan(lambda _, x: (None, turn(*x)), None, args)[1])

    def both(run: Callable[..., Any], floats: Any, cotangents: Any) -> Any:
        values, pull = jax.vjp(lambda *x: tuple(run(*_merged(args, moving, x))), *floats)
        return values, pull(tuple(c.astype(y.dtype) for c, y in zip(cotangents, values, strict=True)))

    given = [args[i] for i in moving], tuple(map(_four, cotangents_of(case)))
    truth = jax.jit(functools.partial(both, jax.vmap(rows(case.reference))))(*map(_wide, given))
    _close(case, "nested", jax.jit(functools.partial(both, nested))(*given), truth)


def _wide(arrays: Iterable[Any]) -> tuple[Any, ...]:
    """The same in float32, where they are floating."""
    return tuple(x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays)


def _four(x: Any) -> Any:
    scales = (1, -1, 0.5, 0.75) if jnp.issubdtype(x.dtype, jnp.inexact) else (None,) * 4
    return jnp.stack([x if scale is None else x * scale for scale in scales]).reshape(2, 2, *x.shape)


def check_any_mesh(case: LayerCase) -> None:
    """Equal results and gradients on the mesh of the case, on one device, and where one axis alone has its size."""
    mesh, build = spmd.make_mesh(**case.mesh), case.build
    program = kernel_of(case, mesh) if build is None else functools.partial(build, case)
    rtol = None if case.tolerance is None else {case.dtype: case.tolerance}
    assert_same_on_any_mesh(program, *arguments(case), mesh=mesh, rtol=rtol)


def in_order(
    placement: str, role: str, *, into: bool = True, out: bool = True
) -> Callable[[LayerCase, Any], Callable[..., Any]]:
    """A `build` for layers whose arguments (`into`) and result (`out`) have their tokens placed: here these are in their
    order. The dimensions of tokens are those that `role` divides.
    """

    def build(case: LayerCase, mesh: Any) -> Callable[..., Any]:
        kernel, parts = kernel_of(case, mesh), math.prod(mesh.shape[axis] for axis in case._axes(role))

        def moved(x: Any, layout: str, back: bool) -> Any:
            for axis, dim in enumerate(Layout(layout).dims):
                if role in dim.axes:
                    order = spmd.parallel.sequence_order(x.shape[axis], parts, placement)
                    x = jnp.take(x, np.argsort(order) if back else order, axis)
            return x

        def program(*args: Any) -> Any:
            if into:
                args = tuple(moved(x, layout, back=False) for x, layout in zip(args, case.ins, strict=True))
            return moved(kernel(*args), case.outs, back=True) if out else kernel(*args)

        return program

    return build


def arguments(case: LayerCase) -> tuple[Any, ...]:
    """The arguments, the same for the same case."""
    rng = np.random.default_rng(7)
    shapes = [case.shape(layout) for layout in case.ins]
    made = (
        [rng.normal(size=shape).astype(np.float32) for shape in shapes] if case.make is None else case.make(rng, shapes)
    )
    cast = lambda x: jnp.asarray(x.astype(case.dtype) if getattr(x, "dtype", None) == np.float32 else x)
    return tuple(map(cast, made))


def cotangents_of(case: LayerCase) -> tuple[Any, ...]:
    rng = np.random.default_rng(8)
    layouts = (case.outs,) if isinstance(case.outs, str) else case.outs
    dtype = np.dtype(case.out_dtype or case.dtype)  # converted in NumPy, which compiles nothing
    return tuple(jnp.asarray(rng.normal(size=case.shape(layout)).astype(dtype)) for layout in layouts)


def truth_of(case: LayerCase, args: Any, cotangents: Any) -> tuple[Any, Any]:
    """Values and gradients of the reference, in float32 whatever the dtype."""
    wide = _wide(args)
    moving = _moving(args)

    def of(*floats: Any) -> Any:
        results = case.reference(*_merged(wide, moving, floats))
        return (results,) if isinstance(case.outs, str) else tuple(results)

    @jax.jit
    def both(floats: Any, cotangents: Any) -> Any:
        values, pull = jax.vjp(of, *floats)
        return values, pull(tuple(c.astype(y.dtype) for c, y in zip(cotangents, values, strict=True)))

    return both([wide[i] for i in moving], cotangents)


def kernel_of(case: LayerCase, mesh: Any) -> Any:
    outs = _outs(case)
    one = isinstance(case.outs, str)
    return spmd.kernel(
        in_layouts=tuple(map(case.bound, case.ins)), out_layouts=outs[0] if one else tuple(outs), mesh=mesh
    )(case.fn(case.axes))


def pulled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Values and gradients as one function of arguments and cotangents."""

    def both(args: Any, cotangents: Any) -> Any:
        moving = _moving(args)

        def of(*floats: Any) -> Any:
            found = kernel(*_merged(args, moving, floats))
            return found if isinstance(found, tuple) else (found,)

        values, pull = jax.vjp(of, *(args[i] for i in moving))
        return values, pull(tuple(c.astype(y.dtype) for c, y in zip(cotangents, values, strict=True)))

    return both


def tolerance_of(case: LayerCase) -> float:
    return TOLERANCE[case.dtype] if case.tolerance is None else case.tolerance


def _agree(what: str, found: Traffic, formula: Traffic) -> None:
    """Equal counts and bytes; what is measured is rounded to whole bytes, collective by collective."""
    text = f"{what}: compiled {found}, formula { {k: (n, float(size)) for k, (n, size) in formula.items()} }"
    assert found.keys() == formula.keys(), text
    for key, (count, size) in formula.items():
        assert found[key][0] == count and 2 * abs(found[key][1] - size) <= count, text


def _moving(args: Sequence[Any]) -> list[int]:
    return [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _merged(args: Sequence[Any], moving: Sequence[int], floats: Sequence[Any]) -> list[Any]:
    given = dict(zip(moving, floats, strict=True))
    return [given.get(i, x) for i, x in enumerate(args)]


def _outs(case: LayerCase) -> list[Layout]:
    return [*map(case.bound, (case.outs,) if isinstance(case.outs, str) else case.outs)]


def _shardings(case: LayerCase, mesh: Any, args: Any) -> dict[str, Any]:
    ins = [case.bound(layout).sharding(mesh) for layout in case.ins]
    outs = tuple(layout.sharding(mesh) for layout in _outs(case))
    return {"in_shardings": (tuple(ins), outs), "out_shardings": (outs, tuple(ins[i] for i in _moving(args)))}


def _placed(case: LayerCase, mesh: Any, cotangents: Any) -> Any:
    return tuple(jax.device_put(c, layout.sharding(mesh)) for c, layout in zip(cotangents, _outs(case), strict=True))


def _close(case: LayerCase, where: str, found: Any, truth: Any) -> None:
    values, gradients = found
    for i, (a, b) in enumerate(zip(values, truth[0], strict=True)):
        assert a.dtype == np.dtype(case.out_dtype or case.dtype), f"{where}: result {i} is {a.dtype}"
        _near(case, a, b, f"{where}: result {i}")
    for i, (a, b) in enumerate(zip(gradients, truth[1], strict=True)):
        _near(case, a, b, f"{where}: gradient {i}")


def _near(case: LayerCase, found: Any, truth: Any, what: str) -> None:
    a, b = (np.asarray(x, np.float32) for x in (found, truth))
    assert a.shape == b.shape, f"{what}: {a.shape} for {b.shape}"
    error, scale = np.max(np.abs(a - b), initial=0), np.max(np.abs(b), initial=0) + 1e-3
    assert error <= tolerance_of(case) * scale, f"{what}: off by {error / scale:.1e} of its largest number"


@functools.cache
def register_all() -> None:
    """Import every `cases_*.py` of the rooms."""
    import importlib
    from pathlib import Path

    rooms = Path(__file__).parent
    for path in sorted(rooms.glob("*/cases_*.py")):
        importlib.import_module(f"tests.{path.parent.name}.{path.stem}")
