"""GGUF files made of the demo model with the gguf package's own writer, as llama.cpp's converter
would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

_Type = gguf.GGMLQuantizationType
DEMO = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
Choose = Callable[[str], gguf.GGMLQuantizationType]
"""The type of a tensor, by its name in the file."""


def demo_weights() -> dict[str, np.ndarray]:
    """The demo model's tensors by the names of its checkpoint."""
    return {
        name: tensor.float().numpy()
        for name, tensor in load_file(DEMO / "model.safetensors").items()
    }


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.weight"
    _, _, index, inner = stem.split(".", 3)
    return f"blk.{index}.{_BLOCK[inner]}.weight"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of queries or keys in llama.cpp's order: a head's two halves take turns."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def everywhere(kind: gguf.GGMLQuantizationType) -> Choose:
    return lambda name: gguf.GGMLQuantizationType.F32 if "norm" in name else kind


def mixed(name: str) -> gguf.GGMLQuantizationType:
    """Types as llama.cpp mixes them: single matrices have more bits, and small ones are whole."""
    if "norm" in name:
        return _Type.F32
    if name.endswith(("attn_v.weight", "ffn_down.weight", "token_embd.weight")):
        return _Type.Q6_K
    special = {
        "blk.1.attn_q.weight": _Type.Q5_K,
        "blk.2.ffn_up.weight": _Type.Q8_0,
        "blk.3.attn_output.weight": _Type.F16,
        "blk.4.ffn_gate.weight": _Type.IQ4_XS,
    }
    return special.get(name, _Type.Q4_K)


_RANDOM = {_Type.Q4_K: (0, 2), _Type.Q5_K: (0, 2), _Type.Q6_K: (208,), _Type.IQ4_XS: (0,)}
"""Types that the gguf package does not write, and where the float16 numbers of a block begin."""


def _blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of random integers, whose numbers are about as large as weights."""
    inputs, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(shape[0])
    blocks = generator.integers(0, 256, (shape[0], shape[1] // inputs, size), np.uint8)
    for first in _RANDOM[kind]:
        scales = generator.uniform(0, 1e-4, blocks.shape[:2]).astype(np.float16)
        blocks[..., first : first + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_demo_gguf(
    path: Path, choose: Choose, template: str | None = TEMPLATE, **metadata: Any
) -> Path:
    config = json.loads((DEMO / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(10_000.0)
    add_sentencepiece(writer, template)
    for key, value in metadata.items():
        if key == "ends":
            writer.add_array("tokenizer.ggml.eos_token_ids", value)
        else:
            writer.add_uint32(key.replace("__", "."), value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in demo_weights().items():
        kind = choose(gguf_name(name))
        part = name.split(".")[-2]
        rows = permuted(weight, heads[part]) if part in heads else weight
        data = (
            _blocks(rows.shape, kind)
            if kind in _RANDOM
            else gguf.quantize(np.ascontiguousarray(rows), kind)
        )
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_sentencepiece(writer: gguf.GGUFWriter, template: str | None = TEMPLATE) -> None:
    """The demo's vocabulary as pieces with scores, from its merges in their order."""
    model = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    rank: dict[str, int] = {}
    for position, merge in enumerate(model["merges"]):
        rank.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ")), position)
    kinds = [
        gguf.TokenType.UNKNOWN
        if token == "<unk>"
        else gguf.TokenType.CONTROL
        if token in ("<s>", "</s>")
        else gguf.TokenType.BYTE
        if len(token) == 6 and token.startswith("<0x")
        else gguf.TokenType.NORMAL
        for token in tokens
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(rank.get(token, len(tokens))) for token in tokens])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    if template is not None:
        writer.add_chat_template(template)
