"""Random values for arguments that have none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from spmd.checker._arguments import drawn


def struct(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_each_kind_of_number() -> None:
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    tree = {"x": struct((4, 6), "float32"), "c": struct((5,), "complex64"), "b": struct((9,), "bool"), "k": key}
    found = drawn(tree, 0)
    assert {name: (x.shape, str(x.dtype)) for name, x in found.items()} == {
        name: (x.shape, str(x.dtype)) for name, x in tree.items()
    }
    assert found["x"].std() > 0.5 and jnp.abs(found["c"].imag).max() > 0 and 0 < found["b"].sum() < 9


def test_integers_are_indices_of_the_smallest_dimension() -> None:
    found = drawn([struct((40,), "int32"), struct((7, 3), "float32")], 0)
    assert set(np.unique(found[0])) == {0, 1, 2}


def test_what_has_values_keeps_them_and_another_seed_draws_others() -> None:
    x = np.ones(3, np.float32)
    assert drawn([x, 2], 0)[0] is x
    one, two = (drawn(struct((3,), "float32"), seed) for seed in (0, 1))
    assert not np.array_equal(one, two) and np.array_equal(one, drawn(struct((3,), "float32"), 0))
