"""What a checkpoint holds and no node needs: it is left out, and a note says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from edgeshard_coordinator.control.requests.site_models import stored_model

from edgeshard.architectures import expected_tensors
from edgeshard.cli.render.views import model_fields
from edgeshard.domain.models.model import FurtherBlocks
from edgeshard.importing.blocks import Width
from edgeshard.importing.imported import notes_of
from edgeshard.importing.model_sources import Source, open_directory
from edgeshard.importing.outlook import further_notes
from edgeshard.storage.checkpoint import build_manifest
from edgeshard.wire.site import stored_model_from_wire, stored_model_to_wire
from edgeshard.wire.store import manifest_from_json, manifest_to_json
from tests.support.imports import nothing, write_checkpoint
from tests.support.quantised import fp8

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}


def test_of_a_model_for_pictures_the_text_is_added(tmp_path: Path) -> None:
    text = SIZES | {"model_type": "qwen3_vl_text", "tie_word_embeddings": True}
    config = {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": {"depth": 1},
    }
    needed = {
        f"model.language_model.{name}": torch.zeros(tensor.shape)
        for name, tensor in expected_tensors(config).items()
    }
    pictures = {
        "model.visual.blocks.0.attn.qkv.weight": torch.zeros(8, 8),
        "model.visual.merger.norm.bias": torch.zeros(8),
    }
    directory = write_checkpoint(tmp_path / "pictures", config, needed | pictures)
    imported = open_directory(directory, tmp_path, Width.INT8, nothing)
    assert {tensor.name for tensor in build_manifest("text", imported.checkpoint).tensors} == set(
        needed
    )
    (note,) = imported.notes
    assert (
        note
        == "only its text is run: weights of its other parts, such as those for pictures, are left "
        "out"
    )


def test_a_model_for_pictures_without_a_text_config_gets_the_note_too() -> None:
    config = SIZES | {"model_type": "qwen2_vl", "vision_config": {"depth": 1}}
    assert notes_of(config) == (
        "only its text is run: weights of its other parts, such as those for pictures, are left "
        "out",
    )
    assert notes_of(SIZES | {"model_type": "llama"}) == ()


def test_of_blocks_for_further_tokens_none_is_added(tmp_path: Path) -> None:
    config = SIZES | {
        "model_type": "minimax_m2",
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "num_mtp_modules": 1,
    }
    needed = {
        name if name == "lm_head.weight" else f"model.{name}": torch.zeros(tensor.shape)
        for name, tensor in expected_tensors(config).items()
    }
    further = {"model.layers.2.self_attn.q_proj.weight": torch.zeros(32, 32)}
    directory = write_checkpoint(tmp_path / "further", config, needed | further)
    imported = open_directory(directory, tmp_path, Width.INT8, nothing)
    manifest = build_manifest("decoder", imported.checkpoint)
    assert {tensor.name for tensor in manifest.tensors} == set(needed)
    assert manifest.further == FurtherBlocks(1, 32 * 32 * 4), "counted, and not stored"
    alone = replace(manifest, further=None)
    assert manifest.stored_bytes == alone.stored_bytes and manifest.digest() != alone.digest()
    for other in (manifest, alone):
        assert manifest_from_json(manifest_to_json(other), other.digest()) == other
        stored = stored_model(other, other.digest())
        assert (
            stored.further == other.further
            and stored_model_from_wire(stored_model_to_wire(stored)) == stored
        )
    shown = [
        model_fields(stored_model(other, other.digest())).get("Further")
        for other in (manifest, alone)
    ]
    assert shown == ["4 KiB that predict further tokens (1 tensors), neither stored nor run", None]
    assert imported.notes == ("its blocks for predicting further tokens (0.0 MiB) are left out",)


def test_of_qwens_mixtures_pictures_and_blocks_for_further_tokens_are_left_out(
    tmp_path: Path,
) -> None:
    """As published: the text nested, all experts of a layer in two tensors, `mtp.` and
    `model.visual.` beside it."""
    text = {key: size for key, size in SIZES.items() if key != "intermediate_size"} | {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "mtp_num_hidden_layers": 1,
    }
    config = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 1}}
    needed = expected_tensors(config)
    stored = {
        name if name == "lm_head.weight" else f"model.language_model.{name}": torch.zeros(
            tensor.shape
        )
        for name, tensor in needed.items()
        if ".experts." not in name
    }
    for layer in range(2):
        experts = f"model.language_model.layers.{layer}.mlp.experts"
        stored |= {
            f"{experts}.gate_up_proj": torch.zeros(4, 32, 32),
            f"{experts}.down_proj": torch.zeros(4, 32, 16),
        }
    other = {
        "model.visual.blocks.0.attn.qkv.weight": torch.zeros(8, 8),
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 32, 32),
        "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(512, 512),
        "mtp.fc.weight": torch.zeros(32, 64),
    }
    directory = write_checkpoint(tmp_path / "mixture", config, stored | other)
    imported = open_directory(directory, tmp_path, Width.INT8, nothing)
    manifest = build_manifest("text", imported.checkpoint)
    assert {
        tensor.name.removeprefix("model.language_model.") for tensor in manifest.tensors
    } == needed.keys()
    assert manifest.further is not None and manifest.further.tensor_count == 3
    note = "its blocks for predicting further tokens (1.0 MiB) are left out"
    assert further_notes(Source(directory), config) == (note,), (
        "as a plan says it, from the headers"
    )
    (named,) = further_notes(Source(directory / "config.json"), config)
    assert named == "its config.json names a block for predicting further tokens; they are left out"
    assert imported.notes == (
        "only its text is run: weights of its other parts, such as those for pictures, are left "
        "out",
        "its blocks for predicting further tokens (1.0 MiB) are left out",
    )


def test_what_is_left_out_of_a_quantised_checkpoint_is_not_converted(tmp_path: Path) -> None:
    """Its size is the one that it has there, scales included."""
    config = SIZES | {"model_type": "qwen3_next", "num_experts": 2, "num_experts_per_tok": 1}
    config |= {
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    }
    config |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
    config |= {"linear_value_head_dim": 32, "num_attention_heads": 4, "head_dim": 32}
    stored: dict[str, torch.Tensor] = {}
    quantise = fp8(128, "weight_scale_inv")
    for name, tensor in expected_tensors(config).items():
        full = name if name == "lm_head.weight" else f"model.{name}"
        if full.endswith("_proj.weight") or full == "lm_head.weight":
            made = quantise(torch.randn(tensor.shape))
            stored |= {full.removesuffix("weight") + end: part for end, part in made.parts.items()}
        else:
            stored[full] = torch.randn(tensor.shape)
    for name in ("mtp.layers.0.mlp.up_proj", "model.visual.blocks.0.attn.qkv"):
        stored |= {
            f"{name}.{end}": part for end, part in quantise(torch.randn(128, 128)).parts.items()
        }
    stored["mtp.fc.weight"] = torch.zeros(128, 256).bfloat16()
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    directory = write_checkpoint(
        tmp_path / "fp8", config | {"quantization_config": settings}, stored
    )
    imported = open_directory(directory, tmp_path, Width.INT8, nothing)
    manifest = build_manifest("next", imported.checkpoint)
    assert len(manifest.tensors) == len(expected_tensors(config))
    assert manifest.further == FurtherBlocks(3, 128 * 128 + 4 + 2 * 128 * 256)
    converted = {
        tensor.name for tensor in imported.checkpoint.tensors if tensor.file.parent == tmp_path
    }
    assert "lm_head.weight" in converted and not any(
        "mtp" in name or "visual" in name for name in converted
    )
