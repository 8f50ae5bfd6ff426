"""A program as it is written, with the layout of each value on its line."""

from __future__ import annotations

import ast
import functools
import itertools
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from spmd._jaxprs.facts import kernel_around
from spmd._jaxprs.lines import Frame, LineName, frames_of, is_transposed, is_users
from spmd._jaxprs.walker import Equation, held, opened
from spmd.checker._claims import arguments_of
from spmd.checker._finding import Finding
from spmd.checker._names import Labels
from spmd.checker._state import State
from spmd.inspect._collectives import grouped
from spmd.inspect._recorded import Path, inferred_text, record
from spmd.inspect._source import (
    Function,
    Slot,
    Source,
    SourceBlock,
    SourceLine,
    Texts,
    Value,
    parameters,
    returned,
    slots,
)

# --- what each line of a program makes: the values of its equations, found by the place of each expression ------------


Key = tuple[str, int]  # a name, or the number of a returned value
Made = dict[int, dict[Key, dict[str, None]]]  # for each line and each key the layouts, in order


def listing(jaxpr: Any, name: str, findings: Iterable[Finding], recorded: tuple[Any, Any] | None = None) -> Source:
    """The source of a program that was traced, or of the lines of its findings where the trace ended before.

    Args:
      jaxpr: The whole program, or None.
      name: What it is called.
      findings: What was found in it.
      recorded: What each equation gave and what its dimensions are called, where a walk has found that already.
    """
    texts = Texts()
    program = None if jaxpr is None else Program(jaxpr, texts, recorded or record(jaxpr, name), name)
    made = {} if program is None else {function: lines for function, lines in program.made.items() if lines}
    told: dict[Function, dict[int, list[Finding]]] = {}
    for one in findings:
        file, number = (one.line.file, one.line.number) if isinstance(one.line, LineName) else ("", 0)
        function = texts.function_on(file, number) or _without_source(made, file, number)
        made.setdefault(function, {})
        told.setdefault(function, {}).setdefault(number, []).append(one)
    blocks: dict[Function, dict[int, SourceLine]] = {}
    for function in made:
        block = min(filter(function.is_in, made), key=lambda one: (one.first, -one.last))
        lines = blocks.setdefault(block, _written(texts, block))
        inner = isinstance(function.node, ast.Lambda) and function != block  # the line around it has names
        known = {} if inner else made[function]
        for number in sorted({*known, *told.get(function, ())}):
            line = lines.get(number, SourceLine(number, ""))
            values = [Value(name, tuple(layouts)) for (name, _), layouts in known.get(number, {}).items()]
            wrong = told.get(function, {}).get(number, ())
            lines[number] = replace(line, values=(*line.values, *values), findings=(*line.findings, *wrong))
    shown = (SourceBlock(one.name, one.file, tuple(lines[n] for n in sorted(lines))) for one, lines in blocks.items())
    return Source(tuple(shown), {} if program is None else dict(program.sizes))


def _without_source(made: Iterable[Function], file: str, number: int) -> Function:
    """The function of a line without a text."""
    before = [one for one in made if one.file == file and one.first <= number]
    return max(before, key=lambda one: one.first, default=Function("", file, number))


def _written(texts: Texts, function: Function) -> dict[int, SourceLine]:
    """The lines of a function as they are written, without the indentation that they have in common."""
    numbers = range(function.first, function.last + 1) if function.node is not None else ()
    text = textwrap.dedent("\n".join(texts.line(function.file, n) for n in numbers))
    return {n: SourceLine(n, line) for n, line in zip(numbers, text.split("\n"), strict=True)} if numbers else {}


class Step(NamedTuple):
    """An equation that ran.

    Attributes:
      scope: The jaxpr that it stands in.
      index: Its place there.
      eqn: The equation.
      frames: The user's calls inside of which it stands in this jaxpr, innermost first.
      backward: Whether it belongs to a backward pass, which JAX wrote.
      layouts: The layouts of its results; None where nothing is known, as outside of every body.
    """

    scope: Scope
    index: int
    eqn: Equation
    frames: Sequence[Frame]
    backward: bool
    layouts: Sequence[str | None]


@dataclass(eq=False)
class Scope:
    """A jaxpr that ran.

    Attributes:
      jaxpr: The jaxpr.
      callers: The equations around it, outermost first.
      outer: The jaxpr around it.
      steps: Its equations.
      users: For each value the numbers of the equations that use it.
      known: The layout of each value.
    """

    jaxpr: Any
    callers: tuple[Equation, ...] = ()
    outer: Scope | None = None
    steps: list[Step] = field(default_factory=list)
    users: dict[int, list[int]] = field(default_factory=dict)
    known: dict[int, str | None] = field(default_factory=dict)

    @functools.cached_property
    def results(self) -> frozenset[int]:
        """The values that it gives, without those that JAX keeps for a backward pass only."""
        outs = list(map(id, self.jaxpr.outvars))
        if self.outer is None or len(outs) != len(self.callers[-1].outvars):
            return frozenset(outs)
        wanted = (self.outer.needs(id(out), frozenset(), False) for out in self.callers[-1].outvars)
        return frozenset(itertools.compress(outs, wanted))

    def needs(self, var: int, inside: Collection[int], backward: bool) -> bool:
        """Return whether something besides the steps `inside` uses a value: with `backward`, in a backward pass too."""
        if var in self.results:
            return True
        for step in (self.steps[n] for n in self.users.get(var, ()) if n not in inside):
            if step.backward:
                if backward:
                    return True
            elif (step.frames and not self.keeps(step)) or any(
                self.needs(id(out), inside, backward) for out in step.eqn.outvars
            ):
                return True
        return False

    def keeps(self, step: Step) -> bool:
        """Return whether JAX wrote a step to keep its results for a backward pass."""
        given = {id(atom) for atom in self.jaxpr.outvars} - self.results
        return all(id(out) in given for out in step.eqn.outvars)


class Occurrence(NamedTuple):
    """A step that runs inside of an expression of one function; `around` are the user's calls around that function."""

    step: Step
    at: Frame
    around: tuple[Frame, ...]


Output = tuple[Step, int]  # one result of a step


class Program:
    """A whole program, walked over once more with everything kept.

    Attributes:
      sizes: The sizes of its mesh axes.
      made: What each line of each function makes, in the order in which functions run.
    """

    def __init__(self, jaxpr: Any, texts: Texts, recorded: tuple[Any, Any], name: str) -> None:
        self._texts = texts
        self._states, self._names = recorded
        self.sizes = self._states.sizes
        self._bodies: dict[Function, list[Scope]] = {}
        self._scopes: list[Scope] = []
        self._enter(Scope(opened(jaxpr)[0]), ())
        placed = grouped((place for step in self._steps() for place in self._places(step)), lambda place: place[0])
        self.made = {
            function: (_by_line if function.node is None else self._by_name)(function, [one for _, one in places])
            for function, places in (dict.fromkeys(self._bodies, ()) | placed).items()
        }
        if not any(self.made.values()):  # nobody knows where it was written
            self.made = {Function(name, "", 0): _numbered(self._steps())}

    def _steps(self) -> Iterator[Step]:
        return (step for scope in self._scopes for step in scope.steps)

    # --- the jaxprs that ran ------------------------------------------------------------------------------------

    def _enter(self, scope: Scope, path: Path) -> None:
        self._scopes.append(scope)
        self._begin(scope, (path, id(scope.jaxpr)))
        around = next((found for eqn in reversed(scope.callers) if (found := frames_of(eqn))), [])
        for index, eqn in enumerate(scope.jaxpr.eqns):
            key, backward = (path, id(eqn)), is_transposed(eqn)
            states = self._states.made.get(key, [None] * len(eqn.outvars))
            layouts = [*map(self._text, states, self._names.made.get(key, states))]
            frames = _own(frames_of(eqn), around, scope.jaxpr)
            scope.steps.append(Step(scope, index, eqn, frames, backward, layouts))
            scope.known.update(zip(map(id, eqn.outvars), layouts, strict=True))
            if eqn.primitive.name == "spmd_layout" and eqn.params["role"] == "output":
                scope.known[id(eqn.outvars[0])] = scope.known.get(id(eqn.invars[0])) or layouts[0]
            for atom in eqn.invars:
                scope.users.setdefault(id(atom), []).append(index)
            for part in () if backward else held(eqn):
                inner, inside = opened(part.jaxpr)[0], (*path, id(eqn))
                if (inside, id(inner)) in self._states.given:
                    self._enter(Scope(inner, (*scope.callers, eqn), scope), inside)

    def _begin(self, scope: Scope, key: tuple[Path, int]) -> None:
        """Return what a jaxpr is given, and which function of the user's it is."""
        if key in self._states.given:
            layouts = map(self._text, self._states.given[key], self._names.given[key])
            scope.known.update(zip(map(id, scope.jaxpr.invars), layouts, strict=True))
        made_of = getattr(scope.jaxpr, "debug_info", None)
        if made_of is not None and is_users(made_of.func_filename or "<"):
            where = made_of.func_filename, made_of.func_lineno, made_of.func_name
            function = self._texts.function_of(*where)
            if function is not None:
                self._bodies.setdefault(function, []).append(scope)

    def _text(self, state: State | None, names: Labels) -> str | None:
        return None if state is None else inferred_text(state, names, self.sizes)

    def _places(self, step: Step) -> Iterator[tuple[Function, Occurrence]]:
        """The functions of the user's that a step runs in, outermost first. Of a backward pass, only those that asked
        for it."""
        asked = [i for i, frame in enumerate(step.frames) if frame.differentiates]
        first = 0 if not step.backward else asked[0] if asked else len(step.frames)
        for i in reversed(range(first, len(step.frames))):
            frame = step.frames[i]
            code, span = frame.code, frame.span
            function = self._texts.function_at(code.co_filename, span, code.co_name)
            if function is None and not self._texts.lines(code.co_filename):
                function = Function(code.co_name, code.co_filename, code.co_firstlineno)
            if function is not None:
                yield function, Occurrence(step, frame, tuple(step.frames[i + 1 :]))

    # --- what lines make ----------------------------------------------------------------------------------------

    def _by_name(self, function: Function, occurrences: Sequence[Occurrence]) -> Made:
        made: Made = {}
        latest: dict[str, tuple[str, ...]] = {}

        def put(line: int, name: str, layouts: Sequence[str], number: int = 0) -> None:
            if layouts:
                made.setdefault(line, {}).setdefault((name, number), {}).update(dict.fromkeys(layouts))
                latest[name] = tuple(made[line][name, number])

        lines = parameters(function)
        for name, layout in self._arguments(function):
            root = name.partition("[")[0].partition(".")[0]  # the parameter of `params['w']`
            put(lines.get(root) or function.node.lineno, name, [layout])
        left = self._left(function)
        for slot in slots(function):
            found = [one for one in occurrences if slot.holds(one.at.span)]
            for live in _values(found):
                for name, layouts in _named(slot.names, live):
                    put(slot.line, name, layouts, slot.number)
            if not found and len(slot.names) < 2:
                known = latest.get(slot.value.id, ()) if isinstance(slot.value, ast.Name) else ()
                put(slot.line, "".join(slot.names), left.get(slot) or known, slot.number)
        return made

    def _arguments(self, function: Function) -> Iterator[tuple[str, str]]:
        """The arguments of a function that has a jaxpr of its own."""
        for scope in self._bodies.get(function, ()):
            mapped = [one for one in scope.callers[-1:] if one.primitive.name == "shard_map"]
            leaves = arguments_of(mapped[0], kernel_around(scope.callers[:-1])) if mapped else {}
            names = {i: leaf.path for i, leaf in leaves.items()}
            told = getattr(scope.jaxpr.debug_info, "arg_names", None) or ()
            first = len(scope.jaxpr.invars) - len(told)  # constants that JAX hoisted out of the body come first
            for i, var in enumerate(scope.jaxpr.invars):
                name = names.get(i) or (told[i - first] if 0 <= first <= i else "")
                layout = scope.known.get(id(var))
                if name and layout is not None:
                    yield name, layout

    def _left(self, function: Function) -> dict[Slot, list[str]]:
        """Return what a function that has a jaxpr of its own returns, where its results are those of its one return."""
        found: dict[Slot, list[str]] = {}
        values = returned(function)
        for scope in self._bodies.get(function, ()):
            if len(values) == len(scope.jaxpr.outvars):
                for slot, atom in zip(values, scope.jaxpr.outvars, strict=True):
                    layout = scope.known.get(id(atom))
                    found.setdefault(slot, []).extend([] if layout is None else [layout])
        return found


def _own(frames: Sequence[Frame], around: Sequence[Frame], jaxpr: Any) -> Sequence[Frame]:
    """The calls that were made while a jaxpr was traced, without those around it.

    A jaxpr that was traced before for another caller knows that caller only. Then the function that it was made of
    says where it begins.
    """
    if around and around[0] in frames:
        return frames[: frames.index(around[0])]
    made_of = getattr(jaxpr, "debug_info", None)
    begin = (made_of.func_filename, made_of.func_lineno) if made_of is not None else None
    codes = [frame.code for frame in frames]
    starts = [i for i, code in enumerate(codes) if (code.co_filename, code.co_firstlineno) == begin]
    if starts:
        return frames[: starts[-1] + 1]
    return frames if not around else ()


# --- the values of an expression --------------------------------------------------------------------------------


def _values(occurrences: Sequence[Occurrence]) -> list[list[Output]]:
    """The results of an expression that something outside of it uses, each time that it is evaluated."""
    evaluated = grouped(occurrences, lambda one: (id(one.step.scope), one.around)).values()
    numbered = ({one.step.index: one.step for one in ones} for ones in evaluated)
    together = [[steps[index] for index in sorted(steps)] for steps in numbered]
    if any(one.at.differentiates or one.step.backward for one in occurrences):
        return [_used(_with_backward(steps), backward=True) for steps in together]
    lasts = (eqn for steps in together for eqn in (steps[-1].eqn, *steps[-1].scope.callers))
    if any("jvp(" in str(eqn.source_info.name_stack) for eqn in lasts):  # JAX has moved equations
        return [_used(steps) for steps in together]
    runs = [run for steps in together for run in _runs(steps)]  # where nobody uses one, its last step tells
    return [_used(run) or [(run[-1], i) for i in range(len(run[-1].eqn.outvars))] for run in runs]


def _runs(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps of an expression, each time that it is evaluated: a loop of Python's evaluates it again and again."""
    runs: list[list[Step]] = []
    for step in steps:
        between = step.scope.steps[runs[-1][-1].index + 1 : step.index] if runs else ()
        if not runs or any(one.frames for one in between):
            runs.append([])
        runs[-1].append(step)
    return runs


def _with_backward(steps: list[Step]) -> list[Step]:
    """The steps of an expression that takes a gradient, with what the backward pass does between them and nobody
    wrote."""
    numbers = {step.index for step in steps}
    between = steps[0].scope.steps[min(numbers) : max(numbers) + 1]
    return [one for one in between if one.index in numbers or (one.backward and not one.frames)]


def _used(run: Sequence[Step], backward: bool = False) -> list[Output]:
    """The results of these steps that others use, with `backward` also those of a backward pass."""
    scope, inside = run[0].scope, {step.index for step in run}
    outputs = [(step, i) for step in run for i in range(len(step.eqn.outvars))]
    return [(step, i) for step, i in outputs if scope.needs(id(step.eqn.outvars[i]), inside, backward)]


def _named(names: Sequence[str], live: Sequence[Output]) -> Iterator[tuple[str, list[str]]]:
    """The layouts for each name. Names whose values cannot be told apart stand together."""
    each = [step.layouts[i] for step, i in live]
    layouts = list(dict.fromkeys(layout for layout in each if layout is not None))
    parts = _apart(names, live) if len(names) > 1 else None
    if parts is not None:
        for name, part in zip(names, parts, strict=True):
            yield from _named([name], part)
    elif len(names) < 2:
        yield "".join(names), layouts
    elif None not in each:
        alike = len(layouts) == 1 and len(live) >= len(names)
        yield from ((name, layouts) for name in (names if alike else [", ".join(names)]))


def _apart(names: Sequence[str], live: Sequence[Output]) -> list[list[Output]] | None:
    """The results that belong to each of several names; None where that is not known."""
    steps = {step.index: step for step, _ in live}
    backward = [one for one in live if one[0].backward]
    if len(names) == 2 and 0 < len(backward) < len(live):  # a value and its gradients
        return [[one for one in live if one not in backward], backward]
    if len(steps) != 1:
        return None
    [step] = steps.values()
    if step.eqn.primitive.name == "scan" and len(names) == 2:  # what is carried, and what is stacked
        [body] = held(step.eqn)
        return [[one for one in live if body.stacked[one[1]] == last] for last in (False, True)]
    if len(step.eqn.outvars) != len(names):
        return None
    return [[one for one in live if one[1] == i] for i in range(len(names))]


# --- without source ---------------------------------------------------------------------------------------------


def _by_line(function: Function, occurrences: Sequence[Occurrence]) -> Made:
    """For each line the primitives that give a value, in place of names."""
    lines = grouped(occurrences, lambda one: one.at.span[0])
    return _primitives(
        (n, step, step.layouts[i]) for n in sorted(lines) for live in _values(lines[n]) for step, i in live
    )


def _numbered(steps: Iterator[Step]) -> Made:
    """The same for a program without a text: equations are numbered in the order of the program."""
    known = enumerate((one for one in steps if any(one.layouts)), start=1)
    return _primitives((number, step, layout) for number, step in known for layout in step.layouts)


def _primitives(found: Iterable[tuple[int, Step, str | None]]) -> Made:
    made: Made = {}
    for number, step, layout in found:
        if layout is not None:
            made.setdefault(number, {}).setdefault((step.eqn.primitive.name, 0), {})[layout] = None
    return made
