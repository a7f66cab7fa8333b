"""The stories that cause a coordinator's writes (tests/chaos/writes.py), each on one deployment."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import grpc

from edgeshard import Client
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.errors import NotFoundError, UnavailableError
from edgeshard.proto.v1 import admin_pb2
from edgeshard.proto.v1.admin_pb2_grpc import AdminServiceStub
from edgeshard.rpc.channel import open_channel
from edgeshard.wire.site import spec_to_wire
from edgeshard.wire.status import from_rpc_error
from tests.chaos.failpoints import Action, Failpoint, Place
from tests.chaos.matrix import Ask
from tests.chaos.sending import sent
from tests.chaos.site import READY_S, ChaosSite, spec
from tests.support.site import COORDINATOR

NODES = ("a", "b", "c", "d", "e")
STEADY = "steady"
TRIED = "tried"
OTHER_MODEL = "other-tales"
"""Deployments: one on nodes a and b, which no case touches; and the one that is tried, on c and d.
Node e is free."""
LAYERS = {STEADY: "a=0:6,b=6:12", TRIED: "c=0:6,d=6:12"}
ASK = Ask(11, prompt_tokens=48, new_tokens=300)
MAX_CONTEXT = 512
ANSWER_S = 3.0
"""A coordinator answers within this time from its start."""
LIMIT_S = 30.0
"""For anything of a case to happen. A quiet machine needs a second."""
LATE_S = 1.5
"""Delay of a node, so that there is time to delete the object it works on."""
POLL_S = 0.01


ENDS_READY = frozenset(
    {"deploy", "a node dies", "the head's stream breaks", "the coordinator restarts"}
)


@dataclass(frozen=True, slots=True)
class Known:
    """The acknowledged state of a coordinator: nodes' ids by name, models, and deployments with
    their phases and epochs.
    """

    nodes: dict[str, str]
    models: frozenset[str]
    deployments: dict[str, tuple[Phase, int]]


class Operator:
    """Asks the coordinator, also one that ends meanwhile."""

    def __init__(self, site: ChaosSite) -> None:
        self.site = site
        self.other_model = site.directory / "other-model"

    async def known(self, client: Client | None = None) -> Known:
        client = client or self.site.client
        nodes, deployments = await client.nodes(), await client.deployments()
        models = await client.stored_models()
        return Known(
            {str(node.name): str(node.node_id) for node in nodes},
            frozenset(str(model.name) for model in models),
            {
                str(deployment.spec.name): (deployment.phase, int(deployment.epoch))
                for deployment in deployments
            },
        )

    async def insist(self, method: str, request: Any) -> None:
        """Send a call with one operation id until it is answered. Raises as the call does, but when
        it is lost."""
        request.operation_id = uuid.uuid4().hex
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    async with open_channel(self.site.address, None) as channel:
                        await getattr(AdminServiceStub(channel), method)(request, timeout=LIMIT_S)
                    return
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise from_rpc_error(error) from None
                await asyncio.sleep(POLL_S)

    async def phase(
        self, wanted: Iterable[Phase | None], timeout_s: float = LIMIT_S
    ) -> Phase | None:
        """Wait until the tried deployment is in one of these phases; None is gone."""
        phases, found = tuple(wanted), None

        async def there() -> bool:
            nonlocal found
            try:
                found = (await self.site.client.deployment(TRIED)).phase
            except NotFoundError:
                found = None
            return found in phases

        await self.site.until(there, timeout_s)
        return found

    async def add_model(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    async with Client(self.site.address, plaintext=True) as client:
                        await sent(client, self.other_model, OTHER_MODEL)
                    return
                except UnavailableError:
                    await asyncio.sleep(POLL_S)

    async def remove_node(self, name: str) -> None:
        """Until it is answered, or the node is not there any more, as when an answer was lost."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    async with Client(self.site.address, plaintext=True) as client:
                        await client.remove_node(name)
                    return
                except NotFoundError:
                    return
                except UnavailableError:
                    await asyncio.sleep(POLL_S)


class Story:
    """`prepare` before the failpoint is armed, `act` while it is, `heal` once the coordinator is
    back; `finish` checks how it ended, and tidies up."""

    def __init__(self, operator: Operator, name: str, number: int) -> None:
        self._operator = operator
        self._site = operator.site
        self._number = number
        self._name = name
        self._arm_count = 0
        self.answered: set[str] = set()
        """Calls of the coordinator that it answered."""

    @property
    def begins_ready(self) -> bool:
        return self._name in {
            *(ENDS_READY - {"deploy"}),
            "a node dies, the spare dies loading",
            "a node dies, the head dies opening",
            "coordinator and node restart",
            "delete",
            "delete twice",
            "delete while waiting",
            "replan",
        }

    @property
    def deletes(self) -> bool:
        return self._name.startswith("delete")

    async def prepare(self) -> None:
        if self._name == "replan":
            await self._deploy_planned()
        elif self.begins_ready:
            await self._site.client.deploy(spec_of(TRIED), timeout_s=LIMIT_S)
        match self._name:
            case "deploy, a node dies loading":
                self._arm("d", Place.BEFORE_LOAD)
            case "deploy, the head dies opening" | "a node dies, the head dies opening":
                self._arm("c", Place.BEFORE_ATTACH)
            case "a node dies, the spare dies loading":
                self._arm("e", Place.BEFORE_LOAD)
            case "delete while loading":
                self._arm("d", Place.DURING_LOAD, Action.SLEEP)
            case "delete while opening":
                self._arm("c", Place.BEFORE_ATTACH, Action.SLEEP)
            case "delete what failed":
                self._arm("d", Place.BEFORE_LOAD)
                await self._site.client.deploy(spec_of(TRIED), wait=False)
                await self._operator.phase([Phase.FAILED])
                await self._site.start_daemon("d")
            case "a model is deleted":
                await sent(self._site.client, self._operator.other_model, OTHER_MODEL)

    async def act(self) -> None:  # noqa: C901 - one case for each story
        async def insist(method: str, request: Any) -> None:
            await self._operator.insist(method, request)
            self.answered.add(method)

        site = self._site
        delete = admin_pb2.DeleteDeploymentRequest(name=TRIED)
        match self._name:
            case "deploy" | "deploy, a node dies loading" | "deploy, the head dies opening":
                await insist("Deploy", admin_pb2.DeployRequest(spec=spec_to_wire(spec_of(TRIED))))
            case "delete" | "delete what failed":
                await insist("DeleteDeployment", delete)
            case "delete twice":
                site.daemons["d"].send_signal(signal.SIGSTOP)
                await insist("DeleteDeployment", delete)
                with contextlib.suppress(NotFoundError):
                    await insist("DeleteDeployment", delete)
            case "delete while loading" | "delete while opening":
                await insist("Deploy", admin_pb2.DeployRequest(spec=spec_to_wire(spec_of(TRIED))))
                await self._operator.phase(
                    [Phase.LOADING if self._name.endswith("loading") else Phase.ACTIVATING]
                )
                await insist("DeleteDeployment", delete)
            case "replan":
                await insist("Replan", admin_pb2.ReplanRequest(name=TRIED, force=True))
            case "delete while waiting":
                await self._restart(without="d")
                await insist("DeleteDeployment", delete)
            case "coordinator and node restart":
                await self._restart(without="d")
                await site.daemons["d"].start()
            case "the coordinator restarts":
                await self._restart()
            case "the head's stream breaks":
                self._arm("c", Place.BEFORE_SAY, Action.LOSE_REPLY)
            case "a node restarts":
                await site.daemons["e"].kill()
                await site.daemons["e"].start()
            case "a node is deleted":
                await self._operator.remove_node("e")
            case "links are measured":
                with contextlib.suppress(UnavailableError):
                    async for _ in site.client.profile(nodes=("e",)):
                        pass
            case "the coordinator stops":
                await site.client.complete(STEADY, ASK.prompt, max_new_tokens=2)
                await site.daemons[COORDINATOR].stop()
            case "a model is added":
                await self._operator.add_model()
            case "a model is deleted":
                await insist("DeleteModel", admin_pb2.DeleteModelRequest(name=OTHER_MODEL))
            case _:
                await site.daemons["d"].kill()

    def lost(self, before: Known, after: Known, answered: frozenset[str]) -> list[str]:
        """The acknowledged changes that the restarted coordinator does not know."""
        nodes = {
            name: of
            for name, of in before.nodes.items()
            if (self._name, name) != ("a node is deleted", "e")
        }
        problems = [
            f"node {name} is not known" for name, of in nodes.items() if after.nodes.get(name) != of
        ]
        kept = before.models - ({OTHER_MODEL} if self._name == "a model is deleted" else set())
        problems += [f"model {name} is not known" for name in sorted(kept - after.models)]
        for name, (_, epoch) in before.deployments.items():
            found = after.deployments.get(name)
            if found is None and not (self.deletes and name == TRIED):
                problems.append(f"deployment {name} is not known")
            elif found is not None and found[1] < epoch:
                problems.append(f"deployment {name} is back at epoch {found[1]}, it was at {epoch}")
        tried = after.deployments.get(TRIED)
        if "DeleteDeployment" in answered:
            if tried is not None and tried[0] is not Phase.DELETING:
                problems.append(f"the deletion of {TRIED} was answered, and it is {tried[0]}")
        elif "Deploy" in answered and tried is None and not self.deletes:
            problems.append(f"{TRIED} was answered, and is not known")
        return problems

    async def heal(self) -> None:
        """Every node is there and no failpoint is armed."""
        for name in NODES:
            self._site.daemons[name].send_signal(signal.SIGCONT)
        dead = set(self._site.dead())
        await self._site.start_dead(NODES)
        for name in sorted(dead & set(NODES)):
            await self._site.daemons[name].wait_ready(READY_S)

    async def finish(self, before: Known) -> list[str]:
        problems = []
        if self.deletes:
            problems += await self._expect({None})
        elif self._name.startswith("deploy,"):
            # If the failure was not on disk, the deployment is tried again, now with all nodes.
            problems += await self._expect({Phase.FAILED, Phase.READY})
        elif self._name == "deploy" or self.begins_ready:
            problems += await self._expect({Phase.READY})
        for name in self._site.nodes:
            self._disarm(name)
        self._disarm(COORDINATOR)
        await self._site.start_dead(NODES)
        await asyncio.gather(*(self._site.daemons[name].wait_ready(READY_S) for name in NODES))
        after = await self._operator.known()
        if after.deployments.get(STEADY) != (Phase.READY, before.deployments[STEADY][1]):
            problems.append(
                f"{STEADY} was {before.deployments[STEADY]} and is {after.deployments.get(STEADY)}"
            )
        if (
            self._name == "the coordinator restarts"
            and after.deployments.get(TRIED) != before.deployments[TRIED]
        ):
            problems.append(
                f"{TRIED} was {before.deployments[TRIED]} and is {after.deployments.get(TRIED)}"
            )
        if self._name == "replan":
            problems += await self._expect_on("cde")
        if self._name == "a model is added" and OTHER_MODEL not in after.models:
            problems.append("the model that was added is not there")
        if self._name == "a model is deleted" and OTHER_MODEL in after.models:
            problems.append("the model that was deleted is there")
        if OTHER_MODEL in after.models:
            await self._site.client.delete_model(OTHER_MODEL)
        if TRIED in after.deployments:
            await self._site.client.delete_deployment(TRIED, timeout_s=LIMIT_S)
        await self._site.until(self._whole, LIMIT_S)
        return problems

    async def _whole(self) -> bool:
        nodes = await self._site.client.nodes()
        return len(nodes) == len(NODES) and all(node.placeable for node in nodes)

    async def _expect(self, phases: set[Phase | None]) -> list[str]:
        try:
            await self._operator.phase(phases)
        except TimeoutError:
            return [f"{TRIED} did not become {', '.join(str(phase) for phase in phases)}"]
        return []

    async def _expect_on(self, names: str) -> list[str]:
        """The tried deployment is on these nodes."""
        stages = (await self._site.client.deployment(TRIED)).placement.stages
        there = "".join(stage.node_name for stage in stages)
        return [] if there == names else [f"{TRIED} was to be on nodes {names} and is on {there}"]

    async def _deploy_planned(self) -> None:
        """For nodes c and d, while e is away, which is there again afterwards."""
        site = self._site
        await site.daemons["e"].kill()

        async def away() -> bool:
            return not any(node.connected for node in await site.client.nodes() if node.name == "e")

        await site.until(away, LIMIT_S)
        planned = replace(spec_of(TRIED), layers=(), exclude=("a", "b"))
        await site.client.deploy(planned, timeout_s=LIMIT_S)
        await site.daemons["e"].start()
        await site.daemons["e"].wait_ready(READY_S)
        await site.until(self._whole, LIMIT_S)

    async def _restart(self, without: str = "") -> None:
        """The coordinator is killed and started again; at the same time a node is killed."""
        await self._site.daemons[COORDINATOR].kill()
        if without:
            await self._site.daemons[without].kill()
        await self._site.daemons[COORDINATOR].start()

    def _arm(self, name: str, place: Place, action: Action = Action.KILL) -> None:
        self._arm_count += 1
        point = f"{self._number}.{self._arm_count} {name} {place}"
        self._site.arm(name, [Failpoint(point, place, action=action, seconds=LATE_S)])

    def _disarm(self, name: str) -> None:
        self._site.arm(name, [])


def spec_of(name: str) -> DeploymentSpec:
    return spec(name=name, layers=LAYERS[name], source=LAYERS[name][0], max_context=MAX_CONTEXT)
