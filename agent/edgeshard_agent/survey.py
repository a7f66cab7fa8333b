"""Carrying out the coordinator's commands to measure: layers in a process of their own, links one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from edgeshard.architectures import parse_config
from edgeshard.commands import CommandProgress, MeasureCompute, Peer, ProbeLinks, ProfileReport
from edgeshard.device import DeviceFacts
from edgeshard.dtypes import weights_text
from edgeshard.errors import EdgeShardError
from edgeshard.ids import NodeId
from edgeshard.profile import ComputeProfile, MeasuredLink, config_hash
from edgeshard.rpc.tls import TlsFiles
from edgeshard_agent.core.survey import Inquiry
from edgeshard_agent.emulation import Emulation, emulated_profile
from edgeshard_agent.net.probing import ShapedWay, probe_link
from edgeshard_agent.net.shaping import LinkShape
from edgeshard_agent.probe import read_facts
from edgeshard_agent.profiler.cache import ProfileStore
from edgeshard_agent.profiler.compute import fingerprint
from edgeshard_agent.profiler.process import Tell, measure_apart
from edgeshard_agent.profiler.worker import Job

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SurveyedBox:
    """What is measured, and by which settings. `memory` is the operator's limit in bytes, None when there is none."""

    node_id: NodeId
    facts: DeviceFacts
    device: str
    threads: int
    memory: int | None
    state_dir: Path
    tls: TlsFiles | None
    emulation: Emulation | None = None


class Surveyor:
    """Measures what it is asked, and reports it before it returns. `on_probed` is told of links once reported."""

    def __init__(
        self,
        box: SurveyedBox,
        report: Callable[[ProfileReport], Awaitable[None]],
        send_progress: Callable[[CommandProgress], None],
        on_probed: Callable[[tuple[MeasuredLink, ...]], None] = lambda links: None,
    ) -> None:
        self._box = box
        self._report = report
        self._send_progress = send_progress
        self._on_probed = on_probed
        self._store = ProfileStore(box.state_dir)

    async def run(self, inquiry: Inquiry) -> None:
        """Raises the profiler's typed errors, and what the coordinator says to the report."""

        def tell(done: int, total: int, what: str) -> None:
            self._send_progress(CommandProgress(inquiry.operation_id, done, total, what))

        match inquiry.command:
            case MeasureCompute():
                await self._report(await self._compute(inquiry.command, tell))
            case ProbeLinks():
                report = await self._links(inquiry.command.peers, tell)
                await self._report(report)
                self._on_probed(report.links)

    async def _compute(self, command: MeasureCompute, tell: Tell) -> ProfileReport:
        parse_config(command.config)
        box = self._box
        if box.emulation is not None:
            profile = emulated_profile(box.emulation, box.facts, command.config, command.dtype, command.quantisation)
            return ProfileReport(box.node_id, compute=(profile,))
        profile = await self._kept(command) or await self._measured(command, tell)
        # Nothing is held now, so that what is free is what stages may have.
        facts = await asyncio.to_thread(read_facts, box.device, box.memory)
        return ProfileReport(box.node_id, facts, (profile,))

    async def _kept(self, command: MeasureCompute) -> ComputeProfile | None:
        if command.again:
            return None
        box = self._box
        marks = fingerprint(box.facts, box.threads), config_hash(command.config), command.dtype, command.quantisation
        return await asyncio.to_thread(self._store.find, *marks, command.quick)

    async def _measured(self, command: MeasureCompute, tell: Tell) -> ComputeProfile:
        box = self._box
        job = Job(
            command.config, command.dtype, box.device, box.threads, command.quick, box.memory, command.quantisation
        )
        profile = await measure_apart(job, tell)
        await asyncio.to_thread(self._store.keep, profile)
        weights = weights_text(profile.dtype, profile.quantisation)
        log.info("measured", model_shape=profile.model_hash, weights=weights, share=profile.processor_share)
        return profile

    async def _links(self, peers: tuple[Peer, ...], tell: Tell) -> ProfileReport:
        """The ways to those that answer."""
        links = []
        for number, peer in enumerate(peers):
            tell(number, len(peers), f"link to {peer.name}")
            try:
                profile = await probe_link(peer.address, self._box.tls, way=self._way(peer))
            except EdgeShardError as error:
                log.warning("link_not_measured", to=peer.name, reason=error.reason, why=error.message)
            else:
                links.append(MeasuredLink(self._box.node_id, peer.node_id, profile))
        return ProfileReport(self._box.node_id, links=tuple(links))

    def _way(self, peer: Peer) -> ShapedWay | None:
        emulation = self._box.emulation
        if emulation is None:
            return None
        there, back = emulation.link(peer.name), emulation.link_from(peer.name)
        return ShapedWay(*(LinkShape(link.bandwidth_bps, link.latency_s) for link in (there, back)))
