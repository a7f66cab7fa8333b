"""edgectl doctor: faults of the site and of this machine, their meaning, and remedies."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli.commands.command_options import option
from edgeshard.cli.commands.observing.doctor_checks import (
    ADVICE,
    COORDINATOR,
    HERE,
    Facts,
    Fault,
    Finding,
    KeyFile,
    TriedPort,
    diagnose,
)
from edgeshard.cli.connect import Connect, connect_of, run
from edgeshard.cli.render.kernel_views import kernel_lines
from edgeshard.cli.render.output import (
    TABLES,
    Column,
    Output,
    OutputOption,
    print_table,
    show_text,
    show_value,
    table,
)
from edgeshard.domain.errors import EdgeShardError

if TYPE_CHECKING:
    from edgeshard.domain.control.site import Site
    from edgeshard.domain.deployments.deployment import Deployment

ANSWER_S = 5.0
"""For the coordinator to answer."""
PORT_S = 3.0
PORTS_AT_ONCE = 16

FINDING_COLUMNS: list[Column[Finding]] = [
    Column("FAULT", lambda finding: finding.fault.value),
    Column("WHERE", lambda finding: finding.where),
    Column("FOUND", lambda finding: finding.found),
]


def doctor(
    context: typer.Context,
    ignore: Annotated[
        list[Fault] | None,
        option(
            "FAULT",
            "Ignore the fault with this name, as the table prints it, for example clock-skew; "
            "repeatable.",
            "--ignore",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Find faults of the site and of this machine, and print a remedy for each. Check clocks,
    ports, disks, memory, swap, CUDA, compute kernels, versions, huge pages, CPU quotas, links,
    certificates and keys. The coordinator and the nodes report their own values; this machine is
    checked directly. The command changes nothing.
    """
    facts = run(_gathered(connect_of(context)))
    left_out = set(ignore or ())
    findings = [finding for finding in diagnose(facts) if finding.fault not in left_out]
    show_findings(findings, output)
    if output in TABLES:
        for line in kernel_lines(facts.site.nodes if facts.site is not None else ()):
            show_text(line, err=True)
    if findings:
        raise typer.Exit(1)
    nodes = f"{len(facts.site.nodes)} nodes, " if facts.site is not None else ""
    show_text(f"no fault found: {nodes}the coordinator and this machine", err=True)


def show_findings(findings: list[Finding], output: Output) -> None:
    faults = list(dict.fromkeys(finding.fault for finding in findings))
    if output not in TABLES:
        data = [asdict(finding) | asdict(ADVICE[finding.fault]) for finding in findings]
        show_value(data, output, [fault.value for fault in faults])
    elif findings:
        print_table(table(findings, FINDING_COLUMNS))
        for fault in faults:
            show_text(f"\n{fault.value}: {ADVICE[fault].means}\n  {ADVICE[fault].do}")


async def _gathered(connect: Connect) -> Facts:
    from edgeshard import __version__
    from edgeshard.client.site_access import access, directory
    from edgeshard.process.machine_facts import Machine, utc_s
    from edgeshard.rpc.tls import is_loopback, split_address, tls_from_options

    target = ""
    tls = None
    refused = ""
    site: Site | None = None
    deployments: tuple[Deployment, ...] = ()
    ahead_s = 0.0
    try:
        tls_files = tls_from_options(connect.tls_ca, connect.tls_cert, connect.tls_key)
        site_access = access(connect.coordinator, tls_files, connect.plaintext)
        target, tls = site_access.target, site_access.tls
        async with connect.client() as client, asyncio.timeout(ANSWER_S):
            asked_s = utc_s()
            site = await client.site()
            if site.coordinator is not None:
                ahead_s = beyond(site.coordinator.utc_s, asked_s, utc_s())
            deployments = await client.deployments()
    except TimeoutError:
        refused = f"{target} did not answer within {ANSWER_S:g} s"
    except EdgeShardError as error:
        refused = error.message
    near = bool(target) and is_loopback(split_address(target, "coordinator")[0])
    machine = Machine(__version__, Path.home(), tls)
    if site is None or not near:
        await machine.measure()
        here = machine.condition()
    else:
        here = None  # the coordinator is on this machine, and has reported all
    return Facts(
        version=__version__,
        utc_s=utc_s(),
        here=here,
        site=site,
        deployments=deployments,
        refused=refused,
        coordinator_ahead_s=ahead_s,
        ports=await _tried(_addresses(target, site, near)),
        keys=tuple(_keys([directory(), *([tls.key] if tls is not None else [])])),
    )


def beyond(theirs_s: float, asked_s: float, answered_s: float) -> float:
    """By how much a clock that was read between two moments of this one is certainly ahead;
    negative if it lags."""
    return max(0.0, theirs_s - answered_s) + min(0.0, theirs_s - asked_s)


def _addresses(target: str, site: Site | None, near: bool) -> list[TriedPort]:
    """The coordinator's port, and the nodes' ports that can be dialled from here."""
    from edgeshard.rpc.tls import is_loopback, split_address

    ports = [TriedPort(COORDINATOR, target)] if target else []
    for node in site.nodes if site is not None else ():
        with contextlib.suppress(EdgeShardError):
            if node.connected and (near or not is_loopback(split_address(node.address)[0])):
                ports.append(TriedPort(node.name, node.address))
    return ports


async def _tried(ports: Iterable[TriedPort]) -> tuple[TriedPort, ...]:
    at_once = asyncio.Semaphore(PORTS_AT_ONCE)

    async def tried(port: TriedPort) -> TriedPort:
        async with at_once:
            return TriedPort(port.where, port.address, await _why_closed(port.address))

    return tuple(await asyncio.gather(*map(tried, ports)))


async def _why_closed(address: str) -> str:
    """Why a port is closed; '' if a connection is accepted."""
    from edgeshard.rpc.tls import split_address

    try:
        host, port = split_address(address)
        async with asyncio.timeout(PORT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no answer within {PORT_S:g} s from {HERE}"
    except (OSError, UnicodeError) as error:
        # An unknown name has a number of the resolver's, below 0, and a name with invalid letters
        # may have none.
        number = getattr(error, "errno", None) or 0
        why = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
        return f"{why.lower()}, tried from {HERE}"
    except EdgeShardError as error:
        return error.message
    writer.close()
    return ""


def _keys(places: Iterable[Path]) -> Iterable[KeyFile]:
    """The private keys of this user's credentials."""
    for place in places:
        for path in (
            sorted(place.rglob("*.key")) + sorted(place.rglob("key.pem"))
            if place.is_dir()
            else [place]
        ):
            with contextlib.suppress(OSError):
                yield KeyFile(str(path), path.stat().st_mode & 0o777)
