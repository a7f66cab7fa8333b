"""An operator's request (a deployment spec), the coordinator's account of it, and its
concurrency."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from edgeshard.domain.deployments.placement import ExplicitStage, Placement, parse_layers
from edgeshard.domain.deployments.rules import MOST_RULES, Rule, parse_rule
from edgeshard.domain.deployments.traffic import NO_TRAFFIC, Outlook, Traffic
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.ids import Epoch, check_name
from edgeshard.domain.models.dtypes import WHOLE_HEAD, DType, IntegerFormat, KvFormat, Quantisation
from edgeshard.domain.nodes.device import StageStatus
from edgeshard.domain.options import check_bounds, option

if TYPE_CHECKING:
    from pydantic import TypeAdapter

EVERY_NODE = "*"
"""The key of `quantisation` for all nodes that are not named."""

AUTO_STANDBY = "auto"
"""In place of names of nodes in `standby`: the coordinator chooses."""

NO_DRAFT, AUTO_DRAFT = "off", "auto"
"""In place of a model in `draft`: none, or one of the store that suits, if there is any."""

AUTO_REPLICAS = 0
"""The planner chooses how many pipelines serve the name; "auto" in texts for people."""


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """The unit of `edgectl deploy`: a model, its source node and how it is to run.

    Each field is a key of a spec's file, an option of `edgectl deploy` unless its flag is None, and
    a row of docs/configure.md. It has its name in the message `DeploymentSpec` of the wire.
    `parse_spec` checks the values; an object made otherwise holds what it was given.

    `layers` places it by hand. Without it the coordinator chooses, including the source if that is
    empty. A request is admitted if memory is left for its prompt and an answer of likely length;
    with `kv_overcommit`, for its prompt only. The newest is preempted when memory runs out. A node
    keeps up to `kv_swap_bytes` of the KV of preempted requests. `quantisation` is by node, "*" for
    those not named. Without it a model stored as small integers stays so, and "none" expands it.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    name: str = option(MISSING, "Name the deployment.", flag=None)
    model: str = option(
        MISSING,
        "Deploy this model of the store. ./DIR, FILE.gguf, OWNER/NAME of the Hub, ollama:NAME and "
        "lmstudio:NAME are "
        "added to the store first.",
        metavar="MODEL",
    )
    source: str = option(
        "",
        "Put the first layer on this node (default: the first node of --layers, else the node with "
        "the best plan).",
        metavar="NODE",
    )
    privacy: Literal["open", "source-only"] = option(
        "open", "Set who may see data; open is the only value so far.", flag=None
    )
    objective: Literal["request", "ttft", "latency", "throughput", "energy", "auto"] = option(
        "auto",
        "Optimise for the time of a request (request), the first token (ttft), each token "
        "(latency), throughput or "
        "energy. auto (default): throughput, or request with --concurrency 1.",
        metavar="WHAT",
    )
    dtype: DType = option(
        DType.BFLOAT16, "Compute in float32, float16 or bfloat16 (default).", metavar="DTYPE"
    )
    kv_dtype: KvFormat | None = option(
        None, "Store the KV cache in this dtype or as int4; by default as --dtype.", metavar="DTYPE"
    )
    max_context: int = option(
        0,
        "Limit prompt plus answer to N tokens; 0 (default): the model's context.",
        low=0,
        high=2**31,
    )
    max_new_tokens: int = option(
        0,
        "Limit an answer to N tokens; 0 (default): as many as the context allows.",
        low=0,
        high=2**31,
        alias="max_tokens",
    )
    prompt_tokens: int | None = option(
        None, "Plan for prompts of N tokens; by default for observed lengths.", low=1, high=2**31
    )
    new_tokens: int | None = option(
        None, "Plan for answers of N tokens; by default for observed lengths.", low=1, high=2**31
    )
    concurrency: int = option(
        8, "Reserve KV memory for N requests of the longest context (default: 8).", low=1, high=4096
    )
    max_time_per_token_s: float | None = option(
        None,
        "Use only plans that take at most SECONDS per token of an answer. If there is none, fail.",
        above=0,
    )
    max_inter_token_latency_s: float | None = option(
        None,
        "Let a new prompt delay the next token of a running answer by at most SECONDS.",
        above=0,
    )
    kv_overcommit: bool = option(
        False,
        "Admit up to twice --concurrency requests: reserve KV memory for each prompt, not for the "
        "answer. If memory "
        "runs out, preempt the newest request.",
    )
    allow_streaming: bool = option(
        False, "Let nodes read part of their weights from disk in each step."
    )
    kv_swap_bytes: int = option(
        0,
        "Let each node keep up to SIZE of KV of preempted requests, such as 2GiB.",
        metavar="SIZE",
        low=0,
        high=2**50,
    )
    kv_swap_on_disk: bool = option(
        False, "Keep the KV of preempted requests in files instead of memory."
    )
    prefix_cache: bool = option(False, "Enable prefix caching, per client.")
    speculation: Literal["auto", "on", "off"] = option(
        "auto",
        "Compute draft tokens ahead to answer faster: auto (default), on or off. The answer stays "
        "the same.",
        metavar="WHAT",
    )
    draft: str = option(
        NO_DRAFT,
        "Draft tokens with this smaller model of the store. auto: EdgeShard chooses the model. off "
        "(default): use no "
        "model.",
        metavar="MODEL",
    )
    mode: Literal["sequential", "bubbles", "no-bubbles"] = option(
        "no-bubbles",
        "Schedule steps without waits between them (no-bubbles, default), with waits until all "
        "micro-batches are back "
        "(bubbles), or one step at a time (sequential).",
        metavar="MODE",
    )
    micro_batches: int = option(
        0,
        "Keep M micro-batches in the pipeline at once; 0 (default): EdgeShard adapts M to the "
        "load.",
        metavar="M",
        low=0,
        high=4096,
    )
    exclude: tuple[str, ...] = option((), "Exclude this node; repeatable.", metavar="NODE")
    standby: tuple[str, ...] = option(
        (),
        "Keep a copy of other nodes' weights in this node's memory, so that it can replace a node "
        "that fails; "
        "repeatable. auto: EdgeShard chooses the nodes.",
        metavar="NODE",
    )
    reserve: dict[str, int] = option(
        dict,
        "Leave SIZE of this node's memory free, such as attic=2GiB; repeatable.",
        metavar="NODE=SIZE",
    )
    quantisation: dict[str, Literal[IntegerFormat.INT8, IntegerFormat.INT4, "stored", "none"]] = (
        option(
            dict,
            "Quantise the weights to int8 or int4. none: load them unquantised, even if they are "
            "stored quantised. "
            "stored (default): load them as they are stored. NODE=FORMAT sets one node; "
            "repeatable.",
            metavar="FORMAT|NODE=FORMAT",
            flag="quantise",
            alias="quantize",
        )
    )
    head_quantisation: Literal["int8", "int4", "none"] | None = option(
        None,
        "With --quantise, quantise the LM head to int8 (default) or int4; none: leave it "
        "unquantised.",
        metavar="FORMAT",
        alias="head_quantization",
    )
    rule: tuple[Rule, ...] = option(
        (),
        "Add a placement rule, such as 'apart a,b' or 'at-most 2 of zone=hall1'; repeatable.",
        metavar="RULE",
    )
    layers: tuple[ExplicitStage, ...] = option(
        (),
        "Place the layers by hand: NODE=FIRST:END puts the layers FIRST to END, without layer END, "
        "on NODE.",
        metavar="a=0:4,b=4:9",
    )
    replicas: int = option(
        1,
        "Run N copies of the deployment under one name, each on its own nodes (default: 1). auto: "
        "EdgeShard chooses N.",
        metavar="N|auto",
        low=0,
        high=4096,
    )
    replica: int = option(
        0, "Number of this replica, set by the coordinator.", flag=None, low=0, high=4096
    )

    def check(self) -> None:
        """Raise InvalidArgumentError naming the first field out of its bounds. `parse_spec` checks
        more."""
        check_bounds(self, "INVALID_SPEC")

    @property
    def effective_kv_dtype(self) -> KvFormat:
        return KvFormat(self.kv_dtype or self.dtype)

    def most_new_tokens(self, context: int) -> int:
        """The most new tokens of one request, given the context in tokens."""
        return self.max_new_tokens or context

    @property
    def served_name(self) -> str:
        """The name that clients use; a replica shares it with the others."""
        return self.name.removesuffix(f".{self.replica}") if self.replica else self.name

    @property
    def replica_names(self) -> tuple[str, ...]:
        """The names of all replicas of a placed spec; its own name if it is the only one."""
        if not self.replica:
            return (self.name,)
        return tuple(f"{self.served_name}.{number}" for number in range(1, self.replicas + 1))

    def numbered(self, count: int) -> tuple[DeploymentSpec, ...]:
        """The spec of each of `count` replicas; of a single one as it would be without the word."""
        if count == 1:
            return (replace(self, replicas=1),)
        return tuple(
            replace(self, name=f"{self.name}.{number}", replicas=count, replica=number)
            for number in range(1, count + 1)
        )

    def reserve_of(self, node: str) -> int:
        """Bytes of a node's memory that are not for this deployment's weights, KV pool and work."""
        return self.reserve.get(node, 0) + (0 if self.kv_swap_on_disk else self.kv_swap_bytes)

    def quantisation_of(self, node: str) -> Quantisation | None:
        """How this node stores its weights; None means the deployment's dtype."""
        blocks = self.quantisation.get(node, self.quantisation.get(EVERY_NODE))
        return (
            None
            if blocks is None or blocks == WHOLE_HEAD
            else Quantisation.of(blocks, self.head_quantisation)
        )

    def as_stored(
        self, stored_as: Quantisation | None, nodes: Collection[str] = (EVERY_NODE,)
    ) -> DeploymentSpec:
        """The spec with the weights on these nodes as the model is stored, unless this spec sets
        their quantisation."""
        if stored_as is None or self.quantisation or not nodes:
            return self
        if stored_as is Quantisation.STORED:
            return replace(self, quantisation=dict.fromkeys(nodes, "stored"))
        blocks: dict[str, Any] = dict.fromkeys(nodes, stored_as.blocks)
        head: Any = str(stored_as.head or WHOLE_HEAD)
        return replace(self, quantisation=blocks, head_quantisation=head)


def draft_spec(spec: DeploymentSpec) -> DeploymentSpec:
    """How a spec's draft runs: whole, in the dtype of the deployment, with as much context."""
    return replace(
        spec,
        quantisation={},
        head_quantisation=None,
        kv_dtype=None,
        kv_swap_bytes=0,
        prefix_cache=False,
        standby=(),
    )


def parse_spec(values: Mapping[str, Any]) -> DeploymentSpec:
    """A spec from a TOML or JSON mapping; `layers` may be the text `a=0:4,b=4:12`, whose first node
    is the source.

    Raises InvalidArgumentError naming the field, also for a key that does not exist. If several
    fields are invalid, its message has all of them, and its field is the first.
    """
    mistakes = spec_mistakes(values)
    if mistakes:
        raise joined_mistakes(mistakes)
    spec = _spec_of(values)
    _check_together(spec)
    return spec


def spec_mistakes(values: Mapping[str, Any]) -> list[InvalidArgumentError]:
    """The faults of single fields of a mapping, in short texts."""
    from pydantic import ValidationError

    try:
        _spec_of(values)
    except InvalidArgumentError as error:
        mistakes = [error]
    except ValidationError as error:
        mistakes = [_mistake(item["loc"], item["type"], item["msg"]) for item in error.errors()]
    else:
        mistakes = []
    wrong = {mistake.field for mistake in mistakes}
    for name in ("name", "model", "source", "draft"):
        text = values.get(name)
        if isinstance(text, str) and name not in wrong and (text or name != "source"):
            try:
                check_name(text, name)
            except InvalidArgumentError as error:
                mistakes.append(error)
    return mistakes


def _mistake(where: tuple[int | str, ...], kind: str, message: str) -> InvalidArgumentError:
    name = ".".join(str(part) for part in where) or "spec"
    what = {"unexpected_keyword_argument": "is not a known field", "missing": "is missing"}.get(
        kind, message.lower()
    )
    return InvalidArgumentError.about(name, what, "INVALID_SPEC")


def joined_mistakes(
    mistakes: Sequence[InvalidArgumentError], separator: str = "; "
) -> InvalidArgumentError:
    """All of them as one error, with the field of the first."""
    message = separator.join(mistake.message for mistake in mistakes)
    return InvalidArgumentError(message, field=mistakes[0].field, reason=mistakes[0].reason)


def _spec_of(values: Mapping[str, Any]) -> DeploymentSpec:
    values = dict(values)
    if values.get("replicas") == "auto":
        values["replicas"] = AUTO_REPLICAS
    if isinstance(values.get("layers"), str):
        values["layers"] = parse_layers(values["layers"])
    if isinstance(rules := values.get("rule"), list | tuple):
        values["rule"] = tuple(map(_rule_of, rules, range(len(rules))))
    if isinstance(values.get("standby"), str):
        values["standby"] = tuple(name.strip() for name in values["standby"].split(","))
    spec = _adapter().validate_python(values)
    if spec.layers and not spec.source:
        return replace(spec, source=str(spec.layers[0].node))
    return spec


def _rule_of(written: Any, index: int) -> Any:
    """A rule from its line or table; a `Rule` is returned unchanged, since it is already
    checked."""
    try:
        if isinstance(written, str):
            return parse_rule(written)
        if isinstance(written, Rule):
            written.check()
    except InvalidArgumentError as error:
        raise error.within(f"rule[{index}]") from None
    return written


@cache
def _adapter() -> TypeAdapter[DeploymentSpec]:
    """Imported only when a spec is read: help and completion of commands do not need it."""
    from pydantic import TypeAdapter

    return TypeAdapter(DeploymentSpec)


def _check_together(spec: DeploymentSpec) -> None:
    """Check fields against each other. Raises InvalidArgumentError naming one of them."""
    about = InvalidArgumentError.about
    if spec.privacy == "source-only":
        raise about("privacy", "source-only is not supported yet; use open", "UNSUPPORTED_PRIVACY")
    for node, size in spec.reserve.items():
        if size < 0:
            raise about(f"reserve.{node}", "must be 0 bytes or more", "INVALID_SPEC")
    if spec.head_quantisation is not None and not spec.quantisation:
        raise about(
            "head_quantisation",
            "no node has quantised weights; give quantisation too",
            "INVALID_SPEC",
        )
    if spec.head_quantisation is not None and "stored" in spec.quantisation.values():
        why = (
            "with quantisation stored the head keeps the format that it is stored in; leave it out"
        )
        raise about("head_quantisation", why, "INVALID_SPEC")
    if spec.allow_streaming and spec.objective == "energy":
        why = "it does not work with the objective energy; the power of disks is unknown"
        raise about("allow_streaming", why, "INVALID_SPEC")
    if spec.draft not in (NO_DRAFT, AUTO_DRAFT) and spec.speculation == "off":
        raise about(
            "draft",
            "a draft model has no use with speculation off; leave out one of the two",
            "INVALID_SPEC",
        )
    _check_rules(spec)
    _check_replicas(spec)
    # A typical request must be one that the deployment takes.
    if spec.new_tokens is not None and spec.new_tokens > spec.max_new_tokens > 0:
        why = (
            f"{spec.new_tokens} is beyond max_new_tokens {spec.max_new_tokens}; raise that, or "
            "give fewer"
        )
        raise about("new_tokens", why, "TOO_MANY_NEW_TOKENS")
    if spec.max_context:
        check_typical(spec, spec.max_context)
    most = 1 if spec.mode == "sequential" else spec.concurrency
    if spec.micro_batches > most:
        why = (
            f"{spec.micro_batches} cannot be in flight in mode {spec.mode} with concurrency "
            f"{spec.concurrency}"
        )
        raise about("micro_batches", f"{why}; at most {most} can", "TOO_MANY_MICRO_BATCHES")
    if AUTO_STANDBY in spec.standby and len(spec.standby) > 1:
        why = '"auto" lets the coordinator choose; give either node names or "auto"'
        raise about("standby", why, "INVALID_SPEC")


def _check_rules(spec: DeploymentSpec) -> None:
    """Raise InvalidArgumentError naming a rule, or "rule"."""
    if len(spec.rule) > MOST_RULES:
        why = f"a deployment has at most {MOST_RULES} rules, not {len(spec.rule)}"
        raise InvalidArgumentError.about("rule", why, "INVALID_SPEC")
    for index, rule in enumerate(spec.rule):
        _rule_of(rule, index)


def _check_replicas(spec: DeploymentSpec) -> None:
    """Raise InvalidArgumentError naming what speaks against several replicas."""
    about = InvalidArgumentError.about
    if spec.replicas == 1 or spec.replica:
        return
    if spec.layers:
        why = "layers place one pipeline; leave replicas out, or deploy each under its own name"
        raise about("layers", why, "INVALID_SPEC")
    if spec.source:
        raise about("source", "each replica has its own source; leave it out", "INVALID_SPEC")
    check_name(f"{spec.name}.{spec.replicas}", "name")
    if spec.replicas == AUTO_REPLICAS and spec.objective not in ("throughput", "auto"):
        why = f"auto is chosen for a rate, not for the objective {spec.objective}; give a number"
        raise about("replicas", why, "INVALID_SPEC")


def check_typical(spec: DeploymentSpec, max_context: int) -> None:
    """Raise InvalidArgumentError naming the typical length that does not fit in `max_context`
    tokens."""
    prompt, new = spec.prompt_tokens or 1, spec.new_tokens or 1
    if prompt + new > max_context:
        field = "prompt_tokens" if spec.prompt_tokens is not None else "new_tokens"
        why = (
            f"{prompt} tokens in and {new} out exceed the context of {max_context} tokens; give "
            "fewer"
        )
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
    """A link of a pipeline that carries nothing although its connection stands, as its sender
    reports. From stage 0 to 0 it is the coordinator's link to the head."""

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
    """None unless it was requested and traffic was seen."""
    suspects: tuple[SuspectHop, ...] = ()


DEFAULT_TOKENS = 128
"""Tokens of a typical prompt and of a typical answer if nothing is known of either."""
OVERCOMMIT = 2
"""Requests that may run for each one whose longest text has memory, if a deployment overcommits."""
MAX_SHORT_REQUESTS = 8
"""Requests of typical length that may run in a KV pool for fewer of the longest, if they fit."""


def typical_lengths(spec: DeploymentSpec, placement: Placement) -> tuple[int, int]:
    """Tokens of a typical prompt and answer: the plan's, else the spec's, else the defaults."""
    lengths = placement.predicted or spec
    return lengths.prompt_tokens or DEFAULT_TOKENS, lengths.new_tokens or DEFAULT_TOKENS


def running_requests(spec: DeploymentSpec, placement: Placement) -> int:
    """The most requests that run at once: those whose longest text has memory, or more that are
    short."""
    longest = spec.concurrency * (OVERCOMMIT if spec.kv_overcommit else 1)
    pool_tokens = placement.kv_blocks * placement.kv_block_tokens
    short = pool_tokens // sum(typical_lengths(spec, placement))
    return max(longest, min(MAX_SHORT_REQUESTS, short))
