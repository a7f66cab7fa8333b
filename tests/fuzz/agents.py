"""Send a coordinator all messages of agents, with any values: `make fuzz-agents`.

The coordinator is a real one on loopback, in this process. Node `liar` holds no stage. Nodes `head`
and `last` hold deployment `tale`, and lie too. Nodes `calm-a` and `calm-b` hold deployment `calm`
and are honest: whatever the others send, it stays ready at its first epoch.

Findings are exceptions that are not typed, callbacks of the coordinator that take more than 0.25 s
of its thread's processor time, and any change of `calm`. Memory that grows by more than 50 MB after
the first minute is one, too. The exit code is then 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import structlog
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from google.protobuf.message import Message

from edgeshard import WIRE_VERSION
from edgeshard.domain.control.commands import CommandKey, CommandKind
from edgeshard.domain.ids import MAX_EPOCH, Epoch
from edgeshard.proto.v1 import admin_pb2, coordinator_pb2, head_pb2, head_pb2_grpc
from tests.coordinator.conftest import UNDISTURBED, Site
from tests.support.any_messages import MessageBuilder
from tests.support.scripted_agent import FakeAgent, FakeHead
from tests.support.watchdog import Watchdog, watching

GROWTH_BYTES = 50 << 20
WARM_UP_S = 60.0
MAX_FINDINGS = 40
CALL_TIMEOUT_S = 60.0
LIARS = ("liar", "head", "last")
CALM = ("calm-a", "calm-b")
OWN = ("AgentFuzzer.", "FakeAgent.", "FakeHead.", "Site.", "run.", "run")
"""Callbacks of this program."""
REFUSED = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError)


class AgentFuzzer:
    """`findings` counts them by their first words, with an example of each."""

    def __init__(self, site: Site, dice: random.Random) -> None:
        self._site = site
        self._dice = dice
        self._builder = MessageBuilder(dice, self._known, many=0.03, likely=0.95)
        self._agents: dict[str, FakeAgent] = {}
        self._head: FakeHead | None = None
        self._requests: list[Any] = []
        self._ids: list[str] = []
        self._operations = 0
        self._last: deque[str] = deque(maxlen=6)
        self._name = LIARS[0]
        self.deployments = 0
        self.requests = 0
        self.served = 0
        self.sent: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.findings: dict[str, str] = {}

    def find(self, what: str, example: str) -> None:
        if what not in self.findings and len(self.findings) < MAX_FINDINGS:
            self.findings[what] = example[:2000]

    @property
    def newest(self) -> str:
        """The newest messages."""
        return " | ".join(text[:300] for text in self._last)

    async def set_up(self) -> None:
        """Connect the nodes, and deploy the honest nodes' deployment."""
        for name in (*LIARS, *CALM):
            agent = self._agents[name] = self._site.agent(name)
            await agent.register()
            await self._open_stream(name)
        await self._deploy("calm", "calm-a=0:6,calm-b=6:12", LIARS)
        await self._site.until_phase("calm", "ready")

    async def send_next(self) -> None:
        """Send one message, or a few of one stream; whatever is refused must be so by a typed
        error."""
        choices = (
            self._control,
            self._control,
            self._control,
            self._attached,
            self._attached,
            self._attached,
        )
        action = self._dice.choice(
            (*choices, self._hello, self._register, self._report, self._heartbeat)
        )
        try:
            await asyncio.wait_for(action(), CALL_TIMEOUT_S)
        except REFUSED as error:
            self._note_refusal(error)
        self._check_calm()

    async def restore(self) -> None:
        """Deploy the liars' deployments again if their messages have ended them, and keep some
        requests running there.
        """
        record = self._site.state.deployments.get("tale")
        with contextlib.suppress(grpc.aio.AioRpcError):
            self.deployments += record is None
            for name in ("head", "last"):
                await self._connect(name)
            if record is not None and record.phase in ("failed", "waiting"):
                request = admin_pb2.DeleteDeploymentRequest(
                    operation_id=self._operation(), name="tale", force=True
                )
                await self._site.admin.DeleteDeployment(request, timeout=CALL_TIMEOUT_S)
            elif record is None:
                await self._deploy("tale", "head=0:6,last=6:12", CALM)
        self._requests = [call for call in self._requests if not call.done()]
        while len(self._requests) < 3:
            id = f"request-{self._dice.randrange(1 << 40)}"
            self._ids = [*self._ids[-5:], id]
            call = self._site.generate(id, max_new_tokens=100, timeout=30.0)
            self._requests.append(asyncio.ensure_future(self._read(call)))
            with contextlib.suppress(*REFUSED):
                if self._head is not None and not self._head._call.done():
                    await asyncio.sleep(0.01)
                    await self._head.accept(id)

    async def _read(self, call: Any) -> None:
        self.requests += 1
        has_tokens = False
        try:
            async for message in call:
                has_tokens = has_tokens or message.HasField("token")
        except grpc.aio.AioRpcError as error:
            # A head's failure of a request may be of any kind.
            if error.code() is grpc.StatusCode.UNKNOWN:
                self.find(f"a request ended with {error.details()}", self.newest)
        except REFUSED:
            pass
        self.served += has_tokens

    async def _deploy(self, name: str, layers: str, exclude: Sequence[str]) -> None:
        options: dict[str, Any] = {
            "layers": layers,
            "source": layers.partition("=")[0],
            "exclude": tuple(exclude),
        }
        request = self._site.deploy_request(self._operation(), name=name, **options)
        await self._site.admin.Deploy(request, timeout=CALL_TIMEOUT_S)

    def _operation(self) -> str:
        self._operations += 1
        return f"op-{self._operations}"

    # Messages

    async def _open_stream(self, name: str) -> None:
        agent = self._agents[name]
        await agent.open_stream()
        assert agent._task is not None
        agent._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _connect(self, name: str) -> None:
        """Register a node with true facts, unless the coordinator has them, and open its stream if
        it has ended."""
        agent = self._agents[name]
        node = self._site.state.nodes.get(agent.node_id)
        true = (agent.registration.facts, agent.registration.incarnation)
        if node is None or (node.facts, node.incarnation) != true:
            await agent.register()
        if agent._call is None or agent._call.done():
            await self._open_stream(name)
            await agent.heartbeat()

    async def _control(self) -> None:
        name = self._dice.choice(LIARS)
        agent = self._agents[name]
        if agent._call is None or agent._call.done():
            if self._dice.random() < 0.8:
                await self._connect(name)
            else:
                await self._open_stream(name)
        for _ in range(self._dice.choice((1, 1, 4))):
            await self._write(agent._call, self._build(coordinator_pb2.ControlRequest, name))

    async def _attached(self) -> None:
        """Messages of the head that the coordinator awaits, on its newest stream."""
        record = self._site.state.deployments.get("tale")
        if record is None:
            return
        agent = self._agents["head"]
        head = self._head
        if head is None or head.epoch != record.epoch or head._call.done():
            head = self._head = FakeHead(agent._channel, agent.node_id, "tale", record.epoch)
            await head.attach()
            await asyncio.sleep(0.01)
        for _ in range(self._dice.choice((1, 1, 4))):
            await self._write(head._call, self._build(head_pb2.AttachRequest, "head"))

    async def _hello(self) -> None:
        name = self._dice.choice(LIARS)
        call: Any = head_pb2_grpc.HeadServiceStub(self._agents[name]._channel).Attach()
        hello = self._build(head_pb2.HeadHello, name)
        hello.node_id = self._agents[name].node_id
        await self._write(call, head_pb2.AttachRequest(hello=hello))
        await self._write(call, self._build(head_pb2.AttachRequest, name))
        await asyncio.sleep(0.02)
        call.cancel()

    def _liar(self) -> str:
        """Mostly the node without a stage: no deployment is placed on nodes with impossible
        facts."""
        return self._dice.choice(LIARS) if self._dice.random() < 0.05 else "liar"

    async def _register(self) -> None:
        name = self._liar()
        agent = self._agents[name]
        registration = self._build(coordinator_pb2.RegisterRequest, name)
        registration.node_id, registration.name = agent.node_id, name
        registration.wire_version = WIRE_VERSION
        await agent.stub.Register(registration, timeout=CALL_TIMEOUT_S)
        agent.registration = replace(agent.registration, incarnation=registration.incarnation)

    async def _report(self) -> None:
        name = self._liar()
        report = self._build(coordinator_pb2.ReportProfileRequest, name)
        report.node_id = self._agents[name].node_id
        await self._agents[name].stub.ReportProfile(report, timeout=CALL_TIMEOUT_S)

    async def _heartbeat(self) -> None:
        name = self._dice.choice(LIARS)
        heartbeat = self._build(coordinator_pb2.HeartbeatRequest, name)
        heartbeat.node_id = self._agents[name].node_id
        await self._agents[name].stub.Heartbeat(heartbeat, timeout=CALL_TIMEOUT_S)

    async def _write(self, call: Any, message: Message) -> None:
        await call.write(message)

    def _build(self, kind: type[Any], name: str) -> Any:
        """A message of this class from a node, which is remembered in case something is found."""
        self._name = name
        message = self._builder.build(kind)
        self.sent[kind.__name__ + "." + (_member_of(message) or "")] += 1
        self._last.append(f"{kind.__name__} of {message.ByteSize()} bytes: {_sketch(message)}")
        return message

    def _known(self, field: str) -> Sequence[Any]:
        """Values that the coordinator knows, by the name of a field."""
        agent = self._agents[self._name]
        deployments = self._site.state.deployments
        record = deployments.get("calm" if self._dice.random() < 0.2 else "tale")
        match field:
            case "node_id" | "sender_id":
                return (agent.node_id,)
            case "receiver_id":
                return ("id-head", "id-calm-a", "id-none")
            case "incarnation":
                return (agent.registration.incarnation,)
            case "deployment":
                return ("tale", "tale", "calm", "none")
            case "epoch":
                epoch = 1 if record is None else record.epoch
                return (*[epoch] * 20, epoch + 1, 0, MAX_EPOCH, MAX_EPOCH + 1, (1 << 64) - 1)
            case "stage" | "from_stage" | "to_stage":
                return range(4)
            case "request_id":
                return self._ids
            case "position" | "read" | "scored":
                running = self._site.coordinator.front._requests.items()
                due = [
                    request.next_position
                    for _, request in running
                    if request.next_position is not None
                ]
                return (*due, *due, *range(3))
            case "token" | "prompt_tokens":
                return range(5)
            case "text" | "final_text":
                return ("", "x")
            case "operation_id" if record is not None:
                key = CommandKey(
                    record.uid, Epoch(record.epoch), self._dice.choice(list(CommandKind)), 0
                )
                sent = agent.operation_ids[-3:]
                return (*sent, replace(key, stage=self._dice.randrange(3)).operation_id)
            case _:
                return ()

    # Findings

    def _note_refusal(self, error: BaseException) -> None:
        if isinstance(error, TimeoutError):
            self.find("no answer", self.newest)
        if isinstance(error, grpc.aio.AioRpcError):
            self.refusals[error.code().name] += 1
            # gRPC refuses to write to a call that ended.
            is_own = error.details() == "Internal error from Core"
            if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and not is_own:
                self.find(f"a call ended with {error.details()}", self.newest)

    def _check_calm(self) -> None:
        record = self._site.state.deployments["calm"]
        if (record.epoch, record.phase) != (1, "ready"):
            why = f"{record.phase} at epoch {record.epoch}, {record.failure!r}"
            self.find("the honest deployment changed", f"{why}; {self.newest}")

    def on_log(self, _: object, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        """A processor of structlog that keeps records which no message may cause."""
        if method in ("error", "exception", "critical") or str(event.get("event", "")).endswith(
            "_broke"
        ):
            text = {key: str(value) for key, value in event.items()}
            error = sys.exc_info()[1]
            self.find(
                f"log {event.get('event')} {type(error).__name__}",
                f"{text} {error!r}; {self.newest}",
            )
        raise structlog.DropEvent

    def on_exception(self, _: object, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        self.find(f"unhandled {type(error).__name__}", f"{context}; {self.newest}")

    def note_slow(self, watchdog: Watchdog) -> None:
        for slow in watchdog.slow:
            if not slow.name.startswith(OWN):
                self.find(f"slow {slow.name}", f"{slow}; {self.newest}")
        watchdog.slow.clear()


def _member_of(message: Any) -> str | None:
    names = [oneof.name for oneof in message.DESCRIPTOR.oneofs if not oneof.name.startswith("_")]
    return message.WhichOneof(names[0]) if names else None


def _sketch(message: Message) -> str:
    """The shape of a message: its fields with their numbers of items."""
    counts: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", message)]
    while waiting and len(counts) < 30:
        path, item = waiting.pop()
        for field, value in item.ListFields():
            name = f"{path}{field.name}"
            if field.is_repeated:
                counts[name] = len(value)
                if (
                    field.message_type is not None
                    and value
                    and not field.message_type.GetOptions().map_entry
                ):
                    waiting.append((f"{name}[0].", value[0]))
            elif field.message_type is not None:
                waiting.append((f"{name}.", value))
            elif isinstance(value, str | bytes) and len(value) > 40:
                counts[name] = len(value)
            else:
                counts[name] = value
    return repr(counts)


def resident_bytes() -> int:
    """The process's memory, without the part that its allocator keeps for later."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def run(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Send messages for `seconds`, and return the report."""
    site = Site(folder, UNDISTURBED, 4096, PlanningPlacer())
    fuzzer = AgentFuzzer(site, random.Random(seed))
    structlog.configure(processors=[fuzzer.on_log])
    await site.start()
    asyncio.get_running_loop().set_exception_handler(fuzzer.on_exception)
    await fuzzer.set_up()
    began = time.monotonic()
    messages = 0
    warm_bytes = 0
    with watching() as watchdog:
        while time.monotonic() < began + seconds:
            await fuzzer.send_next()
            messages += 1
            fuzzer.note_slow(watchdog)
            if messages % 20 == 0:
                await fuzzer.restore()
            if not warm_bytes and time.monotonic() > began + WARM_UP_S:
                warm_bytes = resident_bytes()
    grown = resident_bytes() - warm_bytes if warm_bytes else 0
    if grown > GROWTH_BYTES:
        fuzzer.find("memory", f"{grown / 1e6:.0f} MB more than after {WARM_UP_S:.0f} s")
    await site.stop()
    return {
        "seconds": round(time.monotonic() - began, 1),
        "sent": sum(fuzzer.sent.values()),
        "kinds": dict(fuzzer.sent.most_common()),
        "refusals": dict(fuzzer.refusals.most_common()),
        "deployments": fuzzer.deployments,
        "requests": fuzzer.requests,
        "requests_with_tokens": fuzzer.served,
        "epochs": int(record.epoch)
        if (record := site.state.deployments.get("tale")) is not None
        else 0,
        "callbacks": watchdog.callbacks,
        "grown_mb": round(grown / 1e6, 1),
        "findings": fuzzer.findings,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.agents", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (600)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(run(options.seconds, options.seed, Path(folder)))
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return int(bool(report["findings"]))


if __name__ == "__main__":
    sys.exit(main())
