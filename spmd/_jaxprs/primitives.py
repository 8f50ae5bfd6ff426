"""The primitives of JAX, and ours, in one table: no other room says what kind of thing a primitive is.

A row has all primitives that are alike. The checker knows a map for each kind of `dims`, and a rule for each of `sums`;
`explain` knows what each `cost` is. A primitive that the checker has code of its own for stands here with its cost.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Primitive(NamedTuple):
    """What is known of a primitive.

    Attributes:
      dims: How the dimensions of its operands become those of its results; "" where that needs code of its own.
      sums: What becomes of a partial sum; "" likewise.
      cost: What it computes, and what it reads and writes:

        | cost | means |
        |---|---|
        | `alias` | another name for the same bytes |
        | `part` | parts of the operand's bytes |
        | `moves` | it moves or chooses data, and is fused into what reads them |
        | `chain` | one operation for each element of the result, and it is fused |
        | `dear` | the same, but too dear to be done again for each of several readers |
        | `asked` | it reads no more than what it gives, and is fused |
        | `update`, `scatter` | it writes no more than its updates; a scatter computes, too |
        | `orders`, `whole` | it reads all, and writes all; the second computes, too |
        | `` | unknown |
    """

    dims: str = ""
    sums: str = ""
    cost: str = ""

    @property
    def pointwise(self) -> bool:
        """Whether each element of the result is made of those at its place."""
        return self.dims in ("same", "elementwise")


UNKNOWN = Primitive()
_TABLE = """
same | passes | alias | stop_gradient name pvary pcast preduced reduced_vary_cast reduced_vary_cast_p
same | passes | alias | sharding_constraint layout_constraint mesh_cast relayout
same | passes | alias | with_memory_space_constraint xla_metadata_value
same | passes | alias | optimization_barrier spmd_fused spmd_layout spmd_kept spmd_assert_equal spmd_order spmd_retype
same | passes | alias | spmd_names
same | passes | alias | vary_unreduced_cast vary_unreduced_cast_p
same | passes | moves | copy copy_p device_put reshard
elementwise | passes | chain | neg conj
elementwise | passes | moves | real imag reduce_precision
elementwise | converts | moves | convert_element_type
elementwise | sums | chain | add add_any sub complex
elementwise | product | chain | mul
elementwise | quotient | dear | div
elementwise | selects | moves | select_n
elementwise | forgets | moves | is_finite
elementwise | curved | moves | bitcast_convert_type
elementwise | curved | chain | abs sign floor ceil round max min clamp nextafter square integer_pow mulhi
elementwise | curved | chain | one_minus_square eq ne lt le gt ge eq_to lt_to le_to and or xor not population_count clz
elementwise | curved | chain | shift_left shift_right_logical shift_right_arithmetic
elementwise | curved | dear | exp exp2 expm1 log log2 log1p sqrt rsqrt cbrt pow polynomial rem reciprocal logistic
elementwise | curved | dear | sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erf_inv
elementwise | curved | dear | lgamma digamma polygamma zeta igamma igammac igamma_grad_a regularized_incomplete_beta
elementwise | curved | dear | bessel_i0e bessel_i1e
permuted | passes | moves | transpose
some go | passes | alias | squeeze
some are new | passes | moves | broadcast_in_dim
one is new | sums | moves | stack
whole: flip | passes | moves | rev
whole: pad | sums | moves | pad
whole: concatenate | sums | moves | concatenate
whole: slice | passes | part | slice
whole: slice into sizes | passes | part | split
whole: slice into elements | passes | part | unstack
whole: update | writes | update | dynamic_update_slice
reduced: sum | passes | whole | reduce_sum
reduced: max | curved | whole | reduce_max
reduced: min | curved | whole | reduce_min
reduced: product | curved | whole | reduce_prod
reduced: all | curved | whole | reduce_and
reduced: any | curved | whole | reduce_or
reduced: xor | curved | whole | reduce_xor
reduced: position | curved | whole | argmax argmin
reduced: fold | curved | whole | reduce
whole: scan | passes | whole | cumsum
whole: scan | curved | whole | cumprod cummax cummin cumlogsumexp
whole: sort | curved | orders | sort
whole: top_k | curved | whole | top_k approx_top_k
contracted | product | whole | dot_general
contracted in groups | grouped | whole | ragged_dot_general
contracted, whole: stencil | product | whole | conv_general_dilated
whole: fft | passes | whole | fft
whole: stencil | passes | whole | reduce_window_sum cumulative_sum select_and_gather_add
whole: stencil | curved | whole | reduce_window reduce_window_max reduce_window_min
whole: stencil put back | passes | whole | select_and_scatter_add
whole: stencil put back | curved | whole | select_and_scatter
whole: linear algebra | curved | whole | cholesky cholesky_update lu lu_solve qr geqrf geqp3 ormqr householder_product
whole: linear algebra | curved | whole | eig eigh svd schur hessenberg tridiagonal tridiagonal_solve symmetric_product
whole: linear algebra, columns pass | curved | whole | triangular_solve
whole: pivots | curved | moves | lu_pivots_to_permutation
| passes | alias | reshape
| passes | asked | dynamic_slice gather
| | moves | iota tile spmd_split spmd_move spmd_roll
| sums | scatter | scatter-add scatter_add
| | scatter | scatter scatter-sub scatter_sub scatter-mul scatter_mul scatter-min scatter_min scatter-max scatter_max
"""
PRIMITIVES: dict[str, Primitive] = {}
for _row in _TABLE.strip().splitlines():
    _dims, _sums, _cost, _names = map(str.strip, _row.split("|"))
    PRIMITIVES |= dict.fromkeys(_names.split(), Primitive(_dims, _sums, _cost))


def primitive_of(eqn: Any) -> Primitive:
    """Return what is known of an equation's primitive."""
    return PRIMITIVES.get(eqn.primitive.name, UNKNOWN)


# --- collectives ------------------------------------------------------------------------------------------------

# By the names of their verbs: what the devices of an axis enter together. JAX picks one by type.
_VERBS = {
    "psum": "psum psum_invariant unreduced_psum",
    "pmax": "pmax unreduced_pmax",
    "pmin": "pmin unreduced_pmin",
    "all_gather": "all_gather all_gather_invariant all_gather_reduced",
    "psum_scatter": "reduce_scatter unreduced_reduce_scatter psum_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "ppermute",
    "pbroadcast": "pbroadcast pbroadcast_dynamic",
    "pgather": "pgather",
    "psend": "psend",
    "precv": "precv",
}
# Of these there are asynchronous ones, which begin with the operands and give the result in the end.
_BEGUN = [name for verb in ("psum", "all_gather", "psum_scatter", "all_to_all", "ppermute", "pbroadcast")
          for name in _VERBS[verb].split()]  # fmt: skip
COLLECTIVES = {name: verb for verb, names in _VERBS.items() for name in names.split()}
COLLECTIVES |= {f"{name}_start": COLLECTIVES[name] for name in _BEGUN}
PRIMITIVES |= dict.fromkeys([f"{name}_done" for name in _BEGUN], Primitive("same", "passes", "alias"))


def of_verbs(*verbs: str) -> frozenset[str]:
    """The collectives of some verbs.

    >>> sorted(of_verbs("all_to_all"))
    ['all_to_all', 'all_to_all_start']
    """
    return frozenset(name for name, verb in COLLECTIVES.items() if verb in verbs)


def kind_of(name: str) -> str:
    """The kind of a collective, by its name in jaxprs or in what XLA makes of them. Any reduction is a psum.

    >>> kind_of("pmax"), kind_of("all_reduce"), kind_of("reduce_scatter_start")
    ('psum', 'psum', 'psum_scatter')
    """
    verb = COLLECTIVES.get(name, name)
    return "psum" if verb in ("pmax", "pmin", "all_reduce", "reduce_and") else verb
