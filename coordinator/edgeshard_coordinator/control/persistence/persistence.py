"""The part of the state that outlives the process: one SQLite file, written off the event loop."""

from __future__ import annotations

import fcntl
import sqlite3
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import structlog

from edgeshard.domain.control.commands import Term
from edgeshard.domain.deployments.traffic import Traffic
from edgeshard.domain.errors import DataLossError, EdgeShardError, FailedPreconditionError
from edgeshard.domain.ids import (
    COUNTED_EPOCHS,
    DeploymentName,
    Epoch,
    ModelName,
    NodeId,
    OperationId,
)
from edgeshard.domain.nodes.profile import ComputeProfile, LinkProfile
from edgeshard.forms import Forms
from edgeshard.profiles.report import ProfileT, parse_profile, profile_text
from edgeshard_coordinator.core.deployments.deployments import restored_record
from edgeshard_coordinator.core.values.measurements import (
    Measurements,
    ProfileKey,
    Reported,
    key_of,
)
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    KnownNode,
    ServedOperation,
    State,
    Timings,
)
from edgeshard_coordinator.sqlite_store import SqliteStore, in_own_thread

log = structlog.get_logger()

TRAFFIC_KEPT = 1_000
"""Names whose lengths are remembered; the ones written longest ago go first."""
OPERATIONS_KEPT = 10_000
"""Answers of the latest operations; a client that repeats a call does so within minutes."""
_FIRST_SCHEMA = """
CREATE TABLE IF NOT EXISTS deployments (name TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS retired (name TEXT PRIMARY KEY, epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS nodes (node_id TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS operations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    operation_id TEXT NOT NULL UNIQUE,
    fingerprint TEXT NOT NULL,
    outcome BLOB NOT NULL
);
"""
_MEASUREMENTS = """
CREATE TABLE profiles (
    node_id TEXT NOT NULL,
    reported_at REAL NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX profiles_of_node ON profiles (node_id);
CREATE TABLE links (
    sender TEXT NOT NULL,
    receiver TEXT NOT NULL,
    reported_at REAL NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (sender, receiver)
);
"""
_TRAFFIC = """
CREATE TABLE traffic (
    name TEXT NOT NULL,
    model TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (name, model)
);
"""
_TERM = "CREATE TABLE term (site TEXT NOT NULL, number INTEGER NOT NULL);"
_MIGRATIONS = (_FIRST_SCHEMA, _MEASUREMENTS, _TRAFFIC, _TERM)
"""The migration from version n to n + 1. Times in the file are of the wall clock, which outlives
the monotonic one."""

_DEPLOYMENT_KEYS = (
    "uid",
    "spec",
    "manifest_digest",
    "placement",
    "epoch",
    "phase",
    "ever_ready",
    "failure",
)
_NODE_KEYS = ("node_id", "name", "address", "wire_version", "facts", "own_labels", "set_labels")
_STATE = Forms(
    "state",
    "restore state.sqlite in --state-dir from a copy",
    only={DeploymentRecord: _DEPLOYMENT_KEYS, KnownNode: _NODE_KEYS},
)


class StateStore(SqliteStore):
    """The coordinator's state in SQLite; its methods raise as a `SqliteStore` does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "the coordinator's state")
        self._lock: TextIO | None = None

    @in_own_thread
    def open(self, instance: str, timings: Timings, now: float = 0.0) -> State:
        """The state as it was saved, deployments waiting for their nodes; `now` is in monotonic
        seconds.

        Raises FailedPreconditionError when another coordinator has the file, or a newer version
        wrote it.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # The lock is held until the end: two coordinators with one state would hand out the same
        # epochs. It is not SQLite's own, which would keep `edgectl backup` from reading.
        lock = hold_state(self._path)
        try:
            self._database = self._current_database()
        except BaseException:
            lock.close()
            raise
        self._lock = lock
        return self._load(instance, timings, now)

    def _current_database(self) -> sqlite3.Connection:
        """The file, with the tables of this version."""
        database = sqlite3.connect(self._path, timeout=0.5, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            database.execute("BEGIN IMMEDIATE")
            database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            database.close()
            if "locked" not in str(error):
                raise
            raise _in_use(
                self._path
            ) from None  # by an earlier version, which locked the file itself
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > len(_MIGRATIONS):
            database.close()
            raise _newer(self._path)
        for number, script in enumerate(_MIGRATIONS[version:], start=version + 1):
            database.executescript(f"BEGIN; {script} PRAGMA user_version={number}; COMMIT;")
        return database

    def _load(self, instance: str, timings: Timings, now: float) -> State:
        database = self._open_database
        rows = database.execute("SELECT name, body FROM deployments ORDER BY name")
        floor = Epoch(int(time.time() * 1000))
        records = [restored_record(_record_of(name, body, floor)) for name, body in rows]
        bodies = database.execute("SELECT body FROM nodes")
        nodes = [replace(_STATE.from_text(KnownNode, body), saved=True) for (body,) in bodies]
        retired = database.execute("SELECT name, epoch FROM retired").fetchall()
        return State(
            instance=instance,
            timings=timings,
            term=self._next_term(),
            epoch_floor=floor,
            nodes={node.node_id: node for node in nodes},
            deployments={record.name: record for record in records},
            retired={DeploymentName(name): _counted(name, epoch, floor) for name, epoch in retired},
            measured=self._load_measurements({node.node_id for node in nodes}, time.time() - now),
        )

    def _next_term(self) -> Term:
        """One more than the last, on disk before any node receives it."""
        with _transaction(self._open_database) as database:
            row = database.execute("SELECT site, number FROM term").fetchone()
            site, number = row if row is not None else (uuid.uuid4().hex, 0)
            database.execute("DELETE FROM term")
            database.execute("INSERT INTO term VALUES (?, ?)", (site, number + 1))
        return Term(site, number + 1)

    def _load_measurements(
        self, nodes: Collection[NodeId], offset: float
    ) -> dict[NodeId, Measurements]:
        """The measurements of known nodes; `offset` takes a monotonic time to the wall clock's, in
        seconds."""
        database = self._open_database
        profiles: dict[NodeId, dict[ProfileKey, Reported[ComputeProfile]]] = {
            node_id: {} for node_id in nodes
        }
        links: dict[NodeId, dict[NodeId, Reported[LinkProfile]]] = {
            node_id: {} for node_id in nodes
        }
        for node_id, reported_at, body in database.execute(
            "SELECT node_id, reported_at, body FROM profiles"
        ):
            profile = _readable(ComputeProfile, body, node_id)
            if profile is not None and node_id in profiles:
                profiles[node_id][key_of(profile)] = Reported(profile, reported_at - offset)
        for sender, receiver, reported_at, body in database.execute("SELECT * FROM links"):
            link = _readable(LinkProfile, body, sender)
            if link is not None and sender in links and receiver in links:
                links[sender][receiver] = Reported(link, reported_at - offset)
        return {
            node_id: Measurements(profiles[node_id], links[node_id])
            for node_id in nodes
            if profiles[node_id] or links[node_id]
        }

    def _close(self) -> None:
        super()._close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @in_own_thread
    def save(self, *records: DeploymentRecord) -> None:
        """Write records and the operations that they carry in one transaction."""
        rows = [
            (record.name, _STATE.to_text(DeploymentRecord, record.on_disk)) for record in records
        ]
        with _transaction(self._open_database) as database:
            database.executemany("INSERT OR REPLACE INTO deployments VALUES (?, ?)", rows)
            for record in records:
                for operation in record.operations:
                    _insert_operation(database, operation)

    @in_own_thread
    def forget(self, record: DeploymentRecord) -> None:
        """Remove the deployment and keep its last epoch, in one transaction."""
        with _transaction(self._open_database) as database:
            database.execute("DELETE FROM deployments WHERE name = ?", (record.name,))
            database.execute(
                "INSERT OR REPLACE INTO retired VALUES (?, ?)", (record.name, record.epoch)
            )
            database.execute(
                "DELETE FROM operations WHERE number <= (SELECT MAX(number) FROM operations) - ?",
                (OPERATIONS_KEPT,),
            )

    @in_own_thread
    def save_node(self, node: KnownNode) -> None:
        """Write a node, in place of an earlier version of it."""
        body = _STATE.to_text(KnownNode, node)
        with _transaction(self._open_database) as database:
            database.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?)", (node.node_id, body))

    @in_own_thread
    def forget_node(self, node_id: NodeId) -> None:
        """Remove a node and all that was measured of it."""
        with _transaction(self._open_database) as database:
            database.execute("DELETE FROM nodes WHERE node_id = ?", (node_id,))
            database.execute("DELETE FROM profiles WHERE node_id = ?", (node_id,))
            database.execute(
                "DELETE FROM links WHERE sender = ? OR receiver = ?", (node_id, node_id)
            )

    @in_own_thread
    def save_measurements(self, node_id: NodeId, measurements: Measurements, now: float) -> None:
        """Replace a node's measurements; `now` is in monotonic seconds."""
        offset = time.time() - now
        profiles = [
            (node_id, p.reported_at + offset, profile_text(p.value))
            for p in measurements.profiles.values()
        ]
        links = [
            (node_id, to, link.reported_at + offset, profile_text(link.value))
            for to, link in measurements.links.items()
        ]
        with _transaction(self._open_database) as database:
            database.execute("DELETE FROM profiles WHERE node_id = ?", (node_id,))
            database.execute("DELETE FROM links WHERE sender = ?", (node_id,))
            database.executemany("INSERT INTO profiles VALUES (?, ?, ?)", profiles)
            database.executemany("INSERT INTO links VALUES (?, ?, ?, ?)", links)

    @in_own_thread
    def load_traffic(self) -> dict[tuple[DeploymentName, ModelName], Traffic]:
        """The traffic of deployments, by their name and model."""
        rows = self._open_database.execute("SELECT name, model, body FROM traffic ORDER BY rowid")
        return {
            (DeploymentName(name), ModelName(model)): _STATE.from_text(Traffic, body)
            for name, model, body in rows
        }

    @in_own_thread
    def save_traffic(self, traffic: Mapping[tuple[DeploymentName, ModelName], Traffic]) -> None:
        """Write the traffic of these deployments; that of others stays."""
        rows = [
            (name, model, _STATE.to_text(Traffic, item)) for (name, model), item in traffic.items()
        ]
        with _transaction(self._open_database) as database:
            database.executemany("INSERT OR REPLACE INTO traffic VALUES (?, ?, ?)", rows)
            database.execute(
                "DELETE FROM traffic WHERE rowid NOT IN (SELECT rowid FROM traffic ORDER BY rowid "
                "DESC LIMIT ?)",
                (TRAFFIC_KEPT,),
            )

    @in_own_thread
    def find_operation(self, operation_id: OperationId) -> ServedOperation | None:
        """The call with this id that took effect; None if there was none, or it was long ago."""
        row = self._open_database.execute(
            "SELECT fingerprint, outcome FROM operations WHERE operation_id = ?", (operation_id,)
        ).fetchone()
        return None if row is None else ServedOperation(operation_id, row[0], row[1])

    @in_own_thread
    def save_operation(self, operation: ServedOperation) -> None:
        """Write a call that took effect. The first one with its id stays."""
        with _transaction(self._open_database) as database:
            _insert_operation(database, operation)


def hold_state(path: Path) -> TextIO:
    """Lock the state in the file `path` until the returned file is closed.

    Raises FailedPreconditionError (STATE_DIR_IN_USE) if another coordinator has it.
    """
    lock = path.with_suffix(".lock")
    lock.touch(mode=0o600)
    file = lock.open("a", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise _in_use(path) from None
    return file


def prepare_restored(path: Path, least_term: int) -> None:
    """Change the state in file `path`, a copy of an earlier time, so that nodes follow it. Its next
    term is above `least_term`, which is above all terms that the site had after the copy.

    Raises FailedPreconditionError (STATE_VERSION) for a file of a newer version, DataLossError for
    one that is no state.
    """
    database = sqlite3.connect(path, isolation_level=None)
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > len(_MIGRATIONS):
            raise _newer(path)
        if version > _MIGRATIONS.index(_TERM):
            database.execute("UPDATE term SET number = MAX(number + 1, ?)", (least_term,))
    except sqlite3.Error as error:
        raise DataLossError(
            f"{path.name} of the backup is not a coordinator's state: {error}", field="file"
        ) from None
    finally:
        database.close()


def _in_use(path: Path) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"state-dir {path.parent} is in use by another coordinator; stop it or choose another",
        field="state-dir",
        reason="STATE_DIR_IN_USE",
    )


def _newer(path: Path) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"state-dir {path.parent} was written by a newer edgeshard-coordinator; upgrade this one",
        field="state-dir",
        reason="STATE_VERSION",
    )


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK when the block raises."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    finally:
        # Also after a commit that the disk refused: while its transaction is open, no other can
        # begin.
        if database.in_transaction:
            database.execute("ROLLBACK")


def _insert_operation(database: sqlite3.Connection, operation: ServedOperation) -> None:
    database.execute(
        "INSERT OR IGNORE INTO operations (operation_id, fingerprint, outcome) VALUES (?, ?, ?)",
        (operation.operation_id, operation.fingerprint, operation.outcome),
    )


def _record_of(name: str, body: str, floor: Epoch) -> DeploymentRecord:
    """A deployment of the disk. Raises InvalidArgumentError naming the field that cannot be
    read."""
    plain = _STATE.parse(body)
    if isinstance(plain, dict) and isinstance(plain.get("epoch"), int):
        plain["epoch"] = _counted(name, plain["epoch"], Epoch(floor + 1))
    return _STATE.read(DeploymentRecord, plain)


def _counted(name: str, epoch: int, floor: Epoch) -> Epoch:
    """An epoch of the disk. Earlier versions took epochs from nodes' heartbeats: one that no
    coordinator has counted to becomes `floor`, which is above all that this site issued before."""
    if 0 <= epoch <= COUNTED_EPOCHS:
        return Epoch(epoch)
    log.warning("false_epoch_replaced", deployment=name, epoch=str(epoch), by=floor)
    return floor


def _readable(kind: type[ProfileT], body: str, node_id: str) -> ProfileT | None:
    """A measurement; None if its form is of an earlier version and no longer known: it is measured
    again."""
    try:
        return parse_profile(kind, body)
    except EdgeShardError as error:
        log.warning("measurement_dropped", node_id=node_id, error=error.message)
        return None
