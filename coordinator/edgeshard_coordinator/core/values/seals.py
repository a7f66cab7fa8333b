"""Seals in files of lines: each holds a code, made with a key, of the lines since the seal before
it, and of that seal.

With the key, a check finds a line that was changed, removed or added, and a file that is missing
between two others. A seal is a line too: HMAC-SHA256 of the log's name, the seal before, the number
of lines, and their sha256.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from edgeshard.domain.audit import AuditCheck

LINES_PER_SEAL = 100
SEAL_BYTES = 256
"""A seal is no longer."""
_SEAL = re.compile(
    rb'\{"seal": "([0-9a-f]{64})", "before": "([0-9a-f]{64}|)", "lines": (\d{1,18}), "key": '
    rb'"(\w{16})"\}\n'
)


@dataclass(frozen=True, slots=True)
class SealKey:
    """`secret` belongs to the site, so no other site can make its seals."""

    secret: bytes

    @property
    def id(self) -> str:
        """The id that distinguishes seals of different keys; it reveals nothing of the secret."""
        return hmac.digest(self.secret, b"edgeshard audit key id", "sha256").hex()[:16]

    def code(self, log: str, before: str, lines: int, digest: str) -> str:
        text = f"edgeshard audit seal\0{log}\0{before}\0{lines}\0{digest}"
        return hmac.digest(self.secret, text.encode(), "sha256").hex()


@dataclass(frozen=True, slots=True)
class Seal:
    """`code` is over the `lines` before it and over the code of the seal `before` ("" for the first
    of a log)."""

    code: str
    before: str
    lines: int
    key_id: str

    def line(self) -> bytes:
        text = (
            f'{{"seal": "{self.code}", "before": "{self.before}", "lines": {self.lines}, "key": '
            f'"{self.key_id}"}}\n'
        )
        return text.encode()


def seal_of(line: bytes) -> Seal | None:
    """The seal of a line; None if it is no seal. A truncated seal is a line like others, and sealed
    with them."""
    match = _SEAL.fullmatch(line)
    if match is None:
        return None
    code, before, lines, key_id = (group.decode() for group in match.groups())
    return Seal(code, before, int(lines), key_id)


class Chain:
    """The lines of one log as they are written, and the seals that they need.

    `head` is the code of the newest seal, "" for none; `content` is what the newest file holds.
    """

    def __init__(self, key: SealKey, log: str, head: str, content: bytes = b"") -> None:
        self._key = key
        self._log = log
        self.head = head
        self.unsealed = 0
        self._digest = sha256()
        for line in content.splitlines(keepends=True):
            if seal_of(line) is None:
                self.take(line)
            else:
                self._begin(head)

    def take(self, line: bytes) -> None:
        """A line was written."""
        self.unsealed += 1
        self._digest.update(line)

    def sealed(self) -> bytes:
        """The seal of all lines since the last one: the line to write next."""
        code = self._key.code(self._log, self.head, self.unsealed, self._digest.hexdigest())
        seal = Seal(code, self.head, self.unsealed, self._key.id)
        self._begin(code)
        return seal.line()

    def _begin(self, head: str) -> None:
        self.head = head
        self.unsealed = 0
        self._digest = sha256()


def check_files(
    key: SealKey, log: str, files: Sequence[tuple[str, bytes]], head: str | None, *, is_whole: bool
) -> tuple[AuditCheck, ...]:
    """The verdict on each file, given by name and content from the oldest to the newest.

    `head` is the newest seal that the writer knows of, None if it has written nothing yet.
    `is_whole` means that no file was deleted for its age: then the oldest begins the log.
    """
    reader = _Reader(key, log, head="" if is_whole else None)
    checks = [reader.read(name, content, is_newest=name == files[-1][0]) for name, content in files]
    if head and not checks:
        return (AuditCheck(f"{log}.jsonl", 0, 0, 1, "all of it is missing"),)
    if checks and head is not None and (reader.head or "") != head and not checks[-1].why:
        newest = checks[-1]
        checks[-1] = AuditCheck(
            newest.file,
            newest.lines,
            newest.sealed,
            newest.lines + 1,
            "lines or seals are missing after its end",
        )
    return tuple(checks)


class _Reader:
    """`head` is the seal that the next one must name: "" for none, None if it is unknown."""

    def __init__(self, key: SealKey, log: str, head: str | None) -> None:
        self._key = key
        self._log = log
        self.head = head

    def read(self, name: str, content: bytes, *, is_newest: bool) -> AuditCheck:
        lines = content.splitlines(keepends=True)
        sealed = 0
        for number, line in enumerate(lines, 1):
            seal = seal_of(line)
            if seal is None:
                continue
            why = self._fault(seal, lines[sealed : number - 1], is_first=sealed == 0)
            if why:
                self.head = _last_seal(lines)
                return AuditCheck(
                    name, len(lines), sealed, sealed + 1, f"lines {sealed + 1} to {number}: {why}"
                )
            self.head, sealed = seal.code, number
        # A file from before there were seals has none, and the first seal of all records that there
        # was none before.
        if not is_newest and sealed < len(lines) and (sealed or self.head):
            return AuditCheck(
                name, len(lines), sealed, sealed + 1, "lines after its last seal are not sealed"
            )
        if sealed == 0 and not is_newest:
            self.head = ""
        return AuditCheck(name, len(lines), sealed)

    def _fault(self, seal: Seal, lines: Sequence[bytes], *, is_first: bool) -> str:
        """The fault of a seal that does not match the lines before it, "" if it matches."""
        if seal.key_id != self._key.id:
            return "it is sealed with another key than the site's authority has now"
        code = self._key.code(
            self._log, seal.before, seal.lines, sha256(b"".join(lines)).hexdigest()
        )
        if seal.lines != len(lines) or not hmac.compare_digest(code, seal.code):
            return "they are not those that were sealed"
        if self.head is not None and seal.before != self.head:
            return (
                "a file before it is missing or was replaced"
                if is_first
                else "seals before it are missing"
            )
        return ""


def _last_seal(lines: Sequence[bytes]) -> str:
    """The last seal of a file, so that the fault of one file is not reported for the next."""
    return next(seal.code for seal in map(seal_of, reversed(lines)) if seal is not None)
