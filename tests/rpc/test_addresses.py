"""The address that others reach this machine by."""

from __future__ import annotations

import socket

import pytest

from edgeshard.rpc.addresses import outgoing_address


def test_a_sandbox_without_routes_and_netlink_has_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "if_nameindex", refused)
    assert outgoing_address() == "127.0.0.1"
