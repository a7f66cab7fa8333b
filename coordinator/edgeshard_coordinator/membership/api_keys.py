"""API keys for the HTTP gateway, each with its models and limits, and their file. Secrets are kept
hashed."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from edgeshard.domain.errors import (
    AlreadyExistsError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from edgeshard.domain.identity import ApiKey, key_id_of, key_identity
from edgeshard_coordinator.core.values.quotas import Quota
from edgeshard_coordinator.membership.tokens import digest_of
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
            (
                ApiKey(
                    name,
                    tuple(json.loads(models)),
                    tokens,
                    requests,
                    key_id,
                    created_at,
                    bool(metrics),
                ),
                digest,
            )
            for name, models, tokens, requests, key_id, created_at, metrics, digest in rows
        ]

    @in_own_thread
    def save(self, key: ApiKey, digest: str) -> None:
        values = (
            key.key_id,
            digest,
            key.name,
            json.dumps(key.models),
            key.tokens_per_minute,
            key.requests,
        )
        with self._open_database as database:
            database.execute(
                "INSERT INTO keys (key_id, digest, name, models, tokens_per_minute, requests, "
                "created_at) "
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


log = structlog.get_logger()

PREFIX = "esk-"
"""The beginning of every key's text."""
MOST_KEYS = 4096
_SECRET_BYTES = 32
_TEXT = re.compile(rf"{PREFIX}([0-9a-f]{{12}})-([A-Za-z0-9_-]{{43}})")


@dataclass(frozen=True, slots=True)
class KeptKey:
    """A key as it is kept: `digest` is the sha256 of its secret."""

    key: ApiKey
    digest: str


def _nothing(identity: str) -> None:
    pass


class KeyBook:
    """The site's keys, all of them in memory. `now` is the wall clock in seconds since 1970."""

    def __init__(self, store: ApiKeyStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._kept: dict[str, KeptKey] = {}
        self._lock = asyncio.Lock()
        self._on_revoked: Callable[[str], None] = _nothing

    async def open(self, on_revoked: Callable[[str], None] = _nothing) -> None:
        """Read the keys from disk. `on_revoked` ends all that an identity has open when its key is
        revoked."""
        self._on_revoked = on_revoked
        self._kept = {key.key_id: KeptKey(key, digest) for key, digest in await self._store.open()}

    async def close(self) -> None:
        await self._store.close()

    @property
    def count(self) -> int:
        return len(self._kept)

    def list(self) -> tuple[ApiKey, ...]:
        return tuple(sorted((entry.key for entry in self._kept.values()), key=lambda key: key.name))

    def quota_of(self, identity: str) -> Quota | None:
        """The limits of a key of its own; None if the identity is another, or the key has no
        limits."""
        entry = self._kept.get(key_id_of(identity))
        if entry is None or (entry.key.requests is None and entry.key.tokens_per_minute is None):
            return None
        return Quota(entry.key.requests, entry.key.tokens_per_minute)

    async def create(self, template: ApiKey) -> tuple[ApiKey, str]:
        """A key like `template`, and its text, which is shown this once. Raises AlreadyExistsError
        naming `name`."""
        async with self._lock:
            if self._named(template.name) is not None:
                raise AlreadyExistsError(
                    f"name: there is a key {template.name}; revoke it first, or choose another "
                    "name",
                    field="name",
                )
            if len(self._kept) >= MOST_KEYS:
                raise ResourceExhaustedError(
                    f"there are {MOST_KEYS} keys already: revoke some", field="name"
                )
            key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(_SECRET_BYTES)
            key = replace(template, key_id=key_id, created_at=float(self._now()))
            entry = KeptKey(key, digest_of(secret.encode()))
            await self._store.save(entry.key, entry.digest)
            self._kept[key_id] = entry
        log.info("key_created", name=key.name, key_id=key_id)
        return key, f"{PREFIX}{key_id}-{secret}"

    async def revoke(self, name: str) -> None:
        """Refuse a key from now on. Raises NotFoundError."""
        async with self._lock:
            key = self._named(name)
            if key is None:
                raise NotFoundError(
                    f"name: there is no key {name[:80]!r}", field="name", reason="UNKNOWN_KEY"
                )
            await self._store.forget(key.key_id)
            del self._kept[key.key_id]
        log.warning("key_revoked", name=name, key_id=key.key_id)
        self._on_revoked(key_identity(name, key.key_id))

    def find(self, text: str) -> ApiKey:
        """The key of this text. Raises UnauthenticatedError, which never reveals how much of it was
        right."""
        match = _TEXT.fullmatch(text)
        entry = self._kept.get(match[1]) if match else None
        if (
            match is None
            or entry is None
            or not hmac.compare_digest(entry.digest, digest_of(match[2].encode()))
        ):
            raise _unknown()
        return entry.key

    def check(self, identity: str) -> None:
        """Raise UnauthenticatedError if the key with this identity was revoked."""
        if key_id_of(identity) not in self._kept:
            raise _unknown()

    def _named(self, name: str) -> ApiKey | None:
        return next((entry.key for entry in self._kept.values() if entry.key.name == name), None)


def _unknown() -> UnauthenticatedError:
    return UnauthenticatedError(
        "the API key is unknown here: it may have been revoked; an operator creates another with "
        "edgectl key create NAME",
        field="api_key",
        reason="INVALID_API_KEY",
    )
