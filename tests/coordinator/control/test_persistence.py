"""Only the state on disk survives a restart."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.control.persistence import persistence
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.core.placement.by_memory import SimplePlacer
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.measurements import Measurements, Reported, key_of
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    KnownNode,
    Move,
    Progress,
    ServedOperation,
    State,
    Timings,
)

from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.deployments.guesses import GuessCounts
from edgeshard.domain.deployments.traffic import NO_TRAFFIC
from edgeshard.domain.errors import (
    DataLossError,
    FailedPreconditionError,
    InternalError,
    ResourceExhaustedError,
)
from edgeshard.domain.ids import (
    DeploymentName,
    Digest,
    Epoch,
    ModelName,
    NodeId,
    NodeName,
    OperationId,
)
from edgeshard.domain.models.dtypes import Quantisation
from edgeshard.domain.nodes.profile import PROFILE_VERSION, LinkProfile
from edgeshard.planning.inputs.shapes import BUILT_IN_CONFIGS

NAME = DeploymentName("tale")
CONFIG = BUILT_IN_CONFIGS["llama2-7b"]


@pytest.fixture
def record(make_manifest: Any, make_facts: Any) -> DeploymentRecord:
    nodes = [
        Candidate(NodeId(f"id-{n}"), NodeName(n), f"{n}:7000", 1 << 30, True, make_facts())
        for n in "ab"
    ]
    spec = parse_spec(
        {
            "name": "tale",
            "model": "tiny",
            "source": "a",
            "kv_dtype": "float16",
            "reserve": {"b": 7},
            "layers": "a=0:4,b=4:12",
            "max_time_per_token_s": 0.5,
        }
    )
    placement = SimplePlacer().place(spec, make_manifest(), nodes)
    fresh = (Progress(), Progress())
    return DeploymentRecord(
        "u1", spec, Digest("d" * 64), placement, Epoch(3), prepared=fresh, released=fresh
    )


async def reopened(path: Path) -> State:
    store = StateStore(path)
    try:
        return await store.open("next", Timings())
    finally:
        await store.close()


async def test_a_deployment_comes_back_waiting(tmp_path: Path, record: DeploymentRecord) -> None:
    path = tmp_path / "deep" / "state.sqlite"
    store = StateStore(path)
    fresh = await store.open("one", Timings())
    assert fresh == State(instance="one", term=fresh.term, epoch_floor=fresh.epoch_floor)
    ready = replace(record, phase=DeploymentPhase.READY, ever_ready=True, attachment=4)
    await store.save(record)
    await store.save(ready)
    await store.close()
    state = await reopened(path)
    assert state.instance == "next"
    restored = state.deployments[NAME]
    assert restored.phase is DeploymentPhase.WAITING and restored.ever_ready
    same = ("uid", "spec", "placement", "epoch", "manifest_digest")
    assert all(getattr(restored, name) == getattr(record, name) for name in same)
    assert restored.saved_epoch == 3 and restored.durable and restored.attachment == 0


async def test_a_move_is_there_when_it_is_written(tmp_path: Path, record: DeploymentRecord) -> None:
    """Although it takes effect only after the disk has confirmed it; a requested deletion has
    priority."""
    store = StateStore(tmp_path / "state.sqlite")
    await store.open("one", Timings())
    there = replace(record.placement, kv_blocks=77)
    moving = replace(
        record, phase=DeploymentPhase.READY, ever_ready=True, move=Move(there, Epoch(4), 2)
    )
    await store.save(moving)
    await store.close()
    restored = (await reopened(tmp_path / "state.sqlite")).deployments[NAME]
    assert (restored.phase, restored.epoch, restored.placement) == (
        DeploymentPhase.WAITING,
        4,
        there,
    )
    deleted = replace(moving, delete_revision=3).on_disk
    assert (deleted.phase, deleted.epoch, deleted.placement) == (
        DeploymentPhase.DELETING,
        3,
        record.placement,
    )


@pytest.mark.parametrize("phase", [DeploymentPhase.FAILED, DeploymentPhase.DELETING])
async def test_failed_and_deleting_stay_so(
    tmp_path: Path, record: DeploymentRecord, phase: DeploymentPhase
) -> None:
    store = StateStore(tmp_path / "state.sqlite")
    await store.open("one", Timings())
    failure = DataLossError("tensor x is corrupt", field="x", reason="CORRUPT_TENSOR")
    await store.save(replace(record, phase=phase, failure=failure))
    await store.close()
    restored = (await reopened(tmp_path / "state.sqlite")).deployments[NAME]
    assert restored.phase is phase
    assert isinstance(restored.failure, DataLossError)
    assert (restored.failure.message, restored.failure.field, restored.failure.reason) == (
        "tensor x is corrupt",
        "x",
        "CORRUPT_TENSOR",
    )


async def test_a_forgotten_deployment_leaves_its_epoch(
    tmp_path: Path, record: DeploymentRecord
) -> None:
    store = StateStore(tmp_path / "state.sqlite")
    await store.open("one", Timings())
    await store.save(record)
    await store.forget(record)
    await store.close()
    state = await reopened(tmp_path / "state.sqlite")
    assert not state.deployments and state.first_epoch(NAME) == 4


async def test_operations_and_nodes_come_back(
    tmp_path: Path, record: DeploymentRecord, make_facts: Any
) -> None:
    path = tmp_path / "state.sqlite"
    store = StateStore(path)
    await store.open("one", Timings())
    operation = ServedOperation(OperationId("op-1"), "print", b"\x00answer")
    await store.save(replace(record, operations=(operation,)))
    await store.save(replace(record, operations=(operation,)))
    await store.save_node(
        KnownNode(NodeId("id-a"), NodeName("a"), "a:1", 1, make_facts(), "i1", connection=3)
    )
    await store.close()
    again = StateStore(path)
    state = await again.open("two", Timings())
    assert await again.find_operation(OperationId("op-1")) == operation
    assert await again.find_operation(OperationId("op-2")) is None
    await again.close()
    node = state.nodes[NodeId("id-a")]
    assert (node.name, node.facts, node.connected, node.saved) == ("a", make_facts(), False, True)


async def test_measurements_come_back_as_old_as_they_are(
    tmp_path: Path, make_facts: Any, make_profile: Any
) -> None:
    path = tmp_path / "state.sqlite"
    store = StateStore(path)
    await store.open("one", Timings(), now=1000.0)
    profile, link = make_profile(CONFIG, 1e-3), LinkProfile(1e-3, 1e8, 0.1, 7, 4096)
    a, b, stranger = (NodeId(f"id-{name}") for name in "abz")
    for node_id in (a, b):
        await store.save_node(KnownNode(node_id, NodeName(node_id), "a:1", 1, make_facts(), "i1"))
    packed = replace(profile, quantisation=Quantisation.INT8)
    key = key_of(profile)
    links = {b: Reported(link, 990.0), stranger: Reported(link, 990.0)}
    profiles = {key: Reported(profile, 940.0), key_of(packed): Reported(packed, 950.0)}
    known = Measurements(profiles, links, saved=False)
    await store.save_measurements(a, known, now=1000.0)
    await store.save_measurements(a, known, now=1000.0)
    await store.save_measurements(stranger, known, now=1000.0)
    await store.close()
    again = StateStore(path)
    state = await again.open("two", Timings(), now=5.0)
    restored = state.measured[a]
    assert state.measured.keys() == {a} and restored.saved
    assert {key: known.value for key, known in restored.profiles.items()} == {
        key: profile,
        key_of(packed): packed,
    }
    assert restored.links.keys() == {b} and restored.links[b].value == link
    # Older by however long this test took.
    assert 59.0 < 5.0 - restored.profiles[key].reported_at < 120.0
    assert 9.0 < 5.0 - restored.links[b].reported_at < 70.0
    await again.save_measurements(a, Measurements(), now=5.0)
    await again.close()
    assert not (await reopened(path)).measured, "what was dropped is dropped on disk"


async def test_a_measurement_nobody_can_read_is_forgotten(
    tmp_path: Path, make_facts: Any, make_profile: Any
) -> None:
    path = tmp_path / "state.sqlite"
    node_id = NodeId("id-a")
    profile = make_profile(CONFIG, 1e-3)
    store = StateStore(path)
    await store.open("one", Timings())
    await store.save_node(KnownNode(node_id, NodeName("a"), "a:1", 1, make_facts(), "i1"))
    await store.save_measurements(
        node_id, Measurements({("h", profile.dtype, None): Reported(profile, 0.0)}), now=0.0
    )
    await store.close()
    with sqlite3.connect(path) as database:
        of_today, later = f'"version": {PROFILE_VERSION}', '"version": 99'
        database.execute("UPDATE profiles SET body = replace(body, ?, ?)", (of_today, later))
    database.close()
    state = await reopened(path)
    assert not state.measured and node_id in state.nodes


async def test_a_file_of_the_first_version_is_brought_up_to_date(
    tmp_path: Path, record: DeploymentRecord
) -> None:
    path = tmp_path / "state.sqlite"
    store = StateStore(path)
    await store.open("one", Timings())
    await store.save(record)
    await store.close()
    with sqlite3.connect(path) as database:
        database.executescript(
            "DROP TABLE profiles; DROP TABLE links; DROP TABLE traffic; DROP TABLE term; PRAGMA "
            "user_version=1;"
        )
    database.close()
    assert NAME in (await reopened(path)).deployments
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (4,)
        assert database.execute("SELECT count(*) FROM profiles").fetchone() == (0,)
    database.close()


async def test_each_run_with_a_state_has_the_next_term(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    terms = [(await reopened(path)).term for _ in range(3)]
    assert [term.number for term in terms] == [1, 2, 3] and len({term.site for term in terms}) == 1
    other = (await reopened(tmp_path / "other.sqlite")).term
    assert other.number == 1 and other.site not in ("", terms[0].site)


async def test_a_transaction_is_whole_or_not_at_all(
    tmp_path: Path, record: DeploymentRecord
) -> None:
    path = tmp_path / "state.sqlite"
    store = StateStore(path)
    await store.open("one", Timings())
    unwritable: Any = object()
    with pytest.raises(InternalError) as info:
        await store.save(
            replace(record, operations=(ServedOperation(OperationId("op-1"), "print", unwritable),))
        )
    assert info.value.reason == "STATE_STORE"
    await store.save_operation(ServedOperation(OperationId("op-2"), "print", b""))
    await store.close()
    assert not (await reopened(path)).deployments


async def test_replicas_are_written_together_or_not_at_all(
    tmp_path: Path, record: DeploymentRecord
) -> None:
    """If a process ends within the write, it leaves none of them: readers meanwhile see none."""
    path = tmp_path / "state.sqlite"
    store = StateStore(path)
    await store.open("one", Timings())
    one, two = (
        replace(record, spec=spec)
        for spec in replace(record.spec, layers=(), source="").numbered(2)
    )
    unwritable: Any = object()
    broken = replace(two, operations=(ServedOperation(OperationId("op-1"), "print", unwritable),))
    with pytest.raises(InternalError):
        await store.save(one, broken)
    await store.save_operation(ServedOperation(OperationId("op-2"), "print", b""))
    await store.close()
    assert not (await reopened(path)).deployments
    store = StateStore(path)
    await store.open("two", Timings())
    await store.save(
        one, replace(two, operations=(ServedOperation(OperationId("op-3"), "print", b""),))
    )
    await store.close()
    assert list((await reopened(path)).deployments) == ["tale.1", "tale.2"]


async def test_a_full_disk_is_named_with_its_bytes_and_takes_writes_again_when_there_is_room(
    tmp_path: Path, record: DeploymentRecord
) -> None:
    store = StateStore(tmp_path / "state.sqlite")
    await store.open("one", Timings())
    database, large = store._open_database, replace(record, uid="x" * 100_000)
    # no page more than there are
    await store._run(lambda: database.execute("PRAGMA max_page_count=1"))
    with pytest.raises(ResourceExhaustedError, match=r"bytes are free") as caught:
        await store.save(large)
    assert caught.value.reason == "DISK_FULL" and str(tmp_path) in caught.value.message
    await store._run(lambda: database.execute("PRAGMA max_page_count=1000"))
    await store.save(large)
    await store.close()
    assert NAME in (await reopened(tmp_path / "state.sqlite")).deployments


async def test_the_disk_is_asked_for_full_durability(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state.sqlite")
    await store.open("one", Timings())
    database = store._open_database
    settings = await store._run(
        lambda: [
            database.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous")
        ]
    )
    assert settings == ["wal", 2]
    await store.close()


async def test_two_coordinators_cannot_share_a_state(tmp_path: Path) -> None:
    first, second = StateStore(tmp_path / "state.sqlite"), StateStore(tmp_path / "state.sqlite")
    await first.open("one", Timings())
    with pytest.raises(FailedPreconditionError) as info:
        await second.open("two", Timings())
    assert info.value.field == "state-dir"
    await first.close()
    await second.close()


async def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    await reopened(path)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(FailedPreconditionError):
        await reopened(path)


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "state.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(InternalError) as info:
        await reopened(tmp_path / "state.sqlite")
    assert info.value.field == "state-dir"


async def test_the_lengths_of_what_was_served_come_back_and_the_oldest_names_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "TRAFFIC_KEPT", 2)
    store = StateStore(tmp_path / "state.sqlite")
    await store.open("one", Timings())
    keys = [(DeploymentName(name), ModelName("tiny")) for name in ("a", "b", "c")]
    traffic = NO_TRAFFIC.after(100, 3).after(7, 900, guesses=GuessCounts.of({(0, 0): 3, (7, 5): 2}))
    for key in keys:
        await store.save_traffic({key: traffic})
    await store.save_traffic({keys[1]: traffic.after(1, 1)})
    await store.save_traffic({(DeploymentName("d"), ModelName("other")): traffic})
    await store.close()
    again = StateStore(tmp_path / "state.sqlite")
    await again.open("two", Timings())
    kept = await again.load_traffic()
    assert kept == {
        keys[1]: traffic.after(1, 1),
        (DeploymentName("d"), ModelName("other")): traffic,
    }
    await again.close()
