"""Linear layers: in a kernel with a mapping, and of a tree of weights."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import nn
from spmd.modes import MODES
from tests.nn.cases_linear import plain_gated
from tests.nn.cases_norm import plain_rms
from tests.nn.harness import MESH, normal


def test_a_mapping_of_the_same_names():
    """The kernel's rules for b, s, d and f are not those of the layers' own strings."""
    x, gate, up, down = normal(10, 2, 8, 5), normal(11, 5, 12), normal(12, 5, 12), normal(13, 12, 5)

    @spmd.kernel("b s d, d f, d f, f d -> b s d", mesh=MESH, mapping={"b": "dp", "s": "tp", "d": None, "f": "tp"})
    def block(x, gate, up, down):
        x = x + nn.gated_mlp(nn.rms_norm(x, jnp.ones(5)), (gate, up), down, tp="tp", sp="tp")
        return nn.dropout(x, jax.random.key(0), "b s d", rate=0.5)

    truth = x + plain_gated(plain_rms(x, jnp.ones(5)), gate, up, down)
    truth = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), 2 * truth, 0)
    for mode in MODES:
        np.testing.assert_allclose(jax.jit(getattr(block, mode))(x, gate, up, down), truth, rtol=2e-4, atol=1e-5)


def test_a_tree_of_weights_shares_one_gather():
    x, weights = normal(14, 2, 4, 5), {"q": normal(15, 5, 8, 3), "kv": [normal(16, 5, 4), normal(17, 5, 4)]}

    @spmd.kernel(
        in_layouts=("b s/tp d", {"q": "d h/tp k", "kv": "d g/tp"}),
        out_layouts={"q": "b s h/tp k", "kv": "b s g/tp"},
        mesh=MESH,
    )
    def project(x, weights):
        return nn.column_linear(x, weights, tp="tp", sp="tp")

    found = project(x, weights)
    assert spmd.inspect.collectives(project, x, weights).counts == {"all_gather": 1}
    jax.tree.map(
        lambda y, w: np.testing.assert_allclose(y, np.tensordot(x, w, 1), rtol=1e-4, atol=1e-5), found, weights
    )
