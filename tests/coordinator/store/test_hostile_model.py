"""A model directory that means harm: nothing of it runs, nothing leaves the machine, and it is
refused at once."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.store.models import _PARSED_BYTES

from edgeshard.client.uploads import add_model
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError, UnsupportedModelError
from edgeshard.domain.models.model import ModelManifest
from edgeshard.proto.v1 import store_pb2 as pb
from edgeshard.proto.v1.store_pb2_grpc import ModelStoreServiceStub
from edgeshard.storage import checkpoint
from edgeshard.storage.checkpoint import build_manifest, open_checkpoint
from edgeshard.wire.status import from_rpc_error
from edgeshard.wire.store import manifest_to_wire
from tests.support.tokenizers import PANICS, write_tokenizer

MakeCheckpoint = Callable[..., Path]
RunStore = Callable[..., Awaitable[Any]]
Connect = Callable[[str], grpc.aio.Channel]
REFUSED_WITHIN_S = 2.0
CANARY = "canary-of-this-machine"


def payload(trace: Path) -> bytes:
    """A pickle that makes a directory when it is read."""
    return f"cos\nmkdir\n(V{trace}\ntR.".encode()


def changed_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def linked(directory: Path, name: str, to: Path) -> None:
    (directory / name).unlink()
    (directory / name).symlink_to(to)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


EVIL = {"AutoConfig": "modeling.EvilConfig", "AutoModelForCausalLM": "modeling.Evil"}
HARM: dict[str, Callable[[Path, Path, Path], object]] = {
    "code": lambda model, secret, trace: changed_config(model, model_type="evil", auto_map=EVIL),
    "pickled weights": lambda model, secret, trace: (model / "model.safetensors").rename(
        model / "pytorch_model.bin"
    ),
    "a link to a secret": lambda model, secret, trace: linked(model, "tokenizer.json", secret),
    "a link as settings": lambda model, secret, trace: linked(
        model, "generation_config.json", secret
    ),
    "a link as config": lambda model, secret, trace: linked(model, "config.json", secret),
    "a link as weights": lambda model, secret, trace: linked(model, "model.safetensors", secret),
    "a secret as tokenizer": lambda model, secret, trace: (model / "tokenizer.json").write_text(
        secret.read_text()
    ),
    "a device": lambda model, secret, trace: linked(model, "tokenizer.json", Path("/dev/zero")),
    "a pipe": lambda model, secret, trace: pipe(model / "generation_config.json"),
    "a tokenizer that panics": lambda model, secret, trace: write_tokenizer(
        model / "tokenizer.json", **PANICS["load"]
    ),
    "a tokenizer of 4 GiB": lambda model, secret, trace: write_tokenizer(
        model / "tokenizer.json",
        normalizer={"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="},
    ),
    "layers": lambda model, secret, trace: changed_config(model, num_hidden_layers=10**9),
    "widths": lambda model, secret, trace: changed_config(model, hidden_size=2**31 - 1),
    "a vocabulary": lambda model, secret, trace: changed_config(model, vocab_size=2**31 - 1),
    "a context": lambda model, secret, trace: changed_config(model, max_position_embeddings=2**40),
    "heads": lambda model, secret, trace: changed_config(
        model, num_attention_heads=2**20, head_dim=2**20
    ),
    "experts": lambda model, secret, trace: changed_config(
        model,
        model_type="qwen3_moe",
        num_hidden_layers=1024,
        num_experts=1024,
        moe_intermediate_size=16,
    ),
    "a digit too many": lambda model, secret, trace: (model / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}"
    ),
    "a deep config": lambda model, secret, trace: (model / "config.json").write_text(
        '{"a":' * 100_000
    ),
    "a header of lists": lambda model, secret, trace: write_header(
        model, b'{"a":[' + b"[]," * (10 << 20) + b"0]}"
    ),
}


def write_header(model: Path, header: bytes) -> None:
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.fixture
def places(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model next to code and a pickle that would run, a secret of the machine, and the path where
    executed code would leave a trace.
    """
    model = make_checkpoint("model")
    secret = tmp_path / "secret"
    trace = tmp_path / "trace"
    secret.write_text(json.dumps({"private_key": CANARY}))
    (model / "modeling.py").write_text(f"import os\nos.mkdir({str(trace)!r})\n")
    (model / "pytorch_model-1.bin").write_bytes(payload(trace))
    return model, secret, trace


@pytest.mark.parametrize("harm", HARM)
async def test_a_hostile_model_is_refused_at_once_and_nothing_is_sent(
    places: tuple[Path, Path, Path],
    run_store: RunStore,
    connect: Connect,
    tmp_path: Path,
    harm: str,
) -> None:
    model, _, trace = places
    HARM[harm](*places)
    server = await run_store()
    began = time.process_time()
    with pytest.raises(EdgeShardError) as caught:
        await asyncio.wait_for(add_model(connect(server.address), model, "model"), 60)
    assert time.process_time() - began < REFUSED_WITHIN_S
    error = caught.value
    assert error.field and type(error) is not EdgeShardError
    assert CANARY not in error.message and len(error.message) < 1000
    assert server.servicer.put_bytes == 0 and not server.store.list() and not trace.exists()
    assert not [path for path in (tmp_path / "coordinator").rglob("*") if path.is_file()]


async def test_code_and_pickles_beside_good_weights_are_left_alone(
    places: tuple[Path, Path, Path], run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    model, _, trace = places
    changed_config(model, auto_map=EVIL)
    server = await run_store()
    await add_model(connect(server.address), model, "model")
    assert not trace.exists()
    (manifest, _), *others = server.store.list()
    assert not others and {file.name for file in manifest.files} == {
        "tokenizer.json",
        "generation_config.json",
    }
    code = (model / "modeling.py").read_bytes()
    assert all(
        path.read_bytes() != code
        for path in (tmp_path / "coordinator").rglob("*")
        if path.is_file()
    )


# -- a client that checks nothing ------------------------------------------------------------------


def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "check_small_file", lambda name, data: None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "root:x:0:0:root:/root:/bin/bash\n"),
        ("tokenizer.json", json.dumps({"private_key": CANARY})),
        ("tokenizer.json", "x" * (_PARSED_BYTES + 1)),
        ("tokenizer.json", "[" + " " * (2 * _PARSED_BYTES)),
        ("generation_config.json", "not json"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
    ],
    ids=lambda value: value[:24],
)
async def test_the_coordinator_looks_at_small_files_itself(
    make_checkpoint: MakeCheckpoint,
    run_store: RunStore,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
) -> None:
    trusting(monkeypatch)
    model = make_checkpoint("model")
    (model / name).write_text(text)
    manifest = build_manifest("model", open_checkpoint(model))
    server = await run_store()
    with pytest.raises(InvalidArgumentError) as caught:
        await add_model(connect(server.address), model, "model")
    assert caught.value.field == name and not server.store.list()
    digest = next(file.sha256 for file in manifest.files if file.name == name)
    assert server.store.blobs.size(digest) is None, "and nobody can read it back"


async def registration_error(
    connect: Connect, address: str, manifest: ModelManifest
) -> EdgeShardError:
    stub = ModelStoreServiceStub(connect(address))
    began = time.process_time()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.RegisterModel(pb.RegisterModelRequest(manifest=manifest_to_wire(manifest)))
    assert time.process_time() - began < REFUSED_WITHIN_S
    return from_rpc_error(caught.value)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": 2**31 - 1}, "hidden_size"),
        ({"vocab_size": 10**9}, "vocab_size"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 1024, "num_experts": 1024,
          "moe_intermediate_size": 8}, "num_experts"),
        ({"rope_scaling": {"x" * 500_000: "y"}, "hidden_act": "z" * 400_000}, "hidden_act"),
    ],
)  # fmt: skip
async def test_the_coordinator_refuses_absurd_numbers_itself(
    make_checkpoint: MakeCheckpoint,
    run_store: RunStore,
    connect: Connect,
    values: dict[str, Any],
    field: str,
) -> None:
    """Also those with a message that would not fit into a status."""
    manifest = build_manifest("model", open_checkpoint(make_checkpoint("model")))
    config = json.loads(manifest.config_json) | values
    server = await run_store()
    error = await registration_error(
        connect, server.address, replace(manifest, config_json=json.dumps(config))
    )
    assert isinstance(error, UnsupportedModelError | InvalidArgumentError) and error.field == field


async def test_the_store_takes_no_other_files(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect
) -> None:
    manifest = build_manifest("model", open_checkpoint(make_checkpoint("model")))
    other = replace(manifest.files[0], name="id_rsa")
    server = await run_store()
    error = await registration_error(
        connect, server.address, replace(manifest, files=(*manifest.files, other))
    )
    assert error.field == "id_rsa" and error.reason == "INVALID_MANIFEST"
