"""Options that single families refuse. The planner's sizes equal the sizes of transformers' models,
for every row."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from edgeshard_agent.model.library import library_config
from hypothesis import given
from hypothesis import strategies as st

from edgeshard.architectures import parse_config, read_config
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.planning.inputs.shapes import model_from_config
from tests.agent.model.families import LAYERS, VARIANTS, WINDOW, decoder_of

MISSING = object()
"""Takes a key out."""


def changed(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A row's config.json with other values for these keys of its decoder; a dot leads into an
    object."""
    values = json.loads(json.dumps(dict(decoder_of(name).fields.values)))
    for path, value in changes.items():
        *outer, key = path.split(".")
        target = values
        for step in outer:
            target = target[step]
        if value is MISSING:
            del target[key]
        else:
            target[key] = value
    return dict(values)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("granite-options", {"residual_multiplier": 0}, "residual_multiplier"),
    ("granite-options", {"attention_multiplier": "0.2"}, "attention_multiplier"),
    ("granitemoe-options", {"logits_scaling": None}, "logits_scaling"),
    ("granitemoe-options", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("smollm3-interval", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ("smollm3-interval", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
    ("smollm3-interval", {"no_rope_layers": [1, 0, 1, 2]}, "no_rope_layers"),
    ("smollm3-interval", {"no_rope_layers": [[1], 0, 1, 1]}, "no_rope_layers"),
    ("smollm3-interval", {"num_key_value_heads": None}, "num_key_value_heads"),
    ("smollm3-windows", {"use_sliding_window": False}, "sliding_window"),
    ("starcoder2-window", {"norm_epsilon": 0}, "norm_epsilon"),
    ("starcoder2-window", {"use_bias": 1}, "use_bias"),
    (
        "starcoder2-window",
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        "layer_types",
    ),
    (
        "olmo3-windows",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "rope_parameters",
    ),
    (
        "olmo3-windows",
        {"rope_scaling": {"full_attention": {"rope_type": "default"}}},
        "rope_scaling",
    ),
    ("olmo3-windows", {"sliding_window": None, "layer_types": MISSING}, "sliding_window"),
    ("olmo3-windows", {"sliding_window": None}, "sliding_window"),
    ("exaone4-windows", {"sliding_window_pattern": "LLLG", "layer_types": MISSING}, "layer_types"),
    ("exaone4-windows", {"sliding_window_pattern": 0, "layer_types": MISSING}, "layer_types"),
    ("exaone4-windows", {"sliding_window": None}, "sliding_window"),
    (
        "ministral3-plain",
        {"rope_parameters.llama_4_scaling_beta": MISSING},
        "rope_parameters.llama_4_scaling_beta",
    ),
    (
        "ministral3-plain",
        {"rope_parameters.original_max_position_embeddings": None},
        "rope_parameters.original_max_position_embeddings",
    ),
    ("seed_oss-plain", {"head_dim": None}, "head_dim"),
    ("seed_oss-plain", {"attention_out_bias": 1}, "attention_out_bias"),
    ("hunyuan_v1_dense-alpha", {"rope_parameters.alpha": None}, "rope_parameters.alpha"),
    ("hunyuan_v1_dense-alpha", {"head_dim": None}, "head_dim"),
    ("hunyuan_v1_moe-alpha", {"moe_topk": [2, 2, 2, 1]}, "moe_topk"),
    ("hunyuan_v1_moe-alpha", {"moe_topk": 5}, "moe_topk"),
    ("hunyuan_v1_moe-alpha", {"moe_intermediate_size": [40, 40, 40, 48]}, "moe_intermediate_size"),
    ("hunyuan_v1_moe-alpha", {"moe_intermediate_size": [48] * 4}, "moe_intermediate_size"),
    ("hunyuan_v1_moe-alpha", {"num_shared_expert": [2] * 4}, "num_shared_expert"),
    ("hunyuan_v1_moe-alpha", {"use_cla": True}, "use_cla"),
    ("ernie4_5-plain", {"num_key_value_heads": None}, "num_key_value_heads"),
    ("ernie4_5_moe-plain", {"use_bias": True}, "use_bias"),
    ("ernie4_5_moe-plain", {"moe_layer_interval": 0}, "moe_layer_interval"),
    ("ernie4_5_moe-plain", {"moe_layer_end_index": -2}, "moe_layer_end_index"),
    ("ernie4_5_moe-plain", {"moe_num_shared_experts": None}, "moe_num_shared_experts"),
    ("ernie4_5_moe-plain", {"moe_k": 6}, "moe_k"),
    ("cohere2-windows", {"head_dim": 12}, "head_dim"),
    ("cohere2-windows", {"sliding_window": None, "layer_types": MISSING}, "sliding_window"),
    ("cohere2-windows", {"layer_switch": 3, "layer_types": MISSING}, "layer_switch"),
    ("cohere2-windows", {"use_qk_norm": True}, "use_qk_norm"),
    ("cohere2-windows", {"logit_scale": 0}, "logit_scale"),
    ("olmoe-clipped", {"clip_qkv": 0}, "clip_qkv"),
    ("olmoe-clipped", {"head_dim": 12}, "head_dim"),
    ("arcee-yarn", {"hidden_act": "xielu"}, "hidden_act"),
    ("arcee-yarn", {"hidden_size": 30}, "hidden_size"),
    ("apertus-llama3", {"hidden_act": "relu2"}, "hidden_act"),
    ("apertus-llama3", {"mlp_bias": True}, "mlp_bias"),
    ("apertus-llama3", {"post_norm": True}, "post_norm"),
    ("lfm2-adjusted", {"layer_types": ["conv"] * 3}, "layer_types"),
    ("lfm2-adjusted", {"layer_types": ["conv", "sliding_attention"] * 2}, "layer_types"),
    ("lfm2-adjusted", {"full_attn_idxs": [1]}, "full_attn_idxs"),
    ("lfm2-adjusted", {"conv_dim": 64}, "conv_dim"),
    ("lfm2-adjusted", {"conv_L_cache": 1}, "conv_L_cache"),
    ("lfm2-adjusted", {"block_ffn_dim_multiplier": None}, "block_ffn_dim_multiplier"),
    ("lfm2-adjusted", {"block_ffn_dim_multiplier": 1e9}, "intermediate_size"),
    ("lfm2-adjusted", {"block_use_swiglu": False}, "block_use_swiglu"),
    ("lfm2_moe-options", {"layer_types": None}, "layer_types"),
    ("lfm2_moe-options", {"num_dense_layers": -1}, "num_dense_layers"),
    ("lfm2_moe-options", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("kimi_linear-groups", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    ("kimi_linear-groups", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
    ("kimi_linear-groups", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("kimi_linear-groups", {"v_head_dim": 17}, "v_head_dim"),
    ("kimi_linear-groups", {"linear_num_heads": 1 << 17}, "linear_num_heads"),
    ("kimi_linear-groups", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ("kimi_linear-groups", {"linear_attn_config": []}, "linear_attn_config"),
    (
        "kimi_linear-groups",
        {"linear_attn_config": {"kda_layers": [1]}},
        "linear_attn_config.full_attn_layers",
    ),
    (
        "kimi_linear-groups",
        {"linear_attn_config": {"gate_lower_bound": -5.0}},
        "linear_attn_config.gate_lower_bound",
    ),
    ("kimi_linear-groups", {"mla_use_nope": False}, "mla_use_nope"),
    ("kimi_linear-groups", {"mla_use_output_gate": True}, "mla_use_output_gate"),
    ("kimi_linear-groups", {"routed_expert_hidden_size": 16}, "routed_expert_hidden_size"),
    ("kimi_linear-groups", {"hidden_act": "situ"}, "hidden_act"),
    ("kimi_linear-groups", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("kimi_linear-options", {"q_lora_rank": 0}, "q_lora_rank"),
    ("llama4-options", {"attention_chunk_size": 24}, "attention_chunk_size"),
    (
        "llama4-options",
        {"attention_chunk_size": None, "layer_types": ["sliding_attention"] * 4},
        "layer_types",
    ),
    ("llama4-options", {"no_rope_layers": [0, 1, 1]}, "no_rope_layers"),
    ("llama4-options", {"no_rope_layers": [0, 1, 1, 2]}, "no_rope_layers"),
    ("llama4-options", {"moe_layers": [4]}, "moe_layers"),
    (
        "llama4-options",
        {"interleave_moe_layer_step": 0, "moe_layers": MISSING},
        "interleave_moe_layer_step",
    ),
    ("exaone_moe-windows", {"n_group": 3}, "num_experts"),
    ("exaone_moe-windows", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ("exaone_moe-windows", {"is_moe_layer": [True] * 4}, "is_moe_layer"),
    ("exaone_moe-windows", {"num_shared_experts": 0}, "num_shared_experts"),
    (
        "nemotron_h-groups",
        {"layers_block_type": ["mamba", "mlp", "moe", "conv"]},
        "layers_block_type",
    ),
    ("nemotron_h-groups", {"layers_block_type": MISSING}, "hybrid_override_pattern"),
    (
        "nemotron_h-groups",
        {"layers_block_type": MISSING, "hybrid_override_pattern": "M*EX"},
        "layers_block_type",
    ),
    (
        "nemotron_h-groups",
        {"layers_block_type": MISSING, "hybrid_override_pattern": "M" * 5000},
        "num_hidden_layers",
    ),
    ("nemotron_h-groups", {"n_groups": 4}, "mamba_num_heads"),
    ("nemotron_h-groups", {"n_group": 3}, "n_routed_experts"),
    ("nemotron_h-groups", {"conv_kernel": 1}, "conv_kernel"),
    ("nemotron_h-groups", {"mamba_head_dim": 1 << 20}, "mamba_num_heads"),
    ("nemotron_h-groups", {"mamba_hidden_act": "relu"}, "mamba_hidden_act"),
    ("nemotron_h-groups", {"mlp_hidden_act": "xielu"}, "mlp_hidden_act"),
    ("nemotron_h-groups", {"attention_bias": True}, "attention_bias"),
    ("nemotron_h-groups", {"sliding_window": 6}, "sliding_window"),
    ("nemotron_h-groups", {"moe_latent_size": 0}, "moe_latent_size"),
    ("nemotron_h-groups", {"time_step_limit": [0.1]}, "time_step_limit"),
    ("nemotron_h-groups", {"time_step_limit": [0.2, 0.1]}, "time_step_limit"),
    ("nemotron_h-groups", {"time_step_limit": [0.0, "Infinity"]}, "time_step_limit"),
    ("bamba-partial", {"attn_layer_indices": [4]}, "attn_layer_indices"),
    ("bamba-partial", {"mamba_d_head": 16}, "mamba_d_head"),
    ("bamba-partial", {"mamba_n_heads": 7}, "mamba_expand"),
    ("bamba-partial", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ("bamba-partial", {"hidden_act": "gelu"}, "hidden_act"),
    ("falcon_h1-bare", {"mamba_d_ssm": 30}, "mamba_d_ssm"),
    ("falcon_h1-bare", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
    ("falcon_h1-bare", {"mlp_multipliers": [1.0, None]}, "mlp_multipliers"),
    ("falcon_h1-bare", {"key_multiplier": None}, "key_multiplier"),
    ("falcon_h1-bare", {"mamba_use_mlp": False}, "mamba_use_mlp"),
    ("falcon_h1-bare", {"attn_layer_indices": [1]}, "attn_layer_indices"),
    ("granitemoehybrid-experts", {"layer_types": ["mamba"] * 3}, "layer_types"),
    ("granitemoehybrid-experts", {"layer_types": ["mamba", "moe"] * 2}, "layer_types"),
    ("granitemoehybrid-experts", {"normalization_function": "layernorm"}, "normalization_function"),
    ("granitemoehybrid-experts", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("granitemoehybrid-experts", {"residual_multiplier": None}, "residual_multiplier"),
    ("mamba2-tied", {"expand": 3}, "expand"),
    ("mamba2-tied", {"num_heads": 6}, "expand"),
    ("mamba2-tied", {"hidden_act": "gelu"}, "hidden_act"),
    ("ministral3-plain", {"rope_parameters.mscale": -1.0}, "rope_parameters.mscale"),
    ("ministral3-plain", {"rope_parameters.factor": 0.0}, "rope_parameters.factor"),
    (
        "ministral3-plain",
        {"rope_scaling": {"rope_type": "default"}},
        "rope_scaling.llama_4_scaling_beta",
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    REFUSED,
    ids=[f"{i}-{name}-{field}" for i, (name, _, field) in enumerate(REFUSED)],
)
def test_what_a_family_refuses_names_its_field(
    name: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(changed(name, changes))
    assert caught.value.field == field


def test_a_nested_decoder_says_which_it_is() -> None:
    # Two families may be in there.
    config = json.loads(
        VARIANTS["ministral3-nested"].library_config().to_json_string(use_diff=False)
    )
    del config["text_config"]["model_type"]
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(config)
    assert caught.value.field == "text_config.model_type"


STEP = {
    "model_type": "step3p5",
    "auto_map": {"AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM"},
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "head_dim": 12,
    "attention_other_setting": {
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 12,
    },
    "layer_types": [
        "full_attention",
        *["sliding_attention"] * 2,
        "full_attention",
        "sliding_attention",
    ],
    "sliding_window": WINDOW,
    "rope_theta": [5000.0, 50.0, 50.0, 5000.0, 50.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn_only_types": ["full_attention"],
    "num_nextn_predict_layers": 1,
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "moe_router_scaling_factor": 2.5,
    "swiglu_limits": [0.0, 0.0, 0.1, 0.0, 0.0],
    "swiglu_limits_shared": [0.2, 0.0, 0.0, 0.1, 0.0],
}
"""As published: older keys, lists by layer with an entry for the block that predicts further
tokens."""


def test_published_keys_mean_what_those_of_transformers_do() -> None:
    found, expected = read_config(STEP), decoder_of("step3p5-clamped")
    assert found.windows() == expected.windows() == (0, WINDOW, WINDOW, 0)
    for layer in range(LAYERS):
        block, other = (
            one.architecture.block(one.fields, one.shape, layer) for one in (found, expected)
        )
        assert block == other
    mine, theirs = library_config(found), library_config(expected)
    for kind, entry in theirs.rope_parameters.items():
        assert {"partial_rotary_factor": 1.0} | mine.rope_parameters[kind] == {
            "partial_rotary_factor": 1.0
        } | entry
    assert mine.per_layer_config[1].num_attention_heads == 6
    for key in (
        "num_experts_per_tok",
        "n_routed_experts",
        "mlp_layer_types",
        "moe_router_scaling_factor",
    ):
        assert getattr(mine, key) == getattr(theirs, key)
    assert [limit or 0 for limit in mine.swiglu_limits] == [
        limit or 0 for limit in theirs.swiglu_limits
    ]


@given(
    st.lists(st.booleans(), min_size=1, max_size=9),
    st.integers(0, 3),
    st.integers(0, 1),
    st.booleans(),
)
def test_lists_by_layer_are_read_by_layer_type(
    slides: list[bool], further: int, pad: int, scaled: bool
) -> None:
    types = ["sliding_attention" if one else "full_attention" for one in slides]
    padded = types + ["sliding_attention"] * further
    by_type = {"full_attention": (5000.0, 0.5), "sliding_attention": (50.0, 1.0)}
    config = STEP | {
        "num_hidden_layers": len(types),
        "num_nextn_predict_layers": further,
        "layer_types": padded if pad else types,
        "rope_theta": [by_type[kind][0] for kind in padded],
        "partial_rotary_factors": [by_type[kind][1] for kind in padded],
        "moe_layers_enum": [],
        "swiglu_limits": None,
        "swiglu_limits_shared": None,
    }
    if not scaled:
        del config["rope_scaling"]
    found = read_config(config).fields.values
    assert found["layer_types"] == types and found["rope_parameters"].keys() == set(types)
    for kind, entry in found["rope_parameters"].items():
        assert (entry["rope_theta"], entry["partial_rotary_factor"]) == by_type[kind]
        assert entry["rope_type"] == (
            "llama3" if scaled and kind == "full_attention" else "default"
        )


@given(st.integers(1, 12), st.integers(0, 13), st.integers(-1, 13), st.integers(1, 5))
def test_the_blocks_with_experts_are_those_of_transformers(
    layers: int, start: int, end: int, interval: int
) -> None:
    changes = {
        "num_hidden_layers": layers,
        "moe_layer_start_index": start,
        "moe_layer_interval": interval,
    }
    decoder = read_config(changed("ernie4_5_moe-plain", changes | {"moe_layer_end_index": end}))
    for layer in range(layers):
        names = decoder.architecture.block(decoder.fields, decoder.shape, layer)
        last = layers - 1 if end == -1 else end
        assert ("mlp.gate.weight" in names) == (
            (layer + 1) % interval == 0 and start <= layer <= last
        )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_theta": [5000.0, 50.0, 60.0, 5000.0, 50.0]}, "rope_theta"),
        ({"rope_theta": [5000.0, 50.0]}, "rope_theta"),
        ({"partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 1.0]}, "partial_rotary_factors"),
        ({"layer_types": ["full_attention"] * 3}, "rope_theta"),
        ({"layer_types": 3}, "layer_types"),
        ({"yarn_only_types": ["sliding_attention"]}, "yarn_only_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"attention_other_setting": {"num_attention_heads": 5}}, "num_sliding_attention_heads"),
        (
            {"attention_other_setting": {"num_attention_groups": 1}},
            "attention_other_setting.num_attention_groups",
        ),
        ({"attention_other_setting": {"head_dim": 16}}, "attention_other_setting.head_dim"),
        ({"swiglu_limits": [1.0]}, "swiglu_limits"),
        ({"swiglu_limits_shared": [0, 0, 0, -1, 0]}, "swiglu_limits_shared"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
        ({"moe_top_k": 5}, "num_experts_per_tok"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"per_layer_config": {"0": {"num_attention_heads": 6}}}, "per_layer_config"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ],
    ids=str,
)
def test_published_keys_that_contradict_one_another_are_refused(
    changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config(STEP | changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "older", "gone"),
    [
        (
            "nemotron_h-groups",
            {
                "hybrid_override_pattern": "M*EM",
                "attention_head_dim": 12,
                "mamba_d_conv": 3,
                "mamba_n_groups": 2,
            },
            ("layers_block_type", "num_hidden_layers", "head_dim", "conv_kernel", "n_groups"),
        ),
        ("nemotron_h-groups", {"layers_block_type": ["mamba", "attention", "moe", "mamba"]}, ()),
        (
            "nemotron_h-groups",
            {"layer_types": ["mamba", "attention", "moe", "mamba"]},
            ("layers_block_type",),
        ),
        ("nemotron_h-groups", {"num_hidden_layers": 9}, ()),
        ("nemotron_h-groups", {"time_step_limit": [0.0, {"__float__": "Infinity"}]}, ()),
        ("nemotron_h-groups", {"time_step_limit": [0.0, float("inf")]}, ()),
        (
            "granitemoehybrid-dense",
            {"layers_block_type": ["attention", "mamba"] * 2},
            ("layer_types",),
        ),
        ("bamba-partial", {"mamba_d_head": "auto", "time_step_limit": None}, ()),
    ],
)
def test_older_keys_of_mamba2_mean_what_those_of_transformers_do(
    name: str, older: dict[str, Any], gone: tuple[str, ...]
) -> None:
    expected = decoder_of(name)
    config = {
        key: value for key, value in expected.fields.values.items() if key not in gone
    } | older
    found = read_config(config)
    assert found.shape == expected.shape
    for layer in range(LAYERS):
        block, other = (
            one.architecture.block(one.fields, one.shape, layer) for one in (found, expected)
        )
        assert block == other
    mine, theirs = library_config(found), library_config(expected)
    assert tuple(mine.time_step_limit or (0.0, float("inf"))) == tuple(theirs.time_step_limit)
    assert mine.layer_types == theirs.layer_types


def test_queries_may_stay_as_they_are() -> None:
    parse_config(changed("ministral3-plain", {"rope_parameters.llama_4_scaling_beta": 0.0}))


def test_without_a_window_every_block_sees_everything() -> None:
    config = changed("exaone4-windows", {"sliding_window": None, "layer_types": MISSING})
    assert read_config(config).windows() == (0,) * LAYERS


@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.wrap is None])
def test_the_planner_counts_transformers_parameters(variant: str) -> None:
    library_config = VARIANTS[variant].library_config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(library_config)
    kept = model.state_dict().keys()
    held = [
        *model.named_parameters(),
        *((name, part) for name, part in model.named_buffers() if name in kept),
    ]
    spec = model_from_config(variant, json.loads(library_config.to_json_string(use_diff=False)))
    assert spec.parameter_count == sum(part.numel() for _, part in held)
    experts = sum(part.numel() for name, part in held if ".experts." in name)
    assert sum(block.expert_parameters for block in spec.blocks) == experts
