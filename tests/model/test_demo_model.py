"""The shipped demo model: it has learned to read, and our own stages say so."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.model.loader import SafetensorsDirectory
from edgeshard_agent.model.stage import StageModel

from edgeshard.dtypes import DType
from edgeshard.generation import Sampling
from edgeshard.model import LayerRange
from edgeshard.step import KvGrant, Span, StepPlan

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "edgeshard" / "demo_model"
VALIDATION = ROOT / "tests" / "data" / "fairy-tales.valid.txt"
CONTEXT, HALF, BLOCK = 512, 256, 16
LIMIT_BITS_PER_BYTE = 1.55
SCORED_BYTES = 60_000


def test_the_validation_text_costs_at_most_155_hundredths_of_a_bit_per_byte() -> None:
    torch.set_num_threads(1)
    config = json.loads((MODEL / "config.json").read_text())
    stage = StageModel.load(
        SafetensorsDirectory(MODEL), config, LayerRange(0, 12), dtype=DType.FLOAT32, kv_dtype=DType.FLOAT32,
        kv_blocks=CONTEXT // BLOCK, block_tokens=BLOCK, device="cpu",
    )  # fmt: skip
    text = VALIDATION.read_text(encoding="utf-8")[:SCORED_BYTES]
    tokenizer = Tokenizer.load(MODEL / "tokenizer.json")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text, "the tokenizer loses nothing"
    nats = 0.0
    for number, start in enumerate(range(0, len(ids) - 1, HALF)):
        # Every scored token sees at least half a context.
        begin = max(0, start - HALF)
        window = ids[begin : start + HALF + 1]
        grant = KvGrant(number, 0, tuple(range(CONTEXT // BLOCK)))
        span = Span(number, 0, len(window) - 1, sampling=Sampling())
        frees = (number - 1,) if number else ()
        logits = stage.logits(StepPlan(frees, (grant,), (span,)), np.array(window[:-1], dtype=np.int64))
        first = start - begin
        targets = torch.tensor(window[first + 1 :])
        nats += float(torch.nn.functional.cross_entropy(logits[first:], targets, reduction="sum"))
    bits_per_byte = nats / math.log(2) / len(text.encode())
    assert bits_per_byte <= LIMIT_BITS_PER_BYTE, f"{bits_per_byte:.3f}"
    record = json.loads((MODEL / "training.json").read_text())
    assert abs(record["valid_bits_per_byte"] - bits_per_byte) < 0.08, "the record is of this model"


def test_the_model_is_small_enough_to_ship() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 20_000_000
    assert json.loads((MODEL / "config.json").read_text())["num_hidden_layers"] >= 12
