"""The coordinator's process: settings in, signals, an orderly end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import suppress

import structlog

from edgeshard import WIRE_VERSION, __version__
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import Role
from edgeshard.process.about import Process
from edgeshard.process.clock import SystemClock
from edgeshard.process.config import load_settings, write_ready_file
from edgeshard.process.logs import configure_logging
from edgeshard.process.notify import Notifier
from edgeshard.process.private import private_directory
from edgeshard.process.watchdog import feed_watchdog
from edgeshard.rpc.channel import CONTROL_KEEPALIVE_S
from edgeshard.rpc.server import Server
from edgeshard_coordinator.control.coordinator import Coordinator
from edgeshard_coordinator.control.persistence import StateStore
from edgeshard_coordinator.core.planned import PlanningPlacer
from edgeshard_coordinator.settings import CoordinatorSettings
from edgeshard_coordinator.store import ModelStore, ModelStoreServicer

log = structlog.get_logger()

LIBRARIES = ("grpcio", "protobuf", "pydantic")
"""Whose versions a dump names."""
WINDOW_BYTES = 4 << 20
"""A model's upload over a path of 100 ms may come with 40 MB/s."""
STOP_LIMIT_S = 1.8
"""An orderly end takes no longer than this; what is on disk is complete at any moment anyway."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises EdgeShardError when it cannot start."""
    settings = load_settings(CoordinatorSettings, "edgeshard-coordinator", arguments)
    configure_logging(settings.log_level)
    asyncio.run(serve(settings))


async def serve(settings: CoordinatorSettings) -> None:
    notifier, stopping = Notifier.from_environment(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    coordinator = await _assemble(settings)
    address = await coordinator.start()
    log.info("coordinator_serves", address=address)
    if settings.ready_file is not None:
        write_ready_file(settings.ready_file, address)
    notifier.ready(f"serving on {address}")
    feeding = asyncio.create_task(feed_watchdog(notifier, lambda: {"state loop": coordinator.loop.turns}))
    await stopping.wait()
    notifier.stopping()
    log.info("coordinator_stops")
    feeding.cancel()
    with suppress(TimeoutError):
        await asyncio.wait_for(coordinator.stop(), STOP_LIMIT_S)


async def _assemble(settings: CoordinatorSettings) -> Coordinator:
    tls = settings.tls()
    if tls is not None:
        tls.check_is(Role.COORDINATOR, "coordinator")
    models = ModelStore(settings.state_dir / "models")
    try:
        private_directory(settings.state_dir, "state-dir")
        await asyncio.to_thread(models.open)
    except OSError as error:
        raise InvalidArgumentError(
            f"--state-dir {settings.state_dir}: {error.strerror}", field="state-dir", reason="STATE_DIR"
        ) from None
    coordinator = Coordinator(
        Server(settings.listen, tls, CONTROL_KEEPALIVE_S, WINDOW_BYTES),
        StateStore(settings.state_dir / "state.sqlite"),
        models,
        ModelStoreServicer(models),
        PlanningPlacer(),
        SystemClock(),
    )
    coordinator.dumps.about = Process(settings, {"edgeshard": __version__, "wire": str(WIRE_VERSION)}, LIBRARIES).about
    return coordinator
