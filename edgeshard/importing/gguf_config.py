"""What a GGUF file's metadata says of a model, as a config.json; and its tensors' names in a checkpoint.

llama.cpp converts checkpoints of some families with changes: rows of queries and keys of its `llama` are in another
order, and 1 is added to the norms of gemma. A family is here only if all of them are undone.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.domain.errors import InvalidArgumentError, UnsupportedModelError
from edgeshard.importing.gguf_file import GgufFile

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
_TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: by how much each rotary frequency is divided."""


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family of llama.cpp. `permuted`: rows of queries and keys are in its order; `unit_norms`: norms have 1 more.
    `config` adds what only this family has."""

    norms: Mapping[str, str]
    config: Callable[[_Fields], dict[str, Any]]
    permuted: bool = False
    unit_norms: bool = False


class _Fields:
    """The metadata of one architecture, typed."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file = file
        self._prefix = prefix

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self._prefix}.{key}")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and value == [value[0]] * len(value):
            value = value[0]  # by layer, and all alike
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._refuse(key, "is missing or not one positive integer for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self._refuse(key, "is missing or no positive number")
        # A float32 of the file, as the shortest decimal that means the same.
        shorter = (float(f"{value:.{digits}g}") for digits in range(1, 17))
        return next((short for short in shorter if _float32(short) == value), float(value))

    def _refuse(self, key: str, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self.file.path.name}: {self._prefix}.{key} {what}", field=key, reason="MALFORMED_CHECKPOINT"
        )


def family_of(file: GgufFile) -> GgufFamily:
    """Raises UnsupportedModelError, by name, for an architecture that cannot be read from a GGUF file."""
    name = file.metadata.get("general.architecture")
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"{file.path.name}: architecture {str(name)[:40]!r} cannot be read from a GGUF file; EdgeShard reads "
            f"{', '.join(_FAMILIES)} (other families: add the checkpoint as safetensors)",
            field="general.architecture",
            reason="UNSUPPORTED_GGUF",
        )
    return _FAMILIES[name]


def check_whole(file: GgufFile) -> None:
    """Raise UnsupportedModelError for a part of a file, an adapter or a mixture of experts."""
    metadata, name = file.metadata, file.path.name
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{name} is one of {metadata['split.count']} parts; put them together first (llama-gguf-split --merge)",
            field="split.count",
            reason="SPLIT_GGUF",
        )
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedModelError(f"{name} is no model, but of type {metadata['general.type']}", field="general.type")
    if any("_exps." in tensor or ".ffn_gate_inp" in tensor for tensor in file.tensors):
        raise UnsupportedModelError(
            f"{name} has experts, which EdgeShard does not read from a GGUF file; add the checkpoint as safetensors",
            field="expert_count",
            reason="UNSUPPORTED_GGUF",
        )


def config_of(file: GgufFile) -> dict[str, Any]:
    """The config.json of the model. Raises as `family_of` does, and for metadata that is missing or contradictory."""
    check_whole(file)
    family, name = family_of(file), file.metadata["general.architecture"]
    fields = _Fields(file, name)
    heads = fields.size("attention.head_count")
    hidden = fields.size("embedding_length")
    config: dict[str, Any] = {
        "model_type": name,
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
    if (eos := _eos(file)) is not None:
        config["eos_token_id"] = eos
    return config | family.config(fields)


def checkpoint_name(file: GgufFile, tensor: str) -> str | None:
    """What the tensor is called in a checkpoint; None for one that is not a weight of the decoder."""
    if tensor in _OUTSIDE:
        return _OUTSIDE[tensor]
    found = _BLOCK.fullmatch(tensor)
    names = {**_IN_BLOCK, **family_of(file).norms}
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
        raise InvalidArgumentError(
            f"{file.path.name} has no matrix token_embd.weight",
            field="token_embd.weight",
            reason="MALFORMED_CHECKPOINT",
        )
    return embedding.shape[0]


def _eos(file: GgufFile) -> int | None:
    value = file.metadata.get("tokenizer.ggml.eos_token_id")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


# -- what families have of their own -----------------------------------------------------------------------------------


def _rope(fields: _Fields) -> dict[str, Any]:
    """Rotary embedding: its base, and how it is stretched beyond the context of training."""
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.get("rope.scaling.type")
    entry: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind in (None, "none"):
        # Written by older converters without a type.
        factor = fields.number("rope.scale_linear", 1.0)
        if factor != 1.0:
            entry |= {"rope_type": "linear", "factor": factor}
    elif kind == "linear":
        entry |= {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
    elif kind == "yarn":
        entry |= {"rope_type": "yarn", "factor": fields.number("rope.scaling.factor")}
        entry["original_max_position_embeddings"] = fields.size("rope.scaling.original_context_length")
    else:
        raise UnsupportedModelError(
            f"{fields.file.path.name}: rope.scaling.type {str(kind)[:40]!r} is not supported; add the checkpoint as "
            "safetensors",
            field="rope.scaling.type",
            reason="UNSUPPORTED_GGUF",
        )
    return entry


def _llama(fields: _Fields) -> dict[str, Any]:
    """llama.cpp's `llama` is mistral's older models too: they differ in nothing but a window, which it ignores."""
    biased = any(name.endswith("attn_q.bias") for name in fields.file.tensors)
    entry = _rope(fields)
    factors = fields.file.tensors.get(ROPE_FACTORS)
    if factors is not None:
        entry |= _llama3(fields, factors.shape[-1])
    return {"hidden_act": "silu", "attention_bias": biased, "rope_parameters": entry}


def _qwen3(fields: _Fields) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False, "rope_parameters": _rope(fields)}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _llama3(fields: _Fields, dims: int) -> dict[str, Any]:
    """The rule of llama 3.1 and later that gives the file's rotary factors; refused where none does."""
    factors = _read_floats(fields.file)
    theta = fields.number("rope.freq_base", 10_000.0)
    largest = max(factors)
    if not all(0 < factor < math.inf for factor in factors):
        largest = 0.0
    for factor in {round(largest), round(largest, 2)}:
        expected = [_llama3_factor(theta, index, 2 * dims, float(factor)) for index in range(dims)]
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)):
            return {"rope_type": "llama3", "factor": float(factor), **_LLAMA3}
    raise UnsupportedModelError(
        f"{fields.file.path.name}: its rotary factors follow no rule that EdgeShard knows; add the checkpoint as "
        "safetensors",
        field=ROPE_FACTORS,
        reason="UNSUPPORTED_GGUF",
    )


def _llama3_factor(theta: float, index: int, dims: int, factor: float) -> float:
    """As llama.cpp's converter computes it from config.json."""
    wavelength: float = 2 * math.pi * theta ** (2 * index / dims)
    low, high, trained = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"], 8192
    if wavelength < trained / high:
        return 1.0
    if wavelength > trained / low:
        return factor
    smooth = (trained / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _read_floats(file: GgufFile) -> list[float]:
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.type != "F32" or tensor.size > 4096:
        raise InvalidArgumentError(f"{file.path.name}: {ROPE_FACTORS} is no small list of float32", field=ROPE_FACTORS)
    with file.path.open("rb") as stream:
        stream.seek(tensor.offset)
        values = struct.unpack(f"<{tensor.size // 4}f", stream.read(tensor.size))
    return [float(value) for value in values]


_GEMMA3_27B_LAYERS = 62


def _gemma3(fields: _Fields) -> dict[str, Any]:
    """The scale of queries is in no GGUF file: llama.cpp knows the one model where it is not the heads' width."""
    head_dim = fields.size("attention.key_length", 256)
    layers, hidden, heads = (fields.size(key) for key in ("block_count", "embedding_length", "attention.head_count"))
    full: dict[str, Any] = _rope(fields)
    sliding = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA3_27B_LAYERS else head_dim,
        "sliding_window": fields.size("attention.sliding_window"),
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "final_logit_softcapping": None,
    }


_FAMILIES = {
    "llama": GgufFamily(_TWO_NORMS, _llama, permuted=True),
    "qwen2": GgufFamily(_TWO_NORMS, _qwen3),
    "qwen3": GgufFamily(_TWO_NORMS, _qwen3),
    "gemma3": GgufFamily(_FOUR_NORMS, _gemma3, unit_norms=True),
}
