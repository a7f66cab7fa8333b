"""Models that people run on clusters are planned from only their config.json, wherever it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from edgeshard.cli.commands.deployments.plan_inputs import Asked, offline_problem, read_model
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.planning.search.plan import plan as best_plan
from edgeshard.proto.v1 import admin_pb2
from tests.support.hub_server import point_at, serving
from tools.draw_architecture import MODELS, read_cards, refusal

PUBLISHED = MODELS / "published"
CARDS = {card["config"]: card for card in read_cards() if "config" in card}
CLUSTER = """
source = "box-1"

[[device]]
name = "box"
kind = "h200"
count = 12

[[link]]
bandwidth_bps = 10e9
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CARDS)
def test_each_card_is_planned_or_refused_by_its_config_alone(name: str, cluster: Path) -> None:
    path = PUBLISHED / f"{name}.json"
    if not path.exists():
        pytest.skip("there is no config.json of it yet")
    if why := refusal(CARDS[name]):
        with pytest.raises(UnsupportedModelError, match=why.partition(" is ")[0]):
            read_model(str(path))
        return
    problem, _ = offline_problem(cluster, Asked(str(path), options={"objective": "latency"}))
    found = best_plan(problem)
    assert (
        found.prediction is not None and found.prediction.cut.ends[-1] == problem.model.layer_count
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["minimax-m2.7", "gpt-oss-20b", "gemma-4-31b"])
def test_both_commands_answer_alike(edgectl: Any, cluster: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "config.json"
    path.parent.mkdir()
    shutil.copy(PUBLISHED / f"{name}.json", path)
    planned = edgectl("plan", "--cluster", str(cluster), "--model", str(path), "-o", "json")
    added = edgectl("model", "add", str(path), "--dry-run", "--cluster", str(cluster), "-o", "json")
    assert (planned.exit_code, added.exit_code) == (0, 0), planned.output + added.output
    assert json.loads(planned.stdout) == json.loads(added.stdout)
    assert json.loads(planned.stdout)["model"] == name
    stored = "note: its weights would be stored as "
    assert (stored in planned.stderr) == ("as bfloat16 its weights take" not in added.stderr)
    assert stored in planned.stderr or name != "minimax-m2.7", "whose weights are FP8"
    whole = edgectl(
        "plan",
        "--cluster",
        str(cluster),
        "--model",
        str(path.parent),
        "--quantise",
        "int4",
        "-o",
        "json",
    )
    assert whole.exit_code == 0 and stored not in whole.stderr


def test_a_refused_model_is_refused_by_both(edgectl: Any, cluster: Path) -> None:
    path = str(PUBLISHED / "gemma-4-e4b.json")
    for command in (("plan", "--model"), ("model", "add", "--dry-run")):
        result = edgectl(*command, path, "--cluster", str(cluster))
        assert (
            result.exit_code == 2
            and "text_config.hidden_size_per_layer_input is 256" in result.stderr
        )


def test_a_model_of_the_hub_is_planned_before_it_is_fetched(
    edgectl: Any, site: Any, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    shutil.copy(PUBLISHED / "llama-3.2-1b.json", repository / "config.json")
    (repository / "model.safetensors").write_bytes(b"weights that nobody asks for")
    with serving() as hub:
        hub.repositories["someone/Llama-3.2-1B"] = repository
        point_at(hub.address, tmp_path / "cache", monkeypatch)
        offline = edgectl(
            "plan", "--cluster", str(cluster), "--model", "someone/Llama-3.2-1B", "-o", "json"
        )
        assert offline.exit_code == 0, offline.output
        assert json.loads(offline.stdout)["model"] == "llama-3.2-1b"
        assert edgectl("plan", "--cluster", str(cluster), "--model", "someone/else").exit_code == 3
        assert set(hub.served) == {"config.json"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    site.measured(a=1e-3, b=5e-4)
    result = edgectl("plan", "--model", "someone/Llama-3.2-1B", "-o", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["feasible"] and json.loads(result.stdout)["measured"] == []
    assert "estimated by data sheets or by other models' measurements: a, b" in result.stderr
    assert [request.model for request in site.sent(admin_pb2.GetSiteRequest)] == [""]


def test_options_of_a_plan_hold_for_a_model_that_is_not_in_the_store(
    edgectl: Any, site: Any
) -> None:
    site.measured(a=1e-3, b=5e-4)
    model = ("plan", "--model", str(PUBLISHED / "qwen3-0.6b.json"))
    alone = edgectl(*model, "--source", "a", "--exclude", "b", "-o", "name")
    assert alone.stdout == "a=0:28\n", alone.output
    assert "--prompt-tokens and --new-tokens not given" in alone.stderr
    for option in (("--source", "z"), ("--exclude", "z"), ("--head-on-source",)):
        result = edgectl(*model, *option)
        assert result.exit_code in (2, 3) and option[0].strip("-")[:6] in result.stderr


def test_nodes_that_nobody_measured_are_named_with_what_can_be_done(
    edgectl: Any, site: Any
) -> None:
    site.measured(a=1e-3)
    result = edgectl("plan", "--model", str(PUBLISHED / "qwen3-0.6b.json"))
    assert result.exit_code == 0
    assert (
        "note: b: left out, not measured for any model; run `edgectl profile b --model NAME`"
        in result.stderr
    )
