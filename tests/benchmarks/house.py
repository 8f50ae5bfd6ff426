"""What a reader of `spmd` meets: lines by room, what a call passes through, ideas that are there more than once, circles
of imports, names that hide others.

    python tests/benchmarks/house.py [--root CHECKOUT] [--json FILE] [--check off]
    python tests/benchmarks/house.py --graph text|dot [--root CHECKOUT]

Lines of code are those that hold code: no blank lines, comments or docstrings. A call is the README's `mlp`, followed
with `sys.setprofile`: the functions of `spmd` that it enters, their files, and how often control passes from one file
of `spmd` to another. Before Python 3.12 a comprehension is a function too. With `--check off` the kernel is made
without the checker, and the difference is the checker's part. An idea is counted by the files that have its mark, a
line of code that nobody writes for anything else; they are printed, so that a reader can judge.

The graph shows which room imports from which, as text from the top floor down, or file by file for `dot -Tsvg`. With
`--root` all of it is measured on another checkout, as before a change: `git worktree add ../before 99bb065`.
"""

import argparse
import ast
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if "--root" in sys.argv[1:-1]:
    ROOT = Path(sys.argv[sys.argv.index("--root") + 1]).resolve()
sys.path.insert(0, str(ROOT))

import jax.numpy as jnp  # noqa: E402

import spmd  # noqa: E402

PACKAGE = ROOT / "spmd"
FILES = sorted(PACKAGE.rglob("*.py"))
QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


# -------------------- lines


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines of every docstring of a module."""
    found: set[int] = set()
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            found.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


def lines_of(path: Path) -> tuple[int, int]:
    """How many lines hold code, and how many docstrings."""
    documented = docstring_lines(ast.parse(path.read_text()))
    with tokenize.open(path) as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type not in QUIET]
    code = {line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - documented
    return len(code), len(documented)


def rooms() -> dict[str, dict[str, int]]:
    """Files, lines of code and lines of docstrings of each folder; the files beside them are `.`."""
    found: dict[str, Counter[str]] = {}
    for path in FILES:
        room = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "."
        code, documented = lines_of(path)
        found.setdefault(room, Counter()).update(files=1, code=code, docstrings=documented)
    return {room: dict(counts) for room, counts in sorted(found.items())}


# -------------------- what a call passes through


def followed(run: Callable[[], Any]) -> dict[str, int]:
    """The functions and files of `spmd` that a call enters, and how often it passes from one file to another."""
    entered: set[tuple[str, int]] = set()
    passages, here = 0, [""]

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal passages
        file = frame.f_code.co_filename
        if not file.startswith(str(PACKAGE)):
            return
        if event == "call":
            entered.add((file, frame.f_code.co_firstlineno))
            passages += bool(here[-1]) and here[-1] != file
            here.append(file)
        elif event == "return" and len(here) > 1:
            here.pop()

    sys.setprofile(profile)
    try:
        run()
    except spmd.errors.SpmdError:
        pass
    finally:
        sys.setprofile(None)
    return {"functions": len(entered), "files": len({file for file, _ in entered}), "passages": passages}


def calls(**how: Any) -> dict[str, dict[str, int]]:
    """The README's `mlp`: decorated, called, called again, and called with a weight that does not fit."""
    mesh = spmd.make_mesh(dp=2, tp=4)

    def mlp(x: Any, w_in: Any, w_out: Any) -> Any:
        x = spmd.all_gather(x, "b/dp s/tp d -> b/dp s d")
        w_in = spmd.all_gather(w_in, "d/dp f/tp -> d f/tp")
        h = spmd.einsum(x, w_in, "b/dp s d, d f/tp -> b/dp s f/tp")
        w_out = spmd.all_gather(w_out, "f/tp d/dp -> f/tp d")
        return spmd.einsum(h, w_out, "b/dp s f/tp, f/tp d -> b/dp s/tp d")

    pattern = "b/dp s/tp d, d/dp f/tp, f/tp d/dp -> b/dp s/tp d"
    made: list[Any] = []
    x, w_in, w_out = jnp.ones((4, 16, 32)), jnp.ones((32, 64)), jnp.ones((64, 32))
    found = {"decorate": followed(lambda: made.append(spmd.kernel(pattern, mesh=mesh, **how)(mlp)))}
    [kernel] = made
    found["first call"] = followed(lambda: kernel(x, w_in, w_out))
    kernel(x, w_in, w_out)
    found["warm call"] = followed(lambda: kernel(x, w_in, w_out))
    found["failing call"] = followed(lambda: kernel(x, w_in, jnp.ones((63, 32))))
    return found


# -------------------- ideas

MARKS = {
    "binders of sizes": r"\b(size|whole) % parts\b",  # a size that does not divide into the blocks of a layout
    "walkers of jaxprs": r"^\s*for \w+ in [\w.()]+\.eqns:",
    "matchers of trees": r"\bLayout\(spec\b",  # the layout that a tree has for some leaf
    "tables": r"\.[lr]just\((w|width|widths\[\w\]|column)\)",  # a cell as wide as its column
}


def ideas() -> dict[str, list[str]]:
    """The files that have each mark, in code."""
    found: dict[str, list[str]] = {idea: [] for idea in MARKS}
    for path in FILES:
        text = path.read_text()
        documented = docstring_lines(ast.parse(text))
        code = "\n".join(line for n, line in enumerate(text.splitlines(), 1) if n not in documented)
        for idea, mark in MARKS.items():
            if re.search(mark, code, re.MULTILINE):
                found[idea].append(path.relative_to(PACKAGE).as_posix())
    return found


# -------------------- imports


def imports(path: Path) -> Iterator[Path]:
    """The files of `spmd` that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            target = ROOT.joinpath(*name.split("."))
            for file in (target.with_suffix(".py"), target / "__init__.py"):
                if name.startswith("spmd.") and file.exists() and file != path:
                    yield file


def circles() -> list[list[str]]:
    """Sets of files each of which reaches all others of its set by imports, those inside functions too."""
    graph = {path: set(imports(path)) for path in FILES}
    reached: dict[Path, set[Path]] = {}
    for path in FILES:
        seen: set[Path] = set()
        ahead = list(graph[path])
        while ahead:
            if (one := ahead.pop()) not in seen:
                seen.add(one)
                ahead += graph.get(one, ())
        reached[path] = seen
    sets = {
        tuple(sorted(str(other.relative_to(PACKAGE)) for other in reached[path] if path in reached[other]))
        for path in FILES
        if path in reached[path]
    }
    return sorted(map(list, sets))


def room_of(path: Path) -> str:
    """The folder of a file; a file beside the folders is a room of its own."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def rooms_graph() -> dict[str, Counter[str]]:
    """How often each room imports from each other, without the package's own `__init__` and `__main__`."""
    graph: dict[str, Counter[str]] = {}
    for path in FILES:
        if path.parent == PACKAGE and path.stem.startswith("__"):
            continue
        edges = graph.setdefault(room_of(path), Counter())
        edges.update({room_of(other): 1 for other in imports(path) if room_of(other) != room_of(path)})
    return graph


def storeys(graph: dict[str, Counter[str]]) -> dict[str, int]:
    """The floor of each room, one above all that it imports from; rooms in a circle share one."""
    floor = dict.fromkeys(graph, 0)
    for _ in graph:  # a circle would rise for ever
        for room, others in graph.items():
            below = [floor[other] for other in others if room not in graph[other]]
            floor[room] = max([floor[room], *(one + 1 for one in below)])
    return floor


def graph_as_text() -> str:
    graph = rooms_graph()
    floor = storeys(graph)
    lines = []
    for room in sorted(graph, key=lambda room: (-floor[room], room)):
        others = sorted(graph[room], key=lambda other: (-floor[other], other))
        names = [f"{'(!) ' if room in graph[other] else ''}{other} {graph[room][other]}" for other in others]
        lines.append(f"{floor[room]:2}  {room:14} {', '.join(names)}".rstrip())
    return "\n".join(
        [
            "floor, room, and the rooms that it imports from, with the number of its files; (!) is a circle;\n`from spmd import ...` of the upper rooms is not shown",
            *lines,
        ]
    )


def graph_as_dot() -> str:
    """Every file, in a box for each room."""
    name = lambda path: f'"{path.relative_to(PACKAGE).with_suffix("").as_posix()}"'
    files = [path for path in FILES if path.name != "__init__.py"]
    lines = ["digraph spmd {", "  rankdir=BT; node [shape=box, fontsize=10];"]
    for room in dict.fromkeys(map(room_of, files)):
        inside = "; ".join(name(path) for path in files if room_of(path) == room)
        lines.append(f'  subgraph "cluster_{room}" {{ label="{room}"; {inside} }}')
    for path in files:
        lines += [f"  {name(path)} -> {name(other)};" for other in sorted(set(imports(path))) if other in files]
    return "\n".join([*lines, "}"])


def hidden_names() -> list[str]:
    """Modules whose name a public function of the same package has too."""
    found = []
    for path in FILES:
        stem = path.parent.name if path.stem == "__init__" else path.stem
        above = path.parent.parent if path.stem == "__init__" else path.parent
        name = ".".join(above.relative_to(ROOT).parts)
        module = sys.modules.get(name)
        if module is not None and not stem.startswith("_") and isinstance(getattr(module, stem, None), Callable):
            found.append(f"{name}.{stem}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--root", metavar="CHECKOUT", help="measure another checkout")
    parser.add_argument("--check", choices=["error", "warn", "off"], help="what the kernel says of the checker")
    parser.add_argument("--graph", choices=["text", "dot"], help="print the graph of imports only")
    options = parser.parse_args()
    if options.graph:
        print(graph_as_text() if options.graph == "text" else graph_as_dot())
        return
    spmd.use_cpu_devices(8)
    found = {
        "rooms": rooms(),
        "calls": calls(**({"check": options.check} if options.check else {})),
        "ideas": ideas(),
        "circles": circles(),
        "hidden names": hidden_names(),
    }
    print(f"{'room':12}{'files':>6}{'code':>8}{'docstrings':>12}")
    for room, counts in found["rooms"].items():
        print(f"{room:12}{counts['files']:6}{counts['code']:8}{counts['docstrings']:12}")
    sums = [sum(counts[key] for counts in found["rooms"].values()) for key in ("files", "code", "docstrings")]
    print(f"{'together':12}{sums[0]:6}{sums[1]:8}{sums[2]:12}\n")
    print(f"{'README mlp':14}{'functions':>10}{'files':>7}{'passages':>10}")
    for call, counts in found["calls"].items():
        print(f"{call:14}{counts['functions']:10}{counts['files']:7}{counts['passages']:10}")
    print()
    for idea, files in found["ideas"].items():
        print(f"{idea:18}{len(files):3}  {', '.join(files)}")
    print("\ncircles of imports:", *(found["circles"] or ["none"]), sep="\n  ")
    print("modules that hide a function:", *(found["hidden names"] or ["none"]), sep="\n  ")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
