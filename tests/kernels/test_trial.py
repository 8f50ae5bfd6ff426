"""What numbers say of a kernel at its first call, where types suspect something."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.kernels import _plan
from spmd.kernels._plan import names_in, trial_of

BIG = jax.ShapeDtypeStruct((4096, 8192), "float32")


def trial(body: Any, *args: Any, pattern: str = "b/dp d/tp -> b/dp", **sizes: int) -> Any:
    kernel = spmd.kernel(pattern, mesh=spmd.make_mesh(**(sizes or {"dp": 2, "tp": 4})))(body)
    return trial_of(*kernel.prepared(args, {}))


def norms(x: Any) -> Any:
    return jnp.sqrt(lax.psum((x * x).sum(1), "tp"))


def wrong(x: Any) -> Any:
    return lax.psum(jnp.sqrt((x * x).sum(1)), "tp")


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 4}, {"dp": 2, "tp": 1}, {"dp": 1, "tp": 1}])
def test_large_arrays_and_small_meshes(sizes: dict[str, int]) -> None:
    """Names get small sizes, and an axis with one device has two."""
    assert trial(norms, BIG, **sizes).agrees
    found = trial(wrong, BIG, **sizes)
    assert found.wrong and all(n > 1 for n in found.sizes.values())


def test_a_large_mesh_is_made_small() -> None:
    mesh = spmd.make_mesh(dp=128, tp=8, abstract=True)
    for body, right in ((norms, True), (wrong, False)):
        kernel = spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)(body)
        found = trial_of(*kernel.prepared((BIG,), {}))
        assert found.agrees == right and found.wrong != right and found.sizes == {"dp": 4, "tp": 4}


def test_sizes_that_a_body_needs_are_kept() -> None:
    def body(x):
        return norms(x.reshape(x.shape[0], -1, 3).sum(2))  # columns by threes

    assert trial(body, jax.ShapeDtypeStruct((8, 24), "float32")).agrees
    fixed = lambda x: norms(x) if x.shape == (4, 6) else 1 / 0
    why = trial(fixed, jax.ShapeDtypeStruct((8, 24), "float32")).why
    assert why.startswith("it fails on dp=1 tp=1 at tests/kernels/test_trial.py:"), why


def test_numbers_are_asked_once_and_only_where_types_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(_plan, "trial_of", lambda *args: asked.append(args) or trial_of(*args))
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    kernel = spmd.kernel("b/dp d/tp -> b/dp", mesh=spmd.make_mesh(dp=2, tp=4))
    right = kernel(norms)
    right(x)
    assert not asked
    mean = kernel(lambda x: lax.psum(norms(x), "tp") / lax.axis_size("tp"))  # a sum of copies, and then a mean
    mean(x)
    mean(x)
    assert len(asked) == 1
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


# -------------------- the sizes of a kernel's names, read and made other ones

X = jnp.ones((64, 32, 24))


def test_names_are_read_and_made_small() -> None:
    mesh = spmd.make_mesh(dp=2, tp=4)
    kernel = spmd.kernel("b/dp (h k)/tp d -> b d/dp/tp", mesh=mesh, h=8)(lambda x: x)
    names = names_in(*kernel.prepared((X,), {}), [mesh])
    assert names.parts == {("b", 64): 2, ("h", 8): 4, ("k", 4): 1, ("d", 24): 8}
    small = names.smallest()
    assert small == {("b", 64): 4, ("k", 4): 2, ("d", 24): 16}
    assert names.resized([X], small)[0].shape == (4, 16, 16)
