"""Programs that are wrong, one per message: `BAD` maps a name to a function that runs one on a 2 x 4 mesh; `FIXED`
runs them as the message says, and compares the numbers with plain JAX on one device. Where the message has a line
`fix:`, that line itself is run: the program takes it as its argument `fix`, and says what its names stand for."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd

Program = Callable[[Any], Any]
BAD: dict[str, Program] = {}
FIXED: dict[str, Callable[..., Any]] = {}

X = np.arange(32.0, dtype=np.float32).reshape(8, 4)
V = np.arange(8.0, dtype=np.float32)


class Pasted:
    """The lines `fix:` of a message, as the code that they are.

    A call or a value: `fix(x=x)`. Keywords such as `to="invarying"`: `f(x, **fix())`. Of several lines that differ the
    second is `fix(1, x=x)`. `used` tells which ones a program ran.
    """

    def __init__(self, message: str):
        self.lines = list(dict.fromkeys(fixes_of(message)))
        self.used: set[int] = set()

    def __call__(self, line: int = 0, /, **names: Any) -> Any:
        self.used.add(line)
        known = {"spmd": spmd, "jax": jax, "jnp": jnp, "np": np, **names}
        kind, code = read(self.lines[line])
        return exec(code, known) if kind == "exec" else eval(code, known)


def fixes_of(message: str) -> list[str]:
    """The code of each line `fix:`, which goes on where the next line is indented as far."""
    found: list[str] = []
    open_fix = False
    for line in message.split("\n"):
        if line.startswith("fix: "):
            found.append(line.removeprefix("fix: "))
        elif open_fix and line.startswith("     "):
            found[-1] += "\n" + line[5:]
        open_fix = line.startswith("fix: ") or (open_fix and line.startswith("     "))
    return found


def facts_of(message: str) -> list[str]:
    """The lines of a message but those of its fixes and its advice."""
    rest = re.sub(r"^(fix|advice): .*(\n +.*)*\n?", "", message, flags=re.M)
    return [re.sub("^got: ", "- ", line) for line in rest.split("\n") if line and line != "got:"]


def read(text: str) -> tuple[str, Any]:
    """The code of one fix: a value, the arguments of a call (as a dict), or a statement; a SyntaxError otherwise."""
    for kind, form in (("eval", text), ("eval", f"dict({text})")):
        try:
            return kind, compile(form, "<fix>", kind)
        except SyntaxError:
            pass
    return "exec", compile(text, "<fix>", "exec")


def bad(fn: Program | None = None, /, **programs: Program | tuple[Program, Callable[..., Any]]) -> Any:
    """Register a wrong program under its name, or several by keyword; a pair is the wrong one and the mended one."""
    for name, program in ({fn.__name__: fn} if fn else programs).items():
        BAD[name], *mended = program if isinstance(program, tuple) else (program,)
        if mended:
            [FIXED[name]] = mended
    return fn


def fixed(fn: Callable[..., Any]) -> Callable[..., Any]:
    FIXED[fn.__name__.removesuffix("_fixed")] = fn
    return fn


def body(pattern: str, fn: Callable[..., Any], mesh: Any, *args: Any, **options: Any) -> Any:
    """Run `fn` as a kernel on X or on other arguments."""
    return spmd.kernel(pattern, mesh=mesh, **options)(fn)(*(args or (X,)))
