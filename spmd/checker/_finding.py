"""One thing that a check found: a fault with its class and its line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from spmd.errors import Fault


@dataclass(frozen=True, slots=True)
class Finding(Fault):
    """One fault that the checker found.

    Attributes:
      kind: Its class, one word; the page "What the checker knows" has one section for each.
      line: The user's line, `file:line (function)`.
      certain: Whether it is an error. Of a raw `shard_map` it may be meant: one result per device.
    """

    kind: str = ""
    line: str = ""
    certain: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "kind": self.kind,
            "line": self.line,
            "certain": self.certain,
            "rule": self.rule,
            "got": list(self.got),
            "fix": [str(one) for one in self.fixes],
            "advice": self.advice,
            "message": str(self),
        }


def found(fault: Fault, kind: str, line: str, certain: bool = True) -> Finding:
    """The same fault with its class and its line."""
    return Finding(**{f.name: getattr(fault, f.name) for f in fields(Fault)}, kind=kind, line=line, certain=certain)
