"""Layouts of trees, by rules over paths and by prefix trees."""

import dataclasses
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spmd import match_layouts
from spmd._trees.matching import match_prefix
from spmd.errors import LayoutError
from spmd.language import Layout

W, V = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    w: "d f/tp"  # noqa: F722
    scale: typing.Annotated[jax.Array, "d"]
    rate: float = dataclasses.field(default=0.1, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    embed: "v/tp d"  # noqa: F722
    blocks: list[Block]
    last: Block | None
    table: dict[str, "d"]  # noqa: F821
    pair: tuple["d", "d f"]  # noqa: F722, F821
    out: Layout("v d/dp")
    count: typing.ClassVar[int] = 0


class Plain:
    w: "d f"  # noqa: F722
    v: "f"  # noqa: F821


class Module(eqx.Module):
    w: jax.Array
    act: typing.Callable
    name: str = eqx.field(static=True)
    eps: float = 1e-5


def model():
    block = Block(W, V)
    return Model(W, [block, block], None, {"a": V}, (V, W), W)


def said(layouts_tree, tree, what="params"):
    return [
        (path, None if layout is None else str(layout)) for path, _, layout in match_prefix(layouts_tree, tree, what)
    ]


def message(call):
    with pytest.raises(LayoutError) as caught:
        call()
    return caught.value.args[0].split("\n")


# --- rules


def test_rules():
    tree = {
        "norm": {"scale": V},
        "layers": [{"w": W, "v": V}, {"w": W, "v": V}],
        "none": None,
        "act": jnp.tanh,
    }
    found = match_layouts(tree, {"norm/*": "d", "**/w": "d/dp f/tp", "layers/1/v": Layout("d/x"), "**": "..."})
    assert found == {
        "norm": {"scale": Layout("d")},
        "layers": [
            {"w": Layout("d/dp f/tp"), "v": Layout("...")},
            {"w": Layout("d/dp f/tp"), "v": Layout("d/x")},
        ],
        "none": None,
        "act": None,
    }


def test_rules_on_classes():
    found = match_layouts(
        model(),
        {
            "embed": "v d",
            "blocks/*/w": "d f",
            "**/scale": "d",
            "table/?": "d",
            "pair/0": "d",
            "*/1": "d f",
            "out": "v d",
        },
    )
    assert found.blocks[1].w == Layout("d f")
    assert found.blocks[1].rate == 0.1
    module = Module(jnp.ones((2, 3)), jnp.tanh, "m")
    found = match_layouts(module, {"w": "d f"})
    assert (found.w, found.act, found.name) == (Layout("d f"), None, "m")


def test_rules_on_nnx():
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    found = match_layouts({"l": nnx.state(linear)}, {"l/kernel": "d f/tp", "**/bias": "f/tp"})
    assert [str(one) for one in jax.tree.leaves(found)] == ["f/tp", "d f/tp"]


def test_rules_that_agree_may_overlap():
    assert match_layouts({"a": {"w": V}}, {"a/*": "d", "**/w": "d"}) == {"a": {"w": Layout("d")}}
    assert match_layouts(W, {"**": "d f"}) == Layout("d f")


def test_stars_stop_at_slashes():
    assert message(lambda: match_layouts({"a": {"b": V}}, {"*": "d"}))[2:] == [
        "got:",
        "- no rule for a/b, an array float32[3]",
        "- rule '*' matches no array",
    ]


def test_all_failures_of_rules_at_once():
    tree = {"mlp": {"w_in": W, "w_out": W}, "norm": {"scale": V, "shift": V}, "emb": W}
    rules = {"**/w_inn": "d f", "**/w_*": "d f/tp", "mlp/w_out": "f d", "norm/*": "d f", "emd": "v d"}
    assert message(lambda: match_layouts(tree, rules)) == [
        "match_layouts(tree, rules)",
        "Each array needs one layout, and each rule an array that it matches.",
        "got:",
        "- no rule for emb, an array float32[2,3]; did you mean 'emd'?",
        "- two rules disagree on mlp/w_out: '**/w_*': 'd f/tp' and 'mlp/w_out': 'f d'",
        "- rule 'norm/*': 'd f' does not fit the rank of norm/scale, an array float32[3]",
        "- rule 'norm/*': 'd f' does not fit the rank of norm/shift, an array float32[3]",
        "- rule '**/w_inn' matches no array; did you mean 'mlp/w_in'?",
        "- rule 'emd' matches no array; did you mean 'emb'?",
    ]


def test_a_broken_layout_in_a_rule_names_the_rule():
    assert message(lambda: match_layouts({"w": W}, {"w": "d/dp f/dp"}))[:2] == [
        "'w': 'd/dp f/dp'",
        "           ^^^^",
    ]


# --- prefixes


def test_a_string_is_for_every_array_below():
    tree = {"b": [W, None, "text"], "a": V, "f": 3.0}
    assert said("...", tree) == [
        ("params['a']", "..."),
        ("params['b'][0]", "..."),
        ("params['b'][2]", None),
        ("params['f']", None),
    ]
    assert [leaf for _, leaf, _ in match_prefix("...", tree, "x")] == jax.tree.leaves(tree)
    assert said("scalar", 3.0, "x") == [("x", "scalar")]
    assert said("b d", None, "mask") == []


def test_containers():
    class Point(typing.NamedTuple):
        x: object
        y: object

    tree = {"w": W, "pair": (V, [W, W]), "p": Point(V, W), "n": None, "step": 3}
    expected = [
        ("params['p'].x", "d"),
        ("params['p'].y", "d f"),
        ("params['pair'][0]", "d"),
        ("params['pair'][1][0]", "a b"),
        ("params['pair'][1][1]", "a b"),
        ("params['step']", None),
        ("params['w']", "d f"),
    ]
    assert said({"w": "d f", "pair": ["d", "a b"], "p": Point("d", "d f"), "n": "x"}, tree) == expected
    assert said(lambda one: {"w": "d f", "pair": ["d", "a b"], "p": {"x": "d", "y": "d f"}}, tree) == expected


def test_a_class_with_annotations():
    expected = [
        ("params.embed", "v/tp d"),
        ("params.blocks[0].w", "d f/tp"),
        ("params.blocks[0].scale", "d"),
        ("params.blocks[1].w", "d f/tp"),
        ("params.blocks[1].scale", "d"),
        ("params.table['a']", "d"),
        ("params.pair[0]", "d"),
        ("params.pair[1]", "d f"),
        ("params.out", "v d/dp"),
    ]
    assert said(Model, model()) == expected
    assert said(Plain, {"w": W, "v": V}) == [("params['v']", "f"), ("params['w']", "d f")]
    assert said(Model, dataclasses.replace(model(), last=Block(W, V)))[5:7] == [
        ("params.last.w", "d f/tp"),
        ("params.last.scale", "d"),
    ]


POSTPONED = """
from __future__ import annotations
import dataclasses, jax, typing

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Inner:
    w: "d/dp f/tp"
    count: int = 0

@dataclasses.dataclass
class Base:
    head: 'd v/tp'

def local():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Local:
        w: "a b"

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Outer(Base):
        kind: typing.ClassVar[str] = "x"
        inner: Inner
        inners: tuple[Inner, ...]
        local: Local
        quoted: "Inner"
        noted: typing.Annotated[jax.Array, "d"]
        rest: typing.Any = None
    return Local, Outer
"""


def test_postponed_annotations(tmp_path, monkeypatch):
    (tmp_path / "postponed_layouts.py").write_text(POSTPONED)
    monkeypatch.syspath_prepend(tmp_path)
    import postponed_layouts as module

    local, outer = module.local()
    inner = module.Inner(W)
    tree = outer(V, inner, (inner,), local(W), inner, V)
    assert said(outer, tree) == [
        ("params.head", "d v/tp"),
        ("params.inner.w", "d/dp f/tp"),
        ("params.inner.count", None),
        ("params.inners[0].w", "d/dp f/tp"),
        ("params.inners[0].count", None),
        ("params.local.w", "a b"),
        ("params.quoted.w", "d/dp f/tp"),
        ("params.quoted.count", None),
        ("params.noted", "d"),
    ]
    assert message(lambda: said(outer, dataclasses.replace(tree, rest=V))) == [
        "The layouts of params follow its structure.",
        "got: params.rest: the class Any has no layouts, but here is an array float32[3]",
    ]


def test_an_array_without_dimensions_is_scalar_where_nothing_else_is_said():
    n = jax.ShapeDtypeStruct((), jnp.int32)
    assert match_layouts({"w": W, "n": n}, {"w": "d f"}) == {"w": Layout("d f"), "n": Layout("scalar")}
    assert match_layouts({"w": W, "n": n}, {"**": "d f"}) == {"w": Layout("d f"), "n": Layout("scalar")}
    assert match_layouts({"w": V, "n": n}, {"**": "..."})["n"] == Layout("...")
    assert message(lambda: match_layouts({"n": n}, {"n": "d"}))[2:] == [
        "got: rule 'n': 'd' does not fit the rank of n, an array int32[]",
    ]
    for spec in ({"w": "d f"}, {"w": "d f", "n": None}, "d f", {"w": "d f", "n": "scalar"}):
        assert said(spec, {"w": W, "n": n}) == [("params['n']", "scalar"), ("params['w']", "d f")]
    assert said("...", {"w": W, "n": n})[0] == ("params['n']", "...")
    assert said("d", n) == [("params", "d")]  # its own layout is taken at its word, and fails where ranks are compared

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        w: "d f"  # noqa: F722
        count: jax.Array
        step: typing.Any

    assert said(State, State(W, n, n)) == [
        ("params.w", "d f"),
        ("params.count", "scalar"),
        ("params.step", "scalar"),
    ]


def test_a_container_of_layouts_for_a_place_that_is_not_there():
    assert message(lambda: said({"w": "d f", "vv": {"x": "d"}}, {"w": W}))[1:] == [
        "got: params: a layout for 'vv', but here is a dict with 'w'",
    ]


def test_modules():
    module = Module(jnp.ones((2, 3)), jnp.tanh, "m")
    expected = [("m.w", "d f"), ("m.act", None), ("m.eps", None)]
    assert said("d f", module, "m") == expected
    assert said({"w": "d f"}, module, "m") == expected
    assert said(match_layouts(module, {"w": "d f"}), module, "m") == expected
    assert said(lambda one: match_layouts(one, {"w": "d f"}), module, "m") == expected
    mlp = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    found = said(match_layouts(mlp, {"**/weight": "o i", "**/bias": "o"}), mlp, "m")
    assert [layout for _, layout in found] == ["o i", "o", "o i", "o", None, None]


def test_nnx():
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = nnx.state(linear)
    expected = [("p['bias'].value", "f"), ("p['kernel'].value", "d f")]
    assert said({"kernel": "d f", "bias": "f"}, state, "p") == expected
    assert said(match_layouts(state, {"kernel": "d f", "bias": "f"}), state, "p") == expected


def test_all_failures_of_a_prefix_at_once():
    tree = {"w": W, "pair": (V, V), "v": V, "extra": W, "act": len, "deep": {"x": W}, "arr": V}
    spec = {
        "w": {"x": "d"},
        "pair": ("a", "b", "c"),
        "vv": "d",
        "v": None,
        "act": "d",
        "deep": 3,
        "arr": Plain,
    }
    assert message(lambda: said(spec, tree)) == [
        "The layouts of params follow its structure.",
        "got:",
        "- params['act']: the layout 'd' is for an array, but here is a leaf of type builtin_function_or_method",
        "- params['arr']: layouts for 'w', 'v' (the class Plain), but here is an array float32[3]",
        "- params['deep']: layouts are strings, Layouts, or containers of them, not an int",
        "- params['extra']: an array float32[2,3] has no layout; there are layouts for 'w', 'pair', 'vv', ...",
        "- params['pair']: 3 layouts for a tuple with '0', '1'",
        "- params['v']: None is not a layout, but here is an array float32[3]",
        "- params['w']: layouts for 'x' (a dict), but here is an array float32[2,3]",
        "- params: a layout for 'vv', but here is a dict with 'act', 'arr', 'deep', ...; did you mean 'v'?",
    ]


def test_a_dataclass_that_is_no_pytree():
    @dataclasses.dataclass
    class Params:
        w: "d f"  # noqa: F722

    assert message(lambda: said(Params, Params(W))) == [
        "The layouts of params follow its structure.",
        "got: params: Params is not a pytree; register it: @jax.tree_util.register_dataclass",
    ]


def test_a_broken_layout_in_a_prefix_names_its_place():
    assert message(lambda: said({"w": "d/dp f/dp"}, {"w": W}))[:3] == [
        "params['w']: \"d/dp f/dp\"",
        "                   ^^^^",
        "A mesh axis occurs once in a layout, but 'dp' is used in 'd/dp' and in 'f/dp'.",
    ]


def test_arrays_of_all_kinds_count():
    tree = [jnp.ones(2), np.ones(2), np.float32(1), jax.random.key(0)]
    assert [layout for _, layout in said("...", tree)] == ["..."] * 4
