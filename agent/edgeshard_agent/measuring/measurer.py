"""Carrying out the coordinator's commands to measure: layers in a process of their own, links one after the other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import structlog

from edgeshard.architectures import parse_config
from edgeshard.domain.control.commands import CommandProgress, MeasureCompute, Peer, ProbeLinks, ProfileReport
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.models.dtypes import weights_text
from edgeshard.domain.nodes.profile import ComputeProfile, MeasuredLink, config_hash
from edgeshard_agent.core.measuring import MeasuringTask
from edgeshard_agent.measuring.cache import ProfileStore
from edgeshard_agent.measuring.compute import fingerprint
from edgeshard_agent.measuring.disk import EXTENTS, measure_disk
from edgeshard_agent.measuring.facts import read_facts
from edgeshard_agent.measuring.node import MeasuredNode, Reports
from edgeshard_agent.measuring.probing import at_once, probe_link
from edgeshard_agent.measuring.process import Tell, measure_apart
from edgeshard_agent.measuring.worker import MeasuringJob

log = structlog.get_logger()


@dataclass(eq=False)
class Measurer:
    """Measures and reports before it returns."""

    node: MeasuredNode
    reports: Reports

    def __post_init__(self) -> None:
        self._store = ProfileStore(self.node.state_dir)

    async def run(self, task: MeasuringTask) -> None:
        """Raises the profiler's typed errors, and the coordinator's answer to the report."""

        def tell(done: int, total: int, what: str) -> None:
            self.reports.progress(CommandProgress(task.operation_id, done, total, what))

        match task.command:
            case MeasureCompute():
                await self.reports.report(await self._compute(task.command, tell))
            case ProbeLinks():
                report = await self._links(task.command.peers, tell)
                await self.reports.report(report)
                self.reports.probed(report.links)

    async def _compute(self, command: MeasureCompute, tell: Tell) -> ProfileReport:
        parse_config(command.config)
        node = self.node
        if node.emulation is not None:
            profile = node.emulation.profile(node.facts, command.config, command.dtype, command.quantisation)
            return ProfileReport(node.node_id, compute=(profile,))
        profile = await self._kept(command) or await self._measured(command, tell)
        # The node holds no stage now, so the free memory is what stages may have.
        facts = await asyncio.to_thread(read_facts, node.device, node.memory, node.facts.bits_fingerprint)
        return ProfileReport(node.node_id, facts, (profile,))

    async def _kept(self, command: MeasureCompute) -> ComputeProfile | None:
        if command.again:
            return None
        node = self.node
        marks = fingerprint(node.facts, node.threads), config_hash(command.config), command.dtype, command.quantisation
        return await asyncio.to_thread(self._store.find, *marks, command.effort)

    async def _measured(self, command: MeasureCompute, tell: Tell) -> ComputeProfile:
        node = self.node
        job = MeasuringJob(
            command.config, command.dtype, node.device, node.threads, command.effort, node.memory, command.quantisation
        )
        profile = await measure_apart(job, tell)
        extent = EXTENTS[command.effort]
        profile = replace(profile, disk=await asyncio.to_thread(measure_disk, node.state_dir, extent))
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

    async def _links(self, peers: tuple[Peer, ...], tell: Tell) -> ProfileReport:
        """The links to the nodes that answer."""
        links, emulation = [], self.node.emulation
        for number, peer in enumerate(peers):
            tell(number, len(peers), f"link to {peer.name}")
            try:
                way = at_once if emulation is None else emulation.way(peer.name)
                profile = await probe_link(peer, self.node.tls, way=way)
            except EdgeShardError as error:
                log.warning("link_not_measured", to=peer.name, reason=error.reason, why=error.message)
            else:
                links.append(MeasuredLink(self.node.node_id, peer.node_id, profile))
        return ProfileReport(self.node.node_id, links=tuple(links))
