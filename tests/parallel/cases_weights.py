"""One weight gathered before its use."""

from spmd import Layout, einsum, parallel
from tests.layers import LayerCase, cases, fit, placements, total

X = "b/rp/fs d"


def bound(axes, *layouts):
    return tuple(Layout(text).bind(**{a: axes[a] for a in Layout(text).axis_names}) for text in layouts)


def data_of(axes):
    groups = (axes["rp"], axes["fs"])
    return tuple(axis for group in groups for axis in ((group,) if isinstance(group, str) else group or ()))


def sizes(mesh, axes):
    return fit(mesh, axes, b=(3, "rp", "fs"), d=(5, "fs"), f=(7, "tp"), l=(3,))


@cases("gather", draw=2)
def _():
    """One weight: gathered, its gradient scattered within the group and summed over groups."""
    for mesh, axes in placements("rp", "fs", "tp"):
        yield LayerCase(
            name="gather",
            fn=lambda axes: (
                lambda x, w: einsum(
                    x,
                    parallel.gather(w, *bound(axes, "d/fs f/tp", "d f/tp"), data=data_of(axes)),
                    "... d, d f/tp -> ... f/tp",
                    tp=axes["tp"],
                )
            ),
            ins=(X, "d/fs f/tp"),
            outs="b/rp/fs f/tp",
            shapes=sizes(mesh, axes),
            mesh=mesh,
            axes=axes,
            reference=lambda x, w: x @ w,
            forward=lambda c: c.traffic("all_gather", "fs", "d f/tp"),
            backward=lambda c: total(
                c.traffic("psum_scatter", "fs", "d f/tp"),
                c.traffic("psum", "rp", "d/fs f/tp"),
                c.traffic("psum", "tp", X),
            ),
            dtypes=("float32",),
        )
