"""The users of a simulated site: applications with requests, and an operator who deploys and
deletes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from edgeshard.client.client import Client
from edgeshard.domain.control.site import ReplanReason
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import DeadlineError, EdgeShardError
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard.domain.requests.generation import (
    Finished,
    GenerateOptions,
    Generation,
    Sampling,
    Started,
    Token,
)
from tests.simulator.loop import Process, SimClock
from tests.simulator.model import VOCABULARY, answer
from tests.simulator.site import COORDINATOR
from tests.support.load import Stream

if TYPE_CHECKING:
    from tests.simulator.world import World

OWN_FAULT = ("TOKEN_OUT_OF_RANGE",)
"""The reasons for refusing an impossible request."""


class Application:
    """A process with a client; it asks one thing after the other, or several at once."""

    def __init__(self, world: World, name: str, dice: random.Random, requests: int) -> None:
        self.world = world
        self.name = name
        self.process = process = Process(world.loop, name, ahead_s=dice.uniform(0, 1e5))
        self._dice = dice
        self.client = Client(COORDINATOR, plaintext=True, clock=SimClock(world.loop, process))
        if dice.random() < (0.9 if world.fates.wants("GenerateResponse ") else 0.1):
            # As of a client that knows no listeners: its tokens come by the calls.
            self.client._connection._open_inbox = lambda: None  # type: ignore[method-assign]
        self.open = requests
        at = 0.0
        for number in range(requests):
            at_once = world.crowded or world.fates.wants("AttachRequest tokens")
            at += 0.0 if at_once else dice.choice((0.0, 0.2, 1.5, 3.0))
            process.call_later(at, self._begin, number)

    def _begin(self, number: int) -> None:
        self.process.spawn(self._ask(number)).add_done_callback(
            self.world.ended, context=self.process.context
        )

    async def _ask(self, number: int) -> None:
        dice, world = self._dice, self.world
        wrong = dice.random() < (0.7 if world.fates.wants("AttachRequest failed") else 0.06)
        prompt: str | tuple[int, ...] = tuple(
            dice.randrange(VOCABULARY - 1)
            for _ in range(dice.choice((20, 40) if world.crowded else (1, 3, 20, 40)))
        )
        if world.hybrid and len(prompt) >= 20:
            prompt = (*range(17), *prompt[17:])
        if wrong:
            prompt = (VOCABULARY + 5,)
        elif dice.random() < 0.4:
            prompt = "".join(dice.choice("abcdefgh ") for _ in range(dice.choice((1, 5, 30))))
        new = 40 if world.crowded else dice.choice((1, 4, 12, 25, 40))
        stop = (chr(48 + dice.randrange(64)),) if dice.random() < 0.3 else ()
        seed = dice.randrange(1000)
        generation = Generation(prompt, new, Sampling(seed=seed), (), stop)
        wanted = None if wrong else answer(generation)
        limit = dice.choice((None, None, None, 0.8, 6.0))
        leaves_behind = dice.randrange(new) if dice.random() < 0.12 else None
        calls = world.fates.wants("Cancel", "AttachResponse cancel", "AttachRequest finished")
        cancels = dice.random() < (0.9 if calls else 0.4 if world.crowded else 0.1)
        for attempt in range(400):
            request_id = RequestId(f"{self.name}-{number}-{attempt}")
            if wanted is not None:
                world.watch.answers[request_id] = wanted
            options: GenerateOptions = {
                "max_new_tokens": new, "stop": stop, "request_id": request_id, "seed": seed,
                "timeout_s": limit,
            }  # fmt: skip
            if cancels:
                self.process.call_later(
                    dice.uniform(0.01, 2.0 if world.crowded else 0.4), self._cancel, request_id
                )
            try:
                if await self._listen(request_id, prompt, options, leaves_behind, wrong):
                    break
            except EdgeShardError as error:
                started = request_id in world.watch.clients
                world.note(f"{request_id} failed: {error.reason} {error.message}")
                if started or error.reason in OWN_FAULT:
                    if started:
                        world.watch.failed(request_id, error)
                        world.judge(request_id, error, limit)
                    break
                world.watch.hold(error.reason != "INTERNAL", f"{request_id}: {error.message}")
            if limit is not None and world.calm_since is None:
                break
            await asyncio.sleep(dice.uniform(0.1, 0.5))
        self.open -= 1

    async def _listen(
        self,
        request_id: RequestId,
        prompt: Any,
        options: GenerateOptions,
        leaves_behind: int | None,
        wrong: bool,
    ) -> bool:
        world, stream = self.world, Stream(self.world.model_of(request_id), prompt, options)
        async with aclosing(stream.follow(self.client)) as events:
            async for event in events:
                if wrong:
                    world.watch.hold(
                        isinstance(event, Finished), "a prompt that cannot be was taken"
                    )
                    return True  # it was cancelled before that was seen
                world.watch.heard(request_id, stream, event)
                if isinstance(event, Started | Token) and leaves_behind == len(stream.tokens):
                    break  # it has enough
                if self._dice.random() < 0.05:
                    await asyncio.sleep(self._dice.uniform(0.0, 0.4))
            else:
                world.watch.hold(stream.over, f"{request_id} stopped without an end")
        if not wrong:
            world.watch.left(request_id, stream)
        stream.raise_error()
        return True

    def _cancel(self, request_id: RequestId) -> None:
        async def cancel() -> None:
            try:
                await self.client.cancel(request_id)
            except EdgeShardError as error:
                self.world.note(f"cancel of {request_id}: {error.reason}")

        self.process.spawn(cancel())


class Visitor:
    """Looks at everything, one thing after the other. Each call ends with a value or a typed
    error."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world = world
        self.name = "visitor"
        self.process = process = Process(world.loop, self.name, ahead_s=dice.uniform(0, 1e5))
        self._dice = dice
        self.client = Client(
            COORDINATOR, plaintext=True, timeout_s=5.0, clock=SimClock(world.loop, process)
        )
        self.open = 1
        process.spawn(self._look_around()).add_done_callback(world.ended, context=process.context)

    async def _look_around(self) -> None:
        client, name = self.client, str(self.world.specs[0]["name"])
        looks: dict[str, Callable[[], Awaitable[object]]] = {
            "Plan": lambda: client.plan(parse_spec({**self.world.specs[0], "name": "other"})),
            "ListDeployments": client.deployments,
            "ListNodes": client.nodes,
            "GetNode": lambda: client.node("a"),
            "GetSite": lambda: client.site("tiny"),
            "ListModels": client.stored_models,
            "ServiceListModels": client.served_models,
            "ListEvents": self._events,
            "Trace trace": lambda: client.trace(name, 0.3),
            "Dump dump": lambda: client.dump(3.0),
        }
        await asyncio.sleep(self._dice.uniform(0.5, 3.0))
        aimed = [kind for kind in looks if self.world.fates.wants(*kind.split())]
        for _ in range(6):
            look = looks[self._dice.choice(aimed or list(looks)[:-1])]
            try:
                await look()
            except EdgeShardError as error:
                self.world.note(f"a look: {error.reason} {error.message}")
                self.world.watch.hold(error.reason != "INTERNAL", f"a look met {error.message}")
            await asyncio.sleep(self._dice.uniform(0.0, 1.0))
        self.open = 0

    async def _events(self) -> None:
        told = [event async for event in self.client.events(20)]
        self.world.note(f"events: {len(told)}")


class Operator:
    """Deploys at the beginning, and sometimes deletes and deploys again."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world = world
        self.process = Process(world.loop, "operator")
        self._dice = dice
        self.client = Client(COORDINATOR, plaintext=True, clock=SimClock(world.loop, self.process))
        self.wanted: set[DeploymentName] = set()
        self.deleted: set[DeploymentName] = set()
        """Ever asked to be."""
        self.busy = 0

    def deploy(self, spec: dict[str, Any]) -> None:
        self.wanted.add(DeploymentName(spec["name"]))
        self._spawn(self._deploy(spec))

    def look_after(self, specs: list[dict[str, Any]]) -> None:
        """Deploy again what failed for good."""
        for spec in specs:
            if DeploymentName(spec["name"]) in self.wanted:
                self.process.call_later(0.0, self.deploy, spec)

    def delete(self, name: DeploymentName, again: dict[str, Any] | None) -> None:
        self.deleted.add(name)
        if again is not None:
            self.wanted.discard(name)
        self._spawn(self._delete(name, again))

    def replan(self, name: DeploymentName) -> None:
        self._spawn(self._replan(name))

    def _spawn(self, work: Any) -> None:
        self.busy += 1
        self.process.spawn(work).add_done_callback(self._done, context=self.process.context)

    def _done(self, task: Any) -> None:
        self.busy -= 1
        self.world.ended(task)

    async def _deploy(self, spec: dict[str, Any]) -> None:
        """Until it is there; one that failed before it was ever ready is deleted and deployed
        again."""
        world, name = self.world, DeploymentName(spec["name"])
        while name in self.wanted:
            try:
                if not world.on_another_disk:
                    deployment = await self.client.deploy(parse_spec(spec), wait=False)
                    world.acknowledged(name, deployment.epoch)
                found = await self.client.deployment(name)
                if found.phase is Phase.FAILED and not world.on_another_disk:
                    world.note(f"{name} failed: {found.failure}")
                    await self._clear(name)
                elif found.phase is Phase.READY:
                    return
            except EdgeShardError as error:
                world.note(f"deploy {name}: {error.reason} {error.message}")
                if error.reason == "ALREADY_EXISTS":
                    try:
                        found = await self.client.deployment(name)
                        if found.phase is Phase.READY:
                            return
                        if found.phase is Phase.FAILED and not world.on_another_disk:
                            await self._clear(name)
                    except EdgeShardError:
                        pass
            await asyncio.sleep(self._dice.uniform(0.2, 0.6))

    async def _replan(self, name: DeploymentName) -> None:
        """Until it moved, or need not."""
        world, dice = self.world, self._dice
        for _ in range(8):
            try:
                if name in self.wanted and not world.on_another_disk:
                    found = await self.client.replan(
                        name, force=True, dry_run=dice.random() < 0.2, wait=False
                    )
                    world.note(f"replan {name}: {found.reason}")
                    if found.reason is not ReplanReason.WOULD_MOVE:
                        return
            except EdgeShardError as error:
                world.note(f"replan {name}: {error.reason} {error.message}")
                world.watch.hold(error.reason != "INTERNAL", f"a replan met {error.message}")
            await asyncio.sleep(dice.uniform(0.1, 0.8))

    async def _clear(self, name: DeploymentName) -> None:
        """Delete one that failed. If the disk did not record the failure, it may have been tried
        again meanwhile."""
        if self.world.troubles.disk_failed:
            self.deleted.add(name)
        await self.client.delete_deployment(name, wait=False)

    async def _delete(self, name: DeploymentName, again: dict[str, Any] | None) -> None:
        world = self.world
        standing = world.disk.deployments.get(name)
        while True:
            try:
                if not world.on_another_disk:
                    await self.client.delete_deployment(name, wait=False)
                    world.delete_acknowledged(name, standing)
                    break
            except DeadlineError:
                pass
            except EdgeShardError as error:
                world.note(f"delete {name}: {error.reason} {error.message}")
                if error.reason == "NOT_FOUND":
                    break
            await asyncio.sleep(0.3)
        if again is not None:
            await asyncio.sleep(self._dice.uniform(0.0, 1.0))
            self.deploy(again)
