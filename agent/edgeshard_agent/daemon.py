"""The agent: one event loop, one compute thread, and the parts put together."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import structlog

from edgeshard import WIRE_VERSION, __version__
from edgeshard.client.renewing import renew_over
from edgeshard.domain.control.commands import (
    ControlMessage,
    Deny,
    DropPacked,
    ListPacked,
    Registration,
    TakeDump,
)
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError, extra_line
from edgeshard.domain.identity import Role
from edgeshard.domain.ids import NodeId, NodeName, OperationId, check_name
from edgeshard.metrics.exposition import Metrics
from edgeshard.metrics.families import OwnCondition
from edgeshard.metrics.listener import MetricsListener
from edgeshard.process.about import Process
from edgeshard.process.clock import SystemClock
from edgeshard.process.config import write_ready_file
from edgeshard.process.control_groups import cpu_quota
from edgeshard.process.descriptors import connection_cap, raise_descriptor_limit
from edgeshard.process.logs import tell_ready
from edgeshard.process.machine_facts import Machine, compute_threads
from edgeshard.process.private import private_directory
from edgeshard.process.programs import lasting_imports
from edgeshard.process.reloading import Reloading
from edgeshard.process.watchdog import Notifier, feed_watchdog
from edgeshard.proto.v1.stage_pb2_grpc import add_StageServiceServicer_to_server
from edgeshard.rpc.channel import (
    CONTROL_KEEPALIVE_S,
    CONTROL_PING_TIMEOUT_S,
    WINDOW_BYTES,
    open_channel,
)
from edgeshard.rpc.renewal import adopted, keep_renewed
from edgeshard.rpc.server import MOST_CONNECTIONS, Server
from edgeshard.rpc.tls import TlsFiles, check_secure, join_address, split_address
from edgeshard.storage.blobs import BlobDirectory
from edgeshard_agent.core.events import CommandReceived
from edgeshard_agent.core.measuring import ControlLost
from edgeshard_agent.engine.compute_thread import ComputeThread, HangCheck
from edgeshard_agent.engine.long_texts import text_memory_bytes
from edgeshard_agent.hosting.around import HostServices, MakeTools, ReadFacts
from edgeshard_agent.hosting.host import DumpRequests, Hosting, PackedRequests
from edgeshard_agent.hosting.node_metrics import AgentMetrics
from edgeshard_agent.measuring.live_links import LiveLinks
from edgeshard_agent.measuring.machine_facts import (
    HugePageWatch,
    available_bytes,
    has_cores_of_its_own,
    leave_out_bf16_products,
    machine_facts,
)
from edgeshard_agent.measuring.node import MeasuredNode, Reports
from edgeshard_agent.measuring.others import OthersWatch
from edgeshard_agent.net.control import ControlClient
from edgeshard_agent.net.link_receiver import StageServicer
from edgeshard_agent.net.streams import MAX_RETRY_S
from edgeshard_agent.settings import AgentSettings
from edgeshard_agent.store.blob_cache import BlobCache

if TYPE_CHECKING:
    from edgeshard_agent.emulation import Emulation

log = structlog.get_logger()

LIBRARIES = ("grpcio", "protobuf", "pydantic", "safetensors", "tokenizers", "torch", "transformers")
"""Whose versions a dump names."""
STOP_LIMIT_S = 1.5
"""Closing streams and channels takes no longer than this."""
STREAM_GRACE_S = 0.2
JOIN_FIRST_S = 1.0
"""How long a node tries to join before it imports what computes, which slows joining down."""


async def run(settings: AgentSettings, read: Callable[[], AgentSettings]) -> NoReturn:
    """Serve, then end the process with exit code 0. `read` reads the settings again. Raises what
    `serve` raises.

    It exits at once instead of returning: Python would wait for threads that load or hash
    gigabytes, and tearing down torch's modules takes a second. The files on disk are complete at
    any moment.
    """
    await serve(settings, read)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def serve(settings: AgentSettings, read: Callable[[], AgentSettings]) -> None:
    """Run until SIGTERM or SIGINT. Raises typed errors for faults that an operator must mend."""
    notifier = Notifier.from_environment()
    if not settings.bf16_products:
        leave_out_bf16_products()
    node_id, tls = _identity(settings)
    lock = lock_state_dir(settings.state_dir)
    emulation, facts = _emulation(settings), machine_facts(settings.device, settings.memory)
    threads = settings.threads or compute_threads(facts.cores, cpu_quota())
    state_dir = settings.state_dir
    own = MeasuredNode(
        node_id, facts, settings.device, threads, settings.memory, state_dir, tls, emulation
    )
    ends = _Endpoints(settings, tls)
    cache = BlobCache(
        state_dir / "cache", settings.cache_limit, _shared_store(settings.shared_store)
    )
    await cache.start()
    address = await ends.server.start()
    node = _Node(settings, own, ends, cache, address)
    await node.metrics.start()
    renewing = None
    if tls is not None:
        renewing = asyncio.create_task(
            keep_renewed(tls, renew_over(ends.control, settings.coordinator))
        )
    log.info("listener_opened", address=address, node=settings.name)
    try:
        reloading = Reloading(settings, read, node.prepared)
        await _until_stopped(node.client, partial(node.compute, notifier), reloading, address)
    finally:
        notifier.stopping()
        await node.metrics.stop()
        if renewing is not None:
            renewing.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_LIMIT_S):
                await node.close()
                await ends.close()
        node.worker.close()
        lock.close()


def _identity(settings: AgentSettings) -> tuple[NodeId, TlsFiles | None]:
    """The node's id and certificate. Also raises errors of its addresses, before any listener
    starts."""
    check_name(settings.name, "name")
    tls = settings.tls()
    if tls is not None:
        tls.check_is(Role.AGENT, settings.name)
    node_id = persistent_node_id(settings.state_dir)
    if tls is not None:
        tls = adopted(tls, settings.state_dir / "pki")
    check_secure(settings.listen, tls, "listen")
    _advertised(settings, settings.listen)
    return node_id, tls


class _Endpoints:
    """A node's server and its channels to the coordinator."""

    def __init__(self, settings: AgentSettings, tls: TlsFiles | None) -> None:
        # Packed files and outgoing links take more descriptors here than callers do.
        connections = connection_cap(raise_descriptor_limit(), 1 / 4, MOST_CONNECTIONS)
        self.server = Server(settings.listen, tls, most_connections=connections)
        self.servicer = StageServicer()
        add_StageServiceServicer_to_server(self.servicer, self.server.grpc)
        # A fetch of weights must not delay commands and heartbeats, and neither may delay tokens.
        self.dial = partial(
            open_channel,
            settings.coordinator,
            tls,
            "coordinator",
            keepalive_s=CONTROL_KEEPALIVE_S,
            window_bytes=WINDOW_BYTES,
        )
        self.control = self.dial(ping_timeout_s=CONTROL_PING_TIMEOUT_S, reconnect_s=MAX_RETRY_S)
        self.store = self.dial(window_bytes=None)

    async def close(self) -> None:
        # Streams of this node's stages have ended with the stages; waiting for others is not worth
        # it.
        await self.server.stop(STREAM_GRACE_S)
        for channel in (self.control, self.store):
            await channel.close()


class _Node:
    """The parts of a node that listens at `address`, put together."""

    def __init__(
        self,
        settings: AgentSettings,
        own: MeasuredNode,
        ends: _Endpoints,
        cache: BlobCache,
        address: str,
    ) -> None:
        self._settings = settings
        self._own = own
        self._ends = ends
        self._cache = cache
        self._address = address
        self._clock = clock = SystemClock()
        self.worker = ComputeThread(own.threads, clock)
        self._machine = Machine(__version__, own.state_dir, own.tls)
        self.client = self._make_client()
        self._links = (
            LiveLinks(own.node_id, self.client.report, clock) if own.emulation is None else None
        )
        around = HostServices(
            own.node_id,
            self.worker,
            ends.servicer,
            ends.dial,
            own.tls,
            clock,
            self.client.changed,
            own.emulation,
            self._links,
            self.client.send,
            # The accelerator's memory is measured later, and texts use the system's memory.
            text_memory_bytes(own.facts.memory_budget_bytes or available_bytes()),
        )
        self._hosting = Hosting(around, self.client.send_results, self.client.started)
        self._process = process = Process(
            settings, {"edgeshard": __version__, "wire": str(WIRE_VERSION)}, LIBRARIES
        )
        self._dumps = DumpRequests(
            self._hosting, process.about, self.client.send_dump, self.client.send_results
        )
        self._packed = PackedRequests(cache.packed, self.client.send_results)
        metrics = Metrics(
            AgentMetrics(self._hosting, cache).collect,
            OwnCondition(self._machine.condition).collect,
        )
        self.metrics = MetricsListener(
            settings.metrics_listen, own.tls, metrics, ends.server.denials
        )

    def prepared(self, settings: AgentSettings) -> Callable[[], None]:
        """A function that applies the settings when they are read again."""

        def take_up() -> None:
            # blobs over the limit are removed when space is needed next
            self._cache.limit_bytes = settings.cache_limit
            self._process.settings = settings

        return take_up

    def _make_client(self) -> ControlClient:
        own, settings = self._own, self._settings
        name = NodeName(settings.name)
        address = _advertised(settings, self._address)
        incarnation = secrets.token_hex(8)
        facts = own.shown(own.facts)
        registration = Registration(
            own.node_id, name, address, WIRE_VERSION, facts, incarnation, True, settings.labels
        )
        return ControlClient(
            self._ends.control,
            settings.coordinator,
            registration,
            self._obey,
            lambda: self._hosting.statuses(),
            available_bytes,
            HugePageWatch(self._clock).read,
            lambda: self._hosting.post(ControlLost()),
            # An accelerator computes whatever the processor's cores do.
            OthersWatch(own.threads).share if own.facts.kind == "cpu" else lambda: 0.0,
            self._machine.condition,
            lambda: self._cache.packed.ids,
            self._clock.now,
        )

    def _obey(self, operation_id: OperationId, command: ControlMessage) -> None:
        if isinstance(command, TakeDump):
            self._dumps.take(operation_id)
        elif isinstance(command, ListPacked | DropPacked):
            self._packed.take(operation_id, command)
        elif isinstance(command, Deny):
            self._ends.server.denials.replace(command.denials)
        else:
            self._hosting.post(CommandReceived(operation_id, command))

    async def compute(self, notifier: Notifier) -> None:
        """Import what computes, and be ready: whether or not a coordinator is there, which may
        start later."""
        own = self._own
        settings = self._settings
        links = self._links
        make_tools, read_facts = await _import_tools(self.client)
        facts = own.shown(await asyncio.to_thread(read_facts, own.device, own.memory))
        reports = Reports(
            self.client.report, self.client.send, links.probed if links else lambda probed: None
        )
        # Spinning would use up a CPU quota, and the time of other agents on cores that they share.
        may_spin = own.emulation is None and has_cores_of_its_own() and not cpu_quota()
        idle_spin_s = settings.idle_spin_s if may_spin else 0.0
        node, store = replace(own, facts=facts), self._ends.store
        tools = make_tools(
            node, reports, self._cache, store, self.worker, idle_spin_s, settings.packs
        )
        self._hosting.start(tools, facts)
        notifier.ready(f"serving on {self._address}")
        check = HangCheck(self._hosting.stages, self.worker, self._clock)
        beats = feed_watchdog(notifier, lambda: {"compute thread": check.found_well})
        await asyncio.gather(check.run(), beats, self._machine.measure())

    async def close(self) -> None:
        await self._hosting.close()
        if self._links is not None:
            await self._links.close()


def _emulation(settings: AgentSettings) -> Emulation | None:
    """The node that this one pretends to be; what reads it brings all of the planner, so only then
    is it imported."""
    if settings.emulate is None:
        return None
    from edgeshard_agent.emulation import load_emulation

    return load_emulation(settings.emulate, settings.name)


async def _import_tools(client: ControlClient) -> tuple[MakeTools, ReadFacts]:
    """The functions that make the node's tools, imported once the node has joined. Raises
    FailedPreconditionError if the import fails."""

    def imported() -> tuple[MakeTools, ReadFacts]:
        # The only place where the daemon imports torch and the modules that need it. Without
        # `lasting_imports` every look for garbage would walk through all of torch.
        with lasting_imports():
            from edgeshard_agent.hosting.loading import make_tools, read_facts

        return make_tools, read_facts

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(client.joined.wait(), JOIN_FIRST_S)
    try:
        return await asyncio.to_thread(imported)
    except Exception as error:
        log.exception("import_failed")
        raise FailedPreconditionError(
            f"what computes cannot be imported ({type(error).__name__}: {error}); install it "
            "again: "
            f"{extra_line('agent')} and with --force-reinstall",
            reason="IMPORT_FAILED",
        ) from None


async def _until_stopped(
    client: ControlClient,
    start: Callable[[], Coroutine[Any, Any, None]],
    reloading: Reloading[AgentSettings],
    address: str,
) -> None:
    """Join, start, and serve until a signal. Raises why the node cannot join or cannot start."""
    settings, stopped = reloading.settings, asyncio.Event()
    reloading.on_hangup(stopped.set)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    running = asyncio.create_task(client.run())
    starting = asyncio.create_task(start())
    stopping = asyncio.create_task(stopped.wait())
    placeable = asyncio.create_task(client.placeable.wait())
    tasks: tuple[asyncio.Task[Any], ...] = (running, starting, stopping, placeable)
    waited_for = set(tasks)
    try:
        while not (running.done() or stopping.done()):
            done, waited_for = await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if placeable in done:
                what = "`edgectl get nodes` lists it, `edgectl deploy` places layers"
                tell_ready(f"node {settings.name} serves on {address}. {what}")
                if settings.ready_file is not None:
                    write_ready_file(settings.ready_file, address)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def persistent_node_id(state_dir: Path) -> NodeId:
    """This node's id, made once and kept in the state directory, so that a restarted node is the
    same node."""
    path = state_dir / "node-id"
    try:
        private_directory(state_dir, "state-dir")
        if not path.exists():
            with tempfile.NamedTemporaryFile(
                "w", dir=state_dir, prefix="node-id.", delete=False
            ) as file:
                file.write(secrets.token_hex(16) + "\n")
            os.link(file.name, path)
            Path(file.name).unlink()
        text = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise InvalidArgumentError(
            f"--state-dir {state_dir}: {error.strerror}", field="state-dir"
        ) from None
    if not text:
        raise InvalidArgumentError(f"{path} is empty: remove it to get a new id", field="state-dir")
    return NodeId(text)


def lock_state_dir(state_dir: Path) -> TextIO:
    """Lock the state directory until the returned file is closed.

    Two agents on one directory would be one node to the coordinator, and push each other out for
    ever. Raises FailedPreconditionError when another process holds it.
    """
    file = (state_dir / "lock").open("w", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise FailedPreconditionError(
            f"--state-dir {state_dir} is in use by another agent; give each its own",
            field="state-dir",
            reason="STATE_DIR_IN_USE",
        ) from None
    return file


def _shared_store(directory: Path | None) -> BlobDirectory | None:
    """Raises InvalidArgumentError for a directory that this process cannot read."""
    if directory is None:
        return None
    blobs = directory / "blobs"
    if not blobs.is_dir() or not os.access(blobs, os.R_OK | os.X_OK):
        raise InvalidArgumentError(
            f"shared-store {directory} holds no models that this user can read; give the folder "
            "`models` of the "
            "coordinator's state directory, or leave it out: the weights are fetched then",
            field="shared-store",
            reason="UNREADABLE_STORE",
        )
    return BlobDirectory(blobs)


def _advertised(settings: AgentSettings, address: str) -> str:
    """The address that neighbours dial: `--advertise`, with the listener's port when it gives port
    0, or the listener itself."""
    if settings.advertise is None:
        host, _ = split_address(address, "listen")
        if host in ("0.0.0.0", "::"):
            raise InvalidArgumentError(
                f"listen {settings.listen} names no address that neighbours can dial: give "
                "--advertise HOST:PORT",
                field="advertise",
            )
        return address
    host, port = split_address(settings.advertise, "advertise")
    if port == 0:
        port = split_address(address)[1]
    return join_address(host, port)
