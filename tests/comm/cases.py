"""Random calls of each verb: a mesh, a layout before, one after, written in one of the ways a user may write it."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import spmd
from tests import simulator as sim
from tests.sampler import Sampler

Axes = tuple[str, ...]
NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Case:
    """One call of a verb on an array of dims `a b c`.

    Attributes:
      verb: The verb's name.
      mesh: Axis sizes.
      src: The axes of each dimension before; `partial` are the axes of `{U:}`.
      dst: The axes of each dimension after.
      left: The partial sums that stay.
      pattern: The pattern as written, with `keywords`.
      sizes: The size of each dimension.
      shape_names: What the boundary calls the dimensions.
    """

    verb: str
    mesh: Mapping[str, int]
    src: tuple[Axes, ...]
    dst: tuple[Axes, ...]
    partial: Axes = ()
    left: Axes = ()
    pattern: str = ""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()

    @property
    def before(self) -> str:
        """The layout before, as the simulator reads it."""
        return written(self.src, self.partial)

    @property
    def after(self) -> str:
        return written(self.dst, self.left)

    def __str__(self) -> str:
        return f"{self.verb} {dict(self.mesh)} {self.pattern} {dict(self.keywords)}"


def written(dims: tuple[Axes, ...], partial: Axes = (), names: tuple[str, ...] = NAMES) -> str:
    words = ["/".join([name, *axes]) for name, axes in zip(names, dims, strict=False)]
    words += [f"{{U:{','.join(partial)}}}"] if partial else []
    return " ".join(words)


# --- what each verb may do ------------------------------------------------------------------------------------


def _placed(sampler: Sampler, mesh: Mapping[str, int], used: float = 0.8) -> list[list[str]]:
    dims: list[list[str]] = [[], [], []]
    for axis in sampler.rng.permutation(list(mesh)):
        if sampler.rng.random() < used:
            dims[int(sampler.rng.integers(3))].append(str(axis))
    return dims


def _freeze(dims: list[list[str]]) -> tuple[Axes, ...]:
    return tuple(tuple(axes) for axes in dims)


def _ends(sampler: Sampler, verb: str, mesh: Mapping[str, int]) -> tuple[Any, Any, Axes, Axes] | None:
    """`(src, dst, partial, left)`, or None where the dice gave nothing for this verb."""
    dims = _placed(sampler, mesh)
    src, partial = _freeze(dims), ()
    flip = lambda p: sampler.rng.random() < p
    if verb in ("all_gather", "split"):
        dst = tuple(axes[: len(axes) - int(sampler.rng.integers(len(axes) + 1))] for axes in src)
        if dst == src:
            return None
        return (src, dst, (), ()) if verb == "all_gather" else (dst, src, (), ())
    if verb == "all_to_all":
        i, j = (int(k) for k in sampler.rng.permutation(3)[:2])
        if not dims[i]:
            return None
        count = int(sampler.rng.integers(1, len(dims[i]) + 1))
        dims[j] += dims[i][-count:]
        del dims[i][-count:]
        return src, _freeze(dims), (), ()
    if verb in ("psum", "psum_scatter"):
        free = [axis for axis in mesh if not any(axis in axes for axes in src)]
        if not free:
            return None
        partial = tuple(axis for axis in mesh if axis in free)
        gone = tuple(axis for axis in partial if flip(0.7)) or partial[:1]
        left = tuple(axis for axis in partial if axis not in gone)
        if verb == "psum":
            return src, src, partial, left
        for axis in sampler.rng.permutation(list(gone)):
            dims[int(sampler.rng.integers(3))].append(str(axis))
        return src, _freeze(dims), partial, left
    if verb == "relayout":
        free = tuple(axis for axis in mesh if not any(axis in axes for axes in src))
        partial = free if flip(0.4) else ()
        dst = _freeze(_placed(sampler, mesh, 0.7))
        return None if dst == src and not partial else (src, dst, partial, ())
    raise ValueError(verb)


def _sizes(sampler: Sampler, mesh: Mapping[str, int], *layouts: tuple[Axes, ...]) -> tuple[int, ...]:
    texts = [written(dims) for dims in layouts]
    found = sampler.sizes("a b c", mesh, texts)
    return tuple(found[name] for name in NAMES)


# --- how it is written ----------------------------------------------------------------------------------------


def _rewrite(sampler: Sampler, case: Case) -> tuple[str, dict[str, Any]]:
    """The same call in another of the ways that the language has: `...`, keywords for axes and sizes, `(h k)`."""
    way = str(sampler.choice(["plain", "...", "axis", "tuple", "size", "composite", "none"]))
    src, dst = list(case.src), list(case.dst)
    marks = [f" {{U:{','.join(axes)}}}" if axes else "" for axes in (case.partial, case.left)]
    names, keywords = list(NAMES), {}
    if way == "composite":
        # the axes stand on the leading factor, the size of the other comes by keyword
        parts = math.lcm(sim.count(case.mesh, src[0]), sim.count(case.mesh, dst[0]))
        names[0] = "(ao ai)"
        keywords["ai"] = case.sizes[0] // parts
    if way == "size":
        keywords["b"] = case.sizes[1]
    sides = [[[name, *axes] for name, axes in zip(names, dims, strict=True)] for dims in (src, dst)]
    if way == "axis" and len(case.mesh) > 0:
        # a name of the pattern's own for a mesh axis
        axis = str(sampler.choice(list(case.mesh)))
        if any(axis in word[1:] for side in sides for word in side) or axis in case.partial:
            sides = [[[w[0], *("mine" if a == axis else a for a in w[1:])] for w in side] for side in sides]
            marks = [re.sub(rf"\b{axis}\b", "mine", mark) for mark in marks]
            keywords["mine"] = axis
    if way == "tuple":
        run = next((axes for axes in (*src, *dst) if len(axes) > 1), None)
        whole = all(_contains(axes, run) in (True, None) for axes in (*src, *dst)) if run else False
        if run and whole and not set(run) & {*case.partial, *case.left}:
            sides = [[_folded(word, run) for word in side] for side in sides]
            keywords["both"] = run
    if way == "none":
        sides[0][2].append("nowhere")
        if case.verb in ("split", "psum_scatter"):
            sides[0][2].pop()
            sides[1][2].append("nowhere")
        elif case.verb == "psum":
            sides[1][2].append("nowhere")
        elif case.verb == "all_to_all":
            sides[1][1].append("nowhere")
        keywords["nowhere"] = None
    texts = [" ".join("/".join(word) for word in side) for side in sides]
    if way == "..." and src[1:] == dst[1:] and not any(src[1:]):
        texts = ["/".join(side[0]) + " ..." for side in sides]
    if way == "..." and src[:2] == dst[:2] and not any(src[:2]):
        texts = ["... " + "/".join(side[2]) for side in sides]
    return f"{texts[0]}{marks[0]} -> {texts[1]}{marks[1]}", keywords


def _contains(axes: Axes, run: Axes) -> bool | None:
    """Whether `run` stands in `axes` as one piece; None where none of it does."""
    if not set(axes) & set(run):
        return None
    return any(axes[i : i + len(run)] == run for i in range(len(axes)))


def _folded(word: list[str], run: Axes) -> list[str]:
    axes = tuple(word[1:])
    for i in range(len(axes)):
        if axes[i : i + len(run)] == run:
            return [word[0], *axes[:i], "both", *axes[i + len(run) :]]
    return word


def sample(verb: str, seed: int) -> Case:
    """The case of this verb and seed."""
    sampler = Sampler(seed)
    for _ in range(200):
        mesh = sampler.mesh()
        ends = _ends(sampler, verb, mesh)
        if ends is None:
            continue
        src, dst, partial, left = ends
        sizes = _sizes(sampler, mesh, src, dst)
        case = Case(verb, mesh, src, dst, partial, left, sizes=sizes)
        pattern, keywords = _rewrite(sampler, case)
        return Case(verb, mesh, src, dst, partial, left, pattern, keywords, sizes)
    raise AssertionError(f"no case of {verb} for seed {seed}")


# --- how it is run --------------------------------------------------------------------------------------------


def device_mesh(sizes: Mapping[str, int]) -> Any:
    return spmd.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)


def body_of(case: Case) -> Callable[[Any], Any]:
    """What runs inside: the verb, on partial sums that are made of the dimension `p` in front.

    Those that stay partial are summed at the end, for they may not leave.
    """
    verb = getattr(spmd, case.verb)
    keywords = dict(case.keywords)
    if case.verb in ("all_gather", "relayout"):
        keywords["to"] = "invarying"  # what leaves the kernel whole

    def run(x: Any) -> Any:
        if case.partial:
            x = spmd.reduce(x, f"p/{'/'.join(case.partial)} {written(case.src)} -> {case.before}", "sum")
        x = verb(x, case.pattern, **keywords)
        return spmd.psum(x, f"{case.after} -> {written(case.dst)}") if case.left else x

    return run


def ends(case: Case) -> tuple[str, str]:
    """The layouts at the kernel's boundary."""
    front = f"p/{'/'.join(case.partial)} " if case.partial else ""
    return front + written(case.src), written(case.dst)


def kernel_of(case: Case, wrap: Callable[[Any], Any] = lambda run: run, *, lead: str = "") -> Any:
    """A kernel that runs the case's verb on its argument; `wrap` transforms the body, `lead` is a dim for it."""
    before, after = ends(case)
    return spmd.kernel(f"{lead}{before} -> {lead}{after}", mesh=device_mesh(case.mesh))(wrap(body_of(case)))


def through_copies(case: Case) -> tuple[Axes, Any]:
    """A kernel that relays gathered copies, typed varying, and multiplies them by a divided vector; with the axes that
    divide this one: those that hold copies in the end.

    Axes that the layout before lacks divide the argument further, and are gathered first.
    """
    used = {axis for axes in case.src for axis in axes}
    spare = tuple(axis for axis in case.mesh if axis not in used)
    parts = sim.count(case.mesh, spare)
    place = next(
        (
            i
            for i, (n, axes) in enumerate(zip(case.sizes, case.src, strict=True))
            if n % (parts * sim.count(case.mesh, axes)) == 0
        ),
        None,
    )
    spare = spare if place is not None else ()
    rest = [(*axes, *spare) if i == place else axes for i, axes in enumerate(case.src)]
    there = {axis for axes in case.dst for axis in axes}
    copied = tuple(axis for axis in case.mesh if axis not in there and (axis in used or axis in spare))
    before, at = written(tuple(rest)), "/".join(["w", *copied])

    def body(x: Any, w: Any) -> Any:
        x = spmd.all_gather(x, f"{before} -> {written(case.src)}") if spare else x
        if case.src != case.dst:
            x = spmd.relayout(x, f"{written(case.src)} -> {written(case.dst)}")
        return spmd.einsum(w, x, f"{at}, {written(case.dst)} -> {at} {written(case.dst)}")

    return copied, spmd.kernel(f"{before}, {at} -> {at} {written(case.dst)}", mesh=device_mesh(case.mesh))(body)


def whole(case: Case, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """The array without the partial sums."""
    return Sampler(1000 + seed).array(case.sizes, dtype)


def argument(case: Case, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Small whole numbers, exact in every dtype and order of summation."""
    front = (sim.count(case.mesh, case.partial),) if case.partial else ()
    return Sampler(1000 + seed).array((*front, *case.sizes), dtype)


def expected(case: Case, x: np.ndarray) -> sim.Blocks:
    """What each device holds afterwards, computed by the simulator's collectives, device by device."""
    if case.partial:
        blocks = sim.scatter(x, f"p/{'/'.join(case.partial)} {written(case.src)}", case.mesh)
        blocks = {device: block.sum(0, dtype=block.dtype) for device, block in blocks.items()}
    else:
        blocks = sim.scatter(x, written(case.src), case.mesh)
    return MOVES[case.verb](case, blocks)


def _changed(case: Case) -> list[tuple[int, Axes, Axes]]:
    found = []
    for i, (have, want) in enumerate(zip(case.src, case.dst, strict=True)):
        keep = len(want) if have[: len(want)] == want else len(have)
        found += [(i, have[keep:], want[keep:])] if have != want else []
    return found


def _sim_gather(case: Case, blocks: sim.Blocks) -> sim.Blocks:
    for dim, lost, _ in _changed(case):
        blocks = sim.all_gather(blocks, case.mesh, lost, dim)
    return blocks


def _sim_split(case: Case, blocks: sim.Blocks) -> sim.Blocks:
    for dim, _, gained in _changed(case):
        blocks = sim.split(blocks, case.mesh, gained, dim)
    return blocks


def _sim_psum(case: Case, blocks: sim.Blocks) -> sim.Blocks:
    return sim.psum(blocks, case.mesh, case.partial)


def _sim_scatter(case: Case, blocks: sim.Blocks) -> sim.Blocks:
    if case.left:
        blocks = sim.psum(blocks, case.mesh, case.left)
    gone = tuple(axis for axis in case.partial if axis not in case.left)
    return _sim_split(case, sim.psum(blocks, case.mesh, gone))


def _sim_all_to_all(case: Case, blocks: sim.Blocks) -> sim.Blocks:
    (i, lost, _) = next(change for change in _changed(case) if change[1])
    (j, _, _) = next(change for change in _changed(case) if change[2])
    return sim.all_to_all(blocks, case.mesh, lost, j, i)


def _sim_relayout(case: Case, blocks: sim.Blocks) -> sim.Blocks:
    blocks = sim.psum(blocks, case.mesh, case.partial) if case.partial else blocks
    return sim.scatter(sim.gather(blocks, written(case.src), case.mesh), written(case.dst), case.mesh)


MOVES: dict[str, Callable[[Case, sim.Blocks], sim.Blocks]] = {
    "all_gather": _sim_gather,
    "split": _sim_split,
    "psum": _sim_psum,
    "psum_scatter": _sim_scatter,
    "all_to_all": _sim_all_to_all,
    "relayout": _sim_relayout,
}


def assert_blocks(out: Any, wanted: sim.Blocks, mesh: Any) -> None:
    """Every device holds exactly what the simulator says."""
    blocks = sim.blocks_of(out, mesh)
    assert set(blocks) == set(wanted)
    for device, block in blocks.items():
        assert block.shape == wanted[device].shape, f"device {device}: {block.shape}, not {wanted[device].shape}"
        assert block.dtype == wanted[device].dtype
        assert sim.same(block, wanted[device]), f"device {device} holds another block"
