"""A small server with the Hub's routes, and faults on request."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/?]+))?(?:\?.*)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)(?:\?.*)?")


@dataclass
class HubServer:
    """Repositories by name, each a directory. `served` are the bytes sent by file, `ranges` the
    offsets at which sending began.
    """

    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    cut_after: dict[str, int] = field(default_factory=dict)
    """The bytes after which the connection breaks, once, by file."""
    served: dict[str, int] = field(default_factory=dict)
    ranges: list[tuple[str, int]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    address: str = ""

    def info(self, name: str) -> dict[str, Any]:
        siblings = []
        directory = self.repositories[name]
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            data = path.read_bytes()
            entry: dict[str, Any] = {
                "rfilename": str(path.relative_to(directory)),
                "size": len(data),
                "blobId": hashlib.sha1(data).hexdigest(),
            }
            if is_large(path):
                entry["lfs"] = {
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 130,
                }
            siblings.append(entry)
        return {
            "id": name,
            "modelId": name,
            "sha": COMMIT,
            "siblings": siblings,
            "private": False,
            "tags": [],
        }


def is_large(path: Path) -> bool:
    return path.suffix in (".safetensors", ".bin", ".gguf")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        self.hub.tokens.append(self.headers.get("Authorization"))
        if (api := _API.fullmatch(self.path)) is not None:
            name, revision = api[1], api[2] or "main"
            if name not in self.hub.repositories:
                return self._refuse(401, "RepoNotFound")
            if revision not in ("main", COMMIT):
                return self._refuse(404, "RevisionNotFound")
            return self._send(
                200,
                json.dumps(self.hub.info(name)).encode(),
                {"Content-Type": "application/json"},
                body,
            )
        found = _FILE.fullmatch(self.path)
        if found is None or found[1] not in self.hub.repositories:
            return self._refuse(404, "RepoNotFound")
        if found[1] in self.hub.gated and self.headers.get("Authorization") != "Bearer hf_allowed":
            return self._refuse(403, "GatedRepo")
        path = self.hub.repositories[found[1]] / found[3]
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        self._file(path, body)

    def _file(self, path: Path, body: bool) -> None:
        data, name = path.read_bytes(), path.name
        digest = (hashlib.sha256 if is_large(path) else hashlib.sha1)(data).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if is_large(path):
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        if name in self.hub.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        begin = 0
        if (wanted := self.headers.get("Range")) is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin = int(first)
            end = int(last) + 1 if last else len(data)
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            if last:  # a part of the file, which is no download
                return self._send(206, data[begin:end], headers, body)
        if body:
            self.hub.ranges.append((name, begin))
        self._send(206 if begin else 200, data[begin:], headers, body, name)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code}, self.command == "GET")

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], body: bool, name: str = ""
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if not body:
            return
        limit = self.hub.cut_after.pop(name, None)
        sent = data if limit is None else data[:limit]
        self.wfile.write(sent)
        if name:
            self.hub.served[name] = self.hub.served.get(name, 0) + len(sent)
        if limit is not None:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(2)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer


@contextmanager
def serving() -> Iterator[HubServer]:
    server = _Server(("127.0.0.1", 0), Handler)
    hub = server.hub = HubServer()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_at(address: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT and HF_HUB_CACHE do, which the library reads when it is imported; without a
    token."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
