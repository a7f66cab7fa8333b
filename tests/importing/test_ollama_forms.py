"""The 22 kinds of files that Ollama translates when it loads them: each is translated here, or
refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.importing.blocks import Width
from edgeshard.importing.gguf_file import GgufFile, read_gguf
from edgeshard.importing.gguf_model import open_gguf
from edgeshard.importing.stores.ollama_forms import FORMS, form_of_file, llama_cpp_form
from edgeshard.storage.checkpoint import build_manifest
from tests.support.gguf_files import everywhere, write_demo_gguf
from tests.support.imports import nothing

LLAMA3_TOKENS = ["a", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"]


def write(
    path: Path, architecture: str, tensors: dict[str, tuple[int, ...]], **metadata: Any
) -> GgufFile:
    """The header of a file with these keys and tensors of zeros.

    A key is of the architecture unless it begins with `tokenizer` or `clip`; `__` stands for a dot.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = key.replace("__", ".")
        name = name if name.startswith(("tokenizer.", "clip.")) else f"{architecture}.{name}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case str():
                writer.add_string(name, value)
            case float():
                writer.add_float32(name, value)
            case int():
                writer.add_uint32(name, value)
            case _:
                writer.add_array(name, value)
    for tensor, shape in tensors.items():
        writer.add_tensor(tensor, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


TRANSLATED = [
    pytest.param(
        "Gemma 3",
        "gemma3",
        {
            "token_embd.weight": (3, 8),
            "v.blk.0.attn_q.weight": (4, 4),
            "mm.mm_input_projection.weight": (4, 4),
        },
        {
            "context_length": 131_072,
            "rope__local__freq_base": 5.0,
            "tokenizer__ggml__tokens": ["a", "b", "c", "img"],
        },
        {
            "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
            "gemma3.rope.freq_base": 1_000_000.0,
            "gemma3.rope.freq_base_swa": 5.0,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
            "tokenizer.ggml.tokens": ["a", "b", "c"],
        },
        {"token_embd.weight"},
        id="gemma3",
    ),
    pytest.param(
        "Gemma 4",
        "gemma4",
        {
            "blk.0.ffn_gate_inp.per_expert_scale": (4,),
            "a.conv.weight": (4,),
            "model.vision_tower.x": (4,),
        },
        {"tokenizer__ggml__model": "llama"},
        {"tokenizer.ggml.model": "gemma4"},
        {"blk.0.ffn_down_exps.scale"},
        id="gemma4",
    ),
    pytest.param(
        "gpt-oss",
        "gptoss",
        {
            "blk.0.ffn_gate_exps.weight": (2, 6, 4),
            "blk.0.attn_out.weight": (4, 4),
            "blk.0.attn_sinks": (4,),
            "blk.0.ffn_norm.weight": (4,),
        },
        {"block_count": 1, "tokenizer__ggml__pre": "default"},
        {
            "general.architecture": "gpt-oss",
            "gpt-oss.block_count": 1,
            "gpt-oss.expert_feed_forward_length": 6,
            "gpt-oss.rope.scaling.type": "yarn",
            "tokenizer.ggml.pre": "gpt-4o",
        },
        {
            "blk.0.ffn_gate_exps.weight",
            "blk.0.attn_output.weight",
            "blk.0.attn_sinks.weight",
            "blk.0.post_attention_norm.weight",
        },
        id="gptoss",
    ),
    pytest.param(
        "LFM2",
        "lfm2",
        {"output_norm.weight": (4,), "blk.0.ffn_gate.weight": (6, 4)},
        {"feed_forward_length": 12},
        {"lfm2.feed_forward_length": 6, "tokenizer.ggml.pre": "lfm2"},
        {"token_embd_norm.weight", "blk.0.ffn_gate.weight"},
        id="lfm2",
    ),
    pytest.param(
        "OLMo 3",
        "olmo3",
        {"output_norm.weight": (4,)},
        {"block_count": 3},
        {"general.architecture": "olmo2", "olmo2.block_count": 3},
        {"output_norm.weight"},
        id="olmo3",
    ),
    pytest.param(
        "Mistral 3",
        "mistral3",
        {"output_norm.weight": (4,), "v.x": (4,)},
        {
            "rope__scaling__beta_fast": 32.0,
            "rope__scaling__beta_slow": 1.0,
            "rope__scaling_beta": 0.5,
        },
        {
            "mistral3.rope.scaling.yarn_beta_fast": 32.0,
            "mistral3.rope.scaling.yarn_beta_slow": 1.0,
            "mistral3.attention.temperature_scale": 0.5,
            "tokenizer.ggml.pre": "tekken",
        },
        {"output_norm.weight"},
        id="mistral3",
    ),
    *(
        pytest.param(
            "Qwen3.5",
            architecture,
            {
                "blk.0.ssm_dt": (4,),
                "blk.0.ssm_norm.weight": (4,),
                "mtp.fc.weight": (4, 4),
                "v.x": (4,),
            },
            {"attention__head_count_kv": [0, 0, 0, 2], "rope__dimension_sections": [11, 11, 10]},
            {
                f"{architecture}.attention.head_count_kv": 2,
                f"{architecture}.rope.dimension_sections": [11, 11, 10, 0],
            },
            {"blk.0.ssm_dt.bias", "blk.0.ssm_norm.weight"},
            id=architecture,
        )
        for architecture in ("qwen35", "qwen35moe")
    ),
    pytest.param(
        "Qwen3-Next",
        "qwen3next",
        {"blk.0.ssm_dt": (4,)},
        {"attention__head_count_kv": [0, 2]},
        {"qwen3next.attention.head_count_kv": 2},
        {"blk.0.ssm_dt.bias"},
        id="qwen3next",
    ),
    pytest.param(
        "Qwen2.5-VL",
        "qwen25vl",
        {"output_norm.weight": (4,), "v.x": (4,)},
        {"rope__mrope_section": [16, 24, 24], "block_count": 2},
        {
            "general.architecture": "qwen2vl",
            "qwen2vl.rope.dimension_sections": [16, 24, 24, 0],
            "qwen2vl.block_count": 2,
        },
        {"output_norm.weight"},
        id="qwen25vl",
    ),
    *(
        pytest.param(
            "Qwen3-VL",
            architecture,
            {"output_norm.weight": (4,), "v.x": (4,)},
            {"vision__deepstack_visual_indexes": [8, 16, 24]},
            {
                f"{architecture}.rope.dimension_sections": [24, 20, 20, 0],
                f"{architecture}.n_deepstack_layers": 3,
            },
            {"output_norm.weight"},
            id=architecture,
        )
        for architecture in ("qwen3vl", "qwen3vlmoe")
    ),
    pytest.param(
        "Nemotron-H",
        "nemotron_h_moe",
        {
            "blk.1.ffn_latent_in.weight": (3, 4),
            "blk.1.ffn_latent_out.weight": (4, 3),
            "mtp.layers.0.x": (4,),
        },
        {},
        {"nemotron_h_moe.moe_latent_size": 3},
        {"blk.1.ffn_latent_down.weight", "blk.1.ffn_latent_up.weight"},
        id="nemotron_h_moe",
    ),
    pytest.param(
        "Nemotron 3 Omni",
        "nemotron_h_omni",
        {"output_norm.weight": (4,), "a.x": (4,), "v.x": (4,), "mm.x": (4,), "mtp.x": (4,)},
        {"expert_count": 8},
        {"general.architecture": "nemotron_h_moe", "nemotron_h_moe.expert_count": 8},
        {"output_norm.weight"},
        id="nemotron_h_omni",
    ),
    pytest.param(
        "Llama 3",
        "llama",
        {"output_norm.weight": (4,)},
        {"tokenizer__ggml__tokens": LLAMA3_TOKENS, "tokenizer__ggml__eos_token_id": 1},
        {
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.eos_token_id": 3,
            "tokenizer.ggml.eot_token_id": 3,
        },
        {"output_norm.weight"},
        id="llama3",
    ),
    pytest.param(
        "Llama 4",
        "llama4",
        {"output_norm.weight": (4,), "v.x": (4,), "mm.x": (4,)},
        {},
        {},
        {"output_norm.weight"},
        id="llama4",
    ),
]

REFUSED = [
    ("EmbeddingGemma", "gemma3", {"dense.0.weight": (4, 4)}, {}, "embeddings of texts"),
    (
        "Snowflake Arctic Embed 2",
        "bert",
        {"x": (4,)},
        {"tokenizer__ggml__model": "t5"},
        "embeddings of texts",
    ),
    (
        "Gemma 3n",
        "gemma3n",
        {"token_embd.weight": (4, 4), "per_layer_token_embd.weight": (3, 4)},
        {},
        "vectors made from token ids",
    ),
    ("DeepSeek-OCR", "deepseekocr", {"s.x": (4,)}, {}, "text in pictures"),
    ("GLM-OCR", "glmocr", {"x": (4,)}, {}, "text in pictures"),
    ("GLM-4.7-Flash", "glm4moelite", {"x": (4,)}, {}, "a latent state"),
    ("Laguna", "laguna", {"blk.0.attn_g.weight": (4, 4)}, {}, "no such family"),
    ("a projector for pictures", "clip", {"v.x": (4,)}, {}, "no model by itself"),
]


def test_every_kind_has_a_row() -> None:
    rows = {str(row.values[0]) for row in TRANSLATED} | {row[0] for row in REFUSED}
    assert rows == {form.name for form in FORMS} and len(FORMS) == 22


@pytest.mark.parametrize(
    ("name", "architecture", "tensors", "metadata", "expected", "names"), TRANSLATED
)
def test_a_kind_is_translated_into_llama_cpps_form(
    name: str,
    architecture: str,
    tensors: dict[str, tuple[int, ...]],
    metadata: dict[str, Any],
    expected: dict[str, Any],
    names: set[str],
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "x.gguf", architecture, tensors, **metadata)
    form = form_of_file(file)
    assert form is not None and form.name == name
    translated, notes = llama_cpp_form(file)
    assert {key: translated.metadata.get(key) for key in expected} == expected
    assert (
        set(translated.tensors) == names == {tensor.name for tensor in translated.tensors.values()}
    )
    left_out = {
        tensor.split(".")[0]
        for tensor in tensors
        if tensor.startswith(("v.", "a.", "mm.", "mtp.", "model."))
    }
    assert any("further tokens" in note for note in notes) is ("mtp" in left_out)
    assert any("only its text is run" in note for note in notes) is bool(left_out - {"mtp"})
    for tensor in translated.tensors.values():
        assert any(
            tensor.offset == old.offset and tensor.shape == old.shape
            for old in file.tensors.values()
        )
    if architecture not in ("gemma3", "llama", "olmo3", "gptoss", "nemotron_h_omni", "qwen25vl"):
        assert translated.metadata["general.architecture"] == architecture


@pytest.mark.parametrize(("name", "architecture", "tensors", "metadata", "why"), REFUSED)
def test_a_kind_that_cannot_run_is_refused_by_name(
    name: str,
    architecture: str,
    tensors: dict[str, tuple[int, ...]],
    metadata: dict[str, Any],
    why: str,
    tmp_path: Path,
) -> None:
    write(tmp_path / "x.gguf", architecture, tensors, **metadata)
    with pytest.raises(
        UnsupportedModelError, match=rf"x\.gguf is {name}, which EdgeShard does not run: .*{why}"
    ):
        open_gguf(tmp_path / "x.gguf", tmp_path, Width.INT8, nothing)


def test_a_file_in_llama_cpps_form_stays_as_it_is(tmp_path: Path) -> None:
    for architecture, metadata in (
        ("llama", {"tokenizer__ggml__tokens": LLAMA3_TOKENS, "tokenizer__ggml__pre": "llama-bpe"}),
        ("gemma3", {"attention__layer_norm_rms_epsilon": 1e-6}),
        ("qwen35", {"rope__dimension_sections": [1, 1, 1, 0]}),
        ("qwen3vl", {"rope__dimension_sections": [1, 1, 1, 0]}),
        ("lfm2", {"block_count": 1}),
    ):
        tensor = "token_embd_norm.weight" if architecture == "lfm2" else "output_norm.weight"
        file = write(tmp_path / f"{architecture}.gguf", architecture, {tensor: (4,)}, **metadata)
        assert llama_cpp_form(file) == (file, ())


GEMMA: dict[str, Any] = {
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention__head_count": 4,
    "attention__head_count_kv": 2,
    "attention__key_length": 16,
    "attention__value_length": 16,
    "attention__sliding_window": 32,
    "context_length": 512,
}


def gemma_tensors() -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (40, 64),
        "output_norm.weight": (64,),
    }
    for layer in range(2):
        block = {
            "attn_norm": (64,),
            "attn_q": (64, 64),
            "attn_k": (32, 64),
            "attn_v": (32, 64),
            "attn_output": (64, 64),
            "attn_q_norm": (16,),
            "attn_k_norm": (16,),
            "post_attention_norm": (64,),
            "ffn_norm": (64,),
            "ffn_gate": (96, 64),
            "ffn_up": (96, 64),
            "ffn_down": (64, 96),
            "post_ffw_norm": (64,),
        }
        tensors |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return tensors


def test_ollamas_gemma3_is_the_model_of_llama_cpps_file(tmp_path: Path) -> None:
    ours = {
        "attention__layer_norm_rms_epsilon": 1e-6,
        "rope__freq_base": 1_000_000.0,
        "rope__freq_base_swa": 10_000.0,
    }
    write(tmp_path / "plain.gguf", "gemma3", gemma_tensors(), **GEMMA, **ours)
    pictures = {"v.blk.0.ln1.weight": (8,), "mm.mm_soft_emb_norm.weight": (8,)}
    theirs = {
        "rope__global__freq_base": 1_000_000.0,
        "rope__local__freq_base": 10_000.0,
        "mm__tokens_per_image": 256,
    }
    write(tmp_path / "theirs.gguf", "gemma3", gemma_tensors() | pictures, **GEMMA, **theirs)
    digests = []
    for name in ("plain", "theirs"):
        scratch = tmp_path / name
        scratch.mkdir()
        imported = open_gguf(tmp_path / f"{name}.gguf", scratch, Width.INT8, nothing)
        note = "only its text is run: its weights for pictures and sound (0.0 MiB) are left out"
        assert (note in imported.notes) is (name == "theirs")
        digests.append(build_manifest("m", imported.checkpoint).digest())
    assert digests[0] == digests[1]


def test_the_tokens_of_a_list_of_ends_end_answers(tmp_path: Path) -> None:
    path = write_demo_gguf(
        tmp_path / "demo.gguf", everywhere(gguf.GGMLQuantizationType.F16), ends=[2, 7]
    )
    imported = open_gguf(path, tmp_path, Width.INT8, nothing)
    (generation,) = (
        file for file in imported.checkpoint.files if file.name == "generation_config.json"
    )
    assert '"eos_token_id": [2, 7]' in generation.path.read_text()
