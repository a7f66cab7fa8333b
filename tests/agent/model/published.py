"""Published config.json files with small numbers: the keys stay, so that the reading of real files
is tested.

`shrunk` keeps every key of the file. It only replaces sizes, token ids and lists that have an entry
for each layer. Widths that are equal in the file stay equal, because a square matrix can hide a
mistake. A part for pictures is replaced by one as small as its class allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

PUBLISHED = Path(__file__).parents[2] / "architectures" / "published"
LAYERS = 4
MORE_LAYERS = {"gemma-3-4b": 6, "gemma-3-1b": 6}
"""Files whose class repeats a pattern of more layers, which no key of theirs shortens."""
HIDDEN = 32

_WIDTHS = (
    "hidden_size", "n_embd", "block_dim", "conv_dim", "conv_dim_out", "word_embed_proj_dim",
    "intermediate_size", "ffn_dim", "n_inner", "block_ff_dim", "intermediate_size_mlp",
    "moe_intermediate_size", "expert_intermediate_size", "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim",
    "share_expert_dims",
)  # fmt: skip
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_NARROW = (40, 24, 48, 20, 28, 56)
_NUMBERS: dict[str, int | float] = {
    "vocab_size": 61,
    "org_vocab_size": 61,
    "vocab_size_per_layer_input": 61,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "model_max_length": 64,
    "max_seq_len": 64,
    "initial_context_length": 16,
    "original_max_position_embeddings": 12,
    "sliding_window": 6,
    "attention_chunk_size": 16,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "block_multiple_of": 8,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "max_window_layers": 2,
    "moe_layer_end_index": LAYERS - 1,
    "kv_lora_rank": 20,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_ssm": 64,
    "mamba_d_head": 8,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "mamba_state_dim": 12,
    "ssm_state_size": 12,
    "state_size": 12,
    "chunk_size": 8,
}
_UP_TO = {
    "sliding_window_pattern": 2,
    "_sliding_window_pattern": 2,
    "layer_switch": 2,
    "full_attention_interval": 2,
    "no_rope_layer_interval": 2,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "mamba_num_groups": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "experts_per_token": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "num_global_key_value_heads": 2,
}
_TOKENS = (
    "bos_token_id",
    "pad_token_id",
    "sep_token_id",
    "eod_token_id",
    "pad_id",
    "decoder_start_token_id",
)
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_attention_groups")
_INDICES = ("attn_layer_indices", "full_attn_idxs", "mlp_only_layers")
_NOT_BY_LAYER = (
    "eos_token_id",
    "architectures",
    "time_step_limit",
    "mlp_multipliers",
    "ssm_multipliers",
)
_FACTORS = ("short_factor", "long_factor")
_VISION = {
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "out_hidden_size": HIDDEN,
    "projection_dim": 16,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "image_size": 28,
    "patch_size": 14,
}


def published_names() -> list[str]:
    return sorted(path.stem for path in PUBLISHED.glob("*.json"))


def published_config(name: str) -> dict[str, Any]:
    """The file as it is."""
    config: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    return config


def shrunk(config: Mapping[str, Any], layers: int = LAYERS) -> dict[str, Any]:
    """The config.json of a model of `layers` small layers that has the keys of `config`."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        small = _Shrinking(config, layers).object(config) | {"initializer_range": 0.15}
        return _with_small_parts(small)
    nested = {**_class_sizes(nested), **nested}
    small = {key: value for key, value in config.items() if key != "text_config"}
    small["initializer_range"] = 0.15
    small["text_config"] = _Shrinking(nested, layers).object(nested) | {"initializer_range": 0.15}
    return _with_small_parts(_Shrinking({}, layers).object(small))


def _class_sizes(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a `text_config`'s class for omitted keys; they are the sizes of a large
    model."""
    values = CONFIG_MAPPING[decoder["model_type"]]().to_dict()
    return {key: values[key] for key in _SIZES if values.get(key) is not None}


def _with_small_parts(config: dict[str, Any]) -> dict[str, Any]:
    """The parts for pictures and sound in their smallest form."""
    if isinstance(vision := config.get("vision_config"), Mapping):
        kept = {key: vision[key] for key in ("model_type", "hidden_act") if key in vision}
        config["vision_config"] = kept | _VISION
        if config["model_type"] == "qwen2_vl":  # its vision part calls the width of the text so
            config["vision_config"]["hidden_size"] = HIDDEN
    config.pop("audio_config", None)
    return config


class _Shrinking:
    """The numbers of one file's decoder, `decoder`, in small."""

    def __init__(self, decoder: Mapping[str, Any], layers: int) -> None:
        self.decoder, self.layers = decoder, layers
        self.old_layers = next((decoder[key] for key in _LAYER_COUNTS if key in decoder), 0)
        hybrid = decoder.get("hybrid_override_pattern")
        if isinstance(hybrid, str):
            self.old_layers = len(hybrid)
        further = decoder.get("num_nextn_predict_layers") or 0
        self.further = further if type(further) is int else 0
        self.heads = next((decoder[key] for key in _HEADS if key in decoder), 0)
        self.hidden = next((decoder[key] for key in ("hidden_size", "n_embd") if key in decoder), 0)
        self.widths: dict[int, int] = {}
        for key in _WIDTHS:
            for value in decoder[key] if isinstance(decoder.get(key), list) else [decoder.get(key)]:
                if type(value) is int and value > 0 and value not in self.widths:
                    self.widths[value] = _NARROW[len(self.widths) - 1] if self.widths else HIDDEN
        self.chosen = self._chosen_layers()

    def _by_layer(self, value: object) -> bool:
        lengths = {self.old_layers, self.old_layers + self.further}
        return isinstance(value, list | str) and len(value) in lengths and self.old_layers > 1

    def _chosen_layers(self) -> list[int]:
        """Layers of the file so that every kind of them is there."""
        lists = [
            value
            for key, value in self.decoder.items()
            if self._by_layer(value) and key not in _NOT_BY_LAYER and key != "model_type"
        ]
        first: dict[str, int] = {}
        for layer in range(self.old_layers):
            first.setdefault(json.dumps([value[layer] for value in lists]), layer)
        chosen = list(first.values())[: self.layers]
        last, types = self.old_layers - 1, self.decoder.get("layer_types")
        # some classes fix the kind of the last
        if isinstance(types, list) and types[-1] != types[max(chosen)]:
            chosen = [*chosen[: self.layers - 1], last]
        left = [layer for layer in range(self.old_layers) if layer not in chosen]
        return sorted(chosen + left[: self.layers - len(chosen)])

    def object(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self.value(key, value) for key, value in values.items()}

    def value(self, key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return (
                value if key in ("text_config", "vision_config", "auto_map") else self.object(value)
            )
        if isinstance(value, list):
            return self._list(key, value)
        if key == "hybrid_override_pattern":
            return "".join(value[layer] for layer in self.chosen)
        if key == "moe_layers_enum" and isinstance(value, str):
            sparse = {int(item) for item in value.split(",")}
            return ",".join(
                str(index) for index, layer in enumerate(self.chosen) if layer in sparse
            )
        if type(value) not in (int, float) or key == "model_type":
            return value
        return self._number(key, value)

    def _list(self, key: str, value: list[Any]) -> list[Any]:
        if key == "eos_token_id":
            return [3, 5][: len(value)]
        if key == "mrope_section":
            pairs = self._rotary_pairs()
            return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        if key in _FACTORS:
            return value[: self._rotary_pairs()]
        if key in _INDICES:
            return [index for index, layer in enumerate(self.chosen) if layer in value] or (
                [1] if value else []
            )
        if key in ("full_attn_layers", "kda_layers"):  # these begin at 1
            return [index + 1 for index, layer in enumerate(self.chosen) if layer + 1 in value]
        if key in _NOT_BY_LAYER or not self._by_layer(value):
            return value
        kept = [*(value[layer] for layer in self.chosen), *value[self.old_layers :]]
        return [
            self._number(key, item) if type(item) is int and key in self.decoder else item
            for item in kept
        ]

    def _number(self, key: str, value: Any) -> Any:
        if key in _LAYER_COUNTS:
            return self.layers
        if key in _WIDTHS and value:
            return self.widths[value]
        if key in _HEADS:  # layers with more heads have a quarter more
            return 4 if value == self.heads else 6
        if key in _KV_HEADS:
            return 4 if value == self.heads else min(value, 2)
        if (
            key in ("num_heads", "mamba_n_heads")
            and value == self.heads
            and "state_size" not in self.decoder
        ):
            return 4 if key == "num_heads" else 8
        if key == "num_heads":
            return 8 if "state_size" in self.decoder else 3
        if key in ("head_dim", "true_head_dim", "attention_head_dim", "global_head_dim"):
            return self._head_dim(key, value)
        if key == "rotary_dim":
            return (
                self._head_dim("head_dim", self.decoder["head_dim"])
                * value
                // self.decoder["head_dim"]
            )
        if key in _TOKENS or key == "eos_token_id":
            return {"eos_token_id": 3}.get(key, 4)
        if key in _UP_TO:
            return min(value, _UP_TO[key])
        if key in ("linear_num_value_heads", "linear_num_key_heads") and value == self.decoder.get(
            "linear_num_key_heads"
        ):
            return 2
        return _NUMBERS.get(key, value) if value else value

    def _head_dim(self, key: str, value: int) -> int:
        if "state_size" in self.decoder or "linear_attn_config" in self.decoder:
            return 8
        if key == "global_head_dim":
            return 24
        if self._sections():
            return 32
        return HIDDEN // 4 if value * self.heads == self.hidden else 16

    def _sections(self) -> bool:
        entries = (self.decoder.get("rope_scaling"), self.decoder.get("rope_parameters"))
        return any(isinstance(entry, Mapping) and "mrope_section" in entry for entry in entries)

    def _rotary_pairs(self) -> int:
        """Half the dimensions of a small head that rotate."""
        given = self.decoder.get("head_dim")
        head_dim = self._head_dim("head_dim", given) if given else HIDDEN // 4
        entries: Sequence[Any] = [
            self.decoder,
            self.decoder.get("rope_parameters"),
            self.decoder.get("rope_scaling"),
        ]
        shares = [
            entry["partial_rotary_factor"]
            for entry in entries
            if entry and "partial_rotary_factor" in entry
        ]
        return int(head_dim * (shares[0] if shares else 1.0)) // 2
