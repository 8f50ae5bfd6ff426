"""Which suspicions hang on a side that no draw took.

Numbers clear a suspicion by agreeing. They do not where what is suspected decides between sides of which they show one,
or stands on the other one:

    jnp.where(jnp.abs(g).max() > 1e4, old, new)  # each device looks at its own block, and no draw is so large
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from spmd._jaxprs.lines import call_site, line_of
from spmd._jaxprs.walker import Domain, Equation, Held, Variable, opened, walk
from spmd.checker._choices import BEYOND, CHOICES, TIE, Unreached
from spmd.checker._engine import Engine
from spmd.checker._finding import Finding
from spmd.checker._state import QUIET, State

_PLACES = ("mixed", "order", "disagree")  # what is suspected of where elements lie, which no number decides
_DECIDED: frozenset[int] = frozenset((0,))  # what an open choice decided by unfinished pieces; no equation has this id


def hanging(suspicions: Sequence[Finding], left: Collection[Unreached], checked: Engine) -> list[Finding]:
    """Return the suspicions that hang on these sides, and those that name no equation.

    Args:
      suspicions: What types suspect.
      left: The sides that no draw took.
      checked: What suspects.
    """
    about = {id(checked.about[one]) for one in suspicions if one in checked.about and one.kind not in _PLACES}
    found = _Hanging(about, left, checked)
    walk(checked.root, [frozenset()] * len(opened(checked.root)[0].invars), found)
    return [one for one in suspicions if one not in checked.about or id(checked.about[one]) in found.hanging]


class _Hanging(Domain):
    """Through which suspected equations each value went.

    Attributes:
      about: The suspected equations, by their `id`.
      open: For the primitive and the line of each choice with a side that no draw took, the sides that some took.
      checked: What suspects.
      aside: How many branches around the walk no draw took.
      hanging: The suspected equations that hang on such a side.
    """

    def __init__(self, about: Collection[int], left: Collection[Unreached], checked: Engine) -> None:
        super().__init__()
        self.about, self.checked = about, checked
        self.open = {
            (one.what, one.line): one.taken for one in left if one.question not in (BEYOND, TIE) and not one.seen
        }
        self.aside = 0
        self.hanging: set[int] = set()
        self.keep = self._note_suspicion

    def constant(self, var: Variable | None, value: Any) -> frozenset[int]:
        return frozenset()

    def join(self, one: frozenset[int], other: frozenset[int]) -> frozenset[int]:
        return one | other

    def step(self, eqn: Equation, operands: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        return [frozenset[int]().union(*operands)] * len(eqn.outvars)

    def branches(
        self, eqn: Equation, parts: Sequence[Held], operands: Sequence[frozenset[int]]
    ) -> list[frozenset[int]]:
        taken, outs = self._sides_taken(eqn), []
        for side, part in enumerate(parts):
            self.aside += (untaken := taken is not None and side not in taken)
            outs.append(self.run(eqn, part, part.of(operands)))
            self.aside -= untaken
        return [frozenset[int]().union(*found) for found in zip(*outs, strict=True)]

    def _sides_taken(self, eqn: Equation) -> frozenset[Any] | None:
        """The sides that some draw took, of a choice of which none took all; else None."""
        if eqn.primitive.name not in CHOICES or (site := call_site(eqn, self.callers)) is None:
            return None
        return self.open.get((eqn.primitive.name, line_of(*site)))

    def _note_suspicion(self, eqn: Equation, operands: Sequence[frozenset[int]], outs: Any) -> Any:
        suspected, read = id(eqn) in self.about, frozenset[int]().union(*operands)
        taken = self._sides_taken(eqn)
        if suspected and (self.aside or taken is not None or read & _DECIDED):
            self.hanging.add(id(eqn))
        marks: frozenset[int] = frozenset((id(eqn),)) if suspected else frozenset()
        if taken is not None:
            chooses = eqn.primitive.name in ("select_n", "cond")
            self.hanging |= operands[0] if chooses else read
            if eqn.primitive.name == "select_n":
                self.hanging |= frozenset[int]().union(*(x for i, x in enumerate(operands[1:]) if i not in taken))
            if any(map(self._is_unfinished, eqn.invars[:1] if chooses else eqn.invars)):
                marks |= _DECIDED
        return [x | marks for x in outs] if marks else outs

    def _is_unfinished(self, atom: Variable) -> bool:
        state = None if hasattr(atom, "val") else self.checked.known.get(atom)
        pieces = isinstance(state, State) and any(one.kind not in QUIET for one in state.pending)
        return pieces or (isinstance(state, State) and bool(state.partial))
