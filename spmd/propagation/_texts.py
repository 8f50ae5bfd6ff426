"""Pieces of a kernel's text: what a value is called there, and attributes of operations as Python writes them."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from spmd.propagation._module import Place

Names = tuple[str, ...]
_DTYPES = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16", "i1": "bool"}
_DTYPES |= {"complex<f32>": "complex64", "complex<f64>": "complex128"}


class Made(NamedTuple):
    """A value as the text has it.

    Attributes:
      text: An expression.
      names: What its dimensions are called.
      place: How it lies.
      number: Whether it is one number, for arrays of any shape.
      whole: Of a term of a sum over devices, the call that sums too; RESULT stands for the layout of its result.
      along: The dimensions that this layout has in brackets.
      varies: The mesh axes along which it differs by JAX's type, once that is known.
      level: In how many functions of loops and branches it is made.
    """

    text: str
    names: Names
    place: Place
    number: bool = False
    whole: str = ""
    along: tuple[int, ...] = ()
    varies: frozenset[str] = frozenset()
    level: int = 0


def bare(text: str) -> str:
    """An expression without brackets around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0:
            return text[1:-1] if i == len(text) - 1 and "," not in text else text
    return text


def dtype_text(name: str) -> str:
    found = _DTYPES.get(name) or re.sub(r"^ui", "uint", re.sub(r"^i", "int", name))
    return f'"{found}"'


def literal(text: str, dtype: str) -> str:
    if dtype == "i1":
        return text.capitalize()
    if text.startswith("0x"):
        bits = int(text, 16)
        special = {"f32": {0xFF800000: "-jnp.inf", 0x7F800000: "jnp.inf", 0x7FC00000: "jnp.nan"}}.get(dtype, {})
        special |= {0xFF80: "-jnp.inf", 0x7F80: "jnp.inf"} if dtype == "bf16" else {}
        return special.get(bits, "jnp.nan")
    if dtype.startswith(("i", "ui")):  # a bare number is an int32 to a function of jax.lax
        return text if dtype == "i32" else f"jnp.{dtype_text(dtype)[1:-1]}({text})"
    number = float(text)
    return repr(number) if math.isfinite(number) else f"jnp.{number}"


def integers(op: Any, name: str) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", str(op.attributes[name]).partition(":")[2])]


def numbers_of(op: Any, attribute: str, name: str) -> list[int]:
    found = re.search(rf"{name} = \[([^\]]*)\]", str(op.attributes[attribute]))
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []
