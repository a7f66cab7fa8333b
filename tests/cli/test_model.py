"""edgectl model add: which names are accepted, and the errors before anything is added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from tests.support.gguf_files import DEMO, everywhere, write_demo_gguf
from tests.support.model_stores import OllamaFolder

CLUSTER = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "hpipe-testbed.toml"


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """The config of a model like llama2-7b."""
    return {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
    }


def test_a_dry_run_needs_the_config_alone(
    edgectl: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "big" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    for model in (path, path.parent):
        result = edgectl("model", "add", str(model), "--dry-run", "--cluster", str(CLUSTER))
        assert result.exit_code == 0, result.output
        assert (
            "a llama of 6,738 M parameters; as bfloat16 its weights take 12.6 GiB" in result.stderr
        )
        assert "tokens/s" in result.stdout.lower() or "per token" in result.stdout.lower()
        assert "auto_map" not in result.stderr
    path.write_text(json.dumps({**config, "auto_map": {"AutoConfig": "x.Config"}}))
    result = edgectl("model", "add", str(path), "--dry-run", "--cluster", str(CLUSTER))
    assert (
        "note: its config.json names its own code (auto_map), which is neither fetched nor run"
        in result.stderr
    )
    path.write_text(json.dumps({**config, "num_hidden_layers": 400}))
    result = edgectl("model", "add", str(path), "--dry-run", "--cluster", str(CLUSTER))
    assert result.exit_code == 1, "nothing fits"


def test_a_dry_run_on_the_site_estimates_by_what_other_models_took(
    edgectl: Any, site: Any, tmp_path: Path
) -> None:
    site.measured(a=1e-3, b=5e-4)
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    result = edgectl("model", "add", str(tmp_path), "--dry-run", "-o", "json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["feasible"] and values["placement"]
    assert "by other models' measurements: a, b" in result.stderr


def test_a_dry_run_of_a_gguf_file_says_how_it_would_run(
    edgectl: Any, site: Any, tmp_path: Path
) -> None:
    site.measured(a=1e-3, b=5e-4)
    path = write_demo_gguf(tmp_path / "demo.gguf", everywhere(Type.Q4_0))
    result = edgectl("model", "add", str(path), "--dry-run", "-o", "json")
    assert result.exit_code == 0, result.output
    assert "as int4-head-int4 with bfloat16 its weights take" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./nothing",), "no such file or directory"),
        (
            ("nothing",),
            "neither a directory, a .gguf file, OWNER/NAME, ollama:NAME nor lmstudio:NAME",
        ),
        ((str(DEMO), "--width", "int3"), "--width 'int3' is unknown: use one of int4, int8"),
        ((str(DEMO), "--cluster", str(CLUSTER)), "--cluster and --source go with --dry-run"),
    ],
)
def test_mistakes_are_named(edgectl: Any, arguments: tuple[str, ...], message: str) -> None:
    result = edgectl("model", "add", *arguments)
    assert result.exit_code in (2, 3) and message in result.stderr


def test_a_dry_run_takes_a_model_of_another_program(
    edgectl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = OllamaFolder(tmp_path / "models")
    monkeypatch.setenv("OLLAMA_MODELS", str(store.folder))
    weights = write_demo_gguf(tmp_path / "demo.gguf", everywhere(Type.Q8_0)).read_bytes()
    store.add("tales/1b", weights)
    file = tmp_path / ".lmstudio" / "models" / "ann" / "tales" / "tales.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(weights)
    cluster = tmp_path / "nodes.toml"
    cluster.write_text(
        'source = "a"\n[[device]]\nname = "a"\nkind = "rtx-3090"\n[[link]]\nbandwidth_bps = 1e9\n'
    )
    for model in ("ollama:tales:1b", "lmstudio:ann/tales"):
        for command in (("model", "add", model, "--dry-run"), ("plan", "--model", model)):
            result = edgectl(*command, "--cluster", str(cluster))
            assert result.exit_code == 0, result.output
        missing = edgectl("plan", "--model", f"{model}x", "--cluster", str(cluster))
        assert (
            missing.exit_code != 0
            and "tales" in missing.stderr
            and "has no model" in missing.stderr
        )
    for words in (["model", "add"], ["deploy", "x", "--model"], ["run"], ["serve"]):
        result = edgectl(*words, "ollama:nothing")
        assert result.exit_code != 0 and "it has tales:1b" in result.stderr, (words, result.stderr)
