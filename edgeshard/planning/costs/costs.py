"""From a model, nodes and links to the input of solvers: seconds and bytes, for prefill and for
decode. Pure.

Without a measured profile a node is a roofline. A part of the model then takes as long as reading
its bytes or as computing its operations, whichever is longer. The constants below are the only
numbers here without a data sheet; each has its reason next to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.planning.inputs.catalogue import DeviceSpec
from edgeshard.planning.inputs.devices import ClusterNode
from edgeshard.planning.inputs.problem import ComputeTimes, PlanProblem, StepShape
from edgeshard.planning.inputs.shapes import BlockSpec, ModelSpec
from edgeshard.planning.inputs.workspace import logits_bytes, workspace_bytes
from edgeshard.planning.solvers.instance import Cut, Floats, Instance
from edgeshard.planning.solvers.scoring import SLACK, stages

KV_BLOCK_TOKENS = 16
"""A sequence's KV memory is granted in blocks of this many tokens, as the agents do."""
FRAME_PART_BYTES = 1 << 20
"""Activations travel in parts of at most this many bytes."""
FRAME_OVERHEAD_BYTES = 128
"""Overhead of every part: frame header and checksum (about 60), gRPC and HTTP/2 (14), TLS (22),
TCP/IP (40)."""
RETURNED_TOKEN_BYTES = 16
"""Size of a sampled token on its return: request, position, token and logprob as varints and a
float."""


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences in one micro-batch, and micro-batches in flight: the b and m of the papers."""

    batch: int = 1
    micro_batches: int = 1

    @property
    def requests(self) -> int:
        return self.batch * self.micro_batches


@dataclass(frozen=True, slots=True)
class Roofline:
    """ComputeTimes of an unmeasured node, from its memory bandwidth and its operations a second."""

    device: DeviceSpec
    model: ModelSpec
    dtype: DType
    quantisation: Quantisation | None
    kv_dtype: KvFormat
    flops: float

    def block_s(self, block: BlockSpec, phase: StepShape) -> float:
        phase, tokens = phase.within(block.window), phase.step_tokens
        cache_bytes = phase.batch * phase.kv_tokens * block.kv.bytes_per_token(self.kv_dtype)
        cache_bytes += 2 * phase.batch * block.state_bytes(self.dtype)  # read and written
        read = block.read_bytes(tokens, self.dtype, self.quantisation) + cache_bytes
        operations = 2.0 * block.active_parameters * tokens + self.model.attention_flops(
            block, tokens, phase.context
        )
        return max(read / self.device.bandwidth_bytes_per_s, operations / self.flops)

    def embedding_s(self, phase: StepShape) -> float:
        """A row read and written for each token."""
        size = 2.0 * phase.step_tokens * self.model.shape.hidden_size * self.dtype.itemsize
        return size / self.device.bandwidth_bytes_per_s

    def head_s(self, phase: StepShape) -> float:
        read = (
            self.model.head_bytes(self.dtype, self.quantisation) / self.device.bandwidth_bytes_per_s
        )
        return max(read, 2.0 * self.model.head_parameters * phase.batch / self.flops)

    def step_s(self, hidden_bytes: float) -> float:
        return self.device.step_overhead_s


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A stage's memory on its node, in bytes, with its parts.

    `workspace` is activations, logits, frames kept for resending and the allocator's slack;
    `loading` is the tensor that is in memory twice while it is loaded. `usable` is the node's
    limit.
    """

    weights: int
    kv: int
    workspace: int
    loading: int
    usable: int

    @property
    def needed(self) -> int:
        return self.weights + self.kv + self.workspace + self.loading


class Costs:
    """The instances of one problem. Nodes are those not excluded; indices 0 to M-1 into `nodes`.

    `hidden_bytes` is the size of one position's hidden states between two stages. `bandwidth_bps`
    and `delay_s` are [M, M], sender by receiver, as in `link_matrices`. `times` has the compute
    times of each node.
    """

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        excluded = set(problem.exclude)
        self.nodes: tuple[ClusterNode, ...] = tuple(
            node for node in problem.cluster.nodes if node.name not in excluded
        )
        self.names = tuple(node.name for node in self.nodes)
        self.source = self.names.index(problem.cluster.source)
        self.hidden_bytes = problem.model.shape.frame_width * problem.dtype.itemsize
        self.bandwidth_bps, self.delay_s = link_matrices(problem, self.nodes)
        self.times = self._times()
        numbers: dict[BlockSpec, int] = {}
        self._kind_of = np.array(
            [numbers.setdefault(block, len(numbers)) for block in problem.model.blocks]
        )
        self._block_kinds = tuple(numbers)
        self._kind_bytes = [block.weight_bytes(*problem.formats) for block in numbers]
        self._capacity = np.array([self._room(node) for node in self.nodes])
        self._max_layers = self._layer_limits()
        self._cache: dict[tuple[Load, bool], Instance] = {}
        self._mixed: dict[tuple[int, int], Instance] = {}

    def prefill(self, load: Load) -> Instance:
        """One micro-batch's prompt through the pipeline."""
        return self._instance(load, prefill=True)

    def decode(self, load: Load) -> Instance:
        """One token of a micro-batch, in the middle of its answer."""
        return self._instance(load, prefill=False)

    def mixed(self, batch: int, chunk: int) -> Instance:
        """A step of `batch` decodes that carries `chunk` tokens of a prompt as well."""
        key = (batch, chunk)
        if key not in self._mixed:
            decode, shape = self.decode(Load(batch)), self._mixed_shape(batch, chunk)
            hidden = shape.batch * shape.tokens * self.hidden_bytes
            self._mixed[key] = replace(
                decode,
                compute_s=self._compute(shape),
                embed_s=self._asked(lambda times: times.embedding_s(shape)),
                overhead_s=self._asked(lambda times: times.step_s(hidden)),
                hop_s=self.hop_s(round(hidden)),
            )
        return self._mixed[key]

    def _mixed_shape(self, batch: int, chunk: int) -> StepShape:
        """Decodes in the middle of their answers, and a chunk of the middle of a prompt."""
        prompt = self.problem.prompt_tokens
        middle = self.problem.prompt_tokens + self.problem.new_tokens / 2
        before = (prompt - chunk) / 2
        tokens, count = batch + chunk, batch + 1
        context = (batch * middle + chunk * (before + (chunk + 1) / 2)) / tokens
        return StepShape(count, tokens / count, context, (batch * middle + before + chunk) / count)

    def phase(self, batch: int, prefill: bool) -> StepShape:
        prompt, new = self.problem.prompt_tokens, self.problem.new_tokens
        if prefill:  # causal: a query sees half of the prompt on average
            return StepShape(batch, prompt, (prompt + 1) / 2, prompt)
        middle = prompt + new / 2
        return StepShape(batch, 1, middle, middle)

    def hop_s(self, payload_bytes: int) -> Floats:
        """[M, M] seconds a tensor of this size occupies each link; infinite if there is no link."""
        return link_seconds(frame_bytes(payload_bytes), self.bandwidth_bps)

    def hop_bytes(self, count: int, returns: bool) -> int:
        """Bytes on the wire of the hidden states of `count` positions, or of `count` sampled tokens
        that return."""
        if returns and not self.problem.head_on_source:
            return FRAME_OVERHEAD_BYTES + count * RETURNED_TOKEN_BYTES
        return frame_bytes(count * self.hidden_bytes)

    def memory(self, load: Load, cut: Cut) -> tuple[MemoryUse, ...]:
        """Memory of each stage with its parts."""
        block_bytes, kv = self.block_bytes(), self.sequence_kv_bytes()
        uses = []
        for index, (node, first, end) in enumerate(stages(cut)):
            has_head = self.has_head(cut, index)
            weights = sum(block_bytes[first:end]) + self.ends_bytes(index == 0, has_head)
            workspace = self.stage_workspace(load) + self.logits_bytes(load) * has_head
            block_loading = self.loading_bytes(self.nodes[node])
            room = int(self._capacity[node]) + block_loading
            loading = block_loading + self.outer_loading_bytes() * (index == 0 or has_head)
            uses.append(
                MemoryUse(weights, load.requests * sum(kv[first:end]), workspace, loading, room)
            )
        return tuple(uses)

    def has_head(self, cut: Cut, index: int) -> bool:
        return index == (0 if self.problem.head_on_source else len(cut.nodes) - 1)

    def ends_bytes(self, embedding: bool, head: bool) -> int:
        """Weights of embedding and head on a stage with either of them, or both."""
        model, formats = self.problem.model, self.problem.formats
        size = model.embedding_bytes(*formats) * embedding + model.head_bytes(*formats) * head
        return size - model.shared_bytes(*formats) * (embedding and head)

    def sequence_kv_bytes(self) -> list[int]:
        """KV of one whole sequence in each block, in whole KV blocks, and its states."""
        rounded = -(-self.problem.held_tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
        kv_dtype, dtype = self.problem.effective_kv_dtype, self.problem.dtype
        return [
            rounded * block.kv.bytes_per_token(kv_dtype) + block.state_bytes(dtype)
            for block in self.problem.model.blocks
        ]

    def stage_workspace(self, load: Load) -> int:
        """Slack, the activations of the largest step, and frames kept for resending and
        received."""
        problem = self.problem
        tokens = problem.step_tokens or load.batch * problem.prompt_tokens
        return workspace_bytes(problem.model, problem.dtype, tokens, load.micro_batches)

    def logits_bytes(self, load: Load) -> int:
        """Logits of one position for each sequence."""
        return logits_bytes(self.problem.model, self.problem.dtype, load.batch)

    def loading_bytes(self, node: ClusterNode) -> int:
        """The largest tensor a node may be given, once more. A discrete accelerator has the host's
        memory for that."""
        model, itemsize = self.problem.model, self.problem.loading_itemsize
        if itemsize is not None:
            return model.largest_block_tensor * itemsize
        if not node.device.unified:
            return 0
        return (
            max(model.largest_block_tensor, model.largest_outer_tensor)
            * self.problem.dtype.itemsize
        )

    def outer_loading_bytes(self) -> int:
        """Bytes that loading takes beyond `loading_bytes` on a stage with the embedding or the
        head."""
        model = self.problem.model
        beyond = max(0, model.largest_outer_tensor - model.largest_block_tensor)
        return beyond * (self.problem.loading_itemsize or 0)

    def _room(self, node: ClusterNode) -> float:
        room = (
            node.device.usable_bytes
            - self.problem.reserve.get(node.name, 0.0)
            - self.loading_bytes(node)
        )
        # Solvers allow for rounding; a plan must not.
        return max(0.0, float(np.floor(room * (1 - 2 * SLACK))))

    def _times(self) -> list[ComputeTimes]:
        """Each node's measured times, else its roofline: one for all nodes that share the spec of a
        [[device]]."""
        problem, model = self.problem, self.problem.model
        devices = {
            id(node.device): node.device for node in self.nodes if node.name not in problem.times
        }
        rooflines = {
            key: Roofline(
                device,
                model,
                *problem.formats,
                problem.effective_kv_dtype,
                device.flops[problem.dtype],
            )
            for key, device in devices.items()
        }
        return [problem.times.get(node.name) or rooflines[id(node.device)] for node in self.nodes]

    def block_bytes(self) -> list[int]:
        """Weights of each block."""
        return [self._kind_bytes[kind] for kind in self._kind_of]

    def _layer_bytes(self, load: Load) -> Floats:
        """[N] weights of each block and the KV of all requests in it."""
        block_sizes = zip(self.block_bytes(), self.sequence_kv_bytes(), strict=True)
        return np.array([float(weights + load.requests * kv) for weights, kv in block_sizes])

    def _layer_limits(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        layers = self.problem.model.layer_count
        shares = [self.problem.max_share.get(name, 1.0) for name in self.names]
        limits = np.array([int(share * layers + SLACK) for share in shares], dtype=np.int64)
        limits[self.source] = max(1, limits[self.source])  # the source always holds the first layer
        return limits

    def _compute(self, phase: StepShape) -> Floats:
        """[M, N] seconds of each block on each node."""
        table = self._asked(
            lambda times: [times.block_s(kind, phase) for kind in self._block_kinds]
        )
        return table[:, self._kind_of]

    def _asked(self, question: Callable[[ComputeTimes], list[float] | float]) -> Floats:
        """[M, ...] the answer for each node; nodes that share their times are computed once."""
        distinct_times = {id(times): times for times in self.times}
        answers = {key: question(times) for key, times in distinct_times.items()}
        return np.array([answers[id(times)] for times in self.times], dtype=np.float64)

    def _instance(self, load: Load, prefill: bool) -> Instance:
        key = (load, prefill)
        if key not in self._cache:
            self._cache[key] = self._build(load, prefill)
        return self._cache[key]

    def _build(self, load: Load, prefill: bool) -> Instance:
        problem, model = self.problem, self.problem.model
        if load.micro_batches > 1:  # the same times; only KV and frames take more memory
            one = self._instance(Load(load.batch), prefill)
            return replace(
                one,
                layer_bytes=self._layer_bytes(load),
                stage_bytes=float(self.stage_workspace(load)),
            )
        phase = self.phase(load.batch, prefill)
        hidden = phase.step_tokens * self.hidden_bytes
        outer_loading = self.outer_loading_bytes()
        return Instance(
            compute_s=self._compute(phase),
            embed_s=self._asked(lambda times: times.embedding_s(phase)),
            head_s=self._asked(lambda times: times.head_s(phase)),
            overhead_s=self._asked(lambda times: times.step_s(hidden)),
            hop_s=self.hop_s(hidden),
            return_s=link_seconds(self.hop_bytes(load.batch, returns=True), self.bandwidth_bps),
            latency_s=self.delay_s,
            layer_bytes=self._layer_bytes(load),
            embed_bytes=float(model.embedding_bytes(*problem.formats) + outer_loading),
            head_bytes=float(
                model.head_bytes(*problem.formats) + self.logits_bytes(load) + outer_loading
            ),
            tied_bytes=float(model.shared_bytes(*problem.formats) + outer_loading),
            stage_bytes=float(self.stage_workspace(load)),
            capacity_bytes=self._capacity,
            max_layers=self._max_layers,
            source=self.source,
            asynchronous=problem.asynchronous,
            head_on_source=problem.head_on_source,
            min_nodes=problem.min_nodes,
            max_nodes=problem.max_nodes or len(self.nodes),
        )


def frame_bytes(payload: int) -> int:
    """Bytes on the wire of a tensor of `payload` bytes."""
    return payload + max(1, -(-payload // FRAME_PART_BYTES)) * FRAME_OVERHEAD_BYTES


def link_seconds(size_bytes: int, bandwidth_bps: Floats) -> Floats:
    """Seconds for which a frame occupies each link; infinite if there is no link."""
    with np.errstate(divide="ignore"):
        return np.asarray(8.0 * size_bytes / bandwidth_bps)


def link_matrices(problem: PlanProblem, nodes: Sequence[ClusterNode]) -> tuple[Floats, Floats]:
    """[M, M] bits a second and seconds of delay, sender by receiver; a node to itself is free."""
    cluster = problem.cluster
    index = {node.name: position for position, node in enumerate(nodes)}
    bandwidth = np.full((len(nodes), len(nodes)), cluster.default_link.bandwidth_bps)
    latency = np.full_like(bandwidth, cluster.default_link.latency_s)
    for (sender, receiver), link in cluster.links.items():
        if sender in index and receiver in index:
            bandwidth[index[sender], index[receiver]] = link.bandwidth_bps
            latency[index[sender], index[receiver]] = link.latency_s
    up = np.array([node.up_bps if node.up_bps is not None else np.inf for node in nodes])
    down = np.array([node.down_bps if node.down_bps is not None else np.inf for node in nodes])
    bandwidth = np.minimum(bandwidth, np.minimum(up[:, None], down[None, :]))
    np.fill_diagonal(bandwidth, np.inf)
    np.fill_diagonal(latency, 0.0)
    return bandwidth, latency
