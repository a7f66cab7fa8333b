"""Carrying out the coordinator's commands to measure: layers in a process of their own, links one
after the other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import structlog

from edgeshard.architectures import parse_config
from edgeshard.domain.control.commands import (
    CommandProgress,
    MeasureCompute,
    Peer,
    ProbeLinks,
    ProfileReport,
)
from edgeshard.domain.errors import EdgeShardError, ResourceExhaustedError
from edgeshard.domain.models.dtypes import weights_text
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    DiskProfile,
    Effort,
    MeasuredLink,
    config_hash,
)
from edgeshard_agent.core.measuring import MeasuringTask
from edgeshard_agent.engine.compute_thread import ComputeThread
from edgeshard_agent.measuring.compute import fingerprint
from edgeshard_agent.measuring.disk import EXTENTS, measure_disk
from edgeshard_agent.measuring.facts import read_facts
from edgeshard_agent.measuring.measuring_process import Tell, measure_apart
from edgeshard_agent.measuring.measuring_worker import MeasuringJob
from edgeshard_agent.measuring.node import MeasuredNode, Reports
from edgeshard_agent.measuring.probing import at_once, probe_link
from edgeshard_agent.measuring.profile_store import ProfileStore
from edgeshard_agent.ops.kernel_speed import measure_kernels

log = structlog.get_logger()


@dataclass(eq=False)
class Measurer:
    """Measures and reports before it returns."""

    node: MeasuredNode
    reports: Reports
    worker: ComputeThread
    """The node's compute thread; measuring yields to its steps."""

    def __post_init__(self) -> None:
        self._store = ProfileStore(self.node.state_dir)

    async def run(self, task: MeasuringTask, held_bytes: int | None) -> None:
        """`held_bytes` is the bytes that stages and standbys hold, None if the node has none.

        Raises the profiler's typed errors, and the coordinator's answer to the report.
        """

        def tell(done: int, total: int, what: str) -> None:
            self.reports.progress(CommandProgress(task.operation_id, done, total, what))

        match task.command:
            case MeasureCompute():
                await self.reports.report(await self._compute(task.command, held_bytes, tell))
            case ProbeLinks():
                report = await self._links(task.command.peers, tell)
                await self.reports.report(report)
                self.reports.probed(report.links)

    async def _compute(
        self, command: MeasureCompute, held_bytes: int | None, tell: Tell
    ) -> ProfileReport:
        parse_config(command.config)
        node = self.node
        if node.emulation is not None:
            profile = node.emulation.profile(
                node.facts, command.config, command.dtype, command.quantisation
            )
            return ProfileReport(node.node_id, compute=(profile,))
        stored_profile = (
            None
            if command.again
            else await self._kept(command, command.effort, held_bytes is not None)
        )
        profile = stored_profile or await self._measured(command, held_bytes, tell)
        if held_bytes is not None:
            return ProfileReport(node.node_id, None, (profile,))
        # The node holds no stage now, so the free memory is what stages may have.
        facts = await asyncio.to_thread(
            read_facts, node.device, node.memory, node.facts.bits_fingerprint
        )
        speed = node.facts.kernels
        if speed is not None and command.again:
            speed = await asyncio.to_thread(measure_kernels)
        facts = replace(facts, kernels=speed)
        return ProfileReport(node.node_id, facts, (profile,))

    async def _kept(
        self, command: MeasureCompute, effort: Effort, beside_stages: bool
    ) -> ComputeProfile | None:
        node = self.node
        marks = (
            fingerprint(node.facts, node.threads),
            config_hash(command.config),
            command.dtype,
            command.quantisation,
        )
        return await asyncio.to_thread(self._store.find, *marks, effort, beside_stages)

    async def _measured(
        self, command: MeasureCompute, held_bytes: int | None, tell: Tell
    ) -> ComputeProfile:
        node = self.node
        memory = (
            node.memory if held_bytes is None else await asyncio.to_thread(self._left, held_bytes)
        )
        job = MeasuringJob(
            command.config,
            command.dtype,
            node.device,
            node.threads,
            command.effort,
            memory,
            command.quantisation,
            held_bytes is not None,
        )
        try:
            profile = await measure_apart(job, tell, self.worker)
        except ResourceExhaustedError as error:
            raise error if held_bytes is None else _beside(error, held_bytes) from None
        profile = replace(profile, disk=await self._disk(command, held_bytes is not None))
        await asyncio.to_thread(self._store.keep, profile)
        log.info(
            "measured",
            model_shape=profile.model_hash,
            weights=weights_text(profile.dtype, profile.quantisation),
            effort=profile.effort,
            share=profile.processor_share,
            others=profile.others_share,
        )
        return profile

    def _left(self, held_bytes: int) -> int:
        """Bytes that stages leave: as planned, and no more than is free now."""
        node = self.node
        return max(
            0,
            min(
                node.facts.memory_budget_bytes - held_bytes,
                read_facts(node.device, None).memory_budget_bytes,
            ),
        )

    async def _disk(self, command: MeasureCompute, beside_stages: bool) -> DiskProfile | None:
        """If stages run, the known rates are used: this process reads and writes the file and
        yields to no step."""
        if beside_stages:
            stored_profile = await self._kept(command, Effort.FIRST, True)
            return None if stored_profile is None else stored_profile.disk
        return await asyncio.to_thread(measure_disk, self.node.state_dir, EXTENTS[command.effort])

    async def _links(self, peers: tuple[Peer, ...], tell: Tell) -> ProfileReport:
        """The links to the nodes that answer."""
        links, emulation = [], self.node.emulation
        for number, peer in enumerate(peers):
            tell(number, len(peers), f"link to {peer.name}")
            try:
                way = at_once if emulation is None else emulation.way(peer.name)
                profile = await probe_link(peer, self.node.tls, way=way)
            except EdgeShardError as error:
                log.warning(
                    "link_not_measured", to=peer.name, reason=error.reason, why=error.message
                )
            else:
                links.append(MeasuredLink(self.node.node_id, peer.node_id, profile))
        return ProfileReport(self.node.node_id, links=tuple(links))


def _beside(error: ResourceExhaustedError, held_bytes: int) -> ResourceExhaustedError:
    """The error of a measurement that had too little memory because of the stages."""
    return ResourceExhaustedError(
        f"{error.message}; the node's stages hold {held_bytes >> 20} MiB: delete a deployment that "
        "it has a part of, or "
        "leave the node out",
        field=error.field,
        reason=error.reason,
    )
