"""The async client: everything a coordinator offers, as domain values."""

from __future__ import annotations

from typing import Self

from edgeshard.client.connection import Connection
from edgeshard.client.deployment_calls import DeploymentCalls
from edgeshard.client.inference_calls import InferenceCalls
from edgeshard.client.site_access import access
from edgeshard.client.site_calls import SiteCalls
from edgeshard.domain.clock import Clock
from edgeshard.process.clock import SystemClock
from edgeshard.rpc.tls import TlsFiles


class Client(InferenceCalls, SiteCalls, DeploymentCalls):
    """A client of the coordinator at `target` (host:port).

    Missing arguments are read from `EDGESHARD__CLIENT__*`, then from the file that `edgectl join`
    wrote for this user. Without certificates, `plaintext` must be set; it is for loopback only. A
    certificate is renewed in time if this process may write to its directory.

    Use it as an async context manager, or call `close()`. `timeout_s` bounds each call except
    `generate`, whose bound is its own. Every failure is an `EdgeShardError` that names the field or
    the target at fault.
    """

    def __init__(
        self,
        target: str | None = None,
        tls: TlsFiles | None = None,
        *,
        plaintext: bool | None = None,
        timeout_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            Connection(access(target, tls, plaintext)), timeout_s, clock or SystemClock()
        )

    async def __aenter__(self) -> Self:
        self._connection.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; requests still streaming are cancelled."""
        await self._connection.close()
