"""What numbers say of a kernel at its first call, where types suspect something."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd

BIG = jax.ShapeDtypeStruct((4096, 8192), "float32")


KERNEL = spmd.kernel("b/dp d/tp -> b/dp")


def norms(x: Any) -> Any:
    return jnp.sqrt(lax.psum((x * x).sum(1), "tp"))


def wrong(x: Any) -> Any:
    return lax.psum(jnp.sqrt((x * x).sum(1)), "tp")


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 4}, {"dp": 128, "tp": 8}])
def test_large_arrays_and_meshes_are_made_small(sizes: dict[str, int]) -> None:
    """Names get small sizes, and axes of many devices fewer: numbers are there at once."""
    mesh = spmd.make_mesh(**sizes, abstract=True)
    assert spmd.check(KERNEL(norms).on(mesh), BIG).verdict.kind in ("proved", "tested")
    assert spmd.check(KERNEL(wrong).on(mesh), BIG)


def test_sizes_that_a_body_needs_are_kept() -> None:
    def body(x):
        return norms(x.reshape(x.shape[0], -1, 3).sum(2))  # columns by threes

    mesh, x = spmd.make_mesh(dp=2, tp=4), jax.ShapeDtypeStruct((8, 24), "float32")
    assert not spmd.check(KERNEL(body).on(mesh), x)
    fixed = lambda x: norms(x) if x.shape == (4, 6) else 1 / 0
    assert "it fails on mesh dp=1, tp=1 at tests/kernels/test_trial.py:" in str(spmd.check(KERNEL(fixed).on(mesh), x))


def test_a_sum_of_copies_and_then_a_mean_is_accepted() -> None:
    """The types suspect it, and the numbers do not."""
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    kernel = spmd.kernel("b/dp d/tp -> b/dp", mesh=spmd.make_mesh(dp=2, tp=4))
    mean = kernel(lambda x: lax.psum(norms(x), "tp") / lax.axis_size("tp"))
    np.testing.assert_allclose(mean(x), kernel(norms)(x), rtol=1e-6)
    with pytest.raises(spmd.errors.ReplicationError):
        kernel(wrong)(x)


def test_a_mean_by_hand_is_accepted() -> None:
    """`lax.pmean` is no more than this."""
    x = jnp.arange(6.0)
    kernel = spmd.kernel("d -> d", mesh=spmd.make_mesh(dp=4))
    np.testing.assert_allclose(kernel(lambda x: lax.psum(x, "dp") / lax.axis_size("dp"))(x), x)
    with pytest.raises(spmd.errors.ReplicationError, match="4 times as large"):
        kernel(lambda x: lax.psum(x, "dp"))(x)


def test_every_kernel_may_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What types do not see is then an error at the first call."""
    x = jnp.ones((4, 8))
    kernel = spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=2))
    kernel(lambda x: x / x.shape[0])(x)
    monkeypatch.setenv("SPMD_CHECK", "full")
    with pytest.raises(spmd.errors.ReplicationError, match="spmd.size"):
        kernel(lambda x: x / x.shape[0])(x)
    kernel(lambda x: x / spmd.size("b"))(x)
