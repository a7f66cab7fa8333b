"""Downloads of an upgrade: a file of the web, and a site's wheels for a member.

Wheels are fetched over mutual TLS from the coordinator, each compared with its SHA-256.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import platform
import re
import shutil
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import grpc

from edgeshard.domain.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from edgeshard.domain.identity import coordinator_of
from edgeshard.proto.v1 import identity_pb2 as pb
from edgeshard.proto.v1.identity_pb2_grpc import IdentityServiceStub
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.clocks import clock_error, explained
from edgeshard.rpc.tls import TlsFiles, is_loopback, join_address, split_address
from edgeshard.wire.identity import wheel_server_from_wire
from edgeshard.wire.status import from_rpc_error

_TIMEOUT_S = 30.0
_DOWNLOAD_CHUNK_BYTES = 1 << 20


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        check_url(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def check_url(url: str) -> None:
    """Raise InvalidArgumentError unless a URL is of HTTPS, or of HTTP on loopback."""
    split = urlsplit(url)
    if split.scheme == "https" or (split.scheme == "http" and is_loopback(split.hostname or "")):
        return
    raise InvalidArgumentError(
        f"--from {url[:200]} is not https://: others could change the download; use an https:// "
        "URL",
        field="from",
    )


def download(url: str, directory: Path) -> Path:
    """Write what a URL leads to into a file of the directory, and return its path.

    Raises InvalidArgumentError as `check_url`, FailedPreconditionError if the disk is too small,
    UnavailableError if the file cannot be fetched whole.
    """
    check_url(url)
    path = directory / "download"
    opener = urllib.request.build_opener(_SecureRedirects)
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as answer, path.open("wb") as target:
            size = int(answer.headers.get("Content-Length") or 0)
            free = shutil.disk_usage(directory).free
            if size > free:
                raise FailedPreconditionError(
                    f"{directory}: {size} bytes are needed and {free} are free; make room",
                    field="from",
                    reason="DISK_FULL",
                )
            shutil.copyfileobj(answer, target, _DOWNLOAD_CHUNK_BYTES)
    except urllib.error.HTTPError as error:
        raise _unavailable(url, f"the server answered {error.code}") from None
    except (OSError, ValueError) as error:
        raise _unavailable(url, str(error)) from None
    if size and path.stat().st_size != size:
        raise _unavailable(url, "the connection ended early")
    return path


def _unavailable(url: str, why: str) -> UnavailableError:
    return UnavailableError(
        f"--from {url[:200]}: {why}; nothing was changed", field="from", reason="NO_BUNDLE"
    )


_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TRIES = 5
_PAUSE_S = 1.0
_CHUNK_BYTES = 1 << 18
_MAX_LIST_BYTES = 1 << 20
_TRANSIENT = (http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError)


@dataclass(frozen=True, slots=True)
class SiteFile:
    """A file of the site: name, size in bytes, SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SiteFolder:
    """A folder of the site that fits this machine."""

    name: str
    files: tuple[SiteFile, ...]


async def find_wheels(coordinator: str, files: TlsFiles) -> str:
    """The host:port at which the site of this coordinator (host:port) hands out wheels, for the
    member of `files`.

    Raises FailedPreconditionError naming `from` if there is no such port, and as `from_rpc_error`.
    """
    async with open_channel(coordinator, files, "coordinator") as channel:
        stub = IdentityServiceStub(channel)
        try:
            answer = await stub.FindWheels(pb.FindWheelsRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            refusal = from_rpc_error(error, f"the coordinator at {coordinator}")
            raise await explained(refusal, coordinator) from None
    server = wheel_server_from_wire(answer)
    if not server.port:
        raise FailedPreconditionError(
            f"the coordinator at {coordinator} offers no wheels: its operator starts it with "
            "--wheels "
            "DIR, or edgectl upgrade --from FILE takes a bundle",
            field="from",
            reason="NO_WHEELS",
        )
    host, _ = split_address(coordinator, "coordinator")
    return join_address(server.host or host, server.port)


class SiteWheels:
    """Asks the site at `address`, host:port, as the member whose certificate is in `files`.

    Methods block. They raise UnavailableError if the site does not answer, and
    FailedPreconditionError if it refuses or has no wheels for this machine, both with the field
    `from`.
    """

    def __init__(self, address: str, files: TlsFiles) -> None:
        """Raises InvalidArgumentError for an address that is none, and as `TlsFiles.check`."""
        files.check()
        self._address = address
        self._host, self._port = split_address(address, "from")
        self._name = coordinator_of(files.principal().site).dns_name
        self._context = ssl.create_default_context(cafile=files.ca)
        self._context.load_cert_chain(files.cert, files.key)

    def folder(self) -> SiteFolder:
        """The folder for this machine and this Python."""
        body = self._tried("/wheels?" + urlencode(_machine()))
        try:
            listed = json.loads(body)
            files = tuple(_file(each) for each in listed["files"])
            return SiteFolder(_checked(listed["folder"], _FILE), files)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise FailedPreconditionError(
                f"the list of wheels from {self._address} cannot be read: have the site's operator "
                "check --wheels",
                field="from",
            ) from None

    def fetch(self, folder: SiteFolder, into: Path) -> None:
        """Have every file of a folder in the directory `into` and nothing else there. An
        interrupted fetch continues.

        Raises DataLossError naming a file with another SHA-256, FailedPreconditionError for a disk
        that is too small.
        """
        expected = {file.name for file in folder.files}
        for path in into.iterdir():
            if path.name.removesuffix(".part") not in expected:
                path.unlink()
        present = sum(path.stat().st_size for path in into.iterdir())
        needed = sum(file.size for file in folder.files) - present
        free = shutil.disk_usage(into).free
        if needed > free:
            raise FailedPreconditionError(
                f"{into}: {needed} bytes are needed and {free} are free; make room",
                field="from",
                reason="DISK_FULL",
            )
        try:
            for file in folder.files:
                self._fetch_file(folder.name, file, into)
        except OSError as error:
            raise FailedPreconditionError(
                f"{into}: {error.strerror or error}", field="from", reason="DISK"
            ) from None

    def _fetch_file(self, folder: str, file: SiteFile, into: Path) -> None:
        whole = into / file.name
        part = into / f"{file.name}.part"
        if whole.exists() and _digest_of(whole) == file.sha256:
            return
        path = f"/wheels/{folder}/{quote(file.name)}"
        for left in reversed(range(_TRIES)):
            try:
                self._append(path, part, file.size)
            except _TRANSIENT as error:
                self._pause(left, error)
                continue
            if _digest_of(part) == file.sha256:
                part.replace(whole)
                return
            if part.stat().st_size >= file.size:
                part.unlink()
        raise DataLossError(
            f"the SHA-256 of {file.name} differs from the site's list; nothing was changed. Have "
            "the "
            "site's operator make its folder of wheels again",
            field="from",
            reason="DAMAGED",
        )

    def _append(self, path: str, part: Path, size: int) -> None:
        present = part.stat().st_size if part.exists() else 0
        offset = present if present < size else 0
        answer = self._answer(path, offset)
        with part.open("ab" if offset and answer.status == 206 else "wb") as target:
            while chunk := answer.read(_CHUNK_BYTES):
                target.write(chunk)

    def _tried(self, path: str) -> bytes:
        for left in reversed(range(_TRIES)):
            try:
                return self._answer(path).read(_MAX_LIST_BYTES)
            except _TRANSIENT as error:
                self._pause(left, error)
        raise AssertionError

    def _pause(self, left: int, error: Exception) -> None:
        if not left or isinstance(error, ConnectionRefusedError):
            raise UnavailableError(
                f"the site's wheels at {self._address} cannot be fetched: {error}. The coordinator "
                "offers "
                "them with --wheels; edgectl upgrade --from FILE takes a bundle",
                field="from",
                reason="NO_SITE",
            ) from None
        time.sleep(_PAUSE_S)

    def _answer(self, path: str, offset: int = 0) -> http.client.HTTPResponse:
        try:
            plain = socket.create_connection((self._host, self._port), _TIMEOUT_S)
        except OSError as error:
            raise ConnectionRefusedError(error.strerror or str(error)) from None
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.sock = self._context.wrap_socket(plain, server_hostname=self._name)
        except ssl.SSLCertVerificationError as error:
            plain.close()
            if (wrong_clock := clock_error(self._address)) is not None:
                raise wrong_clock from None
            raise FailedPreconditionError(
                f"{self._address} is not this node's site ({error.verify_message})",
                field="from",
                reason="OTHER_SITE",
            ) from None
        connection.request("GET", path, headers={"Range": f"bytes={offset}-"} if offset else {})
        answer = connection.getresponse()
        if answer.status == 429:
            raise ConnectionError(_refusal_of(answer))
        if answer.status not in (200, 206):
            raise FailedPreconditionError(_refusal_of(answer), field="from", reason="REFUSED")
        return answer


def _refusal_of(answer: http.client.HTTPResponse) -> str:
    try:
        return str(json.loads(answer.read(65536))["message"])[:1000]
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"the site answered {answer.status} {answer.reason}"


def _file(listed: Any) -> SiteFile:
    size = listed["size"]
    if type(size) is not int or size < 0:
        raise ValueError
    return SiteFile(_checked(listed["name"], _FILE), size, _checked(listed["sha256"], _SHA256))


def _checked(text: str, form: re.Pattern[str]) -> str:
    if form.fullmatch(text) is None:
        raise ValueError
    return text


def _machine() -> dict[str, str]:
    name = platform.machine().lower()
    return {
        "platform": {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name),
        "pythons": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "accelerator": "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu",
    }


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
