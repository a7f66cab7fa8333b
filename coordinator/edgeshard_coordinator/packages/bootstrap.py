"""Installs EdgeShard on this machine from the site of a token, and joins it: what the site serves as /join.py.

    python3 join.py HOST:PORT SHA256 TOKEN [--prefix DIR] [OPTIONS of edgectl join]

It needs Python alone. The line that the site's operator took from `edgectl token create` has fetched this file and
compared it with its SHA-256. What follows trusts the token: the site's authority by the digest in it, the site by its
authority. Only then the token is shown, and what comes over that connection is installed by install.sh, which says each
step. A TOKEN of - is read from standard input.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import platform
import re
import shutil
import socket
import ssl
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any, NoReturn

TOKEN_PREFIX = "edgeshard2-"
PYTHONS = ("3.13", "3.12", "3.11")
TIMEOUT_S = 30.0
TRIES = 5
CHUNK_BYTES = 1 << 18
MOST_BYTES = 1 << 20
"""Of an answer that is no wheel."""
DIGEST_BYTES, SECRET_BYTES = 24, 16


def say(text: str) -> None:
    sys.stdout.write(f"join.py: {text}\n")
    sys.stdout.flush()


def fail(text: str) -> NoReturn:
    sys.exit(f"join.py: {text}")


class Token:
    """What the text of a token says: the name of its site, the digest of its authority, its secret.

    Behind the prefix, in base64: two addresses, role and length of the id, id, length of the site, site, digest,
    secret. An address is a byte for its form (0: 4 bytes, 1: 16 bytes, 2: the host before, 3 and more: a name, one byte
    longer than the form minus 3), the host, two bytes for the port.
    """

    def __init__(self, text: str) -> None:
        content = text.strip()[len(TOKEN_PREFIX) :]
        try:
            if not text.strip().startswith(TOKEN_PREFIX):
                raise ValueError
            self._rest = base64.urlsafe_b64decode(content + "=" * (-len(content) % 4))
            for _ in range(2):
                form = self._take(1)[0]
                self._take({0: 4, 1: 16, 2: 0}.get(form, form - 2) + 2)
            self._take(self._take(1)[0] & 63)
            self.site = self._take(self._take(1)[0]).decode("ascii")
            self.authority, self.secret = self._take(DIGEST_BYTES), self._take(SECRET_BYTES)
            if self._rest:
                raise ValueError
        except (ValueError, IndexError):
            fail("the token is damaged: take the whole line that edgectl token create printed")

    def _take(self, count: int) -> bytes:
        taken, self._rest = self._rest[:count], self._rest[count:]
        if len(taken) != count:
            raise ValueError
        return taken


class Site:
    """Asks the site at host:port, one request a connection. Without a context it believes nobody and says nothing."""

    def __init__(self, address: str, token: Token) -> None:
        self._address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._token = token
        self._context: ssl.SSLContext | None = None

    def verify(self) -> None:
        """Trust the authority that the token has the digest of, and nobody else, from now on."""
        for pem in (
            self.asked("/authorities").read(MOST_BYTES).decode("ascii", "replace").split("-----BEGIN CERTIFICATE-----")
        ):
            text = "-----BEGIN CERTIFICATE-----" + pem
            if "-----END CERTIFICATE-----" not in text:
                continue
            digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(text.strip())).digest()
            if digest[:DIGEST_BYTES] == self._token.authority:
                self._context = ssl.create_default_context(cadata=text)
                return
        fail(f"{self._address} is not the site that the token is of: take another line from its operator")

    def asked(self, path: str, offset: int = 0) -> http.client.HTTPResponse:
        """The answer to a GET. Raises OSError where nobody answers, and ends this program for a refusal."""
        known = self._context
        context = known or ssl._create_unverified_context()
        plain = socket.create_connection((self._host, self._port), TIMEOUT_S)
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.sock = context.wrap_socket(plain, server_hostname=f"coordinator.coordinator.{self._token.site}")
        except ssl.SSLCertVerificationError as error:
            fail(
                f"{self._address} is not the site that the token is of ({error.verify_message}); is this machine's "
                f"clock right? It says {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"
            )
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        if known is not None:
            headers["Authorization"] = "EdgeShard " + self._token.secret.hex()
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        if answer.status == 429:
            time.sleep(2.0)
            raise ConnectionError(refusal_of(answer))
        if answer.status not in (200, 206):
            fail(refusal_of(answer))
        return answer

    def tried(self, path: str) -> bytes:
        """The whole answer, of a few tries."""
        for left in reversed(range(TRIES)):
            try:
                return self.asked(path).read(MOST_BYTES)
            except (OSError, http.client.HTTPException) as error:
                if not left:
                    fail(f"the site at {self._address} does not answer: {error}")
                time.sleep(1.0)
        raise AssertionError


def refusal_of(answer: http.client.HTTPResponse) -> str:
    try:
        return str(json.loads(answer.read(65536))["message"])
    except (ValueError, KeyError, TypeError):
        return f"the site answered {answer.status} {answer.reason}"


def machine() -> dict[str, str]:
    """What the site chooses wheels by."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    pythons = [version for version in PYTHONS if version == own or shutil.which(f"python{version}")]
    name = platform.machine().lower()
    return {
        "platform": {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name),
        "pythons": ",".join(pythons) or own,
        "accelerator": "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu",
    }


def folder_for(files: list[dict[str, Any]]) -> Path:
    """A folder of this user for the files, on a disk that has room for them."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = (Path("/var/cache") if os.geteuid() == 0 else home) / "edgeshard" / "wheels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        fail(f"{folder} belongs to somebody else: remove it")
    wanted = {file["name"] for file in files}
    for path in folder.iterdir():
        if path.name not in wanted and path.name[: -len(".part")] not in wanted:
            path.unlink()  # of another version
    missing = sum(file["size"] for file in files) - sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    say(f"{len(files)} files to {folder}: {missing / 1e6:.0f} MB are missing, {free / 1e6:.0f} MB are free")
    if missing > free:
        fail(f"the disk of {folder} is too full: make room")
    return folder


def fetch(site: Site, folder: Path, path: str, file: dict[str, Any]) -> None:
    """Have a file, whole and with the SHA-256 of the list, or end this program. It goes on where another run ended."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", file["name"]):
        fail("the site names a file as no wheel is named")
    whole, part = folder / file["name"], folder / (file["name"] + ".part")
    if whole.exists() and digest_of(whole) == file["sha256"]:
        return
    for left in reversed(range(TRIES)):
        try:
            append(site, part, path, file["size"])
        except (http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as error:
            if not left:
                fail(f"{file['name']} cannot be fetched: {error}; the same line goes on where this ended")
            time.sleep(1.0)
            continue
        except OSError as error:
            fail(f"{part}: {error.strerror or error}")
        if digest_of(part) == file["sha256"]:
            part.replace(whole)
            return
        if part.stat().st_size >= file["size"]:
            part.unlink()
    fail(f"{file['name']} is not what the site says of it: have its operator look at the folder of --wheels")


def append(site: Site, part: Path, path: str, size: int) -> None:
    """Fetch what a part lacks. Raises OSError and HTTPException."""
    have = part.stat().st_size if part.exists() else 0
    have = have if have < size else 0
    answer = site.asked(path, have)
    with part.open("ab" if have and answer.status == 206 else "wb") as target:
        while chunk := answer.read(CHUNK_BYTES):
            target.write(chunk)


def digest_of(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


def install(folder: Path, text: str, options: list[str]) -> NoReturn:
    """Go on as install.sh, which reads the token from standard input."""
    prefix = []
    if options[:1] == ["--prefix"]:
        prefix, options = options[:2], options[2:]
    reading, writing = os.pipe()
    os.write(writing, f"{text}\n".encode())
    os.close(writing)
    os.dup2(reading, 0)
    options = options[1:] if options[:1] == ["--"] else options
    arguments = [
        "sh",
        f"{folder}/install.sh",
        "--wheels",
        str(folder),
        "--delete-wheels",
        *prefix,
        "--join",
        "-",
        "--",
        *options,
    ]
    say("running " + " ".join(arguments))
    os.execvp("sh", arguments)


def main() -> None:
    if len(sys.argv) < 4:
        fail("this is run by the line that edgectl token create prints")
    address, text, options = sys.argv[1], sys.argv[3], sys.argv[4:]
    text = (sys.stdin.readline() if text == "-" else text).strip()
    token = Token(text)
    site = Site(address, token)
    say(f"asking the site {token.site} at {address}, by the authority that the token names")
    site.verify()
    this = machine()
    listed = json.loads(site.tried("/wheels?" + urllib.parse.urlencode(this)))
    say(f"it has EdgeShard for this machine: {listed['folder']}")
    folder = folder_for(listed["files"])
    for file in listed["files"]:
        fetch(site, folder, f"/wheels/{listed['folder']}/{urllib.parse.quote(file['name'])}", file)
    install(folder, text, options)


if __name__ == "__main__":
    main()
