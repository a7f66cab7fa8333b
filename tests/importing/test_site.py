"""Models in others' forms on a real site: added by their file's name, deployed as they are stored,
the same tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from edgeshard_agent.model.projection import whole
from gguf import GGMLQuantizationType as Type

from edgeshard import Client
from edgeshard.client.uploads import Adding
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.models.dtypes import IntegerFormat
from edgeshard.importing.blocks import Width
from edgeshard.importing.gguf_model import open_gguf
from tests.support.gguf_files import DEMO, everywhere, mixed, write_demo_gguf
from tests.support.imports import nothing, tensors_of, write_checkpoint
from tests.support.site import Site

pytestmark = pytest.mark.timing

PROMPT = "Once upon a time there was a king who"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(
    tmp_path_factory: pytest.TempPathFactory, forked_daemons: None
) -> AsyncIterator[Client]:
    directory = tmp_path_factory.mktemp("site")
    async with Site(directory, ("a", "b")) as site:
        yield site.client


async def tokens(
    client: Client,
    name: str,
    model: str,
    quantisation: dict[str, str],
    layers: str = "a=0:5,b=5:12",
    stored_as: str = IntegerFormat.INT4,
) -> tuple[int, ...]:
    spec = {"name": name, "model": model, "source": "a", "dtype": "float32", "layers": layers}
    deployment = await client.deploy(
        parse_spec({**spec, "concurrency": 1, "quantisation": quantisation})
    )
    assert deployment.spec.quantisation == (quantisation or {"*": stored_as})
    found = await client.complete(name, PROMPT, max_new_tokens=24)
    await client.delete_deployment(name)
    return tuple(found.token_ids)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_gguf_file_gives_the_tokens_of_the_same_weights_from_safetensors(
    client: Client, tmp_path: Path
) -> None:
    path = write_demo_gguf(tmp_path / "Demo.Q4_0.gguf", everywhere(Type.Q4_0))
    notes: list[str] = []
    await client.add_model(str(path), adding=Adding(on_note=notes.append))
    assert notes == [] and [model.name for model in await client.stored_models()] == ["demo.q4_0"]
    imported = open_gguf(path, tmp_path, Width.INT8, nothing)
    manifest, source = tensors_of(imported)
    numbers = {tensor.name: whole(source.read(tensor.name)).float() for tensor in manifest.tensors}
    plain = write_checkpoint(
        tmp_path / "plain", json.loads((DEMO / "config.json").read_text()), numbers
    )
    for file in imported.checkpoint.files:
        (plain / file.name).write_bytes(file.path.read_bytes())
    await client.add_model(plain)
    expected = await tokens(client, "plain", "plain", {"*": "none"})
    assert len(expected) == 24
    assert await tokens(client, "whole", "demo.q4_0", {"*": "none"}) == expected
    small = await tokens(client, "small", "demo.q4_0", {})
    assert sum(a == b for a, b in zip(small, expected, strict=True)) >= 12, (
        "activations are rounded, weights are not"
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_mixed_types_give_the_same_tokens_over_two_nodes(
    client: Client, tmp_path: Path
) -> None:
    notes: list[str] = []
    path = write_demo_gguf(tmp_path / "Demo.Q4_K_M.gguf", mixed)
    await client.add_model(str(path), adding=Adding(on_note=notes.append))
    assert notes == []
    alone, split = [
        await tokens(client, name, "demo.q4_k_m", {}, layers, "stored")
        for name, layers in (("alone", "a=0:12"), ("split", "a=0:5,b=5:12"))
    ]
    assert len(alone) == 24 and split == alone


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_without_a_tokenizer_is_warned_about(client: Client, tmp_path: Path) -> None:
    directory = tmp_path / "mute"
    directory.mkdir()
    for file in ("config.json", "model.safetensors"):
        (directory / file).write_bytes((DEMO / file).read_bytes())
    notes: list[str] = []
    await client.add_model(directory, adding=Adding(on_note=notes.append))
    assert notes == [
        "mute has no tokenizer.json: it takes prompts and gives answers as token ids only"
    ]
