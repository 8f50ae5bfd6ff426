"""What a check found: facts with a text, and the sequence that `spmd.check` gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from spmd.checker._source import called_at
from spmd.errors import Fault, ReplicationError, warn


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


def found(fault: Fault, kind: str, line: str, certain: bool = True) -> Finding:
    """The same fault with its class and its line."""
    return Finding(**{f.name: getattr(fault, f.name) for f in fields(Fault)}, kind=kind, line=line, certain=certain)


def early(error: ReplicationError, line: str) -> ReplicationError:
    """An error that ends the trace before the walk, with itself as its one finding."""
    error.findings = Findings((found(error.fault, "layout", line or called_at()),))
    return error


class Findings(tuple[Finding, ...]):
    """All findings of one check, in the order of the program. Empty and falsy where there are none.

    Its text is all messages.
    """

    __slots__ = ()

    def __str__(self) -> str:
        if len(self) < 2:
            return str(self[0]) if self else "no findings"
        return "\n\n".join(f"({i}) {one}" for i, one in enumerate(self, start=1))


def report(kernel: str, findings: Iterable[Finding], how: str = "error") -> None:
    """Raise one error with all findings, or warn of them. Without findings, do nothing."""
    unique = Findings(dict.fromkeys(findings))
    if not unique:
        return
    head = f"{kernel}: {len(unique)} values are not what their layouts say.\n\n" if len(unique) > 1 else ""
    if how == "warn":
        warn(f"{head}{unique}", UserWarning)
        return
    error = ReplicationError(f"{head}{unique}") if head else ReplicationError(unique[0])
    error.findings = unique
    raise error
