"""Transforms along a divided dimension."""

import jax.numpy as jnp
import numpy as np
from jax import lax

import spmd
from spmd import all_gather, fft, iota, split
from tests.checker.twins.registry import wrong

LINE = "b/dp n/tp -> b/dp n/tp"


def whole_line(x):
    return all_gather(x, "b/dp n/tp -> b/dp n")


def my_part(y):
    return split(y, "b/dp n -> b/dp n/tp")


@wrong(LINE)
def spectrum_of_a_piece(x):
    return jnp.abs(jnp.fft.fft(x, axis=-1)) ** 2  # wrong: pending


@spectrum_of_a_piece.right
def _(x):
    y = fft.fft(x, "b/dp n/tp -> b/dp k/tp")
    return jnp.abs(y) ** 2


spectrum_of_a_piece.whole(lambda x: jnp.abs(jnp.fft.fft(x, axis=-1)) ** 2)


@wrong("x/tp y/dp -> x/tp y/dp", x=16, y=12)
def transform_of_one_dimension_only(u):
    """After an exchange x is whole, and y is divided in two."""
    v = lax.all_gather(u, "tp", axis=0, tiled=True)
    v = jnp.fft.fft2(v)  # wrong: pending
    v = lax.dynamic_slice_in_dim(v, lax.axis_index("tp") * u.shape[0], u.shape[0], axis=0)
    return jnp.abs(v)


transform_of_one_dimension_only.right(lambda u: jnp.abs(fft.fft(u, "x/tp y/dp -> kx/tp ky/dp")))
transform_of_one_dimension_only.whole(lambda u: jnp.abs(jnp.fft.fft2(u)))


def cosines(n):
    k = np.arange(n)
    return jnp.asarray(np.cos(np.pi / n * (k[:, None] + 0.5) * k[None]), jnp.float32)


@wrong(LINE)
def cosine_transform_by_a_small_matrix(x):
    """A matrix of the block's size."""
    return x @ cosines(x.shape[1])  # wrong: disagree


@cosine_transform_by_a_small_matrix.right
def _(x):
    rows = lax.dynamic_slice_in_dim(cosines(40), lax.axis_index("tp") * x.shape[1], x.shape[1])
    return lax.psum_scatter(x @ rows, "tp", scatter_dimension=1, tiled=True)


cosine_transform_by_a_small_matrix.whole(lambda x: x @ cosines(40))


@wrong(LINE, unseen="numbers of a block's length that no rule of the table has made")
def derivative_by_local_frequencies(x):
    """The transform is right; its frequencies are those of a block."""
    y = fft.fft(x, "b/dp n/tp -> b/dp k/tp")
    return jnp.abs(y * jnp.fft.fftfreq(x.shape[1])[None].astype(y.dtype))  # wrong: disagree


@derivative_by_local_frequencies.right
def _(x):
    y = fft.fft(x, "b/dp n/tp -> b/dp k/tp")
    return jnp.abs(y * fft.fftfreq("k/tp", k=40)[None].astype(y.dtype))


derivative_by_local_frequencies.whole(
    lambda x: jnp.abs(jnp.fft.fft(x, axis=-1) * jnp.fft.fftfreq(40)[None].astype(jnp.complex64))
)


@wrong(LINE)
def halves_exchanged_in_a_piece(x):
    return jnp.fft.fftshift(x, axes=-1)  # wrong: pending


halves_exchanged_in_a_piece.right(lambda x: spmd.roll(x, "b/dp [n/tp]", 20))
halves_exchanged_in_a_piece.whole(lambda x: jnp.fft.fftshift(x, axes=-1))


@wrong(LINE)
def convolved_in_a_piece(x):
    kernel = jnp.array([[0.5, 0.3, 0.2]])
    y = lax.conv_general_dilated(x[:, None], kernel[None], (1,), "SAME")  # wrong: pending
    return y[:, 0]


@convolved_in_a_piece.right
def _(x):
    kernel = jnp.array([[0.5, 0.3, 0.2]])
    return my_part(lax.conv_general_dilated(whole_line(x)[:, None], kernel[None], (1,), "SAME")[:, 0])


@convolved_in_a_piece.whole
def _(x):
    kernel = jnp.array([[0.5, 0.3, 0.2]])
    return lax.conv_general_dilated(x[:, None], kernel[None], (1,), "SAME")[:, 0]


@wrong(LINE)
def low_pass_by_a_local_window(x):
    """A window over the whole line, evaluated on each block from its start."""
    return x * jnp.hanning(x.shape[1]).astype(x.dtype)[None]  # wrong: disagree


@low_pass_by_a_local_window.right
def _(x):
    place = iota("n/tp").astype(x.dtype)
    return x * (0.5 - 0.5 * jnp.cos(2 * jnp.pi * place / 39))[None]


low_pass_by_a_local_window.whole(lambda x: x * jnp.hanning(40).astype(x.dtype)[None])
