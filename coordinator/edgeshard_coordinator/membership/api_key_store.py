"""API keys on disk, in a file of their own."""

from __future__ import annotations

import json
from pathlib import Path

from edgeshard.domain.identity import ApiKey
from edgeshard_coordinator.sqlite_store import SqliteStore, in_own_thread

_SCHEMA = """\
CREATE TABLE IF NOT EXISTS keys (
    key_id TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    name TEXT NOT NULL UNIQUE,
    models TEXT NOT NULL,
    tokens_per_minute INTEGER,
    requests INTEGER,
    created_at REAL NOT NULL,
    metrics INTEGER NOT NULL DEFAULT 0
);
"""


class ApiKeyStore(SqliteStore):
    """The API keys in SQLite; its methods raise as a `SqliteStore` does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "API keys")

    @in_own_thread
    def open(self) -> list[tuple[ApiKey, str]]:
        """Every key with the digest of its secret."""
        database = self._connect(_SCHEMA)
        columns = {column for _, column, *_ in database.execute("PRAGMA table_info(keys)")}
        if "metrics" not in columns:  # a file from before there were such keys
            database.execute("ALTER TABLE keys ADD COLUMN metrics INTEGER NOT NULL DEFAULT 0")
        rows = database.execute(
            "SELECT name, models, tokens_per_minute, requests, key_id, created_at, metrics, digest FROM keys"
        )
        return [
            (ApiKey(name, tuple(json.loads(models)), tokens, requests, key_id, created_at, bool(metrics)), digest)
            for name, models, tokens, requests, key_id, created_at, metrics, digest in rows
        ]

    @in_own_thread
    def save(self, key: ApiKey, digest: str) -> None:
        values = (key.key_id, digest, key.name, json.dumps(key.models), key.tokens_per_minute, key.requests)
        self._write("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*values, key.created_at, key.metrics))

    @in_own_thread
    def forget(self, key_id: str) -> None:
        self._write("DELETE FROM keys WHERE key_id = ?", (key_id,))
