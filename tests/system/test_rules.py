"""A node is killed while rules apply: its deployment continues within them, or waits and names the
rule.

It is placed by hand, by memory and, if nodes are measured, by CP-SAT in a process of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase, parse_spec
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.requests.generation import Token
from tests.support.site import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timing]
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
NODES = ("a", "b", "c", "d")
SPEC = {
    "name": "tales",
    "model": "tiny-tales",
    "source": "a",
    "dtype": "float32",
    "layers": "a=0:6,b=6:12",
    "concurrency": 2,
    "max_context": 128,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Four nodes. The agents of c and d report their labels, an operator sets the labels of a and
    b."""
    directory = tmp_path_factory.mktemp("rules")
    own = {"c": ("--labels", "zone=hall1,rack=r1"), "d": ("--labels", "zone=hall2,rack=r1")}
    async with Site(
        directory, NODES, models={"tiny-tales": DEMO_MODEL}, arguments_by_agent=own
    ) as site:
        for name in "ab":
            await site.client.label_node(name, {"zone": "hall1"})
        yield site


async def answer(client: Client) -> list[int]:
    stream = client.generate(
        "tales", "Once upon a time", max_new_tokens=12, ignore_eos=True, timeout_s=60
    )
    return [event.token async for event in stream if isinstance(event, Token)]


def used(deployment: Deployment) -> set[str]:
    return {str(stage.node_name) for stage in deployment.placement.stages}


async def back(site: Site, name: str) -> None:
    await site.cluster.start_agent(name)

    async def placeable() -> bool:
        return all(node.placeable for node in await site.client.nodes())

    await site.until(placeable)


async def test_labels_are_those_of_the_agents_and_of_the_operator(site: Site) -> None:
    labels = {str(node.name): dict(node.labels) for node in await site.client.nodes()}
    assert labels["a"] == {"zone": "hall1"} and labels["d"] == {"zone": "hall2", "rack": "r1"}


async def test_layers_by_hand_that_break_a_rule_are_refused(site: Site) -> None:
    with pytest.raises(InvalidArgumentError, match="apart a,b") as refused:
        await site.client.deploy(parse_spec({**SPEC, "rule": ["apart a,b"]}))
    assert refused.value.reason == "RULE_BROKEN" and await site.client.deployments() == ()


async def test_a_killed_node_is_replaced_within_the_rules(site: Site) -> None:
    await site.client.deploy(
        parse_spec({**SPEC, "rule": ["together by zone", "at-most 2 of a,b,c,d"]})
    )
    undisturbed = await answer(site.client)
    await site.cluster.agents["b"].kill()

    async def goes_on() -> bool:
        found = await site.client.deployment("tales")
        return found.phase is DeploymentPhase.READY and "b" not in used(found)

    await site.until(goes_on)
    assert await answer(site.client) == undisturbed
    nodes = used(await site.client.deployment("tales"))
    assert nodes <= {"a", "c"}, "d is in another hall"
    await back(site, "b")
    await site.client.delete_deployment("tales")


async def test_where_only_a_rule_could_be_broken_it_waits_names_the_rule_and_serves_again(
    site: Site,
) -> None:
    await site.client.deploy(parse_spec({**SPEC, "rule": ["avoid zone=hall2", "use b"]}))
    undisturbed = await answer(site.client)
    await site.cluster.agents["b"].kill()

    async def waits() -> bool:
        found = await site.client.deployment("tales")
        named = found.failure is not None and "'use b'" in found.failure.message
        return found.phase is DeploymentPhase.WAITING and named

    await site.until(waits)
    assert used(await site.client.deployment("tales")) == {"a", "b"}
    await back(site, "b")
    await site.client.wait_ready("tales", timeout_s=60)
    assert await answer(site.client) == undisturbed
    assert used(await site.client.deployment("tales")) == {"a", "b"}
    await site.client.delete_deployment("tales")


@pytest.mark.long
async def test_measured_nodes_are_planned_by_cpsat_and_a_killed_one_is_replaced_within_the_rules(
    site: Site,
) -> None:
    client, rules = site.client, ["use role=helper", "at-most 1 of role=helper", "together by zone"]
    for name in "bcd":
        await client.label_node(name, {"role": "helper"})

    async def is_idle() -> bool:
        return not any(node.stages for node in await client.nodes())

    await site.until(is_idle)
    async for seen in client.profile("tiny-tales", dtype=DType.FLOAT32, quick=True):
        assert seen.failure is None, seen
    by_hand = {**SPEC, "objective": "throughput", "rule": rules}
    planned = parse_spec({name: value for name, value in by_hand.items() if name != "layers"})
    placement = (await client.deploy(planned)).placement
    assert placement.predicted is not None and placement.predicted.together_tps is not None
    before = used(await client.deployment("tales"))
    assert before in ({"a", "b"}, {"a", "c"}), "d is in another hall"
    undisturbed = await answer(client)
    (killed,) = before - {"a"}
    await site.cluster.agents[killed].kill()

    async def goes_on() -> bool:
        found = await client.deployment("tales")
        return found.phase is DeploymentPhase.READY and killed not in used(found)

    await site.until(goes_on)
    assert used(await client.deployment("tales")) == {"a", "b", "c"} - {killed}
    assert await answer(client) == undisturbed
    await back(site, killed)
    await client.delete_deployment("tales")


async def test_a_repair_goes_on_where_nodes_that_the_spec_names_were_removed(
    tmp_path: Path,
) -> None:
    async with Site(
        tmp_path, ("a", "b", "c", "d"), models={"tiny-tales": DEMO_MODEL}, secure=True
    ) as site:
        client = site.client
        await client.deploy(
            parse_spec({**SPEC, "exclude": ["d"], "rule": ["avoid d", "apart b,c,d"]})
        )
        undisturbed = await answer(client)
        await client.remove_node("d")

        async def is_gone() -> bool:
            return {str(node.name) for node in await client.nodes()} == {"a", "b", "c"}

        async def goes_on() -> bool:
            found = await client.deployment("tales")
            return found.phase is DeploymentPhase.READY and "b" not in used(found)

        await site.until(is_gone)
        await site.agents["b"].kill()
        await site.until(goes_on)
        assert used(await client.deployment("tales")) <= {"a", "c"}
        assert await answer(client) == undisturbed
