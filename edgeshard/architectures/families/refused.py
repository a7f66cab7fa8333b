"""Families that are known and not run, by the reason, which continues "model_type X is not supported: it"."""

from __future__ import annotations

from collections.abc import Mapping

_NOT_HELD = "which EdgeShard's KV pool does not hold"
_RECURRENT = f"keeps a recurrent state per request besides keys and values, {_NOT_HELD}"
_LATENT = f"keeps a compressed (latent) state per token in place of keys and values, {_NOT_HELD}"

REFUSED: Mapping[str, tuple[str, ...]] = {
    _RECURRENT: (
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
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
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "longcat_flash",
        "youtu",
    ),
}
