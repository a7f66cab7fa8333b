"""Which node holds which layers, and when micro-batches may begin their next tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from edgeshard.domain.checks import one_or_more
from edgeshard.domain.deployments.guesses import ExpectedGuesses
from edgeshard.domain.deployments.step_cost import StageCost
from edgeshard.domain.errors import PlacementError
from edgeshard.domain.ids import Digest, ModelName, NodeId, NodeName, check_digest
from edgeshard.domain.models.model import LayerRange


class Mode(StrEnum):
    """When a micro-batch may begin its next token."""

    SEQUENTIAL = "sequential"
    """One micro-batch at a time, from its prompt to its last token."""
    BUBBLES = "bubbles"
    """Once every micro-batch of the iteration is back."""
    NO_BUBBLES = "no-bubbles"
    """The moment its own token is back."""


@dataclass(frozen=True, slots=True)
class ExplicitStage:
    """One `node=first:end` of an operator's own placement."""

    node: NodeName
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """One stage of a placement. `address` is the node's stage listener (host:port); sizes in bytes.

    `parameter_bytes` is in the deployment's dtype, `kv_bytes` is the stage's whole KV pool.
    `workspace_bytes` is the additional memory while it works, including saved states. If
    `streamed_bytes` of its weights are on its disk, `weight_budget_bytes` is its memory for weights
    and equals its `parameter_bytes`; else both are 0. Every step reads all streamed weights; of a
    mixture's experts it reads those that it needs. If KV may be swapped to its disk, the two rates
    are the disk's reads and writes in bytes a second; 0 if unmeasured.
    """

    index: int
    node_id: NodeId
    node_name: NodeName
    address: str
    layers: LayerRange
    parameter_bytes: int
    kv_bytes: int
    workspace_bytes: int = 0
    weight_budget_bytes: int = 0
    streamed_bytes: int = 0
    disk_read_bytes_per_s: float = 0.0
    disk_write_bytes_per_s: float = 0.0


class LengthsFrom(StrEnum):
    """Source of the lengths that a placement is planned for."""

    GIVEN = "given"
    SEEN = "seen"
    """The deployment's own traffic, of an earlier time under the same name."""
    DEFAULT = "default"
    """None were given, and no traffic was seen."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The planner's prediction of a placement. Seconds, and tokens per second over all requests.

    `bottleneck` describes the limit in words. `gap` bounds how much better the best plan could be,
    as a part of this one; None if nothing was proven. The prediction holds for `objective`, and for
    `requests` at once with prompts of `prompt_tokens` and answers of `new_tokens`; `lengths` names
    the source of these numbers. The requests take `request_s` from their prompts to the last token.
    `joules_per_token` is None if a node's power is unknown. For several requests, `throughput_tps`
    is the steady rate, with another request for each that ends, and `together_tps` is the rate of
    requests that all start at once.
    """

    time_to_first_token_s: float
    time_per_token_s: float
    throughput_tps: float
    bottleneck: str
    gap: float | None = None
    objective: str = ""
    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    lengths: LengthsFrom = LengthsFrom.DEFAULT
    request_s: float = 0.0
    joules_per_token: float | None = None
    together_tps: float | None = None

    def gain_of(self, other: Prediction) -> float:
        """How much better `other` is: the share of the cost that it saves or, of a rate, by which
        it is higher."""
        rank = rank_among((self, other))
        here, there = rank(self), rank(other)
        return there / here - 1.0 if self.objective == "throughput" else 1.0 - there / here

    @property
    def cost(self) -> float:
        """Cost in the objective: seconds of a request, of its first token or of a token, or joules
        per token."""
        figures = {
            "energy": self.joules_per_token,
            "ttft": self.time_to_first_token_s,
            "latency": self.time_per_token_s,
        }
        figure = figures.get(self.objective)
        return self.request_s if figure is None else figure


def rank_among(predictions: Iterable[Prediction | None]) -> Callable[[Prediction], float]:
    """The key that orders these by the objective, lower is better: a cost or, for rates, which are
    all of one kind, minus one.

    Plans that stream have no steady rate. If there is one of them, all are ranked as requests that
    start together.
    """
    steady = all(one is None or one.together_tps is not None for one in predictions)

    def rank(one: Prediction) -> float:
        if one.objective != "throughput":
            return one.cost
        return -(one.throughput_tps if steady or one.together_tps is None else one.together_tps)

    return rank


class Speculation(StrEnum):
    """Whether the head drafts tokens, or why it does not."""

    GUESSES = "apart"
    """The head drafts tokens, and sends them to the stage that samples separately from the step."""
    OFF = "off"
    """The spec turns it off, or another version placed it."""
    STATES = "states"
    """Requests have states, and there is no memory for the states after draft tokens, or a node is
    older."""
    EXPERTS = "experts"
    """Each draft token of a mixture may need experts of its own: the cost of rows was not measured,
    or these are on a disk."""
    PROMISE = "promise"
    """A time between tokens was promised, which holds for steps without draft tokens."""
    BITS = "bits"
    """A node, or the family, may give other bits if it computes several rows at once, or the node
    is older."""

    @classmethod
    def _missing_(cls, value: object) -> Speculation | None:
        """A value of another version, which its nodes may not interpret alike: no tokens are
        drafted."""
        return cls.OFF if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class PlacedDraft:
    """A smaller model, whole on the head's node, that drafts tokens for up to `requests` at once,
    with `kv_blocks` blocks of keys and values of its own. Sizes are in bytes; the first stage's
    workspace includes them."""

    model: ModelName
    manifest_digest: Annotated[Digest, check_digest]
    layer_count: Annotated[int, one_or_more]
    requests: Annotated[int, one_or_more]
    kv_blocks: Annotated[int, one_or_more]
    parameter_bytes: int
    kv_bytes: int
    workspace_bytes: int

    @property
    def held_bytes(self) -> int:
        return self.parameter_bytes + self.kv_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages in pipeline order, the KV pool every stage opens, and the (b, m) the head's scheduler
    runs.

    `predicted` is None if the placement rests on no measurements; `note` describes how it was
    chosen. `costs`, one for each stage or none at all, let the head size its steps. If stages
    stream weights, `sweep` micro-batches go through the layers together. If requests have states,
    stages have slots for `saved_states` in addition to the running requests' and for `guess_slots`,
    the states after draft tokens. A `draft` is used if tokens are drafted. `guesses` are not saved
    with a deployment but added for display: None if no tokens are drafted or none were seen.
    """

    stages: tuple[PlacedStage, ...]
    kv_block_tokens: int
    kv_blocks: int
    micro_batch: int
    micro_batches: int
    predicted: Prediction | None = None
    note: str = ""
    costs: tuple[StageCost, ...] = ()
    sweep: Annotated[int, one_or_more] = 1
    saved_states: int = 0
    speculation: Speculation = Speculation.OFF
    guesses: ExpectedGuesses | None = None
    draft: PlacedDraft | None = None
    guess_slots: int = 0

    def requests_of(self, positions: int) -> int:
        """How many requests of `positions` positions the KV pool holds at once, at least one."""
        return max(1, self.kv_blocks // -(-positions // self.kv_block_tokens))

    def slots_of(self, positions: int) -> int:
        """Slots of states, for those requests and for the saved ones."""
        return self.requests_of(positions) + self.saved_states

    @property
    def used_guess_slots(self) -> int:
        """The slots for states after draft tokens that stages have: 0 if no tokens are drafted."""
        return self.guess_slots if self.speculation is Speculation.GUESSES else 0

    @property
    def streams(self) -> bool:
        """Whether a stage reads weights from its disk while it computes."""
        return any(stage.streamed_bytes for stage in self.stages)

    @property
    def head(self) -> PlacedStage:
        return self.stages[0]

    @property
    def window(self) -> int:
        """Most steps in flight: one for every stage, or one for every micro-batch if there are more
        of these."""
        return max(len(self.stages), self.micro_batches)


_STAGE = re.compile(r"\s*([^=\s]+)\s*=\s*(\d{1,9})\s*:\s*(\d{1,9})\s*")


def parse_layers(text: str) -> tuple[ExplicitStage, ...]:
    """Parse `a=0:4,b=4:9,c=9:12`."""
    stages = []
    for item in text.split(","):
        match = _STAGE.fullmatch(item)
        if match is None:
            raise PlacementError.about("layers", f"{item!r} is not NODE=FIRST:END, such as a=0:4")
        stages.append(ExplicitStage(NodeName(match[1]), LayerRange(int(match[2]), int(match[3]))))
    return tuple(stages)


def check_cover(stages: Sequence[ExplicitStage], layer_count: int, source: str) -> None:
    """Raise PlacementError unless the stages hold every layer once, in order, on distinct nodes,
    the source first."""
    if not stages:
        raise PlacementError.about("layers", "no stage is given")
    expected = 0
    names: set[str] = set()
    for stage in stages:
        name, layers = stage.node, stage.layers
        if layers.end <= layers.first:
            raise PlacementError.about("layers", f"{name}={layers} holds no layer", "EMPTY_STAGE")
        if layers.end > layer_count:
            beyond = f"{name}={layers} exceeds the model, which has layers 0:{layer_count}"
            raise PlacementError.about("layers", beyond, "LAYER_OUT_OF_RANGE")
        if layers.first > expected:
            raise PlacementError.about(
                "layers", f"no node holds layers {expected}:{layers.first}", "LAYER_GAP"
            )
        if layers.first < expected:
            overlap = f"{name}={layers} overlaps the stage before it, which ends at {expected}"
            raise PlacementError.about("layers", overlap, "LAYER_OVERLAP")
        if name in names:
            raise PlacementError.about("layers", f"node {name} is named twice", "DUPLICATE_NODE")
        names.add(name)
        expected = layers.end
    if expected != layer_count:
        raise PlacementError.about(
            "layers", f"no node holds layers {expected}:{layer_count}", "LAYER_GAP"
        )
    if stages[0].node != source:
        raise PlacementError(
            f"layers: the first node must be the deployment's source {source}, not "
            f"{stages[0].node}",
            field="source",
            reason="SOURCE_NOT_FIRST",
        )
