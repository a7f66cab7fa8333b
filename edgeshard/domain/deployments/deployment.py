"""An operator's request (a deployment spec), and the coordinator's account of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgeshard.domain.deployments.placement import ExplicitStage, Placement, parse_layers
from edgeshard.domain.deployments.traffic import NO_TRAFFIC, Outlook, Traffic
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.ids import Epoch, check_name
from edgeshard.domain.models.dtypes import WHOLE_HEAD, DType, IntegerFormat, KvFormat, Quantisation
from edgeshard.domain.nodes.device import StageStatus

EVERY_NODE = "*"
"""The key of `quantisation` for all nodes that are not named."""

AUTO_STANDBY = "auto"
"""In place of names of nodes in `standby`: the coordinator chooses."""

Positive = Annotated[int, Field(ge=1, le=2**31)]


class DeploymentSpec(BaseModel):
    """The unit of `edgectl deploy`: a model, its source node and how it is to run.

    `layers` places it by hand; without it the coordinator chooses, also the source where that is empty.
    `max_context` 0 means the model's own limit. `concurrency` requests of `max_context` tokens fit the KV pool at
    once; with `kv_overcommit` twice as many are admitted, and the youngest is set back when memory runs out. A
    node keeps up to `kv_swap_bytes` of their KV meanwhile, in memory or, with `kv_swap_on_disk`, in files.
    `prompt_tokens` and `new_tokens` are typical lengths of a prompt and an answer, which it is planned for; None:
    those of its traffic so far. With `allow_streaming` nodes may read a part of their weights from their disks in
    every step, where that is better or nothing else fits. `prefix_cache` shares the KV of equal beginnings among a
    client's requests. `max_inter_token_latency_s` keeps prompts from holding up requests that are generating.
    `micro_batches` is how many decode steps are in flight at once; with 0 the head chooses while it runs.
    `quantisation` is by node, "*" for those not named, such as `{"*" = "int8"}`; without it a model that is stored
    as small integers stays so, and "none" makes it whole. On a node with quantised weights the LM head is as
    `head_quantisation` says, int8 when None; "none" keeps the dtype. The nodes of `standby` keep weights of others'
    layers in memory, to take them over; with "auto" alone the coordinator chooses them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    model: str
    source: str = ""
    privacy: Literal["open", "source-only"] = "open"
    objective: Literal["request", "ttft", "latency", "throughput", "energy", "auto"] = "auto"
    dtype: DType = DType.BFLOAT16
    kv_dtype: KvFormat | None = None
    max_context: Annotated[int, Field(ge=0, le=2**31)] = 0
    max_new_tokens: Positive = 1024
    prompt_tokens: Positive | None = None
    new_tokens: Positive | None = None
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 8
    max_time_per_token_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_inter_token_latency_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    kv_overcommit: bool = False
    allow_streaming: bool = False
    kv_swap_bytes: Annotated[int, Field(ge=0, le=2**50)] = 0
    kv_swap_on_disk: bool = False
    prefix_cache: bool = False
    mode: Literal["sequential", "bubbles", "no-bubbles"] = "no-bubbles"
    micro_batches: Annotated[int, Field(ge=0, le=4096)] = 0
    exclude: tuple[str, ...] = ()
    standby: tuple[str, ...] = ()
    reserve: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    quantisation: dict[str, Literal[IntegerFormat.INT8, IntegerFormat.INT4, "none"]] = Field(default_factory=dict)
    head_quantisation: Literal["int8", "int4", "none"] | None = None
    layers: tuple[ExplicitStage, ...] = ()

    @property
    def effective_kv_dtype(self) -> KvFormat:
        return KvFormat(self.kv_dtype or self.dtype)

    def reserve_of(self, node: str) -> int:
        """Bytes of a node's memory that are not for this deployment's weights, KV pool and work."""
        return self.reserve.get(node, 0) + (0 if self.kv_swap_on_disk else self.kv_swap_bytes)

    def quantisation_of(self, node: str) -> Quantisation | None:
        """How this node keeps its weights; None for the deployment's dtype."""
        blocks = self.quantisation.get(node, self.quantisation.get(EVERY_NODE))
        return None if blocks in (None, WHOLE_HEAD) else Quantisation.of(IntegerFormat(blocks), self.head_quantisation)

    def as_stored(self, stored_as: Quantisation | None, nodes: Collection[str] = (EVERY_NODE,)) -> DeploymentSpec:
        """With the weights on these nodes as the model is stored, where this spec says nothing of them."""
        if stored_as is None or self.quantisation or not nodes:
            return self
        blocks, head = dict.fromkeys(nodes, stored_as.blocks), stored_as.head or WHOLE_HEAD
        return self.model_copy(update={"quantisation": blocks, "head_quantisation": str(head)})


def parse_spec(values: Mapping[str, Any]) -> DeploymentSpec:
    """A spec from a TOML or JSON mapping; `layers` may be the text `a=0:4,b=4:12`, whose first node is the source.

    Raises InvalidArgumentError naming the field, also for a key that does not exist. Where several fields are wrong in
    themselves its message has all of them, and its field is the first.
    """
    mistakes = spec_mistakes(values)
    if mistakes:
        raise joined_mistakes(mistakes)
    spec = _spec_of(values)
    _check_together(spec)
    return spec


def spec_mistakes(values: Mapping[str, Any]) -> list[InvalidArgumentError]:
    """The faults of single fields of a mapping, in no more words than each needs."""
    try:
        _spec_of(values)
    except InvalidArgumentError as error:
        found = [error]
    except ValidationError as error:
        found = [_mistake(item["loc"], item["type"], item["msg"]) for item in error.errors()]
    else:
        found = []
    wrong = {mistake.field for mistake in found}
    for name in ("name", "model", "source"):
        text = values.get(name)
        if isinstance(text, str) and name not in wrong and (text or name != "source"):
            try:
                check_name(text, name)
            except InvalidArgumentError as error:
                found.append(error)
    return found


def _mistake(where: tuple[int | str, ...], kind: str, message: str) -> InvalidArgumentError:
    name = ".".join(str(part) for part in where) or "spec"
    what = {"extra_forbidden": "is not a known field", "missing": "is missing"}.get(kind, message.lower())
    return InvalidArgumentError.about(name, what, "INVALID_SPEC")


def joined_mistakes(mistakes: Sequence[InvalidArgumentError], separator: str = "; ") -> InvalidArgumentError:
    """All of them as one error, that of the first field."""
    message = separator.join(mistake.message for mistake in mistakes)
    return InvalidArgumentError(message, field=mistakes[0].field, reason=mistakes[0].reason)


def _spec_of(values: Mapping[str, Any]) -> DeploymentSpec:
    values = dict(values)
    if isinstance(values.get("layers"), str):
        values["layers"] = parse_layers(values["layers"])
    if isinstance(values.get("standby"), str):
        values["standby"] = tuple(name.strip() for name in values["standby"].split(","))
    spec = DeploymentSpec.model_validate(values)
    if spec.layers and not spec.source:
        return spec.model_copy(update={"source": str(spec.layers[0].node)})
    return spec


def _check_together(spec: DeploymentSpec) -> None:
    """Check fields against each other. Raises InvalidArgumentError naming one of them."""
    if spec.privacy == "source-only":
        why = "source-only is not supported yet; use open"
        raise InvalidArgumentError.about("privacy", why, "UNSUPPORTED_PRIVACY")
    if spec.head_quantisation is not None and not spec.quantisation:
        why = "no node has quantised weights; give quantisation too"
        raise InvalidArgumentError.about("head_quantisation", why, "INVALID_SPEC")
    if spec.allow_streaming and spec.objective == "energy":
        why = "it is not for the objective energy; what a disk takes is not known"
        raise InvalidArgumentError.about("allow_streaming", why, "INVALID_SPEC")
    # A typical request must be one that the deployment takes.
    if spec.new_tokens is not None and spec.new_tokens > spec.max_new_tokens:
        why = f"{spec.new_tokens} is beyond max_new_tokens {spec.max_new_tokens}; raise that, or give fewer"
        raise InvalidArgumentError.about("new_tokens", why, "TOO_MANY_NEW_TOKENS")
    if spec.max_context:
        check_typical(spec, spec.max_context)
    most = 1 if spec.mode == "sequential" else spec.concurrency
    if spec.micro_batches > most:
        why = f"{spec.micro_batches} cannot be in flight in mode {spec.mode} with concurrency {spec.concurrency}"
        raise InvalidArgumentError.about("micro_batches", f"{why}; at most {most} can", "TOO_MANY_MICRO_BATCHES")
    if AUTO_STANDBY in spec.standby and len(spec.standby) > 1:
        why = '"auto" has the coordinator choose; name nodes, or give it alone'
        raise InvalidArgumentError.about("standby", why, "INVALID_SPEC")


def check_typical(spec: DeploymentSpec, max_context: int) -> None:
    """Raise InvalidArgumentError naming the typical length that does not fit in `max_context` tokens."""
    prompt, new = spec.prompt_tokens or 1, spec.new_tokens or 1
    if prompt + new > max_context:
        field = "prompt_tokens" if spec.prompt_tokens is not None else "new_tokens"
        why = f"{prompt} tokens in and {new} out exceed the context of {max_context} tokens; give fewer"
        raise InvalidArgumentError.about(field, why, "CONTEXT_TOO_LONG")


class DeploymentPhase(StrEnum):
    LOADING = "loading"
    """Every stage is fetching or loading."""
    ACTIVATING = "activating"
    """Every stage is loaded; the head is opening the ring."""
    READY = "ready"
    WAITING = "waiting"
    """A node it needs is away; it loads again when the node is back."""
    FAILED = "failed"
    """It never became ready; nothing of it is held on any node."""
    DELETING = "deleting"


@dataclass(frozen=True, slots=True)
class SuspectHop:
    """A link of a pipeline that carries nothing although its connection stands, as its sender says. From stage 0
    to 0 it is the coordinator's, to the head."""

    from_stage: int
    to_stage: int
    why: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment as the coordinator reports it."""

    spec: DeploymentSpec
    phase: DeploymentPhase
    epoch: Epoch
    placement: Placement
    failure: EdgeShardError | None = None
    stages: tuple[StageStatus, ...] = ()
    active_requests: int = 0
    traffic: Traffic = NO_TRAFFIC
    outlook: Outlook | None = None
    """None unless it was asked for, and where no request was seen."""
    suspects: tuple[SuspectHop, ...] = ()
