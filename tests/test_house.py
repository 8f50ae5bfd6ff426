"""The rules of the house, read off the source: each is a function from a file to its faults.

Every rule comes with a text that breaks it, so that a rule which can no longer fail is noticed.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import spmd
from tests.benchmarks.house import rooms

ROOT = Path(__file__).resolve().parents[1]
MAX_FUNCTION = 60
CODE = ("spmd/", "tests/", "examples/")

# Lines of code by room, without blank lines, comments and docstrings; "." are the files beside the rooms. Raising one is
# a line in the changelog, and who deletes lowers it.
BUDGET = {
    ".": 2210,
    "_cli": 380,
    "_jaxprs": 925,
    "_processes": 360,
    "_python": 227,
    "_trees": 560,
    "checker": 7490,
    "cluster": 2060,
    "comm": 3000,
    "drawing": 300,
    "haliax": 340,
    "inspect": 3930,
    "kernels": 2150,
    "language": 1540,
    "nn": 1140,
    "ops": 4120,
    "parallel": 2580,
    "porting": 908,
    "propagation": 2250,
    "searcher": 430,
    "testing": 970,
}
SLACK = 50  # lines that a room may be below its budget

# Floors by path under spmd/, longest match first. A module may import from its own floor and below.
FLOORS = {
    "errors.py": 0,
    "_compat.py": 0,
    "_python/": 0,
    "_text.py": 0,
    "language/": 1,
    "drawing/": 1,
    "_jaxprs/": 2,
    "_processes/": 2,
    "_trees/": 2,
    "accelerators.py": 2,
    "mesh.py": 2,
    "modes.py": 2,
    "comm/": 3,
    "ops/": 4,
    "random.py": 4,
    "fft.py": 4,
    "linalg.py": 4,
    "stencil.py": 4,
    "checker/": 5,
    "kernels/": 6,
    "placement.py": 6,
    "nn/": 7,
    "parallel/": 7,
    "__main__.py": 9,
    "_cli/": 9,
    "cluster/": 8,
    "haliax/": 8,
    "inspect/": 8,
    "porting/": 9,
    "propagation/": 8,
    "testing/": 8,
    "searcher/": 9,
    "__init__.py": 10,
}
PUBLIC_NAMES_FLOOR = 7  # from here up, modules are written with the public names: `from spmd import einsum`

# What changes between JAX versions; `_compat.py` alone may know it.
VERSIONED_ATTRIBUTES = {"mat", "vma", "manual_axis_type"}
VERSIONED_MODULES = ("jax.interpreters", "jaxlib")


@dataclass(frozen=True)
class Source:
    """A file: its path from the root, and its text."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """The nodes of the tree: ten rules read them, and one walk costs as much as a rule."""
        return list(ast.walk(self.tree))

    @property
    def floor(self) -> int | None:
        if not self.path.startswith("spmd/"):
            return None
        return floor_of(self.path.removeprefix("spmd/"))


def floor_of(path: str) -> int | None:
    """The floor of a path under spmd/, or None when the plan does not have it."""
    for start in sorted(FLOORS, key=len, reverse=True):
        if path == start or (start.endswith("/") and path.startswith(start)):
            return FLOORS[start]
    return None


def tracked() -> Iterator[Source]:
    """Every Python file of the project, those not yet committed too."""
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield Source(path.relative_to(ROOT).as_posix(), path.read_text())


FILES = list(tracked())

# -------------------- the rules


def private_jax(source: Source) -> Iterator[str]:
    """No private JAX anywhere."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if "jax." + "_src" in line:
            yield f"line {number}: private JAX"


def checker_off(source: Source) -> Iterator[str]:
    """JAX's own checker is never switched off, but for programs by hand that `spmd` is compared with."""
    if source.path.startswith(("tests/benchmarks/deep_transformer.py", "tests/foreign/")):
        return
    for number, line in enumerate(source.text.splitlines(), 1):
        if re.search("check_" + r"vma\s*=\s*False|check_" + r"rep\b", line):
            yield f"line {number}: the checker is always on"


def long_functions(source: Source) -> Iterator[str]:
    """A function fits on a screen. Its docstring is not counted, so that nobody saves on examples."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            lines = node.end_lineno - first.lineno + 1
            if lines > MAX_FUNCTION:
                yield f"{node.name} has {lines} lines, at most {MAX_FUNCTION}"


def versioned_names(source: Source) -> Iterator[str]:
    """What changes between JAX versions is known to `_compat.py` alone."""
    if not source.path.startswith("spmd/") or source.path == "spmd/_compat.py":
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in VERSIONED_ATTRIBUTES:
            yield f"line {node.lineno}: .{node.attr}"
        if isinstance(node, ast.Constant) and node.value in VERSIONED_ATTRIBUTES:
            yield f"line {node.lineno}: {node.value!r}, as of a getattr"
        if isinstance(node, ast.Attribute) and node.attr == "__version__":
            yield f"line {node.lineno}: a version is asked for"
    for name, line in imports(source):
        if name.startswith(VERSIONED_MODULES):
            yield f"line {line}: import of {name}"


def upward_imports(source: Source) -> Iterator[str]:
    """Nothing imports upward, also not inside a function; what only annotations need is exempt."""
    if not source.path.startswith("spmd/"):
        return
    floor = source.floor
    if floor is None:
        yield "is not in the plan of floors (FLOORS in tests/test_house.py)"
        return
    for name, line in imports(source):
        if name.partition(".")[0] != "spmd":
            continue
        inside = name.partition(".")[2].replace(".", "/")
        other = module_floor(inside)
        if other is None and floor < PUBLIC_NAMES_FLOOR:
            yield f"line {line}: imports the public names (floor {floor} stands below them)"
        elif other is not None and other > floor:
            yield f"line {line}: {name} is on floor {other}, this is floor {floor}"


def module_floor(inside: str) -> int | None:
    """The floor of `comm/_call` or `errors/SpmdError`; None for a name of the package itself."""
    parts = inside.split("/")
    for end in range(len(parts), 0, -1):
        stem = "/".join(parts[:end])
        for path in (f"{stem}.py", f"{stem}/"):
            if stem and (found := floor_of(path)) is not None:
                return found
    return None


def jax_in_the_language(source: Source) -> Iterator[str]:
    """The language is pure Python; JAX is imported inside methods only."""
    if source.path.startswith("spmd/language/"):
        at_the_top = {node.lineno for node in source.tree.body}
        for name, line in imports(source):
            if line in at_the_top and name.partition(".")[0] in ("jax", "jaxlib"):
                yield f"line {line}: {name} at the top of a file of the language"


def exceptions_of_many_parts(source: Source) -> Iterator[str]:
    """`Error("a", b)` prints as a tuple: an exception is built from one text."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and len(node.args) > 1:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if re.search(r"(Error|Exception)$", name):
                yield f"line {node.lineno}: {name} with {len(node.args)} positional arguments"


def messages_read(source: Source) -> Iterator[str]:
    """Facts travel as values: nothing reads a message back but `_jaxprs/errors.py`, and that reads only JAX's. An error's
    text may be quoted, as in f"{error}"."""
    if not source.path.startswith("spmd/") or source.path == "spmd/_jaxprs/errors.py":
        return
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and node.name is not None:
            for inner in ast.walk(node):
                called = isinstance(inner, ast.Call) and getattr(inner.func, "id", "") in ("str", "repr")
                if called and any(getattr(x, "id", "") == node.name for x in inner.args):
                    yield f"line {inner.lineno}: the text of {node.name}"
                if isinstance(inner, ast.Attribute) and inner.attr == "args" and is_name(inner.value, {node.name}):
                    yield f"line {inner.lineno}: {node.name}.args"
        if isinstance(node, ast.FunctionDef):
            yield from texts_taken_apart(node)


def texts_taken_apart(function: ast.FunctionDef) -> Iterator[str]:
    """Where a function splits, searches or cuts a text that was made for a message."""
    made = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and is_message(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=value, attr=attr) if hasattr(str, attr) and is_message(value, made):
                yield f"line {node.lineno}: .{attr} of a message"
            case ast.Subscript(value=value) if is_message(value, made):
                yield f"line {node.lineno}: a part of a message"
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[value]) if is_message(value, made):
                yield f"line {node.lineno}: a search in a message"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re")), args=args):
                yield from (f"line {node.lineno}: a search in a message" for x in args if is_message(x, made))


def is_message(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is a text for a message: a hint, a fault as text, or a name of one."""
    hint = isinstance(node, ast.Call) and is_name(node.func, {"did_you_mean"})
    fault = (
        isinstance(node, ast.Call) and is_name(node.func, {"str"}) and bool(node.args) and "ault" in ast.unparse(node)
    )
    return hint or fault or is_name(node, names)


def is_name(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def machine_paths(source: Source) -> Iterator[str]:
    """No path of anybody's machine."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := re.search(r"(?<![\w.])/(root|home|work|Users)/\w+|\b[A-Z]:\\\\\w", line):
            yield f"line {number}: {found.group()}"


def loose_zips(source: Source) -> Iterator[str]:
    """`zip` says what it does with unequal lengths."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "zip" and len(node.args) > 1:
            keywords = {keyword.arg for keyword in node.keywords}
            yield from () if "strict" in keywords else (f"line {node.lineno}: zip without strict=",)


def imports(source: Source) -> Iterator[tuple[str, int]]:
    """Modules and names imported anywhere in the file but under `if TYPE_CHECKING:`."""
    hidden = {
        id(inner)
        for node in source.nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in source.nodes:
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(source, node)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def absolute(source: Source, node: ast.ImportFrom) -> str:
    """The module that a `from` import names, relative ones resolved."""
    if not node.level:
        return node.module or ""
    parts = source.path.removesuffix(".py").split("/")[: -node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


# Each rule, with a file that breaks it.
RULES: list[tuple[Callable[[Source], Iterator[str]], Source]] = [
    (private_jax, Source("tests/x.py", "from jax." + "_src import core")),
    (checker_off, Source("tests/x.py", "shard_map(f, check_" + "vma = False)")),
    (checker_off, Source("tests/x.py", "shard_map(f, check_" + "rep=False)")),
    (long_functions, Source("spmd/mesh.py", "def f():\n    'text'\n" + "    x = 1\n" * (MAX_FUNCTION + 1))),
    (versioned_names, Source("spmd/mesh.py", "x = aval.mat")),
    (versioned_names, Source("spmd/mesh.py", "x = getattr(aval, 'vma', None)")),
    (versioned_names, Source("spmd/mesh.py", "import jax\nnew = jax.__version__ > '0.11'")),
    (versioned_names, Source("spmd/mesh.py", "from jax.interpreters import ad")),
    (upward_imports, Source("spmd/mesh.py", "from spmd.comm._call import Call")),
    (upward_imports, Source("spmd/mesh.py", "def f():\n    import spmd.ops.einsum")),
    (upward_imports, Source("spmd/comm/_call.py", "from ..kernel import kernel")),
    (upward_imports, Source("spmd/ops/einsum.py", "from spmd import kernel")),
    (upward_imports, Source("spmd/attic.py", "x = 1")),
    (jax_in_the_language, Source("spmd/language/_parse.py", "import jax.numpy as jnp")),
    (exceptions_of_many_parts, Source("spmd/mesh.py", "raise MeshError('no axis', axis)")),
    (messages_read, Source("spmd/mesh.py", "try: f()\nexcept LayoutError as error: x = str(error)")),
    (messages_read, Source("spmd/mesh.py", "try: f()\nexcept LayoutError as error: x = error.args[0]")),
    (messages_read, Source("spmd/mesh.py", "def f():\n    hint = did_you_mean(a, b)\n    return hint.split(q)[1]")),
    (messages_read, Source("spmd/mesh.py", "def f():\n    return 'tp' in did_you_mean(a, b)")),
    (messages_read, Source("spmd/mesh.py", "def f(error):\n    return re.findall('a', str(error.fault))")),
    (machine_paths, Source("tests/x.py", "p = '/" + "home/someone/project'")),
    (loose_zips, Source("spmd/mesh.py", "for a, b in zip(x, y): pass")),
]
ALLOWED = [
    (upward_imports, Source("spmd/nn/linear.py", "from spmd import einsum")),
    (
        upward_imports,
        Source("spmd/ops/einsum.py", "from spmd.errors import SpmdError\nfrom spmd.comm import psum"),
    ),
    (upward_imports, Source("spmd/mesh.py", "if TYPE_CHECKING:\n    from spmd.kernels import Kernel")),
    (versioned_names, Source("spmd/_compat.py", "x = aval.mat")),
    (jax_in_the_language, Source("spmd/language/_layout.py", "def spec(self):\n    import jax")),
    (exceptions_of_many_parts, Source("spmd/mesh.py", "raise MeshError('no axis', got=[axis])")),
    (messages_read, Source("spmd/_jaxprs/errors.py", "try: f()\nexcept Exception as error: x = str(error)")),
    (messages_read, Source("spmd/mesh.py", "try: f()\nexcept OSError as error: raise MeshError(f'{error}')")),
    (messages_read, Source("spmd/mesh.py", "def f():\n    return did_you_mean(a, b) or '.'")),
]
DISTINCT = list({rule: None for rule, _ in RULES})


@pytest.mark.parametrize("rule", DISTINCT, ids=lambda rule: rule.__name__)
def test_rule(rule):
    faults = [f"{source.path}: {fault}" for source in FILES for fault in rule(source)]
    assert not faults, f"{rule.__doc__}\n" + "\n".join(faults)


@pytest.mark.parametrize(("rule", "broken"), RULES, ids=lambda value: getattr(value, "__name__", None))
def test_rule_can_fail(rule, broken):
    """Meta-test: each rule finds its fault."""
    assert list(rule(broken))


@pytest.mark.parametrize(("rule", "fine"), ALLOWED, ids=lambda value: getattr(value, "__name__", None))
def test_rule_allows(rule, fine):
    assert not list(rule(fine))


# -------------------- circles of imports


def circles(sources: list[Source]) -> list[set[str]]:
    """Sets of files, each of which reaches all others of its set by imports, also by those inside functions.

    The package itself does not count: rooms from PUBLIC_NAMES_FLOOR up are written with its public names.
    """
    files = {source.path for source in sources if source.path.startswith("spmd/")} - {"spmd/__init__.py"}
    graph = {source.path: imported(source, files) for source in sources if source.path in files}
    reached = {path: reachable(graph, path) for path in graph}
    found = {frozenset(other for other in reached[path] if path in reached[other]) for path in graph}
    return [{path.removeprefix("spmd/") for path in circle} for circle in sorted(found, key=sorted) if circle]


def imported(source: Source, files: set[str]) -> set[str]:
    """The files that a file imports: the module where there is one of that name, else what holds the name."""
    found = set()
    for name, _ in imports(source):
        path = name.replace(".", "/")
        above = path.rpartition("/")[0]
        options = (f"{path}.py", f"{path}/__init__.py", f"{above}.py", f"{above}/__init__.py")
        found.add(next((one for one in options if one in files), source.path))
    return found - {source.path}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        if (one := ahead.pop()) not in seen:
            seen.add(one)
            ahead += graph[one]
    return seen


def test_there_is_no_circle_of_imports():
    assert not circles(FILES), "these files import each other"


A, INSIDE, HIDDEN = "from spmd.b import g", "def f():\n    import spmd.a", "if TYPE_CHECKING:\n    from spmd.a import f"


@pytest.mark.parametrize("back", ["from spmd import a", "from .a import f", INSIDE])
def test_a_circle_is_noticed(back):
    """Meta-test: a circle at the top of the files, one by a relative import, and one inside a function."""
    assert circles([Source("spmd/a.py", A), Source("spmd/b.py", back)]) == [{"a.py", "b.py"}]


def test_what_only_annotations_need_makes_no_circle():
    assert not circles([Source("spmd/a.py", A), Source("spmd/b.py", HIDDEN)])


# -------------------- tests that are found

NAMESPACES = ("fft", "haliax", "inspect", "linalg", "nn", "parallel", "random", "stencil", "testing")


@functools.cache
def public_homes() -> set[str]:
    """The files that define what users call: every function, and every class of the package itself but exceptions."""
    things = [getattr(spmd, name) for name in spmd.__all__]
    things = [one for one in things if not (isinstance(one, type) and issubclass(one, Exception))]
    for module in NAMESPACES:
        names = getattr(spmd, module).__all__
        things += filter(inspect.isfunction, (getattr(getattr(spmd, module), name) for name in names))
    callables = [inspect.unwrap(one) for one in things if callable(one)]
    return {Path(inspect.getfile(one)).relative_to(ROOT).as_posix() for one in callables}


def test_dimensions_may_have_the_names_of_arguments():
    """Keywords say sizes and axes of names: `x=12` is the size of x, so arrays and patterns have no keywords."""
    things = [getattr(spmd, name) for name in spmd.__all__]
    things += [getattr(getattr(spmd, module), name) for module in NAMESPACES for name in getattr(spmd, module).__all__]
    found = set()
    for one in filter(inspect.isfunction, things):
        parameters = list(inspect.signature(one).parameters.values())
        place = next((i for i, p in enumerate(parameters) if p.name in ("pattern", "layout", "layouts")), None)
        if place is None or parameters[-1].name != "names":
            continue
        found.add(one.__name__)
        assert {p.kind for p in parameters[: place + 1]} == {inspect.Parameter.POSITIONAL_ONLY}, one
    assert {"psum", "roll", "deposit", "take", "zeros", "dct"} <= found


# What runs only as a program, and the tests that run it so.
WITHOUT_TESTS = {"spmd/__main__.py": "tests/_cli/test_commands.py"}


def has_code(source: Source) -> bool:
    """Whether a module of spmd holds a function or a method. Namespaces that only import do not."""
    inside = source.path.startswith("spmd/") and not source.path.endswith("__init__.py")
    return inside and any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in source.nodes)


def without_tests(homes: set[str], tests: set[str]) -> list[str]:
    """The files that have neither `tests/<room>/test_<module>.py` nor, for layers, `cases_<module>.py`.

    A module from which users call nothing may be tested through those that use it: its room needs a file of tests.
    """
    missing = []
    for home in sorted(homes):
        room = Path("tests", *Path(home).parts[1:-1])
        stem = Path(home).stem.strip("_")
        files = {(room / f"{kind}_{stem}.py").as_posix() for kind in ("test", "cases")}
        if home not in public_homes():
            files |= {one for one in tests if Path(one).parent == room != Path("tests")}
        missing += [f"{home}: {room}/test_{stem}.py"] if tests.isdisjoint(files) else []
    return missing


TEST_FILES = {source.path for source in FILES if source.path.startswith("tests/")}


def test_every_module_has_tests_of_its_name():
    homes = public_homes() | {source.path for source in FILES if has_code(source)}
    assert not without_tests(homes - WITHOUT_TESTS.keys(), TEST_FILES)


def test_no_exception_is_stale():
    named = {one.partition(":")[0] for one in without_tests(set(WITHOUT_TESTS), TEST_FILES)}
    assert set(WITHOUT_TESTS) == named and set(WITHOUT_TESTS.values()) <= TEST_FILES


def test_a_missing_test_file_is_noticed():
    """Meta-test: the rule knows the homes of functions, layers and classes, and misses each of their files."""
    homes = {"spmd/ops/_einops.py", "spmd/nn/loss.py", "spmd/kernels/_kernel.py", "spmd/mesh.py"}
    assert homes <= public_homes()
    assert len(without_tests(homes, {"tests/test_einsum.py", "tests/ops/einsum.py"})) == len(homes)
    assert not without_tests(homes, {"tests/nn/cases_loss.py", *TEST_FILES})
    hidden = {"spmd/comm/_call.py", "spmd/_compat.py"}
    assert hidden.isdisjoint(public_homes())
    assert without_tests(hidden, {"tests/comm/test_permute.py", "tests/test_mesh.py"}) == [
        "spmd/_compat.py: tests/test_compat.py"
    ]
    assert without_tests(hidden, {"tests/ops/test_roll.py", "tests/test_compat.py"}) == [
        "spmd/comm/_call.py: tests/comm/test_call.py"
    ]


def test_code_is_told_from_a_namespace():
    assert has_code(Source("spmd/comm/_x.py", "class A:\n    def f(self): pass"))
    assert not has_code(Source("spmd/fft.py", "from spmd.ops._fft import fft\n__all__ = ['fft']"))
    assert not has_code(Source("tests/x.py", "def f(): pass"))


# -------------------- names


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def missing_names(module: object) -> list[str]:
    """The names of `__all__` that the module does not have, or that it lists twice."""
    names = getattr(module, "__all__", [])
    return [name for name in names if not hasattr(module, name) or names.count(name) > 1]


MODULES = sorted(module_name(s.path) for s in FILES if s.path.startswith("spmd/") and "__main__" not in s.path)


@pytest.mark.parametrize("name", MODULES)
def test_every_name_of_all_is_there(name):
    module = importlib.import_module(name)
    assert not missing_names(module)


ROOMS = [module_name(s.path) for s in FILES if s.path.startswith("spmd/") and s.path.endswith("__init__.py")]
PACKAGES = [name for name in ROOMS if "._" not in name]  # a room with an underscore has nothing public


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_says_what_is_public(name):
    assert getattr(importlib.import_module(name), "__all__", None), f"{name} has no __all__"


def test_missing_names_are_noticed():
    """Meta-test: a name that is not there, and one listed twice."""

    class Module:
        __all__ = ("there", "there", "not_there,")
        there = 1

    assert missing_names(Module) == ["there", "there", "not_there,"]


def unread(sources: Iterable[Source]) -> list[str]:
    """Private functions, classes and methods that no code reads. What a decorator or a library calls is not known."""
    read: set[str] = set()
    made: list[tuple[str, str]] = []
    for source in sources:
        for node in source.nodes:
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                    read.add(name)
                case ast.FunctionDef(name=name, decorator_list=[]) | ast.ClassDef(name=name, decorator_list=[]):
                    made.append((source.path, name))
    private = ((path, name) for path, name in made if name.startswith("_") and not name.endswith("_"))
    return [f"{path}: {name}" for path, name in private if name not in read]


def reads(source: Source) -> set[tuple[str, str]]:
    """What a file reads of other modules: names that it imports, and attributes of modules that it imports."""
    found: set[tuple[str, str]] = set()
    modules: dict[str, str] = {}
    for node in source.nodes:
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                found |= {(module, one.name) for one in names}
                modules |= {one.asname or one.name: f"{module}.{one.name}" for one in names}
            case ast.Import(names=names):
                modules |= {one.asname: one.name for one in names if one.asname}
    for node in source.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                found.add((modules[name], attribute))
    return found


def left_behind(sources: list[Source]) -> list[str]:
    """Functions and classes of modules that neither another module nor the rest of their own reads."""
    read = set().union(*map(reads, sources))
    found: list[str] = []
    for source in sources:
        names = [{one.id for one in ast.walk(part) if isinstance(one, ast.Name)} for part in source.tree.body]
        for i, part in enumerate(source.tree.body):
            match part:
                case ast.FunctionDef(name=name, decorator_list=[]) | ast.ClassDef(name=name, decorator_list=[]):
                    own = any(name in other for other in (*names[:i], *names[i + 1 :]))
                    called = name.startswith(("__", "pytest_"))  # by Python, and by pytest
                    if not own and not called and (module_name(source.path), name) not in read:
                        found.append(f"{source.path}: {name}")
    return found


def test_no_function_is_left_behind():
    assert not left_behind([s for s in FILES if s.path.startswith("spmd/")])


def test_a_function_that_is_left_behind_is_noticed():
    """Meta-test: a name that another module has too is not read by that, nor by itself."""
    one = Source("spmd/_x.py", "def plus(x): return plus(x)\ndef times(): pass\ndef less(): pass")
    other = Source("spmd/_y.py", "import spmd._x as x\nfrom spmd._x import less\ndef plus(): x.times()\nplus()")
    assert left_behind([one, other]) == ["spmd/_x.py: plus"]


CALLED_BY_OTHERS = {"spmd/ops/_annotate.py: _recreate_cm"}  # `contextlib` calls it, of a context manager as a decorator


def test_no_private_code_is_left_behind():
    assert set(unread([s for s in FILES if s.path.startswith("spmd/")])) == CALLED_BY_OTHERS


def test_private_code_that_is_left_behind_is_noticed():
    """Meta-test: a function that nobody reads, beside one that is read, decorated, or called by Python."""
    text = """
def _left(): _used()
def _used(): pass
@register
def _listed(): pass
class Shown:
    def _repr_html_(self): pass
    def _forgotten(self): pass
"""
    assert unread([Source("spmd/_x.py", text)]) == ["spmd/_x.py: _left", "spmd/_x.py: _forgotten"]


def test_the_top_level_holds_what_was_agreed():
    allowed = {
        "AGENTS.md",  # where programs look for it
        "pyproject.toml",
        "README.md",
        "spmd",
        "tests",
        "examples",
        "docs",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
    }
    stray = [p.name for p in ROOT.iterdir() if not p.name.startswith(".") and p.name not in allowed]
    stray = [name for name in stray if not re.search(r"^(build|dist|shared|venv)$|\.egg-info$", name)]
    assert not stray


def pinned(text: str) -> set[str]:
    """The versions of ruff that a text names."""
    return set(re.findall(r"ruff==([\w.]+)", text))


def test_one_version_of_ruff():
    """Another version formats otherwise: the hooks before a commit, and the gate, use the same."""
    hooks, project = ((ROOT / name).read_text() for name in (".pre-commit-config.yaml", "pyproject.toml"))
    assert len(pinned(hooks)) == 1 and pinned(hooks) == pinned(project)
    assert pinned(hooks.replace("ruff==", "ruff==1", 1)) != pinned(project)


# -------------------- the budget


def off_budget(lines: dict[str, int], budget: dict[str, int]) -> list[str]:
    """Return the rooms that have more lines than their budget, or so few that it should be lower; or no budget."""
    found = [f"{room}: no budget" for room in lines.keys() ^ budget.keys()]
    pairs = {room: (lines[room], budget[room]) for room in lines.keys() & budget.keys()}
    return sorted(found + [f"{room}: {n} of {most}" for room, (n, most) in pairs.items() if not -SLACK < n - most <= 0])


def test_each_room_keeps_its_budget():
    assert off_budget({room: found["code"] for room, found in rooms().items()}, BUDGET) == []


def test_a_room_off_its_budget_is_noticed():
    """Meta-test."""
    assert off_budget({"a": 100, "b": 40}, {"a": 100, "b": 60}) == []
    assert off_budget({"a": 101, "b": 10, "c": 1}, {"a": 100, "b": 60}) == [
        "a: 101 of 100",
        "b: 10 of 60",
        "c: no budget",
    ]
