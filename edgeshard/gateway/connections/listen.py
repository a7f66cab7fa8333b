"""The gateway's address, and the rule that nothing off loopback is plain HTTP."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from cryptography import x509

from edgeshard.domain.errors import DeniedError, EdgeShardError, InvalidArgumentError
from edgeshard.rpc.tls import check_private, is_loopback, split_address

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HttpListen:
    """The address to listen at: HOST:PORT, with the PEM files of a certificate beyond loopback.
    `host` is the host in the URL if others cannot dial the address."""

    address: str
    cert: Path | None = None
    key: Path | None = None
    host: str = ""

    @property
    def is_local(self) -> bool:
        """Whether the address is a loopback's."""
        return is_loopback(split_address(self.address, "http-listen")[0])

    def names(self, host: str) -> bool:
        """Whether a request that names this host is meant for this gateway: one of loopback's names
        or, with TLS, one of the certificate's, without which no browser would have connected."""
        if is_loopback_name(host):
            return True
        return self.cert is not None and host in _names_of(self.cert, self.version())

    def check(self) -> None:
        """Raise DeniedError for plaintext beyond loopback and for a key that others can read,
        InvalidArgumentError for files that cannot be used."""
        if self.cert is None and self.key is None:
            if not self.is_local:
                raise DeniedError(
                    f"http-listen {self.address} is beyond loopback and has no TLS: give --ca-key, "
                    "by which the "
                    "site makes a certificate for it, or --http-tls-cert and --http-tls-key",
                    field="http-listen",
                    reason="TLS_REQUIRED",
                )
            return
        for name, path in (("http-tls-cert", self.cert), ("http-tls-key", self.key)):
            if path is None:
                raise InvalidArgumentError(
                    f"--{name} is missing: --http-tls-cert and --http-tls-key go together",
                    field=name,
                )
        self.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def load(self, context: ssl.SSLContext) -> None:
        """Have `context` show the certificate. Raises as `check` does."""
        assert self.cert is not None and self.key is not None
        check_private(self.key, "http-tls-key")
        try:
            context.load_cert_chain(self.cert, self.key, _no_password)
        except OSError as error:
            why = getattr(error, "reason", None) or error.strerror or "they cannot be read"
            raise InvalidArgumentError(
                f"--http-tls-cert {self.cert} with --http-tls-key {self.key}: {why}",
                field="http-tls-cert",
                reason="TLS_FILE",
            ) from None

    def version(self) -> tuple[int, ...]:
        """A value that changes with the files and with their permissions; () if one is gone."""
        assert self.cert is not None and self.key is not None
        try:
            stats = [path.stat() for path in (self.cert, self.key)]
        except OSError:
            return ()
        return tuple(
            value
            for one in stats
            for value in (one.st_ctime_ns, one.st_mtime_ns, one.st_ino, one.st_size)
        )


def is_loopback_name(host: str) -> bool:
    """Whether a URL's host is this machine's own loopback."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(url: str) -> str:
    """The host of a URL, "" if it names none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


@lru_cache(maxsize=4)
def _names_of(cert: Path, version: tuple[int, ...]) -> frozenset[str]:
    """Hosts of a PEM file's first certificate. `version` is its state, so that a new one is
    read."""
    try:
        extension = x509.load_pem_x509_certificate(
            cert.read_bytes()
        ).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (OSError, ValueError, x509.ExtensionNotFound):
        return frozenset()
    names = extension.value.get_values_for_type(x509.DNSName)
    return frozenset((*names, *map(str, extension.value.get_values_for_type(x509.IPAddress))))


def _no_password() -> str:
    """Give no password: OpenSSL would prompt for one at the terminal, and the daemon would wait."""
    return ""


class Following:
    """The server's side of TLS, which uses a renewed certificate at the next handshake. `context`
    stays the listener's. While the files cannot be used, the previous certificate is shown."""

    def __init__(self, listen: HttpListen) -> None:
        self._listen = listen
        self._version = listen.version()
        self.context = self._newest = self._made()
        self.context.sni_callback = self._on_handshake

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._listen.load(context)
        return context

    def _on_handshake(
        self, stream: ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        version = self._listen.version()
        if version != self._version:
            self._version = version
            try:
                self._newest = self._made()
            except (
                EdgeShardError
            ) as error:  # maybe it is being written: the next change is checked again
                log.error("http_certificate_not_reloaded", why=error.message)
        stream.context = self._newest
