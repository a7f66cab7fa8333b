"""The address of wheels that a member gets: without a host if it is the coordinator's."""

from __future__ import annotations

import pytest
from edgeshard_coordinator.membership.addresses import Addresses

from edgeshard.domain.identity import WheelServer


@pytest.mark.parametrize(
    ("packages", "advertise", "host", "port"),
    [
        ("", "", "", 0),
        ("0.0.0.0:7602", "", "", 7602),
        ("[::]:8443", "", "", 8443),
        ("10.0.0.2:8443", "", "", 8443),
        ("10.0.0.5:8443", "", "10.0.0.5", 8443),
        ("10.0.0.5:8443", "site.example.org", "", 8443),
    ],
)
def test_the_host_is_left_out_if_members_know_it(
    packages: str, advertise: str, host: str, port: int
) -> None:
    addresses = Addresses("10.0.0.2:7600", "10.0.0.2:7601", advertise, packages)
    assert addresses.wheel_server() == WheelServer(host, port)
