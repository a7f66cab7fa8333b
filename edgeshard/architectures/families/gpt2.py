"""gpt2: learned positions, LayerNorm, weights stored transposed; transformers' blocks, a module
class of our own."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.parts import norms
from edgeshard.architectures.record import Architecture, Ends, Library, Plugged, Shapes, SizeKeys
from edgeshard.architectures.shape import ModelShape
from edgeshard.domain.models.model import Part


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden = shape.hidden_size
    inner = fields.size("n_inner", 4 * hidden)
    block = norms(hidden, "ln_1", "ln_2", bias=True)
    # Conv1D stores its weight transposed: (in, out).
    for name, width_in, width_out in (
        ("attn.c_attn", hidden, 3 * hidden),
        ("attn.c_proj", hidden, hidden),
        ("mlp.c_fc", hidden, inner),
        ("mlp.c_proj", inner, hidden),
    ):
        block |= {f"{name}.weight": (width_in, width_out), f"{name}.bias": (width_out,)}
    return block


def _outer(fields: ConfigFields, shape: ModelShape) -> Shapes:
    return {"wpe.weight": (shape.max_context, shape.hidden_size)} | norms(
        shape.hidden_size, "ln_f", bias=True
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.size("n_inner", 1)
    fields.flag("scale_attn_weights", True)


ARCHITECTURE = Architecture(
    name="gpt2",
    defaults={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 50256,
    },
    keys=SizeKeys("n_layer", "n_embd", "n_head", "n_head", "", "n_positions"),
    activation="activation_function",
    flags=("scale_attn_by_inverse_layer_idx",),
    sizes=(),
    numbers=("layer_norm_epsilon",),
    refused={"reorder_and_upcast_attn": "is set, which is not supported; set it to false"},
    checks=(_check,),
    rope=None,
    prefixes=("transformer.",),
    block_list="h",
    computed=("attn.bias", "attn.masked_bias"),
    embedding="wte.weight",
    outer_names={"wpe.weight": Part.EMBEDDING, "ln_f.weight": Part.HEAD, "ln_f.bias": Part.HEAD},
    outer=_outer,
    block=_block,
    library=Library("gpt2", "GPT2", layer="GPT2Block"),
    runs=Plugged(modules="gpt2"),
    ends=lambda fields, shape: Ends(fields.number("layer_norm_epsilon")),
    quantises=False,
)
