"""Nodes of a test site as network namespaces: each with one shaped link to a switch, itself a
namespace of its own.

The machine's own namespace gets no device, no address and no route.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

DEVICE = "eth0"
_SWITCH = "switch"
_BRIDGE = "br0"


class Refused(Exception):
    """`ip` or `tc` failed; the message has its command line and its output."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """A shaper's counts: packets it passed, packets it made wait (`delayed`) and packets it threw
    away (`dropped`)."""

    sent_bytes: int
    packets: int
    delayed: int
    dropped: int


class Network:
    """One namespace for each of `hosts`, all on one bridge, 10.77.0.x.

    `rate` is that of each link, in both directions, as tc writes it; None does not limit it.

    A context manager: everything it made is gone at its end, also if making it failed half way.
    """

    def __init__(self, hosts: Sequence[str], rate: str | None) -> None:
        self.hosts = tuple(hosts)
        self.rate = rate
        self._prefix = f"edgeshard-{os.getpid()}-{secrets.token_hex(2)}"
        self._made: list[str] = []

    def namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def address(self, host: str) -> str:
        """The host's IP address."""
        return f"10.77.0.{10 + self.hosts.index(host)}"

    def enter(self, host: str, *command: str) -> list[str]:
        """The command line that runs `command` on `host`; the command takes the place (and pid) of
        `ip`."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def shaped(self, host: str) -> Shaped:
        """The counters of the shaper in front of everything that `host` sends."""
        (shaper,) = json.loads(
            _run("tc", "-n", self.namespace(host), "-s", "-j", "qdisc", "show", "dev", DEVICE)
        )
        assert shaper["kind"] == "tbf", shaper
        return Shaped(shaper["bytes"], shaper["packets"], shaper["overlimits"], shaper["drops"])

    def devices(self, host: str) -> list[dict[str, Any]]:
        """The network devices of `host` as `ip -j link` lists them."""
        return list(json.loads(_run("ip", "-n", self.namespace(host), "-j", "link", "show")))

    def __enter__(self) -> Self:
        try:
            self._make_switch()
            for host in self.hosts:
                self._make_host(host)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def _make_switch(self) -> None:
        switch = self._make_namespace(_SWITCH)
        _run("ip", "-n", switch, "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", _BRIDGE, "up")

    def _make_host(self, host: str) -> None:
        inside, switch = self._make_namespace(host), self.namespace(_SWITCH)
        port = f"to-{host}"[:15]
        # Both ends are created in their namespaces: the machine's own namespace never sees them.
        _run(
            "ip",
            "-n",
            inside,
            "link",
            "add",
            DEVICE,
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            switch,
        )
        # No IPv6 address by itself: then only its processes' packets leave a node. A kernel without
        # IPv6 refuses.
        with contextlib.suppress(Refused):
            _run("ip", "-n", inside, "link", "set", DEVICE, "addrgenmode", "none")
        _run("ip", "-n", switch, "link", "set", port, "master", _BRIDGE, "up")
        _run("ip", "-n", inside, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
        if self.rate is not None:
            shaping = ("tbf", "rate", self.rate, "burst", "32kbit", "latency", "400ms")
            for namespace, device in ((inside, DEVICE), (switch, port)):
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shaping)
        _run("ip", "-n", inside, "link", "set", "lo", "up")
        _run("ip", "-n", inside, "link", "set", DEVICE, "up")

    def _make_namespace(self, host: str) -> str:
        name = self.namespace(host)
        self._made.append(name)
        _run("ip", "netns", "add", name)
        return name

    def _remove(self) -> None:
        """Remove everything that was made; continue past missing parts and errors."""
        while self._made:
            with contextlib.suppress(Refused):
                _run("ip", "netns", "delete", self._made.pop())


def existing() -> set[str]:
    """The names of all network namespaces of this machine."""
    directory = Path("/run/netns")
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def why_impossible() -> str | None:
    """Why this machine cannot have such a network, or None when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    try:
        with Network(("probe",), "20mbit"):
            return None
    except Refused as refusal:
        return f"this machine refuses network namespaces or their shaping: {refusal}"


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode != 0:
        raise Refused(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout
