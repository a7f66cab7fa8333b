"""The coordinator's metrics, read from state and counts at each scrape. docs/metrics.md lists them.

Labels are names of nodes and deployments, which operators choose, and words from short lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.core import Metric

from edgeshard import WIRE_VERSION, __version__
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.ids import DeploymentName, NodeName
from edgeshard.domain.nodes.device import Condition, StagePhase, StageStatus
from edgeshard.domain.nodes.profile import LinkProfile
from edgeshard.metrics.families import EXPERTS, counter, gauge, histogram
from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.requests.request_meter import DeploymentCounts
from edgeshard_coordinator.control.requests.site_models import Models
from edgeshard_coordinator.control.runtime.conditions import Conditions
from edgeshard_coordinator.core.values.quotas import most_requests
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

_OF = ("deployment", "replica")
"""`replica` is "" for a deployment that is the only one of its name."""
_STAGE = (*_OF, "stage", "node")
_HOP = (*_OF, "from_stage", "to_stage")
_ABORTED = {"cancelled": "abort"}
"""vLLM's word."""
_STATUSES = ("connected", "starting", "away")


_OF_CONDITION: tuple[tuple[str, str, Callable[[Condition], float]], ...] = (
    (
        "memory_available_bytes",
        "Memory that the system could give out.",
        lambda condition: condition.memory_available_bytes,
    ),
    ("swap_used_bytes", "Swap in use.", lambda condition: condition.swap_used_bytes),
    (
        "disk_size_bytes",
        "Of the disk with the cache.",
        lambda condition: condition.disk_total_bytes,
    ),
    ("disk_free_bytes", "Of the disk with the cache.", lambda condition: condition.disk_free_bytes),
    (
        "clock_ahead_seconds",
        "By how much its clock is ahead of the coordinator's.",
        lambda condition: condition.clock_ahead_s,
    ),
)
_OF_DEPLOYMENT: tuple[tuple[str, str, Callable[[DeploymentRecord], float]], ...] = (
    (
        "edgeshard_deployment_ready",
        "1 if it answers requests.",
        lambda of: of.phase is DeploymentPhase.READY,
    ),
    (
        "edgeshard_deployment_epoch",
        "How often it was opened; it grows with each recovery.",
        lambda of: of.epoch,
    ),
    (
        "edgeshard_requests_limit",
        "Most requests that may run or wait.",
        lambda of: most_requests(of.running_requests),
    ),
)
_TAKEN_UP = "Service resumptions, by another epoch or by the same head over another stream."


class _ByWord(NamedTuple):
    """A counter of `DeploymentCounts`: `part` has its counts by word, and `label` names the kind of
    word."""

    name: str
    meaning: str
    label: str
    part: str


_BY_WORD = (
    _ByWord("edgeshard_requests", "Requests that began, by the caller's role.", "role", "begun"),
    _ByWord(
        "edgeshard_requests_finished",
        "Requests that ended with an answer, by the reason.",
        "reason",
        "finished",
    ),
    _ByWord(
        "edgeshard_requests_failed",
        "Requests that began and ended with an error, by its code.",
        "code",
        "failed",
    ),
    _ByWord("edgeshard_recoveries", _TAKEN_UP, "kind", "recovered"),
)
_OF_STAGE: tuple[tuple[str, str, Callable[[StageStatus], float]], ...] = (
    ("kv_used_bytes", "KV memory in use.", lambda stage: stage.kv_bytes_in_use),
    ("kv_capacity_bytes", "KV memory that there is.", lambda stage: stage.kv_bytes_capacity),
    ("weights_bytes", "Memory that the stage's weights take.", lambda stage: stage.parameter_bytes),
    (
        "busy_ratio",
        "Share of the last seconds in which it computed.",
        lambda stage: stage.busy_share,
    ),
    (
        "bubble_ratio",
        "Share of the last seconds in which it did not.",
        lambda stage: 1.0 - stage.busy_share,
    ),
    (
        "steps_waiting",
        "Steps that have arrived and wait for their turn.",
        lambda stage: stage.steps_waiting,
    ),
    ("step_age_seconds", "Since the step that computes now began.", lambda stage: stage.step_age_s),
)
_DONE_BY_STAGE: tuple[tuple[str, str, Callable[[StageStatus], float]], ...] = (
    ("steps", "Steps done, in this epoch.", lambda stage: stage.steps_done),
    ("tokens", "Positions computed, in this epoch.", lambda stage: stage.tokens_done),
)


@dataclass(eq=False)
class CoordinatorMetrics:
    """`collect` is called on the event loop's thread. `suspicions` counts incidents of links by
    deployment."""

    _state: Callable[[], State]
    _front: RequestFront
    _models: Models
    _conditions: Conditions
    _suspicions: Counter[DeploymentName]
    _now: Callable[[], float]

    def collect(self) -> Iterable[Metric]:
        state = self._state()
        yield gauge(
            "edgeshard_build_info",
            "Always 1; the labels say which version runs.",
            ("version", "wire_version"),
            [((__version__, str(WIRE_VERSION)), 1)],
        )
        yield from self._nodes(state)
        yield from self._deployments(state)
        yield from self._requests(state)
        yield from _stages(state)
        yield from self._links(state)
        yield from self._store()

    def _nodes(self, state: State) -> Iterator[Metric]:
        nodes = sorted(state.nodes.values(), key=lambda node: node.name)
        counts = Counter(
            "away" if not node.connected else "starting" if node.starting else "connected"
            for node in nodes
        )
        yield gauge(
            "edgeshard_nodes",
            "Nodes of the site, by status.",
            ("status",),
            [((s,), counts[s]) for s in _STATUSES],
        )
        now = self._now()
        yield gauge(
            "edgeshard_node_heartbeat_age_seconds",
            "Since a node was last heard.",
            ("node",),
            [((node.name,), max(0.0, now - node.heard_at)) for node in nodes if node.heard_at],
        )
        budgets = [((node.name,), float(node.facts.memory_budget_bytes)) for node in nodes]
        free = [((node.name,), float(state.free_bytes(node))) for node in nodes]
        yield gauge(
            "edgeshard_node_memory_budget_bytes",
            "What stages may use of a node's memory.",
            ("node",),
            budgets,
        )
        yield gauge("edgeshard_node_memory_free_bytes", "Free part of that.", ("node",), free)
        conditions = [
            (node.name, condition)
            for node in nodes
            if node.connected and (condition := self._conditions.of(node.node_id)) is not None
        ]
        yield gauge(
            "edgeshard_node_info",
            "Always 1; the labels say what a node runs.",
            ("node", "version"),
            [((name, condition.version), 1) for name, condition in conditions],
        )
        yield from _conditions(conditions)

    def _deployments(self, state: State) -> Iterator[Metric]:
        phases = Counter(record.phase for record in state.deployments.values())
        yield gauge(
            "edgeshard_deployments",
            "Deployments, by phase.",
            ("phase",),
            [((phase.value,), phases[phase]) for phase in DeploymentPhase],
        )
        for name, meaning, figure in _OF_DEPLOYMENT:
            figures = [(_of(record), figure(record)) for record in state.deployments.values()]
            yield gauge(name, meaning, _OF, figures)

    def _requests(self, state: State) -> Iterator[Metric]:
        counts = self._front.meter.kept(state.deployments.keys())
        of = {name: _of(record) for name, record in state.deployments.items()}
        load = {name: self._load(record, state) for name, record in state.deployments.items()}
        running = [(of[name], float(now)) for name, (now, _) in load.items()]
        waiting = [(of[name], float(later)) for name, (_, later) in load.items()]
        yield gauge("edgeshard_requests_running", "Requests that are computed now.", _OF, running)
        yield gauge(
            "edgeshard_requests_waiting", "Requests that wait for their turn.", _OF, waiting
        )
        for metric, meaning, label, part in _BY_WORD:
            words = [(name, getattr(totals, part)) for name, totals in counts.items()]
            figures = [
                ((*of[name], word), n) for name, counted in words for word, n in counted.items()
            ]
            yield counter(metric, meaning, (*_OF, label), figures)
        refused = [((code,), count) for code, count in self._front.meter.refused.items()]
        meaning = "Requests that never began, by the error's code."
        yield counter("edgeshard_requests_refused", meaning, ("code",), refused)
        pauses = [(of[name], totals.pauses) for name, totals in counts.items()]
        yield histogram(
            "edgeshard_recovery_pause_seconds", "How long each recovery took.", _OF, pauses
        )
        yield from _parts(counts, _OF, of, "edgeshard_")
        yield from self._as_vllm(state, counts, load)

    def _load(self, record: DeploymentRecord, state: State) -> tuple[int, int]:
        """Requests that run, and that wait by the head's last report."""
        active = self._front.active_requests(record.name)
        head = state.nodes.get(record.head.node_id)
        waiting = 0
        for stage in () if head is None else head.stages:
            if (stage.deployment, stage.epoch) == (record.name, record.epoch):
                waiting = max(waiting, min(active, stage.requests_waiting))
        return active - waiting, waiting

    def _as_vllm(
        self,
        state: State,
        counts: Mapping[DeploymentName, DeploymentCounts],
        load: Mapping[DeploymentName, tuple[int, int]],
    ) -> Iterator[Metric]:
        """The same under the names in vLLM's dashboards; each replica is a model of its own
        there."""
        label = ("model_name",)
        running = [((name,), float(now)) for name, (now, _) in load.items()]
        waiting = [((name,), float(later)) for name, (_, later) in load.items()]
        yield gauge("vllm:num_requests_running", "edgeshard_requests_running.", label, running)
        yield gauge("vllm:num_requests_waiting", "edgeshard_requests_waiting.", label, waiting)
        used: dict[DeploymentName, float] = {}
        for record, _, stage in _held(state):
            share = (
                stage.kv_bytes_in_use / stage.kv_bytes_capacity if stage.kv_bytes_capacity else 0.0
            )
            used[record.name] = max(share, used.get(record.name, 0.0))
        shares = [((name,), share) for name, share in used.items()]
        yield gauge("vllm:kv_cache_usage_perc", "Of the fullest stage, 1 is full.", label, shares)
        ended = [
            ((name, _ABORTED.get(reason, reason)), count)
            for name, of in counts.items()
            for reason, count in of.finished.items()
        ]
        yield counter(
            "vllm:request_success",
            "edgeshard_requests_finished.",
            ("model_name", "finished_reason"),
            ended,
        )
        yield from _parts(counts, label, {name: (name,) for name in counts}, "vllm:")

    def _links(self, state: State) -> Iterator[Metric]:
        suspect = Counter(link.deployment for link in state.suspects)
        yield gauge(
            "edgeshard_links_suspect",
            "Stalled links: connected, but without traffic.",
            _OF,
            [(_of(record), suspect[name]) for name, record in state.deployments.items()],
        )
        for name in [name for name in self._suspicions if name not in state.deployments]:
            del self._suspicions[name]
        yield counter(
            "edgeshard_link_suspicions",
            "How often a link became suspect.",
            _OF,
            [(_of(record), self._suspicions[name]) for name, record in state.deployments.items()],
        )
        rates, latencies = [], []
        for record in state.deployments.values():
            for hop, profile in _measured_hops(state, record.placement):
                labels = (*_of(record), str(hop[0]), str(hop[1]))
                rates.append((labels, profile.bandwidth_bps / 8))
                latencies.append((labels, profile.latency_s))
        yield gauge(
            "edgeshard_link_bandwidth_bytes_per_second", "As the link was measured.", _HOP, rates
        )
        yield gauge("edgeshard_link_latency_seconds", "As the link was measured.", _HOP, latencies)

    def _store(self) -> Iterator[Metric]:
        stored = {digest: manifest.stored_bytes for manifest, digest in self._models.list()}
        yield gauge("edgeshard_store_models", "Models in the store.", (), [((), len(stored))])
        yield gauge(
            "edgeshard_store_bytes",
            "Bytes of the store's models.",
            (),
            [((), sum(stored.values()))],
        )


def _of(record: DeploymentRecord) -> tuple[str, str]:
    return record.served_name, str(record.spec.replica or "")


def _conditions(conditions: list[tuple[NodeName, Condition]]) -> Iterator[Metric]:
    """The figures of the nodes' machines."""
    ends = [
        ((name,), condition.certificate_ends_s)
        for name, condition in conditions
        if condition.certificate_ends_s
    ]
    for name, meaning, figure in _OF_CONDITION:
        yield gauge(
            f"edgeshard_node_{name}",
            meaning,
            ("node",),
            [((of,), figure(condition)) for of, condition in conditions],
        )
    yield gauge(
        "edgeshard_node_certificate_expiry_timestamp_seconds",
        "When a node's certificate ends.",
        ("node",),
        ends,
    )


def _held(state: State) -> Iterator[tuple[DeploymentRecord, NodeName, StageStatus]]:
    """The stages of each deployment's epoch, by their nodes' last reports."""
    for record in state.deployments.values():
        for index, placed in enumerate(record.placement.stages):
            node = state.nodes.get(placed.node_id)
            for stage in () if node is None or not node.connected else node.stages:
                of_it = (stage.deployment, stage.epoch, stage.stage) == (
                    record.name,
                    record.epoch,
                    index,
                )
                if of_it and stage.phase is not StagePhase.STANDBY:
                    yield record, placed.node_name, stage


def _stages(state: State) -> Iterator[Metric]:
    stages = [
        ((*_of(record), str(stage.stage), node), stage) for record, node, stage in _held(state)
    ]
    for name, meaning, figure in _OF_STAGE:
        yield gauge(
            f"edgeshard_stage_{name}",
            meaning,
            _STAGE,
            [(labels, figure(stage)) for labels, stage in stages],
        )
    for name, meaning, figure in _DONE_BY_STAGE:
        yield counter(
            f"edgeshard_stage_{name}",
            meaning,
            _STAGE,
            [(labels, figure(stage)) for labels, stage in stages],
        )
    experts = [(labels, stage.experts) for labels, stage in stages if stage.experts is not None]
    yield from EXPERTS.metrics("edgeshard_stage_experts", _STAGE, experts)
    heads = [(labels, stage.guesses) for labels, stage in stages if stage.guesses is not None]
    guessed = [(labels, guesses.guessed) for labels, guesses in heads]
    yield counter(
        "edgeshard_stage_guesses", "Draft tokens of this head, in this epoch.", _STAGE, guessed
    )
    right = [(labels, guesses.right) for labels, guesses in heads]
    yield counter(
        "edgeshard_stage_right_guesses",
        "Those that were drawn; others were in vain.",
        _STAGE,
        right,
    )


def _measured_hops(
    state: State, placement: Placement
) -> Iterator[tuple[tuple[int, int], LinkProfile]]:
    stages = placement.stages
    for index, sender in enumerate(stages):
        after = (index + 1) % len(stages)
        receiver = stages[after]
        reported = state.links_from(sender.node_id).get(receiver.node_id)
        if reported is not None:
            yield (index, after), reported.value


_TO_FIRST, _BETWEEN = "time_to_first_token_seconds", "inter_token_latency_seconds"
_PARTS = (
    ("prompt_tokens", "prompt_tokens", "prompt_tokens", "Tokens of prompts that began."),
    ("new_tokens", "generated_tokens", "generation_tokens", "Tokens that were generated."),
    ("first_token", _TO_FIRST, _TO_FIRST, "From a request's call to its first token."),
    (
        "between_tokens",
        _BETWEEN,
        _BETWEEN,
        "Between a request's tokens, pauses of recoveries among them.",
    ),
    (
        "whole",
        "request_seconds",
        "e2e_request_latency_seconds",
        "From a request's call to its end.",
    ),
    (
        "queue",
        "request_queue_seconds",
        "request_queue_time_seconds",
        "Time from a request's call until its head admitted it.",
    ),
    (
        "prefill",
        "request_prefill_seconds",
        "request_prefill_time_seconds",
        "From there to its first token.",
    ),
    (
        "decode",
        "request_decode_seconds",
        "request_decode_time_seconds",
        "From its first token to its last.",
    ),
)
"""A part of `DeploymentCounts`, our name, vLLM's name and the meaning."""


def _parts(
    counts: Mapping[DeploymentName, DeploymentCounts],
    label: tuple[str, ...],
    of: Mapping[DeploymentName, tuple[str, ...]],
    prefix: str,
) -> Iterator[Metric]:
    """Tokens and times, by deployment, whose labels are in `of`."""
    for part, ours, theirs, meaning in _PARTS:
        family = counter if part in ("prompt_tokens", "new_tokens") else histogram
        figures = [(of[name], getattr(values, part)) for name, values in counts.items()]
        yield family(prefix + (theirs if prefix == "vllm:" else ours), meaning, label, figures)
