"""The problem to plan, as one checked value. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from edgeshard.architectures import check_quantisation
from edgeshard.domain.deployments.rules import RuleCondition
from edgeshard.domain.errors import invalid
from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.domain.models.model import attended_pairs
from edgeshard.domain.models.packed_units import PackedParts
from edgeshard.planning.inputs.devices import Cluster
from edgeshard.planning.inputs.shapes import BlockSpec, ModelSpec
from edgeshard.planning.inputs.table_fields import check_count, check_number

DEFAULT_BATCH = 8
"""Most sequences in one micro-batch if no number is given."""


class Objective(StrEnum):
    REQUEST = "request"
    """Least time of a single request, from its prompt to its last token."""
    TTFT = "ttft"
    """Least time to the first token of a single request."""
    LATENCY = "latency"
    """Least time per token of a single request, whatever its prompt."""
    THROUGHPUT = "throughput"
    """Most tokens a second of a full pipeline."""
    ENERGY = "energy"
    """Fewest joules per token with at most `concurrency` requests (one unless given), within
    `max_time_per_token_s`. The watts of every node must be known."""
    AUTO = "auto"
    """Most tokens a second with `concurrency` requests, within `max_time_per_token_s`; alone it is
    `request`."""

    @property
    def is_single(self) -> bool:
        """Whether it is about a single request."""
        return self in (Objective.REQUEST, Objective.TTFT, Objective.LATENCY)


class Rate(StrEnum):
    """The load that a rate in tokens a second is of."""

    TOGETHER = "together"
    """Requests that all start at once: the papers' formula."""
    STEADY = "steady"
    """Another request begins whenever one ends, as on a site at saturation."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step of a micro-batch: `batch` sequences of `tokens` new tokens each.

    `context` is the mean number of keys a query sees, `kv_tokens` the keys of a sequence that are
    read. In a step that mixes sequences, `tokens`, `context` and `kv_tokens` are means over them
    (over all queries for `context`).
    """

    batch: int
    tokens: float
    context: float
    kv_tokens: float

    @property
    def step_tokens(self) -> int:
        return round(self.batch * self.tokens)

    @classmethod
    def of_spans(cls, spans: Sequence[tuple[int, int]]) -> StepShape:
        """A step that mixes decodes and pieces of prompts: of each sequence its new tokens, and
        those before them."""
        count, total = len(spans), sum(tokens for tokens, _ in spans)
        context_sum = sum(tokens * (before + (tokens + 1) / 2) for tokens, before in spans)
        kv_tokens = sum(tokens + before for tokens, before in spans)
        return cls(count, total / count, context_sum / total, kv_tokens / count)

    def within(self, window: int) -> StepShape:
        """The same step if a query sees at most the last `window` keys, 0 for all."""
        if not window or self.kv_tokens <= window:
            return self
        # keys that were there before the step
        before = max(0.0, self.context - (self.tokens + 1) / 2)
        context = attended_pairs(self.tokens, before, window) / self.tokens
        return replace(
            self, context=context, kv_tokens=min(self.kv_tokens, self.tokens + window - 1)
        )


class ComputeTimes(Protocol):
    """Seconds a node needs for the parts of a model: a roofline, or a measured profile."""

    def block_s(self, block: BlockSpec, phase: StepShape) -> float: ...

    def embedding_s(self, phase: StepShape) -> float: ...

    def head_s(self, phase: StepShape) -> float:
        """Norm, LM head and sampling of one position for each sequence."""
        ...

    def step_s(self, hidden_bytes: float) -> float:
        """Seconds that a step costs whatever its layers, with `hidden_bytes` bytes of hidden
        states."""
        ...


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """A model, a cluster and the questions about them."""

    model: ModelSpec
    cluster: Cluster
    objective: Objective = Objective.LATENCY
    prompt_tokens: int = 128
    new_tokens: int = 128
    context_tokens: int | None = None
    """Positions of KV memory that a request holds; None: its prompt's and answer's."""
    step_tokens: int | None = None
    """Most tokens that a stage computes at once, for which it needs room; None: all prompts of a
    micro-batch."""
    batch: int | None = None
    """Most sequences in one micro-batch; None leaves it to the planner (`DEFAULT_BATCH`)."""
    concurrency: int | None = None
    """Most requests at once; None is 1 for `auto` and `energy`, and no limit but memory for
    `throughput`."""
    rate: Rate = Rate.TOGETHER
    """The load that `throughput` and `auto` are planned for. Plans that stream, and energy, are of
    TOGETHER."""
    dtype: DType = DType.BFLOAT16
    quantisation: Quantisation | None = None
    """How every node stores its weights; None means the dtype."""
    kv_dtype: KvFormat | None = None
    """How every node stores keys and values; None means the dtype."""
    loading_itemsize: int | None = None
    """Bytes that an element takes in the one tensor that is in memory twice while a stage loads,
    wherever it is; None: the dtype's, on nodes with one memory only."""
    max_time_per_token_s: float | None = None
    exclude: tuple[str, ...] = ()
    """Nodes that may not be used."""
    rules: tuple[RuleCondition, ...] = ()
    """Conditions on the set of used nodes. A name that is not in the cluster is a node that is
    away."""
    reserve: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes to leave free, by node."""
    max_share: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Largest part of the layers that a node may hold, in (0, 1], by node."""
    min_nodes: int = 1
    """Least number of stages."""
    max_nodes: int | None = None
    """Most stages; None: as many as there are nodes."""
    head_on_source: bool = False
    """Whether the source computes norm and head, so that no other node sees a token."""
    asynchronous: bool = True
    """Whether sending overlaps computing."""
    allow_streaming: bool = False
    """Whether a node may read a part of its weights from its disk in every step."""
    sliced: bool = True
    """Whether a long prompt goes in slices that follow each other; otherwise in steps of
    `STEP_TOKENS`, each of which passes all stages before the next begins."""
    times: Mapping[str, ComputeTimes] = field(default_factory=lambda: MappingProxyType({}))
    """Measured nodes by name; the others are estimated from their figures."""
    packed_parts: Mapping[str, PackedParts] = field(default_factory=lambda: MappingProxyType({}))
    """The parts of the model that nodes keep packed on their disks, by node
    (`planning.search.locality`)."""

    @property
    def formats(self) -> tuple[DType, Quantisation | None]:
        """How every node stores its weights, in the form of `ModelSpec` and `BlockSpec`."""
        return self.dtype, self.quantisation

    @property
    def effective_kv_dtype(self) -> KvFormat:
        return KvFormat(self.kv_dtype or self.dtype)

    @property
    def held_tokens(self) -> int:
        """Positions of KV memory a request holds."""
        return self.context_tokens or self.prompt_tokens + self.new_tokens

    @property
    def request_limit(self) -> int | None:
        """Most requests at once; None when only memory and sense limit them."""
        if self.objective.is_single:
            return 1
        one = self.objective in (Objective.AUTO, Objective.ENERGY)
        return 1 if self.concurrency is None and one else self.concurrency

    @property
    def goal(self) -> Objective:
        """The objective, `auto` resolved."""
        if (
            self.objective.is_single
            or self.objective is Objective.ENERGY
            or self.request_limit != 1
        ):
            return Objective.THROUGHPUT if self.objective is Objective.AUTO else self.objective
        return Objective.REQUEST

    @property
    def is_steady(self) -> bool:
        """Whether its rate is the steady one."""
        return self.rate is Rate.STEADY and self.goal is Objective.THROUGHPUT

    @property
    def batch_limit(self) -> int:
        batch = self.batch or DEFAULT_BATCH
        return batch if self.request_limit is None else min(batch, self.request_limit)

    def check(self) -> None:
        """Raise InvalidArgumentError, or UnsupportedModelError for quantisation, naming the field
        at fault."""
        if self.quantisation is not None:
            check_quantisation(self.model.shape, self.quantisation)
        self.model.shape.check_kv(self.effective_kv_dtype)
        for name in ("prompt_tokens", "new_tokens", "min_nodes"):
            check_count(getattr(self, name), name)
        for name in (
            "batch",
            "concurrency",
            "max_nodes",
            "context_tokens",
            "step_tokens",
            "loading_itemsize",
        ):
            if (value := getattr(self, name)) is not None:
                check_count(value, name)
        limit = self.model.shape.max_context
        if self.prompt_tokens + self.new_tokens > limit:
            both = f"{self.prompt_tokens} and new_tokens {self.new_tokens}"
            why = f"{both} exceed the {limit} tokens of {self.model.name}; request fewer"
            raise invalid("prompt_tokens", why, "CONTEXT_TOO_LONG")
        if self.held_tokens < self.prompt_tokens + self.new_tokens:
            why = f"is {self.context_tokens}, less than prompt_tokens and new_tokens together"
            raise invalid("context_tokens", why)
        if self.max_time_per_token_s is not None:
            check_number(self.max_time_per_token_s, "max_time_per_token_s", 0.0, above=True)
        if self.allow_streaming and self.objective is Objective.ENERGY:
            raise invalid(
                "allow_streaming",
                "does not work with the objective energy: the power of disks is unknown",
            )
        self._check_rules()
        if self.max_nodes is not None and self.max_nodes < self.min_nodes:
            raise invalid("max_nodes", f"is {self.max_nodes}, below min_nodes {self.min_nodes}")
        self._check_nodes()

    def _check_rules(self) -> None:
        if self.rules and self.allow_streaming:
            raise invalid(
                "allow_streaming", "is not for plans under rules; leave it out, or the rules"
            )
        if self.rules and self.objective is Objective.ENERGY:
            raise invalid(
                "objective",
                "energy is not for plans under rules; use another one, or leave out the rules",
            )

    def _check_nodes(self) -> None:
        for name in self.exclude:
            self.cluster.index(name, "exclude")
            if name == self.cluster.source:
                raise invalid("exclude", f"names the source {name}; name another source first")
        for name, size in self.reserve.items():
            self.cluster.index(name, "reserve")
            check_number(size, f"reserve.{name}", 0.0)
        for name, share in self.max_share.items():
            self.cluster.index(name, "max_share")
            if check_number(share, f"max_share.{name}", 0.0, above=True) > 1:
                raise invalid(f"max_share.{name}", f"is {share}; it must be at most 1")
