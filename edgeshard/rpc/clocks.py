"""This machine's clock compared with the certificate of a peer that TLS refused."""

from __future__ import annotations

import asyncio
import ssl

from edgeshard.domain.errors import EdgeShardError, FailedPreconditionError
from edgeshard.rpc.tls import split_address

_TIMEOUT_S = 5.0
TLS_HANDSHAKE = "TLS_HANDSHAKE"
"""The reason of `from_rpc_error` for a peer whose certificate TLS refused."""


async def explained(error: EdgeShardError, target: str) -> EdgeShardError:
    """The error of a call to `host:port`; the error of a wrong clock if TLS refused the certificate
    there for that reason."""
    if error.reason != TLS_HANDSHAKE:
        return error
    return await asyncio.to_thread(clock_error, target) or error


def clock_error(target: str) -> FailedPreconditionError | None:
    """The error for a clock that is outside the certificate of `host:port`; None if it is within or
    cannot be seen.

    The certificate is not verified: the result explains a refusal and permits nothing. It waits for
    the peer, for up to 5 s: in a daemon call it in a thread.
    """
    from edgeshard.identity.authority import now
    from edgeshard.identity.certificates import check_valid_now

    try:
        pem = ssl.get_server_certificate(split_address(target), timeout=_TIMEOUT_S)
        check_valid_now(pem.encode(), f"the certificate of {target}", now())
    except FailedPreconditionError as error:
        return error
    except (OSError, ValueError):
        return None
    return None
