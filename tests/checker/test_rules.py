"""The printed rules: each in words, and those of a primitive of each kind."""

from __future__ import annotations

import importlib
import sys

import jax
import pytest
from jax import lax
from jax.extend.core import Primitive

from spmd._jaxprs.primitives import COLLECTIVES
from spmd._jaxprs.walker import equations, held
from spmd.checker import rules

FOUND = rules()


def test_every_rule_is_printed_once_and_in_words():
    assert set(FOUND.table).isdisjoint(FOUND.own)
    assert set(FOUND.partial) == {partial for _, partial in FOUND.table.values()}
    for name, text in {**FOUND.partial, **FOUND.own}.items():
        assert text.endswith(".") and len(text.split()) > 2, name


SAYS = {
    "reduce_sum": ("reduced: sum", "passes"),
    "reduce_max": ("reduced: max", "curved"),
    "argmax": ("reduced: position", "curved"),
    "cumsum": ("whole: scan", "passes"),
    "cummax": ("whole: scan", "curved"),
    "sort": ("whole: sort", "curved"),
    "rev": ("whole: flip", "passes"),
    "dot_general": ("contracted", "product"),
    "div": ("elementwise", "quotient"),
    "exp": ("elementwise", "curved"),
    "transpose": ("permuted", "passes"),
    "cholesky": ("whole: linear algebra", "curved"),
}


@pytest.mark.parametrize("name", SAYS)
def test_what_a_rule_says(name):
    assert FOUND.table[name] == SAYS[name]


# What the checker has no rule for, and why.
WITHOUT = {
    "a call or a loop, whose jaxpr is entered": """call closed_call core_call custom_jvp_call custom_jvp_call_jaxpr
        custom_vjp_call custom_vjp_call_jaxpr custom_lin linear_call custom_vmap_call remat2 checkpoint jit pjit
        composite run_state run_scoped scan while cond shard_map custom_linear_solve eval_jaxpr jaxpr_call core_map
        mpmd_map xla_metadata_call call_hi_primitive call_hi_primitive_linearized custom_partitioning remat_opt""",
    "it works on references, which numbers refuse": """get swap addupdate new_ref freeze free_ref empty_ref
        accum_grad_in_ref new_box box_get box_set new_log log_extend log_read create_linear pin unpin broadcast_to""",
    "it works on tokens": "after_all create_token",
    "it has no results": "dce_sink unreachable check inspect_sharding debug_callback debug_print",
    "a kernel, which no walk reads": """tpu_custom_call ffi_call cudnn_fusion scaled_matmul
        scaled_matmul_wrapper dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_bwd
        dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper""",
    "it runs code of Python's": "pure_callback io_callback buffer_callback",
    "a program that was exported": "call_exported dim_as_value dimension_size shape_assertion",
    "no trace of a user's has it": "stage zeros_like platform_index psend precv",
    "nobody needs it yet": "empty empty2 to_edtype from_edtype scaled_dot iota_2x32_shape philox2x32 philox4x32 threefry4x32",
}


OTHERS = ("experimental", "pallas", "mosaic", "thunky")


def primitives() -> dict[str, Primitive]:
    """All primitives of the JAX that is installed, in whichever module, but for what is experimental, and languages of
    kernels."""
    for name in (
        "lax.linalg",
        "random",
        "scipy.linalg",
        "experimental.checkify",
        "experimental.pallas",
        "export",
        "nn",
    ):
        importlib.import_module(f"jax.{name}")
    parts = {name: set(name.split(".")) for name in list(sys.modules) if name.partition(".")[0] == jax.__name__}
    modules = [sys.modules[name] for name, found in parts.items() if found.isdisjoint(OTHERS)]
    values = (value for module in modules for value in vars(module).values())
    return {value.name: value for value in values if isinstance(value, Primitive)}


def test_each_primitive_has_a_rule_or_a_reason():
    known = {*FOUND.table, *FOUND.own}
    reasons = {name for names in WITHOUT.values() for name in names.split()}
    assert known & reasons == set()
    every = primitives()
    assert len(every) > 250 and {"add", "ragged_dot_general", "psum_invariant", "reduce_window"} <= set(every)
    assert set(every) - known - reasons == set()


def test_what_is_asynchronous_has_the_rule_of_its_collective():
    names = set(primitives())
    begun = {name for name in names if name.endswith("_start")}
    assert begun <= set(COLLECTIVES)
    assert {FOUND.table[name] for name in names if name.endswith("_done")} == {("same", "passes")}
    assert len(begun) >= 5  # or this proves nothing
    for name in begun:
        assert FOUND.own[name] == FOUND.own[name.removesuffix("_start")]


def test_each_that_holds_a_jaxpr_is_one():
    """A reason that says so is one for a primitive with a jaxpr among its parameters."""
    jaxpr = jax.make_jaxpr(jax.checkpoint(jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, y: y + 1, x))))(1.0)
    entered = [eqn for eqn in equations(jaxpr) if held(eqn)]
    assert len(entered) == 3
    assert {eqn.primitive.name for eqn in entered} <= set(WITHOUT["a call or a loop, whose jaxpr is entered"].split())
