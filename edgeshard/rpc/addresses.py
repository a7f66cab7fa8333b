"""Addresses of this machine."""

from __future__ import annotations

import ipaddress
import socket

WILDCARDS = ("0.0.0.0", "::")
"""Listen on every address, and are none that others could dial."""


def outgoing_address(towards: str = "192.0.2.1") -> str:
    """The address from which this machine would reach `towards`; nothing is sent. Loopback without a network."""
    family = socket.AF_INET6 if _is_v6(towards) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "::1" if family is socket.AF_INET6 else "127.0.0.1"


def _is_v6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
