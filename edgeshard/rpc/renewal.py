"""Renewal of a process's certificate before it expires; the key stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from edgeshard.domain.errors import EdgeShardError, FailedPreconditionError, InvalidArgumentError
from edgeshard.identity.authority import load_key, now, request_for
from edgeshard.identity.certificates import is_of_key, validity_of
from edgeshard.rpc.tls import TlsFiles
from edgeshard.rpc.tls_files import write_private

log = logging.getLogger(__name__)
"""A standard logger: applications log as they like, and a daemon sends it to its own log."""

Renew = Callable[[bytes], Awaitable[tuple[bytes, bytes]]]
"""Takes a certificate signing request in PEM; returns a certificate and the authorities to trust,
both in PEM."""
LONGEST_SLEEP_S = 3600.0
"""Longest sleep between two readings of the clock, which may be set in between."""
LONGEST_RETRY_S = 600.0


async def keep_renewed(files: TlsFiles, renew: Renew, time: Callable[[], datetime] = now) -> None:
    """Renew whenever two thirds of the certificate's life are over. Returns if the site makes no
    certificates."""
    while True:
        validity = validity_of(files.cert.read_bytes())
        left_s = (validity.renewal - time()).total_seconds()
        if left_s > 0:
            await asyncio.sleep(min(left_s, LONGEST_SLEEP_S))
            continue
        try:
            await renew_now(files, renew)
        except FailedPreconditionError as error:
            log.warning(
                "the certificate that ends at %s cannot be renewed: %s",
                validity.ends,
                error.message,
            )
            return
        except (EdgeShardError, OSError) as error:
            log.warning("the certificate that ends at %s was not renewed: %s", validity.ends, error)
            await asyncio.sleep(
                min(LONGEST_RETRY_S, max(1.0, (validity.ends - time()).total_seconds() / 10))
            )


async def renew_now(files: TlsFiles, renew: Renew) -> None:
    """Renew once. Raises the errors of `renew`, and InvalidArgumentError for an answer that is not
    for this key."""
    key = files.key.read_bytes()
    certificate, authorities = await renew(request_for(load_key(key)))
    if not is_of_key(certificate, key):
        raise InvalidArgumentError(
            "the coordinator answered with a certificate of another key", field="certificate"
        )
    if files.ca.read_bytes() != authorities:
        write_private(files.ca, authorities)
    write_private(files.cert, certificate)
    log.info("the certificate was renewed, until %s", validity_of(certificate).ends)


def adopted(source_files: TlsFiles, directory: Path) -> TlsFiles:
    """The files that a daemon uses and renews: they are in `directory`, since the given ones may be
    read-only.

    A certificate in `directory` is used while it belongs to the key and is newer than the given
    one. The authorities are from the last renewal, unless others were given since. Raises
    InvalidArgumentError naming `state-dir` if nothing can be written.
    """
    local_files = TlsFiles(directory / "ca.pem", directory / "cert.pem", source_files.key)
    if source_files.cert == local_files.cert:
        return source_files
    source_files.check_form()
    try:
        _keep(source_files, local_files, directory)
    except OSError as error:
        raise InvalidArgumentError(
            f"--state-dir {directory.parent}: {error.strerror}", field="state-dir"
        ) from None
    return local_files


def _keep(source_files: TlsFiles, local_files: TlsFiles, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    digest_path = directory / "given-ca.sha256"
    authorities, certificate = source_files.ca.read_bytes(), source_files.cert.read_bytes()
    digest = sha256(authorities).hexdigest().encode()
    if (
        not local_files.ca.exists()
        or not digest_path.exists()
        or digest_path.read_bytes() != digest
    ):
        write_private(local_files.ca, authorities)
        write_private(digest_path, digest)
    if not _is_newer(local_files, certificate):
        write_private(local_files.cert, certificate)


def _is_newer(local_files: TlsFiles, certificate: bytes) -> bool:
    """Whether the kept certificate is of the key and ends no earlier than this one."""
    try:
        pem = local_files.cert.read_bytes()
        return (
            is_of_key(pem, local_files.key.read_bytes())
            and validity_of(pem).ends >= validity_of(certificate).ends
        )
    except (OSError, ValueError):
        return False
