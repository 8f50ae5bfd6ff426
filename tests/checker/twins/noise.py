"""Random numbers: the same for all blocks, or different on copies."""

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd import nn, random
from tests.checker.twins.registry import wrong

STREAM = "b/dp s/tp d, scalar -> b/dp s/tp d"


@wrong(STREAM)
def noise_of_a_local_shape(x, key):
    return x + jax.random.normal(key, x.shape)  # wrong: noise


noise_of_a_local_shape.right(lambda x, key: x + random.normal(key, "b/dp s/tp d"))
noise_of_a_local_shape.whole(lambda x, key: x + jax.random.normal(key, x.shape))


@wrong(STREAM)
def dropout_of_a_local_shape(x, key):
    keep = jax.random.bernoulli(key, 0.7, x.shape)
    return jnp.where(keep, x / 0.7, 0.0)  # wrong: noise


dropout_of_a_local_shape.right(lambda x, key: nn.dropout(x, key, "b/dp s/tp d", rate=0.3))
dropout_of_a_local_shape.whole(lambda x, key: jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.0))


@wrong(STREAM, unseen="a key for each device is legal, along some axes as well as along all")
def folded_along_one_axis_only(x, key):
    """Different along dp, and the same along tp."""
    mine = jax.random.fold_in(key, lax.axis_index("dp"))
    return x + jax.random.uniform(mine, x.shape)  # wrong: noise


folded_along_one_axis_only.right(lambda x, key: x + random.uniform(key, "b/dp s/tp d"))


@wrong("b/dp d/tp, scalar -> b/dp d/tp")
def split_keys_of_rows(x, key):
    """A key for each row of the block: rows of other devices get the same ones."""
    keys = jax.random.split(key, x.shape[0])
    return x + jax.vmap(lambda k: jax.random.normal(k, (1,)))(keys)  # wrong: noise


@split_keys_of_rows.right
def _(x, key):
    keys = jax.random.split(key, 4)
    mine = lax.dynamic_slice_in_dim(keys, lax.axis_index("dp") * x.shape[0], x.shape[0])
    return x + jax.vmap(lambda k: jax.random.normal(k, (1,)))(mine)


split_keys_of_rows.whole(lambda x, key: x + jax.vmap(lambda k: jax.random.normal(k, (1,)))(jax.random.split(key, 4)))


@wrong("d f, b/dp d, scalar -> b/dp f", unseen="a mean over noise of each device's own may be meant")
def different_noise_on_copies(w, x, key):
    """The weight is the same on all devices of tp; the noise on it is not, and the mean hides it."""
    mine = jax.random.fold_in(key, lax.axis_index("tp"))
    noisy = w + jax.random.normal(mine, w.shape)
    return lax.pmean(jnp.tanh(x @ noisy), "tp")  # wrong: noise


different_noise_on_copies.right(
    lambda w, x, key: jnp.tanh(x @ (w + jax.random.normal(jax.random.fold_in(key, 0), w.shape)))
)


@wrong("b/dp v/tp, scalar -> b/dp v/tp")
def gumbel_of_a_block(x, key):
    """Sampling over a divided vocabulary."""
    return x + jax.random.gumbel(key, x.shape)  # wrong: noise


gumbel_of_a_block.right(lambda x, key: x - jnp.log(-jnp.log(random.uniform(key, "b/dp v/tp", minval=1e-7))))


@wrong("n/tp d, scalar -> n/tp d")
def permutation_of_a_block(x, key):
    """The rows are shuffled within each block, all in the same way."""
    return jax.random.permutation(key, x)  # wrong: pending or noise


permutation_of_a_block.right(
    lambda x, key: spmd.split(jax.random.permutation(key, spmd.all_gather(x, "n/tp d -> n d")), "n d -> n/tp d")
)
permutation_of_a_block.whole(lambda x, key: jax.random.permutation(key, x))


@wrong("b/dp s d/tp, scalar -> b/dp s d/tp")
def initialized_in_blocks(x, key):
    fresh = jax.random.normal(key, (x.shape[-1], 8))
    return x + jnp.tanh(fresh).sum(-1)[None, None]  # wrong: noise


@initialized_in_blocks.right
def _(x, key):
    fresh = random.normal(key, "d/tp f", f=8)
    return x + jnp.tanh(fresh).sum(-1)[None, None]
