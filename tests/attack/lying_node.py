"""A node without a stage that lies to the coordinator, with a certificate of its own. For sites of
one's own on loopback."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import cycle
from typing import Any

import grpc

from edgeshard import WIRE_VERSION
from edgeshard.proto.v1 import common_pb2, coordinator_pb2, coordinator_pb2_grpc, profile_pb2
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls import TlsFiles
from edgeshard.wire.status import from_rpc_error

TAKEN = "TAKEN"
_REFUSES_S = 0.2
_PAUSE_S = 0.05
_NEVER_SENT = 3000
_SAMPLES = (4000, 200_000)
_FACT_PAUSE_S = 0.02

Request = coordinator_pb2.ControlRequest


def statuses(epochs: Mapping[str, int]) -> dict[str, list[common_pb2.StageStatus]]:
    """Stages that the node does not hold, by their fault; `epochs` has the epoch of each
    deployment."""

    def status(name: str, epoch: int, phase: Any, **more: Any) -> common_pb2.StageStatus:
        layers = common_pb2.LayerRange(first=0, end=4)
        return common_pb2.StageStatus(
            deployment=name, epoch=epoch, layers=layers, phase=phase, **more
        )

    failed, ready = common_pb2.STAGE_PHASE_FAILED, common_pb2.STAGE_PHASE_READY
    names = (*epochs, "fresh")
    return {
        "failed stages": [
            status(name, epoch, failed, failure_reason="LIE") for name, epoch in epochs.items()
        ],
        "stages of later epochs": [status(name, (1 << 64) - 1, ready) for name in names],
        "stages of the last epoch": [status(name, (1 << 63) - 1, ready) for name in names],
        "4,000 epochs": [status(name, epoch, failed) for name in epochs for epoch in range(4000)],
        "a long reason": [
            status(name, 1, failed, failure_reason="x" * 8_000_000) for name in list(epochs)[:1]
        ],
        "no number": [
            status(name, 1, ready, busy_share=-math.inf, load_s=math.nan) for name in names
        ],
    }


def messages(node_id: str, incarnation: str, epochs: Mapping[str, int]) -> dict[str, list[Request]]:
    """The node's messages on its control stream, by the lie."""
    whole = {
        lie: [Request(heartbeat=_heartbeat(node_id, incarnation, stages))]
        for lie, stages in statuses(epochs).items()
    }
    results = [
        coordinator_pb2.CommandResult(
            operation_id=f"{name}/{epoch}/prepare/{number}",
            stage=common_pb2.StageStatus(deployment=name, epoch=epoch, stage=number),
        )
        for name, epoch in epochs.items()
        for number in range(_NEVER_SENT)
    ]
    suspected = coordinator_pb2.LinkSuspected(deployment="none", epoch=1, why="x" * 8_000_000)
    return {
        **whole,
        "answers to no command": [Request(result=result) for result in results],
        "a long condition": [Request(condition=common_pb2.Condition(version="x" * 15_000_000))],
        "a condition without numbers": [
            Request(condition=common_pb2.Condition(utc_s=math.nan, cpu_quota=-math.inf))
        ],
        "a link of others": [
            Request(
                suspected=coordinator_pb2.LinkSuspected(
                    deployment=name, epoch=epoch, to_stage=1, why="a lie"
                )
            )
            for name, epoch in epochs.items()
        ],
        "a long suspicion": [Request(suspected=suspected)],
    }


def _heartbeat(
    node_id: str, incarnation: str, stages: Iterable[common_pb2.StageStatus]
) -> coordinator_pb2.HeartbeatRequest:
    return coordinator_pb2.HeartbeatRequest(
        node_id=node_id,
        incarnation=incarnation,
        stages=stages,
        memory_available_bytes=1 << 40,
        others_share=math.nan,
    )


class LyingNode:
    """Registers as `name` and sends one lie after another."""

    def __init__(self, channel: grpc.aio.Channel, name: str, epochs: Mapping[str, int]) -> None:
        self.met: Counter[str] = Counter()
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        self._name = name
        self._node_id = f"id-{name}"
        self._incarnation = "i"
        self._messages = messages(self._node_id, self._incarnation, epochs)
        self._reports = [self._report(count) for count in _SAMPLES]

    async def lie(self) -> None:
        """One lie after another, until it is cancelled."""
        for lie, sent in cycle(self._messages.items()):
            with suppress(grpc.aio.AioRpcError):
                await self._register(cores=1)
            self.met[f"{lie}: {await self._said(sent)}"] += 1
            await asyncio.sleep(_PAUSE_S)

    async def report(self) -> None:
        """One profile of many samples after another, until it is cancelled."""
        for count, report in cycle(zip(_SAMPLES, self._reports, strict=True)):
            self.met[
                f"{count} samples: {await _refusal(self._stub.ReportProfile(report, timeout=20))}"
            ] += 1
            await asyncio.sleep(_PAUSE_S)

    async def change(self) -> None:
        """Register with other facts each time, until it is cancelled."""
        for cores in cycle(range(1, 64)):
            self.met[f"other facts: {await _refusal(self._register(cores))}"] += 1
            await asyncio.sleep(_FACT_PAUSE_S)

    def _register(self, cores: int) -> Any:
        facts = common_pb2.DeviceFacts(kind="cpu", model="m", cores=cores, software="s")
        facts.memory_total_bytes = facts.memory_budget_bytes = cores << 30
        request = coordinator_pb2.RegisterRequest(
            node_id=self._node_id,
            name=self._name,
            address="127.0.0.1:7000",
            wire_version=WIRE_VERSION,
            facts=facts,
            incarnation=self._incarnation,
        )
        return self._stub.Register(request, timeout=20)

    async def _said(self, sent: Iterable[Request]) -> str:
        """How a control stream with these messages was met: the reason of its end, or TAKEN."""
        call: Any = self._stub.Control()
        try:
            hello = coordinator_pb2.ControlHello(
                node_id=self._node_id, incarnation=self._incarnation
            )
            await call.write(Request(hello=hello))
            await call.initial_metadata()
            for message in sent:
                await call.write(message)
            await asyncio.wait_for(asyncio.shield(call.code()), _REFUSES_S)
            await call.read()  # raises the error it ended with
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).reason
        except (asyncio.InvalidStateError, TimeoutError):
            return (await _end(call)) if call.done() else TAKEN
        finally:
            call.cancel()
        return "ENDED"

    def _report(self, count: int) -> coordinator_pb2.ReportProfileRequest:
        sample = profile_pb2.ProfileSample(context=1, seconds=1e-3, repeats=1)
        samples = [profile_pb2.ProfileSample(count=number + 1) for number in range(count)]
        for each in samples:
            each.MergeFrom(sample)
        layer = profile_pb2.LayerProfile(
            kind="block", parameters=1, layers=1, prefill=samples, decode=samples
        )
        compute = profile_pb2.ComputeProfile(
            model_hash="m",
            dtype=common_pb2.DATA_TYPE_FLOAT32,
            device="cpu",
            threads=1,
            layers=[layer],
        )
        compute.effort = profile_pb2.EFFORT_QUICK
        return coordinator_pb2.ReportProfileRequest(node_id=self._node_id, compute=[compute])


async def _refusal(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return TAKEN


async def _end(call: Any) -> str:
    return str((await call.code()).name)


async def lie(
    address: str,
    files: TlsFiles,
    name: str,
    epochs: Mapping[str, int],
    meanwhile: Callable[[], Any],
) -> Counter[str]:
    """Lie in each way at the same time while `meanwhile` runs; how often each lie was met with
    what."""
    async with open_channel(address, files) as channel:
        node = LyingNode(channel, name, epochs)
        works = [asyncio.create_task(work) for work in (node.lie(), node.report(), node.change())]
        try:
            await meanwhile()
        finally:
            for work in works:
                work.cancel()
            ends = await asyncio.gather(*works, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        return node.met
