"""What differs between JAX versions, in one file.

Nothing else in `spmd` reads an abstract value's manual axis type or registers a primitive, so that a new
JAX release is absorbed here.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AxisType
from jaxlib.mlir import ir, passmanager

_JAX = str(Path(jax.__file__).parent) + os.sep

# What `jax.jit(inline=...)` takes for a function whose equations are to stand in the caller's jaxpr.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True

# Whether the compilers let a branch write its result into a carry of the loop around it.
BRANCHES_WRITE_IN_PLACE = jax.__version_info__ >= (0, 12)


def installed(package: str) -> str | None:
    """The version of a package that is installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def in_jax(filename: str) -> bool:
    """Return whether a line of a traceback is JAX's own."""
    return filename.startswith(_JAX)


# The files in which JAX traces, lowers and compiles.
_COMPILING = tuple(f"{_JAX}_src{os.sep}{name}" for name in ("compiler.py", *(
    f"interpreters{os.sep}{one}.py" for one in ("partial_eval", "mlir"))))  # fmt: skip


def compiles(filename: str) -> bool:
    """Return whether JAX makes a program in the functions of a file, and runs none."""
    return filename in _COMPILING


def coordination() -> Any:
    """The client of the service by which JAX's processes found each other: keys and values for all. None without one.

    JAX has no public name for it. Its own `multihost_utils` holds the module that does.
    """
    import jax.experimental.multihost_utils as multihost

    return getattr(getattr(getattr(multihost, "distributed", None), "global_state", None), "client", None)


def compiled_programs() -> list[str]:
    """The text of each compiled program that this process can run. Of what a device runs, no backend tells more."""
    found = jax.local_devices()[0].client.live_executables()
    return [module.to_string() for one in found for module in one.hlo_modules()]


def manual_axes() -> tuple[str, ...]:
    """The mesh axes that are manual where the caller runs. The enclosing `shard_map`s make them so."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def manual_sizes(axes: Sequence[str]) -> tuple[int, ...]:
    """The sizes of mesh axes that are manual. It is 0 for an axis that is not (`jax.vmap(axis_name=...)`)."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(mesh.shape[a] if a in mesh.manual_axes else 0 for a in axes)


def _device_kind() -> str:
    """Return the kind of the devices of the mesh around; empty without a mesh, or if they are not known yet."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return "" if device is None else device.device_kind


def on_cpu() -> bool:
    """Return whether the mesh around the caller is one of CPUs, or of devices that are not known yet."""
    return _device_kind() in ("", "cpu")


def runs_on_gpu() -> bool:
    """Return whether the mesh around the caller is one of GPUs; without a mesh, whether JAX has a GPU."""
    if not jax.sharding.get_abstract_mesh().shape:
        return jax.default_backend() == "gpu"
    return not on_cpu() and not _device_kind().startswith("TPU")


def _axes_of(aval: Any, how: str) -> frozenset[str]:
    return frozenset(getattr(getattr(aval, "manual_axis_type", None), how, ()))


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes along which JAX's own type of `x` is varying (`{V:...}`)."""
    return _axes_of(jax.typeof(x), "varying")


def varying_type(aval: Any) -> frozenset[str]:
    """Mesh axes along which a type, as a variable of a jaxpr has one, is varying."""
    return _axes_of(aval, "varying")


def unreduced_type(aval: Any) -> frozenset[str]:
    """Mesh axes along which a type, as a variable of a jaxpr has one, is unreduced."""
    return _axes_of(aval, "unreduced")


def type_mesh(atom: Any) -> Any:
    """The mesh in the type of a variable, or None."""
    mesh = getattr(getattr(atom.aval, "sharding", None), "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def is_typed(atom: Any) -> bool:
    """Return whether the type of a variable says how it lies along some axis that is Explicit."""
    mesh = type_mesh(atom)
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def partitions(spec: jax.sharding.PartitionSpec, rank: int = 0) -> tuple[Any, ...]:
    """The entries of a spec, and None for the dimensions up to `rank` that it leaves out."""
    # JAX 0.10.0 does not have the attribute, and later versions do not iterate over a spec with partial sums.
    entries = spec.partitions if hasattr(spec, "partitions") else tuple(spec)
    return (*entries, *[None] * (rank - len(entries)))


def unreduced_spec(spec: jax.sharding.PartitionSpec) -> frozenset[str]:
    """The axes along which a spec says that an array is a partial sum."""
    return frozenset(getattr(spec, "unreduced", ()) or ())


def unreduced_axes(x: Any) -> frozenset[str]:
    """Mesh axes along which JAX's own type of `x` is unreduced (`{U:...}`)."""
    return _axes_of(jax.typeof(x), "unreduced")


def reduced_axes(x: Any) -> frozenset[str]:
    """Mesh axes along which JAX's own type of `x` is reduced (`{R:...}`)."""
    return _axes_of(jax.typeof(x), "reduced")


def with_varying(aval: Any, axes: Sequence[str], shape: tuple[int, ...]) -> Any:
    """The abstract value `aval` with another shape, varying on `axes` too."""
    kind = aval.manual_axis_type
    placed: dict[str, Any] = {}
    if aval.sharding.mesh.empty:  # what came out of a callback knows no mesh, and could not vary on any axis
        here = jax.sharding.get_abstract_mesh()
        placed["sharding"] = jax.sharding.NamedSharding(here, jax.sharding.PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, manual_axis_type=kind.update(varying=kind.varying | set(axes)), **placed)


def without_varying(aval: Any, axes: Sequence[str]) -> Any:
    """The abstract value `aval`, no longer varying on `axes`."""
    kind = aval.manual_axis_type
    return aval.update(manual_axis_type=kind.update(varying=kind.varying - set(axes)))


def as_reduced(aval: Any, axes: Sequence[str]) -> Any:
    """The abstract value `aval`, varying on `axes`, as JAX's reduced there."""
    kind = aval.manual_axis_type
    return aval.update(manual_axis_type=kind.update(varying=kind.varying - set(axes), reduced=kind.reduced | set(axes)))


def as_terms(aval: Any, axes: Sequence[str]) -> Any:
    """The abstract value `aval`, unreduced on `axes`, as varying there."""
    kind = aval.manual_axis_type
    changed: dict[str, Any] = {"varying": kind.varying | set(axes), "unreduced": kind.unreduced - set(axes)}
    if not changed["unreduced"] and hasattr(kind, "unreduced_kind"):  # newer JAX says how the terms are put together
        changed["unreduced_kind"] = None
    return aval.update(manual_axis_type=kind.update(**changed))


def pvary(x: Any, axes: Sequence[str]) -> Any:
    """`x` typed varying along `axes`: no communication, and a psum as its transpose, nothing along axes of size 1."""
    if not axes:
        return x
    new = set(axes).intersection(manual_axes()) - varying_axes(x) - unreduced_axes(x)
    if not new:
        return x
    missing = tuple(a for a in axes if a in new)
    if reduced := tuple(filter(reduced_axes(x).__contains__, missing)):
        x = jax.lax.pcast(x, reduced, to="varying")
        missing = tuple(a for a in missing if a not in reduced)
    unit = tuple(a for a, n in zip(missing, manual_sizes(missing), strict=True) if n == 1)
    wide = tuple(a for a in missing if a not in unit)
    x = jax.lax.pcast(x, wide, to="varying") if wide else x
    return _ALONE["pvary"].bind(x, axes=unit, all_gather_dimension=0, tiled=True) if unit else x


def to_unreduced(x: Any, axes: Sequence[str]) -> Any:
    """`x`, varying along `axes`, retyped as JAX's unreduced: no communication."""
    missing = tuple(a for a in axes if a not in unreduced_axes(x))
    return jax.lax.pcast(pvary(x, missing), missing, to="unreduced") if missing else x


def row_major(x: Any) -> Any:
    """The same array, its last dimension contiguous in memory on CPUs.

    XLA there runs Fourier transforms of such arrays only, and its layout assignment (jax 0.10 and 0.12) does not know:
    where a gather follows, it may choose another order, and the program fails.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if jax.default_backend() == "cpu" else x


def apart(x: Any) -> Any:
    """The same array, which XLA on CPUs does not take for a part of what it was made from.

    XLA there divides an all-to-all into pieces. A piece of what another all-to-all brought in is a piece of that one,
    and gets another memory layout than its neighbours: the program fails (jax 0.12). A gradient has the barrier on the
    other side, which is between the two all-to-alls as well.
    """
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x


def primal(x: Any) -> Any:
    """The value that the tracer of a gradient holds beside its tangent; None for anything else."""
    return getattr(x, "primal", None) if isinstance(x, jax.core.Tracer) else None


def concrete(x: Any) -> Any:
    """The array that the tracer of a gradient stands for, where it is taken outside jit; else `x`."""
    while (inner := primal(x)) is not None:
        x = inner
    return x


def mapped(x: Any) -> tuple[Any, tuple[int, ...]]:
    """Return what the tracers of `jax.vmap` and of gradients around `x` stand for, with the dimensions that are
    mapped."""
    dims: list[int] = []
    x = concrete(x)
    while isinstance(x, jax.core.Tracer) and isinstance(dim := getattr(x, "batch_dim", None), int):
        dims = [*(d + (d >= dim) for d in dims), dim]
        x = concrete(x.val)  # type: ignore[attr-defined]
    return x, tuple(dims)


def told_vmap(x: Any) -> bool:
    """Return whether a `jax.vmap` around `x` was told mesh axes, by `spmd_axis_name=`."""
    found = False
    x = concrete(x)
    while isinstance(x, jax.core.Tracer) and isinstance(getattr(x, "batch_dim", None), int):
        _asked.bind(x, answer=(answer := _Answer()))
        found, x = found or answer.told, concrete(x.val)  # type: ignore[attr-defined]
    return found


class _Answer:
    """What the batching rule of `_asked` writes down."""

    told = False


def _of_vmap(axis_data: Any, args: Any, dims: Any, *, answer: _Answer) -> Any:
    if dims[0] is None:  # another vmap, further out, maps it
        return _asked.bind(args[0], answer=answer), None
    answer.told = bool(axis_data.spmd_name)
    return args[0], dims[0]


_asked = Primitive("spmd_asked")  # its batching rule alone is told what a vmap knows
batching.fancy_primitive_batchers[_asked] = _of_vmap


def deleted(x: Any) -> bool:
    """Return whether an array, or that of a gradient's tracer, has lost its buffer."""
    x = concrete(x)
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()


def identity_primitive(name: str, *, lasting: bool = False) -> Primitive:
    """A primitive that is the identity in its first operand and leaves only a note in the jaxpr; others tell more.

    It lowers to nothing, is transparent to vmap and transposition, and marks primal values only: what it
    says about a value is not said about the value's tangent. The dimensions that `vmap` adds it lists as `mapped`.
    A `lasting` one stands at tangents too, and so its other operands outlive a gradient that needs nothing of them.
    """
    note = Primitive(name)
    note.def_impl(lambda x, *_, **__: x)
    note.def_abstract_eval(lambda aval, *_, **__: aval)
    ad.primitive_jvps[note] = lambda primals, tangents, **params: (
        note.bind(*primals, **params),
        note.bind(tangents[0], *primals[1:], **params)
        if lasting and not isinstance(tangents[0], ad.Zero)
        else tangents[0],
    )
    ad.primitive_transposes[note] = lambda cotangent, x, *rest, **_: (cotangent, *(None for _ in rest))
    batching.primitive_batchers[note] = lambda args, dims, **params: (
        note.bind(*args, **params | {"mapped": _widened(params.get("mapped", ()), dims[0])}),
        dims[0],
    )
    mlir.register_lowering(note, lambda ctx, x, *_, **__: [x])
    return note


def _widened(mapped: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    """The dimensions of a value that `vmap` added, once more; none where it added one to another operand only."""
    return mapped if dim is None else (*(d + (d >= dim) for d in mapped), dim)


def linear_primitive(
    name: str,
    *,
    abstract: Callable[..., Any],
    run: Callable[..., Any],
    transpose: Callable[..., Any],
    batch: Callable[..., Any] | None = None,
    along: str | None = None,
) -> Primitive:
    """A primitive linear in its first operand, the others being integer indices.

    Args:
      name: The name that jaxprs show.
      abstract: Avals and parameters to the output aval.
      run: What it computes, in `jax.lax`.
      transpose: The cotangent and parameters to the cotangent of the first operand.
      batch: `(args, dims, **params) -> (output, dim)`, as a batching rule. By default the new dimension stays in place.
      along: The parameter that counts a dimension, which then is one further behind.
    """
    op = Primitive(name)
    op.def_impl(run)
    op.def_abstract_eval(abstract)
    mlir.register_lowering(op, mlir.lower_fun(run, multiple_results=False))

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = op.bind(*primals, **params)
        if isinstance(tangents[0], ad.Zero):
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, op.bind(tangents[0], *primals[1:], **params)

    def transposed(cotangent: Any, x: Any, *rest: Any, **params: Any) -> Any:
        nothing = (None,) * len(rest)
        if isinstance(cotangent, ad.Zero):
            return (ad.Zero(x.aval), *nothing)
        return (transpose(cotangent, **params), *nothing)

    def batched(args: Any, dims: Any, **params: Any) -> Any:
        if along is not None:
            params[along] += dims[0] <= params[along]
        return op.bind(*args, **params), dims[0]

    ad.primitive_jvps[op] = jvp
    ad.primitive_transposes[op] = transposed
    batching.primitive_batchers[op] = batch or batched
    return op


# --- collectives of one device ---------------------------------------------------------------------------------

# Along an axis of size 1 nothing travels, but XLA does not always see that: for CPUs it keeps all-reduces and
# reduce-scatters of one device, with the copies around them. These primitives have the types of JAX's and compile to
# nothing. They also have their names, for the checks and `explain` go by names, whatever the sizes of axes.
_EQUAL = ("psum_invariant", "pmax", "pmin", "all_gather_invariant")
_TRANSPOSES = {"pvary": "psum_invariant", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


def of_one(axes: Sequence[str]) -> bool:
    """Return whether these are mesh axes along which there is one device."""
    return set(manual_sizes(axes)) == {1}


def alone(name: str, x: Any, axes: tuple[str, ...], dim: int = 0) -> Any:
    """The collective that JAX calls `name` along axes of size 1; `dim` is that of an all_gather or reduce_scatter."""
    return _ALONE[name].bind(pvary(x, axes), axes=axes, all_gather_dimension=dim, tiled=True)


def _alone_type(name: str, x: Any, *, axes: tuple[str, ...], **_: Any) -> Any:
    if name == "pvary":
        return with_varying(x, axes, x.shape)
    return without_varying(x, axes) if name in _EQUAL else x


def _alone_transpose(name: str, cotangent: Any, *, axes: tuple[str, ...], all_gather_dimension: int, **_: Any) -> Any:
    if name in _EQUAL:
        return pvary(cotangent, axes)
    return alone(_TRANSPOSES.get(name, name), cotangent, axes, all_gather_dimension)


_ALONE = {
    name: linear_primitive(
        name,
        abstract=functools.partial(_alone_type, name),
        run=lambda x, **_: x,
        transpose=functools.partial(_alone_transpose, name),
        along="all_gather_dimension",
    )
    for name in (*_EQUAL, *_TRANSPOSES, "all_to_all")
}


# --- jaxprs ----------------------------------------------------------------------------------------------------


def live_jaxpr(jaxpr: Any) -> Any:
    """An open jaxpr without the equations that no output needs, in its loops and calls too."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def made_manual(eqn: Any) -> dict[str, int]:
    """The axes that a `shard_map` makes manual, with their sizes."""
    mesh = eqn.params["mesh"]
    name = "newly_manual_axes" if "newly_manual_axes" in eqn.params else "manual_axes"  # of JAX 0.10.0
    return {axis: n for axis, n in mesh.shape.items() if axis in (eqn.params[name] or mesh.axis_names)}


def in_order(arrays: Sequence[Any]) -> list[Any]:
    """The same arrays behind an optimization barrier: all are computed before any of them is used.

    JAX 0.10 types the results of a barrier as differing along all axes of any of them, and its compiler for CPUs leaves
    barriers out. Where a type would change, the arrays are given back as they are.
    """
    made = jax.lax.optimization_barrier(list(arrays))
    alike = [varying_axes(x) == varying_axes(y) for x, y in zip(arrays, made, strict=True)]
    return list(made) if all(alike) else list(arrays)


def name_stack(eqn: Any) -> tuple[tuple[str, str], ...]:
    """The names around an equation, outermost first: `("Scope", text)` of `jax.named_scope`, `("Transform", "jvp")`."""
    return tuple((type(entry).__name__, entry.name) for entry in eqn.source_info.name_stack.stack)


# How JAX names the operations of a backward pass, in HLO too. `jax.linear_transpose` alone does not make one.
BACKWARD = "transpose(jvp("


def is_backward(names: Iterable[tuple[str, str]]) -> bool:
    """Return whether names around an equation, as `name_stack` gives them, say that it belongs to a backward pass."""
    return _transposes(names) > 0


def _transposes(names: Iterable[tuple[str, str]]) -> int:
    pairs = itertools.pairwise(names)
    return sum(pair == (("Transform", "transpose"), ("Transform", "jvp")) for pair in pairs)


def is_of_rule(eqns: Iterable[Any], names: Iterable[tuple[str, str]]) -> bool:
    """Return whether a rule of `custom_vjp` made an equation of a backward pass, and JAX did not transpose it. JAX says
    of what a rule does where the function with the rule was called.

    Args:
      eqns: The equation, and those that hold it.
      names: The names around it.
    """
    binds = ([code.co_name for code, _ in call_stack(eqn) if code.co_name.startswith("process_")] for eqn in eqns)
    return _transposes(names) == 1 and any(one[:1] == ["process_custom_vjp_call"] for one in binds)


# Functions of JAX that begin a backward pass.
_DIFFERENTIATE = frozenset(("value_and_grad_f", "vjp", "_vjp", "linearize"))


def differentiates(code: Any) -> bool:
    """Return whether a call in a stack is one of JAX's that begin a backward pass."""
    return code.co_name in _DIFFERENTIATE and in_jax(code.co_filename)


def call_stack(eqn: Any) -> list[tuple[Any, tuple[int, int, int, int]]]:
    """The calls that made an equation, innermost first: each one's code, and the line and column where the expression
    begins and where it ends."""
    traceback = getattr(eqn.source_info, "traceback", None)
    if traceback is None:
        return []
    return [(code, traceback.code_addr2location(code, at)) for code, at in zip(*traceback.raw_frames(), strict=True)]


# --- Shardy ----------------------------------------------------------------------------------------------------

# Without the full version, what a sum over a divided dimension sends is missing.
_PASSES = (
    "sdy-propagation-pipeline",
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "func.func(sdy-reshard-to-collectives)",
    "func.func(sdy-populate-op-sharding-rules)",
)
# What XLA's partitioner gathers, though Shardy has a rule of it; and what no rule is known of where Shardy runs.
READS_ALL = ("stablehlo.fft",) if jax.__version_info__ < (0, 12) else ()
_NO_RULE = ("chlo.erf", "chlo.top_k") if jax.__version_info__ < (0, 12) else ("chlo.top_k",)


def propagated(lowered: Any) -> Any:
    """The module of a lowered program, changed in place by Shardy's passes: where each value lies, and each change of
    layout as a collective of its dialect."""
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        _inline(module)
        for op in operations(module.operation):
            if rule := _rule(op):
                op.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule)
        for one in _PASSES:
            passmanager.PassManager.parse(f"builtin.module({one})").run(module.operation)
    return module


def _inline(module: Any) -> None:
    """Put the body of a function in the place of each call, as XLA does before it propagates. The names of the places
    of its operations begin with that of the call."""
    found = [one.operation for one in module.body.operations if operation_name(one.operation) == "func.func"]
    functions = {one.attributes["sym_name"].value: one for one in found}
    pending = set(functions)

    def opened(name: str) -> Any:
        if name in pending:
            pending.remove(name)
            for call in [one for one in operations(functions[name]) if operation_name(one) == "func.call"]:
                _replace(call, opened(call.attributes["callee"].value))
        return functions[name]

    opened("main")
    for name in set(functions) - {"main"}:
        functions[name].erase()


def _replace(call: Any, function: Any) -> None:
    """Put a copy of the body of a function in the place of a call."""
    [block] = function.clone().regions[0].blocks
    for argument, value in zip(block.arguments, call.operands, strict=True):
        argument.replace_all_uses_with(value)
    *body, last = [one.operation for one in block.operations]
    for op in body:
        op.move_before(call)
        for one in (op, *operations(op)):
            one.location = ir.Location.name(f"{location_name(call)}/{location_name(one)}")
    for result, value in zip(call.results, last.operands, strict=True):
        result.replace_all_uses_with(value)
    call.erase()


def operation_name(op: Any) -> str:
    """`stablehlo.add`."""
    return op.name if isinstance(op.name, str) else op.name.value


def location_name(op: Any) -> str:
    """The name in an operation's location; empty where it has none. Older bindings read memory that is not theirs when
    a location of another kind is asked for its name."""
    location = op.location
    named = location.is_a_name() if hasattr(location, "is_a_name") else hasattr(location, "name_str")
    return location.name_str if named else ""


def operations(op: Any) -> Iterator[Any]:
    """All operations inside of one, at any depth."""
    for region in op.regions:
        for block in region.blocks:
            for one in block.operations:
                yield one.operation
                yield from operations(one.operation)


_FACTORS = "ijklmnopqrst"


def _rule(op: Any) -> str | None:
    """The rule of an elementwise operation that Shardy does not know, because it is not of StableHLO."""
    name = operation_name(op)
    if not name.startswith("chlo.") or name in _NO_RULE:
        return None
    shape, *others = ([int(n) for n in re.findall(r"(\d+)x", str(v.type))] for v in (*op.operands, *op.results))
    if not shape or len(shape) > len(_FACTORS) or any(other != shape for other in others):
        return None
    every = f"[{', '.join(_FACTORS[: len(shape)])}]"
    sides = (", ".join([every] * len(side)) for side in (op.operands, op.results))
    sizes = ", ".join(f"{factor}={size}" for factor, size in zip(_FACTORS, shape, strict=False))
    return f"#sdy.op_sharding_rule<{'->'.join(f'({side})' for side in sides)} {{{sizes}}}, custom>"


def relaid(op: Any, number: int, axes: str, lies: str, *, behind: bool = False) -> None:
    """Let an operation take an operand gathered along these axes of each dimension, so that it lies like this. With
    `behind`, let a slice of a result take its place."""
    value = op.results[number] if behind else op.operands[number]
    name, words = ("sdy.all_slice", "slicing_axes") if behind else ("sdy.all_gather", "gathering_axes")
    uses = [(use.owner, use.operand_number) for use in value.uses] if behind else [(op, number)]
    with op.context, op.location:
        texts = {words: f"#sdy<list_of_axis_ref_lists[{axes}]>", "out_sharding": f"#sdy.sharding<{lies}>"}
        attributes = {key: ir.Attribute.parse(text) for key, text in texts.items()}
        made = ir.Operation.create(name, [value.type], [value], attributes=attributes, ip=ir.InsertionPoint(op))
    if behind:
        made.move_after(op)
    for user, at in uses:
        user.operands[at] = made.results[0]


def in_scope(eqn: Any, name: str, params: dict[str, Any]) -> Any:
    """The same equation with other parameters, inside a scope of this name."""
    about = eqn.source_info
    return eqn.replace(source_info=about.replace(name_stack=about.name_stack.extend(name)), params=params)


def with_equations(jaxpr: Any, eqns: Sequence[Any]) -> Any:
    """A jaxpr, closed or open, with other equations."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if inner is not jaxpr:
        return jaxpr.replace(jaxpr=inner.replace(eqns=list(eqns)))
    return jaxpr.replace(eqns=list(eqns))
