"""The results of a kernel: their structure, their specs, and what must hold before they leave."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._trees.leaves import Static, described, has_room, is_array, kind_of, unwrapped
from spmd._trees.matching import matched
from spmd.checker import early, line_of
from spmd.comm._lax import to_reduced
from spmd.comm._marks import mark, same_axes, tag_of
from spmd.errors import Fix, ReplicationError, SpmdError
from spmd.kernels._signature import Signature
from spmd.language import Layout, call_between, no_room, turned, with_axes_of
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
      tree: A prefix tree of layouts as declared, or a function or class that gives one.
      resolve: From a declared layout to one without bare names, for trees known only from the results.
    """

    def __init__(self, tree: Any, resolve: Any):
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_layout)
        self._prefix_leaves = [resolve(x) if isinstance(x, Layout) else x for x in leaves]
        self.tree = jax.tree.unflatten(structure, self._prefix_leaves)
        self.resolve = resolve
        self.declared = [x for x in self._prefix_leaves if isinstance(x, Layout)]
        self.layouts: list[Layout] = []
        self.ranked: list[Layout] = []  # the same, `...` written out
        self.paths: list[str] = []
        self.structure: Any = None
        self.still: list[Any] = []  # the leaves that are not arrays, in their places; None for an array
        self.wraps = False

    def shardings(self, mesh: Any) -> Any:
        """The same as shardings, in the structure of the declaration; None where only a trace tells them."""
        ranked = lambda x: any(dim.axes for dim in x.dims[len(_entries(x)) :])  # behind `...` the rank decides where
        told = all(x is None or (isinstance(x, Layout) and not ranked(x)) for x in self._prefix_leaves)
        lie = lambda x: None if x is None else NamedSharding(mesh, P(*_entries(x)))
        return jax.tree.map(lie, self.tree, is_leaf=_is_layout) if told else None

    # --- while tracing ------------------------------------------------------------------------------------

    def collect(self, out: Any, signature: Signature, frame: Frame, *, local: bool) -> list[Any]:
        """The results flat; ranks, sizes and tags checked; marked with their layouts."""
        if out is None and self._prefix_leaves:
            signature.fail("the body returned None, and the right side declares results.", advice="return them")
        found, faults = matched(signature.outputs, out, "result")
        _check_count(signature, out)
        if faults:
            rule = "the body's results do not have the structure that the right side declares."
            signature.fail(rule, got=faults)
        flat, self.structure = jax.tree.flatten(out)
        arrays: list[Any] = []
        shapes: list[Any] = []
        self.layouts, self.ranked, self.paths, self.still = [], [], [], []
        for (path, leaf, layout), own in zip(found, flat, strict=True):
            self.still.append(leaf if layout is None else None)
            if layout is None:
                self.wraps = True
                continue
            self.layouts.append(self.resolve(layout))
            self.paths.append(path)
            arrays.append(_as_array(own, path, signature, leaf))
            shapes.append((path, arrays[-1].shape, self.layouts[-1]))
        self._check_tags(arrays, signature, frame)  # first: a wrong axis explains a wrong size, not the reverse
        signature.sized(shapes, dict(frame.sizes), local=local, known=frame.known)
        marked = []
        for path, x, layout in zip(self.paths, arrays, self.layouts, strict=True):
            marked.append(mark(x, layout, f"{path} of {signature.text}", role="output", frame=frame, name=path))
            self.ranked.append(layout.with_rank(x.ndim))
        return marked

    def _check_tags(self, arrays: Sequence[Any], signature: Signature, frame: Frame) -> None:
        wrong: list[str] = []
        fixes: list[Fix] = []
        line, unnamed, sizes = "", False, dict(frame.sizes)
        for path, x, layout in zip(self.paths, arrays, self.layouts, strict=True):
            known = tag_of(x)
            if known is None:
                continue
            have = known.layout
            partial = bool(set(have.unreduced) - set(layout.unreduced))
            room = functools.partial(no_room, shape=x.shape, mesh=sizes, known=frame.known, local=frame.explicit)
            other = turned(have, layout) is not None and room(layout, layout) is not None
            if not partial and not other and same_axes(have, layout, marks=False) is not False:
                continue
            lies = "is a partial sum," if partial else "holds"
            wrong.append(f'{path} {lies} "{have.short}" ({known.origin}); declared "{layout.short}"')
            unnamed = unnamed or any(d.axes and h.short == "_" for d, h in zip(layout.dims, have.dims, strict=False))
            wanted = None if unnamed and not partial else _with_names(have, layout)
            if wanted is not None:
                short = room(have, wanted)
                fix = None if short else call_between(have, wanted, known.name or path, _fix)
                wrong += [short] if short else []
                fixes += [fix] if fix else []
            line = line or line_of(known)
        if wrong:
            rule = "a result does not have the layout that the right side declares."
            call, source, fix = signature.text, signature.source, tuple(dict.fromkeys(fixes))
            advice = 'names where it is made: "_" is whole, and "..." stands for any dimensions' if unnamed else None
            error = ReplicationError(rule, call=call, source=source, got=wrong, fix=fix, advice=advice)
            raise early(error, line)

    def explained(self, unequal: Unequal, signature: Signature, frame: Frame) -> SpmdError:
        """Return where a body is nested in other axes: which result varies on which axis."""
        got = [
            f'{self.paths[i]}: "{self.layouts[i].short}" says equal on {", ".join(axes)}, and JAX '
            f"types it varying there"
            for i, axes in unequal.faults
        ]
        rule = "a result varies on a mesh axis that its layout does not mention."
        return ReplicationError(rule, call=signature.text, source=signature.source, got=[*got, frame.describe()])

    def leaving(self, flat: Sequence[Any], frame: Frame, specs: list[P], without: tuple[str, ...] = ()) -> list[Any]:
        """The results of a `shard_map`'s body, each with the type that JAX gives it outside.

        Args:
          flat: The results.
          frame: The frame of the body.
          specs: The list that the `shard_map` was given as `out_specs`. JAX reads it after the body has run, so one
            trace is enough to learn how many results there are, and of what rank.
          without: The axes that are manual around the `shard_map` too.

        Raises:
          Unequal: JAX types a result varying where its layout says equal.
        """
        faults = []
        for i, (x, layout) in enumerate(zip(flat, self.layouts, strict=True)):
            varying = _compat.varying_axes(x).difference(layout.axis_names)
            if varying and (bad := frame.in_mesh_order(varying)):
                faults.append((i, bad))
        if faults:
            raise Unequal(faults)
        out = []
        specs.clear()
        for x, layout in zip(flat, self.ranked, strict=True):
            specs.append(layout.without(*without).spec)
            x = _compat.to_unreduced(x, layout.unreduced) if layout.unreduced else x
            out.append(to_reduced(x, tuple(a for a in layout.reduced if a not in without)) if layout.reduced else x)
        return out

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


def _with_names(have: Layout, wanted: Layout) -> Layout | None:
    """The layout of a result with the names that it has; None where the two do not correspond."""
    dims = wanted.dims if turned(have, wanted) else with_axes_of(have, wanted)
    return None if dims is None else Layout.from_dims(dims, wanted.unreduced, wanted.reduced).without_brackets()


def _fix(verb: str, shown: str | Fix, src: Layout, dst: Layout) -> Fix:
    return Fix(verb, (shown,), f"{src.short} -> {dst.short}")


def _check_count(signature: Signature, out: Any) -> None:
    """That a body returns as many arrays as the right side has layouts. One layout is for all where they fit it."""
    declared = signature.outputs
    several = lambda x: isinstance(x, (tuple, list)) and not hasattr(x, "_fields")
    if several(declared):
        wanted, count = len(declared), len(out) if several(out) else 1
        wrong = wanted != count and (several(out) or is_array(out))
    elif isinstance(declared, Layout) and several(out):
        wanted, count = 1, len(out)
        wrong = count > 1 and any(is_array(x) and x.ndim and not has_room(declared, x.ndim) for x in out)
    else:
        return
    if wrong:
        returned = [described(x) for x in (out if several(out) else [out])]
        layouts = map(str, [declared] if isinstance(declared, Layout) else declared)
        rule = f"the body returns {count} result{'s' * (count != 1)}, and the right side declares {wanted}."
        signature.fail(
            rule,
            got=[f"returned: {'; '.join(returned)}", f"declared: {', '.join(layouts)}"],
            advice="one layout for each result of the body behind ->, with commas between them",
        )


def _entries(layout: Layout) -> list[Any]:
    """The axes of each dimension before `...`."""
    return [dim.axes or None for dim in itertools.takewhile(lambda dim: not dim.ellipsis, layout.dims)]


def _as_array(x: Any, path: str, signature: Signature, shown: Any) -> Any:
    if isinstance(x, jax.Array):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        return signature.fail(f"{path} is {kind_of(shown)}, and the results of a kernel are arrays.")
