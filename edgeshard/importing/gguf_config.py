"""The config.json of a model from the metadata of its GGUF file; and the names of its tensors in a checkpoint."""

from __future__ import annotations

import re
import struct
from typing import Any

from edgeshard.architectures.gguf import ROPE_FACTORS, Gguf, GgufFields
from edgeshard.architectures.registry import RECORDS
from edgeshard.domain.errors import InvalidArgumentError, UnsupportedModelError
from edgeshard.importing.gguf_file import GgufFile
from edgeshard.storage.forms import malformed

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
_READ = {name: record.gguf for name, record in RECORDS.items() if record.gguf is not None}


def form_of(file: GgufFile) -> Gguf:
    """The record of the file's architecture. Raises UnsupportedModelError, by name, for one that cannot be read."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _READ:
        raise UnsupportedModelError(
            f"{file.path.name}: architecture {str(name)[:40]!r} cannot be read from a GGUF file; EdgeShard reads "
            f"{', '.join(_READ)} (other families: add the checkpoint as safetensors)",
            field="general.architecture",
            reason="UNSUPPORTED_GGUF",
        )
    return _READ[name]


def check_whole(file: GgufFile) -> None:
    """Raise UnsupportedModelError for an adapter or a mixture of experts."""
    metadata, name = file.metadata, file.path.name
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedModelError(
            f"{name} is not a model, but a file of type {metadata['general.type']}", field="general.type"
        )
    if any("_exps." in tensor or ".ffn_gate_inp" in tensor for tensor in file.tensors):
        raise UnsupportedModelError(
            f"{name} has experts, which EdgeShard does not read from a GGUF file; add the checkpoint as safetensors",
            field="expert_count",
            reason="UNSUPPORTED_GGUF",
        )


def config_of(file: GgufFile) -> dict[str, Any]:
    """The config.json of the model. Raises as `form_of` does, and for metadata that is missing or contradictory."""
    check_whole(file)
    form = form_of(file)
    fields = GgufFields(file.path.name, file.metadata, frozenset(file.tensors), _rope_factors(file))
    heads = fields.size("attention.head_count")
    hidden = fields.size("embedding_length")
    config: dict[str, Any] = {
        "model_type": file.metadata["general.architecture"],
        "hidden_size": hidden,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": fields.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": fields.size("attention.key_length", max(1, hidden // heads)),
        "vocab_size": _vocabulary(file),
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if fields.size("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModelError(
            f"{file.path.name}: keys and values differ in width", field="attention.value_length"
        )
    if type(eos := file.metadata.get("tokenizer.ggml.eos_token_id")) is int:
        config["eos_token_id"] = eos
    return config | form.config(fields)


def checkpoint_name(file: GgufFile, tensor: str) -> str | None:
    """The tensor's name in a checkpoint; None for one that is not a weight of the decoder.

    Raises UnsupportedModelError for one that the architecture has no place for.
    """
    if tensor in _OUTSIDE:
        return _OUTSIDE[tensor]
    found = _BLOCK.fullmatch(tensor)
    names = {**_IN_BLOCK, **form_of(file).norms}
    if found is not None and found[2] in names:
        return f"model.layers.{int(found[1])}.{names[found[2]]}.{found[3]}"
    if tensor == ROPE_FACTORS:
        return None
    raise UnsupportedModelError(
        f"{file.path.name}: tensor {tensor[:80]} has no place in a {file.metadata['general.architecture']}; "
        "add the checkpoint as safetensors",
        field=tensor[:80],
        reason="UNEXPECTED_TENSOR",
    )


def _vocabulary(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise malformed(file.path.name, "has no matrix token_embd.weight", "token_embd.weight")
    return embedding.shape[0]


def _rope_factors(file: GgufFile) -> tuple[float, ...]:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    if tensor.type != "F32" or tensor.size > 4096:
        raise InvalidArgumentError(
            f"{file.path.name}: {ROPE_FACTORS} must be a small list of float32", field=ROPE_FACTORS
        )
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.offset)
        return struct.unpack(f"<{tensor.size // 4}f", stream.read(tensor.size))
