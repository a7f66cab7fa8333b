"""Client channels: keepalive that notices a dead link in about a second, retries for idempotent calls."""

from __future__ import annotations

import json

import grpc

from edgeshard.rpc.tls import TlsFiles, check_secure

MESSAGE_LIMIT_BYTES = 8 << 20
KEEPALIVE_S = 1.0

# Without data a ping every second, and one more second for its answer: a silently dead link is noticed in about 1.2 s.
KEEPALIVE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
]

# Calls that may be repeated without changing what they do: reads, and mutations that carry an operation id.
_IDEMPOTENT = [
    ("edgeshard.proto.v1.AdminService", ""),
    ("edgeshard.proto.v1.CoordinatorService", "Register"),
    ("edgeshard.proto.v1.CoordinatorService", "Heartbeat"),
    ("edgeshard.proto.v1.CoordinatorService", "ReportProfile"),
    ("edgeshard.proto.v1.InferenceService", "ListModels"),
    ("edgeshard.proto.v1.ModelStoreService", "GetManifest"),
    ("edgeshard.proto.v1.ModelStoreService", "RegisterModel"),
]
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": s, "method": m} if m else {"service": s} for s, m in _IDEMPOTENT],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


def open_channel(target: str, tls: TlsFiles | None, field: str = "address") -> grpc.aio.Channel:
    """A channel to `host:port`. Plaintext is refused beyond loopback (DeniedError naming `field`)."""
    check_secure(target, tls, field)
    options = [
        *KEEPALIVE_OPTIONS,
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the time one attempt to connect may take, TLS handshake included: seconds on a slow link.
        ("grpc.min_reconnect_backoff_ms", 10_000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Several channels to one box must not share a connection: control must not queue behind activations.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(target, options)
    return grpc.aio.secure_channel(target, tls.channel_credentials(), options)
