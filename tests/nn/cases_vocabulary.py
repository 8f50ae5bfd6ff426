"""Embeddings, over rows and over features, and the scores of tokens."""

import functools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from spmd import nn
from tests.layers import cases, total
from tests.nn.cases_linear import STREAM, gathered, linear_cases, scattered, summed


def numbers_below(size):
    """Integers for the arguments that `size` names by position, below it; normal numbers for the rest."""

    def make(rng, shapes):
        return [
            rng.integers(size[i](shapes), size=shape, dtype=np.int32)
            if i in size
            else rng.normal(size=shape).astype("f4")
            for i, shape in enumerate(shapes)
        ]

    return make


@cases("embedding", draw=2)
def _():
    return linear_cases(
        "embedding",
        nn.embedding,
        ("b/dp s/cp", "v/tp d"),
        STREAM,
        lambda ids, table: jnp.eye(table.shape[0])[ids] @ table,
        scattered,
        lambda c: total(gathered(c), summed("v/tp d")(c)),
        make=numbers_below({0: lambda shapes: shapes[1][0]}),
    )


@cases("embedding over features", draw=2)
def _():
    for case in linear_cases(
        "embedding over features",
        functools.partial(nn.embedding, over="features"),
        ("b/dp s/cp", "v f/tp"),
        "b/dp s/cp/sp f",
        lambda ids, table: jnp.eye(table.shape[0])[ids] @ table,
        lambda c: c.traffic("all_to_all", "sp", "b/dp s/cp/sp f"),
        lambda c: total(c.traffic("all_to_all", "sp", "b/dp s/cp/sp f"), summed("v f/tp")(c)),
        make=numbers_below({0: lambda shapes: shapes[1][0]}),
    ):
        yield case if case.axes["sp"] else replace(case, outs="b/dp s/cp f/tp")


@cases("unembedding", draw=2)
def _():
    """Tied: the table embeds the tokens whose scores are asked for, and its gradients add up."""

    def body(ids, table, **axes):
        return nn.unembedding(jnp.sin(nn.embedding(ids, table, **axes)), table, **axes)

    return linear_cases(
        "unembedding",
        body,
        ("b/dp s/cp", "v/tp d"),
        "b/dp s/cp v/tp",
        lambda ids, table: jnp.sin(jnp.eye(table.shape[0])[ids] @ table) @ table.T,
        lambda c: total(scattered(c), gathered(c)),
        lambda c: total(scattered(c), gathered(c), summed("v/tp d", "v/tp d")(c)),
        make=numbers_below({0: lambda shapes: shapes[1][0]}),
        out_dtype="float32",
    )
