"""A file of the web, over HTTPS."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from edgeshard.rpc.tls import is_loopback

_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 20


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        check_url(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def check_url(url: str) -> None:
    """Raise InvalidArgumentError unless a URL is of HTTPS, or of HTTP on loopback."""
    split = urlsplit(url)
    if split.scheme == "https" or (split.scheme == "http" and is_loopback(split.hostname or "")):
        return
    raise InvalidArgumentError(
        f"--from {url[:200]} is not https://: others could change the download; use an https:// URL", field="from"
    )


def download(url: str, directory: Path) -> Path:
    """Write what a URL leads to into a file of the directory, and return its path.

    Raises InvalidArgumentError as `check_url`, FailedPreconditionError if the disk is too small, UnavailableError if
    the file cannot be fetched whole.
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
            shutil.copyfileobj(answer, target, _CHUNK_BYTES)
    except urllib.error.HTTPError as error:
        raise _unavailable(url, f"the server answered {error.code}") from None
    except (OSError, ValueError) as error:
        raise _unavailable(url, str(error)) from None
    if size and path.stat().st_size != size:
        raise _unavailable(url, "the connection ended early")
    return path


def _unavailable(url: str, why: str) -> UnavailableError:
    return UnavailableError(f"--from {url[:200]}: {why}; nothing was changed", field="from", reason="NO_BUNDLE")
