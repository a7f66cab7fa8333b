"""The files that the head's node reads of a model besides its tensors: bounded, off the event loop,
and with typed errors.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from edgeshard_agent.engine.compute_thread import BackgroundThread, ComputeThread
from edgeshard_agent.hosting.around import LoadedModel, LoadProgress
from edgeshard_agent.hosting.loading import StageLoader
from edgeshard_agent.model.fused import FusedModules
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.scheduler.drafting import DraftAsk
from edgeshard_agent.store.blob_cache import BlobCache
from edgeshard_coordinator.store import models

from edgeshard.architectures import expected_tensors
from edgeshard.client.uploads import add_model
from edgeshard.domain.control.commands import PrepareStage
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedDraft, PlacedStage, Placement, Speculation
from edgeshard.domain.errors import DataLossError, InvalidArgumentError
from edgeshard.domain.ids import Digest, Epoch, ModelName, NodeId, NodeName
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.importing import model_sources
from edgeshard.importing.bpe import added_token
from edgeshard.storage import checkpoint, forms
from tests.support.imports import write_checkpoint
from tests.support.tokenizers import PANICS, write_tokenizer

pytestmark = pytest.mark.timing

SETTINGS = "generation_config.json"


class Node:
    """A model in a coordinator's store, and a loader that fetches from it. `files` are the model's
    files."""

    def __init__(
        self, server: Any, channel: grpc.aio.Channel, directory: Path, cache: BlobCache
    ) -> None:
        self.server = server
        self.files, self.cache = directory, cache
        self._channel = channel
        self._worker = ComputeThread(1)
        self._loader = StageLoader(
            cache, channel, self._worker, BackgroundThread(self._worker), "cpu", 0.0, packs=False
        )

    async def add(self) -> Digest:
        return await add_model(self._channel, self.files, "tiny")

    async def load(
        self, digest: Digest, draft: PlacedDraft | None = None, stage: int = 0, max_context: int = 0
    ) -> LoadedModel:
        placed = PlacedStage(0, NodeId("n"), NodeName("n"), "127.0.0.1:9", LayerRange(0, 2), 0, 0)
        spec = DeploymentSpec(
            name="tale", model="tiny", source="n", dtype=DType.FLOAT32, max_context=max_context
        )
        stages, guesses = (placed,) * (stage + 1), Speculation.GUESSES
        placement = Placement(stages, 16, 4, 1, 1, speculation=guesses, draft=draft)
        return await self._loader.load(
            PrepareStage(spec, placement, stage, Epoch(1), digest), LoadProgress()
        )

    def close(self) -> None:
        self._worker.close()


@pytest.fixture
async def node(
    run_store: Callable[..., Awaitable[Any]],
    connect: Callable[[str], grpc.aio.Channel],
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> AsyncIterator[Node]:
    server = await run_store()
    cache = BlobCache(tmp_path / "cache", 1 << 30)
    await cache.start()
    node = Node(server, connect(server.address), make_checkpoint(), cache)
    write_tokenizer(node.files / "tokenizer.json")
    yield node
    node.close()


@pytest.fixture
def of_an_older_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client and coordinator take a model without a look at its small files."""
    for module in (checkpoint, models):
        monkeypatch.setattr(module, "check_small_file", lambda name, data: None)
    monkeypatch.setattr(model_sources, "recommendation_notes", lambda files: ())


async def test_an_end_of_a_model_fetches_the_files_that_a_head_reads_and_no_others(
    node: Node,
) -> None:
    (node.files / "chat_template.jinja").write_text("{{ messages }}")
    digest = await node.add()
    await node.load(digest)
    manifest = await node.cache.manifest(digest)
    assert manifest is not None
    there = {
        file.name: await node.cache.is_intact(file.sha256, file.size) for file in manifest.files
    }
    assert there == {"tokenizer.json": True, SETTINGS: True, "chat_template.jinja": False}


async def test_a_stage_has_the_rotary_factors_of_its_deployments_context(node: Node) -> None:
    factors = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    config = {
        "model_type": "phi3",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
    }
    config |= {
        "num_attention_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "rope_scaling": factors,
    }
    config |= {"original_max_position_embeddings": 32}
    weights = {name: torch.zeros(tensor.shape) for name, tensor in expected_tensors(config).items()}
    node.files = write_checkpoint(node.files.parent / "phi3", config, weights)
    write_tokenizer(node.files / "tokenizer.json")
    digest = await node.add()
    first: dict[int, float] = {}
    for max_context in (0, 32, 33):
        loaded = await node.load(digest, max_context=max_context)
        modules = loaded.model.weights.modules
        assert isinstance(modules, FusedModules)
        frequencies, _ = modules.rotary_emb.of("")
        first[max_context] = float(frequencies[0])
    assert first == {0: 0.125, 32: 1.0, 33: 0.125}


@pytest.mark.usefixtures("of_an_older_version")
async def test_a_tokenizer_that_panics_while_it_is_read_fails_the_load(node: Node) -> None:
    write_tokenizer(node.files / "tokenizer.json", **PANICS["load"])
    with pytest.raises(DataLossError) as caught:
        await node.load(await node.add())
    assert caught.value.field == "tokenizer.json"


@pytest.mark.parametrize(
    "text",
    ["[]", '{"eos_token_id": [null]}', '{"eos_token_id": ["x"]}', '{"a": ' + "[" * 200_000, "{"],
    ids=lambda text: text[:30],
)
@pytest.mark.usefixtures("of_an_older_version")
async def test_settings_that_cannot_be_read_fail_the_load_by_name(node: Node, text: str) -> None:
    (node.files / SETTINGS).write_text(text)
    with pytest.raises(DataLossError) as caught:
        await node.load(await node.add())
    assert caught.value.field == SETTINGS


@pytest.mark.parametrize(
    ("config", "generation", "settings", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": [3]}, {"eos_token": "1"}, {5, 3, 1}),
        ({"eos_token_id": 5}, {}, {"eos_token": {"content": "<end>"}}, {5, 4}),
        ({"eos_token_id": None}, {}, {"eos_token": "<end>"}, {4}),
        ({}, {"eos_token_id": 3}, {}, {3}),
        ({}, {}, {}, {2}),  # the family's default
        ({"eos_token_id": 5}, {"eos_token_id": 3}, {"eos_token": "unknown"}, {5, 3}),
    ],
)
async def test_every_token_that_a_file_names_as_an_end_ends_an_answer(
    node: Node,
    config: dict[str, Any],
    generation: dict[str, Any],
    settings: dict[str, Any],
    expected: set[int],
) -> None:
    path = node.files / "config.json"
    values = json.loads(path.read_text())
    values.pop("eos_token_id", None)
    path.write_text(json.dumps(values | config))
    (node.files / SETTINGS).write_text(json.dumps(generation))
    (node.files / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((node.files / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [added_token(4, "<end>", True)]
    (node.files / "tokenizer.json").write_text(json.dumps(tokenizer))
    loaded = await node.load(await node.add())
    assert loaded.for_head is not None and loaded.for_head.eos_tokens == expected


async def test_settings_are_read_off_the_event_loop(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node.files / SETTINGS).write_text(json.dumps({"eos_token_id": [3, 4]}))
    threads: list[threading.Thread] = []

    def parse(text: str, name: str) -> Any:
        threads.append(threading.current_thread())
        return json.loads(text)

    added = await node.add()
    monkeypatch.setattr(forms, "parse_json_object", parse)
    loaded = await node.load(added)
    assert loaded.for_head is not None and loaded.for_head.eos_tokens == {2, 3, 4}
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize(("name", "size"), [(SETTINGS, 1 << 20), ("tokenizer.json", 64 << 20)])
async def test_a_file_that_is_too_large_is_refused_when_it_is_added_and_where_it_is_loaded(
    node: Node, monkeypatch: pytest.MonkeyPatch, of_an_older_version: None, name: str, size: int
) -> None:
    with (node.files / name).open("r+b") as file:
        file.truncate(size + 1)
    with pytest.raises(InvalidArgumentError) as caught:
        await node.add()
    assert caught.value.field == name and str(size) in caught.value.message
    assert node.server.servicer.put_bytes == 0
    monkeypatch.setattr(models, "skim_small_file", lambda name, chunks: None)
    with monkeypatch.context() as older:
        older.setattr(checkpoint, "_FILE_LIMITS", {})
        digest = await node.add()
    with pytest.raises(InvalidArgumentError) as caught:
        await node.load(digest)
    assert caught.value.field == name and not node.server.servicer.reads, "nothing is fetched of it"


def placed_draft(digest: Digest, layers: int = 2) -> PlacedDraft:
    return PlacedDraft(ModelName("small"), digest, layers, 2, 8, 1, 1, 1)


async def test_a_head_gets_its_draft_with_the_first_layer(node: Node) -> None:
    """Without the files of a head; it goes with the stage, and so do its blobs."""
    digest = await node.add()
    loaded = await node.load(digest, placed_draft(digest))
    assert loaded.drafter is not None and loaded.drafter._steps.longest == 4 * 16
    ask = DraftAsk(1, (5, 6, 7), 3, Sampling(), 2)
    assert loaded.drafter.guess([ask])
    loaded.reset()
    assert loaded.drafter.guess([ask])
    model = loaded.drafter._steps._model
    loaded.release()
    assert not hasattr(model, "weights") and not hasattr(loaded.model, "weights")
    loaded.pin.release()
    assert (await node.load(digest, placed_draft(digest), stage=1)).drafter is None
    assert (await node.load(digest)).drafter is None


@pytest.mark.parametrize("what", ["not there", "not so deep", "no memory"])
async def test_a_draft_that_cannot_be_had_is_done_without(node: Node, what: str) -> None:
    digest = await node.add()
    draft = placed_draft(
        Digest("e" * 64) if what == "not there" else digest, 9 if what == "not so deep" else 2
    )
    if what == "no memory":
        draft = replace(draft, kv_blocks=1 << 40)
    loaded = await node.load(digest, draft)
    assert loaded.drafter is None and loaded.model.parameter_bytes > 0
    loaded.release()
    loaded.pin.release()


async def test_a_load_that_is_called_off_while_its_draft_comes_leaves_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = await node.add()
    released: list[StageModel] = []
    begun, release = asyncio.Event(), StageModel.release

    def noted(model: StageModel) -> None:
        released.append(model)
        release(model)

    async def waits(*_: object, **__: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(node._loader, "_load_draft", waits)
    monkeypatch.setattr(StageModel, "release", noted)
    loading = asyncio.create_task(node.load(digest, placed_draft(digest)))
    await begun.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await node._worker.run(lambda: None)
    assert len(released) == 1
