"""Tokens and denials on disk, in a file of their own: no decision about deployments waits for
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeshard.domain.identity import Denial, principal_from_uri
from edgeshard_coordinator.membership.tokens import TokenRecord
from edgeshard_coordinator.sqlite_store import SqliteStore, in_own_thread

_SCHEMA = """\
CREATE TABLE IF NOT EXISTS tokens (
    token_id TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    principal TEXT NOT NULL,
    expires_at REAL NOT NULL,
    key_digest TEXT NOT NULL,
    guesses INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS token_origins (
    token_id TEXT PRIMARY KEY,
    created_at REAL NOT NULL,
    creator TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS denials (principal TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS accepted (
    principal TEXT NOT NULL,
    serial TEXT NOT NULL,
    PRIMARY KEY (principal, serial)
);
"""
_SELECT = (
    "SELECT token_id, digest, principal, expires_at, key_digest, IFNULL(created_at, 0), "
    "IFNULL(creator, '') "
    "FROM tokens LEFT JOIN token_origins USING (token_id)"
)
"""The values of tokens in the order of `_token`. A token that an earlier version wrote has no
origin."""
_IS_OPEN = "key_digest = '' AND expires_at > ?"
ACCEPTED_KEPT = 8
"""Certificates of one denied principal that are accepted: the newest, of which one is in use."""


class MembershipStore(SqliteStore):
    """The tokens and denials in SQLite; its methods raise as a `SqliteStore` does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "tokens and denials")

    @in_own_thread
    def open(self) -> tuple[Denial, ...]:
        """The denials of principals, whose certificates are refused."""
        database = self._connect(_SCHEMA)
        copy = (
            "INSERT OR IGNORE INTO token_origins SELECT token_id, created_at, creator FROM tokens"
        )
        self._move_columns("tokens", ("created_at", "creator"), copy)
        uris = [uri for (uri,) in database.execute("SELECT principal FROM denials")]
        return tuple(self._denial(uri) for uri in uris)

    def _denial(self, uri: str) -> Denial:
        rows = self._open_database.execute(
            "SELECT serial FROM accepted WHERE principal = ?", (uri,)
        )
        return Denial(principal_from_uri(uri), tuple(serial for (serial,) in rows))

    @in_own_thread
    def find(self, token_id: str) -> TokenRecord | None:
        row = self._open_database.execute(f"{_SELECT} WHERE token_id = ?", (token_id,)).fetchone()
        return None if row is None else _token(row)

    @in_own_thread
    def open_tokens(self, now: float) -> tuple[TokenRecord, ...]:
        """The tokens that are neither used nor expired at `now`, in seconds since 1970; the oldest
        first."""
        statement = f"{_SELECT} WHERE {_IS_OPEN} ORDER BY created_at, token_id"
        rows = self._open_database.execute(statement, (now,))
        return tuple(_token(row) for row in rows)

    @in_own_thread
    def forget_token(self, token_id: str, now: float) -> bool:
        """Whether there was an open token of this id, which is forgotten."""
        with self._open_database as database:
            statement = f"DELETE FROM tokens WHERE token_id = ? AND {_IS_OPEN}"
            return database.execute(statement, (token_id, now)).rowcount == 1

    @in_own_thread
    def count(self, now: float) -> int:
        """The number of tokens that have not expired at `now`, in seconds since 1970; the others
        are forgotten."""
        with self._open_database as database:
            database.execute("DELETE FROM tokens WHERE expires_at <= ?", (now,))
            database.execute(
                "DELETE FROM token_origins WHERE token_id NOT IN (SELECT token_id FROM tokens)"
            )
            (count,) = database.execute("SELECT COUNT(*) FROM tokens").fetchone()
        return int(count)

    @in_own_thread
    def save(self, token: TokenRecord) -> None:
        values = (
            token.token_id,
            token.digest,
            token.principal.uri,
            token.expires_at,
            token.key_digest,
        )
        with self._open_database as database:
            # `guesses` is read by older versions only: they destroyed a token after some wrong
            # secrets.
            database.execute(
                "INSERT OR REPLACE INTO tokens (token_id, digest, principal, expires_at, "
                "key_digest, guesses) "
                "VALUES (?, ?, ?, ?, ?, 0)",
                values,
            )
            database.execute(
                "INSERT OR REPLACE INTO token_origins (token_id, created_at, creator) VALUES (?, "
                "?, ?)",
                (token.token_id, token.created_at, token.creator),
            )

    @in_own_thread
    def deny(self, denial: Denial) -> None:
        """Refuse every certificate of the principal, and forget the tokens made for it."""
        uri = denial.principal.uri
        with self._open_database as database:
            database.execute("INSERT OR REPLACE INTO denials VALUES (?)", (uri,))
            database.execute("DELETE FROM accepted WHERE principal = ?", (uri,))
            database.execute("DELETE FROM tokens WHERE principal = ?", (uri,))

    @in_own_thread
    def accept(self, denial: Denial, serial: str) -> Denial:
        """Accept one certificate of a denied principal; the denial as it is then."""
        uri = denial.principal.uri
        with self._open_database as database:
            database.execute("INSERT OR REPLACE INTO accepted VALUES (?, ?)", (uri, serial))
            database.execute(
                "DELETE FROM accepted WHERE principal = ? AND rowid NOT IN "
                "(SELECT rowid FROM accepted WHERE principal = ? ORDER BY rowid DESC LIMIT ?)",
                (uri, uri, ACCEPTED_KEPT),
            )
        return self._denial(uri)


def _token(row: tuple[Any, ...]) -> TokenRecord:
    token_id, digest, uri, *values = row
    return TokenRecord(token_id, digest, principal_from_uri(uri), *values)
