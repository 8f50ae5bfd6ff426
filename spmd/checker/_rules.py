"""What the checker knows of each primitive, in words: read off its tables, for `python -m spmd rules`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from spmd.checker._dataflow import Dataflow
from spmd.checker._linear import LINEAR
from spmd.checker._table import TABLE


class Rules(NamedTuple):
    """The rules in words.

    Attributes:
      table: For each primitive of the table, how dimensions pass, and the name of what becomes of a partial sum.
      partial: For each such name, what it says.
      own: For each primitive with code of its own, what that does.
    """

    table: Mapping[str, tuple[str, str]]
    partial: Mapping[str, str]
    own: Mapping[str, str]


def rules() -> Rules:
    """Every primitive that the checker has a rule for. What has none makes values unknown.

    >>> rules().table["reduce_max"], rules().partial["curved"]
    (('reduced: max', 'curved'), 'f of a partial sum is not a partial sum of f.')
    >>> rules().own["psum"]
    'psum, pmax, pmin: equal along their axes.'
    """
    own = Dataflow.rules
    table = {name: (entry.says, entry.linear) for name, entry in TABLE.items() if name not in own}
    partial = {name: _first_line(LINEAR[name]) for name in dict.fromkeys(linear for _, linear in table.values())}
    return Rules(table, partial, {name: _first_line(rule) for name, rule in own.items()})


def _first_line(rule: Any) -> str:
    return (inspect.getdoc(rule) or "").partition("\n")[0]
