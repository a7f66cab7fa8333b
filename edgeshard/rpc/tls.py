"""Mutual TLS by files, and the rule that plaintext stays on loopback."""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from edgeshard.domain.errors import (
    DeniedError,
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnauthenticatedError,
)
from edgeshard.domain.identity import Principal, Role

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the authority that signs every process of a site, and this process's certificate
    and key.

    The certificate has the identity of the process: `edgeshard://SITE/ROLE/ID` among its
    alternative names, and the DNS name `ID.ROLE.SITE`, by which others verify it.
    """

    ca: Path
    cert: Path
    key: Path

    def check_form(self) -> None:
        """Raise InvalidArgumentError naming a file of the wrong kind, a key that belongs to another
        certificate, or a certificate without the process's identity; DeniedError for a key that
        others can read."""
        for path, field in ((self.ca, "tls-ca"), (self.cert, "tls-cert"), (self.key, "tls-key")):
            if b"-----BEGIN " not in read_pem(path, field):
                raise InvalidArgumentError(
                    f"--{field} {path} is not a PEM file", field=field, reason="TLS_FILE"
                )
        try:
            ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError as error:
            why = error.reason or "it holds no certificate"
            raise InvalidArgumentError(
                f"--tls-ca {self.ca}: {why}", field="tls-ca", reason="TLS_FILE"
            ) from None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
        except ssl.SSLError as error:
            why = error.reason or "they cannot be read"
            raise InvalidArgumentError(
                f"--tls-cert {self.cert} with --tls-key {self.key}: {why}",
                field="tls-cert",
                reason="TLS_FILE",
            ) from None
        check_private(self.key, "tls-key")
        self.principal()

    def check(self) -> None:
        """As `check_form`. Also raises UnauthenticatedError for a certificate of another authority,
        and FailedPreconditionError for one that expired and for a clock that is before it or the
        site's authority was made."""
        self.check_form()
        self._check_signed()
        self._check_times()

    def _check_signed(self) -> None:
        """Check the authority here: a peer that refuses the certificate ends the handshake without
        saying why."""
        from edgeshard.identity.certificates import is_signed_by

        if not is_signed_by(read_pem(self.cert, "tls-cert"), read_pem(self.ca, "tls-ca")):
            raise UnauthenticatedError(
                f"--tls-cert {self.cert} was not issued by the authority in --tls-ca {self.ca}, "
                "and the site "
                "refuses it: give files that belong together, or join again with a token of "
                "edgectl token "
                "create",
                field="tls-cert",
                reason="OTHER_AUTHORITY",
            )

    def _check_times(self) -> None:
        from edgeshard.identity.authority import now
        from edgeshard.identity.certificates import check_clock, check_valid_now, validity_of

        time = now()
        check_clock(read_pem(self.ca, "tls-ca"), time)
        certificate = read_pem(self.cert, "tls-cert")
        ends = validity_of(certificate).ends
        if time <= ends:
            check_valid_now(certificate, f"--tls-cert {self.cert}", time)
        else:
            raise FailedPreconditionError(
                f"--tls-cert {self.cert} expired at {ends:%Y-%m-%d %H:%M} UTC, and this machine's "
                "clock shows "
                f"{time:%Y-%m-%d %H:%M} UTC: set the clock if it is wrong; otherwise join again "
                "with another "
                "token of edgectl token create, or make another certificate",
                field="tls-cert",
                reason="EXPIRED",
            )

    def principal(self) -> Principal:
        """The process's identity. Raises InvalidArgumentError with reason NO_ROLE if the
        certificate has none."""
        # a tenth of a second, which plaintext need not wait
        from edgeshard.identity.certificates import (
            principal_of,
        )

        certificate = read_pem(self.cert, "tls-cert")
        try:
            return principal_of(certificate)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"--tls-cert {self.cert}: {error.message}", field="tls-cert", reason=error.reason
            ) from None

    def check_is(self, role: Role, id: str) -> None:
        """Raise InvalidArgumentError for a certificate of another principal, which others would not
        accept here."""
        principal = self.principal()
        if (principal.role, principal.id) != (role, id):
            raise InvalidArgumentError(
                f"--tls-cert {self.cert} is of {principal}, and this is {role} {id}",
                field="tls-cert",
                reason="NOT_MINE",
            )

    def version(self) -> tuple[int, ...]:
        """Numbers that change whenever one of the files does. Raises InvalidArgumentError for a
        file that is gone."""
        numbers: list[int] = []
        for path, field in ((self.ca, "tls-ca"), (self.cert, "tls-cert"), (self.key, "tls-key")):
            try:
                file_stat = path.stat()
            except OSError as error:
                raise InvalidArgumentError(
                    f"--{field} {path}: {error.strerror}", field=field, reason="TLS_FILE"
                ) from None
            numbers += (file_stat.st_mtime_ns, file_stat.st_ino, file_stat.st_size)
        return tuple(numbers)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a client with the files as they are now. Raises as `check`."""
        self.check()
        return grpc.ssl_channel_credentials(
            root_certificates=read_pem(self.ca, "tls-ca"),
            private_key=read_pem(self.key, "tls-key"),
            certificate_chain=read_pem(self.cert, "tls-cert"),
        )

    def server_credentials(self, *, asks: bool = True) -> grpc.ServerCredentials:
        """Credentials of a server that follow the files: each new connection gets the newest
        certificate.

        If it `asks`, every caller must show a certificate of the same authority. Raises as `check`.
        """
        self.check()
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), _Following(self).newest, asks
        )

    def _server_configuration(self) -> Any:
        pair = (read_pem(self.key, "tls-key"), read_pem(self.cert, "tls-cert"))
        return grpc.ssl_server_certificate_configuration(
            [pair], root_certificates=read_pem(self.ca, "tls-ca")
        )


class _Following:
    """Answers gRPC before each handshake, in a thread of gRPC."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._version = files.version()

    def newest(self) -> Any:
        """The configuration of changed files; None if they are unchanged or cannot be used."""
        try:
            version = self._files.version()
            if version == self._version:
                return None
            self._files.check()
            configuration = self._files._server_configuration()
        except EdgeShardError as error:
            log.error("certificate_not_reloaded", why=error.message)
            return None
        self._version = version
        return configuration


def check_private(key: Path, field: str) -> None:
    """Raise DeniedError for a key that others can read, with the remedy; InvalidArgumentError for
    one that is gone."""
    try:
        mode = stat.S_IMODE(key.stat().st_mode)
    except OSError as error:
        raise InvalidArgumentError(
            f"--{field} {key}: {error.strerror}", field=field, reason="TLS_FILE"
        ) from None
    if mode & 0o077 and not _kept_by_systemd(key):
        raise DeniedError(
            f"--{field} {key} can be read by others: run chmod 600 {key}",
            field=field,
            reason="KEY_MODE",
        )


def _kept_by_systemd(path: Path) -> bool:
    """Whether a file is a credential of the service: an access list that the mode hides lets only
    its user read it."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return directory is not None and path.resolve().parent == Path(directory).resolve()


def tls_from_options(ca: Path | None, cert: Path | None, key: Path | None) -> TlsFiles | None:
    """The files of three options, None without any. Raises InvalidArgumentError naming one that is
    missing."""
    paths = {"tls-ca": ca, "tls-cert": cert, "tls-key": key}
    if not any(paths.values()):
        return None
    for name, path in paths.items():
        if path is None:
            raise InvalidArgumentError(
                f"--{name} is missing: --tls-ca, --tls-cert and --tls-key go together", field=name
            )
    assert ca is not None and cert is not None and key is not None
    return TlsFiles(ca, cert, key)


def chosen_tls(tls: TlsFiles | None, plaintext: bool) -> TlsFiles | None:
    """The files, or None if there are none and plaintext is set.

    Raises DeniedError if neither is given, so that no process uses plaintext by accident.
    """
    if tls is None and not plaintext:
        raise DeniedError(
            "the TLS files are missing: give --tls-ca, --tls-cert and --tls-key (see edgectl init "
            "and "
            "edgectl join), or --plaintext for a site on this machine that all its users may call",
            field="tls-cert",
            reason="TLS_REQUIRED",
        )
    return tls


LIKE = "127.0.0.1:7600"


def split_address(address: str, field: str = "address") -> tuple[str, int]:
    """(host, port) of `host:port` or `[v6]:port`. Raises InvalidArgumentError naming `field`."""
    scheme, is_url, rest = address.partition("://")
    if is_url:
        raise InvalidArgumentError(
            f"{field} {address!r} is a URL; give HOST:PORT without {scheme}://, such as "
            f"{rest.rstrip('/') or LIKE}",
            field=field,
        )
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgumentError(
            f"{field} {address!r} is not HOST:PORT, such as {LIKE}", field=field
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """`host:port`, or `[v6]:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is localhost or an address of loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_secure(address: str, tls: TlsFiles | None, field: str) -> None:
    """Raise DeniedError for plaintext beyond loopback, whether listening or dialling."""
    host, _ = split_address(address, field)
    if tls is None and not is_loopback(host):
        raise DeniedError(
            f"{field} {address} is beyond loopback and has no TLS: give --tls-ca, --tls-cert and "
            "--tls-key",
            field=field,
            reason="TLS_REQUIRED",
        )


def read_pem(path: Path, field: str) -> bytes:
    """The file that `--field` names. Raises InvalidArgumentError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"--{field} {path}: {error.strerror}", field=field, reason="TLS_FILE"
        ) from None
