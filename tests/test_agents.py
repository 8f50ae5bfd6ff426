"""AGENTS.md, the page for programs: a kernel that is written by what it says alone is right, and its rows run."""

import operator
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "AGENTS.md").read_text()


def pooling(mesh):
    """Attention pooling of a divided sequence, with a layer of divided features and a cross-entropy behind it, made of
    the rows of the table."""

    @spmd.kernel("b/dp s/tp d, d, d f/tp, b/dp -> scalar, b/dp s/tp", mesh=mesh)
    def loss(x, query, w, labels):
        score = spmd.einsum(x, query, "b/dp s/tp d, d -> b/dp s/tp")
        score = score - 0.1 * spmd.iota("s/tp").astype(x.dtype)[None]  # later tokens count less
        weight = spmd.softmax(score, "b/dp [s/tp]")
        pooled = spmd.einsum(weight, x, "b/dp s/tp, b/dp s/tp d -> b/dp d")
        logits = spmd.einsum(pooled, w, "b/dp d, d f/tp -> b/dp f/tp")
        total = spmd.reduce(logits, "b/dp f/tp -> b/dp", "logsumexp")
        right = labels[:, None] == spmd.iota("f/tp")[None]
        chosen = spmd.reduce(jnp.where(right, logits, 0.0), "b/dp f/tp -> b/dp")
        return spmd.reduce(total - chosen, "b/dp -> scalar", "mean"), weight

    return loss


def plain(x, query, w, labels):
    weight = jax.nn.softmax(x @ query - 0.1 * np.arange(x.shape[1], dtype=x.dtype)[None], axis=1)
    logits = jnp.einsum("bs,bsd->bd", weight, x) @ w
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels].mean(), weight


def test_a_kernel_written_by_what_the_page_says(mesh):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype("float32") for shape in ((4, 8, 6), (6,), (6, 12))]
    args = (*arrays, rng.integers(0, 12, 4))
    kernel = pooling(mesh)
    for found, expected in zip(kernel(*args), plain(*args), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    gradient, expected = (jax.grad(lambda w, fn=fn: fn(*args[:2], w, args[3])[0])(args[2]) for fn in (kernel, plain))
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
    spmd.testing.assert_same_on_any_mesh(kernel, *args)
    assert spmd.check(kernel, *args).verdict.kind in ("proved", "tested")


ROWS = re.findall(r"^\| .* \| `(spmd\..*)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("row", ROWS)
def test_each_row_of_the_table_names_what_is_there(row):
    name, text = re.match(r'spmd\.([\w.]+)\(.*?"([^"]*)"', row).groups()
    assert callable(operator.attrgetter(name)(spmd))
    spmd.Pattern(text) if "->" in text else spmd.Layout(text)


def test_the_table_has_rows():
    assert len(ROWS) == 15 and not any(row.startswith("jax.") for row in ROWS)


def test_the_page_is_one_page_and_is_shipped():
    """A program that has the wheel alone finds it there."""
    assert len(PAGE.split()) < 1100
    assert (ROOT / "docs" / "pages" / "agents.md").resolve() == ROOT / "AGENTS.md"
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"]["AGENTS.md"] == "spmd/AGENTS.md"
