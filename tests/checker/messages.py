"""The wrong programs and their messages, as messages.txt has them; SPMD_UPDATE_GOLDEN=1 writes it anew."""

import os
import pathlib

from tests.checker import wrong_programs
from tests.checker.harness import message

MESSAGES = pathlib.Path(__file__).parent / "messages.txt"
WRONG = {n: f for n, f in vars(wrong_programs).items() if getattr(f, "__module__", "") == wrong_programs.__name__}
WRONG = {name: program for name, program in WRONG.items() if name != "helper"}
if os.environ.get("SPMD_UPDATE_GOLDEN"):
    MESSAGES.write_text("".join(f"## {name}\n{message(program)}\n" for name, program in WRONG.items()))
GOLDEN = {
    section.split("\n", 1)[0].strip(): section.split("\n", 1)[1].strip("\n")
    for section in MESSAGES.read_text().split("## ")[1:]
}

# A message about a string shows the string, or the output that lies otherwise.
OF_STRINGS = [name for name, text in GOLDEN.items() if "^" in text or "- an o" in text or "output 0, " in text]
OF_EQUATIONS = [name for name in GOLDEN if name not in OF_STRINGS]
