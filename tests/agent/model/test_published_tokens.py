"""Each published config.json, with its own keys and small numbers, gives transformers' tokens at every cut.

transformers reads the file, builds a model and saves it. EdgeShard reads the same file and the same weights.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from edgeshard.domain.models.model import LayerRange
from edgeshard.importing.quantised import without_quantisation
from tests.agent.model.conftest import Checkpoint, random_model, saved_checkpoint
from tests.agent.model.published import LAYERS, MORE_LAYERS, published_config, published_names, shrunk
from tests.agent.model.test_equivalence import run_packed, run_whole

REFUSED = {"gemma-4-e2b", "gemma-4-e4b"}
"""Files of models that EdgeShard does not run."""
NOT_READ_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama-4-maverick-17b-128e": {"attn_temperature_tuning": True},  # the file has a 4
}
"""Values with which transformers 5.23 reads a file that it refuses otherwise."""


def small_config(name: str) -> dict[str, Any]:
    return without_quantisation(shrunk(published_config(name), MORE_LAYERS.get(name, LAYERS)))


def reference_config(name: str, path: Path) -> Any:
    """What transformers reads of the file."""
    config = small_config(name)
    decoder = config.get("text_config", config)
    decoder |= NOT_READ_BY_TRANSFORMERS.get(name, {})
    config.pop("auto_map", None)  # names code of the checkpoint
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return AutoConfig.from_pretrained(path)


def published_checkpoint(name: str, path: Path) -> Checkpoint:
    config = small_config(name)
    auto = "AutoModelForImageTextToText" if "vision_config" in config else "AutoModelForCausalLM"
    model = random_model(reference_config(name, path), auto)
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return saved_checkpoint(model, path, config)


def cuts(layers: int) -> list[tuple[LayerRange, ...]]:
    """All divisions of the layers into stages."""
    return [
        tuple(LayerRange(a, b) for a, b in zip((0, *inner), (*inner, layers), strict=True))
        for count in range(layers)
        for inner in combinations(range(1, layers), count)
    ]


@pytest.mark.parametrize("name", [name for name in published_names() if name not in REFUSED])
def test_a_published_config_gives_transformers_tokens_at_every_cut(name: str, tmp_path: Path, tiny_head: Any) -> None:
    checkpoint = published_checkpoint(name, tmp_path)
    for cut in cuts(MORE_LAYERS.get(name, LAYERS)):
        assert run_packed(checkpoint, [checkpoint.stage(layers) for layers in cut], tiny_head) == "", cut
        if len(cut) == 1:
            assert run_whole(checkpoint, [checkpoint.stage(layers) for layers in cut], tiny_head) == ""
