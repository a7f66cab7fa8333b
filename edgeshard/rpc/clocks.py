"""This machine's clock compared with the certificate of a peer that TLS refused."""

from __future__ import annotations

import asyncio
import ssl

from edgeshard.domain.errors import FailedPreconditionError
from edgeshard.rpc.tls import split_address

_TIMEOUT_S = 5.0


async def clock_error(target: str) -> FailedPreconditionError | None:
    """The error for a clock that is outside the certificate of `host:port`; None if it is within or cannot be seen.

    The certificate is not verified: the result explains a refusal and permits nothing.
    """
    from edgeshard.identity.authority import now
    from edgeshard.identity.certificates import check_valid_now

    try:
        shown = await asyncio.to_thread(ssl.get_server_certificate, split_address(target), timeout=_TIMEOUT_S)
        check_valid_now(shown.encode(), f"the certificate of {target}", now())
    except FailedPreconditionError as error:
        return error
    except (OSError, ValueError):
        return None
    return None
