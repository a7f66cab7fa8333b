"""A bundle of the web: over HTTPS or from this machine, and whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edgeshard.client.upgrades import check_url, download
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError

CONTENT = b"a bundle" * 1000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "http://192.0.2.1/bundle.tar")
            self.end_headers()
            return
        if self.path == "/none":
            self.send_error(404)
            return
        size = {"/short": len(CONTENT) + 1, "/huge": 1 << 60}.get(self.path, len(CONTENT))
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_file_is_fetched_whole(url: str, tmp_path: Path) -> None:
    assert download(f"{url}/bundle.tar", tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "error", "named"),
    [
        ("/none", UnavailableError, "404"),
        ("/short", UnavailableError, "ended early"),
        ("/huge", FailedPreconditionError, "bytes are needed"),
        ("/away", InvalidArgumentError, "not https"),
    ],
)
def test_what_is_not_whole_or_not_secure_is_refused(
    url: str, tmp_path: Path, path: str, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        download(url + path, tmp_path)


@pytest.mark.parametrize(
    "url", ["http://example.org/b.tar", "ftp://127.0.0.1/b.tar", "file:///etc/passwd"]
)
def test_only_https_leaves_this_machine(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="https"):
        check_url(url)
