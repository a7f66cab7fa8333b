"""API keys on disk, in a file of their own."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from edgeshard.domain.errors import InternalError
from edgeshard.domain.identity import ApiKey

_SCHEMA = """\
CREATE TABLE IF NOT EXISTS keys (
    key_id TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    name TEXT NOT NULL UNIQUE,
    models TEXT NOT NULL,
    tokens_per_minute INTEGER,
    requests INTEGER,
    created_at REAL NOT NULL
);
"""

ResultT = TypeVar("ResultT")


class KeyStore:
    """Every method raises InternalError (STATE_STORE) when the disk or the file refuses; nothing has changed then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keys")
        self._database: sqlite3.Connection | None = None

    async def open(self) -> list[tuple[ApiKey, str]]:
        """Every key with the digest of its secret."""
        return await self._run(self._open)

    async def save(self, key: ApiKey, digest: str) -> None:
        values = (key.key_id, digest, key.name, json.dumps(key.models), key.tokens_per_minute, key.requests)
        await self._run(lambda: self._write("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, key.created_at)))

    async def forget(self, key_id: str) -> None:
        await self._run(lambda: self._write("DELETE FROM keys WHERE key_id = ?", (key_id,)))

    async def close(self) -> None:
        await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        def call() -> ResultT:
            try:
                return work()
            except sqlite3.Error as error:
                raise InternalError(
                    f"{self._path.name} of the coordinator's state cannot be used: {error}; check the disk that "
                    "--state-dir is on",
                    field="state-dir",
                    reason="STATE_STORE",
                ) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # Below: in the thread that owns the connection.

    def _open(self) -> list[tuple[ApiKey, str]]:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._database = sqlite3.connect(self._path, timeout=5.0)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(_SCHEMA)
        self._path.chmod(0o600)
        rows = self._database.execute(
            "SELECT name, models, tokens_per_minute, requests, key_id, created_at, digest FROM keys"
        )
        return [
            (ApiKey(name, tuple(json.loads(models)), tokens, requests, key_id, created_at), digest)
            for name, models, tokens, requests, key_id, created_at, digest in rows
        ]

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        if self._database is None:
            raise sqlite3.ProgrammingError("it is not open")
        with self._database as database:
            database.execute(statement, values)

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
