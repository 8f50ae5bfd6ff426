"""Types propose, and numbers decide. Each value's layout is inferred, and compared with what strings claim of it.

What types suspect is asked of the numbers: the traced jaxpr is interpreted in NumPy, on its mesh and on a mesh of ones.
docs/pages/checker.md says what is proved and what is not.
"""

from __future__ import annotations

from spmd._jaxprs.lines import line_of
from spmd.checker._api import (
    ASKED,
    OutputFacts,
    check_body,
    check_jaxpr,
    check_names,
    checked,
    closed_rows,
    explain_output,
    numbers_asked,
)
from spmd.checker._arbiter import Trial, tried
from spmd.checker._dataflow import Rules, rules
from spmd.checker._finding import Finding
from spmd.checker._findings import Findings, NotShownWarning, early
from spmd.checker._verdict import Verdict

__all__ = [
    "ASKED",
    "Finding",
    "Findings",
    "NotShownWarning",
    "OutputFacts",
    "Rules",
    "Trial",
    "Verdict",
    "check_body",
    "check_jaxpr",
    "check_names",
    "checked",
    "closed_rows",
    "early",
    "explain_output",
    "line_of",
    "numbers_asked",
    "rules",
    "tried",
]
