"""Fourier transforms that cannot be."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import fft
from tests.errors.registry import X, bad, body, fixed

bad(
    nothing_renamed=lambda mesh: body("b/dp d -> b/dp d", lambda x: fft.fft(x, "b/dp d -> b/dp d"), mesh),
)


@fixed
def nothing_renamed_fixed(mesh, fix):
    out = spmd.kernel("b/dp d -> b/dp kd", mesh=mesh)(lambda x: fix(x=x))(X)
    np.testing.assert_allclose(out, np.fft.fft(X), atol=1e-4)


bad(
    nowhere_to_go=lambda mesh: spmd.kernel("x/dp -> k/dp", mesh=mesh)(lambda x: fft.rfft(x, "x/dp -> k/dp"))(
        jnp.ones(6)
    ),
)


@fixed
def nowhere_to_go_fixed(mesh):
    def whole(x):
        return fft.fft(spmd.all_gather(x, "x/dp -> x"), "x -> k/dp")

    out = spmd.kernel("x/dp -> k/dp", mesh=mesh)(whole)(jnp.ones(6))
    np.testing.assert_allclose(out, np.fft.fft(np.ones(6)), atol=1e-5)


bad(
    half_a_spectrum_divided=lambda mesh: spmd.kernel("x/dp y -> x ky/dp", mesh=mesh)(
        lambda x: fft.rfft(x, "x/dp y -> x ky/dp")
    )(X),
)


@fixed
def half_a_spectrum_divided_fixed(mesh, fix):
    half = spmd.kernel("x/dp y -> x ky/dp", mesh=mesh)(lambda x: fix(x=x))
    want = np.fft.rfft(X)
    np.testing.assert_allclose(half(X)[:, : want.shape[1]], want, atol=1e-4)


bad(
    a_spectrum_without_room_for_its_frequencies=lambda mesh: spmd.kernel("x/dp y -> x ky/dp", mesh=mesh, ky=2)(
        lambda x: fft.rfft(x, "x/dp y -> x ky/dp", pad=True)
    )(X),
    zeros_behind_the_frequencies_unsaid=lambda mesh: spmd.kernel("x/dp y -> x ky/dp", mesh=mesh, ky=16)(
        lambda x: fft.rfft(x, "x/dp y -> x ky/dp")
    )(X),
    a_padded_spectrum_of_unknown_samples=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: fft.irfft(x, "b/dp kd -> b/dp y", pad=True), mesh
    ),
    a_spectrum_of_complex_numbers_halved=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: fft.rfft(jax.lax.complex(x, x), "b/dp d -> b/dp kd"), mesh
    ),
)


@fixed
def a_spectrum_of_complex_numbers_halved_fixed(mesh, fix):
    out = body("b/dp d -> b/dp d", lambda x: fix(x=jax.lax.complex(x, x)), mesh)
    np.testing.assert_allclose(out, np.fft.fft(X + 1j * X), atol=1e-4)


bad(
    samples_that_fit_no_spectrum=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: fft.irfft(x, "b/dp kd -> b/dp d", d=99), mesh
    ),
    a_transform_that_transposes=lambda mesh: body("b/dp d -> b/dp d", lambda x: fft.fft(x, "b/dp d -> d b/dp"), mesh),
    a_transform_whose_names_say_that_it_transposes=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: fft.fft(x, "b/dp d -> kd/dp kb"), mesh
    ),
)


@fixed
def a_transform_whose_names_say_that_it_transposes_fixed(mesh, fix):
    out = spmd.kernel("b/dp d -> kd/dp kb", mesh=mesh)(lambda x: fix(x=x))(X)
    np.testing.assert_allclose(out, np.fft.fft2(X).T, atol=1e-4)


bad(
    a_transform_that_drops_a_dimension=lambda mesh: body("b/dp d -> b/dp d", lambda x: fft.fft(x, "b/dp d -> k"), mesh),
    a_transform_of_a_composite=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: fft.fft(x, "b/dp (e f) -> b/dp k", e=2), mesh
    ),
    a_transform_of_a_partial_sum=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: fft.fft(x, "b/dp d {U:tp} -> b/dp k"), mesh
    ),
    an_unknown_norm=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: fft.fft(x, "b/dp d -> b/dp k", norm="unitary"), mesh
    ),
    frequencies_of_two_dimensions=lambda mesh: body("b/dp d -> b/dp d", lambda x: x + fft.fftfreq("b/dp d"), mesh),
    frequencies_of_no_samples=lambda mesh: body("b/dp d -> b/dp d", lambda x: x + fft.rfftfreq("k", 0), mesh),
    samples_of_one_frequency=lambda mesh: spmd.kernel("x/dp k -> x/dp y", mesh=mesh)(
        lambda f: fft.irfft(f, "x/dp k -> x/dp y")
    )(jnp.ones((4, 1))),
)


@fixed
def samples_of_one_frequency_fixed(mesh, fix):
    kernel = spmd.kernel("x/dp k -> x/dp y", mesh=mesh)(lambda f: fft.irfft(f, "x/dp k -> x/dp y", **fix()))
    np.testing.assert_allclose(kernel(jnp.ones((4, 1))), np.ones((4, 1)))


bad(
    a_cosine_transform_of_no_type=lambda mesh: body(
        "b/dp d -> b/dp k", lambda x: fft.dct(x, "b/dp d -> b/dp k", type=5), mesh
    ),
)


@bad
def two_walls_on_one_element(mesh):
    x = np.ones((2, 1), np.float32)
    spmd.kernel("b/dp d -> b/dp k", mesh=mesh)(lambda x: fft.dct(x, "b/dp d -> b/dp k", type=1))(x)


bad(
    sines_without_a_place_to_go=lambda mesh: spmd.kernel("x/dp -> k/dp", mesh=mesh)(
        lambda x: fft.dst(x, "x/dp -> k/dp")
    )(jnp.ones(8)),
)
