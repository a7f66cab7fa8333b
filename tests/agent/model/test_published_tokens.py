"""Each published config.json, with its own keys and small numbers, gives transformers' tokens at
every cut.

transformers reads the file, builds a model and saves it. EdgeShard reads the same file and the same
weights.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.model.rotary import rotary_frequencies
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from edgeshard.architectures import check_manifest, expected_tensors, for_context, read_config
from edgeshard.architectures.record import Fused
from edgeshard.domain.models.model import LayerRange
from edgeshard.importing.quantised import without_quantisation
from tests.agent.model.conftest import Checkpoint, random_model, saved_checkpoint
from tests.agent.model.families import with_patches
from tests.agent.model.published import (
    LAYERS,
    MORE_LAYERS,
    published_config,
    published_names,
    shrunk,
)
from tests.agent.model.test_equivalence import run_packed, run_whole
from tests.support import forms

REFUSED = {"gemma-4-e2b", "gemma-4-e4b"}
"""Files of models that EdgeShard does not run."""
FOR_TRANSFORMERS: dict[str, dict[str, Any]] = {
    # It refuses the 4 of the file.
    "llama-4-maverick-17b-128e": {"attn_temperature_tuning": True},
    # Without the key it makes no LM head, which the checkpoint has.
    "mistral-small-3.1-24b": {"tie_word_embeddings": False},
    # Its form for prompts has no shorter step than this, its form for single tokens has.
    "nemotron-3-nano-30b-a3b": {"time_step_min": 1e-9},
    "nemotron-nano-9b-v2": {"time_step_min": 1e-9},
}
"""Values that transformers 5.23 gets in place of the file's."""
QUICK = {
    "exaone-3.5-2.4b",
    "glm-4.5v",
    "gpt-oss-20b",
    "minimax-m2.7",
    "olmo-3-7b",
    "qwen2.5-vl-7b",
    "qwen3-vl-30b-a3b",
}
"""The files of the quick form: families whose tokens were wrong, and families with keys or tensors
of their own."""


def small_config(name: str) -> dict[str, Any]:
    return without_quantisation(shrunk(published_config(name), MORE_LAYERS.get(name, LAYERS)))


EXAONE_KEYS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
EXAONE_TENSORS = {
    "model.layers": "transformer.h",
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "gate_proj": "c_fc_0",
    "up_proj": "c_fc_1",
    "down_proj": "c_proj",
}
"""Maps the names of EXAONE 3.5 to llama's: transformers has no class for it."""


def reference_config(name: str, path: Path) -> Any:
    """The config as transformers reads the file."""
    config = small_config(name)
    if config["model_type"] == "exaone":
        return LlamaConfig(
            **{
                EXAONE_KEYS.get(key, key): value
                for key, value in config.items()
                if key != "model_type"
            }
        )
    for key, value in FOR_TRANSFORMERS.get(name, {}).items():
        part = config if key == "tie_word_embeddings" else config.get("text_config", config)
        part[key] = value
    config.pop("auto_map", None)  # names code of the checkpoint
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = AutoConfig.from_pretrained(path)
    # it has no class for the text only
    return with_patches(found) if config["model_type"] == "step3p5" else found


def published_checkpoint(name: str, path: Path) -> Checkpoint:
    config = small_config(name)
    reference = reference_config(name, path)
    auto = (
        "AutoModelForImageTextToText"
        if hasattr(reference, "vision_config")
        else "AutoModelForCausalLM"
    )
    model = random_model(reference, auto)
    model.save_pretrained(path)
    if config["model_type"] == "exaone":
        rename_tensors(path / "model.safetensors", EXAONE_TENSORS)
    saved = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "exaone":
        assert arithmetic(saved) == arithmetic(config), (
            "transformers saves other keys for the same model"
        )
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return saved_checkpoint(model, path, config)


def arithmetic(config: dict[str, Any]) -> Any:
    """The part of EdgeShard's reading of a config.json that decides tokens."""
    decoder = read_config(config)
    record = decoder.architecture
    rotary = {}
    if isinstance(record.runs, Fused) and record.rope is not None:
        for kind, rotation in decoder.rotations().items():
            frequencies, scaling = rotary_frequencies(rotation)
            rotary[kind] = (frequencies.tolist(), scaling, rotation.growth)
    tensors = {name: tensor.shape for name, tensor in expected_tensors(config).items()}
    shape = replace(decoder.shape, eos_tokens=())
    return shape, decoder.windows(), rotary, tensors, record.ends(decoder.fields, decoder.shape)


def rename_tensors(file: Path, names: dict[str, str]) -> None:
    tensors = {}
    for name, tensor in load_file(file).items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    save_file(tensors, file)


def cuts(layers: int) -> list[tuple[LayerRange, ...]]:
    """All divisions of the layers into stages; in the quick form one stage, and a stage for each
    layer."""
    divisions = [
        tuple(LayerRange(a, b) for a, b in zip((0, *inner), (*inner, layers), strict=True))
        for count in range(layers)
        for inner in combinations(range(1, layers), count)
    ]
    return divisions if forms.LONG else [divisions[0], divisions[-1]]


def cases() -> list[Any]:
    """All files that run; in the quick form a few."""
    names = [name for name in published_names() if name not in REFUSED]
    assert set(names) >= QUICK
    return [
        pytest.param(name, marks=() if name in QUICK else (pytest.mark.long,)) for name in names
    ]


@pytest.mark.parametrize("name", ["phi-3.5-mini", "phi-4-mini"])
def test_a_short_context_has_the_short_factors(name: str, tmp_path: Path, tiny_head: Any) -> None:
    """transformers takes them if a sequence is no longer than the first training's context."""
    config = small_config(name)
    config["original_max_position_embeddings"] = 24
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = random_model(AutoConfig.from_pretrained(tmp_path, trust_remote_code=False))
    model.save_pretrained(tmp_path)
    checkpoint = saved_checkpoint(model, tmp_path, dict(for_context(config, 24)))
    for cut in cuts(LAYERS):
        assert (
            run_packed(checkpoint, [checkpoint.stage(layers) for layers in cut], tiny_head) == ""
        ), cut
    beyond = saved_checkpoint(model, tmp_path, dict(for_context(config, 25)))
    assert "Δlogit" in run_packed(beyond, [beyond.stage(LayerRange(0, LAYERS))], tiny_head)


@pytest.mark.parametrize("name", cases())
def test_a_published_config_gives_transformers_tokens_at_every_cut(
    name: str, tmp_path: Path, tiny_head: Any
) -> None:
    checkpoint = published_checkpoint(name, tmp_path)
    check_manifest(checkpoint.manifest)
    for cut in cuts(MORE_LAYERS.get(name, LAYERS)):
        assert (
            run_packed(checkpoint, [checkpoint.stage(layers) for layers in cut], tiny_head) == ""
        ), cut
        if len(cut) == 1:
            assert (
                run_whole(checkpoint, [checkpoint.stage(layers) for layers in cut], tiny_head) == ""
            )
