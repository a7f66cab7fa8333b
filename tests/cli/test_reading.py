"""edgectl get and describe: every output, and an operator's view."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import yaml

from edgeshard.domain.control.site import UnknownFigures, UnknownProfile
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.deployments.guesses import ExpectedGuesses
from edgeshard.domain.deployments.placement import ExplicitStage, Prediction, Speculation
from edgeshard.domain.deployments.traffic import NO_TRAFFIC, Outlook
from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.ids import ModelName, NodeName
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageSwap
from edgeshard.proto.v1 import admin_pb2
from tests.support.scripted_site import deployment, stage_status


def test_nodes_as_a_table(edgectl: Any) -> None:
    result = edgectl("get", "nodes")
    assert result.exit_code == 0
    header, first, second = result.stdout.splitlines()
    assert header.split() == [
        "NAME",
        "STATUS",
        "DEVICE",
        "CORES",
        "BUDGET",
        "FREE",
        "UNKNOWN",
        "STAGES",
    ]
    assert first.split() == ["a", "connected", "cpu", "4", "4", "GiB", "3", "GiB", "-", "tales/0:4"]
    assert second.split()[:2] == ["b", "away"]


@pytest.mark.parametrize(
    ("profiles", "links", "starting", "text"),
    [
        (0, 0, False, "-"),
        (1, 0, False, "profile"),
        (0, 1, False, "link"),
        (1, 2, False, "profile, 2 links"),
        (3, 0, False, "3 profiles"),
        (0, 0, True, "all"),
    ],
)
def test_nodes_say_what_is_not_measured_of_them(
    edgectl: Any, site: Any, profiles: int, links: int, starting: bool, text: str
) -> None:
    site.nodes[0] = replace(
        site.nodes[0], unknown_profiles=profiles, unknown_links=links, starting=starting
    )
    header, first, _ = edgectl("get", "nodes").stdout.splitlines()
    assert first[header.index("UNKNOWN") : header.index("STAGES")].strip() == text
    assert len(first.rstrip()) <= 80
    shown = json.loads(edgectl("get", "nodes", "-o", "json").stdout)[0]
    assert (shown["unknown_profiles"], shown["unknown_links"]) == (profiles, links)


def test_describe_node_names_what_is_not_measured(edgectl: Any, site: Any) -> None:
    assert "Unknown:      -\n" in edgectl("describe", "node", "a").stdout
    int8 = UnknownProfile(
        (ModelName("tales"), ModelName("fables")), DType.FLOAT32, Quantisation.parse("int8")
    )
    profiles = (
        UnknownProfile((ModelName("fairy-tales"),), DType.BFLOAT16),
        int8,
        UnknownProfile((), DType.FLOAT16),
    )
    site.unknown = UnknownFigures(profiles, (NodeName("b"), NodeName("c")))
    text = " ".join(edgectl("describe", "node", "a").stdout.split())
    assert (
        "Unknown: profile of fairy-tales in bfloat16, tales or fables in int8 with float32, a "
        "model that is no longer "
        "in the store in float16; links to b, c" in text
    )
    unknown = json.loads(edgectl("describe", "node", "a", "-o", "json").stdout)["unknown"]
    assert unknown["links"] == ["b", "c"]
    assert unknown["profiles"][1] == {
        "models": ["tales", "fables"],
        "dtype": "float32",
        "quantisation": "int8",
    }


@pytest.mark.parametrize("noun", ["nodes", "models", "deployments"])
def test_tables_fit_in_80_columns(edgectl: Any, noun: str) -> None:
    assert max(len(line.rstrip()) for line in edgectl("get", noun).stdout.splitlines()) <= 80


def test_wide_has_more_columns_and_is_never_cut(edgectl: Any) -> None:
    lines = edgectl("get", "models", "-o", "wide").stdout.splitlines()
    assert "DIGEST" in lines[0] and "d" * 64 in lines[1]


@pytest.mark.parametrize(
    ("noun", "names"),
    [("nodes", "a\nb\n"), ("models", "fairy-tales\n"), ("deployments", "tales\n")],
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
    failure = ResourceExhaustedError("node b lacks 2 GiB", field="b", reason="NODE_MEMORY")
    site.states = [site.deployment_in(DeploymentPhase.FAILED, failure)]
    value = json.loads(edgectl("describe", "deployment", "tales", "-o", "json").stdout)
    assert value["phase"] == "failed"
    assert value["failure"] == {
        "reason": "NODE_MEMORY",
        "field": "b",
        "message": "node b lacks 2 GiB",
    }
    assert value["spec"]["dtype"] == "float32"
    assert [stage["layers"] for stage in value["placement"]["stages"]] == ["0:4", "4:9"]


def test_describe_node(edgectl: Any) -> None:
    text = edgectl("describe", "node", "a").stdout
    assert "Budget:       4 GiB for stages, 3 GiB free" in text
    assert "tales" in text.splitlines()[-1]
    assert "Bits:         541e66e42b93265a" in text
    assert "Huge pages:   1.10 GiB of 1.17 GiB" in text
    assert "Huge pages" not in edgectl("describe", "node", "b").stdout, (
        "a node that is away says nothing of them"
    )


def test_describe_deployment_shows_why_it_failed_and_who_holds_what(
    edgectl: Any, site: Any
) -> None:
    failure = ResourceExhaustedError("node b lacks 2 GiB", field="b", reason="NODE_MEMORY")
    site.states = [site.deployment_in(DeploymentPhase.FAILED, failure)]
    text = edgectl("describe", "deployment", "tales").stdout
    assert "NODE_MEMORY: node b lacks 2 GiB" in text
    assert [line.split()[:2] for line in text.splitlines()[-2:]] == [["a", "0:4"], ["b", "4:9"]]


def test_describe_deployment_says_what_is_kept_aside(edgectl: Any, site: Any) -> None:
    status = stage_status(StagePhase.ACTIVE)
    site.states = [deployment(DeploymentPhase.READY, stages=(status,))]
    assert "KV ASIDE" not in edgectl("describe", "deployment", "tales").stdout
    site.states = [
        deployment(
            DeploymentPhase.READY, stages=(replace(status, swap=StageSwap(4096, 1024, 3, 2)),)
        )
    ]
    lines = edgectl("describe", "deployment", "tales").stdout.splitlines()
    (at,) = (index for index, line in enumerate(lines) if "KV ASIDE" in line)
    assert lines[at].split("  ")[0] == "NODE" and lines[at + 1].split() == [
        "a",
        "1",
        "KiB",
        "4",
        "KiB",
        "3",
        "2",
    ]


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


def test_describe_node_shows_what_was_measured_of_it(edgectl: Any, site: Any) -> None:
    site.measured(a=1e-3, b=5e-4)
    text = edgectl("describe", "node", "a").stdout
    assert "Profile of fairy-tales in bfloat16, measured 1 h ago:" in text
    block = text.partition("  block: 12 of ")[2]
    assert "prefill by tokens: 1: 1.02 ms, 64: 2.00 ms, 256: 5.00 ms  (fit within" in block
    assert (
        "decode by sequences, 64 positions: 1: 1.06 ms, 4: 1.25 ms, 8: 1.50 ms  (fit within"
        in block
    )
    assert "repeats differ by 2.0% at most" in block
    links = [line.split() for line in text.splitlines() if "Mb/s" in line]
    assert [line[:4] for line in links] == [["a", "b", "2.00", "ms"], ["b", "a", "2.00", "ms"]]
    assert links[0][-3:] == ["2", "min", "ago"]


def test_describe_node_as_json_has_every_sample(edgectl: Any, site: Any) -> None:
    site.measured(b=5e-4)
    value = json.loads(edgectl("describe", "node", "b", "-o", "json").stdout)
    assert value["name"] == "b" and value["facts"]["cores"] == 4
    assert value["huge_pages"] is None
    pages = json.loads(edgectl("describe", "node", "a", "-o", "json").stdout)["huge_pages"]
    assert pages == {"wanted_bytes": 1200 << 20, "held_bytes": 1130 << 20}
    (profile,) = value["profiles"]
    assert (profile["models"], profile["dtype"], profile["age_s"]) == (
        ["fairy-tales"],
        "bfloat16",
        3600,
    )
    assert profile["layers"][1]["decode"][0] == {
        "count": 1, "context": 64, "seconds": 5e-4 * (1 + 1 / 16), "spread": 0.02, "repeats": 9,
    }  # fmt: skip
    assert [(link["from"], link["to"], link["age_s"]) for link in value["links"]] == [
        ("a", "b", 130),
        ("b", "a", 130),
    ]


PREDICTED = Prediction(
    0.04, 0.0123, 81.3, "compute of b takes 8 ms of the 12.3 ms a token needs", 0.02
)


def test_a_deployment_shows_what_was_predicted_of_it_and_the_note(edgectl: Any, site: Any) -> None:
    ready = site.deployment_in(DeploymentPhase.READY)
    noted = replace(ready.placement, predicted=PREDICTED, note="node c is away")
    site.states = [replace(ready, placement=noted)]
    site.placement = noted
    deploy = ("deploy", "tales", "--model", "fairy-tales", "--source", "a")
    for arguments in (("describe", "deployment", "tales"), deploy, (*deploy, "--dry-run")):
        text = edgectl(*arguments).stdout
        assert "12.3 ms per token, 81.30 tokens/s, first token after 40.0 ms" in text, arguments
        assert (
            "compute of b takes 8 ms" in text
            and "at most 2.00 %" in text
            and "node c is away" in text
        )
    as_json = json.loads(edgectl(*deploy, "--dry-run", "-o", "json").stdout)
    assert as_json["predicted"]["throughput_tps"] == 81.3 and as_json["note"] == "node c is away"


@pytest.mark.parametrize(
    ("guesses", "words"),
    [
        (None, "draft tokens are used, and no answer changes; none were seen yet for this model"),
        (ExpectedGuesses(7, 0.625, 1.64), "and no answer changes: up to 7 in a step; a single "
                                          "request gets 1.6 times "
         "the tokens/s if 62 % are accepted, the observed share"),
        (ExpectedGuesses(1, 0.5, 1.2), "changes: one in a step; a single request gets 1.2 times"),
        (ExpectedGuesses(0, 0.5, 1.0), "changes: none pays here; 50 % of those seen were right"),
        (ExpectedGuesses(7, 0.5), "changes: 50 % of those seen were right; what rows cost here is "
                                  "not measured"),
    ],
)  # fmt: skip
def test_a_placement_says_what_guesses_are_worth(
    edgectl: Any, site: Any, guesses: ExpectedGuesses | None, words: str
) -> None:
    guessing = replace(site.placement, speculation=Speculation.GUESSES, guesses=guesses)
    site.placement = guessing
    site.states = [replace(site.deployment_in(DeploymentPhase.READY), placement=guessing)]
    deploy = ("deploy", "tales", "--model", "fairy-tales", "--source", "a")
    for arguments in (("describe", "deployment", "tales"), deploy, (*deploy, "--dry-run")):
        assert words in " ".join(edgectl(*arguments).stdout.split()), arguments
    as_json = json.loads(edgectl(*deploy, "--dry-run", "-o", "json").stdout)
    assert as_json["speculation"] == "apart" and as_json["guesses"] == (
        None if guesses is None else asdict(guesses)
    )
    off = replace(guessing, speculation=Speculation.STATES)
    site.states = [replace(site.states[0], placement=off)]
    assert "off: no memory for the states after draft tokens" in " ".join(
        edgectl(*deploy).stdout.split()
    )


def test_a_deployment_without_a_prediction_says_nothing_of_one(edgectl: Any) -> None:
    text = edgectl("describe", "deployment", "tales").stdout
    assert "Predicted" not in text and "Note" not in text


SEEN = NO_TRAFFIC.after(3000, 90, 3).after(3001, 110, 3)
EXPECTED = replace(
    PREDICTED, objective="request", requests=1, prompt_tokens=3000, new_tokens=100, request_s=8.0
)


def with_outlook(site: Any, outlook: Outlook, **spec: Any) -> None:
    ready = site.deployment_in(DeploymentPhase.READY)
    site.states = [replace(ready, traffic=SEEN, outlook=outlook, spec=replace(ready.spec, **spec))]


def test_a_deployment_shows_what_it_served_and_what_would_serve_that_better(
    edgectl: Any, site: Any
) -> None:
    assert (
        "Traffic:" in (text := edgectl("describe", "deployment", "tales").stdout)
        and "none yet" in text
    )
    layers = (ExplicitStage(NodeName("a"), LayerRange(0, 9)),)
    better = Outlook(EXPECTED, replace(EXPECTED, request_s=2.0), layers, 0.75)
    with_outlook(site, better)
    text = " ".join(edgectl("describe", "deployment", "tales").stdout.split())
    assert site.sent(admin_pb2.GetDeploymentRequest)[-1].outlook, (
        "asked for by describe alone, since it costs time"
    )
    assert (
        "2 requests, 3.0 at once on average: prompts of 3001 tokens on average, half up to 4096, 9 "
        "of 10 up to 4096;" in text
    )
    assert "answers of 100 tokens on average, half up to 128" in text
    assert "8.00 s a request for one request of 3000 tokens in and 100 out" in text
    assert "a=0:9: 2.00 s a request, 75 % less; `edgectl replan tales` moves it there" in text
    with_outlook(site, better, prompt_tokens=5, layers=layers)
    text = " ".join(edgectl("describe", "deployment", "tales").stdout.split())
    assert "deploy it again without layers with --prompt-tokens 3000 --new-tokens 100" in text
    as_json = json.loads(edgectl("describe", "deployment", "tales", "-o", "json").stdout)
    assert as_json["outlook"]["gain"] == 0.75 and as_json["traffic"]["requests"] == 2


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("throughput", "81.30 tokens/s"),
        ("ttft", "first token after 40.0 ms"),
        ("latency", "12.3 ms per token"),
    ],
)
def test_what_is_expected_is_what_the_objective_is_about(
    edgectl: Any, site: Any, objective: str, words: str
) -> None:
    with_outlook(
        site,
        Outlook(replace(EXPECTED, objective=objective, requests=8), note="node c is not measured"),
    )
    text = " ".join(edgectl("describe", "deployment", "tales").stdout.split())
    assert f"Expected: {words} for 8 requests at once of 3000 tokens in and 100 out" in text
    assert "Not weighed: node c is not measured" in text and "Better" not in text
