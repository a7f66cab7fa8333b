"""Dials each TARGET past the library's own checks, as a stranger would, and prints the answers as
JSON.

    bare_client.py [--trust CA_FILE [--cert FILE --key FILE]] TARGET=NAME...

Without --trust it speaks plaintext. NAME must be in the certificate of the listener at TARGET,
host:port.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edgeshard.proto.v1 import admin_pb2, admin_pb2_grpc, coordinator_pb2, coordinator_pb2_grpc


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--trust", "--cert", "--key"):
        parser.add_argument(option, type=Path)
    parser.add_argument("targets", nargs="+")
    arguments = parser.parse_args()
    files = [
        path and path.read_bytes() for path in (arguments.trust, arguments.key, arguments.cert)
    ]
    credentials = grpc.ssl_channel_credentials(*files) if arguments.trust else None
    sys.stdout.write(json.dumps({target: ask(target, credentials) for target in arguments.targets}))


def ask(target: str, credentials: grpc.ChannelCredentials | None) -> list[str]:
    """The status codes of a few calls, `OK` for an answered one."""
    address, _, name = target.partition("=")
    verified = [("grpc.ssl_target_name_override", name)]
    channel = (
        grpc.secure_channel(address, credentials, verified)
        if credentials
        else grpc.insecure_channel(address)
    )
    health: Any = health_pb2_grpc.HealthStub(channel)
    calls: tuple[tuple[Any, object], ...] = (
        (health.Check, health_pb2.HealthCheckRequest()),
        (admin_pb2_grpc.AdminServiceStub(channel).ListNodes, admin_pb2.ListNodesRequest()),
        (
            coordinator_pb2_grpc.CoordinatorServiceStub(channel).Register,
            coordinator_pb2.RegisterRequest(),
        ),
    )
    codes = []
    for call, request in calls:
        try:
            call(request, timeout=60)
        except grpc.RpcError as error:
            codes.append(error.code().name)
        else:
            codes.append("OK")
    channel.close()
    return codes


if __name__ == "__main__":
    main()
