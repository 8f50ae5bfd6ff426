"""What the string of a transform asks for, as numbers: sizes and axes before and after."""

from typing import Any

import jax
import numpy as np
import pytest

import spmd
from spmd.comm._call import open_call
from spmd.ops._fft_job import Job, _told_apart, job_of, renamed_dims
from spmd.ops._fft_walls import Wall
from tests.ops.harness import make_mesh

MESH = {"a": 2, "b": 4}


def job(who: str, pattern: str, shape: tuple[int, ...], pad: bool = False, wall: Any = None, **sizes: int) -> Job:
    """The job of a call on an array of this shape, in a kernel whose signature has the left side."""
    found = []
    left = spmd.Pattern(pattern).inputs[0]

    def body(x: Any) -> Any:
        call = open_call(who, pattern, sizes, arrays=(x,), example="")
        operand = call.operand(x)
        found.append(job_of(call, operand, np.dtype("float32"), renamed_dims(call), pad, wall))
        return x

    kernel = spmd.kernel(f"{left} -> {left}", mesh=make_mesh(MESH))(body)
    kernel.trace(jax.ShapeDtypeStruct(shape, "float32"))
    return found[0]


def test_axes_before_and_after():
    one = job("fft.fft", "x/a y/b z -> x/a ky kz/b", (8, 16, 24))
    assert (one.source, one.target) == ((("a",), ("b",), ()), (("a",), (), ("b",)))
    assert (one.before, one.after) == ((8, 16, 24), (8, 16, 24))
    assert (one.moved, one.half, one.real) == ({1, 2}, -1, "")


def test_any_number_of_dimensions_and_a_composite_beside_the_transform():
    one = job("fft.fft", "... (h k)/a x -> ... (h k)/a kx", (3, 5, 8, 16), h=4)
    assert one.source == one.target == ((), (), ("a",), (), ())
    assert one.after == (3, 5, 4, 2, 16)
    assert (one.moved, one.movable) == ({4}, {4})


@pytest.mark.parametrize(("pad", "sizes", "kept"), [(False, {}, 9), (True, {}, 12), (True, {"kz": 16}, 16)])
def test_half_a_spectrum(pad: bool, sizes: dict[str, int], kept: int):
    pattern = "x/a z -> kx/a kz" if not pad else "x/a z -> kx/a kz/b"
    one = job("fft.rfft", pattern, (8, 16), pad, **sizes)
    assert (one.after, one.half, one.real) == ((8, kept), 1, "first")


def test_the_samples_of_half_a_spectrum():
    assert job("fft.irfft", "kx/a kz -> x/a z", (8, 9)).after == (8, 16)
    assert job("fft.irfft", "kx/a kz -> x/a z", (8, 9), z=17).after == (8, 17)
    assert job("fft.irfft", "kx/a kz -> x/a z", (8, 12), True, z=16).after == (8, 16)


def test_a_wall_on_elements_needs_two_of_them():
    wall = Wall(sine=False, type=1, inverse=False)
    assert job("fft.dct", "x/a z -> x/a kz", (8, 2), wall=wall).real == "both"
    with pytest.raises(spmd.errors.SizeError, match="has an element at each wall"):
        job("fft.dct", "x/a z -> x/a kz", (8, 1), wall=wall)


@pytest.mark.parametrize(
    ("names", "told"),
    [(["kx", "ky"], ["x", "y"]), (["x1", "y1"], ["x", "y"]), (["Kx0", "ky0"], ["x", "y"]), (["u", "v"], ["u", "v"])],
)
def test_names_without_what_they_share(names: list[str], told: list[str]):
    assert _told_apart(names) == told
