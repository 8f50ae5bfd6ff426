"""`spmd.port`: a program with raw `shard_map`s as kernels, in the user's own text, and both of them compared."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd._jaxprs import errors as jax_errors
from spmd._text import Table, bytes_text
from spmd._trees.leaves import kind_of
from spmd.checker import Findings, NotShownWarning
from spmd.checker._arguments import drawn
from spmd.checker._finding import MEANT
from spmd.checker._numbers import compared, labelled, pulled, rounded
from spmd.errors import SpmdError, did_you_mean
from spmd.inspect import collectives
from spmd.inspect._check import check
from spmd.language import axes_code
from spmd.porting._program import Body, Edit, File, Mapped, Site, Trace, X, loaded, opaques, sizes, starts, tree_of

Program = tuple[Callable[..., Any], tuple[Any, ...]]
_OWN = f"{MEANT} The raw program depends on the sizes of axes too. `with spmd.per_shard(why):` says that it may"
_GRADIENT = (
    "a gradient is taken in the body, and in a kernel JAX itself adds it up over the axes along which its argument is "
    'equal: spmd.value_and_grad(f, loss="{U:dp}") says which sum the loss is, and no psum follows'
)
_MADE = ".devices.ravel())"
Choice = tuple[list[Edit], dict[int, str], dict[int, str]]  # edits, the verb of each call, and why others have none


@dataclass(frozen=True)
class Said:
    """A call that communicates, and what became of it.

    Attributes:
      line: Where it is.
      raw: The call as it was.
      text: The verb that says it; "" where it stays as it is.
      why: Why it stays.
    """

    line: str
    raw: str
    text: str = ""
    why: str = ""


@dataclass(frozen=True)
class Port:
    """A program as kernels; made by `spmd.port`. Printing it shows the functions that changed, and what was compared.

    Attributes:
      text: The functions of the file that changed, as kernels.
      file: The whole file.
      fn: The program that the new file makes.
      args: The arguments with which both were run.
      said: What became of each call that communicates.
      notes: What could not be said, besides.
      same: What was compared and is equal, a sentence each.
      differences: What is not equal, a sentence each.
      findings: What `spmd.check` says of the new program.
    """

    text: str
    file: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    said: tuple[Said, ...]
    notes: tuple[str, ...]
    same: tuple[str, ...]
    differences: tuple[str, ...]
    findings: Findings

    def __str__(self) -> str:
        rows = [(one.line, one.raw, one.text or f"stays: {one.why}") for one in self.said]
        parts = [self.text.strip("\n")]
        parts += [Table(rows, ("line", "it was", "it is")).text()] if rows else []
        told = [*self.notes, *self.same, *(f"DIFFERENT: {one}" for one in self.differences)]
        return "\n\n".join([*parts, "\n".join([*told, f"spmd.check: {self.findings.verdict}"])])


def port(target: str, *args: Any, mesh: Any = None, names: Sequence[str] = ()) -> Port:
    """Rewrite a program with raw `shard_map`s as kernels, and compare both.

    The program is traced. Each call of `shard_map` in the file becomes a `kernel` whose string says its specs, and each
    collective becomes the verb that says what it does, with the layouts that the checker infers. All else stays as it
    is written. What no string says stays a collective of JAX's, which a kernel may have, and is told. What does not
    trace is taken back. In the end both programs run, on the devices that there are.

    Communication: that of both programs, twice: once for their results and once for their gradients.

    Args:
      target: `FILE:NAME`. With a mesh, NAME is a function from it to `(fn, args)`, and without one the program itself.
      *args: The arguments of the program itself, arrays or `jax.ShapeDtypeStruct`s, for which numbers are drawn.
      mesh: The mesh, with devices.
      names: What the dimensions of the arguments are called, a text for each: `["b s d", "d f"]`. By default names are
        those to which the body assigns `x.shape`, or guessed.

    Returns:
      A `Port`: its text, what became of each collective, and whether results, gradients and bytes are equal.

    Raises:
      SpmdError: If the file or the name does not exist, or the program has no raw `shard_map`.

    Example:
      >>> import pathlib, tempfile, spmd
      >>> path = pathlib.Path(tempfile.mkdtemp(), "sums.py")
      >>> _ = path.write_text('''
      ... import jax
      ... from jax.sharding import PartitionSpec as P
      ...
      ... def build(mesh):
      ...     def total(x):
      ...         return jax.lax.psum(x.sum(0), "dp")
      ...
      ...     fn = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("dp"), out_specs=P()))
      ...     return fn, (jax.numpy.ones((8, 3)),)
      ... ''')
      >>> print(spmd.port(f"{path}:build", mesh=spmd.make_mesh(dp=4)).text)
      def build(mesh):
          def total(x):
              return spmd.psum(x.sum(0), "d {U:dp} -> d")
      <BLANKLINE>
          fn = jax.jit(spmd.kernel("b/dp d -> d", mesh=mesh)(total))
          return fn, (jax.numpy.ones((8, 3)),)
    """
    if not isinstance(target, str):
        code = getattr(inspect.unwrap(target), "__code__", None) if callable(target) else None
        where = "train.py:build" if code is None else f"{code.co_filename}:{code.co_name}"
        rule = f"port rewrites a file: it takes FILE:NAME as a string, not {kind_of(target)}."
        raise SpmdError(rule, call="port(...)", advice=f'spmd.port("{where}", ...)')
    path, _, name = target.rpartition(":")
    if not path or not name or not Path(path).is_file():
        raise SpmdError(f"there is no file {path or target}.", call=target, advice="as in train.py:build")
    rewriting = _Rewriting(File(path, Path(path).read_text()), name, mesh, args, names)
    if not rewriting.trace.bodies:
        rule = f"{name} calls no raw jax.shard_map, so there is nothing to port."
        advice = "spmd.check takes any program"
        if rewriting.trace.differentiated:
            rule = f"{name} takes the gradient of a shard_map, and what is traced is its derivative."
            advice = "port the function itself; both gradients are compared"
        raise SpmdError(rule, call=f"port {target}", advice=advice)
    return rewriting.port()


class _Rewriting:
    """The state of one port: what is changed so far."""

    def __init__(self, file: File, name: str, mesh: Any, args: Sequence[Any], names: Sequence[str]):
        self.file, self.name, self.mesh, self.given = file, name, mesh, args
        self.fn, args = self._made(loaded(file.path, file.text))
        self.args = tuple(_drawn(args))
        self.trace = Trace(self.fn, self.args, names, file)
        self.notes: list[str] = []

    def _made(self, names: dict[str, Any]) -> Program:
        found = names.get(self.name)
        if not callable(found):
            near = did_you_mean(self.name, [name for name, one in names.items() if callable(one)]) or "."
            raise SpmdError(f"{self.file.path} has no function called {self.name}{near}", call=self.name)
        if self.mesh is None:
            return found, tuple(self.given)
        made = found(self.mesh)
        if not (isinstance(made, tuple) and len(made) >= 2 and callable(made[0])):
            rule = f"{self.name} returns a function and its arguments, not {kind_of(made)}."
            raise SpmdError(rule, call=self.name, advice="def build(mesh): return fn, args")
        return made[0], tuple(made[1])

    def again(self, names: dict[str, Any]) -> Program:
        """The program of a text that is loaded again, with the same numbers; its classes are others."""
        fn, args = self._made(names)
        return fn, jax.tree.unflatten(jax.tree.structure(args), jax.tree.leaves(self.args))

    # --- what is changed ---------------------------------------------------------------------------------------

    def kernels(self) -> Iterator[Edit]:
        """Each call of `shard_map` as one of `kernel`."""
        calls = list(self.file.mapped())
        for body in self.trace.bodies:
            found = self.trace.call(body) or (calls[0] if len(calls) == 1 else None)
            if found is None:
                place = body.eqn.params["jaxpr"].debug_info.func_src_info
                self.notes.append(f"the call of shard_map with {place} is not found in {self.file.path}, and stays")
                continue
            yield from self._kernel(body, found)

    def _kernel(self, body: Body, found: Mapped) -> Iterator[Edit]:
        words = self._layouts(body, found.function)
        if words is None:
            self.notes.append("a layout of an argument's attribute has no string, so its shard_map stays")
            return
        start, end = self.file.span(found.call)
        parts: list[Any] = [f"spmd.kernel({words}"]
        if found.mesh is not None:
            sizes = ", ".join(f"{axis}={size}" for axis, size in body.eqn.params["mesh"].shape.items())
            made = (f"spmd.make_mesh({sizes}, devices=", _MADE)  # where axes have two in their place
            before, after = made if self.trace.factors else ("", "")
            parts += [f", mesh={before}", self.file.span(found.mesh), after]
        if body.auto:
            parts.append(f", auto={axes_code(body.auto)}")
        parts.append(")")
        yield Edit(start, end, (*parts, *(["(", self.file.span(found.body), ")"] if found.body is not None else [])))

    def _layouts(self, body: Body, function: Any) -> str | None:
        """The pattern of a kernel, or its trees of layouts."""
        trees = tree_of(list(body.inputs), list(body.inputs.values()))
        returned = jax.tree.structure(self.trace.shapes)
        several = len(body.outputs) > 1
        plain = not several or returned == jax.tree.structure(tuple(body.outputs))
        if trees is None:
            return None
        starred = getattr(getattr(function, "args", None), "vararg", None)
        if starred is not None:  # each of `*args` is an argument of its own
            trees |= {f"{starred.arg}[{i}]": one for i, one in sorted(trees.pop(starred.arg, {}).items())}
        if plain and all(isinstance(one, str) for one in trees.values()):
            return f'"{", ".join(trees.values())} -> {", ".join(body.outputs)}"'
        out = body.outputs[0] if not several else tuple(body.outputs)
        if not plain and returned.num_leaves == len(body.outputs):
            out = jax.tree.unflatten(returned, body.outputs)
        given = ", ".join(map(_written, trees.values()))
        return f"in_layouts=({given},), out_layouts={_written(out)}"

    def said(self, site: Site, way: str) -> Edit:
        """A call that communicates as a verb."""
        before, _, after = way.partition(X)
        return Edit(*self.file.span(site.node), (before, self.file.span(site.argument), after))

    def attempt(self, edits: Sequence[Edit], grad: bool = False) -> str:
        """Return why a text with these edits, or its gradient, does not trace; "" if it does."""
        try:
            fn, args = self.again(loaded(f"{self.file.path} as kernels", self.text(edits)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotShownWarning)  # `findings` has it
                _trace(fn, args, grad)
        except Exception as error:  # whatever a program raises, the edit is taken back
            return jax_errors.first_line(error)
        return ""

    def text(self, edits: Sequence[Edit]) -> str:
        """The whole file with edits, and with what they import."""
        at = self.file.first_line()
        missing = [] if self.file.imports("spmd") or not edits else ["import spmd\n"]
        if any("jnp." in part for edit in edits for part in edit.parts if isinstance(part, str)):
            missing += [] if self.file.imports("jnp") else ["import jax.numpy as jnp\n"]
        return self.file.render([*edits, Edit(at, at, tuple(missing))])

    # --- the whole ---------------------------------------------------------------------------------------------

    def chosen(self) -> Choice:
        """The edits with which the program traces, the verb of each call, and why others have none."""
        kernels, sites = list(self.kernels()), self.trace.sites
        asked, typed = list(sizes(self.trace)), [*starts(self.trace), *opaques(self.trace)]
        first = {i: self.said(sites[i], sites[i].ways[0]) for i in range(len(sites)) if sites[i].ways}
        bases = [[*kernels, *asked, *typed], [*kernels, *typed], [*kernels, *asked], kernels]
        for base in [one for i, one in enumerate(bases) if one not in bases[:i]]:
            found = self._together(base, first)
            why = "" if found is None or not self.differentiable() else self.attempt(found[0], grad=True)
            if found is not None and not why:
                return found
        why = why or self.attempt([*bases[0], *first.values()])
        self.notes += [f"shard_map stays, because the kernel says: {why}"] if kernels else []
        self.notes += [_GRADIENT] if kernels and self.trace.gradients else []
        return self._together([], first) or ([], {}, {})

    @functools.cache  # noqa: B019
    def differentiable(self) -> bool:
        """Return whether JAX has a gradient of the raw program."""
        try:
            _trace(self.fn, self.args, True)
        except Exception:
            return False
        return True

    def _together(self, base: list[Edit], first: dict[int, Edit]) -> Choice | None:
        """The most of these edits with which the program traces: all; all but one; or one after another."""
        sites, ways = self.trace.sites, {i: self.trace.sites[i].ways[0] for i in first}
        why = self.attempt([*base, *first.values()])
        if not why:
            return [*base, *first.values()], ways, {}
        texts, whys, edits = {}, {}, list(base)
        if self.attempt(base):
            copies = {i: f'{way[:-1]}, to="invarying")' for i, way in ways.items() if way.startswith("spmd.all_gather")}
            again = {i: self.said(sites[i], copies.get(i, way)) for i, way in ways.items()}
            if copies and not self.attempt([*base, *again.values()]):  # copies that leave the kernel
                return [*base, *again.values()], ways | copies, {}
            for one in first:  # what one verb may not say, others need
                rest = {i: edit for i, edit in first.items() if i != one}
                if not self.attempt([*base, *rest.values()]):
                    return [*base, *rest.values()], {i: ways[i] for i in rest}, {one: why}
            return None
        for i in first:
            for way in sites[i].ways:
                edit = self.said(sites[i], way)
                whys[i] = self.attempt([*edits, edit])
                if not whys[i]:
                    edits, texts[i] = [*edits, edit], way
                    break
        return edits, texts, {i: one for i, one in whys.items() if one}

    def port(self) -> Port:
        edits, texts, whys = self.chosen()
        text = self.text(edits)
        names = loaded(f"{self.file.path} as kernels", text)
        fn, args = self.again(names)
        said = []
        for i, site in enumerate(self.trace.sites):
            verb = self.file.render(edits, *self.file.span(site.node)) if i in texts else ""
            said.append(Said(site.line, site.text, " ".join(verb.split()), "" if verb else site.why or whys.get(i, "")))
        same, differences = _compare((self.fn, self.args), (fn, args))
        # a mesh with factors is made for one number of devices; a kernel's own takes any size all the same
        factored = any(_MADE in part for edit in edits for part in edit.parts if isinstance(part, str))
        build = None if self.mesh is None or factored else names[self.name]
        findings = check(fn, *args, build=build)
        if any(one.kind == "numbers" for one in findings) and not differences:
            self.notes.append(_OWN)
        return Port(self._shown(edits), text, fn, args, tuple(said), tuple(self.notes), same, differences, findings)

    def _shown(self, edits: Sequence[Edit]) -> str:
        """The statements of the file that changed."""
        changed = {id(one): one for one in (self.file.statement(edit.start) for edit in edits)}
        ordered = sorted(changed.values(), key=lambda one: one.lineno)
        return "\n\n\n".join(self.file.render(edits, self.file.first(one), self.file.span(one)[1]) for one in ordered)


def _written(tree: Any) -> str:
    """A tree of layouts as Python has it."""
    if isinstance(tree, str):
        return f'"{tree}"'
    if isinstance(tree, dict) and all(isinstance(key, int) for key in tree):
        tree = tuple(tree[key] for key in sorted(tree))
    if isinstance(tree, dict):
        return "{" + ", ".join(f'"{key}": {_written(one)}' for key, one in tree.items()) + "}"
    inside = ", ".join(map(_written, tree))
    return f"[{inside}]" if isinstance(tree, list) else f"({inside},)"


def _drawn(args: Any) -> Any:
    """Arguments with numbers in place of those that have only a shape, where these lie."""
    placed = lambda x, y: jax.device_put(y, x.sharding) if isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.tree.map(placed, args, drawn(args, 0))


def _trace(fn: Any, args: Sequence[Any], grad: bool) -> None:
    """Trace a program, or its results and gradients."""
    program, arrays = pulled(fn, args, grad=grad)
    jax.make_jaxpr(program)(*arrays)


def _compare(raw: Program, ported: Program) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is equal in two programs, and what is not: results, gradients, and what is sent."""
    same: list[str] = []
    differences: list[str] = []
    for grad, what in ((False, "results"), (True, "gradients")):
        if grad and not _floats(raw[1]):
            break
        try:
            wanted, before = _run(*raw, grad)
        except Exception as error:  # whatever JAX cannot
            same.append(f"{what}: not compared, the raw program has none: {jax_errors.first_line(error)}")
            break
        try:
            got, after = _run(*ported, grad)
        except Exception as error:
            differences.append(f"{what}: the raw program has them, the kernel does not: {jax_errors.first_line(error)}")
            break
        found = compared(got, wanted, lambda _, x, y: 1e-4 * np.abs(y) + 1e-5 * max(rounded(x, y), 0.1))
        differences += [f"{labelled(one.path)}: {one.how() or one.counts}" for one in found]
        same += [] if found else [f"{what}: equal"]
        was, now = (f"{sum(one.counts.values())} collectives, {bytes_text(one.total_bytes)}" for one in (before, after))
        if was == now:
            same.append(f"sent for {what}: {was}, in both")
        else:
            more = after.total_bytes > before.total_bytes and not grad  # JAX types what sums a gradient needs
            (differences if more else same).append(f"sent for {what}: {was}; as kernels {now}")
    return tuple(same), tuple(differences)


def _run(fn: Any, args: Sequence[Any], grad: bool) -> tuple[Any, Any]:
    """Return what a program gives, and what it sends."""
    program, arrays = pulled(fn, args, grad=grad)
    compiled = jax.jit(program).lower(*arrays).compile()
    return compiled(*arrays), collectives(compiled)


def _floats(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
