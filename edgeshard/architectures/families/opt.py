"""opt: learned positions from 2 on; the smaller ones project in and out, and 350m normalises after
each part.

transformers' blocks, a module class of our own.
"""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.parts import attention, linear, norms
from edgeshard.architectures.record import Architecture, Ends, Library, Plugged, Shapes, SizeKeys
from edgeshard.architectures.shape import ModelShape
from edgeshard.domain.models.model import Part

POSITION_OFFSET = 2
_EPS = 1e-5


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden = shape.hidden_size
    inner = fields.size("ffn_dim")
    bias = fields.flag("enable_bias")
    block = attention(shape, input_bias=bias, output_bias=bias, output="out_proj")
    block |= linear("fc1", inner, hidden, bias) | linear("fc2", hidden, inner, bias)
    if fields.flag("layer_norm_elementwise_affine"):
        block |= norms(hidden, "self_attn_layer_norm", "final_layer_norm", bias=True)
    return block


def _token_width(fields: ConfigFields, shape: ModelShape) -> int:
    return fields.size("word_embed_proj_dim")


def _outer(fields: ConfigFields, shape: ModelShape) -> Shapes:
    hidden, token_width = shape.hidden_size, _token_width(fields, shape)
    outer: Shapes = {"embed_positions.weight": (shape.max_context + POSITION_OFFSET, hidden)}
    if token_width != hidden:
        outer |= linear("project_in", hidden, token_width) | linear(
            "project_out", token_width, hidden
        )
    has_norm = fields.flag("do_layer_norm_before") and not fields.flag("_remove_final_layer_norm")
    if has_norm and fields.flag("layer_norm_elementwise_affine"):
        outer |= norms(hidden, "final_layer_norm", bias=True)
    return outer


ARCHITECTURE = Architecture(
    name="opt",
    defaults={
        "activation_function": "relu",
        "word_embed_proj_dim": "hidden_size",
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    keys=SizeKeys(kv_heads="num_attention_heads", head_dim=""),
    activation="activation_function",
    flags=(
        "do_layer_norm_before",
        "_remove_final_layer_norm",
        "enable_bias",
        "layer_norm_elementwise_affine",
    ),
    sizes=("ffn_dim", "word_embed_proj_dim"),
    numbers=(),
    rope=None,
    prefixes=("model.", "decoder."),
    embedding_width=_token_width,
    outer_names={
        "embed_positions.weight": Part.EMBEDDING,
        "project_in.weight": Part.EMBEDDING,
        "final_layer_norm.weight": Part.HEAD,
        "final_layer_norm.bias": Part.HEAD,
        "project_out.weight": Part.HEAD,
    },
    outer=_outer,
    block=_block,
    library=Library("opt", "OPT"),
    runs=Plugged(modules="opt"),
    ends=lambda fields, shape: Ends(_EPS),
    quantises=False,
)
