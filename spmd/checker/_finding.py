"""One thing that a check found: a fault with its class and its line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from spmd._text import fields_of
from spmd.errors import Fault

MEANT = "meant per shard?"  # what is asked where numbers do not decide
_NAMED = "meant by this name?"  # what is asked where sizes do not


@dataclass(frozen=True, slots=True)
class Finding(Fault):
    """One fault that the checker found. Its text is the message, and the parts of the message are values.

    Attributes:
      kind: Its class, one word; the page "What the checker knows" has one section for each.
      line: The user's line, `file:line (function)`.
      certain: Whether it is an error. If not, it may be meant per shard, as in a raw `shard_map` that gives one result
        per device.
      rule: What is wrong, in one sentence.
      call: The call whose string it is about.
      got: What was found: the values, how they came to be, the mesh.
      fix: The line to paste, if there is one.
      advice: What to do otherwise.

    Example:
      >>> import jax, spmd
      >>> @spmd.kernel("b/dp d -> d", mesh=spmd.make_mesh(dp=4))
      ... def column_sums(x):
      ...     return x.sum(0)
      >>> [finding] = spmd.check(column_sums, jax.ShapeDtypeStruct((8, 2), "float32"))
      >>> finding.kind, finding.certain, str(finding.fix)
      ('partial', True, 'spmd.psum(result, "d {U:dp} -> d")')
    """

    kind: str = ""
    line: str = ""
    certain: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = fields_of(self, "kind", "line", "certain", "rule", "got", "advice")
        return {**values, "fix": [str(one) for one in self.fixes], "message": str(self)}


def question(findings: Iterable[Finding]) -> str:
    """What is asked of those that are not certain: of names alone, something else than of shards."""
    kinds = {one.kind for one in findings if not one.certain}
    return "" if not kinds else _NAMED if kinds == {"name"} else MEANT


def found(fault: Fault, kind: str, line: str, certain: bool = True) -> Finding:
    """The same fault with its class and its line."""
    return Finding(**{f.name: getattr(fault, f.name) for f in fields(Fault)}, kind=kind, line=line, certain=certain)
