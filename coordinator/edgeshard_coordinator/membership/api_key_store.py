"""API keys on disk, in a file of their own."""

from __future__ import annotations

import json
from pathlib import Path

from edgeshard.domain.identity import ApiKey
from edgeshard_coordinator.sqlite_store import SqliteStore

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


class ApiKeyStore(SqliteStore):
    """Raises what a `SqliteStore` raises."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "API keys")

    async def open(self) -> list[tuple[ApiKey, str]]:
        """Every key with the digest of its secret."""
        return await self._run(self._open)

    async def save(self, key: ApiKey, digest: str) -> None:
        values = (key.key_id, digest, key.name, json.dumps(key.models), key.tokens_per_minute, key.requests)
        await self._run(lambda: self._write("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, key.created_at)))

    async def forget(self, key_id: str) -> None:
        await self._run(lambda: self._write("DELETE FROM keys WHERE key_id = ?", (key_id,)))

    # Below: in the thread that owns the connection.

    def _open(self) -> list[tuple[ApiKey, str]]:
        rows = self._connect(_SCHEMA).execute(
            "SELECT name, models, tokens_per_minute, requests, key_id, created_at, digest FROM keys"
        )
        return [
            (ApiKey(name, tuple(json.loads(models)), tokens, requests, key_id, created_at), digest)
            for name, models, tokens, requests, key_id, created_at, digest in rows
        ]
