"""No node's message makes an epoch, and the effect of such a message in an earlier version is
repaired."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.core.values.state import DeploymentRecord, State, Timings

from edgeshard.domain.control.commands import ControlMessage, PrepareStage, ReleaseStage
from edgeshard.domain.errors import EdgeShardError, InternalError, StaleEpochError
from edgeshard.domain.ids import COUNTED_EPOCHS, MAX_EPOCH, DeploymentName, Epoch
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from edgeshard.proto.v1 import admin_pb2
from tests.support.scripted_agent import DEADLINE_S

pytestmark = pytest.mark.timing

DAMAGED = Path(__file__).with_name("state_with_a_false_epoch.sql")
"""The state of an earlier version. Deployment tales has epoch 2^64, because node m claimed a stage
of 2^64 - 1."""


@pytest.fixture
async def damaged(tmp_path: Path, open_site: Any) -> Any:
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as database:
        database.executescript(DAMAGED.read_text())
    return await open_site()


def delete_request(
    name: str, operation_id: str = "op-delete", **options: Any
) -> admin_pb2.DeleteDeploymentRequest:
    return admin_pb2.DeleteDeploymentRequest(operation_id=operation_id, name=name, **options)


async def test_a_false_epoch_on_the_disk_is_deleted_by_force(damaged: Any) -> None:
    site = damaged
    listed = await site.admin.ListDeployments(
        admin_pb2.ListDeploymentsRequest(), timeout=DEADLINE_S
    )
    epochs = {item.spec.name: item.epoch for item in listed.deployments}
    assert epochs["verses"] == 1 and site.state.epoch_floor < epochs["tales"] < COUNTED_EPOCHS
    await site.admin.DeleteDeployment(delete_request("tales", force=True), timeout=DEADLINE_S)
    await site.until(lambda state: "tales" not in state.deployments)
    await site.connected("a", "b", "c")
    await site.admin.Deploy(site.deploy_request(name="tales"), timeout=DEADLINE_S)
    record = await site.until_phase("tales", "ready")
    await site.restart()
    assert site.state.deployments["tales"].epoch == record.epoch < COUNTED_EPOCHS


async def test_a_false_epoch_on_the_disk_does_not_keep_a_deployment_from_its_nodes(
    damaged: Any,
) -> None:
    for agent in await damaged.connected("a", "b"):
        await damaged.heard(agent)
    record = await damaged.until_phase("tales", "ready")
    assert damaged.state.epoch_floor < record.epoch < COUNTED_EPOCHS
    await damaged.admin.DeleteDeployment(delete_request("tales"), timeout=DEADLINE_S)
    await damaged.until(lambda state: "tales" not in state.deployments)


async def test_a_false_epoch_of_a_name_that_is_gone_does_not_keep_it(
    tmp_path: Path, open_site: Any
) -> None:
    site = await open_site()
    await site.stop()
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as database:
        database.execute("INSERT INTO retired VALUES ('tale', ?)", (MAX_EPOCH,))
        database.commit()
    await site.start()
    _, head = await site.deployed()
    assert site.state.epoch_floor < head.epoch < COUNTED_EPOCHS


async def test_a_deletion_by_force_waits_for_no_node(site: Any) -> None:
    agents, _ = await site.deployed()
    for agent in agents:
        agent.held.add(ReleaseStage)
    await site.admin.DeleteDeployment(delete_request("tale"), timeout=DEADLINE_S)
    await site.until(
        lambda state: all(progress.sent_on for progress in state.deployments["tale"].released)
    )
    await site.admin.DeleteDeployment(
        delete_request("tale", "op-2", force=True), timeout=DEADLINE_S
    )
    await site.until(lambda state: "tale" not in state.deployments)
    assert site.state.retired["tale"] == 1


async def test_a_claim_to_a_high_epoch_moves_the_next_one_above_the_floor_and_no_further(
    site: Any,
) -> None:
    (liar,) = await site.connected("m")
    for epoch in (7, MAX_EPOCH):
        lie = StageStatus(
            DeploymentName("tale"), Epoch(epoch), 0, LayerRange(0, 4), StagePhase.READY
        )
        await site.heard(liar, lie)
        assert site.state.first_epoch("tale") == site.state.epoch_floor + 1
    _, head = await site.deployed()
    assert head.epoch == site.state.epoch_floor + 1
    record = site.state.deployments["tale"]
    assert site.state.epoch_after("tale", record.epoch) == record.epoch + 1, "the lie counts once"


async def test_a_write_that_crashes_is_tried_again(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state waits for an answer to each write, so any end of it must be one."""
    await site.deployed()
    forget = site.coordinator._store.forget
    crashes = [
        OverflowError("Python int too large to convert to SQLite INTEGER"),
        RuntimeError("unexpected"),
    ]

    async def crashing(record: DeploymentRecord) -> None:
        if crashes:
            raise crashes.pop()
        await forget(record)

    monkeypatch.setattr(site.coordinator._store, "forget", crashing)
    await site.admin.DeleteDeployment(delete_request("tale"), timeout=DEADLINE_S)
    await site.until(lambda state: "tale" not in state.deployments)
    assert not crashes


async def test_an_epoch_that_sqlite_cannot_hold_is_a_typed_error(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "other.sqlite")
    await store.open("one", Timings())
    with pytest.raises(InternalError) as refused:
        statement = "INSERT INTO retired VALUES ('tale', ?)"
        await store._run(lambda: store._open_database.execute(statement, (MAX_EPOCH + 1,)))
    assert refused.value.reason == "STATE_STORE"
    await store.close()


def test_without_a_claim_epochs_are_counted() -> None:
    state = State("one", epoch_floor=Epoch(1_000), retired={DeploymentName("tale"): Epoch(4)})
    assert (
        state.first_epoch(DeploymentName("tale")) == 5
        and state.first_epoch(DeploymentName("verse")) == 1
    )


async def test_a_restored_backup_goes_above_the_epochs_that_nodes_hold(
    tmp_path: Path, open_site: Any
) -> None:
    """Nodes refuse a lower epoch than the one that they hold."""
    site = await open_site()
    await site.deployed()
    await site.stop()
    disk = tmp_path / "state.sqlite"
    backup = disk.read_bytes()
    site.agents = []
    await site.start()
    await site.connected("a", "b", "c")
    later = await site.until_phase("tale", "ready", epoch=2)
    await site.stop()
    for file in tmp_path.glob("state.sqlite*"):
        file.unlink()
    disk.write_bytes(backup)
    site.agents = []
    await site.start()
    assert site.state.deployments["tale"].epoch == 1 < later.epoch

    def refuse_lower(command: ControlMessage) -> EdgeShardError | None:
        is_lower = isinstance(command, PrepareStage) and command.epoch <= later.epoch
        return (
            StaleEpochError(f"this node is at epoch {later.epoch}", field="epoch")
            if is_lower
            else None
        )

    agents = {name: site.agent(name) for name in ("a", "b", "c")}
    for agent in agents.values():
        agent.answer = refuse_lower
        await agent.connect()
    for placed in later.placement.stages:
        held = StageStatus(
            DeploymentName("tale"), later.epoch, placed.index, placed.layers, StagePhase.READY
        )
        await agents[placed.node_name].heartbeat(held)
    record = await site.until_phase("tale", "ready")
    assert later.epoch < record.epoch < COUNTED_EPOCHS


async def test_without_its_state_a_coordinator_deploys_above_the_epochs_that_nodes_hold(
    site: Any,
) -> None:
    agents = await site.connected("a", "b", "c")
    for index, agent in enumerate(agents):
        held = StageStatus(
            DeploymentName("tale"),
            Epoch(7),
            index,
            LayerRange(4 * index, 4 * index + 4),
            StagePhase.READY,
        )
        await site.heard(agent, held)
    await site.admin.Deploy(site.deploy_request(), timeout=DEADLINE_S)
    record = await site.until_phase("tale", "ready")
    assert site.state.epoch_floor < record.epoch < COUNTED_EPOCHS
