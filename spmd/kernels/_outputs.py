"""The results of a kernel: their structure, their specs, and what must hold before they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._lax import to_reduced
from spmd._leaves import Static, kind_of, unwrapped
from spmd._trees import matched
from spmd.checker import early, line_of
from spmd.comm._marks import mark, same_axes, tag_of
from spmd.errors import Fix, ReplicationError, SpmdError
from spmd.kernels._signature import Signature
from spmd.kernels._sizes import bind_sizes
from spmd.language import Layout, Size, verb_for
from spmd.modes import Frame


class Unequal(Exception):
    """Results that JAX types varying where their layout says equal. It becomes a ReplicationError."""

    def __init__(self, faults: list[tuple[int, tuple[str, ...]]]):
        super().__init__("varying results")
        self.faults = faults


def _is_layout(x: Any) -> bool:
    return x is None or isinstance(x, Layout) or callable(x)


class Outputs:
    """The declared results of a kernel, and after a trace their actual structure.

    Args:
      tree: A prefix tree of resolved layouts, or a function or class that gives one.
      resolve: From a declared layout to one without bare names, for trees known only from the results.
    """

    def __init__(self, tree: Any, resolve: Any):
        self.tree = tree
        self.resolve = resolve
        self._prefix_leaves = jax.tree.leaves(tree, is_leaf=_is_layout)
        self.layouts: list[Layout] = []
        self.paths: list[str] = []
        self.ranks: list[int] | None = None
        self.structure: Any = None
        self.still: list[Any] = []  # the leaves that are not arrays, in their places; None for an array
        self.wraps = False

    def declared(self) -> list[Layout]:
        return [x for x in self._prefix_leaves if isinstance(x, Layout)]

    def specs(self, without: tuple[str, ...] = ()) -> list[P]:
        """One spec per result of `leaving`."""
        return [x.without(*without).spec for x in self.ranked()]

    def shardings(self, mesh: Any) -> Any:
        """The same as shardings, in the structure of the declaration; None where only a trace tells them."""
        told = all(x is None or (isinstance(x, Layout) and not _rank_matters(x)) for x in self._prefix_leaves)
        lie = lambda x: None if x is None else NamedSharding(mesh, P(*_entries(x)))
        return jax.tree.map(lie, self.tree, is_leaf=_is_layout) if told else None

    def ranked(self) -> list[Layout]:
        """The layout of each result, with `...` written out. It is known after a trace."""
        return [x.with_rank(n) for x, n in zip(self.layouts, self.ranks or (), strict=True)]

    # --- while tracing ------------------------------------------------------------------------------------

    def collect(self, out: Any, signature: Signature, frame: Frame, *, local: bool) -> list[Any]:
        """The results flat; ranks, sizes and tags checked; marked with their layouts."""
        if out is None and self._prefix_leaves:
            signature.fail("the body returned None, and the right side declares results.", advice="return them")
        found, faults = matched(signature.outputs, out, "result")
        if faults:
            rule = "the body's results do not have the structure that the right side declares."
            signature.fail(rule, got=faults)
        flat, self.structure = jax.tree.flatten(out)
        arrays: list[Any] = []
        self.layouts, self.paths = [], []
        self.still = [leaf if layout is None else None for _, leaf, layout in found]
        self.wraps |= any(layout is None for *_, layout in found)
        for (path, leaf, layout), own in zip(found, flat, strict=True):
            if layout is None:
                continue
            self.layouts.append(self.resolve(layout))
            self.paths.append(path)
            arrays.append(_as_array(own, path, signature, leaf))
        self.ranks = [x.ndim for x in arrays]
        self._check_tags(arrays, signature)  # first: a wrong axis explains a wrong size, not the reverse
        bound = {name: Size(size, origin) for name, size, origin in frame.bound}
        shapes = [(p, x.shape, lay) for p, x, lay in zip(self.paths, arrays, self.layouts, strict=True)]
        source = signature.source if signature.written else None
        bind_sizes(signature.text, source, shapes, dict(frame.sizes), local=local, known=bound)
        return [
            mark(x, lay, f"{p} of {signature.text}", role="output", frame=frame, name=p)
            for p, x, lay in zip(self.paths, arrays, self.layouts, strict=True)
        ]

    def _check_tags(self, arrays: Sequence[Any], signature: Signature) -> None:
        wrong: list[str] = []
        fixes: list[Fix] = []
        line = ""
        for path, x, layout in zip(self.paths, arrays, self.layouts, strict=True):
            known = tag_of(x)
            if known is None:
                continue
            have = known.layout
            if set(have.unreduced) - set(layout.unreduced):
                wrong.append(f'{path} is a partial sum, "{have.short}" ({known.origin}); declared "{layout.short}"')
                fixes += _moved(have, layout, known.name or path)
            elif same_axes(have, layout, marks=False) is False:
                wrong.append(f'{path} holds "{have.short}" ({known.origin}); declared "{layout.short}"')
                fixes += _moved(have, layout, known.name or path)
            else:
                continue
            line = line or line_of(known)
        if wrong:
            rule = "a result does not have the layout that the right side declares."
            call, source, fix = signature.text, signature.source, tuple(dict.fromkeys(fixes))
            error = ReplicationError(rule, call=call, source=source, got=wrong, fix=fix)
            raise early(error, line)

    def check_types(self, flat: Sequence[Any], frame: Frame) -> None:
        """JAX's own type of each result: invarying wherever the layout says equal."""
        faults = []
        for i, (x, layout) in enumerate(zip(flat, self.layouts, strict=True)):
            free = set(layout.axes) | set(layout.unreduced) | set(layout.reduced)
            bad = frame.in_mesh_order(_compat.varying_axes(x) - free)
            if bad:
                faults.append((i, bad))
        if faults:
            raise Unequal(faults)

    def explained(self, unequal: Unequal, signature: Signature, frame: Frame) -> SpmdError:
        """Where a body is nested in other axes: which result varies on which axis."""
        got = [
            f'{self.paths[i]}: "{self.layouts[i].short}" says equal on {", ".join(axes)}, and JAX '
            f"types it varying there"
            for i, axes in unequal.faults
        ]
        rule = "a result varies on a mesh axis that its layout does not mention."
        return ReplicationError(rule, call=signature.text, source=signature.source, got=[*got, frame.describe()])

    def leaving(self, flat: Sequence[Any], without: Sequence[str] = ()) -> list[Any]:
        """The results as `specs` expects them: a value with a mark has the type that JAX gives it outside."""
        typed = []
        for x, layout in zip(flat, self.layouts, strict=True):
            x = _compat.to_unreduced(x, layout.unreduced) if layout.unreduced else x
            typed.append(to_reduced(x, tuple(a for a in layout.reduced if a not in without)))
        return typed

    def build(self, flat: Sequence[Any]) -> Any:
        """The results in the structure that the body gave them, of which leaves that are not arrays are a part here."""
        if not self.wraps:
            return jax.tree.unflatten(self.structure, flat)
        rest = iter(flat)
        whole = [next(rest) if x is None else Static((x,)) for x in self.still]
        return jax.tree.unflatten(self.structure, whole)

    def returned(self, out: Any) -> Any:
        """The results of `build` as a caller gets them: every leaf is itself again."""
        return unwrapped(out) if self.wraps else out


def _moved(have: Layout, wanted: Layout, shown: str) -> list[Fix]:
    """The call that brings a result to its layout, with the names that it has; none where the two do not correspond."""
    here, there = ([len(dim.atoms) for dim in layout.dims] for layout in (have, wanted))
    if here != there:
        return []
    dims = [
        replace(h, atoms=tuple(replace(a, axes=b.axes) for a, b in zip(h.atoms, w.atoms, strict=True)), bracket=False)
        for h, w in zip(have.dims, wanted.dims, strict=True)
    ]
    result = Layout.from_dims(tuple(dims), wanted.unreduced, wanted.reduced)
    return [Fix(verb_for(have, result), (shown,), f"{have.short} -> {result.short}")]


def _rank_matters(layout: Layout) -> bool:
    """Whether a divided dimension stands behind `...`, so that its position depends on the rank."""
    seen = False
    for dim in layout.dims:
        seen |= dim.ellipsis
        if seen and dim.axes:
            return True
    return False


def _entries(layout: Layout) -> list[Any]:
    entries: list[Any] = []
    for dim in layout.dims:
        if dim.ellipsis:
            break
        entries.append(dim.axes or None)
    return entries


def _as_array(x: Any, path: str, signature: Signature, shown: Any) -> Any:
    if isinstance(x, jax.Array):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        return signature.fail(f"{path} is {kind_of(shown)}, and the results of a kernel are arrays.")
