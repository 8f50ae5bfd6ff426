"""Decoding: the same tokens on every mesh, and those of the whole sequence read at once."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from tests.sampler import rare, share

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROWS, PROMPT, NEW = 4, 8, 5


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("decode")
    finally:
        sys.path.remove(str(EXAMPLES))


def written(module: Any, mesh: dict[str, int], experts: int = 0, temperature: float = 0.0) -> Any:
    """What is written after prompts of different lengths; the decoder, weights, prompts and lengths."""
    c = module.Config(vocabulary=44, d=24, heads=4, kv_heads=2, head=6, hidden=20, experts=experts)
    slots = PROMPT + NEW + 3  # 16: divides over cp, and some stay empty
    decoder = module.Decoder.of(c, spmd.make_mesh(**mesh), slots=slots, temperature=temperature)
    params = decoder.model.init(jax.random.key(0))
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, c.vocabulary, (ROWS, PROMPT), np.int32)
    lengths = np.array([PROMPT, 1, 3, 6], np.int32)
    keys = jax.random.split(jax.random.key(2), NEW)
    made, *_ = module.generate(decoder, params, prompts, lengths, keys)
    return made, (decoder.model, params, prompts, lengths)


@pytest.fixture(scope="module")
def one_device_draws(module: Any) -> Callable[[int], Any]:
    return functools.cache(lambda experts: written(module, {"one": 1}, experts, temperature=0.8)[0])


@pytest.mark.parametrize("experts", share([0, 4]))
def test_tokens_are_those_of_whole_sequences(module, experts):
    """Each is the best after all before it, without a cache, in one pass over the row."""
    made, (model, params, prompts, lengths) = written(module, {"one": 1}, experts)

    @spmd.kernel(in_layouts=(model.layouts, "b s"), out_layouts="b s", mesh=model.mesh)
    def best(params: Any, tokens: Any) -> Any:
        x = spmd.nn.embedding(tokens, params["embed"])
        x, _ = model.run_layers(params["layers"], x, spmd.iota("s"))
        return spmd.nn.unembedding(spmd.nn.rms_norm(x, params["norm"]), params["unembed"]).argmax(-1)

    rows = np.zeros((ROWS, PROMPT + NEW), np.int32)
    for row, prompt, length, new in zip(rows, prompts, lengths, made, strict=True):
        row[: length + NEW] = np.concatenate([prompt[:length], new])
    found = np.asarray(best(params, rows))
    wanted = np.stack([row[length - 1 : length - 1 + NEW] for row, length in zip(found, lengths, strict=True)])
    np.testing.assert_array_equal(made, wanted)
    assert len({tuple(row) for row in made.tolist()}) == ROWS  # rows do not write the same


@pytest.mark.parametrize(
    ("mesh", "experts"),
    share(
        [
            ({"dp": 2, "cp": 2, "tp": 2}, 0),
            ({"fsdp": 2, "tp": 4}, 0),  # two devices to a key head
            ({"ep": 2, "cp": 2, "tp": 2}, 4),
        ]
    ),
    ids=str,
)
@rare
def test_every_mesh_draws_the_same(module, one_device_draws, mesh, experts):
    found, _ = written(module, mesh, experts, temperature=0.8)
    np.testing.assert_array_equal(found, one_device_draws(experts))


@rare
def test_a_token_costs_what_the_formulas_say(module):
    """Per layer and row: two psums of the stream over tp, one softmax and one sum of values over cp."""
    mesh, layers = {"dp": 2, "cp": 2, "tp": 2}, 2
    c = module.Config(vocabulary=44, layers=layers, d=24, heads=4, kv_heads=2, head=6, hidden=20)
    decoder = module.Decoder.of(c, spmd.make_mesh(**mesh), slots=16)
    params = decoder.model.init(jax.random.key(0))
    lengths, key = np.ones(ROWS, np.int32), jax.random.key(0)
    read, write = decoder.kernels
    cache, tokens = read(params, decoder.model.place(np.ones((ROWS, PROMPT), np.int32)), lengths, key)
    sent = spmd.inspect.collectives(write, params, cache, tokens, lengths, key).by_axis()
    rows = ROWS // mesh["dp"]
    stream, heads = 4 * c.d, c.heads // mesh["tp"]
    assert sent["tp"].total_bytes == rows * ((1 + 2 * layers) * stream + 2 * 4)  # the embedding's, and an argmax
    assert sent["cp"].total_bytes == rows * layers * heads * (8 + 4 * c.head)
    assert set(sent) == {"tp", "cp"}
