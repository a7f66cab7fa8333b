"""Finding a site on the local network by multicast DNS (RFC 6762), as a service of DNS-SD (RFC
6763).

A coordinator announces its site's name, its ports and the digest of its authority. Any machine on
the network can announce the same, so an announcement only has addresses to try and proves no
identity. Needs the extra `discovery`.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from edgeshard.rpc.addresses import WILDCARDS
from edgeshard.rpc.tls import join_address, split_address

if TYPE_CHECKING:
    from zeroconf import ServiceInfo

log = structlog.get_logger()

SERVICE = "_edgeshard._tcp.local."
LOOK_AGAIN_S = 30.0
"""How often an announcement follows the addresses of this machine."""
_ANSWER_MS = 3000
_MOST_PLACES = 64
"""Most announcements that are examined, even if more arrive."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The announcement of a site: the digest of its authority, and the addresses host:port at which
    its coordinator listens for members and for joiners."""

    site: str
    authority: bytes
    coordinator: str
    enrolment: str


async def keep_announced(announced: Announced) -> None:
    """Announce a site until this is cancelled, at the addresses that this machine has each time.

    A machine without a network announces nothing, and checks again every `LOOK_AGAIN_S` seconds.
    """
    from zeroconf import Error
    from zeroconf.asyncio import AsyncZeroconf

    host, _ = split_address(announced.enrolment)
    addresses: list[str] = []
    sender: AsyncZeroconf | None = None
    try:
        while True:
            if (own := _own_addresses(host)) != addresses:
                addresses = own
                if sender is not None:
                    await sender.async_close()
                    sender = None
                try:
                    sender = AsyncZeroconf(interfaces=own) if own else None
                    if sender is not None:
                        await sender.async_register_service(
                            _service(announced, own), allow_name_change=True
                        )
                        log.info("site_announced", site=announced.site, addresses=own)
                except (OSError, Error) as error:
                    addresses = []
                    log.warning("site_not_announced", error=str(error) or type(error).__name__)
            await asyncio.sleep(LOOK_AGAIN_S)
    finally:
        if sender is not None:
            await asyncio.shield(_farewell(sender))


async def found(authority: bytes) -> AsyncGenerator[tuple[str, str], None]:
    """The announced addresses host:port, of the coordinator and of its enrolment, for the site with
    this digest of its authority. It yields each once, as it arrives from this machine's networks.
    Does not end by itself. Raises OSError if there is no network."""
    from zeroconf import InterfaceChoice, ServiceStateChange
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

    names: asyncio.Queue[str] = asyncio.Queue(_MOST_PLACES)

    def heard(*, name: str, state_change: ServiceStateChange, **_: Any) -> None:
        if state_change is not ServiceStateChange.Removed and not names.full():
            names.put_nowait(name)

    listener = AsyncZeroconf(interfaces=InterfaceChoice.All)
    browser = AsyncServiceBrowser(listener.zeroconf, SERVICE, handlers=[heard])
    places: set[tuple[str, str]] = set()
    try:
        while len(places) < _MOST_PLACES:
            info = AsyncServiceInfo(SERVICE, await names.get())
            if await info.async_request(listener.zeroconf, _ANSWER_MS):
                for place in _places(info, authority):
                    if place not in places:
                        places.add(place)
                        yield place
    finally:
        await browser.async_cancel()
        await listener.async_close()


def _service(announced: Announced, addresses: list[str]) -> ServiceInfo:
    from zeroconf import ServiceInfo

    digest = announced.authority.hex()
    return ServiceInfo(
        SERVICE,
        f"{announced.site[:40]} {digest[:8]}.{SERVICE}",
        port=split_address(announced.enrolment)[1],
        properties={
            "authority": digest,
            "coordinator": str(split_address(announced.coordinator)[1]),
        },
        server=f"edgeshard-{digest[:16]}.local.",
        parsed_addresses=addresses,
    )


def _places(info: ServiceInfo, authority: bytes) -> list[tuple[str, str]]:
    """The content of an announcement for this authority's site; empty if it is for another site, or
    malformed."""
    properties = info.decoded_properties
    port = properties.get("coordinator") or ""
    if (
        properties.get("authority") != authority.hex()
        or not port.isdecimal()
        or not 0 < int(port) < 65536
        or not info.port
    ):
        return []
    return [
        (join_address(address, int(port)), join_address(address, info.port))
        for address in info.parsed_scoped_addresses()
        if "%" not in address  # valid on only one interface
    ]


def _own_addresses(host: str) -> list[str]:
    """The addresses at which other machines reach a listener of `host`: itself, or all addresses if
    it is a wildcard."""
    if host not in WILDCARDS:
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            return []  # a name, which a caller that has it does not need to find
    import ifaddr

    versions = (4,) if host == WILDCARDS[0] else (4, 6)
    addresses: list[str] = []
    for adapter in ifaddr.get_adapters():
        for entry in adapter.ips:
            address = ipaddress.ip_address(entry.ip if isinstance(entry.ip, str) else entry.ip[0])
            if (
                address.version in versions
                and not address.is_loopback
                and not address.is_link_local
            ):
                addresses.append(str(address))
    return sorted(addresses)


async def _farewell(sender: Any) -> None:
    await sender.async_unregister_all_services()
    await sender.async_close()
