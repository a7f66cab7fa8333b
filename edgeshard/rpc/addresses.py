"""Addresses of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

WILDCARDS = ("0.0.0.0", "::")
"""Addresses to listen on that cannot be dialled: they stand for every address."""
_SIOCGIFADDR = 0x8915


def outgoing_address(towards: str = "192.0.2.1") -> str:
    """The address from which this machine would reach `towards`; nothing is sent.

    Without a way there it is an address of any network of this machine, loopback without a network.
    """
    family = socket.AF_INET6 if _is_v6(towards) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "::1" if family is socket.AF_INET6 else _any_address()


def is_of_this_machine(host: str) -> bool:
    """Whether `host` is an address of this machine or a name of one, to which a socket can be
    bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
            return True
    except OSError:
        return False


def free_port(host: str, first: int, count: int) -> int:
    """The first free one of `count` ports from `first` on, at this machine's address `host`;
    `first` if all are taken. If another process takes it in the meantime, the listener's start
    fails."""
    family = socket.AF_INET6 if _is_v6(host) else socket.AF_INET
    for port in range(first, first + count):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    return first


def _any_address() -> str:
    """The address of the first interface that has one, apart from loopback."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:  # a sandbox without netlink
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(
                    probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
                address = socket.inet_ntoa(answer[20:24])
                if not ipaddress.ip_address(address).is_loopback:
                    return address
    return "127.0.0.1"


def _is_v6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
