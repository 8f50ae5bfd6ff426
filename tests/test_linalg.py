"""What `spmd.linalg` leaves to JAX: many small matrices, each whole on its device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.modes import MODES
from tests.ops.harness import close, communicates, pulled, run, wide
from tests.sampler import share

MESH = {"a": 2, "b": 3}


def symmetric(dtype: str) -> np.ndarray:
    """Six matrices whose eigenvalues lie apart, so that the eigenvectors have a gradient."""
    parts = np.random.default_rng(0).normal(size=(2, 6, 5, 5))
    x = parts[0] + 1j * parts[1] if "complex" in dtype else parts[0]
    return (x + x.conj().swapaxes(-1, -2) + 9 * np.diag(np.arange(5))).astype(dtype)


def of_modes(x: Any) -> Any:
    """The eigenvalues, and the weights of the eigenvectors, which have no sign or phase."""
    values, vectors = jnp.linalg.eigh(x)
    return values + (jnp.abs(vectors) ** 2)[..., 0, :]


@pytest.mark.parametrize("dtype", share(["float32", "float64", "complex64"]))
def test_eigh_of_many_small_matrices_is_local(dtype: str) -> None:
    """In each mode, with gradients, against LAPACK; the batch is divided over two axes, and nothing is sent."""
    x = symmetric(dtype)
    values, vectors = np.linalg.eigh(x)
    tolerance = 1e-10 if dtype == "float64" else 1e-4
    layouts = ["g/a/b n m"], "g/a/b n"
    with wide(dtype):
        expected = pulled(of_modes, jnp.asarray(x))
        close(expected[0], (values + abs(vectors[:, 0]) ** 2).astype(expected[0].dtype), tolerance)
        for mode in MODES:
            found = pulled(run(of_modes, MESH, *layouts, mode), jnp.asarray(x))
            jax.tree.map(lambda a, b: close(a, b, tolerance), found, expected)
        both = lambda x: jax.vjp(of_modes, x)[1](of_modes(x))[0]
        assert not communicates(both, MESH, layouts[0], layouts[0][0], jnp.asarray(x))


def test_under_vmap_inside_a_body() -> None:
    x = symmetric("float32")
    found = spmd.kernel("g/a n m -> g/a n", mesh=spmd.make_mesh(a=2))(jax.vmap(lambda x: jnp.linalg.eigvalsh(x)))(x)
    close(found, np.linalg.eigvalsh(x), 1e-4)
