"""What the annotations of a class say about layouts, as they are and as postponed code."""

# ruff: noqa: F821 - annotations that are layouts
import dataclasses
import sys
import types
import typing

from spmd._trees.leaves import Each, Unknown, annotated
from spmd.language import Layout


@dataclasses.dataclass
class Norm:
    scale: "d/dp"


class Block:
    norm: Norm
    up: typing.Annotated[typing.Any, "d f/tp"]
    down: Layout("f/tp d")
    rest: list[Norm]
    pair: tuple["a", "b"]
    maybe: Norm | None
    count: typing.ClassVar[int] = 0
    name: int | str


def test_each_kind_of_annotation():
    assert annotated(Block) == {
        "norm": Norm,
        "up": "d f/tp",
        "down": Layout("f/tp d"),
        "rest": Each(Norm),
        "pair": ("a", "b"),
        "maybe": Norm,
        "name": Unknown("int | str"),
    }


def test_a_subclass_adds_to_what_its_bases_say():
    class Wide(Norm):
        bias: "d/tp"

    assert annotated(Wide) == {"scale": "d/dp", "bias": "d/tp"}


def test_postponed_annotations_say_the_same():
    space = {"__name__": "postponed"}
    code = "from __future__ import annotations\nclass Norm:\n  scale: 'd/dp'\n  many: list['d/dp']\n  lost: Nowhere\n"
    exec(code, space)
    module = types.ModuleType("postponed")
    vars(module).update(space)
    sys.modules["postponed"] = module
    try:
        assert annotated(module.Norm) == {"scale": "d/dp", "many": Each("d/dp"), "lost": Unknown("Nowhere")}
    finally:
        del sys.modules["postponed"]
