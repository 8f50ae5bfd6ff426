"""What a reader of `spmd` meets: lines by room, what a call passes through, circles of imports, names that hide others.

    python tests/benchmarks/house.py [--json FILE]

Lines of code are those that hold code: no blank lines, comments or docstrings. A call is the README's `mlp`, followed
with `sys.setprofile`: the functions of `spmd` that it enters, their files, and how often control passes from one file
of `spmd` to another.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

if __name__ == "__main__":  # run as a file, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import spmd

ROOT = Path(__file__).resolve().parents[2]
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
    except spmd.SpmdError:
        pass
    finally:
        sys.setprofile(None)
    return {"functions": len(entered), "files": len({file for file, _ in entered}), "passages": passages}


def calls() -> dict[str, dict[str, int]]:
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
    found = {"decorate": followed(lambda: made.append(spmd.kernel(pattern, mesh=mesh)(mlp)))}
    [kernel] = made
    found["first call"] = followed(lambda: kernel(x, w_in, w_out))
    kernel(x, w_in, w_out)
    found["warm call"] = followed(lambda: kernel(x, w_in, w_out))
    found["failing call"] = followed(lambda: kernel(x, w_in, jnp.ones((63, 32))))
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
    options = parser.parse_args()
    spmd.use_cpu_devices(8)
    found = {"rooms": rooms(), "calls": calls(), "circles": circles(), "hidden names": hidden_names()}
    print(f"{'room':12}{'files':>6}{'code':>8}{'docstrings':>12}")
    for room, counts in found["rooms"].items():
        print(f"{room:12}{counts['files']:6}{counts['code']:8}{counts['docstrings']:12}")
    sums = [sum(counts[key] for counts in found["rooms"].values()) for key in ("files", "code", "docstrings")]
    print(f"{'together':12}{sums[0]:6}{sums[1]:8}{sums[2]:12}\n")
    print(f"{'README mlp':14}{'functions':>10}{'files':>7}{'passages':>10}")
    for call, counts in found["calls"].items():
        print(f"{call:14}{counts['functions']:10}{counts['files']:7}{counts['passages']:10}")
    print("\ncircles of imports:", *(found["circles"] or ["none"]), sep="\n  ")
    print("modules that hide a function:", *(found["hidden names"] or ["none"]), sep="\n  ")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
