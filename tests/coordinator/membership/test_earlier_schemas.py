"""The way back of an upgrade: an earlier coordinator reads and writes the files that this one has
written."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from edgeshard_coordinator.membership.api_keys import ApiKeyStore
from edgeshard_coordinator.membership.store import MembershipStore
from edgeshard_coordinator.membership.tokens import TokenRecord

from edgeshard.domain.identity import ApiKey, Principal, Role

NODE = Principal("mill", Role.AGENT, "b")
TOKEN = TokenRecord("0123456789abcdef", "d", NODE, 900.0, created_at=60.0, creator="operator/kim")
KEY = ApiKey("watch", ("tale",), 100, 2, "k1", 60.0, metrics=True)
# The statements of the version before tokens had creators and keys could read all metrics.
EARLIER_TOKENS = """
CREATE TABLE IF NOT EXISTS tokens (
    token_id TEXT PRIMARY KEY, digest TEXT NOT NULL, principal TEXT NOT NULL,
    expires_at REAL NOT NULL, key_digest TEXT NOT NULL, guesses INTEGER NOT NULL
)"""
EARLIER_KEYS = """
CREATE TABLE IF NOT EXISTS keys (
    key_id TEXT PRIMARY KEY, digest TEXT NOT NULL, name TEXT NOT NULL UNIQUE, models TEXT NOT NULL,
    tokens_per_minute INTEGER, requests INTEGER, created_at REAL NOT NULL
)"""
SAVE_TOKEN = "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?, 0)"
SAVE_KEY = "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?)"
EARLIER_TOKEN = ("fedcba9876543210", "e", "edgeshard://mill/agent/c", 900.0, "")
EARLIER_KEY = ("k2", "e", "app", "[]", None, None, 70.0)


@contextmanager
def changed(file: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(file)) as database, database:
        yield database


async def tokens_in(file: Path) -> dict[str, TokenRecord]:
    """The open tokens in a file, by their ids, as this version reads them."""
    store = MembershipStore(file)
    await store.open()
    found = {token.token_id: token for token in await store.open_tokens(100.0)}
    await store.close()
    return found


async def keys_in(file: Path) -> dict[str, ApiKey]:
    """The keys in a file, by their ids, as this version reads them."""
    store = ApiKeyStore(file)
    found = {key.key_id: key for key, _ in await store.open()}
    await store.close()
    return found


async def test_an_earlier_coordinator_writes_tokens_into_a_file_of_this_version(
    tmp_path: Path,
) -> None:
    file = tmp_path / "membership.sqlite"
    store = MembershipStore(file)
    await store.open()
    await store.save(TOKEN)
    await store.close()
    with changed(file) as database:
        database.execute(EARLIER_TOKENS)
        database.execute(SAVE_TOKEN, EARLIER_TOKEN)
        used = (TOKEN.token_id, TOKEN.digest, NODE.uri, TOKEN.expires_at, "of a key")
        database.execute(SAVE_TOKEN, used)
    found = await tokens_in(file)
    assert set(found) == {EARLIER_TOKEN[0]}, "the other was used meanwhile"
    assert (found[EARLIER_TOKEN[0]].created_at, found[EARLIER_TOKEN[0]].creator) == (0.0, "")


async def test_an_earlier_coordinator_writes_keys_into_a_file_of_this_version(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.sqlite"
    store = ApiKeyStore(file)
    await store.open()
    await store.save(KEY, "d")
    await store.close()
    with changed(file) as database:
        database.execute(EARLIER_KEYS)
        database.execute(SAVE_KEY, EARLIER_KEY)
    found = await keys_in(file)
    assert found["k1"] == KEY and found["k2"] == ApiKey("app", (), None, None, "k2", 70.0)


async def test_a_file_with_further_columns_is_one_that_an_earlier_coordinator_can_write(
    tmp_path: Path,
) -> None:
    """A version that was not released wrote these columns; their content stays."""
    tokens, keys = tmp_path / "membership.sqlite", tmp_path / "keys.sqlite"
    with changed(tokens) as database:
        database.execute(EARLIER_TOKENS)
        database.execute("ALTER TABLE tokens ADD COLUMN created_at REAL NOT NULL DEFAULT 0")
        database.execute("ALTER TABLE tokens ADD COLUMN creator TEXT NOT NULL DEFAULT ''")
        values = (
            TOKEN.token_id,
            TOKEN.digest,
            NODE.uri,
            TOKEN.expires_at,
            "",
            0,
            TOKEN.created_at,
            TOKEN.creator,
        )
        database.execute("INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    with changed(keys) as database:
        database.execute(EARLIER_KEYS)
        database.execute("ALTER TABLE keys ADD COLUMN metrics INTEGER NOT NULL DEFAULT 0")
        database.execute(
            "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            ("k1", "d", "watch", '["tale"]', 100, 2, 60.0, 1),
        )
        database.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*EARLIER_KEY, 0))
    assert await tokens_in(tokens) == {TOKEN.token_id: TOKEN}
    found = await keys_in(keys)
    assert found["k1"] == KEY and not found["k2"].metrics
    with changed(tokens) as database:
        database.execute(SAVE_TOKEN, EARLIER_TOKEN)
    with changed(keys) as database:
        database.execute(SAVE_KEY, ("k3", "e", "third", "[]", None, None, 80.0))
    assert set(await tokens_in(tokens)) == {TOKEN.token_id, EARLIER_TOKEN[0]}
    assert set(await keys_in(keys)) == {"k1", "k2", "k3"}


async def test_nothing_of_a_token_stays_after_its_end(tmp_path: Path) -> None:
    file = tmp_path / "membership.sqlite"
    store = MembershipStore(file)
    await store.open()
    await store.save(TOKEN)
    assert await store.count(TOKEN.expires_at) == 0
    await store.close()
    with changed(file) as database:
        assert database.execute("SELECT COUNT(*) FROM token_origins").fetchone() == (0,)


async def test_a_key_that_is_made_again_has_no_right_of_the_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "keys.sqlite"
    store = ApiKeyStore(file)
    await store.open()
    await store.save(KEY, "d")
    await store.forget(KEY.key_id)
    await store.close()
    with changed(file) as database:
        database.execute(SAVE_KEY, ("k1", *EARLIER_KEY[1:]))
    assert not (await keys_in(file))["k1"].metrics
