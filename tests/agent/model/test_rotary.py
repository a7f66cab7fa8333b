"""The frequencies of our own rotary embeddings equal transformers', for every config that runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from edgeshard_agent.model.library import library_config, library_of
from edgeshard_agent.model.rotary import RotaryFrequencies
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from edgeshard.architectures import read_config
from edgeshard.architectures.record import Fused
from edgeshard.architectures.rope import Rotation
from tests.agent.model.families import VARIANTS, decoder_of

BASE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 6,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
ROWS = [name for name in VARIANTS if isinstance(decoder_of(name).architecture.runs, Fused)]


def assert_as_in_transformers(config: dict[str, Any]) -> None:
    decoder = read_config(config)
    theirs: Any = getattr(library_of(decoder), decoder.architecture.library.rotary_class)(
        library_config(decoder)
    )
    rotations = decoder.rotations()
    ours = RotaryFrequencies(rotations)
    for kind in rotations:
        prefix = f"{kind}_" if kind else ""
        frequencies, scaling = ours.of(kind)
        torch.testing.assert_close(
            frequencies, getattr(theirs, f"{prefix}inv_freq"), rtol=3e-7, atol=0
        )
        assert scaling == getattr(theirs, f"{prefix}attention_scaling")


@pytest.mark.parametrize("variant", ROWS)
def test_of_every_row_of_the_table(variant: str) -> None:
    assert_as_in_transformers(
        json.loads(VARIANTS[variant].library_config().to_json_string(use_diff=False))
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3", "mixtral", "gemma2"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_theta": 1e6, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 512, "rope_theta": 5e5}},
    ],
    ids=str,
)
def test_of_what_a_config_gives_or_leaves_out(family: str, given: dict[str, Any]) -> None:
    assert_as_in_transformers(BASE | {"model_type": family} | given)


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": YARN},
        {
            "rope_scaling": YARN
            | {"original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2}
        },
        {"rope_scaling": YARN | {"truncate": False}},
        {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
        {"rope_scaling": YARN | {"attention_factor": 1.1}},
        {"rope_scaling": YARN, "original_max_position_embeddings": 256},
        {
            "rope_scaling": {"type": "yarn", "factor": 2},
            "rope_parameters": {"rope_type": "linear", "factor": 3},
        },
    ],
    ids=str,
)
def test_of_yarn(given: dict[str, Any]) -> None:
    assert_as_in_transformers(BASE | {"model_type": "llama"} | given)


@pytest.mark.parametrize("family", ["ministral3", "gpt_oss"])
@pytest.mark.parametrize("given", [{}, {"rope_theta": 5e5}], ids=str)
def test_of_families_that_assume_an_entry(family: str, given: dict[str, Any]) -> None:
    assert_as_in_transformers(BASE | {"model_type": family, "head_dim": 64} | given)


def test_queries_grow_with_their_position() -> None:
    rotation = Rotation(
        "default", 10_000.0, 8, {"original_max_position_embeddings": 16}, growth=0.1
    )
    positions = torch.arange(200)
    found = RotaryFrequencies({"": rotation}).query_factors(positions, "")
    assert found is not None
    expected = get_llama_4_attn_scale(positions.unsqueeze(0), 0.1, 16).flatten()
    torch.testing.assert_close(found.float(), expected, rtol=3e-7, atol=0)
    assert found[15] == 1.0 and found[16] > 1.0


def test_queries_within_the_trained_context_stay_as_they_are() -> None:
    rotation = Rotation(
        "default", 10_000.0, 8, {"original_max_position_embeddings": 16}, growth=0.1
    )
    growing = RotaryFrequencies({"": rotation, "never": replace(rotation, growth=0.0)})
    assert growing.query_factors(torch.arange(16), "") is None
    assert growing.query_factors(torch.arange(17), "") is not None
    assert growing.query_factors(torch.arange(200), "never") is None


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 777.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 8}},
        {"rope_scaling": {"type": "linear", "factor": 8}},
        {"rope_scaling": YARN},
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": None}, "rope_theta": 4e5},
        {
            "rope_parameters": {"full_attention": {"rope_theta": 50.0}},
            "rope_scaling": {"factor": 8, "type": "linear"},
        },
    ],
    ids=str,
)
def test_by_layer_type(given: dict[str, Any]) -> None:
    assert_as_in_transformers(BASE | {"model_type": "gemma3_text"} | given)


PROPORTIONAL = {
    "rope_type": "proportional",
    "rope_theta": 1e5,
    "partial_rotary_factor": 0.3,
    "factor": 2.0,
}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {
            "rope_parameters": {
                "full_attention": PROPORTIONAL,
                "sliding_attention": {"rope_type": "default"},
            }
        },
    ],
    ids=str,
)
def test_of_gemma4(given: dict[str, Any]) -> None:
    for entry in given.get("rope_parameters", {}).values():
        entry.setdefault("rope_theta", 5e3)
    assert_as_in_transformers(
        BASE | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0} | given
    )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"partial_rotary_factor": 0.5},
        {
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75},
            "partial_rotary_factor": 0.5,
        },
    ],
    ids=str,
)
def test_of_a_part_of_each_head(given: dict[str, Any]) -> None:
    assert_as_in_transformers(BASE | {"model_type": "phi3", "pad_token_id": 0} | given)
