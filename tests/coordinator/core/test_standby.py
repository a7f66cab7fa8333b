"""Nodes that keep weights of other nodes' layers: which nodes, for which layers, and their
commands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.core.deployments import standby
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.placement.by_memory import sizes_of
from edgeshard_coordinator.core.placement.repair import cold_layers
from edgeshard_coordinator.core.values.actions import Action, PlanStandby, SendCommand
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    CommandAnswered,
    Event,
    HeartbeatsReceived,
    ProfileReported,
    StandbyPlanned,
)
from edgeshard_coordinator.core.values.state import DeploymentRecord, StandbyChoice, validate_state

from edgeshard.domain.control.commands import CommandResult, Heartbeat, KeepStandby, ProfileReport
from edgeshard.domain.deployments.deployment import DeploymentPhase, DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from tests.coordinator.core.test_suspicion import NAME, STAGES, Site, node

MIB = 1 << 20


def spec_of(*standbys: str) -> DeploymentSpec:
    return parse_spec({"name": NAME, "model": "tiny", "source": "a", "standby": standbys})


class Nodes:
    """A placement of a model of four layers on a, b and c, and its nodes' free memory."""

    def __init__(self, manifest: Any, facts: Any, **free_mib: float) -> None:
        self.manifest = manifest
        layers = (LayerRange(0, 2), LayerRange(2, 3), LayerRange(3, 4))
        placed = tuple(
            replace(stage, layers=cut, parameter_bytes=0, kv_bytes=0)
            for stage, cut in zip(STAGES, layers, strict=True)
        )
        self.placement = Placement(placed, 16, 8, 1, 1)
        self.candidates = tuple(
            Candidate(node(name), NodeName(name), f"{name}:7000", int(free * MIB), True, facts)
            for name, free in free_mib.items()
        )

    def choose(self, *standbys: str, former: tuple[str, ...] = ()) -> dict[str, str]:
        spec = spec_of(*standbys)
        sizes = sizes_of(spec, self.manifest, self.placement)
        former_ids = [node(name) for name in former]
        chosen = standby.choose(spec, self.placement, self.candidates, sizes, former_ids)
        return {choice.node_name: str(choice.layers) for choice in chosen}


@pytest.fixture
def nodes(make_manifest: Any, make_registration: Any) -> Any:
    return lambda **free: Nodes(make_manifest(4), make_registration("a").facts, **free)


def test_one_spare_node_with_room_stands_by_for_all(nodes: Any) -> None:
    assert nodes(a=500, b=500, c=500, d=400).choose("auto") == {"d": "0:4"}


def test_without_a_spare_node_neighbours_stand_by_for_each_other(nodes: Any) -> None:
    chosen = nodes(a=600, b=500, c=400).choose("auto")
    assert chosen == {"a": "2:3", "b": "0:2"} or chosen == {"a": "2:3", "b": "3:4"}


def test_named_nodes_alone_are_chosen_in_their_order(nodes: Any) -> None:
    site = nodes(a=500, b=500, c=500, d=400, e=400)
    assert site.choose("e") == {"e": "0:4"}
    assert site.choose("e", "d") == {"e": "0:4", "d": "0:4"}, "two nodes may be lost"


def test_what_stands_by_goes_on_standing_by(nodes: Any) -> None:
    site = nodes(a=100, b=100, c=100, d=300, e=400)
    assert site.choose("auto") == {"e": "0:4"}
    assert site.choose("auto", former=("d",)) == {"d": "0:4"}


def test_a_node_without_room_does_not(nodes: Any) -> None:
    assert nodes(a=0, b=0, c=0, d=0).choose("auto") == {}


def test_auto_is_given_alone() -> None:
    with pytest.raises(InvalidArgumentError, match="lets the coordinator choose"):
        spec_of("auto", "d")
    assert parse_spec(
        {"name": NAME, "model": "tiny", "source": "a", "standby": "c, d"}
    ).standby == ("c", "d")


def test_only_what_is_neither_held_nor_warm_is_cold(nodes: Any) -> None:
    site = nodes(a=1, b=1, c=1, d=1)
    former = site.placement
    taken = replace(former.stages[2], node_id=node("d"), node_name=NodeName("d"))
    moved = replace(former, stages=(*former.stages[:2], taken))
    assert [
        (stage.node_name, set(cold)) for stage, cold in cold_layers(moved, former, site.candidates)
    ] == [("d", {3})]
    warm = [
        replace(node, warm=LayerRange(0, 4)) if node.name == "d" else node
        for node in site.candidates
    ]
    assert [(stage.node_name, set(cold)) for stage, cold in cold_layers(moved, former, warm)] == [
        ("d", set())
    ]
    grown = replace(former.stages[1], layers=LayerRange(2, 4))
    merged = replace(former, stages=(former.stages[0], grown))
    assert [set(cold) for _, cold in cold_layers(merged, former, site.candidates)] == [{3}]


class StandbySite(Site):
    """The site of `test_suspicion` with standbys for its deployment; its messages are recorded."""

    def __init__(self, make_registration: Any) -> None:
        self.actions: list[Action] = []
        super().__init__(make_registration)
        self.connect("d")
        record = replace(self.record_now, spec=spec_of("auto"))
        self.state = replace(self.state, deployments={NAME: record})

    @property
    def record_now(self) -> DeploymentRecord:
        return self.state.deployments[NAME]

    def feed(self, event: Event) -> None:
        self.state = apply(self.state, event)
        validate_state(self.state)
        while actions := reconcile(self.state, self.now):
            for action in actions:
                self.actions.append(action)
                self.state = apply(self.state, ActionIssued(action, self.now))
                validate_state(self.state)

    def warm_of_d(self, deployment: DeploymentName | None) -> LayerRange | None:
        return next(node.warm for node in self.state.candidates(deployment) if node.name == "d")

    def plan(self, **chosen: LayerRange) -> None:
        choices = tuple(
            StandbyChoice(node(n), NodeName(n), layers, 100) for n, layers in chosen.items()
        )
        searching = replace(self.record_now, standby_for=self.state.version, searching=True)
        self.state = self.state.with_record(searching)
        self.feed(StandbyPlanned(NAME, "u1", self.state.version, choices, self.now))

    def beat(self, name: str, *stages: StageStatus) -> None:
        self.feed(HeartbeatsReceived((Heartbeat(node(name), "i1", stages, 0),), self.now))

    def commands(self) -> list[tuple[NodeId, LayerRange | None]]:
        """Those of standbys since the last call."""
        sent = [action for action in self.actions if isinstance(action, SendCommand)]
        found = [
            (item.node_id, item.command.layers)
            for item in sent
            if isinstance(item.command, KeepStandby)
        ]
        self.actions.clear()
        return found

    def answer(self, failure: Any = None) -> None:
        (entry,) = [entry for entry in self.record_now.standbys if entry.layers is not None]
        operation = f"u1/3/standby/{entry.number}"
        self.feed(CommandAnswered(entry.node_id, CommandResult(operation, failure), self.now))  # type: ignore[arg-type]


@pytest.fixture
def site(make_registration: Any) -> StandbySite:
    site = StandbySite(make_registration)
    site.actions.clear()
    return site


def test_a_choice_is_made_once_for_a_state_of_the_nodes(site: StandbySite) -> None:
    site.run(0.2)
    assert [action for action in site.actions if isinstance(action, PlanStandby)] == [
        PlanStandby(NAME, "u1", site.state.version)
    ]
    free = site.state.free_bytes(site.state.nodes[node("d")])
    site.actions.clear()
    site.plan(d=LayerRange(0, 12))
    assert site.state.free_bytes(site.state.nodes[node("d")]) == free - 100, (
        "its memory counts as taken"
    )
    site.plan(d=LayerRange(0, 12))
    assert sum(isinstance(action, PlanStandby) for action in site.actions) == 1, (
        "memory changed, so once more"
    )
    assert site.commands() == [(node("d"), LayerRange(0, 12))]
    site.run(1.0)
    assert site.commands() == []


def test_facts_that_change_all_the_time_keep_no_processor_busy(site: StandbySite) -> None:
    """After a few searches in a row there is one in ten seconds, however long facts keep
    changing."""
    searches: list[float] = []

    def change(budget: int) -> None:
        facts = replace(site.state.nodes[node("c")].facts, memory_budget_bytes=budget)
        site.feed(ProfileReported(ProfileReport(node("c"), facts), site.now))
        answer()

    def answer() -> None:
        begun = [action for action in site.actions if isinstance(action, PlanStandby)]
        site.actions.clear()
        for action in begun:
            searches.append(site.now)
            site.feed(StandbyPlanned(NAME, "u1", action.version, (), site.now))

    for step in range(600):
        site.run(0.1)
        change(MIB + step)
    assert 6 <= len(searches) <= 13
    for _ in range(600):
        site.run(0.1)
        answer()
    count = len(searches)
    change(MIB)
    assert len(searches) == count + 1, "a change after a quiet time counts at once"


def test_a_node_is_warm_once_it_has_answered(site: StandbySite) -> None:
    site.plan(d=LayerRange(0, 12))
    assert site.warm_of_d(NAME) is None
    site.answer()
    assert site.warm_of_d(NAME) == LayerRange(0, 12)
    assert site.warm_of_d(None) is None, "only for its own deployment"


def test_a_node_that_restarted_is_asked_again(site: StandbySite) -> None:
    site.plan(d=LayerRange(0, 12))
    site.answer()
    site.commands()
    site.connect("d")
    assert site.warm_of_d(NAME) is None, "it may have restarted"
    site.plan(d=LayerRange(0, 12))
    assert site.commands() == [(node("d"), LayerRange(0, 12))]
    site.answer()
    assert site.warm_of_d(NAME) == LayerRange(0, 12)


def test_a_node_that_failed_is_not_asked_again_over_the_same_connection(site: StandbySite) -> None:
    site.plan(d=LayerRange(0, 12))
    site.commands()
    site.answer(ResourceExhaustedError("no memory", field="node"))
    site.run(1.0)
    assert site.commands() == []
    site.connect("d")
    assert site.commands() == [(node("d"), LayerRange(0, 12))]


def test_a_node_that_stands_by_no_more_lets_go(site: StandbySite) -> None:
    site.plan(d=LayerRange(0, 12))
    site.answer()
    site.commands()
    site.plan()
    site.plan()
    assert site.commands() == [(node("d"), None)]


def test_what_a_node_keeps_from_before_a_restart_is_dropped_unless_it_is_chosen(
    site: StandbySite,
) -> None:
    kept = StageStatus(NAME, Epoch(3), 0, LayerRange(0, 4), StagePhase.STANDBY)
    site.beat("d", kept)
    assert not [action for action in site.actions if "Release" in type(action).__name__]
    site.plan(c=LayerRange(4, 8))
    site.plan(c=LayerRange(4, 8))
    assert set(site.commands()) == {(node("c"), LayerRange(4, 8)), (node("d"), None)}


def test_standbys_of_a_deleted_deployment_are_released(site: StandbySite) -> None:
    site.state = replace(site.state, deployments={}, retired={NAME: Epoch(3)})
    site.beat("d", StageStatus(NAME, Epoch(3), 0, LayerRange(0, 4), StagePhase.STANDBY))
    assert [
        type(action).__name__ for action in site.actions if "Release" in type(action).__name__
    ] == ["ReleaseOrphans"]


def test_while_it_recovers_nothing_is_asked_of_standbys_and_their_warmth_counts(
    site: StandbySite,
) -> None:
    site.plan(d=LayerRange(0, 12))
    site.answer()
    site.commands()
    site.state = replace(
        site.state,
        deployments={NAME: replace(site.record_now, phase=DeploymentPhase.WAITING, attachment=0)},
    )
    site.run(0.3)
    assert site.commands() == []
    assert site.warm_of_d(NAME) == LayerRange(0, 12)


def test_numbers_of_another_run_of_the_coordinator_are_others(site: StandbySite) -> None:
    site.plan(d=LayerRange(0, 12))
    first = site.record_now.standbys[0].number
    again = replace(site.state, instance="another")
    event = StandbyPlanned(
        NAME,
        "u1",
        again.version,
        (StandbyChoice(node("d"), NodeName("d"), LayerRange(0, 6), 1),),
        0,
    )
    record = replace(site.record_now, standbys=(), standby_count=0)
    assert standby.planned(again, record, event).standbys[0].number != first
