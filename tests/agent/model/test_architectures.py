"""The permitted content of a config.json, and the tensors that a checkpoint must hold."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgeshard.architectures import (
    ARCHITECTURES,
    architecture_named,
    canonical_name,
    check_manifest,
    context_note,
    expected_tensors,
    families,
    for_context,
    held_bytes,
    parse_config,
    read_config,
    registry,
    stage_tensors,
    unit_of,
)
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.record import Place
from edgeshard.architectures.tensors import is_further_block
from edgeshard.domain.errors import (
    DataLossError,
    InternalError,
    InvalidArgumentError,
    UnsupportedModelError,
)
from edgeshard.domain.models.dtypes import ROUNDED, DType
from edgeshard.domain.models.model import LayerRange, ModelManifest, Part
from edgeshard.planning.inputs.shapes import model_from_config
from tests.agent.model.families import VARIANTS, WITHOUT_A_CLASS, decoder_of, family_of

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
QWEN3 = LLAMA | {"model_type": "qwen3"}
MISTRAL = LLAMA | {"model_type": "mistral"}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4}
PHI3 = LLAMA | {"model_type": "phi3"}
LONG = {
    "type": "longrope",
    "short_factor": [1.0, 2.0, 3.0, 4.0],
    "long_factor": [5.0, 6.0, 7.0, 8.0],
}
GEMMA3 = LLAMA | {"model_type": "gemma3_text"}
GEMMA2 = LLAMA | {"model_type": "gemma2"}
GEMMA4 = LLAMA | {
    "model_type": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 0,
}
GPT_OSS = LLAMA | {"model_type": "gpt_oss"}
GLM4_MOE = LLAMA | {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2}
MINIMAX_M2 = LLAMA | {"model_type": "minimax_m2", "head_dim": 12}
ERNIE = LLAMA | {"model_type": "ernie4_5_moe"}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": 61,
    "n_positions": 64,
}
OPT = {
    "model_type": "opt",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "ffn_dim": 40,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}


@pytest.mark.one_in(3)
def test_the_shape_of_every_architecture(checkpoint: Any) -> None:
    shape = parse_config(checkpoint.config)
    assert shape.architecture in ARCHITECTURES
    assert (shape.layer_count, shape.vocab_size, shape.max_context, shape.frame_width) == (
        4,
        61,
        64,
        32,
    )
    numbers = sum(own.heads * own.head_dim for own in shape.kv_in(LayerRange(1, 3)))
    assert shape.kv_bytes_per_token(LayerRange(1, 3), DType.BFLOAT16) == 2 * numbers * 2


def test_defaults_of_keys_that_checkpoints_leave_out() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "intermediate_size": 10240,
    }
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    shape = parse_config(
        {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text | rope}
    )
    assert (shape.vocab_size, shape.attention_heads, shape.kv_heads, shape.head_dim) == (
        262_208,
        8,
        4,
        256,
    )
    assert shape.tied and shape.eos_tokens == (1, 106)
    assert (
        parse_config({key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}).kv_heads
        == 4
    )
    assert parse_config(QWEN3).head_dim == 128
    assert parse_config(GPT2).tied and parse_config(OPT).tied and not parse_config(LLAMA).tied


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"eos_token_id": 5}, (5,)),
        ({"eos_token_id": [5, 99]}, (5,)),
        ({"eos_token_id": None}, ()),
        ({}, (2,)),
    ],
)
def test_end_tokens(given: dict[str, Any], tokens: tuple[int, ...]) -> None:
    assert parse_config(LLAMA | given).eos_tokens == tokens


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "model_type"),
    ({"model_type": "bloom"}, "model_type"),
    ({"model_type": 3}, "model_type"),
    (
        LLAMA | {"model_type": "zephyr9", "auto_map": {"AutoModelForCausalLM": "modeling.Model"}},
        "model_type",
    ),
    (MINIMAX_M2 | {"rotary_dim": 14}, "rotary_dim"),
    (MINIMAX_M2 | {"rotary_dim": 5}, "rotary_dim"),
    (MINIMAX_M2 | {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
    (MINIMAX_M2 | {"scoring_func": "softmax"}, "scoring_func"),
    (MINIMAX_M2 | {"use_qk_norm": 1}, "use_qk_norm"),
    (MINIMAX_M2 | {"shared_intermediate_size": 8}, "shared_intermediate_size"),
    (MINIMAX_M2 | {"num_mtp_modules": -1}, "num_mtp_modules"),
    (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    (LLAMA | {"is_encoder_decoder": True}, "is_encoder_decoder"),
    (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
    (LLAMA | {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type"),
    (LLAMA | {"rope_parameters": {"rope_type": "mystery"}}, "rope_parameters.rope_type"),
    (LLAMA | {"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type"),
    (LLAMA | {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
    (
        LLAMA | {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
        "rope_parameters.low_freq_factor",
    ),
    (
        LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": float("nan")}},
        "rope_parameters.factor",
    ),
    (LLAMA | {"rope_parameters": 7}, "rope_parameters"),
    (
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": "1e6"}},
        "rope_parameters.rope_theta",
    ),
    (LLAMA | {"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
    (LLAMA | {"rope_theta": float("inf")}, "rope_theta"),
    (LLAMA | {"rope_theta": -1}, "rope_theta"),
    (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (
        PHI3 | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}},
        "rope_scaling.long_factor",
    ),
    (PHI3 | {"rope_scaling": LONG | {"short_factor": [1.0]}}, "rope_scaling.short_factor"),
    (
        PHI3 | {"rope_scaling": LONG | {"long_factor": [1.0, 1.0, 1.0, 0]}},
        "rope_scaling.long_factor",
    ),
    (PHI3 | {"rope_scaling": LONG, "edgeshard_context": 65}, "edgeshard_context"),
    (
        PHI3 | {"rope_scaling": LONG, "original_max_position_embeddings": "32"},
        "original_max_position_embeddings",
    ),
    (
        PHI3 | {"rope_scaling": LONG, "original_max_position_embeddings": 1},
        "original_max_position_embeddings",
    ),
    (LLAMA | {"rope_scaling": LONG}, "rope_scaling.type"),
    (PHI3 | {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.type"),
    (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    (GEMMA3 | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
    (GEMMA3 | {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
    ({"model_type": "gemma3"}, "text_config"),
    ({"model_type": "gemma3", "text_config": LLAMA}, "text_config.model_type"),
    (
        {"model_type": "gemma3", "text_config": GEMMA3 | {"hidden_size": 0}},
        "text_config.hidden_size",
    ),
    (
        {"model_type": "gemma3", "text_config": GEMMA3 | {"quantization_config": {"bits": 4}}},
        "text_config.quantization_config",
    ),
    (
        {
            "model_type": "gemma3",
            "tie_word_embeddings": True,
            "text_config": GEMMA3 | {"tie_word_embeddings": False},
        },
        "tie_word_embeddings",
    ),
    (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
    (GPT2 | {"n_embd": 30}, "n_embd"),
    (OPT | {"hidden_size": 33}, "hidden_size"),
    (OPT | {"enable_bias": "yes"}, "enable_bias"),
    (LLAMA | {"hidden_act": "xielu"}, "hidden_act"),
    (LLAMA | {"hidden_size": "32"}, "hidden_size"),
    (LLAMA | {"hidden_size": True}, "hidden_size"),
    (LLAMA | {"hidden_size": 32.0}, "hidden_size"),
    (LLAMA | {"num_hidden_layers": -1}, "num_hidden_layers"),
    (LLAMA | {"vocab_size": 2**40}, "vocab_size"),
    (LLAMA | {"num_key_value_heads": 3}, "num_attention_heads"),
    (LLAMA | {"head_dim": 7}, "head_dim"),
    (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (LLAMA | {"eos_token_id": "2"}, "eos_token_id"),
    (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings"),
    (MISTRAL | {"sliding_window": 0}, "sliding_window"),
    (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
    (QWEN3 | {"layer_types": ["full_attention"]}, "layer_types"),
    (QWEN3 | {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    (QWEN3 | {"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
    (QWEN3_MOE | {"num_experts": 2**31}, "num_experts"),
    (QWEN3_MOE | {"num_experts": 1}, "num_experts_per_tok"),
    (QWEN3_MOE | {"mlp_only_layers": [4]}, "mlp_only_layers"),
    (
        QWEN3_MOE | {"model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 16},
        "moe_intermediate_size",
    ),
    (
        QWEN3_MOE | {"model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 32},
        "moe_intermediate_size",
    ),
    (MIXTRAL | {"num_local_experts": None}, "num_local_experts"),
    (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA2 | {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    (GEMMA2 | {"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
    (GEMMA2 | {"hidden_size": 30}, "hidden_size"),
    (GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    (GPT_OSS | {"num_local_experts": 2}, "num_experts_per_tok"),
    (GPT_OSS | {"swiglu_limit": 0}, "swiglu_limit"),
    (GPT_OSS | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"model_type": "gemma4", "text_config": LLAMA}, "text_config.model_type"),
    ({"model_type": "mistral3", "text_config": LLAMA}, "text_config.model_type"),
    (
        {"model_type": "mistral3", "text_config": MISTRAL | {"model_type": ["mistral"]}},
        "text_config.model_type",
    ),
    (LLAMA | {"model_type": "gemma4_text", "head_dim": 512}, "hidden_size_per_layer_input"),
    (GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
    (GEMMA4 | {"global_head_dim": 9}, "head_dim"),
    (GEMMA4 | {"global_head_dim": 0}, "global_head_dim"),
    (GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "num_attention_heads"),
    (GEMMA4 | {"per_layer_config": {"3": {"head_dim": 0}}}, "per_layer_config.3.head_dim"),
    (GEMMA4 | {"per_layer_config": {"3": {"num_key_value_heads": 3}}}, "num_attention_heads"),
    (
        GEMMA4 | {"per_layer_config": {"3": {"sliding_window": 9}}},
        "per_layer_config.3.sliding_window",
    ),
    (GEMMA4 | {"per_layer_config": {"last": {"head_dim": 16}}}, "per_layer_config"),
    (GEMMA4 | {"per_layer_config": None}, "per_layer_config"),
    (
        GEMMA4 | {"per_layer_config": {"0": {"head_dim": 16}, "1": {"head_dim": 8}}},
        "per_layer_config",
    ),
    (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    (GEMMA4 | {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
    (GEMMA4 | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    (GEMMA4 | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
    (
        GEMMA4
        | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}},
        "rope_parameters.sliding_attention.rope_type",
    ),
    (GEMMA4 | {"enable_moe_block": True}, "num_experts"),
    (
        GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        "moe_intermediate_size",
    ),
    (GLM4_MOE | {"n_group": 3}, "n_routed_experts"),
    (GLM4_MOE | {"n_group": 8}, "n_group"),
    (GLM4_MOE | {"n_group": 2, "topk_group": 3}, "topk_group"),
    (GLM4_MOE | {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok"),
    (GLM4_MOE | {"n_shared_experts": 0}, "n_shared_experts"),
    (GLM4_MOE | {"routed_scaling_factor": 0}, "routed_scaling_factor"),
]


@pytest.mark.parametrize(
    ("config", "field"), REFUSED, ids=[f"{i}-{field}" for i, (_, field) in enumerate(REFUSED)]
)
def test_what_is_refused_names_its_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(config)
    assert caught.value.field == field
    assert field in caught.value.message


def test_the_code_that_a_config_names_does_not_matter_where_the_family_is_known() -> None:
    auto_map = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    assert parse_config(LLAMA | auto_map) == parse_config(LLAMA)
    with pytest.raises(
        UnsupportedModelError, match="the code that its auto_map names is never run"
    ):
        parse_config(LLAMA | auto_map | {"model_type": "zephyr9"})


def test_only_near_names_are_suggested() -> None:
    with pytest.raises(UnsupportedModelError, match="families with near names are llama"):
        parse_config(LLAMA | {"model_type": "lama"})
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(LLAMA | {"model_type": "bloom"})
    assert "near names" not in caught.value.message and "docs/models.md" in caught.value.message


def test_a_decoder_is_read_at_the_top_or_nested() -> None:
    text = LLAMA | {
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
    }
    flat = parse_config(text | {"model_type": "qwen2_vl", "vision_config": {}})
    nested = parse_config(
        {"model_type": "qwen2_vl", "text_config": text | {"model_type": "qwen2_vl_text"}}
    )
    assert flat.architecture == "qwen2_vl" and flat == nested
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config({"model_type": "qwen2_vl", "text_config": LLAMA})
    assert caught.value.field == "text_config.model_type"


def test_a_nested_decoder_may_leave_out_sizes() -> None:
    text = {"model_type": "llama", "vocab_size": 32_064}
    shape = parse_config({"model_type": "llava", "text_config": text})
    assert (shape.hidden_size, shape.layer_count, shape.attention_heads, shape.vocab_size) == (
        4096,
        32,
        32,
        32_064,
    )
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(text)
    assert caught.value.field == "intermediate_size"


@pytest.mark.parametrize(
    ("max_context", "first"), [(0, 5.0), (33, 5.0), (32, 1.0), (64, 5.0), (1000, 5.0)]
)
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_a_deployments_context_chooses_rotary_factors(
    kind: str, max_context: int, first: float
) -> None:
    config = PHI3 | {"rope_scaling": LONG | {"type": kind}, "original_max_position_embeddings": 32}
    chosen = for_context(config, max_context)
    assert parse_config(chosen) == parse_config(config)
    assert read_config(chosen).rotations()[""].options["factors"][0] == first
    words = "long" if first == 5.0 else "short, because the context of 32 tokens is at most 32"
    assert context_note(config, max_context).startswith(f"Rotary factors: {words}")
    assert for_context(PHI3, max_context) is PHI3 and context_note(PHI3, max_context) == ""


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [("gemma3", GEMMA3, False), ("llava", LLAMA, True)]
)
def test_a_level_that_ties_counts_as_in_transformers(
    outer: str, inner: dict[str, Any], tied: bool
) -> None:
    text = inner | {"tie_word_embeddings": True}
    assert (
        parse_config({"model_type": outer, "tie_word_embeddings": False, "text_config": text}).tied
        is tied
    )
    assert parse_config({"model_type": outer, "text_config": text}).tied


def test_layers_with_windows_have_the_base_of_the_file() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    config = LLAMA | {
        "model_type": "olmo3",
        "rope_theta": 300_000,
        "rope_scaling": scaling,
        "sliding_window": 8,
    }
    full, sliding = (
        read_config(config).rotations()[f"{kind}_attention"] for kind in ("full", "sliding")
    )
    assert (full.kind, full.theta) == ("yarn", 300_000)
    assert (sliding.kind, sliding.theta) == ("default", 300_000)


def test_lengths_beyond_the_context_do_not_count_for_dynamic_frequencies() -> None:
    dynamic = read_config(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}).rotations()
    assert {kind: rotation.kind for kind, rotation in dynamic.items()} == {"": "default"}


@pytest.mark.parametrize("base", [LLAMA, GPT2, OPT, QWEN3_MOE, MIXTRAL])
def test_every_needed_key_is_asked_for_by_name(base: dict[str, Any]) -> None:
    optional = {"num_experts_per_tok"} | ({"num_key_value_heads"} if base is LLAMA else set())
    for key in base.keys() - optional:
        with pytest.raises(UnsupportedModelError) as caught:
            parse_config({k: v for k, v in base.items() if k != key})
        assert caught.value.field == ("num_local_experts" if key == "num_experts" else key)


@pytest.mark.parametrize(
    ("model_type", "lacks"),
    [
        ("jamba", "recurrent state per request"),
        ("mamba", "recurrent state per request"),
        ("deepseek_v3", "compressed (latent) state per token"),
    ],
)
def test_a_family_that_cannot_run_is_refused_with_what_is_missing(
    model_type: str, lacks: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(LLAMA | {"model_type": model_type})
    assert caught.value.field == "model_type"
    assert lacks in caught.value.message and "do not hold" in caught.value.message.replace(
        "does not", "do not"
    )


# -- the registry ----------------------------------------------------------------------------------


def test_a_family_is_found_by_its_file_being_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "from edgeshard.architectures.families.mistral import ARCHITECTURE as other\nfrom "
        "dataclasses import replace\n"
    )
    (tmp_path / "zephyr9.py").write_text(
        text + "ARCHITECTURE = replace(other, name='zephyr9', nested={})\n", encoding="utf-8"
    )
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    found = registry.by_name(registry.family_modules())
    assert set(found) == {*ARCHITECTURES, "zephyr9"}
    assert tuple(found) == (*ARCHITECTURES, "zephyr9")  # by file name, whichever folder it is in
    with pytest.raises(UnsupportedModelError):
        parse_config(LLAMA | {"model_type": "zephyr9"})  # found when the process starts


def test_a_file_without_a_record_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zephyr8.py").write_text("ARCHITECTUR = None\n", encoding="utf-8")
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    with pytest.raises(InternalError, match="zephyr8"):
        registry.family_modules()


def test_two_records_for_one_model_type_are_an_error() -> None:
    llama = architecture_named("llama")
    for other in (llama, replace(llama, name="other", model_types=("other", "llama"))):
        with pytest.raises(InternalError, match="llama"):
            registry.by_name(
                [SimpleNamespace(ARCHITECTURE=llama), SimpleNamespace(ARCHITECTURE=other)]
            )


def test_two_families_may_be_nested_by_one_model_type() -> None:
    llama = architecture_named("llama")
    one, two, same = (
        replace(llama, name=name, model_types=(name,), nested={"pictures": inner})
        for name, inner in (("one", "a"), ("two", "b"), ("same", "a"))
    )
    assert set(
        registry.by_name([SimpleNamespace(ARCHITECTURE=one), SimpleNamespace(ARCHITECTURE=two)])
    ) == {
        "one",
        "two",
    }
    with pytest.raises(InternalError, match="same"):
        registry.by_name([SimpleNamespace(ARCHITECTURE=one), SimpleNamespace(ARCHITECTURE=same)])
    texts = {
        name: parse_config({"model_type": "mistral3", "text_config": LLAMA | {"model_type": name}})
        for name in ("mistral", "ministral3")
    }
    assert {name: shape.architecture for name, shape in texts.items()} == {
        name: name for name in texts
    }


def test_a_family_that_runs_is_not_refused() -> None:
    assert not set(registry.REFUSED) & {
        kind for record in registry.RECORDS.values() for kind in record.answers_to
    }


# -- tensors ---------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
def test_a_saved_checkpoint_is_what_its_config_requires(checkpoint: Any) -> None:
    check_manifest(checkpoint.manifest)
    config, architecture = checkpoint.config, checkpoint.manifest.architecture
    used = [
        t for t in checkpoint.manifest.tensors if unit_of(architecture, t.name, config) is not None
    ]
    found = {canonical_name(architecture, t.name): t.shape for t in used}
    assert found == {name: tensor.shape for name, tensor in expected_tensors(config).items()}


def test_the_planner_counts_what_a_checkpoint_holds(checkpoint: Any) -> None:
    config, manifest = checkpoint.config, checkpoint.manifest
    units = [(t, unit_of(manifest.architecture, t.name, config)) for t in manifest.tensors]
    spec = model_from_config("tiny", config)
    assert spec.parameter_count == sum(t.element_count for t, unit in units if unit is not None)
    for index, block in enumerate(spec.blocks):
        mine = [t for t, unit in units if unit == index]
        assert block.parameters == sum(t.element_count for t in mine)
        for quantisation in (None, *ROUNDED):
            assert block.weight_bytes(DType.BFLOAT16, quantisation) == held_bytes(
                config, mine, LayerRange(index, index + 1), DType.BFLOAT16, quantisation
            )


@pytest.mark.one_in(3)
def test_each_missing_tensor_is_named(checkpoint: Any) -> None:
    manifest = checkpoint.manifest
    units = {
        t.name: unit_of(manifest.architecture, t.name, checkpoint.config) for t in manifest.tensors
    }
    needed = [name for name, unit in units.items() if unit is not None]
    for name in needed:
        with pytest.raises(DataLossError) as caught:
            check_manifest(without(manifest, name))
        canonical = canonical_name(manifest.architecture, name)
        assert caught.value.field == (name if name.endswith(canonical) else f"model.{canonical}")


@pytest.mark.one_in(3)
def test_a_wrong_shape_is_named(checkpoint: Any) -> None:
    manifest = checkpoint.manifest
    for tensor in manifest.tensors:
        if unit_of(manifest.architecture, tensor.name, checkpoint.config) is None:
            continue
        wrong = replace(tensor, shape=(*tensor.shape[:-1], (tensor.shape or (1,))[-1] + 1))
        with pytest.raises(InvalidArgumentError) as caught:
            check_manifest(
                replace(
                    manifest, tensors=tuple(wrong if t is tensor else t for t in manifest.tensors)
                )
            )
        assert (caught.value.field, caught.value.reason) == (tensor.name, "WRONG_TENSOR_SHAPE")


@pytest.mark.parametrize("variant", ["llama-plain"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.2.self_attn.q_proj.bias", "UNEXPECTED_TENSOR"),
        ("model.layers.4.self_attn.q_proj.weight", "UNEXPECTED_TENSOR"),
        ("norm.weight", "DUPLICATE_TENSOR"),
    ],
)
def test_a_tensor_the_config_does_not_call_for(checkpoint: Any, name: str, reason: str) -> None:
    manifest = checkpoint.manifest
    extra = replace(next(t for t in manifest.tensors if t.name == "model.norm.weight"), name=name)
    with pytest.raises(InvalidArgumentError) as caught:
        check_manifest(replace(manifest, tensors=(*manifest.tensors, extra)))
    assert (caught.value.field, caught.value.reason) == (name, reason)


def test_the_stages_of_a_cut_hold_every_tensor(checkpoint: Any) -> None:
    manifest = checkpoint.manifest
    parts = [
        stage_tensors(manifest, layers)
        for layers in (LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4))
    ]
    tied = [
        t
        for t in manifest.tensors
        if unit_of(manifest.architecture, t.name, checkpoint.config) is Part.TIED
    ]
    whole = stage_tensors(manifest, LayerRange(0, 4))
    assert sum(map(len, parts)) == len(whole) + len(tied)
    assert {t.name for part in parts for t in part} == {t.name for t in whole}
    assert len(tied) == parse_config(checkpoint.config).tied
    assert all(
        tensor in parts[0] and tensor in parts[2] and tensor not in parts[1] for tensor in tied
    )


def test_blocks_beyond_the_ones_that_run_are_left_alone() -> None:
    """Some checkpoints hold additional blocks, for predicting several tokens, after the model's
    own."""
    record = replace(architecture_named("llama"), further_blocks="num_nextn_predict_layers")
    fields = ConfigFields(LLAMA | {"num_nextn_predict_layers": 1}, defaults=record.defaults)
    units = [is_further_block(record, fields, index) for index in (3, 4, 5)]
    assert units == [False, True, False]


@pytest.mark.parametrize(
    ("family", "name", "place"),
    [
        ("mixtral", "block_sparse_moe.experts.3.w3.weight", Place("mlp.experts.3.up_proj.weight")),
        ("qwen2_moe", "mlp.experts.3.up_proj.weight", Place("mlp.experts.3.up_proj.weight")),
        (
            "qwen2_moe",
            "mlp.shared_expert.up_proj.weight",
            Place("mlp.shared_expert.up_proj.weight"),
        ),
        ("step3p5", "moe.experts.7.up_proj.weight", Place("mlp.experts.7.up_proj.weight")),
        (
            "minimax_m2",
            "block_sparse_moe.experts.3.w3.weight",
            Place("mlp.experts.3.up_proj.weight"),
        ),
        ("gpt_oss", "mlp.experts.3.gate_up_proj_bias", Place("mlp.experts.3.gate_up_proj.bias")),
        ("qwen3_vl_moe", "mlp.experts.3.down_proj", Place("mlp.experts.3.down_proj.weight")),
        ("kimi_linear", "self_attn.k_conv1d.weight", Place("self_attn.conv1d.weight", 1)),
        ("kimi_linear", "self_attn.A_log", Place("self_attn.forget_gate.A_log")),
        (
            "kimi_linear",
            "block_sparse_moe.experts.3.w3.weight",
            Place("mlp.experts.3.up_proj.weight"),
        ),
    ],
)
def test_the_place_of_a_tensor(family: str, name: str, place: Place) -> None:
    assert architecture_named(family).place(name) == place


@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt_oss", "mlp.experts.0.down_proj"), ("llama4", "feed_forward.experts.0.gate_up_proj")],
)
def test_square_experts_are_transposed_by_the_record(family: str, name: str) -> None:
    record = architecture_named(family)
    assert record.is_transposed(name, (32, 32), 32) and not record.is_transposed(
        "self_attn.q_proj.weight", (32, 32), 32
    )


def test_the_size_of_an_expert_shows_its_layout_where_both_are_read() -> None:
    record = architecture_named("qwen3_vl_moe")
    for name, transposed in (("gate_up_proj", (32, 48)), ("down_proj", (24, 32))):
        sizes = [
            record.matrix(f"mlp.experts.0.{name}", size, 32)
            for size in (transposed, transposed[::-1])
        ]
        assert sizes == [transposed[::-1]] * 2


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "name", "unit"),
    [
        (LLAMA, "model.layers.11.self_attn.q_proj.weight", 11),
        (LLAMA, "layers.0.mlp.up_proj.weight", 0),
        (LLAMA, "model.layers.0.self_attn.rotary_emb.inv_freq", None),
        (LLAMA, "model.embed_tokens.weight", Part.EMBEDDING),
        (LLAMA | TIED, "model.embed_tokens.weight", Part.TIED),
        (LLAMA, "lm_head.weight", Part.HEAD),
        (LLAMA | TIED, "lm_head.weight", None),
        (LLAMA, "model.norm.weight", Part.HEAD),
        (LLAMA, "score.weight", None),
        (GPT2, "transformer.h.3.attn.bias", None),
        (GPT2, "h.3.attn.masked_bias", None),
        (GPT2, "h.3.attn.c_attn.bias", 3),
        (GPT2, "wpe.weight", Part.EMBEDDING),
        (GPT2, "transformer.wte.weight", Part.TIED),
        (GPT2 | UNTIED, "wte.weight", Part.EMBEDDING),
        (GPT2, "transformer.ln_f.bias", Part.HEAD),
        (OPT, "model.decoder.embed_positions.weight", Part.EMBEDDING),
        (OPT, "decoder.project_in.weight", Part.EMBEDDING),
        (OPT, "decoder.project_out.weight", Part.HEAD),
        (OPT, "decoder.final_layer_norm.weight", Part.HEAD),
        (OPT, "decoder.layers.2.final_layer_norm.weight", 2),
        (GEMMA3, "model.language_model.layers.7.mlp.up_proj.weight", 7),
        (GEMMA3, "language_model.model.embed_tokens.weight", Part.TIED),
        (MISTRAL, "language_model.lm_head.weight", Part.HEAD),
        (MISTRAL, "vision_tower.transformer.layers.0.attention.q_proj.weight", None),
        (GEMMA3, "vision_tower.encoder.layers.3.mlp.fc1.weight", None),
        (GEMMA3, "multi_modal_projector.mm_soft_emb_norm.weight", None),
        (MIXTRAL, "model.layers.1.block_sparse_moe.experts.3.w1.weight", 1),
        (GEMMA4, "model.language_model.layers.3.layer_scalar", 3),
        (GLM4_MOE, "model.layers.4.eh_proj.weight", Part.FURTHER),
        (GLM4_MOE, "model.layers.5.eh_proj.weight", 5),
        (ERNIE, "model.mtp_block.0.self_attn.q_proj.weight", Part.FURTHER),
        (ERNIE, "model.mtp_linear_proj.0.weight", Part.FURTHER),
        (LLAMA | {"model_type": "exaone_moe"}, "mtp.layers.0.mlp.up_proj.weight", Part.FURTHER),
        (LLAMA | {"model_type": "qwen3_vl_text"}, "model.visual.blocks.0.attn.qkv.weight", None),
        (
            MINIMAX_M2 | {"num_mtp_modules": 3},
            "model.layers.6.block_sparse_moe.gate.weight",
            Part.FURTHER,
        ),
        (GLM4_MOE | {"num_nextn_predict_layers": 0}, "model.layers.4.eh_proj.weight", 4),
    ],
)
def test_the_unit_of_a_tensor(config: dict[str, Any], name: str, unit: object) -> None:
    assert unit_of(str(config["model_type"]), name, config) == unit


@pytest.mark.parametrize(
    ("family", "stored", "canonical"),
    [
        (
            "kimi_linear",
            "model.layers.0.block_sparse_moe.up_proj.weight",
            "layers.0.mlp.up_proj.weight",
        ),
        ("kimi_linear", "model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        (
            "kimi_linear",
            "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight",
            "layers.1.block_sparse_moe.shared_experts.up_proj.weight",
        ),
        (
            "llama4",
            "language_model.model.layers.1.self_attn.q_proj.weight",
            "layers.1.self_attn.q_proj.weight",
        ),
        ("lfm2", "model.embedding_norm.weight", "embedding_norm.weight"),
    ],
)
def test_the_canonical_name_of_a_tensor(family: str, stored: str, canonical: str) -> None:
    assert canonical_name(family, stored) == canonical


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, edgeshard.architectures, edgeshard.domain.requests.step; assert 'torch' "
        "not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def without(manifest: ModelManifest, name: str) -> ModelManifest:
    return replace(manifest, tensors=tuple(t for t in manifest.tensors if t.name != name))


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in WITHOUT_A_CLASS])
def test_defaults_are_those_of_transformers(name: str) -> None:
    record = architecture_named(name)
    library = record.library
    module = importlib.import_module(
        f"transformers.models.{library.module}.configuration_{library.module}"
    )
    values = getattr(module, library.config_class)().to_dict()
    wrong = {
        key: (default, values[key])
        for key, default in record.defaults.items()
        if key in values
        and values[key] != (values.get(default, default) if isinstance(default, str) else default)
    }
    assert not wrong


def test_every_family_has_a_row() -> None:
    assert {family_of(name) for name in VARIANTS} == set(ARCHITECTURES) - WITHOUT_A_CLASS


def test_transformers_agrees_on_every_shape(checkpoint_of: Callable[[str], Any]) -> None:
    """The head sizes that size the KV pool are those the library's layers use."""
    from edgeshard_agent.model.library import library_config

    for name in ("qwen3-windows", "gemma3-nested", "phi3-partial", "mixtral-tied", "llama-options"):
        config = json.loads(json.dumps(checkpoint_of(name).config))
        shape = parse_config(config)
        library = library_config(read_config(config))
        module = importlib.import_module(
            f"transformers.models.{shape.architecture}.modeling_{shape.architecture}"
        )
        with torch.device("meta"):
            attention = getattr(module, name.split("-")[0].capitalize() + "Attention")(
                library, layer_idx=1
            )
        assert attention.head_dim == shape.head_dim
        assert attention.num_key_value_groups == shape.attention_heads // shape.kv_heads


@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.wrap is None])
def test_layers_without_number_are_refused_before_any_is_listed(variant: str) -> None:
    config = json.loads(VARIANTS[variant].library_config().to_json_string(use_diff=False))
    key = decoder_of(variant).architecture.keys.layers
    # Fields with an entry for each layer would be refused first.
    config = {name: value for name, value in config.items() if not isinstance(value, list)} | {
        key: 2**31 - 1
    }
    with pytest.raises(UnsupportedModelError) as refused:
        parse_config(config)
    assert refused.value.field.endswith(key)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}},
            "rope_parameters.rope_theta",
        ),
        ({"layer_types": [["full_attention"]] * 4}, "layer_types"),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 6,
                "layer_types": None,
                "max_window_layers": "x",
            },
            "max_window_layers",
        ),
    ],
    ids=str,
)
def test_values_of_strange_types_are_typed_errors(changes: dict[str, Any], field: str) -> None:
    config = json.loads(VARIANTS["qwen2-windows"].library_config().to_json_string(use_diff=False))
    with pytest.raises(UnsupportedModelError) as refused:
        parse_config(config | changes)
    assert refused.value.field == field
