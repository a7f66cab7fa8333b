"""Measurements requested from nodes, as values; `core.profiling.measuring` decides about them."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.control.commands import CommandKey, CommandKind, MeasureCompute, ProbeLinks
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import Epoch, NodeId, NodeName


@dataclass(frozen=True, slots=True)
class SentCommand:
    """A command under way since `sent_at`; unanswered at `deadline` it counts as failed. In
    monotonic seconds."""

    command_key: CommandKey
    command: MeasureCompute | ProbeLinks
    sent_at: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Job:
    """One node's remaining measurements, over the control stream numbered `connection`: its layers,
    then its links.

    uid         of the operator's call that waits for it, or the coordinator's own number for it
    compute     the measurement of layers still to do
    peers       the nodes to probe; None: all connected nodes without a measured link, all if
                `every_link`
    asked       nodes whose probe was answered, with any result. The ones without a link are in
                `missed`.
    step        number of commands sent, so that each has a key of its own
    own         no caller waits for it
    """

    uid: str
    node_id: NodeId
    connection: int
    compute: MeasureCompute | None = None
    peers: tuple[NodeId, ...] | None = None
    every_link: bool = False
    asked: frozenset[NodeId] = frozenset()
    missed: frozenset[NodeId] = frozenset()
    step: int = 0
    sent: SentCommand | None = None
    own: bool = False

    @property
    def next_key(self) -> CommandKey:
        return CommandKey(self.uid, Epoch(0), CommandKind.MEASURE, self.step)

    @property
    def probing(self) -> bool:
        return self.sent is not None and isinstance(self.sent.command, ProbeLinks)


@dataclass(frozen=True, slots=True)
class ProbeTry:
    """The number of failed probes of a link, or measurements of layers, and the earliest time of
    another."""

    attempts: int
    not_before: float


@dataclass(frozen=True, slots=True)
class Retake:
    """A command for layers that a node measured while it was busy, to be sent again from a time on.

    `attempts` counts how often it was sent again already.
    """

    node_id: NodeId
    command: MeasureCompute
    attempts: int
    not_before: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One node's part of an operator's call is over; `failure` has the reason if it could not be
    measured.

    `missed` are the nodes that it could not measure its link to.
    """

    uid: str
    node_id: NodeId
    failure: EdgeShardError | None = None
    missed: tuple[NodeName, ...] = ()
