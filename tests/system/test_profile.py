"""Nodes that measured themselves: an operator profiles a site, reads the figures, plans with them,
deploys the plan."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from edgeshard.client import StoredProfile
from edgeshard.domain.deployments.deployment import parse_spec
from tests.support.site import Site

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
SPEC = {
    "name": "tales",
    "model": "fairy-tales",
    "source": "a",
    "concurrency": 2,
    "max_context": 256,
}

pytestmark = [pytest.mark.in_order, pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]


class Measured(Site):
    """Two nodes, the output of `edgectl profile` about them, and the earlier output of
    `edgectl plan`."""

    planned_before: tuple[int, str, str]
    profiled: tuple[int, str, str]

    async def edgectl(self, *arguments: str) -> tuple[int, str, str]:
        return await edgectl(self.address, *arguments)

    async def data(self, *arguments: str) -> Any:
        code, stdout, stderr = await self.edgectl(*arguments, "-o", "json")
        assert code == 0, stderr
        return json.loads(stdout)

    async def profiles(self, name: str) -> tuple[StoredProfile, ...]:
        return (await self.client.node_details(name)).profiles

    async def until_counted(self, requests: int) -> None:
        """A client may have its last token a moment before the coordinator counts the request."""
        async with asyncio.timeout(30):
            while True:
                if (await self.client.deployment("tales")).traffic.requests >= requests:
                    return
                await asyncio.sleep(0.01)


async def edgectl(address: str, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edgeshard.cli.main", "--coordinator", address, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(200):
        stdout, stderr = await process.communicate()
    return process.returncode or 0, stdout.decode(), stderr.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Measured]:
    directory = tmp_path_factory.mktemp("measured")
    async with Measured(directory, ("a", "b"), models={"fairy-tales": DEMO_MODEL}) as site:
        site.planned_before = await site.edgectl("plan", "--model", "fairy-tales", "--source", "a")
        site.profiled = await site.edgectl(
            "profile", "--model", "fairy-tales", "--quick", "-o", "json"
        )
        yield site


async def test_before_anything_is_measured_the_plan_says_how_to(site: Measured) -> None:
    code, stdout, stderr = site.planned_before
    assert (code, stdout) == (1, "")
    assert "a, b" in stderr and "edgectl profile --model fairy-tales" in stderr


async def test_profiling_measures_every_node_and_every_direction(site: Measured) -> None:
    code, stdout, stderr = site.profiled
    assert code == 0, stderr
    rows = {row["node"]: row for row in json.loads(stdout)}
    assert set(rows) == {"a", "b"} and "a: measured" in stderr and "b: measured" in stderr
    for node, other in (("a", "b"), ("b", "a")):
        assert rows[node]["failure"] is None and rows[node]["profile"]["effort"] == "quick"
        assert {layer["kind"] for layer in rows[node]["profile"]["layers"]} == {
            "embedding",
            "block",
            "head",
        }
        (link,) = rows[node]["links"]
        assert (link["from"], link["to"]) == (node, other) and link["bandwidth_bps"] > 1e6


async def test_describe_node_shows_it(site: Measured) -> None:
    value = await site.data("describe", "node", "a")
    (profile,) = value["profiles"]
    assert (
        profile["models"] == ["fairy-tales"]
        and profile["dtype"] == "bfloat16"
        and profile["age_s"] < 600
    )
    assert all(sample["seconds"] > 0 for layer in profile["layers"] for sample in layer["decode"])
    assert {(link["from"], link["to"]) for link in value["links"]} == {("a", "b"), ("b", "a")}
    text = (await site.edgectl("describe", "node", "a"))[1]
    assert "Profile of fairy-tales in bfloat16, measured" in text and "decode by sequences" in text


async def test_the_plan_stands_on_what_was_measured(site: Measured) -> None:
    plan = await site.data("plan", "--model", "fairy-tales", "--source", "a")
    assert plan["feasible"] and plan["placement"].startswith("a=0:") and plan["figures"] == {}
    assert plan["measured"] == [stage["node"] for stage in plan["stages"]]
    # Not faster than only the blocks on their nodes, by the nodes' own measurements.
    profiles = {row["node"]: row["profile"] for row in json.loads(site.profiled[1])}
    floor = sum(
        layers_of(stage) * quickest_block(profiles[stage["node"]]) for stage in plan["stages"]
    )
    assert plan["time_per_token_s"] > 0.5 * floor > 0
    rows = await site.data("plan", "--model", "fairy-tales", "--source", "a", "--compare")
    assert (
        rows[-1]["strategy"] == "edgeshard"
        and rows[-1]["time_per_token_s"] == plan["time_per_token_s"]
    )


def layers_of(stage: dict[str, Any]) -> int:
    first, _, end = str(stage["layers"]).partition(":")
    return int(end) - int(first)


def quickest_block(profile: dict[str, Any]) -> float:
    blocks = (layer for layer in profile["layers"] if layer["kind"] == "block")
    return min(float(sample["seconds"]) for layer in blocks for sample in layer["decode"])


async def test_quantised_nodes_are_measured_and_planned_by_that(site: Measured) -> None:
    quantised = parse_spec(SPEC | {"quantisation": {"*": "int8"}})
    assert "--quantise int8" in (await site.client.plan(quantised)).note, (
        "times of whole weights are no times"
    )
    rows = await site.data("profile", "--model", "fairy-tales", "--quick", "--quantise", "int8")
    assert {row["profile"]["quantisation"] for row in rows} == {"int8"}
    assert len((await site.data("describe", "node", "a"))["profiles"]) == 2, (
        "one does not take the other's place"
    )
    plan = await site.data("plan", "--model", "fairy-tales", "--source", "a", "--quantise", "int8")
    assert plan["feasible"] and plan["figures"] == {} and plan["quantisation"] == "int8"
    placement = await site.client.plan(quantised)
    assert placement.predicted is not None


async def test_deploying_uses_the_plan_and_keeps_its_prediction(site: Measured) -> None:
    dry = await site.data("deploy", "tales", "--model", "fairy-tales", "--source", "a", "--dry-run")
    assert dry["predicted"]["time_per_token_s"] > 0 and dry["predicted"]["bottleneck"]
    deployed = await site.client.deploy(parse_spec(SPEC))
    assert (
        deployed.placement.predicted is not None and deployed.placement.predicted.throughput_tps > 0
    )
    assert "Predicted:" in (await site.edgectl("describe", "deployment", "tales"))[1]
    assert (await site.client.complete("tales", "Once upon a time", max_new_tokens=8)).text
    await site.until_counted(1)
    text = (await site.edgectl("describe", "deployment", "tales"))[1]
    assert "(the default: no lengths were given and no traffic was seen)" in " ".join(text.split())
    assert (
        "1 request:" in text
        and "answers of 8 tokens on average" in " ".join(text.split())
        and "Expected:" in text
    )


async def test_what_a_deployment_served_is_what_the_next_one_of_its_name_is_planned_for(
    site: Measured,
) -> None:
    served = (await site.client.deployment("tales", outlook=True)).traffic
    await site.client.delete_deployment("tales")
    again = (await site.client.deploy(parse_spec(SPEC))).placement.predicted
    assert again is not None and again.lengths == "seen"
    assert (again.prompt_tokens, again.new_tokens) == (int(served.prompts.mean), 8)
    await site.client.delete_deployment("tales")


async def test_a_node_that_joins_is_measured_by_itself_like_the_others(site: Measured) -> None:
    profiled = {
        (p.profile.dtype, p.profile.quantisation, p.profile.effort)
        for p in await site.profiles("a")
    }
    starting = asyncio.create_task(site.cluster.start_agent("c"))
    seen: set[tuple[int, int]] = set()
    async with asyncio.timeout(180):
        while True:
            nodes = {str(node.name): node for node in await site.client.nodes()}
            if "c" in nodes and nodes["c"].placeable:
                seen.add((nodes["c"].unknown_profiles, nodes["c"].unknown_links))
                if not any(node.unknown_profiles or node.unknown_links for node in nodes.values()):
                    break
            await asyncio.sleep(0.1)
    await starting
    assert (len(profiled), 2) in seen, "until it was measured, that was said"
    assert all(links == 0 for profiles, links in seen if profiles < len(profiled)), (
        "links come first"
    )
    assert {
        (p.profile.dtype, p.profile.quantisation, p.profile.effort)
        for p in await site.profiles("c")
    } == profiled
    value = await site.data("describe", "node", "c")
    assert {(link["from"], link["to"]) for link in value["links"]} == {
        ("a", "c"),
        ("b", "c"),
        ("c", "a"),
        ("c", "b"),
    }
    assert value["unknown"] == {"profiles": [], "links": []}
    header, *rows = (await site.edgectl("get", "nodes"))[1].splitlines()
    assert [row[header.index("UNKNOWN") : header.index("STAGES")].strip() for row in rows] == [
        "-",
        "-",
        "-",
    ]
