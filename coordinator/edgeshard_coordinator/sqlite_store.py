"""One SQLite file: a thread of its own for the connection, and the disk's refusals as typed errors.

WAL with synchronous=FULL: a call that returned is on disk. One thread owns the connection, so
writes run in the order of their calls.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from edgeshard.domain.errors import InternalError
from edgeshard.storage.files import full_disk

Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")
StoreT = TypeVar("StoreT", bound="SqliteStore")


def in_own_thread(
    work: Callable[Concatenate[StoreT, Arguments], ResultT],
) -> Callable[Concatenate[StoreT, Arguments], Coroutine[Any, Any, ResultT]]:
    """Make a store's method one to be awaited, which runs in the thread that owns the store's
    connection."""

    @wraps(work)
    async def awaited(
        store: StoreT, /, *args: Arguments.args, **options: Arguments.kwargs
    ) -> ResultT:
        return await store._run(partial(work, store, *args, **options))

    return awaited


class SqliteStore:
    """Base of the stores. Every method of theirs raises ResourceExhaustedError (DISK_FULL) or
    InternalError (STATE_STORE) when the disk or the file refuses; nothing has changed then.

    What runs `in_own_thread` has the connection as `_open_database`; `_connect` made it.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._what = what
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=path.stem)
        self._database: sqlite3.Connection | None = None

    async def close(self) -> None:
        """Finish the pending writes, then close."""
        await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        def call() -> ResultT:
            try:
                return work()
            except (sqlite3.Error, OverflowError) as error:
                if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
                    raise full_disk(self._path, self._what) from error
                raise InternalError(
                    f"{self._path.name}, which holds {self._what}, cannot be used: {error}; "
                    "check the disk that --state-dir is on",
                    field="state-dir",
                    reason="STATE_STORE",
                ) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # Below: in the thread that owns the connection.

    @property
    def _open_database(self) -> sqlite3.Connection:
        if self._database is None:
            raise sqlite3.ProgrammingError("it is not open")
        return self._database

    def _connect(self, schema: str) -> sqlite3.Connection:
        """Open the file, readable only by its owner, with the tables of `schema`, which may be
        there already."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._database = sqlite3.connect(self._path, timeout=5.0)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(schema)
        self._path.chmod(0o600)
        return self._database

    def _move_columns(self, table: str, columns: Sequence[str], statement: str) -> None:
        """Move columns that are too many in `table` out of it, by a `statement` that copies them to
        another table.

        Earlier versions write rows without the names of columns, and cannot write a table that has
        more of them. So a later version's values are in a table of their own.
        """
        database = self._open_database
        present = {name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")}
        if present.isdisjoint(columns):
            return
        with database:
            database.execute(statement)
            if sqlite3.sqlite_version_info >= (3, 35):  # older ones cannot drop a column
                for column in columns:
                    database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
