"""edgectl get and describe: every output, and what an operator sees."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from edgeshard.deployment import DeploymentPhase
from edgeshard.errors import ResourceExhaustedError


def test_nodes_as_a_table(edgectl: Any) -> None:
    result = edgectl("get", "nodes")
    assert result.exit_code == 0
    header, first, second = result.stdout.splitlines()
    assert header.split() == ["NAME", "STATUS", "DEVICE", "CORES", "BUDGET", "FREE", "STAGES"]
    assert first.split() == ["a", "connected", "cpu", "4", "4", "GiB", "3", "GiB", "tales/0:4"]
    assert second.split()[:2] == ["b", "away"]


@pytest.mark.parametrize("noun", ["nodes", "models", "deployments"])
def test_tables_fit_in_80_columns(edgectl: Any, noun: str) -> None:
    assert max(len(line.rstrip()) for line in edgectl("get", noun).stdout.splitlines()) <= 80


def test_wide_has_more_columns_and_is_never_cut(edgectl: Any) -> None:
    lines = edgectl("get", "models", "-o", "wide").stdout.splitlines()
    assert "DIGEST" in lines[0] and "d" * 64 in lines[1]


@pytest.mark.parametrize(
    ("noun", "names"), [("nodes", "a\nb\n"), ("models", "fairy-tales\n"), ("deployments", "tales\n")]
)
def test_names_one_a_line(edgectl: Any, noun: str, names: str) -> None:
    assert edgectl("get", noun, "-o", "name").stdout == names


def test_json_and_yaml_say_the_same(edgectl: Any) -> None:
    as_json = json.loads(edgectl("get", "nodes", "-o", "json").stdout)
    assert as_json == yaml.safe_load(edgectl("get", "nodes", "-o", "yaml").stdout)
    assert as_json[0]["name"] == "a" and as_json[0]["facts"]["memory_budget_bytes"] == 4 << 30
    assert as_json[0]["stages"][0]["layers"] == "0:4"
    assert as_json[1]["connected"] is False


def test_an_empty_list_is_valid_json_and_a_note_on_stderr(edgectl: Any, site: Any) -> None:
    site.nodes = []
    assert json.loads(edgectl("get", "nodes", "-o", "json").stdout) == []
    result = edgectl("get", "nodes")
    assert (result.stdout, result.stderr) == ("", "none\n")


def test_a_deployments_json_holds_its_spec_and_failure(edgectl: Any, site: Any) -> None:
    failure = ResourceExhaustedError("box b lacks 2 GiB", field="b", reason="BOX_MEMORY")
    site.states = [site.deployment_in(DeploymentPhase.FAILED, failure)]
    value = json.loads(edgectl("describe", "deployment", "tales", "-o", "json").stdout)
    assert value["phase"] == "failed"
    assert value["failure"] == {"reason": "BOX_MEMORY", "field": "b", "message": "box b lacks 2 GiB"}
    assert value["spec"]["dtype"] == "float32"
    assert [stage["layers"] for stage in value["placement"]["stages"]] == ["0:4", "4:9"]


def test_describe_node(edgectl: Any) -> None:
    text = edgectl("describe", "node", "a").stdout
    assert "Budget:       4 GiB for stages, 3 GiB free" in text
    assert "tales" in text.splitlines()[-1]


def test_describe_deployment_shows_why_it_failed_and_who_holds_what(edgectl: Any, site: Any) -> None:
    failure = ResourceExhaustedError("box b lacks 2 GiB", field="b", reason="BOX_MEMORY")
    site.states = [site.deployment_in(DeploymentPhase.FAILED, failure)]
    text = edgectl("describe", "deployment", "tales").stdout
    assert "BOX_MEMORY: box b lacks 2 GiB" in text
    assert [line.split()[:2] for line in text.splitlines()[-2:]] == [["a", "0:4"], ["b", "4:9"]]


def test_describe_model(edgectl: Any) -> None:
    text = edgectl("describe", "model", "fairy-tales").stdout
    assert "6.52M (6520000)" in text and "12.4 MiB in bfloat16" in text


@pytest.mark.parametrize("noun", ["node", "model", "deployment"])
def test_describe_as_a_name(edgectl: Any, noun: str) -> None:
    name = {"node": "a", "model": "fairy-tales", "deployment": "tales"}[noun]
    assert edgectl("describe", noun, name, "-o", "name").stdout == f"{name}\n"


@pytest.mark.parametrize("noun", ["node", "model", "deployment"])
def test_describing_what_does_not_exist_exits_3(edgectl: Any, site: Any, noun: str) -> None:
    site.states = []
    result = edgectl("describe", noun, "zebra", "-o", "json")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
