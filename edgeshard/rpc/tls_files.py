"""The PEM files of a process: its authorities, its certificate, and its key, which only its owner
may read."""

from __future__ import annotations

import os
from pathlib import Path

from edgeshard.domain.identity import Principal
from edgeshard.identity.authority import Authority, new_key, now, private_pem, request_for
from edgeshard.rpc.tls import TlsFiles


def tls_files(directory: Path) -> TlsFiles:
    """The three files in the directory of a process that has joined."""
    return TlsFiles(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")


def issue_files(authority: Authority, principal: Principal, directory: Path) -> TlsFiles:
    """Make a key and its certificate, and write them to `directory`. Raises OSError."""
    key = new_key()
    certificate = authority.issue(principal, request_for(key), now())
    return write_files(directory, authority.certificate_pem, certificate, private_pem(key))


def write_files(directory: Path, ca: bytes, certificate: bytes, key: bytes) -> TlsFiles:
    """Write the three files, each whole or not at all. Only its owner can use a new directory.
    Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = tls_files(directory)
    for path, content in ((files.ca, ca), (files.cert, certificate), (files.key, key)):
        write_private(path, content)
    return files


def write_private(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, that only its owner can read from its first byte on.
    Raises OSError."""
    staging_path = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(
        os.open(staging_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
    ) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    staging_path.replace(path)
