"""The target of a request in one form, whichever of the forms of HTTP the client sent (RFC 9112, 3.2). Pure."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import Scope

from edgeshard.domain.errors import InvalidArgumentError

_ABSOLUTE = re.compile(r"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
_AUTHORITY = re.compile(r"[A-Za-z0-9._~:\[\]-]+")


def canonical(scope: Scope) -> Scope:
    """A copy of a request's scope as routes and rights are written.

    HEAD becomes GET. Slashes at the end and empty segments are removed from the path: no redirect
    is needed, which would have to infer the client's scheme and host. The authority of an absolute
    target replaces Host. Raises InvalidArgumentError naming `target` for an authority that is not a
    host and a port.
    """
    copy = dict(scope)
    if scope["method"] == "HEAD":
        copy["method"] = "GET"
    raw = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
    path = scope["path"]
    if (absolute := _ABSOLUTE.fullmatch(raw)) is not None:
        authority = absolute[1]
        if not _AUTHORITY.fullmatch(authority):
            raise InvalidArgumentError(
                "target: its authority is not HOST or HOST:PORT", field="target", reason="BAD_TARGET"
            )
        others = [(name, value) for name, value in scope["headers"] if name != b"host"]
        copy["headers"] = [(b"host", authority.encode("latin-1")), *others]
        path = unquote(absolute[2] or "/")
    if path.startswith("/"):
        path = "/" + "/".join(part for part in path.split("/") if part)
    copy["path"] = path
    copy["raw_path"] = path.encode()
    return copy
