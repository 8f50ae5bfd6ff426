"""Whether every value is what its layouts say on each mesh axis: equal, different, a partial sum.

One pass over the traced jaxpr, nothing is evaluated. docs/pages/errors.md says what it knows and what it does not.
"""

from __future__ import annotations

from spmd.checker._api import InState, OutputFacts, check_body, check_jaxpr, explain_output, in_states_of

__all__ = ["InState", "OutputFacts", "check_body", "check_jaxpr", "explain_output", "in_states_of"]
