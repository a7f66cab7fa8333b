"""The config.json of published models, as they are: each is accepted, and its tensors are those of the checkpoint.

`published/` has those of minimax, step, qwen3-vl, seed-oss, k-exaone, lfm2-1.2b and kimi-linear as public code quotes
them. The others are
`PUT_TOGETHER`: from the sizes of the models and the keys of transformers' class, so keys may be missing that the
published file has. Counts of parameters that a comment names are published, too; the others are what transformers'
layers add up to.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from edgeshard_agent.model.library import library_config, library_of

from edgeshard.architectures import ARCHITECTURES, expected_tensors, parse_config, read_config
from edgeshard.architectures.record import Fused
from edgeshard.importing.quantised import without_quantisation

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = Path(__file__).parent / "published"

MODELS: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = {
    # The Hub counts 228,703,644,928: with a scale for each of the 128 x 128 blocks of FP8.
    "minimax-m2.5": (
        228_703_644_928 - 13_880_064,
        {
            "layers.61.self_attn.q_norm.weight": (6144,),
            "layers.61.self_attn.k_norm.weight": (1024,),
            "layers.0.block_sparse_moe.gate.weight": (256, 3072),
            "layers.0.block_sparse_moe.e_score_correction_bias": (256,),
            "layers.61.block_sparse_moe.experts.255.w2.weight": (3072, 1536),
            "lm_head.weight": (200_064, 3072),
        },
    ),
    "minimax-m2.7": (228_689_764_864, {}),
    # With the three further blocks 199.4 billion, as on its page.
    "step-3.5-flash": (
        196_956_130_368,
        {
            "layers.0.self_attn.q_proj.weight": (64 * 128, 4096),
            "layers.1.self_attn.q_proj.weight": (96 * 128, 4096),
            "layers.1.self_attn.g_proj.weight": (96, 4096),
            "layers.2.mlp.down_proj.weight": (4096, 11_264),
            "layers.44.moe.gate_proj.weight": (288, 1280, 4096),
            "layers.44.moe.router_bias": (288,),
            "layers.44.share_expert.up_proj.weight": (1280, 4096),
        },
    ),
    # Its text has the sizes of Qwen3-4B.
    "qwen3-vl-4b": (4_022_468_096, {"layers.35.self_attn.q_norm.weight": (128,)}),
    # Published: 23,572,403,200 of the text.
    "mistral-small-3.1-24b": (23_572_403_200, {"layers.39.self_attn.q_proj.weight": (4096, 5120)}),
    # All three published; of the 8 billion, biases of experts are counted apart.
    "lfm2-1.2b": (
        1_170_340_608,
        {
            "embedding_norm.weight": (2048,),
            "layers.0.conv.conv.weight": (2048, 1, 3),
            "layers.0.conv.in_proj.weight": (6144, 2048),
            "layers.2.self_attn.k_layernorm.weight": (64,),
            "layers.15.feed_forward.w1.weight": (8192, 2048),
        },
    ),
    "lfm2-8b-a1b": (
        8_339_929_856 + 704,
        {
            "layers.1.feed_forward.w2.weight": (2048, 7168),
            "layers.2.feed_forward.expert_bias": (32,),
            "layers.21.self_attn.out_proj.weight": (2048, 2048),
            "layers.23.feed_forward.experts.31.w3.weight": (1792, 2048),
        },
    ),
    "kimi-linear-48b-a3b": (
        49_122_681_728,
        {
            "layers.0.mlp.up_proj.weight": (9216, 2304),
            "layers.0.self_attn.A_log": (1, 1, 32, 1),
            "layers.0.self_attn.f_b_proj.weight": (4096, 128),
            "layers.0.self_attn.q_conv1d.weight": (4096, 1, 4),
            "layers.3.self_attn.kv_a_proj_with_mqa.weight": (576, 2304),
            "layers.26.self_attn.kv_b_proj.weight": (8192, 512),
            "layers.26.self_attn.q_proj.weight": (6144, 2304),
            "layers.26.block_sparse_moe.gate.e_score_correction_bias": (256,),
            "layers.26.block_sparse_moe.experts.255.w2.weight": (2304, 1024),
            "layers.26.block_sparse_moe.shared_experts.gate_proj.weight": (1024, 2304),
        },
    ),
    # Published: 36,151,104,512.
    "seed-oss-36b": (36_151_104_512, {"layers.63.self_attn.q_proj.bias": (80 * 128,)}),
    "hunyuan-7b": (7_504_568_320, {"layers.31.self_attn.query_layernorm.weight": (128,)}),
    "hunyuan-a13b": (
        80_393_183_232,
        {
            "layers.31.mlp.gate.wg.weight": (64, 4096),
            "layers.31.mlp.experts.63.down_proj.weight": (4096, 3072),
            "layers.31.mlp.shared_mlp.up_proj.weight": (3072, 4096),
        },
    ),
    "ernie-4.5-0.3b": (360_748_032, {"layers.17.self_attn.q_proj.weight": (2048, 1024)}),
    "ernie-4.5-21b-a3b": (
        21_825_437_888,
        {
            "layers.0.mlp.down_proj.weight": (2560, 12_288),
            "layers.27.mlp.moe_statics.e_score_correction_bias": (1, 64),
            "layers.27.mlp.shared_experts.up_proj.weight": (3072, 2560),
        },
    ),
    "llama-4-scout-17b-16e": (
        107_769_861_120,
        {
            "layers.47.feed_forward.experts.gate_up_proj": (16, 5120, 16_384),
            "layers.47.feed_forward.experts.down_proj": (16, 8192, 5120),
            "layers.47.feed_forward.shared_expert.up_proj.weight": (8192, 5120),
            "layers.0.feed_forward.router.weight": (16, 5120),
        },
    ),
    "llama-4-maverick-17b-128e": (
        400_711_848_960,
        {
            "layers.46.feed_forward.up_proj.weight": (16_384, 5120),
            "layers.47.feed_forward.experts.gate_up_proj": (128, 5120, 16_384),
        },
    ),
    "command-r7b": (8_028_033_024, {"layers.31.mlp.up_proj.weight": (14_336, 4096)}),
    "olmoe-1b-7b": (6_919_161_856, {"layers.15.self_attn.k_norm.weight": (2048,)}),
    # 4.6 billion by its page. Not found in full: its keys are those of transformers' class.
    "afm-4.5b": (4_619_184_640, {"layers.35.mlp.up_proj.weight": (18_432, 2560)}),
    # 8,053,338,176 parameters, and two constants of the activation in each of 32 blocks.
    "apertus-8b": (8_053_338_176 + 64, {"layers.31.mlp.act_fn.alpha_p": (1,), "layers.31.mlp.act_fn.beta": ()}),
    "k-exaone-236b-a23b": (
        236_571_156_352,
        {
            "layers.0.mlp.up_proj.weight": (18_432, 6144),
            "layers.47.mlp.e_score_correction_bias": (128,),
            "layers.47.mlp.experts.127.down_proj.weight": (6144, 2048),
            "layers.47.mlp.shared_experts.up_proj.weight": (2048, 6144),
        },
    ),
}
"""The number of parameters, and some tensors with their shapes."""


PUT_TOGETHER = {
    "afm-4.5b",
    "apertus-8b",
    "command-r7b",
    "ernie-4.5-0.3b",
    "ernie-4.5-21b-a3b",
    "hunyuan-7b",
    "hunyuan-a13b",
    "lfm2-8b-a1b",
    "llama-4-maverick-17b-128e",
    "llama-4-scout-17b-16e",
    "mistral-small-3.1-24b",
    "olmoe-1b-7b",
}


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    return without_quantisation(config)


def test_every_file_is_in_the_table() -> None:
    assert {path.stem for path in PUBLISHED.glob("*.json")} == set(MODELS)
    assert set(MODELS) >= PUT_TOGETHER


@pytest.mark.parametrize("name", MODELS)
def test_a_published_config_is_accepted_with_its_tensors(name: str) -> None:
    parameters, some = MODELS[name]
    found = {tensor.name: tensor.shape for tensor in expected_tensors(config_of(name)).values()}
    assert sum(math.prod(shape) for shape in found.values()) == parameters
    assert {tensor: found.get(tensor) for tensor in some} == some


@pytest.mark.parametrize("name", MODELS)
def test_transformers_layers_have_a_place_for_each_tensor(name: str) -> None:
    decoder = read_config(config_of(name))
    record, shape = decoder.architecture, decoder.shape
    config, layer_class = library_config(decoder), getattr(library_of(decoder), record.library.layer_class)
    for layer in (0, 1, shape.layer_count - 1):
        with torch.device("meta"):
            sizes = {key: tuple(part.shape) for key, part in layer_class(config, layer_idx=layer).state_dict().items()}
        left = dict.fromkeys(sizes, 0)
        for tensor, size in record.block(decoder.fields, shape, layer).items():
            place = tensor if isinstance(record.runs, Fused) else record.place(tensor).parameter
            left[place] += math.prod(size)
        assert left == {key: math.prod(size) for key, size in sizes.items()}


def test_a_context_is_the_published_one() -> None:
    assert parse_config(config_of("minimax-m2.7")).max_context == 204_800


def test_documents_name_every_family() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.partition("## Families")[2].partition("\n## ")[0]
    listed = f"{len(ARCHITECTURES)} run: {', '.join(ARCHITECTURES)}."
    assert listed in " ".join(section.split())
    assert f"of {len(ARCHITECTURES)} families" in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
