"""One node in this process: its hosting, its loader and its cache over real files and tiny real
models.

The coordinator's store is an object. Stages have no links: the test calls their models for results.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import torch
from edgeshard_agent.core.events import CommandReceived
from edgeshard_agent.engine.compute_thread import BackgroundThread, ComputeThread
from edgeshard_agent.hosting.around import HostServices, LoadedModel, Tools
from edgeshard_agent.hosting.host import Hosting
from edgeshard_agent.hosting.hosted_stage import HostedStage
from edgeshard_agent.hosting.loading import StageLoader
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.blocks import MixtureMlp
from edgeshard_agent.model.decoder import DecoderModules
from edgeshard_agent.model.modules import weight_bytes
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.net.link_receiver import StageServicer
from edgeshard_agent.store.blob_cache import BlobCache

from edgeshard.architectures import canonical_name, parse_config
from edgeshard.architectures.units import UnitForm, tensors_of_units
from edgeshard.domain.control.commands import (
    Command,
    CommandResult,
    KeepStandby,
    PrepareStage,
    ReleaseStage,
)
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.ids import (
    DeploymentName,
    Digest,
    Epoch,
    ModelName,
    NodeId,
    NodeName,
    OperationId,
)
from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.domain.models.model import LayerRange, ModelManifest, TensorInfo
from edgeshard.domain.models.residency import in_disk_blocks
from edgeshard.domain.nodes.device import DeviceFacts, StagePhase, StageStatus
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from edgeshard.process.clock import SystemClock
from edgeshard.proto.v1 import store_pb2 as pb
from edgeshard.wire.store import manifest_to_wire
from tests.agent.model.test_bits import CONFIGS, VOCAB, RandomWeights

LAYERS = 3
NODE = NodeName("n0")
FACTS = DeviceFacts("cpu", "Test CPU", 4, 8 << 30, 4 << 30, False, "Linux")
DEADLINE_S = 60.0
MODELS: dict[str, dict[str, Any]] = {
    "untied": CONFIGS["llama"] | {"num_hidden_layers": LAYERS},
    "tied": CONFIGS["qwen3"] | {"num_hidden_layers": LAYERS, "head_dim": 16},
    "mixture": CONFIGS["qwen3_moe"] | {"num_hidden_layers": LAYERS, "num_experts": 4},
}


@dataclass(frozen=True)
class Model:
    """A tiny model, as a coordinator's store has it."""

    source: RandomWeights
    config: dict[str, Any]
    manifest: ModelManifest
    digest: Digest
    blobs: dict[str, bytes]

    @property
    def blob_bytes(self) -> int:
        return sum(map(len, self.blobs.values()))


@cache
def model(name: str) -> Model:
    config = MODELS[name]
    blobs = dict[str, bytes]()
    tensors = []
    source = RandomWeights(config)
    for tensor in source.names():
        values = source.read(tensor)
        data = values.contiguous().view(torch.uint8).numpy().tobytes()
        digest = Digest(hashlib.sha256(data).hexdigest())
        blobs[digest] = data
        tensors.append(TensorInfo(tensor, DType.BFLOAT16, tuple(values.shape), digest))
    architecture = parse_config(config).architecture
    manifest = ModelManifest(ModelName(name), architecture, json.dumps(config), tuple(tensors), ())
    return Model(source, config, manifest, manifest.digest(), blobs)


@dataclass(frozen=True)
class Form:
    """How a deployment runs a model. `budget` has some of its layers or experts stream."""

    model: str
    layers: LayerRange
    dtype: DType = DType.FLOAT32
    quantisation: Quantisation | None = None
    kv: KvFormat | None = None
    streams: bool = False

    @property
    def unit_form(self) -> UnitForm:
        made = model(self.model)
        return UnitForm(made.digest, self.dtype, self.quantisation, parse_config(made.config))

    @property
    def units(self) -> dict[str, frozenset[str]]:
        """The digests of the blobs of each unit's tensors."""
        return _units(self.model, self.layers, self.quantisation)

    def digests(self, units: Iterable[str] | None = None) -> frozenset[str]:
        """The digests of the blobs of these units' tensors, or of all."""
        return frozenset().union(
            *(self.units[unit] for unit in (self.units if units is None else units))
        )

    def blob_bytes(self, units: Iterable[str] | None = None) -> int:
        return sum(len(model(self.model).blobs[digest]) for digest in self.digests(units))

    @property
    def budget(self) -> int:
        """The least that a stage of this form needs when it streams, and a half of a layer or an
        expert more."""
        return _budget(self) if self.streams else 0


@cache
def _units(
    name: str, layers: LayerRange, quantisation: Quantisation | None
) -> dict[str, frozenset[str]]:
    made = model(name)
    stored = {
        canonical_name(made.manifest.architecture, tensor.name): tensor
        for tensor in made.manifest.tensors
    }
    units = tensors_of_units(made.config, layers, quantisation)
    return {
        unit: frozenset(stored[tensor].sha256 for tensor in names) for unit, names in units.items()
    }


@cache
def reference(form: Form) -> StageModel:
    made = model(form.model)
    return StageModel.with_kv(
        StageWeights.load(
            made.source,
            made.config,
            form.layers,
            dtype=form.dtype,
            device="cpu",
            quantisation=form.quantisation,
        ),
        KvMemory(form.kv or form.dtype, 4, 16),
    )


@cache
def _budget(form: Form) -> int:
    whole = reference(Form(form.model, form.layers, form.dtype, form.quantisation))
    modules = whole.weights.modules
    assert isinstance(modules, DecoderModules)
    blocks = list(modules.layers.values())
    experts = [
        weight_bytes(expert)
        for block in blocks
        for part in block.modules()
        if isinstance(part, MixtureMlp)
        for expert in part.experts
    ]
    if experts:
        return whole.parameter_bytes - sum(experts) + int(2.5 * in_disk_blocks(max(experts)))
    sizes = [weight_bytes(block) for block in blocks]
    return whole.parameter_bytes - sum(sizes) + int(2.5 * max(sizes))


def computed(stage: StageModel) -> torch.Tensor:
    """A stage's result for the same twelve tokens, or hidden states, each time: logits or hidden
    states."""
    plan = StepPlan(grants=(KvGrant(0, 0, (0,)),), spans=(Span(0, 0, 12, sampling=Sampling()),))
    random = np.random.default_rng(6)
    tokens = random.integers(0, VOCAB, 12)
    inputs: Any = tokens
    if stage.layers.first:
        hidden = random.standard_normal((12, stage.shape.hidden_size)).astype(np.float32)
        inputs = torch.from_numpy(hidden).to(getattr(torch, stage.dtype.value))
    try:
        if stage.is_last:
            return stage.logits(plan, inputs).clone()
        found = stage.execute(plan, inputs).hidden
        assert found is not None
        return found.clone()
    finally:
        stage.reset()


@cache
def wanted(form: Form) -> torch.Tensor:
    return computed(reference(form))


class _Blob:
    """A call of ReadBlob that is answered."""

    def __init__(self, data: bytes) -> None:
        self._messages = iter([pb.ReadBlobResponse(data=data)])

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return next(self._messages, grpc.aio.EOF)

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def cancel(self) -> None:
        pass


class Store:
    """The coordinator's store, as the channel that leads to it; `fetched` has the digest of each
    blob that was read."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self._models = [model(name) for name in MODELS]

    def unary_unary(self, path: str, **options: Any) -> Callable[..., Any]:
        async def get(request: Any, **limits: Any) -> Any:
            found = next(item for item in self._models if item.digest == request.model)
            return pb.GetManifestResponse(manifest=manifest_to_wire(found.manifest))

        return get

    def unary_stream(self, path: str, **options: Any) -> Callable[..., Any]:
        def read(request: Any) -> _Blob:
            data = next(
                item.blobs[request.sha256] for item in self._models if request.sha256 in item.blobs
            )
            self.fetched.append(request.sha256)
            return _Blob(data[request.offset : request.offset + request.length])

        return read

    stream_unary = unary_unary


class Wired:
    """A stage without links and head."""

    head = None

    def __init__(self, prepare: PrepareStage, loaded: LoadedModel, *others: Any) -> None:
        self.prepare = prepare
        self.loaded = loaded

    def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def status(self) -> StageStatus:
        prepare = self.prepare
        return StageStatus(
            prepare.deployment,
            prepare.epoch,
            prepare.stage,
            prepare.placed.layers,
            StagePhase.READY,
        )


class Node:
    """A node that packs, with at most `limit` bytes in its cache."""

    def __init__(
        self, directory: Path, limit: int, worker: ComputeThread, aside: BackgroundThread
    ) -> None:
        self.cache = BlobCache(directory, limit)
        self.store = Store()
        self.held: dict[str, Form] = {}
        """The form of each deployment whose stage is loaded."""
        self._answers: dict[str, CommandResult] = {}
        self._answered = asyncio.Event()
        self._numbers = iter(range(1, 1 << 30))
        channel = cast(grpc.aio.Channel, self.store)
        self.worker = worker
        around = HostServices(
            NodeId("n"), worker, StageServicer(), lambda: channel, None, SystemClock(), lambda: None
        )
        self.hosting = Hosting(around, self._take, lambda facts: None)
        loader = StageLoader(self.cache, channel, worker, aside, "cpu", 0.0, packs=True)
        self.loader = loader
        self._tools = Tools(
            loader.load, loader.load_standby, _measure, cast(Callable[..., HostedStage], Wired)
        )

    async def start(self) -> None:
        await self.cache.start()
        self.hosting.start(self._tools, FACTS)

    async def close(self) -> None:
        await self.hosting.close()
        for stage in self.hosting.stages():
            await self.worker.run(stage.loaded.model.release)

    def _take(self, results: tuple[CommandResult, ...]) -> None:
        self._answers.update({result.operation_id: result for result in results})
        self._answered.set()

    def post(self, command: Command) -> str:
        operation = OperationId(f"o{next(self._numbers)}")
        self.hosting.post(CommandReceived(operation, command))
        return operation

    async def answer(self, operation: str) -> CommandResult:
        async with asyncio.timeout(DEADLINE_S):
            while operation not in self._answers:
                self._answered.clear()
                await self._answered.wait()
        return self._answers[operation]

    async def ask(self, command: Command) -> CommandResult:
        return await self.answer(self.post(command))

    def prepare(self, name: str, form: Form) -> PrepareStage:
        placed = PlacedStage(
            0, NodeId("n"), NODE, "127.0.0.1:9", form.layers, 0, 0, weight_budget_bytes=form.budget
        )
        return PrepareStage(
            _spec(name, form),
            Placement((placed,), 16, 4, 1, 1),
            0,
            Epoch(next(self._numbers)),
            model(form.model).digest,
        )

    def standby(self, name: str, form: Form, *, nothing: bool = False) -> KeepStandby:
        layers = None if nothing else form.layers
        return KeepStandby(
            _spec(name, form), Epoch(next(self._numbers)), model(form.model).digest, NODE, layers
        )

    def release(self, name: str) -> ReleaseStage:
        return ReleaseStage(DeploymentName(name), Epoch(next(self._numbers)))

    async def deploy(self, name: str, form: Form) -> CommandResult:
        result = await self.ask(self.prepare(name, form))
        if result.failure is None:
            self.held[name] = form
        else:
            self.held.pop(name, None)
        return result

    async def delete(self, name: str) -> None:
        self.held.pop(name, None)
        failure = (await self.ask(self.release(name))).failure
        assert failure is None, failure

    async def compute(self, name: str) -> torch.Tensor:
        stage = next(stage for stage in self.hosting.stages() if stage.prepare.deployment == name)
        return await self.worker.run(computed, stage.loaded.model)

    async def computes(self, name: str) -> bool:
        """Whether its stage computes the same as one loaded from the checkpoint."""
        expected = await self.worker.run(wanted, replace(self.held[name], streams=False))
        return torch.equal(await self.compute(name), expected)

    async def settled(self) -> None:
        """Wait until cancelled work has ended."""
        async with asyncio.timeout(DEADLINE_S):
            while [task for task in asyncio.all_tasks() if task.get_name().startswith("hosting-")]:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await self.worker.run(lambda: None)

    def packed_paths(self) -> list[Path]:
        return sorted((self.cache.directory / "packed").glob("*.packed"))

    def packed_units(self, form: Form) -> set[str]:
        """Units of this form whose packed files are there."""
        there = {path.stem for path in self.packed_paths()}
        return {unit for unit in form.units if form.unit_form.name(unit) in there}

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned blobs and packed files."""
        files = sum(info.size for info in self.cache.packed.files() if info.in_use)
        return files + sum(
            size for digest, size in self.cache._sizes.items() if digest in self.cache._pins
        )

    def disk_bytes(self) -> int:
        folders = (self.cache.directory / "blobs", self.cache.directory / "packed")
        return sum(path.stat().st_size for folder in folders for path in _files(folder))

    def leftovers(self) -> list[str]:
        """Temporary files, and pins, of a node that holds nothing."""
        stray = [path.name for path in _files(self.cache.directory) if path.name.endswith(".tmp")]
        pins = [str(digest)[:12] for digest in self.cache._pins]
        return stray + pins + [info.name for info in self.cache.packed.files() if info.in_use]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _spec(name: str, form: Form) -> DeploymentSpec:
    options: dict[str, Any] = {}
    if form.quantisation is not None:
        blocks, _, head = form.quantisation.partition("-head-")
        options = {"quantisation": {NODE: blocks}, "head_quantisation": head or None}
    return DeploymentSpec(
        name=name, model=form.model, source=NODE, dtype=form.dtype, kv_dtype=form.kv, **options
    )


async def _measure(task: Any, held: int | None) -> None:
    raise AssertionError("nothing is measured here")
