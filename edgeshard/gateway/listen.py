"""Where the gateway listens, and the rule that nothing off loopback is plain HTTP."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from edgeshard.domain.errors import DeniedError, InvalidArgumentError
from edgeshard.rpc.tls import check_private, is_loopback, split_address


@dataclass(frozen=True, slots=True)
class HttpListen:
    """Where to listen: HOST:PORT, with the PEM files of a certificate beyond loopback."""

    address: str
    cert: Path | None = None
    key: Path | None = None

    @property
    def is_local(self) -> bool:
        return is_loopback(split_address(self.address, "http-listen")[0])

    def check(self) -> None:
        """Raise DeniedError for plaintext beyond loopback and for a key that others can read, InvalidArgumentError for
        files that cannot be used."""
        if self.cert is None and self.key is None:
            if not self.is_local:
                raise DeniedError(
                    f"http-listen {self.address} is beyond loopback and has no TLS: give --http-tls-cert and "
                    "--http-tls-key",
                    field="http-listen",
                    reason="TLS_REQUIRED",
                )
            return
        for name, path in (("http-tls-cert", self.cert), ("http-tls-key", self.key)):
            if path is None:
                raise InvalidArgumentError(
                    f"--{name} is missing: --http-tls-cert and --http-tls-key go together", field=name
                )
        assert self.cert is not None and self.key is not None
        check_private(self.key, "http-tls-key")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
        except OSError as error:
            why = getattr(error, "reason", None) or error.strerror or "they cannot be read"
            raise InvalidArgumentError(
                f"--http-tls-cert {self.cert} with --http-tls-key {self.key}: {why}",
                field="http-tls-cert",
                reason="TLS_FILE",
            ) from None
