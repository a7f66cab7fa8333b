"""exaone (3.5): llama under names of its own, for keys and for tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeshard.architectures.families.llama import ARCHITECTURE as LLAMA
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf

_NAMES = {
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "num_layers": "num_hidden_layers",
}
_INNER = "intermediate_size"


def _current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values under the keys of llama, with the width inside the MLP that a file may leave
    out."""
    config = {_NAMES.get(key, key): value for key, value in values.items()}
    hidden = config.get("hidden_size")
    if config.get(_INNER) is None and type(hidden) is int:
        config[_INNER] = 4 * hidden
    return config


def _check(fields: ConfigFields, layer_count: int) -> None:
    for key in ("attention_bias", "mlp_bias"):  # keys of llama, which this family has not
        if fields.flag(key):
            raise fields.refuse(key, "is set, which exaone does not run")


ARCHITECTURE = replace(
    LLAMA,
    name="exaone",
    current=_current,
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    nested={},
    nested_defaults={},
    either_ties=frozenset(),
    checks=(_check,),
    prefixes=("transformer.", "model."),
    aliases=(
        (r"^h\.", "layers."),
        (r"^wte\.", "embed_tokens."),
        (r"^ln_f\.", "norm."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
        (r"\.attn\.attention\.", ".self_attn."),
        (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
        (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    ),
    gguf=Gguf(),
    models={},
)
