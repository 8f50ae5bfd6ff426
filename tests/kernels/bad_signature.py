"""Wrong kernels: their patterns, arguments, sizes, mappings and statics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import spmd
from spmd import reduce
from tests.errors.registry import V, X, bad, body, fixed

SAME = "b/dp d -> b/dp d"


@bad
def function_before_pattern(mesh):
    spmd.kernel(lambda x: x)


@bad
def kernel_without_layouts(mesh):
    spmd.kernel(mesh=mesh)(lambda x: x)


@bad
def pattern_and_layouts(mesh):
    spmd.kernel("b -> b", in_layouts="b", out_layouts="b", mesh=mesh)(lambda x: x)


@bad
def pattern_without_arrow(mesh):
    spmd.kernel("b/dp d", mesh=mesh)(lambda x: x)


@bad
def names_without_spaces(mesh):
    body("bd,df->bf", lambda x, w: x @ w, mesh, X, X.T)


@fixed
def names_without_spaces_fixed(mesh, fix):
    np.testing.assert_allclose(body(fix(), lambda x, w: x @ w, mesh, X, X.T), X @ X.T, rtol=1e-5)


@bad
def axis_used_twice(mesh):
    spmd.kernel("b/dp d/dp -> b/dp", mesh=mesh)(lambda x: x)


@bad
def f_string_braces(mesh):
    spmd.kernel("b/{axis} d -> d", mesh=mesh)(lambda x: x)


@bad
def too_few_layouts(mesh):
    spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x, y: x)


@bad
def argument_missing(mesh):
    spmd.kernel("b/dp d, d -> b/dp d", mesh=mesh)(lambda x, w: x)(X)


@bad
def unknown_mesh_axis(mesh):
    body("b/pd d -> b/pd d", lambda x: x, mesh)


@fixed
def unknown_mesh_axis_fixed(mesh, fix):
    np.testing.assert_array_equal(body(fix(), lambda x: x, mesh), X)


@bad
def no_mesh(mesh):
    spmd.kernel("b/dp d -> b/dp d")(lambda x: x)(X)


@bad
def rank_of_an_argument(mesh):
    body("b/dp s d -> b/dp s d", lambda x: x, mesh)


@bad
def indivisible_argument(mesh):
    body("b/tp d -> b/tp d", lambda x: x, mesh, X[:6])


@fixed
def indivisible_argument_fixed(mesh):
    padded = np.pad(X[:6], ((0, 2), (0, 0)))
    np.testing.assert_array_equal(body("b/tp d -> b/tp d", lambda x: x, mesh, padded), padded)


@bad
def two_indivisible_arguments(mesh):
    body("b/tp d, e/tp -> b/tp d", lambda x, y: x, mesh, X[:6], V[:7])


@bad
def sizes_that_contradict(mesh):
    body("b d, d -> b d", lambda x, w: x * w[None], mesh, X, V)


@bad
def divided_factor_of_a_composite(mesh):
    body("b (h k)/tp -> b (h k)/tp", lambda x: x, mesh, np.ones((2, 24), np.float32), h=6)


@bad
def several_factors_at_the_boundary(mesh):
    body("(b/dp s/tp) -> (b/dp s/tp)", lambda x: x, mesh, V)


@bad
def partial_sum_in_a_signature(mesh):
    body("b/dp d -> d {U:dp}", lambda x: reduce(x, "b/dp d -> d {U:dp}"), mesh)


@bad
def results_of_another_structure(mesh):
    body("b/dp d -> b/dp d, scalar", lambda x: x, mesh)


@bad
def result_of_another_layout(mesh):
    body("b/dp d -> b d/dp", lambda x: x, mesh)


@fixed
def result_of_another_layout_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp d -> b d/dp", lambda x: fix(x=x), mesh), X)


@bad
def static_that_is_no_argument(mesh):
    spmd.kernel("b/dp d -> b/dp d", mesh=mesh, static="casual")(lambda x, causal: x)


@bad
def unhashable_static(mesh):
    spmd.kernel("b/dp d -> b/dp d", mesh=mesh, static="sizes")(lambda x, sizes: x)(X, [1])


@bad
def bare_name_without_a_rule(mesh):
    body("b d -> b d", lambda x: x, mesh, mapping={"b": "dp"})


@fixed
def bare_name_without_a_rule_fixed(mesh):
    np.testing.assert_array_equal(body("b d -> b d", lambda x: x, mesh, mapping={"b": "dp", "d": None}), X)


@bad
def unused_rule(mesh):
    body("b d -> b d", lambda x: x, mesh, mapping={"b": "dp", "d": None, "mlpp": "tp"})


@bad
def two_names_on_one_axis(mesh):
    body("b d -> b d", lambda x: x, mesh, mapping={"b": "dp", "d": "dp"})


@bad
def argument_lies_elsewhere(mesh):
    x = spmd.shard(X, "b d/tp", mesh=mesh)
    body("b/dp d -> b/dp d", lambda x: x, mesh, x, boundary="error")


@fixed
def argument_lies_elsewhere_fixed(mesh):
    x = spmd.shard(X, "b/dp d", mesh=mesh)
    np.testing.assert_array_equal(body("b/dp d -> b/dp d", lambda x: x, mesh, x, boundary="error"), X)


@bad
def abstract_mesh_called(mesh):
    body("b/dp d -> b/dp d", lambda x: x, spmd.make_mesh(dp=2, abstract=True))


@bad
def size_of_a_name_that_nothing_uses(mesh):
    body("b/dp d -> b/dp d", lambda x: x, mesh, bb=8)


@bad
def renamed_axis_that_nothing_uses(mesh):
    body("b/dp d -> b/dp d", lambda x: x, mesh, axes={"ddp": "tp"})


@bad
def layers_of_unequal_sizes(mesh):
    layers = {"first": {"w": X}, "second": {"w": X.T}}
    spmd.kernel(in_layouts=("d f",), out_layouts="scalar", mesh=mesh)(lambda w: w["first"]["w"].sum())(layers)


@bad
def structs_instead_of_arrays(mesh):
    body(SAME, lambda x: x, mesh, jax.ShapeDtypeStruct((8, 4), jnp.float32))


@bad
def string_for_axes(mesh):
    spmd.kernel(SAME, mesh=mesh, axes="dp")(lambda x: x)


@bad
def number_for_static(mesh):
    spmd.kernel(SAME, mesh=mesh, static=1)(lambda x, causal: x)


@bad
def an_argument_of_strings(mesh):
    body(SAME, lambda x: x, mesh, np.array([["a", "b"]]))


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


@bad
def three_results_for_one_layout(mesh):
    body("b/dp d -> b/dp d", lambda x: (x, x.sum(1), x.max(1)), mesh)


@fixed
def three_results_for_one_layout_fixed(mesh):
    out = body("b/dp d -> b/dp d, b/dp, b/dp", lambda x: (x, x.sum(1), x.max(1)), mesh)
    np.testing.assert_allclose(out[1], X.sum(1))


@bad
def two_results_for_three_layouts(mesh):
    body("b/dp d -> b/dp d, b/dp, b/dp", lambda x: (x, x.sum(1)), mesh)


@bad
def a_shape_for_an_array(mesh):
    spmd.check(spmd.kernel(SAME, mesh=mesh)(lambda x: x), X.shape)


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


@bad
def an_optimizer_state_under_the_layouts_of_its_parameters(mesh):
    sgd_with_momentum(mesh, lambda state, params, layouts: layouts)


@fixed
def an_optimizer_state_under_the_layouts_of_its_parameters_fixed(mesh):
    np.testing.assert_allclose(sgd_with_momentum(mesh, spmd.parallel.state_layouts)["w"], X / 2)


@bad
def specs_in_place_of_layouts(mesh):
    spmd.kernel(in_specs=(P("dp", "tp"), P(("tp", "dp"))), out_specs=P(None, "tp"), mesh=mesh)(lambda x, w: x)


@bad
def specs_in_containers(mesh):
    spmd.kernel(in_specs=({"w": P("dp")},), out_specs=P("dp"), mesh=mesh)(lambda tree: tree["w"])


@bad
def specs_as_layouts(mesh):
    spmd.kernel(in_layouts=(P("dp"),), out_layouts=P("dp"), mesh=mesh)(lambda x: x)(X)


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


@bad
def batch_of_one(mesh):
    body("b/dp d -> b/dp d", lambda x: 2 * x, mesh, X[:1])


@fixed
def batch_of_one_fixed(mesh):
    np.testing.assert_array_equal(body("b d -> b d", lambda x: 2 * x, mesh, X[:1]), 2 * X[:1])
