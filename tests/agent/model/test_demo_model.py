"""The shipped demo model: it has learned to read, our own stages say so, and small integers forget
little of it."""

from __future__ import annotations

import json
import math
from functools import cache

import pytest
import torch
from edgeshard_agent.engine.tokenizer import Tokenizer

from bench.quantisation import MODEL, VALIDATION, bits_per_byte, demo_stage, score
from edgeshard.domain.models.dtypes import IntegerFormat, KvFormat, Quantisation

LIMIT_BITS_PER_BYTE = 1.55
SCORED_BYTES = 60_000
BEGINNING_BYTES = 10_000


@cache
def loss(scheme: str, kept: KvFormat | None = None) -> tuple[float, int]:
    """The result of `score` for the beginning of the validation text: several tests compare with
    the same ones."""
    text = VALIDATION.read_text(encoding="utf-8").encode()[:BEGINNING_BYTES].decode(errors="ignore")
    return score(demo_stage(scheme, kept), text)


def perplexity(scheme: str, kept: KvFormat | None = None) -> float:
    """The perplexity of a token of the beginning."""
    nats, tokens = loss(scheme, kept)
    return math.exp(nats / tokens)


@pytest.mark.long
def test_the_validation_text_costs_at_most_155_hundredths_of_a_bit_per_byte() -> None:
    torch.set_num_threads(1)
    text = VALIDATION.read_text(encoding="utf-8")[:SCORED_BYTES]
    tokenizer = Tokenizer.load(MODEL / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode(text)) == text, "the tokenizer loses nothing"
    found = bits_per_byte(demo_stage("float32"), text)
    assert found <= LIMIT_BITS_PER_BYTE, f"{found:.3f}"
    record = json.loads((MODEL / "training.json").read_text())
    assert abs(record["valid_bits_per_byte"] - found) < 0.08, "the record is of this model"


@pytest.mark.parametrize(("scheme", "limit"), [("int8", 0.005), ("int4", 0.02)])
def test_small_integers_cost_few_bits(scheme: str, limit: float) -> None:
    whole, quantised = (loss(name)[0] / math.log(2) / BEGINNING_BYTES for name in ("bf16", scheme))
    assert quantised - whole < limit
    assert quantised != whole, "the weights were not quantised"


@pytest.mark.parametrize("blocks", ["int8", "int4"])
@pytest.mark.one_in(2)
def test_a_head_of_small_integers_costs_about_a_hundredth_of_perplexity(blocks: str) -> None:
    """The demo model's is tied to its embedding, which keeps its dtype."""
    whole, int8, int4 = (
        perplexity(Quantisation.of(IntegerFormat(blocks), head))
        for head in ("none", "int8", "int4")
    )
    assert abs(int8 / whole - 1) < 0.002
    assert int8 < int4 < 1.012 * whole


@pytest.mark.parametrize("scheme", ["bf16", "int4"])
@pytest.mark.one_in(2)
def test_a_kv_cache_of_4_bits_costs_at_most_two_hundredths_of_perplexity(scheme: str) -> None:
    whole, small = (perplexity(scheme, kept) for kept in (None, KvFormat.INT4))
    assert small < 1.02 * whole
    assert small != whole, "keys and values were not rounded"


def test_the_model_is_small_enough_to_ship() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 20_000_000
    assert json.loads((MODEL / "config.json").read_text())["num_hidden_layers"] >= 12
