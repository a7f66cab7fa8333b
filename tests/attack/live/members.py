"""Attackers that the site has admitted: nodes without a stage and with one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from edgeshard import Client
from edgeshard.cli.commands.site.demo import even_layers
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.requests.generation import GenerateOptions
from tests.attack import lying_agent, lying_node
from tests.attack.live.site import DEPLOYMENT, LAYERS, SPEC
from tests.attack.live.target import Attack, Outcome, Target
from tests.attack.raw import ask
from tests.support.load import Stream

DEPLOYS_S = 60.0
READY_S = 90.0
REQUEST_S = 5.0
EVERY_S = 0.4
"""Between two requests: their honest part, too, costs the nodes something."""
MAX_NEW_TOKENS = 8
LURE = "lure"
"""The deployment in which a lying agent has a stage."""
MAX_TEXT = 4096
"""Characters of one token's text."""


async def lies_of_a_node(target: Target, seconds: float) -> Outcome:
    """After that, and while the node still lies, an operator makes a deployment of a new name."""
    outcome = Outcome()
    async with Client(target.address, target.operator) as admin:
        epochs = {each.spec.name: int(each.epoch) for each in await admin.deployments()}

        async def meanwhile() -> None:
            await asyncio.sleep(seconds)
            spec = parse_spec({**SPEC, "name": "fresh", "layers": even_layers(LAYERS, ("a", "b"))})
            try:
                await admin.deploy(spec, timeout_s=DEPLOYS_S)
                await admin.delete_deployment("fresh", timeout_s=DEPLOYS_S)
            except EdgeShardError as error:
                outcome.wrong.append(f"a new name cannot be deployed: {error.reason}")

        name, files = target.leaver, target.leaving_node
        outcome.said += await lying_node.lie(target.address, files, name, epochs, meanwhile)
    return outcome


@asynccontextmanager
async def _lure(target: Target, nodes: tuple[str, ...]) -> AsyncIterator[None]:
    """An agent of this process, and a deployment over these nodes, including this agent."""
    directory = target.scratch / "agent"
    name = target.leaver
    async with (
        lying_agent.agent(target.address, name, target.leaving_node, directory) as serving,
        Client(target.address, target.operator) as admin,
    ):
        async with asyncio.timeout(READY_S):
            while not any(
                node.name == name and node.connected and not node.starting
                for node in await admin.nodes()
            ):
                if serving.done():
                    serving.result()
                await asyncio.sleep(0.1)
        spec = {**SPEC, "name": LURE, "source": nodes[0], "layers": even_layers(LAYERS, nodes)}
        await admin.deploy(parse_spec(spec), timeout_s=READY_S)
        try:
            yield
        finally:
            with suppress(EdgeShardError):
                await admin.delete_deployment(LURE, timeout_s=5.0, force=True)


async def _requests(target: Target, seconds: float, outcome: Outcome) -> None:
    """Ask for short answers of the lying deployment, one after the other."""
    until = time.monotonic() + seconds
    async with Client(target.address, target.client) as client:
        while (left_s := until - time.monotonic()) > 0:
            limits = GenerateOptions(
                max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True, timeout_s=min(REQUEST_S, left_s)
            )
            stream = await Stream(LURE, f"Once {left_s}", limits).run(client)
            outcome.said[
                "answered" if stream.error is None else f"request: {stream.error.reason}"
            ] += 1
            long = [len(token.text) for token in stream.tokens if len(token.text) > MAX_TEXT]
            outcome.wrong += [f"a token has a text of {length} characters" for length in long]
            if len(stream.tokens) > MAX_NEW_TOKENS:
                outcome.wrong.append(
                    f"an answer of {MAX_NEW_TOKENS} tokens has {len(stream.tokens)}"
                )
            await asyncio.sleep(EVERY_S)


async def _visit(target: Target, lies: lying_agent.Lies, outcome: Outcome) -> None:
    """A key with a quota uses the lying deployment once. That must not use up its quota
    elsewhere."""
    lies.only = lying_agent.LONG_PROMPT
    name = f"visitor-{target.leaver}"
    async with Client(target.address, target.operator) as admin:
        _, key = await admin.create_key(name, tokens_per_minute=1000)
        try:
            with suppress(EdgeShardError):
                await admin.wait_ready(LURE, timeout_s=REQUEST_S)
            for model in (LURE, DEPLOYMENT):
                body = {"model": model, "prompt": "Once", "max_tokens": 2}
                status = await ask(
                    target.gateway, key, "/v1/completions", body, timeout_s=REQUEST_S
                )
                outcome.said[f"visitor of {model}: {status}"] += 1
                if model == DEPLOYMENT and status != 200:
                    outcome.wrong.append(f"a lying head used up the quota of a key: {status}")
        finally:
            await admin.revoke_key(name)


@asynccontextmanager
async def lying_head(target: Target) -> AsyncIterator[Attack]:
    lies = lying_agent.Lies(lying_agent.HEAD, lying_agent.begins_request)
    lying_agent.plant_in_head(lies)
    async with _lure(target, (target.leaver, "a")):

        async def attack(target: Target, seconds: float) -> Outcome:
            outcome = Outcome()
            lies.begun = True
            await _requests(target, seconds, outcome)
            await _visit(target, lies, outcome)
            return _with(outcome, lies)

        yield attack


@asynccontextmanager
async def lying_last_stage(target: Target) -> AsyncIterator[Attack]:
    lies = lying_agent.Lies(lying_agent.LAST_STAGE, lying_agent.is_result)
    lying_agent.plant_in_last_stage(lies)
    async with _lure(target, ("a", target.leaver)):

        async def attack(target: Target, seconds: float) -> Outcome:
            outcome = Outcome()
            lies.begun = True
            await _requests(target, seconds, outcome)
            return _with(outcome, lies)

        yield attack


def _with(outcome: Outcome, lies: lying_agent.Lies) -> Outcome:
    outcome.said.update(lies.told)
    outcome.wrong[:] = sorted(set(outcome.wrong))
    return outcome


SET_UPS: Mapping[str, Callable[[Target], AbstractAsyncContextManager[Attack]]] = {
    "lying_agent.head": lying_head,
    "lying_agent.last_stage": lying_last_stage,
}
"""Attacks that take their time to begin."""
