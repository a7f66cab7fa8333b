"""The config.json of published models, unchanged: each is accepted, and its tensors equal the
checkpoint's.

`published/` has them as public code quotes them, except the `PUT_TOGETHER` ones. These were made
from the models' sizes and the keys of transformers' class, so keys of the published file may be
missing. Counts of parameters that a comment names are published, too; the others are what
transformers' layers add up to. `cards.toml` lists the models that people run on clusters.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.model.library import library_config, library_of
from edgeshard_agent.model.modules import StageContext
from edgeshard_agent.model.plugged import make_layer

from edgeshard.architectures import (
    ARCHITECTURES,
    architecture_named,
    expected_tensors,
    parse_config,
    read_config,
    registry,
)
from edgeshard.architectures.record import Fused
from edgeshard.architectures.tensors import unit_of
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.domain.ids import Digest, ModelName
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import (
    LayerRange,
    ModelManifest,
    Part,
    TensorInfo,
    units_of_stage,
)
from edgeshard.importing.quantised import without_quantisation
from edgeshard.proto.v1 import store_pb2
from edgeshard.rpc.channel import is_sendable
from edgeshard.wire.store import manifest_to_wire
from tools.draw_architecture import read_cards, refusal

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = Path(__file__).parent / "published"

MODELS: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = {
    # Text alone. An 8-bit conversion of the 2B and of the 9B has the bytes of these and of the part
    # for pictures.
    "qwen3.5-2b": (1_881_825_088, {"layers.23.self_attn.q_proj.weight": (2 * 8 * 256, 2048)}),
    "qwen3.5-9b": (8_953_803_264, {"layers.0.linear_attn.in_proj_qkv.weight": (8192, 4096)}),
    "qwen3.5-27b": (26_895_998_464, {"layers.0.linear_attn.conv1d.weight": (10_240, 1, 4)}),
    "qwen3.6-27b": (26_895_998_464, {"layers.63.self_attn.k_proj.weight": (1024, 5120)}),
    "qwen3-next-80b-a3b": (
        79_674_391_296,
        {"layers.0.linear_attn.in_proj_qkvz.weight": (12_288, 2048)},
    ),
    "qwen3-coder-next": (79_674_391_296, {"layers.47.mlp.shared_expert_gate.weight": (1, 2048)}),
    # Their pages say 30.7 and 25.2 billion.
    "gemma-4-31b": (
        30_697_345_340,
        {
            "layers.0.self_attn.v_proj.weight": (16 * 256, 5376),
            "layers.5.self_attn.k_proj.weight": (4 * 512, 5376),
            "layers.5.self_attn.q_proj.weight": (32 * 512, 5376),
        },
    ),
    "gemma-4-26b-a4b": (25_233_141_790, {"layers.29.router.proj.weight": (128, 2816)}),
    # Both published.
    "gpt-oss-20b": (20_914_757_184, {"layers.23.self_attn.sinks": (64,)}),
    "gpt-oss-120b": (116_829_156_672, {"layers.35.mlp.router.weight": (128, 2880)}),
    # Published without the routers' biases, which choose experts: 106,852,245,504.
    "glm-4.5-air": (106_852_245_504 + 45 * 128, {"layers.0.mlp.up_proj.weight": (10_944, 4096)}),
    "glm-4.7": (352_797_829_024, {"layers.91.self_attn.k_norm.weight": (128,)}),
    # All llamas and qwens as published.
    "llama-3.1-8b": (8_030_261_248, {"lm_head.weight": (128_256, 4096)}),
    "llama-3.1-70b": (70_553_706_496, {"layers.79.mlp.up_proj.weight": (28_672, 8192)}),
    "llama-3.2-1b": (1_235_814_400, {"layers.15.self_attn.k_proj.weight": (512, 2048)}),
    "llama-3.2-3b": (3_212_749_824, {"layers.27.self_attn.k_proj.weight": (1024, 3072)}),
    "llama-3.3-70b": (70_553_706_496, {}),
    "llama-3.1-nemotron-70b": (70_553_706_496, {}),
    "llama-3.1-nemotron-nano-4b": (
        4_512_746_496,
        {"layers.31.self_attn.q_proj.weight": (4096, 3072)},
    ),
    "qwen3-0.6b": (596_049_920, {"layers.27.self_attn.q_norm.weight": (128,)}),
    "qwen3-4b": (4_022_468_096, {}),
    "qwen3-30b-a3b": (30_532_122_624, {"layers.47.mlp.experts.127.up_proj.weight": (768, 2048)}),
    "qwen3-235b-a22b-2507": (235_093_634_560, {"layers.93.self_attn.k_proj.weight": (512, 4096)}),
    "qwen3-coder-480b-a35b": (
        480_154_875_392,
        {"layers.61.mlp.experts.159.down_proj.weight": (6144, 2560)},
    ),
    # Its sizes equal the next one's.
    "minimax-m2.1": (228_689_764_864, {}),
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
            "layers.44.moe.experts.287.gate_proj.weight": (1280, 4096),
            "layers.44.moe.router_bias": (288,),
            "layers.44.share_expert.up_proj.weight": (1280, 4096),
        },
    ),
    # Published as 35, 122 and 397 billion; the blocks for predicting further tokens and those for
    # pictures not counted.
    "qwen3.5-35b-a3b": (
        34_660_610_688,
        {
            "layers.0.linear_attn.in_proj_qkv.weight": (8192, 2048),
            "layers.3.self_attn.q_proj.weight": (2 * 16 * 256, 2048),
            "layers.39.mlp.experts.255.gate_proj.weight": (512, 2048),
            "layers.39.mlp.shared_expert_gate.weight": (1, 2048),
        },
    ),
    "qwen3.5-122b-a10b": (
        122_111_526_912,
        {"layers.47.mlp.experts.255.down_proj.weight": (3072, 1024)},
    ),
    "qwen3.5-397b-a17b": (
        396_346_350_336,
        {"layers.59.mlp.experts.511.up_proj.weight": (1024, 4096)},
    ),
    # Its text has the sizes of Qwen3-30B-A3B. Experts are stored transposed.
    "qwen3-vl-30b-a3b": (
        30_532_122_624,
        {
            "layers.47.mlp.experts.127.gate_up_proj": (2048, 1536),
            "layers.47.mlp.experts.127.down_proj": (768, 2048),
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
            "layers.47.feed_forward.experts.15.gate_up_proj": (5120, 16_384),
            "layers.47.feed_forward.experts.15.down_proj": (8192, 5120),
            "layers.47.feed_forward.shared_expert.up_proj.weight": (8192, 5120),
            "layers.0.feed_forward.router.weight": (16, 5120),
        },
    ),
    "llama-4-maverick-17b-128e": (
        400_711_848_960,
        {
            "layers.46.feed_forward.up_proj.weight": (16_384, 5120),
            "layers.47.feed_forward.experts.127.gate_up_proj": (5120, 16_384),
        },
    ),
    "command-r7b": (8_028_033_024, {"layers.31.mlp.up_proj.weight": (14_336, 4096)}),
    "olmoe-1b-7b": (6_919_161_856, {"layers.15.self_attn.k_norm.weight": (2048,)}),
    # 4.6 billion by its page. The full file was not found: its keys come from transformers' class.
    "afm-4.5b": (4_619_184_640, {"layers.35.mlp.up_proj.weight": (18_432, 2560)}),
    # 8,053,338,176 parameters, and two constants of the activation in each of 32 blocks.
    "apertus-8b": (
        8_053_338_176 + 64,
        {"layers.31.mlp.act_fn.alpha_p": (1,), "layers.31.mlp.act_fn.beta": ()},
    ),
    "k-exaone-236b-a23b": (
        236_571_156_352,
        {
            "layers.0.mlp.up_proj.weight": (18_432, 6144),
            "layers.47.mlp.e_score_correction_bias": (128,),
            "layers.47.mlp.experts.127.down_proj.weight": (6144, 2048),
            "layers.47.mlp.shared_experts.up_proj.weight": (2048, 6144),
        },
    ),
    # Published: 31,577,937,344, without the 128 correction biases of each of 23 mixtures.
    "nemotron-3-nano-30b-a3b": (
        31_577_937_344 + 23 * 128,
        {
            "embeddings.weight": (131_072, 2688),
            "norm_f.weight": (2688,),
            "layers.0.mixer.in_proj.weight": (2 * 4096 + 2 * 8 * 128 + 64, 2688),
            "layers.0.mixer.conv1d.weight": (6144, 1, 4),
            "layers.1.mixer.gate.e_score_correction_bias": (128,),
            "layers.5.mixer.k_proj.weight": (256, 2688),
            "layers.51.mixer.experts.127.down_proj.weight": (2688, 1856),
            "layers.51.mixer.shared_experts.up_proj.weight": (3712, 2688),
        },
    ),
    # Published: 8,888,227,328.
    "nemotron-nano-9b-v2": (
        8_888_227_328,
        {
            "layers.0.mixer.norm.weight": (128 * 80,),
            "layers.14.mixer.o_proj.weight": (4480, 40 * 128),
            "layers.55.mixer.up_proj.weight": (15_680, 4480),
        },
    ),
    # Published: 6,939,037,248.
    "granite-4.0-h-tiny": (
        6_939_037_248,
        {
            "layers.0.mamba.A_log": (48,),
            "layers.5.self_attn.q_proj.weight": (1536, 1536),
            "layers.39.block_sparse_moe.experts.63.gate_proj.weight": (512, 1536),
            "layers.39.shared_mlp.output_linear.weight": (1536, 1024),
        },
    ),
    # Published: 32,207,337,984.
    "granite-4.0-h-small": (
        32_207_337_984,
        {"layers.0.block_sparse_moe.router.layer.weight": (72, 4096)},
    ),
    "bamba-9b": (
        9_780_235_392,
        {
            "layers.0.mamba.in_proj.weight": (2 * 8192 + 2 * 128 + 128, 4096),
            "layers.27.self_attn.k_proj.weight": (1024, 4096),
            "final_layernorm.weight": (4096,),
        },
    ),
    # Published: 521,411,104.
    "falcon-h1-0.5b": (
        521_411_104,
        {"layers.35.mamba.conv1d.bias": (1792,), "layers.35.self_attn.q_proj.weight": (512, 1024)},
    ),
    "mamba2-2.7b": (
        2_702_599_680,
        {"layers.63.mixer.conv1d.weight": (5376, 1, 4), "norm_f.weight": (2560,)},
    ),
    # All as published.
    "gpt2": (124_439_808, {"h.11.attn.c_attn.weight": (768, 2304)}),
    "opt-350m": (331_196_416, {"project_in.weight": (1024, 512)}),
    "gemma-2b": (2_506_172_416, {"layers.17.self_attn.k_proj.weight": (256, 2048)}),
    "gemma-2-9b": (9_241_705_984, {"layers.41.pre_feedforward_layernorm.weight": (3584,)}),
    "gemma-3-1b": (999_885_952, {"layers.25.self_attn.q_norm.weight": (256,)}),
    "gemma-3-4b": (3_880_263_168, {"layers.33.mlp.up_proj.weight": (10_240, 2560)}),
    "phi-3-mini-4k": (3_821_079_552, {"layers.31.self_attn.qkv_proj.weight": (9216, 3072)}),
    "phi-3.5-mini": (3_821_079_552, {}),
    "phi-4-mini": (3_836_021_760, {"layers.31.self_attn.qkv_proj.weight": (5120, 3072)}),
    "phi-4": (14_659_507_200, {"layers.39.mlp.gate_up_proj.weight": (35_840, 5120)}),
    "mistral-7b-v0.1": (7_241_732_096, {}),
    "mixtral-8x7b": (
        46_702_792_704,
        {"layers.31.block_sparse_moe.experts.7.w2.weight": (4096, 14_336)},
    ),
    "qwen2.5-7b": (7_615_616_512, {"layers.27.self_attn.k_proj.bias": (512,)}),
    "qwen1.5-moe-a2.7b": (
        14_315_784_192,
        {"layers.23.mlp.shared_expert.up_proj.weight": (5632, 2048)},
    ),
    "olmo-2-7b": (7_298_617_344, {"layers.31.self_attn.q_norm.weight": (4096,)}),
    "olmo-3-7b": (7_298_011_136, {"layers.31.self_attn.k_norm.weight": (4096,)}),
    "granite-3.3-2b": (2_533_539_840, {}),
    "granite-3.0-1b-a400m": (
        1_334_628_352,
        {"layers.23.block_sparse_moe.experts.31.gate_proj.weight": (512, 1024)},
    ),
    "granite-moe-7b-a1b-shared": (
        6_370_891_776,
        {"layers.39.shared_mlp.input_linear.weight": (2048, 1536)},
    ),
    "smollm3-3b": (3_075_098_624, {}),
    "starcoder2-3b": (3_030_371_328, {"layers.29.mlp.c_fc.bias": (12_288,)}),
    "glm-4-9b-0414": (9_400_279_040, {"layers.39.self_attn.k_proj.bias": (256,)}),
    "exaone-3.5-2.4b": (2_405_327_360, {"layers.29.mlp.gate_proj.weight": (7168, 2560)}),
    "exaone-4.0-1.2b": (1_279_391_488, {}),
    "exaone-4.0-32b": (32_003_216_384, {}),
    "ministral-3-3b": (3_429_006_336, {"layers.25.self_attn.q_proj.weight": (4096, 3072)}),
    "dots.llm1": (
        142_774_381_696,
        {
            "layers.0.mlp.up_proj.weight": (10_944, 4096),
            "layers.61.mlp.experts.127.down_proj.weight": (4096, 1408),
            "layers.61.mlp.shared_experts.up_proj.weight": (2816, 4096),
        },
    ),
    # Text only. The text model of qwen2-vl-2b is Qwen2-1.5B, of qwen2.5-vl-7b Qwen2.5-7B, of
    # glm-4.5v GLM-4.5-Air.
    "qwen2-vl-2b": (1_543_714_304, {"layers.27.self_attn.q_proj.bias": (1536,)}),
    "qwen2.5-vl-7b": (7_615_616_512, {}),
    "glm-4.5v": (106_852_251_264, {"layers.45.mlp.gate.e_score_correction_bias": (128,)}),
    "internvl3-8b": (7_612_820_992, {"lm_head.weight": (151_674, 3584)}),
    # Texts of Qwen3-8B and Qwen3-30B-A3B.
    "internvl3.5-8b": (8_190_735_360, {"layers.35.self_attn.q_norm.weight": (128,)}),
    "internvl3.5-30b-a3b": (30_532_122_624, {}),
    "llava-1.5-7b": (6_738_939_904, {"embed_tokens.weight": (32_064, 4096)}),
    "llava-interleave-qwen-0.5b": (464_053_248, {}),
    "pixtral-12b": (12_247_782_400, {"layers.39.self_attn.q_proj.weight": (4096, 5120)}),
}
"""The number of parameters, and some tensors with their shapes."""

REFUSED = {
    "gemma-4-e2b": "text_config.hidden_size_per_layer_input",
    "gemma-4-e4b": "text_config.hidden_size_per_layer_input",
}
"""The key at fault in those that do not run."""

PUT_TOGETHER = {
    "dots.llm1",
    "exaone-3.5-2.4b",
    "exaone-4.0-1.2b",
    "exaone-4.0-32b",
    "glm-4-9b-0414",
    "glm-4.5v",
    "granite-3.0-1b-a400m",
    "granite-3.3-2b",
    "granite-moe-7b-a1b-shared",
    "internvl3-8b",
    "internvl3.5-30b-a3b",
    "internvl3.5-8b",
    "llava-interleave-qwen-0.5b",
    "ministral-3-3b",
    "olmo-3-7b",
    "phi-4",
    "phi-4-mini",
    "pixtral-12b",
    "smollm3-3b",
    "afm-4.5b",
    "apertus-8b",
    "bamba-9b",
    "command-r7b",
    "ernie-4.5-0.3b",
    "ernie-4.5-21b-a3b",
    "gemma-4-26b-a4b",
    "gemma-4-e2b",
    "gemma-4-e4b",
    "glm-4.5-air",
    "glm-4.7",
    "hunyuan-7b",
    "hunyuan-a13b",
    "llama-3.1-70b",
    "llama-3.1-8b",
    "llama-3.1-nemotron-70b",
    "llama-3.1-nemotron-nano-4b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.3-70b",
    "minimax-m2.1",
    "granite-4.0-h-small",
    "granite-4.0-h-tiny",
    "mamba2-2.7b",
    "lfm2-8b-a1b",
    "llama-4-maverick-17b-128e",
    "llama-4-scout-17b-16e",
    "mistral-small-3.1-24b",
    "nemotron-nano-9b-v2",
    "olmoe-1b-7b",
    "qwen3.5-122b-a10b",
    "qwen3.5-35b-a3b",
    "qwen3.5-397b-a17b",
    "qwen3-0.6b",
    "qwen3-235b-a22b-2507",
    "qwen3-30b-a3b",
    "qwen3-4b",
    "qwen3-coder-480b-a35b",
    "qwen3-coder-next",
    "qwen3-next-80b-a3b",
    "qwen3.5-27b",
    "qwen3.5-2b",
    "qwen3.5-9b",
}


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    return without_quantisation(config)


def test_every_file_is_in_the_table() -> None:
    assert sorted(path.stem for path in PUBLISHED.glob("*.json")) == sorted([*MODELS, *REFUSED])
    assert {*MODELS, *REFUSED} >= PUT_TOGETHER


def test_every_family_has_a_published_config() -> None:
    """A family whose keys only transformers' classes wrote can give wrong tokens for the files that
    people have."""
    assert {parse_config(config_of(name)).architecture for name in MODELS} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_config_is_accepted_with_its_tensors(name: str) -> None:
    parameters, some = MODELS[name]
    found = {tensor.name: tensor.shape for tensor in expected_tensors(config_of(name)).values()}
    assert sum(math.prod(shape) for shape in found.values()) == parameters
    assert {tensor: found.get(tensor) for tensor in some} == some


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_run_is_refused_by_the_key_at_fault(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        read_config(config_of(name))
    assert refused.value.field == REFUSED[name]


@pytest.mark.parametrize("name", MODELS)
def test_transformers_layers_have_a_place_for_each_tensor(name: str) -> None:
    decoder = read_config(config_of(name))
    record, shape = decoder.architecture, decoder.shape
    context = StageContext(
        decoder,
        LayerRange(0, 1),
        DType.FLOAT32,
        "cpu",
        config=library_config(decoder),
        library=library_of(decoder),
    )
    blocks = [record.block(decoder.fields, shape, layer) for layer in range(shape.layer_count)]
    kinds = {tuple(block.items()): layer for layer, block in enumerate(blocks)}
    for layer in {0, 1, *kinds.values()}:
        sizes = {
            key: tuple(part.shape) for key, part in make_layer(context, layer).state_dict().items()
        }
        left = dict.fromkeys(sizes, 0)
        for tensor, size in blocks[layer].items():
            place = (
                tensor
                if isinstance(record.runs, Fused) and tensor in left
                else record.place(tensor).parameter
            )
            # the module has another name there
            if record.name.startswith("granitemoe") and place.startswith("mlp."):
                place = place.replace("mlp.gate.", "block_sparse_moe.router.").replace(
                    "mlp.", "block_sparse_moe."
                )
            # transformers has all experts in one parameter
            if record.expert_index(tensor) is not None:
                place = re.sub(
                    r"experts\.\d+\.(\w+_proj)", r"experts.\1", place.removeprefix("beside.")
                )
                place = place.removesuffix(".weight").replace(".bias", "_bias")
                if place not in left:
                    place = re.sub(r"experts\.(gate|up)_proj$", "experts.gate_up_proj", place)
            left[place] += math.prod(size)
        assert left == {key: math.prod(size) for key, size in sizes.items()}


FURTHER = {
    "glm-4.5v": ("model.language_model.layers.46.eh_proj.weight",),
    "ernie-4.5-21b-a3b": ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"),
    "glm-4.5-air": (
        "model.layers.46.eh_proj.weight",
        "model.layers.46.mlp.experts.127.down_proj.weight",
    ),
    "glm-4.7": ("model.layers.92.shared_head.norm.weight", "model.layers.92.embed_tokens.weight"),
    "k-exaone-236b-a23b": ("mtp.layers.0.mlp.experts.0.up_proj.weight",),
    "minimax-m2.7": (
        "model.layers.62.eh_proj.weight",
        "model.layers.64.block_sparse_moe.gate.weight",
    ),
    "nemotron-3-nano-30b-a3b": ("mtp.layers.0.mixer.q_proj.weight", "mtp.layers.0.eh_proj.weight"),
    "qwen3-next-80b-a3b": ("mtp.fc.weight", "mtp.layers.0.mlp.experts.511.up_proj.weight"),
    "qwen3.5-27b": ("mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"),
    "qwen3.5-35b-a3b": (
        "mtp.layers.0.mlp.experts.gate_up_proj",
        "mtp.layers.0.self_attn.q_proj.weight",
    ),
    "step-3.5-flash": (
        "model.layers.45.enorm.weight",
        "model.layers.47.transformer.shared_head.output.weight",
    ),
}
"""Tensors of blocks that predict further tokens, as checkpoints of the family name them."""


@pytest.mark.parametrize("name", FURTHER)
def test_blocks_for_further_tokens_are_a_unit_that_no_stage_has(name: str) -> None:
    config = config_of(name)
    shape = parse_config(config)
    for tensor in FURTHER[name]:
        assert unit_of(shape.architecture, tensor, config) is Part.FURTHER
    assert Part.FURTHER not in units_of_stage(LayerRange(0, shape.layer_count), shape.layer_count)
    assert Part.FURTHER not in {tensor.unit for tensor in expected_tensors(config).values()}


def test_a_context_is_the_published_one() -> None:
    assert parse_config(config_of("minimax-m2.7")).max_context == 204_800


def test_every_card_is_counted_once_and_has_its_config() -> None:
    cards = read_cards()
    assert sum(card["cards"] for card in cards) == 123
    assert len({card["original"] for card in cards}) == len(cards)
    for card in cards:
        path = PUBLISHED / f"{card.get('config')}.json"
        assert path.exists() or card["model_type"] in registry.REFUSED, card["original"]
        if path.exists():
            assert json.loads(path.read_text(encoding="utf-8"))["model_type"] == card["model_type"]


def test_documents_name_every_family() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.partition("## Families")[2].partition("\n## ")[0]
    listed = f"{len(ARCHITECTURES)} run: {', '.join(ARCHITECTURES)}."
    assert listed in " ".join(section.split())
    assert f"of {len(ARCHITECTURES)} families" in " ".join(
        (ROOT / "README.md").read_text(encoding="utf-8").split()
    )


def test_documents_name_the_families_in_our_own_blocks() -> None:
    page = " ".join((ROOT / "docs" / "kernels.md").read_text(encoding="utf-8").split())
    own = [name for name in ARCHITECTURES if isinstance(architecture_named(name).runs, Fused)]
    others = [name for name in ARCHITECTURES if name not in own]
    assert f"{len(own)} families run in our own blocks: {', '.join(own)}." in page
    assert f"with our attention and our products, run {', '.join(others)}." in page


def test_at_least_90_cards_run() -> None:
    assert sum(card["cards"] for card in read_cards() if not refusal(card)) >= 90


def test_the_manifest_of_the_largest_model_can_be_sent() -> None:
    """It has a tensor for each matrix of each expert."""
    config = config_of("qwen3.5-397b-a17b")
    digest, prefix = Digest("0" * 64), "model.language_model."
    tensors = tuple(
        TensorInfo(prefix + tensor.name, DType.BFLOAT16, tensor.shape, digest)
        for tensor in expected_tensors(config).values()
    )
    manifest = ModelManifest(ModelName("m"), "qwen3_5_moe", json.dumps(config), tensors, ())
    assert is_sendable(store_pb2.RegisterModelRequest(manifest=manifest_to_wire(manifest)))
