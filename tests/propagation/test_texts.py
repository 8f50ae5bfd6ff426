"""Pieces of a kernel's text."""

import pytest

from spmd.propagation._module import bare, dtype_text, literal


@pytest.mark.parametrize(
    ("text", "found"), [("(a + b)", "a + b"), ("(a) + (b)", "(a) + (b)"), ("(a, b)", "(a, b)"), ("f(x)", "f(x)")]
)
def test_an_expression_without_brackets_around_all_of_it(text, found):
    assert bare(text) == found


@pytest.mark.parametrize(
    ("text", "dtype", "found"),
    [
        ("true", "i1", "True"),
        ("0xFF800000", "f32", "-jnp.inf"),
        ("0x7F80", "bf16", "jnp.inf"),
        ("0x7FC00000", "f32", "jnp.nan"),
        ("-3", "i32", "-3"),
        ("1.000000e+00", "f32", "1.0"),
    ],
)
def test_a_number(text, dtype, found):
    assert literal(text, dtype) == found


def test_dtypes():
    assert [dtype_text(one) for one in ("f32", "ui8", "i1", "bf16")] == ['"float32"', '"uint8"', '"bool"', '"bfloat16"']
