"""Which tensors a checkpoint must hold, by unit, with their shapes.

Checkpoints of one architecture differ in the prefix of their names (`model.`, `transformer.`, `language_model.`). A
*canonical* name has no prefix: `layers.3.self_attn.q_proj.weight`, `embed_tokens.weight`. Shapes are as stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures.config import ModelShape, expert_count, is_tied, parse_config
from edgeshard.architectures.fields import ConfigFields, decoder_fields
from edgeshard.model import LayerRange, Part, Unit, units_of_stage

Shapes = dict[str, tuple[int, ...]]

HEAD_WEIGHT = "lm_head.weight"

_PREFIXES = {"gpt2": ("transformer.",), "opt": ("model.", "decoder."), "gemma3": ("model.", "language_model.")}
_BLOCK = re.compile(r"(?:layers|h)\.(\d+)\.(.+)")
_IGNORED_IN_BLOCK = re.compile(r"(self_attn\.rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")
_EMBEDDING = {"embed_tokens.weight", "wte.weight"}
_POSITIONS = {
    "opt": frozenset({"embed_positions.weight", "project_in.weight"}),
    "gpt2": frozenset({"wpe.weight"}),
}
_HEAD = {
    "opt": frozenset({"final_layer_norm.weight", "final_layer_norm.bias", "project_out.weight"}),
    "gpt2": frozenset({"ln_f.weight", "ln_f.bias"}),
}


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """One tensor a checkpoint must hold, by canonical name."""

    name: str
    unit: Unit
    shape: tuple[int, ...]


def canonical_name(architecture: str, tensor_name: str) -> str:
    """`tensor_name` without the prefixes its architecture's checkpoints use."""
    prefixes = _PREFIXES.get(_plain(architecture), ("model.",))
    name = tensor_name
    while (prefix := next((p for p in prefixes if name.startswith(p)), None)) is not None:
        name = name[len(prefix) :]
    return name


def unit_of(architecture: str, tensor_name: str, config: Mapping[str, Any]) -> Unit | None:
    """The unit a checkpoint's tensor belongs to, or None for one that is not needed.

    Not needed are buffers that are computed (rotary frequencies, causal masks), an `lm_head` beside a tied embedding,
    and whatever is not part of the decoder, such as a vision tower.
    """
    architecture = _plain(architecture)
    name = canonical_name(architecture, tensor_name)
    if (block := _BLOCK.fullmatch(name)) is not None:
        return None if _IGNORED_IN_BLOCK.fullmatch(block[2]) else int(block[1])
    if name in _EMBEDDING:
        return Part.TIED if is_tied(config, decoder_fields(config)) else Part.EMBEDDING
    if name in _POSITIONS.get(architecture, ()):
        return Part.EMBEDDING
    if name in _HEAD.get(architecture, frozenset({"norm.weight"})):
        return Part.HEAD
    if name == HEAD_WEIGHT and not is_tied(config, decoder_fields(config)):
        return Part.HEAD
    return None


def expected_tensors(config: Mapping[str, Any], layers: LayerRange | None = None) -> dict[str, ExpectedTensor]:
    """By canonical name, the tensors a stage with `layers` needs; without `layers`, those of the whole model.

    Raises UnsupportedModelError as `parse_config` does.
    """
    shape = parse_config(config)
    fields = decoder_fields(config)
    if layers is None:
        layers = LayerRange(0, shape.layer_count)
    units = units_of_stage(layers, shape.layer_count)
    expected: dict[str, ExpectedTensor] = {}
    for part, shapes in _outer_shapes(fields, shape).items():
        if part in units:
            expected |= {name: ExpectedTensor(name, part, size) for name, size in shapes.items()}
    list_name = "h" if shape.architecture == "gpt2" else "layers"
    for layer in range(layers.first, layers.end):
        for name, size in _block_shapes(fields, shape, layer).items():
            full = f"{list_name}.{layer}.{name}"
            expected[full] = ExpectedTensor(full, layer, size)
    return expected


def _plain(architecture: str) -> str:
    return "gemma3" if architecture == "gemma3_text" else architecture


def _outer_shapes(fields: ConfigFields, shape: ModelShape) -> dict[Part, Shapes]:
    hidden, vocab = shape.hidden_size, shape.vocab_size
    embedding: Shapes = {}
    head: Shapes = {}
    token_width = hidden
    if shape.architecture == "gpt2":
        token_name = "wte.weight"
        embedding["wpe.weight"] = (shape.max_context, hidden)
        head |= _norm("ln_f", hidden)
    elif shape.architecture == "opt":
        token_name = "embed_tokens.weight"
        token_width = fields.size("word_embed_proj_dim", hidden)
        embedding["embed_positions.weight"] = (shape.max_context + 2, hidden)
        if token_width != hidden:
            embedding["project_in.weight"] = (hidden, token_width)
            head["project_out.weight"] = (token_width, hidden)
        if opt_has_final_norm(fields) and fields.flag("layer_norm_elementwise_affine", True):
            head |= _norm("final_layer_norm", hidden)
    else:
        token_name = "embed_tokens.weight"
        head["norm.weight"] = (hidden,)
    tied: Shapes = {}
    if shape.tied:
        tied[token_name] = (vocab, token_width)
    else:
        embedding[token_name] = (vocab, token_width)
        head[HEAD_WEIGHT] = (vocab, token_width)
    return {Part.EMBEDDING: embedding, Part.TIED: tied, Part.HEAD: head}


def opt_has_final_norm(fields: ConfigFields) -> bool:
    return fields.flag("do_layer_norm_before", True) and not fields.flag("_remove_final_layer_norm", False)


def _block_shapes(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    if shape.architecture == "gpt2":
        return _gpt2_block(fields, shape)
    if shape.architecture == "opt":
        return _opt_block(fields, shape)
    if shape.architecture == "phi3":
        return _phi3_block(fields, shape)
    block = _attention(fields, shape) | {"input_layernorm.weight": (shape.hidden_size,)}
    block["post_attention_layernorm.weight"] = (shape.hidden_size,)
    if shape.architecture in ("qwen3", "qwen3_moe", "gemma3"):
        block |= {f"self_attn.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
    if shape.architecture == "gemma3":
        block |= {f"{name}_feedforward_layernorm.weight": (shape.hidden_size,) for name in ("pre", "post")}
    if shape.architecture == "mixtral":
        return block | _experts("block_sparse_moe", ("w1", "w3", "w2"), fields, shape, fields.size("intermediate_size"))
    if shape.architecture == "qwen3_moe" and _is_sparse(fields, shape, layer):
        names = ("gate_proj", "up_proj", "down_proj")
        return block | _experts("mlp", names, fields, shape, fields.size("moe_intermediate_size"))
    bias = shape.architecture == "llama" and fields.flag("mlp_bias", False)
    inner = fields.size("intermediate_size")
    for name in ("gate_proj", "up_proj"):
        block |= _linear(f"mlp.{name}", inner, shape.hidden_size, bias)
    return block | _linear("mlp.down_proj", shape.hidden_size, inner, bias)


def _is_sparse(fields: ConfigFields, shape: ModelShape, layer: int) -> bool:
    if layer in fields.layer_list("mlp_only_layers", shape.layer_count):
        return False
    return (layer + 1) % fields.size("decoder_sparse_step", 1) == 0


def _attention(fields: ConfigFields, shape: ModelShape) -> Shapes:
    option = shape.architecture in ("llama", "qwen3", "qwen3_moe", "gemma3") and fields.flag("attention_bias", False)
    input_bias = option or shape.architecture == "qwen2"
    query, key_value = shape.attention_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return (
        _linear("self_attn.q_proj", query, shape.hidden_size, input_bias)
        | _linear("self_attn.k_proj", key_value, shape.hidden_size, input_bias)
        | _linear("self_attn.v_proj", key_value, shape.hidden_size, input_bias)
        | _linear("self_attn.o_proj", shape.hidden_size, query, option)
    )


def _experts(root: str, names: tuple[str, str, str], fields: ConfigFields, shape: ModelShape, inner: int) -> Shapes:
    experts = expert_count(fields)
    gate, up, down = names
    block: Shapes = {f"{root}.gate.weight": (experts, shape.hidden_size)}
    for expert in range(experts):
        block[f"{root}.experts.{expert}.{gate}.weight"] = (inner, shape.hidden_size)
        block[f"{root}.experts.{expert}.{up}.weight"] = (inner, shape.hidden_size)
        block[f"{root}.experts.{expert}.{down}.weight"] = (shape.hidden_size, inner)
    return block


def _phi3_block(fields: ConfigFields, shape: ModelShape) -> Shapes:
    hidden, inner = shape.hidden_size, fields.size("intermediate_size")
    query = shape.attention_heads * shape.head_dim
    return {
        "self_attn.qkv_proj.weight": (query + 2 * shape.kv_heads * shape.head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_up_proj.weight": (2 * inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def _gpt2_block(fields: ConfigFields, shape: ModelShape) -> Shapes:
    hidden = shape.hidden_size
    inner = fields.size("n_inner", 4 * hidden)
    block = _norm("ln_1", hidden) | _norm("ln_2", hidden)
    # Conv1D stores its weight transposed: (in, out).
    for name, width_in, width_out in (
        ("attn.c_attn", hidden, 3 * hidden),
        ("attn.c_proj", hidden, hidden),
        ("mlp.c_fc", hidden, inner),
        ("mlp.c_proj", inner, hidden),
    ):
        block |= {f"{name}.weight": (width_in, width_out), f"{name}.bias": (width_out,)}
    return block


def _opt_block(fields: ConfigFields, shape: ModelShape) -> Shapes:
    hidden, inner, bias = shape.hidden_size, fields.size("ffn_dim"), fields.flag("enable_bias", True)
    block: Shapes = {}
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        block |= _linear(f"self_attn.{name}", hidden, hidden, bias)
    block |= _linear("fc1", inner, hidden, bias) | _linear("fc2", hidden, inner, bias)
    if fields.flag("layer_norm_elementwise_affine", True):
        block |= _norm("self_attn_layer_norm", hidden) | _norm("final_layer_norm", hidden)
    return block


def _linear(name: str, width_out: int, width_in: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (width_out, width_in)}
    if bias:
        shapes[f"{name}.bias"] = (width_out,)
    return shapes


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
