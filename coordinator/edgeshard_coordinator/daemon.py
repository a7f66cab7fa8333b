"""The coordinator's process: settings in, signals, an orderly end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from edgeshard import WIRE_VERSION, __version__
from edgeshard.cpsat.solver_process import CpSat
from edgeshard.domain.errors import (
    DeniedError,
    FailedPreconditionError,
    InvalidArgumentError,
    extra_line,
)
from edgeshard.domain.identity import Role, authority_digest
from edgeshard.gateway.access.cors import Origins, parse_origins
from edgeshard.gateway.connections.listen import HttpListen
from edgeshard.identity.authority import Authority, now
from edgeshard.metrics.listener import MetricsListener
from edgeshard.process.about import Process
from edgeshard.process.clock import SystemClock
from edgeshard.process.config import load_settings, write_ready_file
from edgeshard.process.descriptors import connection_cap, raise_descriptor_limit
from edgeshard.process.extras import check_extras, missing
from edgeshard.process.logs import configure_logging, tell_ready
from edgeshard.process.machine_facts import Machine
from edgeshard.process.parent import end_with
from edgeshard.process.private import private_directory
from edgeshard.process.reloading import Reloading
from edgeshard.process.watchdog import Notifier, feed_watchdog
from edgeshard.proto.v1.identity_pb2_grpc import add_EnrolmentServiceServicer_to_server
from edgeshard.rpc.channel import CONTROL_KEEPALIVE_S, WINDOW_BYTES
from edgeshard.rpc.denials import Denials
from edgeshard.rpc.discovery import Announced, keep_announced
from edgeshard.rpc.renewal import adopted, keep_renewed
from edgeshard.rpc.server import EnrolmentServer, Server
from edgeshard.rpc.tls import TlsFiles, check_private, join_address, read_pem, split_address
from edgeshard.rpc.tls_files import tls_files
from edgeshard_coordinator.additions.adder import ModelAdder
from edgeshard_coordinator.additions.folders import ModelFolders
from edgeshard_coordinator.control.coordinator import Coordinator
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.control.services.auditing import CallAudit
from edgeshard_coordinator.control.services.gateway import ApiKeyAuthenticator
from edgeshard_coordinator.core.placement.planned import PlanningPlacer
from edgeshard_coordinator.core.values.seals import SealKey
from edgeshard_coordinator.dashboard.places import PageOrigins, parse_place
from edgeshard_coordinator.membership.addresses import Addresses
from edgeshard_coordinator.membership.api_keys import ApiKeyStore, KeyBook
from edgeshard_coordinator.membership.membership import (
    EnrolmentServicer,
    GatewayCertificate,
    Issuing,
    Membership,
)
from edgeshard_coordinator.membership.store import MembershipStore
from edgeshard_coordinator.packages.listener import PackagesListener
from edgeshard_coordinator.packages.shelf import Shelf
from edgeshard_coordinator.settings import CoordinatorSettings
from edgeshard_coordinator.store import ModelStore, ModelStoreServicer

if TYPE_CHECKING:
    from edgeshard.gateway.connections.server import GatewayServer
    from edgeshard_coordinator.dashboard.door import Login

log = structlog.get_logger()

LIBRARIES = ("grpcio", "protobuf", "pydantic")
"""Packages whose versions a dump names."""
MOST_MEMBERS, MOST_JOINERS = 4096, 1024
"""Connections at the port of nodes, clients and operators, and at the port for joining. With every
one of them open the process is 300 MB larger."""
STOP_LIMIT_S = 1.8
"""Seconds that an orderly end takes at most; the disk is complete at any moment anyway."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises EdgeShardError when it cannot start."""
    read = partial(load_settings, CoordinatorSettings, "edgeshard-coordinator", arguments)
    settings = read()
    end_with(settings.parent)
    configure_logging(settings.log_level)
    asyncio.run(serve(settings, read, raise_descriptor_limit()))


async def serve(
    settings: CoordinatorSettings, read: Callable[[], CoordinatorSettings], descriptors: int
) -> None:
    """`read` reads the settings again; `descriptors` is the number that this process may open."""
    notifier, stopping = Notifier.from_environment(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    site = _site(settings)
    listen, certificate = _http_listen(settings, site)
    origins, places = _origins(settings), _places(settings, listen)
    machine = Machine(__version__, settings.state_dir, site.tls)
    process = Process(settings, {"edgeshard": __version__, "wire": str(WIRE_VERSION)}, LIBRARIES)
    most_members = connection_cap(descriptors, 1 / 2, MOST_MEMBERS)
    models = await _open_models(settings)
    adder = await _open_adder(settings, places, models)
    coordinator = await _assemble(settings, site, models, most_members, machine, process)
    Reloading(settings, read, partial(_prepared, coordinator, process)).on_hangup(stopping.set)
    metrics = MetricsListener(settings.metrics_listen, site.tls, coordinator.metrics, site.denials)
    address = await coordinator.start()
    listeners = _Listeners(coordinator, metrics, adder)
    try:
        await metrics.start()
        joiners = connection_cap(descriptors, 1 / 8, MOST_JOINERS)
        listeners.enrolment, joins_at = await _open_enrolment(
            settings, site, coordinator, address, joiners
        )
        listeners.packages = await _open_packages(settings, site, coordinator)
        if listen is not None:
            authenticator = ApiKeyAuthenticator(
                site.keys, site.audit, asks=not settings.http_no_key
            )
            listeners.gateway = await _open_gateway(
                listen, origins, authenticator, coordinator, site, places, adder
            )
        log.info("coordinator_started", address=address)
        if settings.ready_file is not None:
            write_ready_file(settings.ready_file, address, listeners.url, joins_at)
        notifier.ready(f"serving on {address}")
        tell_ready(_next_step(site, address))
        beats = feed_watchdog(notifier, lambda: {"state loop": coordinator.loop.turns})
        renewing = (*_renewing(certificate), *_renewing_own(site))
        announcing = _announcing(settings, site, address, joins_at)
        chores = asyncio.gather(beats, machine.measure(), *renewing, *announcing)
        await stopping.wait()
        notifier.stopping()
        chores.cancel()
        with suppress(asyncio.CancelledError, TimeoutError):  # an announcement is taken back
            await asyncio.wait_for(chores, 1.0)
    finally:
        await listeners.close()
    log.info("coordinator_shutdown_started")


@dataclass
class _Listeners:
    """What listens, as far as it was opened."""

    coordinator: Coordinator
    metrics: MetricsListener
    adder: ModelAdder
    enrolment: EnrolmentServer | None = None
    packages: PackagesListener | None = None
    gateway: GatewayServer | None = None

    @property
    def url(self) -> str:
        """The gateway's; "" without one."""
        return "" if self.gateway is None else self.gateway.url

    async def close(self) -> None:
        await self.metrics.stop()
        await self.adder.stop()
        if self.enrolment is not None:
            await self.enrolment.stop()
        if self.packages is not None:
            await self.packages.stop()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.coordinator.stop(), STOP_LIMIT_S)
        if self.gateway is not None:
            await self.gateway.stop()


def _next_step(site: _Site, address: str) -> str:
    """A line for people: the daemon, and the way for a node to it."""
    if site.tls is None:
        joins = f"edgeshard-agent --plaintext --coordinator {address} --name NAME --state-dir DIR"
    else:
        joins = "run what `edgectl token create --node NAME` prints, on the node"
    return f"the coordinator serves on {address}. To add a node: {joins}"


@dataclass(frozen=True, slots=True)
class _Site:
    """The coordinator's trust and members, both None in plaintext, and its logbook and keys."""

    tls: TlsFiles | None
    membership: Membership | None
    denials: Denials
    audit: AuditLog
    keys: KeyBook
    issuing: Issuing | None = None
    """The maker of certificates; None if they are made by hand."""


def _site(settings: CoordinatorSettings) -> _Site:
    if settings.announce:
        if settings.enrol_listen is None:
            raise InvalidArgumentError(
                "--announce needs --enrol-listen, the address where processes join",
                field="announce",
            )
        check_extras("--announce", "discovery")
    files, denials = settings.tls(), Denials()
    keys = KeyBook(ApiKeyStore(settings.state_dir / "keys.sqlite"), lambda: now().timestamp())
    if files is None:
        if settings.ca_key is not None or settings.enrol_listen is not None:
            raise InvalidArgumentError(
                "--ca-key and --enrol-listen need TLS files", field="tls-cert"
            )
        return _Site(
            None, None, denials, AuditLog(settings.state_dir / "audit", SystemClock()), keys
        )
    files.check_is(Role.COORDINATOR, "coordinator")
    tls = adopted(files, settings.state_dir / "pki")
    issuing = None
    if settings.ca_key is not None:
        check_private(settings.ca_key, "ca-key")
        authority = Authority.load(tls.ca.read_bytes(), read_pem(settings.ca_key, "ca-key"))
        issuing = Issuing(authority, tls, timedelta(seconds=settings.certificate_life))
    elif settings.enrol_listen is not None:
        raise InvalidArgumentError(
            "--enrol-listen needs --ca-key, the key of the site's authority", field="ca-key"
        )
    store = MembershipStore(settings.state_dir / "membership.sqlite")
    membership = Membership(tls.principal().site, store, denials, issuing, now, SystemClock().now)
    seal_key = None if issuing is None else SealKey(issuing.authority.derived("audit seals"))
    audit = AuditLog(settings.state_dir / "audit", SystemClock(), seal_key)
    return _Site(tls, membership, denials, audit, keys, issuing)


async def _open_enrolment(
    settings: CoordinatorSettings,
    site: _Site,
    coordinator: Coordinator,
    address: str,
    most_connections: int,
) -> tuple[EnrolmentServer | None, str]:
    """The server for joining, and its address, host:port; None and "" if there is none. Raises
    UnavailableError if the port is taken."""
    if site.tls is None or site.membership is None or settings.enrol_listen is None:
        return None, ""
    server = EnrolmentServer(
        settings.enrol_listen, site.tls, CallAudit(site.audit), most_connections
    )
    add_EnrolmentServiceServicer_to_server(EnrolmentServicer(site.membership), server.grpc)
    enrolment = await server.start()
    coordinator.identities.addresses = Addresses(address, enrolment, settings.advertise)
    log.info("enrolment_listener_opened", address=enrolment)
    return server, enrolment


def _announcing(
    settings: CoordinatorSettings, site: _Site, address: str, joins_at: str
) -> list[Coroutine[None, None, None]]:
    if not settings.announce or site.membership is None:
        return []
    authority = authority_digest(site.membership.authorities()[0])
    return [keep_announced(Announced(site.membership.site, authority, address, joins_at))]


async def _open_packages(
    settings: CoordinatorSettings, site: _Site, coordinator: Coordinator
) -> PackagesListener | None:
    """The package listener for machines without EdgeShard; None if there is none. Raises
    InvalidArgumentError if the folder holds no wheels or the site admits no new members,
    UnavailableError if the port is taken."""
    if settings.wheels is None:
        if settings.wheels_listen is not None:
            raise InvalidArgumentError(
                "--wheels-listen needs --wheels, a folder of wheels", field="wheels-listen"
            )
        return None
    addresses = coordinator.identities.addresses
    if (
        site.tls is None
        or site.membership is None
        or settings.enrol_listen is None
        or addresses is None
    ):
        raise InvalidArgumentError(
            "--wheels serves machines that join: it needs --enrol-listen and --ca-key",
            field="wheels",
            reason="NO_ENROLMENT",
        )
    shelf = await asyncio.to_thread(Shelf, settings.wheels)
    host, port = split_address(settings.enrol_listen)
    listen = settings.wheels_listen or join_address(host, min(port + 1, 65535) if port else 0)
    packages = PackagesListener(listen, site.tls, site.membership, site.denials, shelf, site.audit)
    at = await packages.start()
    coordinator.identities.addresses = replace(
        addresses, packages=at, bootstrap_sha256=packages.script_sha256
    )
    log.info(
        "packages_listener_opened", address=at, folders=[folder.name for folder in shelf.folders]
    )
    return packages


def _http_listen(
    settings: CoordinatorSettings, site: _Site
) -> tuple[HttpListen | None, GatewayCertificate | None]:
    """The gateway's listener, None if there is none, and its certificate if the site makes it.
    Raises as `HttpListen.check`, and DeniedError for a gateway that anybody on the network could
    use."""
    if settings.http_listen is None:
        return None, None
    if missing("gateway"):
        raise FailedPreconditionError(
            f"--http-listen needs the gateway extra: {extra_line('gateway')}", field="http-listen"
        )
    listen = HttpListen(settings.http_listen, settings.http_tls_cert, settings.http_tls_key)
    certificate = None
    if (
        site.issuing is not None
        and not listen.is_local
        and listen.cert is None
        and listen.key is None
    ):
        certificate = GatewayCertificate(
            site.issuing, settings.state_dir / "gateway", listen.address, settings.http_name
        )
        listen = _certified(listen, certificate)
    elif settings.http_name:
        raise InvalidArgumentError(
            "--http-name is for a certificate that the site issues: it needs --ca-key and an "
            "--http-listen beyond loopback, and cannot be combined with --http-tls-cert",
            field="http-name",
        )
    listen.check()
    if settings.http_no_key and not listen.is_local:
        raise DeniedError(
            "--http-no-key works on loopback only: create keys with edgectl key create",
            field="http-no-key",
        )
    return listen, certificate


def _certified(listen: HttpListen, certificate: GatewayCertificate) -> HttpListen:
    try:
        files = certificate.made()
    except OSError as error:
        raise InvalidArgumentError(
            f"--state-dir {certificate.directory.parent}: {error.strerror}",
            field="state-dir",
            reason="STATE_DIR",
        ) from None
    return replace(listen, cert=files.cert, key=files.key, host=certificate.hosts()[0])


def _renewing(certificate: GatewayCertificate | None) -> list[Coroutine[None, None, None]]:
    if certificate is None:
        return []
    return [keep_renewed(tls_files(certificate.directory), certificate.renewed)]


def _renewing_own(site: _Site) -> list[Coroutine[None, None, None]]:
    """The coordinator's own certificate, if the site makes it."""
    if site.tls is None or site.membership is None or site.issuing is None:
        return []
    return [keep_renewed(site.tls, partial(site.membership.renew, site.tls.principal()))]


def _origins(settings: CoordinatorSettings) -> Origins:
    """Pages that may use the gateway. Raises DeniedError if every page in a browser of this machine
    could."""
    origins = parse_origins(settings.http_allow_origin)
    if origins.any and settings.http_no_key:
        raise DeniedError(
            "--http-allow-origin * with --http-no-key lets any web page use the models: name the "
            "pages",
            field="http-allow-origin",
        )
    return origins


def _places(settings: CoordinatorSettings, listen: HttpListen | None) -> PageOrigins | None:
    """The addresses at which browsers find the dashboard, None if there is none. Raises as
    `parse_place`, and InvalidArgumentError for a URL at which there would be none."""
    if listen is not None and not settings.no_dashboard:
        front = None if settings.dashboard_url is None else parse_place(settings.dashboard_url)
        return PageOrigins(listen.cert is not None, listen.names, front)
    if settings.dashboard_url is not None:
        raise InvalidArgumentError(
            "--dashboard-url needs --http-listen, and cannot be combined with --no-dashboard",
            field="dashboard-url",
        )
    return None


async def _open_gateway(
    listen: HttpListen,
    origins: Origins,
    authenticator: ApiKeyAuthenticator,
    coordinator: Coordinator,
    site: _Site,
    places: PageOrigins | None,
    adder: ModelAdder,
) -> GatewayServer:
    """`places` is None if there is no dashboard. Raises UnavailableError if the port is taken."""

    def made() -> tuple[GatewayServer, Login | None]:
        # Half a second that a coordinator without a gateway need not wait, and no node waits for
        # with one.
        from edgeshard.gateway.app import make_app
        from edgeshard.gateway.connections.server import GatewayServer
        from edgeshard_coordinator.control.services.gateway import SiteBackend

        backend = SiteBackend(coordinator.front, coordinator.models, coordinator.chats)
        pages, door = None, None
        if places is not None:
            from edgeshard_coordinator.dashboard.opening import open_dashboard

            named = None if site.tls is None else site.tls.principal().site
            pages, door = open_dashboard(
                coordinator, places, ApiKeyAuthenticator(site.keys, site.audit), named, adder
            )
        app = make_app(
            backend,
            authenticator,
            coordinator.metrics,
            local_only=listen.is_local,
            origins=origins,
            pages=pages,
        )
        return GatewayServer(app, listen), door

    server, door = await asyncio.to_thread(made)
    await server.start()
    if door is not None and places is not None:
        from edgeshard_coordinator.dashboard.opening import link

        coordinator.identities.links = partial(link, door, places.url(server.url))
    log.info("gateway_started", url=server.url)
    return server


def _prepared(
    coordinator: Coordinator, process: Process, settings: CoordinatorSettings
) -> Callable[[], None]:
    """A function that applies settings that were read again. Raises InvalidArgumentError for a
    wrong file of quotas."""
    quotas = settings.read_quotas()

    def take_up() -> None:
        coordinator.front.quotas.change(quotas)
        process.settings = settings

    return take_up


async def _open_models(settings: CoordinatorSettings) -> ModelStore:
    """The opened store. Raises InvalidArgumentError for a state directory that cannot be used."""
    models = ModelStore(settings.state_dir / "models")
    try:
        private_directory(settings.state_dir, "state-dir")
        await asyncio.to_thread(models.open)
    except OSError as error:
        raise InvalidArgumentError(
            f"--state-dir {settings.state_dir}: {error.strerror}",
            field="state-dir",
            reason="STATE_DIR",
        ) from None
    return models


async def _open_adder(
    settings: CoordinatorSettings, places: PageOrigins | None, models: ModelStore
) -> ModelAdder:
    """What adds models for the dashboard. Raises InvalidArgumentError for options that need a
    dashboard, FailedPreconditionError without the extra that reads the Hub."""
    if places is None and (settings.model_folder or settings.allow_hub):
        raise InvalidArgumentError(
            "--model-folder and --allow-hub are for the dashboard: they need --http-listen, and "
            "cannot "
            "be combined with --no-dashboard",
            field="model-folder",
        )
    if settings.allow_hub:
        check_extras("--allow-hub", "models")
    folders = ModelFolders([Path(folder) for folder in settings.model_folder])
    adder = ModelAdder(
        models, settings.state_dir / "additions", folders, allow_hub=settings.allow_hub
    )
    await asyncio.to_thread(adder.open)
    return adder


async def _assemble(
    settings: CoordinatorSettings,
    site: _Site,
    models: ModelStore,
    most_connections: int,
    machine: Machine,
    process: Process,
) -> Coordinator:
    watch = CallAudit(site.audit)
    return Coordinator(
        Server(
            settings.listen,
            site.tls,
            CONTROL_KEEPALIVE_S,
            WINDOW_BYTES,
            site.denials,
            watch,
            most_connections,
        ),
        StateStore(settings.state_dir / "state.sqlite"),
        models,
        ModelStoreServicer(models),
        PlanningPlacer(CpSat),
        SystemClock(),
        membership=site.membership,
        quotas=settings.read_quotas(),
        audit=site.audit,
        keys=site.keys,
        own_condition=machine.condition,
        about=process.about,
    )
