"""Installs EdgeShard on this machine from the site of a token, and joins it: what the site serves
as /join.py.

    python3 join.py HOST:PORT SHA256 TOKEN [--prefix DIR] [OPTIONS of edgectl join]

It needs only Python. The command that the site's operator took from `edgectl token create` has
fetched this file and compared it with its SHA-256. The rest relies on the token: the digest in it
proves the site's authority, and the authority proves the site. Only then the token is sent, and
install.sh installs the files from that connection and prints each step. A TOKEN of - is read from
standard input.
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
"""Limit of an answer that is no wheel."""
MOST_SHOWN = 1000
"""Characters of a line that is printed: whoever answers may have sent it."""
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,199}")
DIGEST_BYTES, SECRET_BYTES = 24, 16


def say(text: str) -> None:
    sys.stdout.write(f"join.py: {shown(text)}\n")
    sys.stdout.flush()


def fail(text: str) -> NoReturn:
    sys.exit(f"join.py: {shown(text)}")


def shown(text: str) -> str:
    """The beginning of a text, with an escape for each character that is not printable: it cannot
    steer a terminal."""
    cut = text[: MOST_SHOWN + 1]
    plain = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut
    )
    return plain if len(plain) <= MOST_SHOWN else plain[:MOST_SHOWN] + "..."


class TokenContent:
    """The content of a token's text: the name of its site, the digest of its authority, its secret.

    After the prefix, in base64: two addresses, role and length of the id, id, length of the site,
    site, digest, secret. An address is a byte for its form, the host, and two bytes for the port.
    Forms are 0: 4 bytes, 1: 16 bytes, 2: the previous host, 3 and more: a name, one byte longer
    than the form minus 3.
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
        chunk, self._rest = self._rest[:count], self._rest[count:]
        if len(chunk) != count:
            raise ValueError
        return chunk


class SiteClient:
    """Sends requests to the site at host:port, one a connection. Without a context it trusts no
    server and sends no secret."""

    def __init__(self, address: str, token: TokenContent) -> None:
        self._address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._token = token
        self._context: ssl.SSLContext | None = None

    def verify(self) -> None:
        """Trust only the authority that the token has the digest of, from now on."""
        for pem in (
            self.tried("/authorities")
            .decode("ascii", "replace")
            .split("-----BEGIN CERTIFICATE-----")
        ):
            text = "-----BEGIN CERTIFICATE-----" + pem
            try:
                certificate = ssl.PEM_cert_to_DER_cert(text.strip())
            except ValueError:
                continue
            if hashlib.sha256(certificate).digest()[:DIGEST_BYTES] == self._token.authority:
                self._context = ssl.create_default_context(cadata=text)
                return
        fail(f"{self._address} is not the site of the token: get another line from its operator")

    def asked(self, path: str, offset: int = 0) -> http.client.HTTPResponse:
        """The answer to a GET. Raises OSError if the server does not answer, and ends this program
        for a refusal."""
        site_context = self._context
        context = site_context or ssl._create_unverified_context()
        plain = socket.create_connection((self._host, self._port), TIMEOUT_S)
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.sock = context.wrap_socket(
                plain, server_hostname=f"coordinator.coordinator.{self._token.site}"
            )
        except ssl.SSLCertVerificationError as error:
            fail(
                f"{self._address} is not the site of the token ({error.verify_message}); check "
                "this machine's "
                f"clock: it shows {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"
            )
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        if site_context is not None:
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
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"the site answered {answer.status} {answer.reason}"


def listing_of(body: bytes) -> tuple[str, list[dict[str, Any]]]:
    """The folder and the files of a list: name, size and SHA-256 of each. Ends this program for
    anything else."""
    try:
        listed = json.loads(body)
        folder, files = listed["folder"], listed["files"]
        well = all(
            FILE_NAME.fullmatch(file["name"])
            and type(file["size"]) is int
            and type(file["sha256"]) is str
            for file in files
        )
        if well and FILE_NAME.fullmatch(folder):
            return folder, files
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    fail("the site's list of files is none: have its operator look at the folder of --wheels")


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
    names = {file["name"] for file in files}
    for path in folder.iterdir():
        if path.name not in names and path.name[: -len(".part")] not in names:
            path.unlink()  # of another version
    missing = sum(file["size"] for file in files) - sum(
        path.stat().st_size for path in folder.iterdir()
    )
    free = shutil.disk_usage(folder).free
    say(
        f"{len(files)} files to {folder}: {missing / 1e6:.0f} MB are missing, {free / 1e6:.0f} MB "
        "are free"
    )
    if missing > free:
        fail(
            f"{missing} bytes are needed on the disk of {folder}, where {free} bytes are free: "
            "free space"
        )
    return folder


def fetch(site: SiteClient, folder: Path, path: str, file: dict[str, Any]) -> None:
    """Fetch a file, whole and with the SHA-256 of the list, or end this program. It resumes an
    earlier run's file."""
    whole, part = folder / file["name"], folder / (file["name"] + ".part")
    if whole.exists() and digest_of(whole) == file["sha256"]:
        return
    for left in reversed(range(TRIES)):
        try:
            append(site, part, path, file["size"])
        except (http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError) as error:
            if not left:
                fail(
                    f"{file['name']} cannot be fetched: {error}; run the same line again to resume"
                )
            time.sleep(1.0)
            continue
        except OSError as error:
            fail(f"{part}: {error.strerror or error}")
        if digest_of(part) == file["sha256"]:
            part.replace(whole)
            return
        if part.stat().st_size >= file["size"]:
            part.unlink()
    fail(
        f"{file['name']} differs from the site's list: have its operator check the folder of "
        "--wheels"
    )


def append(site: SiteClient, part: Path, path: str, size: int) -> None:
    """Fetch what a part lacks. Raises OSError and HTTPException."""
    have = part.stat().st_size if part.exists() else 0
    have = have if have < size else 0
    answer = site.asked(path, have)
    with part.open("ab" if have and answer.status == 206 else "wb") as target:
        while chunk := answer.read(CHUNK_BYTES):
            target.write(chunk)


def digest_of(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


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
    address = sys.argv[1]
    text = sys.argv[3]
    options = sys.argv[4:]
    text = (sys.stdin.readline() if text == "-" else text).strip()
    token = TokenContent(text)
    site = SiteClient(address, token)
    say(f"requesting wheels from the site {token.site} at {address}, verified by the token")
    site.verify()
    this = machine()
    name, files = listing_of(site.tried("/wheels?" + urllib.parse.urlencode(this)))
    say(f"it has EdgeShard for this machine: {name}")
    folder = folder_for(files)
    for file in files:
        fetch(site, folder, f"/wheels/{name}/{urllib.parse.quote(file['name'])}", file)
    install(folder, text, options)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # its traceback would show what a stranger sent as it is
        fail(f"{type(error).__name__}: {error}; take another line from the site's operator")
