"""gemma4, its text part only, where all blocks have heads alike: gemma3's four norms and two rotary bases.

Values are normed and may be the keys, a block ends in a factor, and experts run beside the MLP where config.json asks
for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgeshard.architectures.fields import ConfigFields, shown
from edgeshard.architectures.parts import (
    SANDWICH_NORMS,
    attention,
    expert_count,
    gated_mlp,
    gemma_ends,
    head_norms,
    linear,
    norms,
)
from edgeshard.architectures.record import Architecture, Experts, Library, Plugged, Shapes
from edgeshard.architectures.rope import STATIC, Rope
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import FULL, Windows

_EXPERTS = Experts(count=("num_experts",), chosen="top_k_experts", tensors=r"^experts\.", switch="enable_moe_block")
_EXPERT_NORMS = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
_GLOBAL_HEAD_DIM = 512
_ONE_SIZE = "EdgeShard's KV pool has one size for all blocks; use a checkpoint whose blocks have heads alike"


def _sliding(fields: ConfigFields, layer_count: int) -> list[bool]:
    return [(layer + 1) % 6 != 0 and layer + 1 < layer_count for layer in range(layer_count)]


_WINDOWS = Windows(512, sliding=_sliding)


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden, bias = shape.hidden_size, fields.flag("attention_bias")
    block = (
        norms(hidden, *SANDWICH_NORMS)
        | attention(shape, input_bias=bias, output_bias=bias)
        | head_norms(shape)
        | gated_mlp(shape, fields.size("intermediate_size"))
        | {"layer_scalar": (1,)}
    )
    if fields.flag("attention_k_eq_v") and _WINDOWS.layer_types(fields, shape.layer_count)[layer] == FULL:
        block = {name: size for name, size in block.items() if not name.startswith("self_attn.v_proj.")}
    if (count := expert_count(_EXPERTS, fields)) == 0:
        return block
    inner = fields.size("moe_intermediate_size")
    return (
        block
        | norms(hidden, *_EXPERT_NORMS)
        | linear("router.proj", count, hidden)
        | {
            "router.scale": (hidden,),
            "router.per_expert_scale": (count,),
            "experts.gate_up_proj": (count, 2 * inner, hidden),
            "experts.down_proj": (count, hidden, inner),
        }
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.optional_number("final_logit_softcapping")
    if fields.values.get("use_bidirectional_attention") not in (None, "vision"):  # that of pictures alone
        raise fields.refuse("use_bidirectional_attention", "is set for text; EdgeShard runs causal models only")
    if expert_count(_EXPERTS, fields):
        fields.size("moe_intermediate_size")
    if (width := fields.values.get("hidden_size_per_layer_input", fields.defaults["hidden_size_per_layer_input"])) != 0:
        raise fields.refuse(
            "hidden_size_per_layer_input",
            f"is {shown(width)}: every block reads vectors made from token ids, which only the first stage has; "
            "use a checkpoint where it is 0",
        )
    if fields.count("num_kv_shared_layers"):
        raise fields.refuse(
            "num_kv_shared_layers",
            "is not 0: the last blocks attend over keys and values of earlier ones, which another stage may hold; "
            "use a checkpoint where it is 0",
        )
    types = _WINDOWS.layer_types(fields, layer_count)
    if types[-1] != FULL:
        raise fields.refuse("layer_types", "ends in sliding_attention; the last layer must have full_attention")
    _check_heads(fields)
    _check_rope(fields, types)


def _check_heads(fields: ConfigFields) -> None:
    """Refuse blocks with heads of their own, in either of the two forms config.json has for them."""
    same = {"head_dim": fields.size("head_dim"), "num_key_value_heads": fields.size("num_key_value_heads")}
    if "per_layer_config" not in fields.values:
        found = fields.values.get("global_head_dim", _GLOBAL_HEAD_DIM)
        if found != same["head_dim"]:
            raise fields.refuse("global_head_dim", f"is {shown(found)} and head_dim {same['head_dim']}: {_ONE_SIZE}")
        found = fields.values.get("num_global_key_value_heads")
        if fields.flag("attention_k_eq_v") and found not in (None, same["num_key_value_heads"]):
            raise fields.refuse(
                "num_global_key_value_heads", f"is {shown(found)}, not num_key_value_heads: {_ONE_SIZE}"
            )
        return
    layers = fields.values["per_layer_config"]
    if not isinstance(layers, Mapping) or not all(isinstance(entry, Mapping) for entry in layers.values()):
        raise fields.refuse("per_layer_config", "must be an object with an object for each layer")
    for layer, entry in layers.items():
        for key, value in entry.items():
            if value != same.get(key):
                raise fields.refuse("per_layer_config", f"has {key} {shown(value)} for layer {layer}: {_ONE_SIZE}")


def _check_rope(fields: ConfigFields, types: tuple[str, ...]) -> None:
    given = fields.values.get("rope_parameters")
    if given is None:
        return
    for kind in sorted(set(types)):
        for key in ("rope_type", "rope_theta"):
            if not isinstance(given.get(kind), Mapping) or given[kind].get(key) is None:
                raise fields.refuse(f"rope_parameters.{kind}.{key}", "is missing; use the checkpoint's config.json")


ARCHITECTURE = Architecture(
    name="gemma4",
    model_types=("gemma4_text",),
    nested={"gemma4": "gemma4_text"},
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    activation="hidden_activation",
    flags=("attention_bias", "attention_k_eq_v", "enable_moe_block"),
    refused={"rope_scaling": "is given, which gemma4 does not read; give rope_parameters for each layer type"},
    checks=(_check,),
    rope=Rope(kinds=STATIC | {"proportional"}, partial=True, by_layer_type=True),
    windows=_WINDOWS,
    experts=_EXPERTS,
    prefixes=("model.", "language_model."),
    block=_block,
    library=Library("gemma4", "Gemma4Text", norm="Gemma4RMSNorm"),
    runs=Plugged(),
    ends=gemma_ends(),
    whole=r"router\.proj\.weight$",
)
