"""Floor 5: whether every value is what its layouts say on each mesh axis: equal, different, a partial sum.

One pass over the traced jaxpr, nothing is evaluated. See the design, section 3, for the table it implements.
"""

from __future__ import annotations

from spmd.check._api import InState, OutputFacts, check_body, check_jaxpr, explain_output, in_states_of

__all__ = ["InState", "OutputFacts", "check_body", "check_jaxpr", "explain_output", "in_states_of"]
