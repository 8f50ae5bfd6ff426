"""All that a check found: the sequence that `spmd.check` gives, and the error or warning that a first call gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

from spmd._jaxprs.lines import called_at
from spmd._text import Table, html_page
from spmd.checker._finding import Finding, found, question
from spmd.checker._verdict import Verdict
from spmd.errors import ReplicationError, SpmdError, warn

if TYPE_CHECKING:
    from spmd.inspect._source import Source


def early(error: ReplicationError, line: str) -> ReplicationError:
    """An error that ends the trace before the walk. It is its own one finding."""
    error.findings = Findings((found(error.fault, "layout", line or called_at()),))
    return error


Listing = Callable[[Any, str, Iterable[Finding]], "Source"]
"""From a program, its name, and what was found in it, to its source."""


class Findings(tuple[Finding, ...]):
    """All findings of one check, in the order of the program. Empty and falsy if there are none.

    Printed, it shows all messages; without findings, the verdict.

    Attributes:
      verdict: What is known of the program: proved, tested, wrong or not tested.

    Example:
      >>> import jax, spmd
      >>> @spmd.kernel("b/dp d -> d", mesh=spmd.make_mesh(dp=4))
      ... def column_sums(x):
      ...     return x.sum(0)
      >>> findings = spmd.check(column_sums, jax.ShapeDtypeStruct((8, 2), "float32"))
      >>> bool(findings), [str(one.fix) for one in findings]
      (True, ['spmd.psum(result, "d {U:dp} -> d")'])
    """

    verdict: Verdict
    _listing: Callable[[Findings], Source] | None

    def __new__(
        cls,
        findings: Iterable[Finding] = (),
        listing: Callable[[Findings], Source] | None = None,
        verdict: Verdict | None = None,
    ) -> Self:
        self = super().__new__(cls, findings)
        self._listing, self.verdict = listing, verdict or Verdict("")
        return self

    def __reduce__(self) -> Any:
        """Another process gets the findings without their program: a jaxpr cannot be pickled."""
        return type(self), (tuple(self), None, self.verdict)

    def __str__(self) -> str:
        if len(self) < 2:
            return _asked(self[0]) if self else str(self.verdict)
        return "\n\n".join(f"({i}) {_asked(one)}" for i, one in enumerate(self, start=1))

    def _repr_html_(self) -> str:
        rows = [(one.kind, one.line, _asked(one)) for one in self]
        tables = [Table(rows, ("kind", "line", "message"))] if rows else []
        heading = "1 finding" if len(self) == 1 else f"{len(self)} findings"
        return html_page(heading, tables, empty="" if rows else str(self.verdict))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"verdict": self.verdict.to_dict(), "findings": [one.to_dict() for one in self]}

    def source(self) -> Source:
        """Show the program as it is written, with the inferred layouts beside each line.

        Beside the `def` of a kernel, or of another function that JAX traces alone, stand the arguments. Beside a line
        stand the names that it gives to values, and beside a `return` what is returned. `h  b/dp s f/tp` reads as any
        layout does. A dimension has the name that a string gave it, or its size on the whole array. Behind the
        dimensions stands what else is known:

        - `{U:tp}`: each device along tp holds a term of a sum.
        - `{V:tp}`: the value differs along tp, and nobody knows how.
        - `s/?`: nobody knows how this dimension lies.
        - `? pending max over tp`: a maximum was taken of each device's own piece, and is not complete.
        - `b/dp s | b s`: the line runs several times, or its name stands for several arrays.

        Along the axes that are not mentioned the value is equal. Every function of the user's that the program calls
        is shown, in whichever file. A finding stands under its line. The backward pass is not shown: JAX wrote it.

        Communication: none. The program is not traced again.

        Returns:
          The source. Its text is what is printed, in a notebook it is a table, and `blocks` has the lines as values.
          Where nobody has the source, it lists line numbers and primitives.

        Raises:
          SpmdError: These findings are not from `spmd.check`. A kernel's first call does not keep what it infers.

        Example:
          >>> import jax, jax.numpy as jnp, spmd
          >>> mesh = spmd.make_mesh(dp=2, tp=4)
          >>> @spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)
          ... def norms(x):
          ...     squares = jnp.sum(x**2, axis=1)
          ...     return jnp.sqrt(jax.lax.psum(squares, "tp"))
          >>> [block] = spmd.check(norms, jax.ShapeDtypeStruct((4, 8), "float32")).source().blocks
          >>> [str(value) for line in block.lines for value in line.values]
          ['x  b/dp d/tp', 'squares  b/dp {U:tp}', 'b/dp']
        """
        if self._listing is None:
            rule = "these findings do not have the program that they were made of."
            raise SpmdError(rule, call="findings.source()", advice="spmd.check(fn, *args).source()")
        return self._listing(self)


class NotShownWarning(UserWarning):
    """What types suspect hangs on a side of a choice that no draw took."""


def _asked(one: Finding) -> str:
    """A finding, which is a question where it is not certain."""
    return str(one) if one.certain else f"{question([one])}\n{one}"


def report(kernel: str, findings: Iterable[Finding], how: str = "error", why: str = "", *, hang: bool = False) -> None:
    """Raise one error with all findings that are certain, or warn. Without findings, do nothing.

    Args:
      kernel: The kernel, for the message.
      findings: What was found.
      how: "error" or "warn".
      why: Why numbers do not tell, if some findings are not certain for that reason.
      hang: Whether that is because they hang on what no draw showed.
    """
    every = dict.fromkeys(findings)
    unsure = [one for one in every if not one.certain] if how == "error" and why else []
    if unsure:
        warn(f"{Findings(unsure)}\nNumbers do not tell: {why}.", NotShownWarning if hang else UserWarning)
    unique = Findings(one for one in every if one not in unsure)
    if not unique:
        return
    head = f"{kernel}: {len(unique)} values are not what their layouts say.\n\n" if len(unique) > 1 else ""
    if how == "warn":
        warn(f"{head}{unique}", UserWarning)
        return
    error = ReplicationError(f"{head}{unique}") if head else ReplicationError(unique[0])
    error.findings = unique
    raise error
