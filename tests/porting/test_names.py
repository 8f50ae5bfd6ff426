"""What dimensions are called."""

import pytest

from tests.porting.programs import mapped, ported

PRODUCT = mapped(["lax.psum(x @ y, 'tp')"], "(P('dp', 'tp'), P('tp'))", "P('dp')")


def test_dimensions_that_meet_have_one_name(tmp_path):
    assert '"b/dp d/tp, d/tp f -> b/dp f"' in ported(tmp_path, PRODUCT, (4, 8), (8, 12)).text


def test_names_that_are_given(tmp_path):
    assert '"b/dp k/tp, k/tp m -> b/dp m"' in ported(tmp_path, PRODUCT, (4, 8), (8, 12), names=["b k", "k m"]).text


def test_names_of_the_body(tmp_path):
    body = mapped(["rows, width = x.shape", "lax.psum(x.sum(1), 'tp')"], "(P('dp', 'tp'),)", "P('dp')")
    assert '"rows/dp width/tp -> rows/dp"' in ported(tmp_path, body, (4, 8)).text


def test_a_square_matrix_has_two_names(tmp_path):
    body = mapped(["x + x.T"], "(P(),)", "P()")
    assert '"d f -> d f"' in ported(tmp_path, body, (4, 4)).text


@pytest.mark.parametrize(("axis", "name"), [("cp", "s"), ("ep", "e"), ("pp", "p"), ("model", "d")])
def test_names_by_the_axes_that_divide(tmp_path, axis, name):
    import spmd

    body = mapped(["2 * x"], f"(P('{axis}'),)", f"P('{axis}')")
    assert f'"{name}/{axis} ' in ported(tmp_path, body, (8, 3), mesh=spmd.make_mesh(**{axis: 4})).text
