"""Errors in a body: the user's own stay as they are, and ours name the layer that was called."""

import contextlib
import inspect
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd import errors, nn
from spmd.kernels import Kernel
from spmd.modes import MODES

ROWS = "b/dp d -> b/dp d"


def mesh(**axes):
    return spmd.make_mesh(**(axes or {"dp": 2, "tp": 4}))


def on(*shapes):
    return [np.ones(shape, np.float32) for shape in shapes]


def run(pattern, body, *shapes):
    return spmd.kernel(pattern, mesh=mesh())(body)(*on(*shapes))


def identity(x):
    return x


# --- layers of the library ------------------------------------------------------------------------------------


def divided_scale(layer):
    """The error of a layer that gets features divided where it wants them whole."""
    with pytest.raises(spmd.errors.SpmdError) as caught:
        spmd.kernel("b d, d/dp -> b d", mesh=mesh(dp=2))(layer)(jnp.ones((4, 8)), jnp.ones(8))
    return str(caught.value)


def test_errors_of_the_body_are_the_users_own():
    """What JAX or the body says is not dressed up."""
    with pytest.raises(ZeroDivisionError):
        run(ROWS, lambda x: x / (1 // 0), (4, 6))
    with pytest.raises(TypeError, match="dot_general requires"):
        run(ROWS, lambda x: x @ np.ones((3, 3), np.float32), (4, 6))


def test_an_error_leaves_nothing_behind():
    """The same kernel works afterwards."""
    kernel = spmd.kernel(ROWS, mesh=mesh())(identity)
    for _ in range(2):
        with pytest.raises(errors.SizeError):
            kernel(*on((5, 6)))
        assert kernel(*on((4, 6))).sharding.is_equivalent_to(jax.NamedSharding(mesh(), P("dp")), 2)
    with pytest.raises(errors.ModeError):
        spmd.psum(np.ones(3), "n {U:dp} -> n")


def test_an_error_names_the_layer_that_was_called() -> None:
    for norm in (nn.rms_norm, nn.layer_norm):
        text = divided_scale(norm)
        assert text.startswith('\nannotate(x, "d/tp")') and text.count(f"called by nn.{norm.__name__}\n") == 1, text
    inner = spmd.kernel("b d, d/dp -> b d", mesh=mesh(dp=2))(nn.rms_norm)
    assert divided_scale(lambda x, scale: inner(x, scale)).count("called by") == 1
    assert "called by" not in divided_scale(lambda x, scale: spmd.annotate(scale, "d"))


def test_an_error_names_each_layer_on_the_way() -> None:
    text = divided_scale(lambda x, w: nn.mlp(x, w[:, None], w[None]))
    assert "called by nn.column_linear, called by nn.mlp" in text, text
    own = divided_scale(lambda x, w: nn.mlp(x, w, w))
    assert (
        own.strip().startswith("column_linear(x, w)") and own.endswith("called by nn.mlp") and "nn.column" not in own
    ), own


def test_an_error_of_shapes_says_which_shards_the_body_holds(mesh):
    @spmd.kernel("b/dp d/tp, d -> b/dp d/tp", mesh=mesh)
    def scaled(x, scale):
        return x * scale

    with pytest.raises(ValueError, match="shapes") as caught:
        scaled(jnp.ones((4, 8)), jnp.ones(8))
    [note] = [note for note in caught.value.__notes__ if "scaled" in note]
    assert 'x has shape (2, 2): a shard of "b/dp d/tp"' in note
    assert 'scale has shape (8,): a shard of "d"' in note


def test_an_error_of_shapes_names_the_size_that_differs_and_what_is_no_argument(mesh):
    outside = jnp.ones(7)

    @spmd.kernel("b/dp d/tp, d -> b/dp d/tp", mesh=mesh)
    def shifted(x, scale):
        return x + scale + outside

    with pytest.raises(ValueError, match="shapes") as caught:
        shifted(jnp.ones((4, 8)), jnp.ones(8))
    [note] = [note for note in caught.value.__notes__ if "shifted" in note]
    assert '- d is 2 in x, "d/tp", and 8 in scale, "d": write it with the same slashes in both\n' in note
    assert note.endswith("- outside has shape (7,): it is not an argument, so no layout divides it")

    @spmd.kernel("b/dp d/tp, d/tp -> b/dp d/tp", mesh=mesh)
    def fitting(x, scale):
        return x + scale + jnp.ones(7)

    with pytest.raises(ValueError, match="shapes") as caught:
        fitting(jnp.ones((4, 8)), jnp.ones(8))
    [note] = [note for note in caught.value.__notes__ if "fitting" in note]
    assert note.count("\n") == 2, note


# --- tracebacks -----------------------------------------------------------------------------------------------


def files_of(error):
    """The files of a traceback, and those of the errors before it."""
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def failing(mesh):
    """A kernel whose reduce names no axis of the mesh, and one whose result is a partial sum."""
    typo = spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)(lambda x: spmd.reduce(x, "b/dp d/mp -> b/dp"))
    partial = spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)(lambda x: x.sum(1))
    return typo, partial


def test_a_traceback_has_the_users_lines(mesh):
    """One frame of ours is that of the call itself."""
    typo, partial = failing(mesh)
    for kernel, own in ((typo, 2), (partial, 1)):
        with pytest.raises(spmd.errors.SpmdError) as caught:
            kernel(jnp.ones((4, 8)))
        files = files_of(caught.value)
        assert [file for file in files if file != __file__] == [inspect.getfile(Kernel)], files
        assert files.count(__file__) == own and caught.value.__context__ is None


def test_the_traceback_of_a_wrong_signature_has_the_users_line(mesh):
    with pytest.raises(errors.LayoutError) as caught:
        spmd.kernel("b/dp d -> b/dp", mesh=mesh)(lambda x, w: x)
    assert files_of(caught.value) == [__file__]


def test_a_traceback_is_whole_where_jax_filters_none(mesh):
    with _traceback_filtering("off"), pytest.raises(spmd.errors.SpmdError) as caught:
        failing(mesh)[0](jnp.ones((4, 8)))
    assert len(set(files_of(caught.value))) > 5


def test_the_traceback_of_anothers_error_keeps_what_follows_the_users_line(mesh):
    def broken(x):
        return spmd.scope(lambda: 1 // 0)()

    with pytest.raises(ZeroDivisionError) as caught:
        spmd.kernel("b/dp -> b/dp", mesh=mesh)(broken)(jnp.ones(4))
    assert files_of(caught.value)[-1] == __file__
    with pytest.raises(TypeError) as caught:
        spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: x @ jnp.ones((3, 3)))(jnp.ones((4, 6)))
    files = files_of(caught.value)
    after = files[len(files) - files[::-1].index(__file__) :]
    assert after and all("jax" in file for file in after), files


@contextlib.contextmanager
def _traceback_filtering(how):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", how)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


# What code asks of a value that is not known yet, and what it is told.
VALUES = {
    "np.asarray": ("NumPy takes", lambda x: jnp.asarray(np.asarray(x))),
    "a function of NumPy": ("NumPy takes", lambda x: x + np.sin(x)),
    "a type of NumPy": ("NumPy takes", lambda x: x * np.float32(x.sum())),
    "float": ("Python or a shape takes", lambda x: x * float(x.sum())),
    "int": ("Python or a shape takes", lambda x: x * int(x.sum())),
    "item": ("Python or a shape takes", lambda x: x * x.sum().item()),
    "tolist": ("Python or a shape takes", lambda x: x * x.tolist()[0]),
    "range": ("Python or a shape takes", lambda x: x * len(range(x.astype(int)[0, 0]))),
    "a position": ("Python or a shape takes", lambda x: x * [1, 2][x.astype(int)[0, 0]]),
    "a shape": ("Python or a shape takes", lambda x: x + jnp.zeros(x[0, 0].astype(int)).sum()),
    "a text": ("Python or a shape takes", lambda x: x * float(f"{x.sum():.3f}")),
    "nonzero": ("Python or a shape takes", lambda x: x + jnp.nonzero(x)[0].sum()),
    "unique": ("Python or a shape takes", lambda x: x + jnp.unique(x).sum()),
    "a mask": ("the size of the result is", lambda x: x[x > 0]),
    "if": ("Python decides by a value", lambda x: x if x.sum() > 0 else -x),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VALUES)
def test_code_that_asks_for_a_value_is_told_what_to_write(mode, name):
    """These ended in JAX's own errors, without a word of what a kernel has in their place."""
    rule, fn = VALUES[name]
    kernel = spmd.kernel("b/dp d -> b/dp d", mesh=mesh())(fn)
    with pytest.raises(errors.ModeError) as caught:
        getattr(kernel, mode)(np.ones((8, 8), np.float32))
    assert caught.value.fault.rule.startswith(rule) and caught.value.fault.advice
    assert any("test_translate.py" in one for one in caught.value.fault.got)


@pytest.mark.parametrize("mode", MODES)
def test_the_advice_for_arguments_in_two_memories(mode):
    where, x = spmd.Layout("b/dp d").sharding(mesh()), np.ones((8, 8), np.float32)
    host, device = jax.device_put(x, where.with_memory_kind("pinned_host")), jax.device_put(x, where)
    both = spmd.kernel("b/dp d, b/dp d -> b/dp d", mesh=mesh())(
        lambda x, y: jax.device_put(x, jax.memory.Space.Device) + y
    )
    np.testing.assert_array_equal(getattr(both, mode)(host, device), 2 * x)


def test_an_index_that_is_wrong_stays_the_users_error():
    with pytest.raises(IndexError, match="list index"):
        spmd.kernel("b/dp d -> b/dp d", mesh=mesh())(lambda x: x * [1, 2][5])(np.ones((8, 8), np.float32))
