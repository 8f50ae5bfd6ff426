"""Wrong kernels: their patterns, arguments, sizes, mappings and statics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import spmd
from spmd import reduce
from tests.errors.registry import V, X, bad, body, fixed

SAME = "b/dp d -> b/dp d"


bad(
    function_before_pattern=lambda mesh: spmd.kernel(lambda x: x),
    kernel_without_layouts=lambda mesh: spmd.kernel(mesh=mesh)(lambda x: x),
    pattern_and_layouts=lambda mesh: spmd.kernel("b -> b", in_layouts="b", out_layouts="b", mesh=mesh)(lambda x: x),
    pattern_without_arrow=lambda mesh: spmd.kernel("b/dp d", mesh=mesh)(lambda x: x),
    names_without_spaces=(
        lambda mesh: body("bd,df->bf", lambda x, w: x @ w, mesh, X, X.T),
        lambda mesh, fix: np.testing.assert_allclose(body(fix(), lambda x, w: x @ w, mesh, X, X.T), X @ X.T, rtol=1e-5),
    ),
    axis_used_twice=lambda mesh: spmd.kernel("b/dp d/dp -> b/dp", mesh=mesh)(lambda x: x),
    f_string_braces=lambda mesh: spmd.kernel("b/{axis} d -> d", mesh=mesh)(lambda x: x),
    too_few_layouts=lambda mesh: spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x, y: x),
    argument_missing=lambda mesh: spmd.kernel("b/dp d, d -> b/dp d", mesh=mesh)(lambda x, w: x)(X),
    unknown_mesh_axis=(
        lambda mesh: body("b/pd d -> b/pd d", lambda x: x, mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body(fix(), lambda x: x, mesh), X),
    ),
    no_mesh=lambda mesh: spmd.kernel("b/dp d -> b/dp d")(lambda x: x)(X),
    rank_of_an_argument=lambda mesh: body("b/dp s d -> b/dp s d", lambda x: x, mesh),
    indivisible_argument=lambda mesh: body("b/tp d -> b/tp d", lambda x: x, mesh, X[:6]),
)


@fixed
def indivisible_argument_fixed(mesh):
    padded = np.pad(X[:6], ((0, 2), (0, 0)))
    np.testing.assert_array_equal(body("b/tp d -> b/tp d", lambda x: x, mesh, padded), padded)


bad(
    two_indivisible_arguments=lambda mesh: body("b/tp d, e/tp -> b/tp d", lambda x, y: x, mesh, X[:6], V[:7]),
    sizes_that_contradict=lambda mesh: body("b d, d -> b d", lambda x, w: x * w[None], mesh, X, V),
    divided_factor_of_a_composite=lambda mesh: body(
        "b (h k)/tp -> b (h k)/tp", lambda x: x, mesh, np.ones((2, 24), np.float32), h=6
    ),
    several_factors_at_the_boundary=lambda mesh: body("(b/dp s/tp) -> (b/dp s/tp)", lambda x: x, mesh, V),
    partial_sum_in_a_signature=lambda mesh: body("b/dp d -> d {U:dp}", lambda x: reduce(x, "b/dp d -> d {U:dp}"), mesh),
    results_of_another_structure=lambda mesh: body("b/dp d -> b/dp d, scalar", lambda x: x, mesh),
    result_of_another_layout=(
        lambda mesh: body("b/dp d -> b d/dp", lambda x: x, mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("b/dp d -> b d/dp", lambda x: fix(x=x), mesh), X),
    ),
    static_that_is_no_argument=lambda mesh: spmd.kernel("b/dp d -> b/dp d", mesh=mesh, static="casual")(
        lambda x, causal: x
    ),
    unhashable_static=lambda mesh: spmd.kernel("b/dp d -> b/dp d", mesh=mesh, static="sizes")(lambda x, sizes: x)(
        X, [1]
    ),
    bare_name_without_a_rule=(
        lambda mesh: body("b d -> b d", lambda x: x, mesh, mapping={"b": "dp"}),
        lambda mesh: np.testing.assert_array_equal(
            body("b d -> b d", lambda x: x, mesh, mapping={"b": "dp", "d": None}), X
        ),
    ),
    unused_rule=lambda mesh: body("b d -> b d", lambda x: x, mesh, mapping={"b": "dp", "d": None, "mlpp": "tp"}),
    two_names_on_one_axis=lambda mesh: body("b d -> b d", lambda x: x, mesh, mapping={"b": "dp", "d": "dp"}),
)


@bad
def argument_lies_elsewhere(mesh):
    x = spmd.shard(X, "b d/tp", mesh=mesh)
    body("b/dp d -> b/dp d", lambda x: x, mesh, x, boundary="error")


@fixed
def argument_lies_elsewhere_fixed(mesh):
    x = spmd.shard(X, "b/dp d", mesh=mesh)
    np.testing.assert_array_equal(body("b/dp d -> b/dp d", lambda x: x, mesh, x, boundary="error"), X)


bad(
    abstract_mesh_called=lambda mesh: body("b/dp d -> b/dp d", lambda x: x, spmd.make_mesh(dp=2, abstract=True)),
    size_of_a_name_that_nothing_uses=lambda mesh: body("b/dp d -> b/dp d", lambda x: x, mesh, bb=8),
    renamed_axis_that_nothing_uses=lambda mesh: body("b/dp d -> b/dp d", lambda x: x, mesh, axes={"ddp": "tp"}),
)


@bad
def layers_of_unequal_sizes(mesh):
    layers = {"first": {"w": X}, "second": {"w": X.T}}
    spmd.kernel(in_layouts=("d f",), out_layouts="scalar", mesh=mesh)(lambda w: w["first"]["w"].sum())(layers)


bad(
    structs_instead_of_arrays=lambda mesh: body(SAME, lambda x: x, mesh, jax.ShapeDtypeStruct((8, 4), jnp.float32)),
    string_for_axes=lambda mesh: spmd.kernel(SAME, mesh=mesh, axes="dp")(lambda x: x),
    number_for_static=lambda mesh: spmd.kernel(SAME, mesh=mesh, static=1)(lambda x, causal: x),
    an_argument_of_strings=lambda mesh: body(SAME, lambda x: x, mesh, np.array([["a", "b"]])),
)


@bad
def kernel_of_another_mode_inside(mesh):
    inner = spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: x)
    body("b/dp d -> b/dp d", lambda x: inner.auto(x), mesh)


@bad
def kernel_inside_with_another_layout(mesh):
    inner = spmd.kernel("b d/dp -> b d/dp", mesh=mesh)(lambda x: x)
    body("b/dp d -> b/dp d", lambda x: inner(x), mesh)


@bad
def kernel_under_a_mapping_without_the_name(mesh):
    with spmd.axis_mapping({"batch": "dp", "embed": None}):
        body("bacth embed -> bacth embed", lambda x: x, mesh)


@fixed
def kernel_under_a_mapping_without_the_name_fixed(mesh):
    with spmd.axis_mapping({"batch": "dp", "embed": None}):
        assert (body("batch embed -> batch embed", lambda x: 2 * x, mesh) == 2 * X).all()
        assert (body("bacth/1 embed -> bacth/1 embed", lambda x: 2 * x, mesh) == 2 * X).all()
        with spmd.axis_mapping(None):
            assert (body("bacth embed -> bacth embed", lambda x: 2 * x, mesh) == 2 * X).all()


bad(
    three_results_for_one_layout=lambda mesh: body("b/dp d -> b/dp d", lambda x: (x, x.sum(1), x.max(1)), mesh),
)


@fixed
def three_results_for_one_layout_fixed(mesh):
    out = body("b/dp d -> b/dp d, b/dp, b/dp", lambda x: (x, x.sum(1), x.max(1)), mesh)
    np.testing.assert_allclose(out[1], X.sum(1))


bad(
    two_results_for_three_layouts=lambda mesh: body("b/dp d -> b/dp d, b/dp, b/dp", lambda x: (x, x.sum(1)), mesh),
    a_shape_for_an_array=lambda mesh: spmd.check(spmd.kernel(SAME, mesh=mesh)(lambda x: x), X.shape),
)


@fixed
def a_shape_for_an_array_fixed(mesh):
    assert not spmd.check(spmd.kernel(SAME, mesh=mesh)(lambda x: x), jax.ShapeDtypeStruct(X.shape, X.dtype))


def sgd_with_momentum(mesh, layouts_of_state):
    """A step of an optimizer, whose state is as optax makes it, a chain of named tuples."""
    optimizer, params = optax.sgd(0.5, momentum=0.9), {"w": X}
    state = optimizer.init(params)
    of_params = {"w": "b/dp d"}
    of_state = layouts_of_state(state, params, of_params)
    step = lambda w, state: optax.apply_updates(w, optimizer.update(w, state)[0])
    layouts = {"in_layouts": (of_params, of_state), "out_layouts": of_params}
    return spmd.kernel(**layouts, mesh=mesh)(step)(params, state)


bad(
    an_optimizer_state_under_the_layouts_of_its_parameters=(
        lambda mesh: sgd_with_momentum(mesh, lambda state, params, layouts: layouts),
        lambda mesh: np.testing.assert_allclose(sgd_with_momentum(mesh, spmd.parallel.state_layouts)["w"], X / 2),
    ),
    specs_in_place_of_layouts=lambda mesh: spmd.kernel(
        in_specs=(P("dp", "tp"), P(("tp", "dp"))), out_specs=P(None, "tp"), mesh=mesh
    )(lambda x, w: x),
    specs_in_containers=lambda mesh: spmd.kernel(in_specs=({"w": P("dp")},), out_specs=P("dp"), mesh=mesh)(
        lambda tree: tree["w"]
    ),
    specs_as_layouts=lambda mesh: spmd.kernel(in_layouts=(P("dp"),), out_layouts=P("dp"), mesh=mesh)(lambda x: x)(X),
)


@fixed
def specs_as_layouts_fixed(mesh):
    """As the message writes the spec."""
    assert spmd.kernel(in_layouts=("_/dp _",), out_layouts="_/dp _", mesh=mesh)(lambda x: x)(X).sharding.spec[0] == "dp"


@bad
def method_with_a_layout_less(mesh):
    class Scale:
        @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
        def scaled(self, x):
            return 2 * x


@fixed
def method_with_a_layout_less_fixed(mesh):
    class Scale:
        @spmd.kernel("b/dp d -> b/dp d", mesh=mesh, static="self")
        def scaled(self, x):
            return 2 * x

    np.testing.assert_array_equal(Scale().scaled(X), 2 * X)


bad(
    batch_of_one=(
        lambda mesh: body("b/dp d -> b/dp d", lambda x: 2 * x, mesh, X[:1]),
        lambda mesh: np.testing.assert_array_equal(body("b d -> b d", lambda x: 2 * x, mesh, X[:1]), 2 * X[:1]),
    ),
)
