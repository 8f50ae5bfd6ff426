"""Axes: another one than meant, or two in another order."""

from jax import lax

from spmd import relayout
from tests.checker.twins.registry import wrong

CUBE = {"dp": 2, "tp": 2, "cp": 2}


@wrong("n/dp/tp -> n/tp")
def major_axis_gathered(x):
    """Joining over dp puts blocks together that are not neighbours."""
    return lax.all_gather(x, "dp", tiled=True, to="invarying")  # wrong: order or layout


major_axis_gathered.right(lambda x: relayout(x, "n/dp/tp -> n/tp", to="invarying"))
major_axis_gathered.whole(lambda x: x)


@wrong("n/dp/tp d, m n -> m d")
def gathered_major_first(x, w):
    half = lax.all_gather(x, "dp", tiled=True)
    rows = lax.all_gather(half, "tp", tiled=True)  # wrong: order
    return lax.pmean(w @ rows, ("dp", "tp"))


@gathered_major_first.right
def _(x, w):
    half = lax.all_gather(x, "tp", tiled=True)
    rows = lax.all_gather(half, "dp", tiled=True)
    return lax.pmean(w @ rows, ("dp", "tp"))


gathered_major_first.whole(lambda x, w: w @ x)


@wrong("n/dp/tp d, m n -> m d", raw=True)
def gathered_in_another_order(x, w):
    rows = lax.all_gather(x, ("tp", "dp"), tiled=True, to="invarying")  # wrong: order
    return w @ rows


gathered_in_another_order.right(lambda x, w: w @ lax.all_gather(x, ("dp", "tp"), tiled=True, to="invarying"))
gathered_in_another_order.whole(lambda x, w: w @ x)


@wrong("b/dp d/tp, d/tp f -> b/dp f", mesh={"dp": 2, "tp": 4})
def summed_over_the_wrong_axis(x, w):
    return lax.pmean(lax.psum(x @ w, "dp"), "tp")  # wrong: partial or layout


summed_over_the_wrong_axis.right(lambda x, w: lax.psum(x @ w, "tp"))
summed_over_the_wrong_axis.whole(lambda x, w: x @ w)


@wrong("b/dp d/tp, d/tp f -> b/dp f")
def summed_over_both(x, w):
    """Rows of other batches are added as well."""
    y = lax.psum(x @ w, ("dp", "tp"))
    return lax.pcast(y, "dp", to="varying")  # wrong: layout


summed_over_both.right(lambda x, w: lax.psum(x @ w, "tp"))
summed_over_both.whole(lambda x, w: x @ w)


@wrong("b/dp d/cp, d/cp f/tp, d/tp f/cp -> b/dp f/tp", mesh=CUBE, f=16)
def weight_of_another_layer(x, w, v):
    """Both blocks have the same shape; the second is divided the other way round."""
    w = w + v  # wrong: disagree
    return lax.psum(x @ w, "cp")


@weight_of_another_layer.right
def _(x, w, v):
    w = w + relayout(v, "d/tp f/cp -> d/cp f/tp")
    return lax.psum(x @ w, "cp")


weight_of_another_layer.whole(lambda x, w, v: x @ (w + v))


@wrong("b/dp n/tp, b/dp n/cp -> b/dp n/tp", mesh=CUBE)
def operands_on_different_axes(x, y):
    """Blocks have the same size, and are other parts."""
    return lax.pmean(x * y, "cp")  # wrong: disagree


@operands_on_different_axes.right
def _(x, y):
    mine = relayout(y, "b/dp n/cp -> b/dp n/tp", to="invarying")
    return x * mine


operands_on_different_axes.whole(lambda x, y: x * y)


@wrong("n/dp/tp, n/tp/dp -> n/dp/tp", raw=True)
def operands_in_different_orders(x, y):
    return x * y  # wrong: disagree


operands_in_different_orders.right(lambda x, y: x * relayout(y, "n/tp/dp -> n/dp/tp"))


@wrong("n/dp/tp -> n/tp/dp")
def returned_in_another_order(x):
    return x * 2.0  # wrong: layout


returned_in_another_order.right(lambda x: relayout(x * 2.0, "n/dp/tp -> n/tp/dp"))
returned_in_another_order.whole(lambda x: x * 2.0)


@wrong("b/dp d/tp/cp, d/tp/cp n -> b/dp n/tp/cp", mesh=CUBE)
def scattered_in_another_order(x, w):
    """Scattered over cp first, and so divided over cp first."""
    y = lax.psum_scatter(x @ w, "cp", scatter_dimension=1, tiled=True)
    return lax.psum_scatter(y, "tp", scatter_dimension=1, tiled=True)  # wrong: layout


@scattered_in_another_order.right
def _(x, w):
    y = lax.psum_scatter(x @ w, "tp", scatter_dimension=1, tiled=True)
    return lax.psum_scatter(y, "cp", scatter_dimension=1, tiled=True)


scattered_in_another_order.whole(lambda x, w: x @ w)


@wrong("n d -> n/dp/tp d")
def block_by_a_wrong_number(x):
    """The place on the mesh is counted with the axes' roles exchanged."""
    place = lax.axis_index("tp") * lax.axis_size("dp") + lax.axis_index("dp")
    size = x.shape[0] // (lax.axis_size("dp") * lax.axis_size("tp"))
    return lax.dynamic_slice_in_dim(x, place * size, size)  # wrong: layout


@block_by_a_wrong_number.right
def _(x):
    place = lax.axis_index("dp") * lax.axis_size("tp") + lax.axis_index("tp")
    size = x.shape[0] // (lax.axis_size("dp") * lax.axis_size("tp"))
    return lax.dynamic_slice_in_dim(x, place * size, size)


block_by_a_wrong_number.whole(lambda x: x)
