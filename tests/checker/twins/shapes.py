"""A divided dimension merged, split, tiled, joined, flipped, padded, cut or exchanged as if it were whole."""

import jax.numpy as jnp
from jax import lax

import spmd
from spmd import all_gather, relayout, split
from tests.checker.twins.registry import wrong

CUBE = {"dp": 2, "tp": 2, "cp": 2}


@wrong("b s/tp d -> n/tp d", n=64)
def merged_behind_a_whole_dimension(x):
    """A device has a part of each row of the batch, not some of the rows."""
    return x.reshape(-1, x.shape[2])  # wrong: layout


merged_behind_a_whole_dimension.right(lambda x: relayout(x, "b s/tp d -> b/tp s d").reshape(-1, x.shape[2]))
merged_behind_a_whole_dimension.whole(lambda x: x.reshape(-1, x.shape[2]))


@wrong("n/tp d -> l e/tp d", n=60)
def split_in_the_middle(x):
    """The block is taken for a part of each group."""
    return x.reshape(3, -1, x.shape[1])  # wrong: layout


@split_in_the_middle.right
def _(x):
    full = all_gather(x, "n/tp d -> n d")
    return split(full.reshape(3, 20, -1), "l e d -> l e/tp d")


split_in_the_middle.whole(lambda x: x.reshape(3, 20, -1))


@wrong("b/dp s/tp d -> n/tp d", n=64)
def merged_with_an_axis_lost(x):
    full = lax.all_gather(x, "dp", axis=0, tiled=True)
    return lax.pmean(full, "dp").reshape(-1, x.shape[2])  # wrong: layout


@merged_with_an_axis_lost.right
def _(x):
    full = relayout(x, "b/dp s/tp d -> b/tp s d", to="invarying")
    return full.reshape(-1, x.shape[2])


merged_with_an_axis_lost.whole(lambda x: x.reshape(-1, x.shape[2]))


@wrong("n/tp -> m/tp", n=16, m=32)
def tiled(x):
    return jnp.tile(x, 2)  # wrong: pending or layout


tiled.right(lambda x: split(jnp.tile(all_gather(x, "n/tp -> n"), 2), "m -> m/tp"))
tiled.whole(lambda x: jnp.tile(x, 2))


@wrong("n/tp, e/tp -> m/tp", n=16, e=24, m=40)
def joined(x, y):
    return jnp.concatenate([x, y])  # wrong: pending


joined.right(lambda x, y: split(jnp.concatenate([all_gather(x, "n/tp -> n"), all_gather(y, "e/tp -> e")]), "m -> m/tp"))
joined.whole(lambda x, y: jnp.concatenate([x, y]))


@wrong("b/dp n/tp -> b/dp n/tp")
def flipped(x):
    return x + x[:, ::-1]  # wrong: pending or disagree


flipped.right(lambda x: x + spmd.flip(x, "b/dp [n/tp]"))
flipped.whole(lambda x: x + x[:, ::-1])


@wrong("n/tp d -> m/tp d", n=24, m=32)
def padded(x):
    """Two rows of zeros after every block."""
    return jnp.pad(x, ((0, 2), (0, 0)))  # wrong: pending


padded.right(lambda x: split(jnp.pad(all_gather(x, "n/tp d -> n d"), ((0, 8), (0, 0))), "m d -> m/tp d"))
padded.whole(lambda x: jnp.pad(x, ((0, 8), (0, 0))))


@wrong("b/dp n/tp -> b/dp m/tp", n=32, m=16)
def first_half(x):
    return x[:, : x.shape[1] // 2]  # wrong: pending


first_half.right(lambda x: split(all_gather(x, "b/dp n/tp -> b/dp n")[:, :16], "b/dp m -> b/dp m/tp"))
first_half.whole(lambda x: x[:, :16])


@wrong("b/dp n/tp -> b/dp m/tp", n=32, m=16)
def gates_and_values_cut_apart(x):
    """A fused projection, divided as one: each device has gates only, or values only."""
    gate, value = jnp.split(x, 2, axis=1)  # wrong: pending
    return jnp.tanh(gate) * value


@gates_and_values_cut_apart.right
def _(x):
    both = all_gather(x, "b/dp n/tp -> b/dp n").reshape(x.shape[0], 2, 16)
    gate, value = (split(both[:, i], "b/dp m -> b/dp m/tp") for i in (0, 1))
    return jnp.tanh(gate) * value


gates_and_values_cut_apart.whole(lambda x: jnp.tanh(x[:, :16]) * x[:, 16:])


@wrong("b/dp f/tp -> f/dp b/tp", mesh=CUBE)
def transposed(x):
    """Each block is transposed and stays where it is."""
    return x.T  # wrong: layout


transposed.right(lambda x: relayout(x.T, "f/tp b/dp -> f/dp b/tp"))
transposed.whole(lambda x: x.T)


@wrong("b/dp n/tp -> b/dp m/tp", n=16, m=32)
def repeated_as_a_whole(x):
    """`repeat` would be right; stacking in front puts all blocks' copies behind each other."""
    return jnp.stack([x, x], axis=1).reshape(x.shape[0], -1)  # wrong: layout


repeated_as_a_whole.right(
    lambda x: split(jnp.tile(all_gather(x, "b/dp n/tp -> b/dp n"), (1, 2)), "b/dp m -> b/dp m/tp")
)
repeated_as_a_whole.whole(lambda x: jnp.tile(x, (1, 2)))


@wrong("b/dp s h/tp k -> b/dp s n/tp", n=48)
def heads_merged_in_another_order(x):
    """Features first, then heads: the blocks of the merged dimension are not the devices'."""
    return x.swapaxes(2, 3).reshape(*x.shape[:2], -1)  # wrong: layout


@heads_merged_in_another_order.right
def _(x):
    full = all_gather(x, "b/dp s h/tp k -> b/dp s h k")
    return split(full.swapaxes(2, 3).reshape(*x.shape[:2], -1), "b/dp s n -> b/dp s n/tp")


heads_merged_in_another_order.whole(lambda x: x.swapaxes(2, 3).reshape(*x.shape[:2], -1))
