"""The layers of each node by the operator's own list, or on as few nodes as hold them, and the
check of the memory.

`core.placement.planned` has the placer that knows devices and links. Every placement passes
`place_stages`, which checks the memory and the rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from edgeshard.architectures import (
    ModelShape,
    check_quantisation,
    parse_config,
    tensor_bytes,
    unit_of,
)
from edgeshard.domain import errors
from edgeshard.domain.deployments.deployment import AUTO_STANDBY, EVERY_NODE, DeploymentSpec
from edgeshard.domain.deployments.guesses import MOST_GUESSES
from edgeshard.domain.deployments.placement import (
    ExplicitStage,
    PlacedDraft,
    PlacedStage,
    Placement,
    Speculation,
    check_cover,
)
from edgeshard.domain.deployments.rules import RuleCondition
from edgeshard.domain.ids import NodeName
from edgeshard.domain.models.dtypes import (
    UNSUPPORTED_KV_DTYPE,
    WHOLE_HEAD,
    DType,
    KvFormat,
    Quantisation,
)
from edgeshard.domain.models.model import LayerRange, ModelManifest, Part, Unit, units_of_stage
from edgeshard.domain.models.residency import choose_residency, in_disk_blocks, room_for_experts
from edgeshard.planning.costs.costs import Load
from edgeshard.planning.inputs.shapes import model_from_config
from edgeshard.planning.inputs.site_cluster import node_starting
from edgeshard.planning.inputs.workspace import largest_step_tokens, logits_bytes, workspace_bytes
from edgeshard.planning.report.speculation import speculation_of
from edgeshard_coordinator.core.placement.ruled import (
    MOST_SETS,
    allowed_sets,
    check_rules,
    conditions_of,
    conflict,
)
from edgeshard_coordinator.core.values.candidate import Candidate

KV_BLOCK_TOKENS = 16
MEMORY_SHORT = "MEMORY_SHORT"


@dataclass(frozen=True, slots=True)
class _UnitSize:
    """Bytes of a unit by the form of its weights, and the elements of its largest tensor.

    A tied embedding has none here: its bytes depend on the ends of the model that a stage has.
    """

    bytes_as: Mapping[Quantisation | None, int]
    largest_elements: int


class StageSizes:
    """Bytes of any stage of one model under one spec and load, from one pass over the manifest.

    The KV pool holds `requests` of the longest context at once, the spec's concurrency if it is
    None. In addition there are at most `saved_states` copies of the states of requests. None means
    as many as are of use: one for each request, and one wherever a full pool saves. There are also
    at most `guess_slots` states after draft tokens; None means as many as a step has. A `draft` is
    held with the first layer.
    """

    def __init__(
        self,
        spec: DeploymentSpec,
        manifest: ModelManifest,
        shape: ModelShape,
        load: Load,
        requests: int | None = None,
        saved_states: int | None = None,
        draft: PlacedDraft | None = None,
        guess_slots: int | None = None,
    ) -> None:
        self.layer_count = shape.layer_count
        self.draft = draft
        self.max_context = spec.max_context or shape.max_context
        self._requests = requests or spec.concurrency
        self.kv_blocks = -(-self.max_context // KV_BLOCK_TOKENS) * self._requests
        self._spec = spec
        self._shape = shape
        ways = {None, *(spec.quantisation_of(node) for node in spec.quantisation)}
        self._units = _unit_sizes(manifest, shape, spec.dtype, ways)
        self._tied = [
            t
            for t in manifest.tensors
            if unit_of(shape.architecture, t.name, manifest.config) is Part.TIED
        ]
        self.model = model = model_from_config(manifest.name, manifest.config)
        largest_step = largest_step_tokens(self.max_context)
        self._workspace_bytes = workspace_bytes(model, spec.dtype, largest_step, load.micro_batches)
        self._logits_bytes = logits_bytes(model, spec.dtype, load.batch)
        distance = shape.save_every(spec.dtype, spec.effective_kv_dtype, KV_BLOCK_TOKENS)
        useful = (
            self._requests + self.kv_blocks * KV_BLOCK_TOKENS // distance
            if spec.prefix_cache and distance
            else 0
        )
        self.most_saved_states = useful if saved_states is None else saved_states
        self.most_guess_slots = (
            (MOST_GUESSES if shape.states else 0) if guess_slots is None else guess_slots
        )

    def kv_bytes(self, layers: LayerRange) -> int:
        """Bytes of all that requests leave in these layers: keys and values, and states of fixed
        size."""
        per_token = self._shape.kv_bytes_per_token(layers, self._spec.effective_kv_dtype)
        states = self._requests * self.state_bytes(layers)
        return self.kv_blocks * KV_BLOCK_TOKENS * per_token + states

    def parameter_bytes(self, layers: LayerRange, node: NodeName) -> int:
        quantisation = self._spec.quantisation_of(node)
        tied = sum(
            tensor_bytes(self._shape, t, layers, self._spec.dtype, quantisation) for t in self._tied
        )
        return tied + sum(size.bytes_as[quantisation] for size in self._of(layers))

    def state_bytes(self, layers: LayerRange) -> int:
        """Bytes of the states of one request in these layers."""
        return self._shape.state_bytes(layers, self._spec.dtype)

    def workspace_bytes(self, layers: LayerRange) -> int:
        drafted = 0 if self.draft is None or layers.first else self.draft.held_bytes
        return (
            self._workspace_bytes + self._logits_bytes * (layers.end == self.layer_count) + drafted
        )

    def streaming(self, layers: LayerRange, node: NodeName, room: int) -> tuple[int, int]:
        """The budget for weights after all other memory of the node, and the bytes of layers, or of
        experts, that do not stay in it.

        Raises ResourceExhaustedError if even the slots do not fit.
        """
        quantisation, whole = self._spec.quantisation_of(node), self.parameter_bytes(layers, node)
        budget = room - (self.needed_bytes(layers, node) - whole)
        blocks = self.model.blocks[layers.first : layers.end]
        experts = [
            size for block in blocks for size in block.expert_bytes(self._spec.dtype, quantisation)
        ]
        if (cached := room_for_experts(whole - sum(experts), experts, budget)) is not None:
            return budget, sum(map(in_disk_blocks, experts)) - cached
        sizes = [
            self._units[layer].bytes_as[quantisation] for layer in range(layers.first, layers.end)
        ]
        return budget, choose_residency(sizes, whole - sum(sizes), budget).streamed_bytes

    def needed_bytes(self, layers: LayerRange, node: NodeName) -> int:
        """Bytes of a stage with the largest tensor once more in fp32, as it is in memory during
        loading."""
        largest = max((size.largest_elements for size in self._of(layers)), default=0)
        stage_bytes = (
            self.parameter_bytes(layers, node)
            + self.kv_bytes(layers)
            + self.workspace_bytes(layers)
        )
        return stage_bytes + 4 * largest

    def _of(self, layers: LayerRange) -> list[_UnitSize]:
        return [
            self._units[unit]
            for unit in units_of_stage(layers, self.layer_count)
            if unit in self._units
        ]


def sizes_of(spec: DeploymentSpec, manifest: ModelManifest, placement: Placement) -> StageSizes:
    """The sizes of stages with the KV pool and the load of a placement."""
    shape = checked_shape(spec, manifest)
    load = Load(placement.micro_batch, placement.micro_batches)
    requests = placement.requests_of(spec.max_context or shape.max_context)
    return StageSizes(
        spec,
        manifest,
        shape,
        load,
        requests,
        placement.saved_states,
        placement.draft,
        placement.guess_slots,
    )


def _unit_sizes(
    manifest: ModelManifest, shape: ModelShape, dtype: DType, ways: Collection[Quantisation | None]
) -> Mapping[Unit, _UnitSize]:
    config, nowhere = manifest.config, LayerRange(1, 1)
    sizes: dict[Unit, _UnitSize] = {}
    for tensor in manifest.tensors:
        unit = unit_of(shape.architecture, tensor.name, config)
        if unit is not None:
            size = sizes.get(unit, _UnitSize(dict.fromkeys(ways, 0), 0))
            sizes[unit] = _UnitSize(
                {
                    way: size.bytes_as[way] + tensor_bytes(shape, tensor, nowhere, dtype, way)
                    for way in ways
                },
                max(size.largest_elements, tensor.element_count),
            )
    missing = next((layer for layer in range(shape.layer_count) if layer not in sizes), None)
    if missing is not None:
        raise errors.DataLossError(
            f"model {manifest.name} has no tensor of layer {missing}; add it again", field="model"
        )
    return sizes


class SimplePlacer:
    """An explicit `layers` list unchanged, otherwise as few nodes as hold the model."""

    def place(
        self,
        spec: DeploymentSpec,
        manifest: ModelManifest,
        candidates: Sequence[Candidate],
        draft: PlacedDraft | None = None,
    ) -> Placement:
        shape, nodes = checked_shape(spec, manifest), usable_nodes(spec, candidates)
        most = 1 if spec.mode == "sequential" else spec.concurrency

        @cache
        def sizes_with(micro_batches: int) -> StageSizes:
            return StageSizes(spec, manifest, shape, Load(1, micro_batches), draft=draft)

        def sizes_on(stages: int) -> StageSizes:
            return sizes_with(spec.micro_batches or min(stages, most))

        stages = spec.layers or _chosen(spec, shape.layer_count, sizes_on, nodes)
        load = Load(1, spec.micro_batches or min(len(stages), most))
        return place_stages(spec, sizes_on(len(stages)), nodes, stages, load)


def checked_shape(spec: DeploymentSpec, manifest: ModelManifest) -> ModelShape:
    """The model's shape; raises InvalidArgumentError for a context that is beyond it, or KV that it
    cannot have."""
    shape = parse_config(manifest.config)
    if spec.max_context > shape.max_context:
        raise errors.InvalidArgumentError(
            f"max_context {spec.max_context} is beyond the model's own limit of "
            f"{shape.max_context} tokens",
            field="max_context",
            reason="CONTEXT_TOO_LONG",
        )
    for quantisation in set(spec.quantisation.values()) - {WHOLE_HEAD}:
        check_quantisation(shape, quantisation)
    shape.check_kv(spec.effective_kv_dtype)
    return shape


def place_stages(
    spec: DeploymentSpec,
    sizes: StageSizes,
    nodes: Mapping[NodeName, Candidate],
    stages: Sequence[ExplicitStage],
    load: Load,
) -> Placement:
    """The placement with these stages. States are saved, also after draft tokens, if all stages
    have memory left for them; if it is not enough, half of what each has is used.

    Raises PlacementError for a list that cannot be or that breaks a rule, ResourceExhaustedError
    naming the node whose memory is short.
    """
    check_cover(stages, sizes.layer_count, spec.source)
    check_rules(conditions_of(spec, nodes.values()), [stage.node for stage in stages])
    placed = [_placed(spec, sizes, index, stage, nodes) for index, stage in enumerate(stages)]
    facts = [nodes[stage.node].facts for stage in stages]
    fitting = min(_states_fitting(spec, sizes, stage, nodes) for stage in stages)
    saved, guesses = sizes.most_saved_states, sizes.most_guess_slots
    if speculation_of(spec, sizes.model, facts, guesses) not in (
        Speculation.GUESSES,
        Speculation.EXPERTS,
    ):
        guesses = 0
    guesses = min(guesses, max(fitting - fitting // 2, fitting - saved))
    saved = min(saved, fitting - guesses)
    state_count = saved + guesses
    return Placement(
        stages=tuple(
            replace(
                stage,
                workspace_bytes=stage.workspace_bytes
                + state_count * sizes.state_bytes(stage.layers),
            )
            for stage in placed
        ),
        kv_block_tokens=KV_BLOCK_TOKENS,
        kv_blocks=sizes.kv_blocks,
        micro_batch=load.batch,
        micro_batches=load.micro_batches,
        saved_states=saved,
        speculation=speculation_of(spec, sizes.model, facts, guesses),
        draft=sizes.draft,
        guess_slots=guesses,
    )


def _states_fitting(
    spec: DeploymentSpec,
    sizes: StageSizes,
    stage: ExplicitStage,
    nodes: Mapping[NodeName, Candidate],
) -> int:
    """The states of requests for which a stage's node has room left."""
    room = max(0, _room(spec, nodes[stage.node]) - sizes.needed_bytes(stage.layers, stage.node))
    return room // max(1, sizes.state_bytes(stage.layers))


def usable_nodes(
    spec: DeploymentSpec, candidates: Sequence[Candidate]
) -> dict[NodeName, Candidate]:
    """Nodes by name; of two with one name the connected one. Every node the spec names must be
    there."""
    by_name = {node.name: node for node in sorted(candidates, key=lambda node: node.connected)}
    quantised = tuple(name for name in spec.quantisation if name != EVERY_NODE)
    standbys = tuple(name for name in spec.standby if name != AUTO_STANDBY)
    for field, names in (
        ("exclude", spec.exclude),
        ("standby", standbys),
        ("reserve", tuple(spec.reserve)),
        ("quantisation", quantised),
    ):
        for name in names:
            if name not in by_name:
                raise errors.NotFoundError(
                    f"{field}: there is no node {name}", field=field, reason="UNKNOWN_NODE"
                )
    source = by_name.get(NodeName(spec.source))
    if source is None:
        raise errors.NotFoundError(
            f"source: there is no node {spec.source}; nodes are {_listed(by_name)}",
            field="source",
            reason="UNKNOWN_NODE",
        )
    if spec.source in spec.exclude:
        raise errors.PlacementError(
            f"exclude: {spec.source} is the deployment's source", field="exclude"
        )
    _check_there(source, "source")
    for stage in spec.layers:
        _check_named(spec, stage, by_name)
    return by_name


def _check_named(
    spec: DeploymentSpec, stage: ExplicitStage, by_name: Mapping[NodeName, Candidate]
) -> None:
    name = stage.node
    if name not in by_name:
        raise errors.PlacementError(
            f"layers: there is no node {name}; nodes are {_listed(by_name)}",
            field="layers",
            reason="UNKNOWN_NODE",
        )
    if name in spec.exclude:
        raise errors.PlacementError(
            f"layers: node {name} is excluded", field="layers", reason="EXCLUDED_NODE"
        )
    _check_there(by_name[name], "layers")


def _check_there(node: Candidate, field: str) -> None:
    if not node.connected:
        raise errors.UnavailableError(
            f"{field}: node {node.name} is not connected",
            field=field,
            reason="NODE_AWAY",
            retry_after_s=1.0,
        )
    if node.starting:
        raise node_starting(field, node.name)


def _listed(names: Mapping[NodeName, Candidate]) -> str:
    return ", ".join(sorted(names)) or "none"


def _room(spec: DeploymentSpec, node: Candidate) -> int:
    return max(0, node.free_bytes - spec.reserve_of(node.name))


def _chosen(
    spec: DeploymentSpec,
    layer_count: int,
    sizes_on: Callable[[int], StageSizes],
    nodes: Mapping[NodeName, Candidate],
) -> tuple[ExplicitStage, ...]:
    """Stages on as few nodes as hold the model; under rules on the smallest set that they allow,
    nodes with much memory first. `sizes_on` returns the sizes with at most a given number of
    stages. Raises FailedPreconditionError naming rules that no set meets."""
    usable = [node for node in nodes.values() if node.placeable and node.name not in spec.exclude]
    usable.sort(key=lambda node: (node.name != spec.source, -_room(spec, node), node.name))
    conditions = conditions_of(spec, nodes.values())
    if not conditions:
        return _on_fewest(spec, layer_count, sizes_on, usable)
    by_room = [str(node.name) for node in usable]

    def found(under: Sequence[RuleCondition]) -> tuple[ExplicitStage, ...]:
        refused: errors.EdgeShardError | None = None
        allowed = itertools.islice(allowed_sets(under, by_room, spec.source), MOST_SETS)
        for names in sorted((names for names in allowed if len(names) <= layer_count), key=len):
            candidates = [node for node in usable if node.name in names]
            try:
                return _proportional(
                    spec, sizes_on(len(names)), candidates, allow_streaming=True, each=True
                )
            except errors.ResourceExhaustedError as error:
                refused = refused or error
        raise refused or errors.ResourceExhaustedError(
            "no set of nodes meets the rules", field="rule"
        )

    def is_possible(under: Sequence[RuleCondition]) -> bool:
        with suppress(errors.ResourceExhaustedError):
            return bool(found(under))
        return False

    try:
        return found(conditions)
    except errors.ResourceExhaustedError as error:
        conflicting = conflict(
            conditions, is_possible, spec.source, error.message if error.field != "rule" else ""
        )
        if conflicting is None:
            # its error names the node whose memory is short
            return _on_fewest(spec, layer_count, sizes_on, usable)
        raise conflicting from None


def _on_fewest(
    spec: DeploymentSpec,
    layer_count: int,
    sizes_on: Callable[[int], StageSizes],
    usable: Sequence[Candidate],
) -> tuple[ExplicitStage, ...]:
    """Stages on the source, and on as few of the others as hold the rest, those with most free
    memory, as `usable` has them.

    It is unmeasured whether a link is worth it, and every additional stage sends each token over
    one more.
    """
    # There cannot be more stages than layers. All nodes are tried last, so that an error covers
    # all.
    for count in (*range(1, min(len(usable), layer_count)), len(usable)):
        try:
            return _proportional(
                spec, sizes_on(count), usable[:count], allow_streaming=count == len(usable)
            )
        except errors.ResourceExhaustedError:
            if count == len(usable):
                raise
    raise AssertionError("unreachable")


def _proportional(
    spec: DeploymentSpec,
    sizes: StageSizes,
    candidates: Sequence[Candidate],
    *,
    allow_streaming: bool,
    each: bool = False,
) -> tuple[ExplicitStage, ...]:
    """Stages with the source first and the others by name; shares by free memory, or as much as
    fits when those do not. With `each` every node gets a layer."""
    usable = sorted(candidates, key=lambda node: (node.name != spec.source, node.name))
    rooms = [(node.name, _room(spec, node)) for node in usable]
    own = int(each)
    shares = [
        own + share
        for share in _shares([room for _, room in rooms], sizes.layer_count - own * len(rooms))
    ]
    stages = _cut(zip([name for name, _ in rooms], shares, strict=True))
    room_of = dict(rooms)
    if stages[0].node == spec.source and all(
        sizes.needed_bytes(s.layers, s.node) <= room_of[s.node] for s in stages
    ):
        return stages
    try:
        return _fill(spec, sizes, rooms, each)
    except errors.ResourceExhaustedError:
        if not (spec.allow_streaming and allow_streaming) or stages[0].node != spec.source:
            raise
        return stages  # of which some stream


def _shares(rooms: Sequence[int], layer_count: int) -> list[int]:
    """Whole layers in proportion to the rooms, by largest remainder; the first node gets at least
    one."""
    total = sum(rooms) or 1
    exact = [layer_count * room / total for room in rooms]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(rooms)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: layer_count - sum(shares)]:
        shares[i] += 1
    if shares[0] == 0:
        shares[max(range(len(shares)), key=shares.__getitem__)] -= 1
        shares[0] = 1
    # Rounding with a total of zero may leave layers over; the memory check that follows refuses
    # them by name.
    shares[0] += layer_count - sum(shares)
    return shares


def _cut(shares: zip[tuple[NodeName, int]]) -> tuple[ExplicitStage, ...]:
    stages, first = [], 0
    for name, count in shares:
        if count:
            stages.append(ExplicitStage(name, LayerRange(first, first + count)))
            first += count
    return tuple(stages)


def _fill(
    spec: DeploymentSpec, sizes: StageSizes, rooms: Sequence[tuple[NodeName, int]], each: bool
) -> tuple[ExplicitStage, ...]:
    """Node after node, as many layers as fit; with `each` a layer is left for every node that
    follows."""
    stages: list[ExplicitStage] = []
    first = 0
    for index, (name, room) in enumerate(rooms):
        end, most = first, sizes.layer_count - (len(rooms) - index - 1 if each else 0)
        while end < most and sizes.needed_bytes(LayerRange(first, end + 1), name) <= room:
            end += 1
        if end == first:
            if name == spec.source or each:
                raise _short(name, LayerRange(first, first + 1), sizes, room)
            continue
        stages.append(ExplicitStage(name, LayerRange(first, end)))
        first = end
    if first < sizes.layer_count:
        left = LayerRange(first, sizes.layer_count)
        more = _mebibytes(sizes.needed_bytes(left, NodeName(EVERY_NODE)))
        raise errors.ResourceExhaustedError(
            f"the nodes together hold only layers 0:{first} of {sizes.layer_count}; {left} needs "
            f"{more} more: add a node, or lower max_context or concurrency",
            field="layers",
            reason=MEMORY_SHORT,
        )
    return tuple(stages)


def _placed(
    spec: DeploymentSpec,
    sizes: StageSizes,
    index: int,
    stage: ExplicitStage,
    nodes: Mapping[NodeName, Candidate],
) -> PlacedStage:
    node = nodes[stage.node]
    if spec.effective_kv_dtype is KvFormat.INT4 and node.facts.kind != "cpu":
        raise errors.InvalidArgumentError(
            f"kv_dtype: int4 runs on the CPU, not on the {node.facts.kind} of {node.name}; use "
            "bfloat16, or exclude it",
            field="kv_dtype",
            reason=UNSUPPORTED_KV_DTYPE,
        )
    room = _room(spec, node)
    parameter_bytes = sizes.parameter_bytes(stage.layers, stage.node)
    budget = 0
    streamed = 0
    if sizes.needed_bytes(stage.layers, stage.node) > room:
        if not spec.allow_streaming:
            raise _short(stage.node, stage.layers, sizes, room)
        try:
            budget, streamed = sizes.streaming(stage.layers, stage.node, room)
        except errors.ResourceExhaustedError:
            raise _short(stage.node, stage.layers, sizes, room) from None
        parameter_bytes = budget
    disk = node.disk if spec.kv_swap_bytes and spec.kv_swap_on_disk else None
    return PlacedStage(
        index=index,
        node_id=node.node_id,
        node_name=node.name,
        address=node.address,
        layers=stage.layers,
        parameter_bytes=parameter_bytes,
        kv_bytes=sizes.kv_bytes(stage.layers),
        workspace_bytes=sizes.workspace_bytes(stage.layers),
        weight_budget_bytes=budget,
        streamed_bytes=streamed,
        disk_read_bytes_per_s=disk.read_bytes_per_s if disk is not None else 0.0,
        disk_write_bytes_per_s=disk.write_bytes_per_s if disk is not None else 0.0,
    )


def _short(
    name: NodeName, layers: LayerRange, sizes: StageSizes, room: int
) -> errors.ResourceExhaustedError:
    needed = sizes.needed_bytes(layers, name)
    return errors.ResourceExhaustedError(
        f"node {name} is short of memory by {_mebibytes(needed - room)}: layers {layers} need "
        f"{_mebibytes(needed)} "
        f"({_mebibytes(sizes.parameter_bytes(layers, name))} parameters, "
        f"{_mebibytes(sizes.kv_bytes(layers))} KV, "
        f"{_mebibytes(sizes.workspace_bytes(layers))} workspace) and "
        f"{_mebibytes(room)} are free; give it fewer layers, or lower max_context or concurrency",
        field="layers",
        reason=MEMORY_SHORT,
    )


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
