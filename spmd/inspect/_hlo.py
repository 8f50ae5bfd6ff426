"""The instructions of optimised HLO text, as `compiled.as_text()` prints it; JAX and meshes play no part here.

It understands what counting communication needs: computations, instructions with their types, operands
and attributes, which computations an instruction runs and how often, and the table of source lines.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from spmd.errors import SpmdError

_BITS = {"pred": 8, "bf16": 16, "tf32": 32, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_TRIP_COUNT = re.compile(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_COMMENT = re.compile(r"/\*.*?\*/")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([^\s(]+)\s*(\(.*)?\{\s*$")
_ASSIGN = re.compile(r"^\s*(ROOT\s+)?%?([^\s=]+)\s+=\s+(.*)$")
# The attributes that name the computations an instruction runs.
_RUNS = {
    "while": ("body", "condition"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "call": ("to_apply",),
    "async-start": ("calls",),
    "fusion": ("calls",),
}


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of the Python stack under which an instruction was made."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """One HLO instruction. `attributes` is the text behind the operands, as printed.

    The operand of a constant is its value.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool = False

    def attribute(self, key: str) -> str | None:
        """The text of attribute `key` up to the comma that ends it, or None.

        >>> loop = Instruction("w", "f32[]", "while", ("x",), ', body=%b.1, metadata={op_name="a, b"}')
        >>> loop.attribute("body"), loop.attribute("metadata")
        ('%b.1', '{op_name="a, b"}')
        """
        rest = self.attribute_from(key)
        return None if rest is None else rest[: end_of(rest, 0, ",")]

    def attribute_from(self, key: str) -> str | None:
        """The text that begins with the value of attribute `key`, to the end of the line, or None.

        For values that have commas of their own, such as groups written in a mesh with its device ids.
        """
        found = re.search(rf"(?:^|[\s,]){re.escape(key)}=", self.attributes)
        return self.attributes[found.end() :] if found else None

    def called(self, key: str) -> tuple[str, ...]:
        """The names of the computations in attribute `key`."""
        text = self.attribute(key)
        if text is None:
            return ()
        return tuple(part.strip().lstrip("%") for part in text.strip("{}").split(",") if part.strip())

    @property
    def op_name(self) -> str:
        """The name that JAX gave it, as JAX wrote it: printed text escapes quotes.

        >>> Instruction("a", "f32[]", "add", (), r', metadata={op_name="f/psum(x, \\"a/x -> a\\")"}').op_name
        'f/psum(x, "a/x -> a")'
        """
        found = _OP_NAME.search(self.attribute("metadata") or "")
        return re.sub(r"\\(.)", r"\1", found.group(1)) if found else ""


@dataclass(frozen=True, slots=True)
class Visit:
    """An instruction and how often one call of the module runs it.

    `exact` is False where HLO does not say: in a loop of unknown length (counted once), or in one of
    several branches (each counted as if taken). `caller` is the instruction that runs the computation.
    """

    instruction: Instruction
    computation: str
    times: int
    exact: bool
    caller: Instruction | None = None


@dataclass(frozen=True)
class HloModule:
    """A parsed module: computations by name, the entry's name, and the table of source lines."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    partitions: int
    frames: dict[int, tuple[Frame, ...]] = field(default_factory=dict)

    def named(self, computation: str, name: str) -> Instruction:
        """The instruction `name` of `computation`."""
        for instruction in self.computations[computation]:
            if instruction.name == name:
                return instruction
        raise SpmdError(f"The compiled text uses {name!r} in {computation!r} and does not define it.")

    def root(self, computation: str) -> Instruction | None:
        """The instruction whose value `computation` returns."""
        return next((one for one in self.computations.get(computation, ()) if one.root), None)

    def visits(self) -> Iterator[Visit]:
        """Every instruction that a call of the module runs, loops multiplied out, in order."""
        return self._walk(self.entry, 1, True, None)

    def _walk(self, name: str, times: int, exact: bool, caller: Instruction | None) -> Iterator[Visit]:
        for instruction in self.computations.get(name, ()):
            yield Visit(instruction, name, times, exact, caller)
            for callee, factor, known in self._runs(name, instruction):
                yield from self._walk(callee, times * factor, exact and known, instruction)

    def _runs(self, computation: str, instruction: Instruction) -> Iterator[tuple[str, int, bool]]:
        """The computations that `instruction` runs: name, how often, and whether that number is known."""
        trips = self._trips(computation, instruction) if instruction.opcode == "while" else 1
        known = trips is not None and instruction.opcode != "conditional"
        for key in _RUNS.get(instruction.opcode, ()):
            for name in instruction.called(key):
                yield name, 1 if trips is None else trips + (key == "condition"), known

    def _trips(self, computation: str, loop: Instruction) -> int | None:
        """Return how often `loop` runs its body: as printed, or read off a counter that is compared with a constant.

        XLA for TPUs prints no trip counts.
        """
        if printed := _TRIP_COUNT.search(loop.attributes):
            return int(printed.group(1))
        (condition,), (body,) = loop.called("condition"), loop.called("body")
        compare, after = self.root(condition), self.root(body)
        if compare is None or after is None or compare.opcode != "compare" or after.opcode != "tuple":
            return None
        limit = self._constant(condition, compare.operands[-1])
        counter = self._element(condition, compare.operands[0])
        start = self.named(computation, loop.operands[0])
        if limit is None or counter is None or start.opcode != "tuple" or "direction=LT" not in compare.attributes:
            return None
        first = self._constant(computation, start.operands[counter])
        step = self._behind(body, after.operands[counter])
        if first is None or step.opcode != "add" or self._element(body, step.operands[0]) != counter:
            return None
        by = self._constant(body, step.operands[1])
        return max(0, -(-(limit - first) // by)) if by else None

    def _behind(self, computation: str, name: str) -> Instruction:
        """The instruction `name`, or what it is a copy of."""
        found = self.named(computation, name)
        while found.opcode in ("copy", "bitcast"):
            found = self.named(computation, found.operands[0])
        return found

    def _constant(self, computation: str, name: str) -> int | None:
        found = self._behind(computation, name)
        number = found.operands[0] if found.opcode == "constant" and found.operands else ""
        return int(number) if re.fullmatch(r"-?\d+", number) else None

    def _element(self, computation: str, name: str) -> int | None:
        """Return which element of its computation's argument `name` is, if it is one."""
        found = self._behind(computation, name)
        index = found.attribute("index") if found.opcode == "get-tuple-element" else None
        of_argument = index and self.named(computation, found.operands[0]).opcode == "parameter"
        return int(index) if index and of_argument else None

    def stack(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The Python lines that made `instruction`, innermost first; empty when the text has no table."""
        metadata = instruction.attribute("metadata") or ""
        if found := re.search(r"stack_frame_id=(\d+)", metadata):
            return self.frames.get(int(found.group(1)), ())
        file = re.search(r'source_file="([^"]*)"', metadata)
        line = re.search(r"source_line=(\d+)", metadata)
        return (Frame(file.group(1), int(line.group(1)), ""),) if file and line else ()


# -------------------- the text


def names_of_parts(name: str) -> list[str]:
    """The names of what XLA combined into one instruction; the name itself if it lists none.

    XLA for GPUs lists them behind what they have in common up to a slash, which may be one of a layout.

    >>> names_of_parts('f/while/psum(x, "a/(x {U:y} -> a")/add:y {U:x} -> a")/add)')
    ['f/while/psum(x, "a/x {U:y} -> a")/add', 'f/while/psum(x, "a/y {U:x} -> a")/add']
    """
    start = 0 if name.startswith("(") else name.find("/(") + 1  # no name of JAX and no axis begins with a bracket
    if not name.startswith("(", start) or not name.endswith(")"):
        return [name]
    return [name[:start] + part for part in re.split(r":(?![^{}]*\})", name[start + 1 : -1])]


def parse_module(text: str, having: str = "") -> HloModule:
    """The module in `text`, of whose instructions those that have a word.

    Raises:
      SpmdError: `text` has no entry computation, so it is not the text of a compiled module.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, current, body = "", None, []
    for line in text.splitlines():
        if current is None:
            if (head := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
                current, body = head.group(2), []
                entry = current if head.group(1) else entry
        elif line.strip() == "}":
            computations[current], current = tuple(body), None
        elif having in line and (instruction := _parse_instruction(line)):
            body.append(instruction)
    if not entry:
        raise SpmdError("This is not the text of a compiled module: it has no ENTRY computation.")
    sizes = [int(n) for n in re.findall(r"^HloModule.*?\bnum_partitions=(\d+)", text, re.MULTILINE)]
    return HloModule(computations, entry, sizes[0] if sizes else 1, _parse_frames(text))


def _parse_instruction(line: str) -> Instruction | None:
    found = _ASSIGN.match(_COMMENT.sub("", line))
    if found is None:
        return None
    name, rest = found.group(2), found.group(3)
    end = end_of(rest, 1, ")") + 1 if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if end <= 0 or opening < 0:
        return None
    closing = end_of(rest, opening + 1, ")")
    # Older printers put the type before each name, newer ones only the name.
    names = (part.split() for part in _parts(rest[opening + 1 : closing]))
    operands = tuple(words[-1].lstrip("%") for words in names if words)
    return Instruction(name, kind, rest[:opening].strip(), operands, rest[closing + 1 :], bool(found.group(1)))


def _parts(text: str) -> Iterator[str]:
    """The parts of `text` between commas outside brackets."""
    at = 0
    while at < len(text):
        end = end_of(text, at, ",")
        yield text[at:end]
        at = end + 1


def end_of(text: str, start: int, stop: str) -> int:
    """Return where the character `stop` comes first, outside of brackets and strings that begin behind `start`."""
    depth, quoted = 0, False
    for at in range(start, len(text)):
        char = text[at]
        if char == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif not depth and char == stop:
            return at
        else:
            depth += (char in "([{") - (char in ")]}")
    return len(text)


def _parse_frames(text: str) -> dict[int, tuple[Frame, ...]]:
    """Stack frames by id, innermost line first, from the tables under the module's first line."""
    files, functions = _table(text, "FileNames"), _table(text, "FunctionNames")
    lines: dict[int, Frame] = {}
    for key, value in _table(text, "FileLocations").items():
        at = _numbers(value)
        file, function = files.get(at["file_name_id"], "?"), functions.get(at["function_name_id"], "?")
        lines[key] = Frame(file, at["line"], function)
    links = {key: _numbers(value) for key, value in _table(text, "StackFrames").items()}
    # Today's printer writes parents one too high (the outermost frame, 1, says parent 1). A printer that
    # writes them as they are would say 0 there, and is read as such.
    shift = int(1 in links and links[1]["parent_frame_id"] == 1)
    stacks: dict[int, tuple[Frame, ...]] = {}
    for key in links:
        stack, one = [], key
        while one in links and len(stack) < len(links):
            stack.append(lines.get(links[one]["file_location_id"], Frame("?", 0, "?")))
            one = links[one]["parent_frame_id"] - shift
        stacks[key] = tuple(stack)
    return stacks


def _table(text: str, title: str) -> dict[int, str]:
    found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = found.group(1).splitlines() if found else []
    return {int(key): value.strip('"') for key, value in (row.split(" ", 1) for row in rows)}


def _numbers(text: str) -> Counter[str]:
    return Counter({key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)})


# -------------------- shapes


def parse_shapes(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The array types in a printed type, tuples flattened.

    >>> parse_shapes("(f32[8,16]{1,0}, /*index=1*/bf16[], u32[])")
    (('f32', (8, 16)), ('bf16', ()), ('u32', ()))
    """
    found = _SHAPE.findall(_COMMENT.sub("", text))
    return tuple((dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims in found)


def shape_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one array; types of less than a byte are packed.

    >>> shape_bytes("bf16", (4, 8)), shape_bytes("s4", (3,))
    (64, 2)
    """
    if dtype in _BITS:
        bits = _BITS[dtype]
    elif found := re.match(r"[suf](\d+)", dtype):
        bits = int(found.group(1))
    else:
        raise SpmdError(f"The compiled text has an array type that is not known here: {dtype!r}.")
    return -(-math.prod(shape) * bits // 8)
