"""Nodes and what they hold, as values: devices, stages, and the condition of their machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import (
    DeploymentName,
    Epoch,
    Figure,
    NodeId,
    NodeName,
    Text,
    check_plain,
    check_short,
)
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.kernels import KernelSpeed


class Support(StrEnum):
    """Whether a means of quick computing is used here."""

    UNKNOWN = ""
    """Nothing computes here, or the machine has no such thing."""
    USED = "used"
    MISSING = "missing"
    """The machine could have it, but the installed software cannot use it."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Memory and disk in bytes; 0 and "" if the system does not report it. Times are seconds since
    1970 on its own clock.

    The disk is the one of the state directory, on which `disk_write_bps` (bytes a second, flushed)
    was measured. `cpu_quota` is how many cores its control group may use, 0 if all. `huge_pages` is
    the system's mode: "always", "madvise" or "never". The process's own certificate ends at
    `certificate_ends_s` and is to be renewed at `certificate_due_s`. `clock_ahead_s` is by how much
    its clock was ahead of the coordinator's, measured by the coordinator.
    """

    version: Text = ""
    utc_s: Figure = 0.0
    cores: int = 0
    cpu_quota: Figure = 0.0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    swap_used_bytes: int = 0
    disk_total_bytes: int = 0
    disk_free_bytes: int = 0
    disk_write_bps: Figure = 0.0
    huge_pages: Text = ""
    kernels: Support = Support.UNKNOWN
    cuda: Support = Support.UNKNOWN
    certificate_ends_s: Figure = 0.0
    certificate_due_s: Figure = 0.0
    clock_ahead_s: Figure = 0.0


BF16_PRODUCTS = "AVX512-BF16 products"
MAX_FACT = 1000
"""Characters of a text among the facts of a device."""
"""In the `software` of a node whose kernels multiply bfloat16 by these instructions."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device of a node. Memory in bytes.

    `memory_budget_bytes` is what stages may use: the operator's limit, or available memory less a
    reserve. Nodes with the same `bits_fingerprint` compute the same bits (docs/kernels.md,
    Numbers); "" if bits are not promised. A node that `takes_guesses` gives a row the same bits
    when other rows run with it, and its stages accept draft tokens that the head sends separately.
    A node that `keeps_states_of_guesses` can continue after any of them with a model whose requests
    have states. `kernels` is None on an accelerator, while the node is starting, and for an older
    agent.
    """

    kind: str
    model: str
    cores: int
    memory_total_bytes: int
    memory_budget_bytes: int
    unified_memory: bool
    software: str
    bits_fingerprint: str = ""
    takes_guesses: bool = False
    keeps_states_of_guesses: bool = False
    kernels: KernelSpeed | None = None

    @property
    def has_bf16_products(self) -> bool:
        """Whether this node's kernels compute bits of their own because of AVX512-BF16."""
        return BF16_PRODUCTS in self.software

    def check_told(self) -> None:
        """Raise InvalidArgumentError naming a text that is not plain, if a node sends it about
        itself.

        State saved by an older version is read all the same, and shown with escapes.
        """
        for name in ("kind", "model", "software", "bits_fingerprint"):
            _check_told(getattr(self, name), f"facts.{name}")
        for name in ("name", "best_name", "compiler") if self.kernels is not None else ():
            _check_told(getattr(self.kernels, name), f"facts.kernels.{name}")


def _check_told(text: str, field: str) -> None:
    if len(text) > MAX_FACT:
        raise InvalidArgumentError.about(
            field, f"it has at most {MAX_FACT} characters, not {len(text)}"
        )
    check_plain(text, field)


class StagePhase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    """Loaded, waiting for the head."""
    ACTIVE = "active"
    FAILED = "failed"
    STANDBY = "standby"
    """Weights of layers that other nodes run, in memory or on their way there."""


@dataclass(frozen=True, slots=True)
class StageKey:
    """Which of a node's stages: it holds at most one of each."""

    deployment: Annotated[DeploymentName, check_short]
    stage: int
    standby: bool = False


@dataclass(frozen=True, slots=True)
class StageStreaming:
    """What a stage that streams weights keeps in memory, slots included, and reads of them in each
    sweep, in bytes.

    Since it began it has read `read_bytes`, and its steps have waited `waited_s` for reads.
    """

    resident_bytes: int
    streamed_bytes: int
    read_bytes: int = 0
    waited_s: Figure = 0.0


class WeightLoadingWork(StrEnum):
    """The work by which a node gets weights into memory."""

    CONVERTING = "converting"
    """From a model's tensors, without keeping packed files."""
    PACKING = "packing"
    """From a model's tensors, which become packed files on the way."""
    READING = "reading"
    """From packed files."""


@dataclass(frozen=True, slots=True)
class StageFilling:
    """How far the weights of a stage that loads are on their way into memory, once all that lacked
    was fetched.

    Bytes are those that the weights take there. `work` is the current activity; all is done about
    `left_s` seconds after the report, 0 while that is unknown.
    """

    work: WeightLoadingWork
    done_bytes: int
    total_bytes: int
    left_s: Figure = 0.0


@dataclass(frozen=True, slots=True)
class StageExperts:
    """Experts of a stage that keeps them on its disk with a cache, in bytes: those in memory now,
    the cache's limit, and all of them.

    Since it began, `hits` of the experts that its steps needed were in memory and `misses` were
    not, it has read `read_bytes`, and its steps have waited `waited_s` for reads. What was read to
    load it does not count.
    """

    cached_bytes: int
    room_bytes: int
    total_bytes: int
    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    waited_s: Figure = 0.0

    @property
    def hit_rate(self) -> float:
        """Between 0 and 1; 0 before any was needed."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass(frozen=True, slots=True)
class StageSwap:
    """Bytes of preempted requests' KV that a stage may swap out, and that it holds now.

    Since it began, `swapped_out` of them had their KV put there, and `swapped_in` got it back.
    """

    capacity_bytes: int
    kept_bytes: int = 0
    swapped_out: int = 0
    swapped_in: int = 0


@dataclass(frozen=True, slots=True)
class StageGuesses:
    """Tokens that a head drafted since its epoch began, and the accepted ones.

    Each rejected one was a wasted row of a step.
    """

    guessed: int
    right: int = 0


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A node's report of one stage that it holds. Sizes in bytes.

    `busy_share` is the part of the last seconds in which it computed; the rest are bubbles.
    `steps_waiting` counts steps that have arrived and wait for their turn. The first stage counts
    requests: running, and not yet admitted. It also reports the number of micro-batches now in use,
    0 before there were any.

    The step that computes now began `step_age_s` ago, and the compute thread spent `step_cpu_s` of
    processor time on it (waiting in place of an emulated device counts). Both are 0 while none
    computes. `failure_reason` is the reason of the error that failed the stage. Its weights took
    `load_s` to fetch and load. Each other field is None without its subject. `streaming` needs
    layers that pass through the stage, `filling` layers that enter memory, and `experts` experts on
    its disk. `swap` needs KV on the disk, and `guesses` a head that drafts tokens.
    """

    deployment: Annotated[DeploymentName, check_short]
    epoch: Epoch
    stage: int
    layers: LayerRange
    phase: StagePhase
    parameter_bytes: int = 0
    kv_bytes_capacity: int = 0
    kv_bytes_in_use: int = 0
    fetched_bytes: int = 0
    total_bytes: int = 0
    steps_done: int = 0
    tokens_done: int = 0
    busy_share: Figure = 0.0
    steps_waiting: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    micro_batches: int = 0
    step_age_s: Figure = 0.0
    step_cpu_s: Figure = 0.0
    failure_reason: Text = ""
    load_s: Figure = 0.0
    streaming: StageStreaming | None = None
    filling: StageFilling | None = None
    experts: StageExperts | None = None
    swap: StageSwap | None = None
    guesses: StageGuesses | None = None

    @property
    def key(self) -> StageKey:
        return StageKey(self.deployment, self.stage, self.phase is StagePhase.STANDBY)


@dataclass(frozen=True, slots=True)
class HugePages:
    """Resident bytes of an agent for which it requested huge pages, and the part of them that is in
    huge pages."""

    wanted_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the coordinator knows it. `address` is its stage listener, host:port.

    A connected node may still be `starting`: it imports its compute libraries, and its facts are
    from its last run. `huge_pages` is None while the node is away, and if its system does not
    report it.

    A plan would also need `unknown_profiles` measurements of its layers, and `unknown_links` links
    from it to nodes that can hold layers. It is `measuring` itself or them now.
    `profiles_beside_stages` were taken while it held stages, and are taken again when it holds
    none. `condition` is its machine's last report, None while it is away or older than a minute.
    `labels` are set by an operator, or else by the agent. `twin_address` is the address of another
    agent with the same identity that tried to take its place in the last minutes: its state
    directory was copied. It is "" if there was none.
    """

    node_id: NodeId
    name: NodeName
    address: str
    wire_version: int
    facts: DeviceFacts
    connected: bool
    heartbeat_age_s: float
    free_bytes: int
    stages: tuple[StageStatus, ...] = ()
    huge_pages: HugePages | None = None
    starting: bool = False
    unknown_profiles: int = 0
    unknown_links: int = 0
    condition: Condition | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    measuring: bool = False
    profiles_beside_stages: int = 0
    twin_address: str = ""

    @property
    def placeable(self) -> bool:
        """Whether layers can be placed on it now."""
        return self.connected and not self.starting
