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
    created_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS metrics_keys (key_id TEXT PRIMARY KEY);
"""


class ApiKeyStore(SqliteStore):
    """The API keys in SQLite; its methods raise as a `SqliteStore` does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "API keys")

    @in_own_thread
    def open(self) -> list[tuple[ApiKey, str]]:
        """Every key with the digest of its secret."""
        database = self._connect(_SCHEMA)
        copy = "INSERT OR IGNORE INTO metrics_keys SELECT key_id FROM keys WHERE metrics"
        self._move_columns("keys", ("metrics",), copy)
        rows = database.execute(
            "SELECT name, models, tokens_per_minute, requests, key_id, created_at, "
            "key_id IN (SELECT key_id FROM metrics_keys), digest FROM keys"
        )
        return [
            (ApiKey(name, tuple(json.loads(models)), tokens, requests, key_id, created_at, bool(metrics)), digest)
            for name, models, tokens, requests, key_id, created_at, metrics, digest in rows
        ]

    @in_own_thread
    def save(self, key: ApiKey, digest: str) -> None:
        values = (key.key_id, digest, key.name, json.dumps(key.models), key.tokens_per_minute, key.requests)
        with self._open_database as database:
            database.execute(
                "INSERT INTO keys (key_id, digest, name, models, tokens_per_minute, requests, created_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*values, key.created_at),
            )
            if key.metrics:
                database.execute("INSERT INTO metrics_keys (key_id) VALUES (?)", (key.key_id,))

    @in_own_thread
    def forget(self, key_id: str) -> None:
        with self._open_database as database:
            database.execute("DELETE FROM keys WHERE key_id = ?", (key_id,))
            database.execute("DELETE FROM metrics_keys WHERE key_id = ?", (key_id,))
