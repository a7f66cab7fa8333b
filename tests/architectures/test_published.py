"""The config.json of published models, as they are: each is accepted, and its tensors are those of the checkpoint.

`published/` has them as public code quotes them. Counts of parameters are the sums of the published tensors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from edgeshard.architectures import ARCHITECTURES, expected_tensors, parse_config
from edgeshard.importing.quantised import without_quantisation

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = Path(__file__).parent / "published"

MODELS: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = {
    # The Hub counts 228,703,644,928: with a scale for each of the 128 x 128 blocks of FP8.
    "minimax-m2.5": (
        228_703_644_928 - 13_880_064,
        {
            "layers.61.self_attn.q_norm.weight": (6144,),
            "layers.61.self_attn.k_norm.weight": (1024,),
            "layers.0.block_sparse_moe.gate.weight": (256, 3072),
            "layers.0.block_sparse_moe.e_score_correction_bias": (256,),
            "layers.61.block_sparse_moe.experts.255.w2.weight": (3072, 1536),
            "lm_head.weight": (200_064, 3072),
        },
    ),
    "minimax-m2.7": (228_689_764_864, {}),
    # With the three further blocks 199.4 billion, as on its page.
    "step-3.5-flash": (
        196_956_130_368,
        {
            "layers.0.self_attn.q_proj.weight": (64 * 128, 4096),
            "layers.1.self_attn.q_proj.weight": (96 * 128, 4096),
            "layers.1.self_attn.g_proj.weight": (96, 4096),
            "layers.2.mlp.down_proj.weight": (4096, 11_264),
            "layers.44.moe.gate_proj.weight": (288, 1280, 4096),
            "layers.44.moe.router_bias": (288,),
            "layers.44.share_expert.up_proj.weight": (1280, 4096),
        },
    ),
    # Its text has the sizes of Qwen3-4B.
    "qwen3-vl-4b": (4_022_468_096, {"layers.35.self_attn.q_norm.weight": (128,)}),
}
"""The number of parameters, and some tensors with their shapes."""


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    return without_quantisation(config)


def test_every_file_is_in_the_table() -> None:
    assert {path.stem for path in PUBLISHED.glob("*.json")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_published_config_is_accepted_with_its_tensors(name: str) -> None:
    parameters, some = MODELS[name]
    found = {tensor.name: tensor.shape for tensor in expected_tensors(config_of(name)).values()}
    assert sum(math.prod(shape) for shape in found.values()) == parameters
    assert {tensor: found.get(tensor) for tensor in some} == some


def test_a_context_is_the_published_one() -> None:
    assert parse_config(config_of("minimax-m2.7")).max_context == 204_800


def test_documents_name_every_family() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.partition("## Families")[2].partition("\n## ")[0]
    listed = f"{len(ARCHITECTURES)} run: {', '.join(ARCHITECTURES)}."
    assert listed in " ".join(section.split())
    assert f"of {len(ARCHITECTURES)} families" in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
