"""What layouts say, and what is made of them."""

import ast
import copy
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import spmd.language
from spmd.errors import LayoutError, SizeError
from spmd.language import AxisMapping, Layout, Pattern

P = PartitionSpec


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("(h k)/tp", "(h/tp k)"),
        ("  b/dp   s\n", "b/dp s"),
        ("f/tp{U:dp}", "f/tp {U:dp}"),
        ("d {U:b,a}", "d {U:a, b}"),
        ("d {R:b} {U:a}", "d {U:a} {R:b}"),
        ("3/1", "3"),
        ("0+x/a+0", "x/a"),
        ("", "scalar"),
        ("007", "7"),
    ],
)
def test_one_meaning_has_one_form(one, other):
    assert Layout(one) == Layout(other)
    assert hash(Layout(one)) == hash(Layout(other))
    assert str(Layout(one)) == str(Layout(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("b/dp/tp", "b/tp/dp"),
        ("d", "d/1"),
        ("k", "[k]"),
        ("(h k)", "(h k)/1"),
        ("x/a+1", "1+x/a"),
        ("(h)", "h"),
    ],
)
def test_different_meanings_differ(one, other):
    assert Layout(one) != Layout(other)


def test_canonical_text():
    assert str(Layout("(h/tp/dp k)")) == "(h k)/tp/dp"
    assert str(Layout("(b/dp  s/cp)")) == "(b/dp s/cp)"
    assert str(Layout("(b/dp s/cp k)")) == "(b/dp s/cp k)"
    assert str(Layout("1+3/a")) == "1+3/a+0"
    assert str(Layout("{U:b,a}")) == "{U:a,b}"
    assert repr(Layout("b/dp s")) == "Layout('b/dp s')"
    assert Layout("b/dp (h k)/1 d/1").short == "b/dp (h k) d"


def test_parsing_is_cached_and_a_layout_passes_through():
    assert Layout("b/dp s") is Layout("b/dp s")
    assert Layout(Layout("b")) is Layout("b")
    assert Pattern("a -> b") is Pattern("a -> b")
    assert Pattern(Pattern("a -> b")) is Pattern("a -> b")
    assert Layout("b") != "b"


@pytest.mark.parametrize(
    "value",
    [
        Layout("1+x/a+1 (h k)/tp [v] ... {U:dp}"),
        Pattern("b/dp, scalar ->"),
        Pattern("b [c/cp]", arrow=False).bind(cp="x"),
        AxisMapping({"batch": ("dp", "fsdp"), "seq": None}),
    ],
    ids=str,
)
def test_values_copy_and_pickle_and_cannot_be_changed(value):
    again = pickle.loads(pickle.dumps(value))
    assert again == value
    assert hash(again) == hash(value)
    assert repr(again) == repr(value)
    assert copy.copy(value) is value
    assert copy.deepcopy([value])[0] is value
    with pytest.raises(AttributeError, match="immutable"):
        value.dims = ()


def test_a_pickle_keeps_the_source_for_carets():
    pattern = pickle.loads(pickle.dumps(Pattern("b, ... d -> b")))
    with pytest.raises(LayoutError) as caught:
        pattern.inputs[1].spec
    assert '"b, ... d -> b"\n    ^^^' in str(caught.value)


def test_layouts_are_leaves():
    assert jax.tree.leaves({"w": Layout("a b")}) == [Layout("a b")]


def test_what_a_layout_says():
    layout = Layout("b/dp/fsdp 3/x _ (h k)/tp d/1 s {U:u} {R:r}")
    assert layout.rank == 6
    assert layout.names == ("b", "h", "k", "d", "s")
    assert layout.axes == ("dp", "fsdp", "x", "tp")
    assert layout.axis_names == ("dp", "fsdp", "x", "tp", "u", "r")
    assert layout.bare == ("s",)
    assert [atom.axes for atom in layout.atoms] == [("dp", "fsdp"), ("x",), (), ("tp",), (), (), None]
    assert layout.atoms[1].size == 3
    assert layout.axes_of("k") == ()
    assert Layout("...").rank is None
    assert Layout("scalar").is_scalar
    assert Layout("{U:dp}").is_scalar
    assert Layout("[v/tp] d").dims[0].bracket
    assert Layout("1+x/a").dims[0].margin == (1, 0)


def test_spans_point_into_the_source():
    pattern = Pattern("b/dp (h k)/tp, [v]\n -> 1+x/a+1")
    spans = [(atom.name, pattern.source[slice(*atom.span)]) for one in pattern.layouts for atom in one.atoms]
    assert spans == [("b", "b/dp"), ("h", "h"), ("k", "k"), ("v", "v"), ("x", "x/a")]
    assert [pattern.source[slice(*one.dims[-1].span)] for one in pattern.layouts] == [
        "(h k)/tp",
        "[v]",
        "1+x/a+1",
    ]


def test_specs():
    assert Layout("b/dp s d/tp/x").spec == P("dp", None, ("tp", "x"))
    assert Layout("(h k)/tp 3 _ d/1").spec == P("tp", None, None, None)
    assert Layout("scalar").spec == P()
    assert Layout("d {U:b,a}").spec == P(None, unreduced={"a", "b"})
    assert Layout("d/x {R:c}").spec == P("x", reduced={"c"})


def test_bind():
    assert Layout("s/tp d {U:dp}").bind(tp="x", dp=("a", "b")) == Layout("s/x d {U:a,b}")
    assert Layout("s/tp d {U:dp}").bind(tp=None, dp=None) == Layout("s/1 d")
    assert Layout("a/x b/y").bind(x="y", y="x") == Layout("a/y b/x")
    assert Layout("a/x").bind(unknown="y") is Layout("a/x")
    assert Layout("(h k)/tp").bind(tp=("a", "b")) == Layout("(h k)/a/b")
    assert Layout("_/x 3/x2").bind(x=None, x2=None) == Layout("_ 3")


def test_other_layouts_made_of_one():
    assert Layout("b/dp d/tp {U:x}").without("dp", "x") == Layout("b/1 d/tp")
    assert Layout("d/dp").prepend("p/pp layers") == Layout("p/pp layers d/dp")
    assert Layout("a ... b/x").with_rank(4) == Layout("a _ _ b/x")
    assert Layout("... b/x").with_rank(1) == Layout("b/x")
    assert Layout("a b").with_rank(2) == Layout("a b")
    assert Layout("[a] b").without_brackets() == Layout("a b")


def test_resolve():
    mapping = AxisMapping({"b": ("dp", "fsdp"), "h": "tp", "s": None})
    assert Layout("b s/cp d x/1").resolve(mapping) == Layout("b/dp/fsdp s/cp d/1 x/1")
    assert Layout("b/1 h/x").resolve(mapping) == Layout("b/1 h/x")
    assert Layout("(h k) _ 3 ...").resolve(mapping) == Layout("(h k)/tp _ 3 ...")
    assert Layout("(b/dp h)").resolve(mapping) == Layout("(b h)/dp"), "explicit factors leave the others whole"
    assert Layout("(h k)/1").resolve(mapping) == Layout("(h k)/1")
    assert Layout("1+h+1").resolve(mapping) == Layout("1+h/tp+1")
    assert Layout("b s").resolve(None) == Layout("b/1 s/1")
    assert Layout("b s").resolve({"b": "x"}).bare == ()
    assert Pattern("b -> b/1").resolve(mapping) == Pattern("b/dp/fsdp -> b/1")


def test_sizes():
    mesh = {"dp": 2, "tp": 4, "one": 1}
    assert Layout("b/dp/tp s d/one").local_shape((16, 3, 5), mesh) == (2, 3, 5)
    assert Layout("b/dp/tp s d/one").global_shape((2, 3, 5), mesh) == (16, 3, 5)
    assert Layout("2+x/dp+1 1+y").local_shape((8, 3), mesh) == (7, 4)
    assert Layout("2+x/dp+1 1+y").global_shape((7, 4), mesh) == (8, 3)
    assert Layout("(b/dp s/tp)").local_shape((64,), mesh) == (8,)
    assert Layout("(h k)/tp").local_shape((12,), mesh, sizes={"h": 4, "k": 3}) == (3,)
    assert Layout("scalar").local_shape((), mesh) == ()
    with pytest.raises(SizeError, match="h of size 2 does not divide into the 4 blocks of tp"):
        Layout("(h k)/tp").local_shape((8,), mesh, sizes={"h": 2})


def test_mesh_forms():
    mesh = jax.make_mesh((1,), ("dp",))
    for one in (mesh, mesh.abstract_mesh, {"dp": 1}, (("dp", 1),)):
        assert Layout("b/dp").local_shape((3,), one) == (3,)
    assert Layout("b/dp d").sharding(mesh) == NamedSharding(mesh, P("dp", None))
    with pytest.raises(ValueError, match="did you mean 'dp'"):
        Layout("b/pd d").sharding(mesh)


def test_of_reads_what_sharding_writes():
    mesh = jax.make_mesh((1, 1, 1), ("dp", "tp", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    for text, names in [
        ("b/dp s d/tp/x", "b s d"),
        ("b s d", "b s d"),
        ("b (h k)/tp 3/x", "b (h k) 3"),
        ("_ _ d/tp", "... d"),
    ]:
        array = jax.device_put(jnp.zeros((2, 3, 3)), Layout(text).sharding(mesh))
        assert Layout.of(array, names) == Layout(text)
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        assert Layout.of(shape, names) == Layout(text)
    assert Layout.of(np.zeros((2, 3)), "a b") == Layout("a b")
    assert Layout.of(jnp.float32(3), "scalar") == Layout("scalar")


def test_of_reads_tracers():
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Explicit,))
    seen = []

    @jax.jit
    def f(x):
        seen.append(Layout.of(x, "b d"))
        return x

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        f.trace(jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=NamedSharding(mesh, P("dp", None))))
    assert seen == [Layout("b/dp d")]


def test_the_language_imports_jax_only_inside_functions():
    for file in Path(spmd.language.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not [one for one in names if one.split(".")[0] in ("jax", "numpy")], file
