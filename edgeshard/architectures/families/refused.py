"""Families that are known and not run, by the reason, which continues "model_type X is not
supported: it"."""

from __future__ import annotations

from collections.abc import Mapping

_NOT_HELD = "which EdgeShard's KV pool does not hold"
_RECURRENT = f"keeps a recurrent state per request besides keys and values, {_NOT_HELD}"
_LATENT = f"keeps a compressed (latent) state per token in place of keys and values, {_NOT_HELD}"
_INDEXED = f"{_LATENT}, and chooses positions by an indexer with keys of its own"
_COMPRESSED = (
    f"keeps keys and values of whole spans of tokens beside those of a window, {_NOT_HELD}"
)

REFUSED: Mapping[str, tuple[str, ...]] = {
    _RECURRENT: (
        "falcon_mamba",
        "jamba",
        "mamba",
        "minimax",
        "olmo_hybrid",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    ),
    _LATENT: (
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
        "kimi_k2",
        "kimi_k25",
        "longcat_flash",
        "youtu",
    ),
    _INDEXED: ("deepseek_v32", "glm_moe_dsa"),
    _COMPRESSED: ("deepseek_v4",),
}
