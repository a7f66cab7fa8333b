"""A tiny Llama checkpoint on disk, a real model store server that records its calls, and a wire
that breaks."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from edgeshard_coordinator.store import ModelStore, ModelStoreServicer
from safetensors.numpy import save_file

from edgeshard.proto.v1 import store_pb2_grpc
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server


def llama_config(layers: int, hidden: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }


def llama_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    vocab = config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden // 2, hidden),
            "self_attn.v_proj": (hidden // 2, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Writes a checkpoint and returns its directory. `extra` adds tensors, `config` overrides keys
    of config.json."""

    def make(
        name: str = "tiny",
        *,
        layers: int = 2,
        hidden: int = 8,
        vocab: int = 16,
        seed: int = 0,
        shards: int = 1,
        extra: dict[str, np.ndarray] | None = None,
        config: dict[str, Any] | None = None,
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        values = llama_config(layers, hidden, vocab)
        tensors = llama_tensors(values, seed) | (extra or {})
        (directory / "config.json").write_text(json.dumps(values | (config or {})))
        (directory / "tokenizer.json").write_text(
            json.dumps({"seed": seed, "model": {"vocab": {}}})
        )
        (directory / "generation_config.json").write_text("{}")
        if shards == 1:
            save_file(tensors, directory / "model.safetensors")
            return directory
        weight_map: dict[str, str] = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {key: tensors[key] for key in list(tensors)[shard::shards]}
            save_file(part, directory / file)
            weight_map |= dict.fromkeys(part, file)
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
        return directory

    return make


class RecordingServicer(ModelStoreServicer):
    """The real servicer, with a record of calls and, on request, one flipped bit in its data."""

    def __init__(self, store: ModelStore) -> None:
        super().__init__(store)
        self.reads: list[tuple[str, int]] = []
        self.served: dict[str, int] = {}
        self.put_bytes = 0
        self.put_offsets: list[int] = []
        self.manifest_calls = 0
        self.damage_reads = 0
        self.silent = False

    async def GetManifest(self, request: Any, context: Any) -> Any:
        self.manifest_calls += 1
        return await super().GetManifest(request, context)

    async def PutBlob(self, request_iterator: Any, context: Any) -> Any:
        async def count() -> AsyncIterator[Any]:
            async for message in request_iterator:
                if message.HasField("header"):
                    self.put_offsets.append(message.header.offset)
                self.put_bytes += len(message.data)
                yield message

        return await super().PutBlob(count(), context)

    async def ReadBlob(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.reads.append((request.sha256, request.offset))
        if self.silent:
            await asyncio.Event().wait()
        damage = self.damage_reads > 0
        self.damage_reads -= damage
        async for message in super().ReadBlob(request, context):
            self.served[request.sha256] = self.served.get(request.sha256, 0) + len(message.data)
            if damage:
                message.data = bytes([message.data[0] ^ 1]) + message.data[1:]
                damage = False
            yield message


class StoreServer:
    """A model store on loopback over the files of `directory`."""

    def __init__(self, directory: Path) -> None:
        self.store = ModelStore(directory)
        self.servicer = RecordingServicer(self.store)
        self.address = ""

    async def start(self) -> StoreServer:
        self.store.open()
        self._server = Server("127.0.0.1:0", None)
        store_pb2_grpc.add_ModelStoreServiceServicer_to_server(self.servicer, self._server.grpc)
        self.address = await self._server.start()
        return self

    async def stop(self) -> None:
        await self._server.stop(0)


class Wire:
    """A TCP relay to `target`. In a direction with a limit it holds back the bytes beyond it, until
    it is broken."""

    def __init__(
        self, target: str, *, hold_down: int | None = None, hold_up: int | None = None
    ) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._left = {"down": hold_down, "up": hold_up}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.broken = asyncio.Event()

    async def start(self) -> str:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def break_now(self) -> None:
        """Reset the connections there are; later ones work and are not held back."""
        if not self.broken.is_set():
            self.broken.set()
            for writer in self._writers:
                writer.transport.abort()

    async def stop(self) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, up_writer]
        for direction, source, sink in (("up", reader, up_writer), ("down", up_reader, writer)):
            task = asyncio.ensure_future(self._relay(direction, source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _relay(
        self, direction: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                left = self._left[direction]
                if left is not None and not self.broken.is_set():
                    self._left[direction] = left - len(data)
                    if left < len(data):
                        await self.broken.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.transport.abort()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits for a condition on files, which have no event to wait on; fails after a minute."""
    return _until


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are added are of another user, or of another disk."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "of another user")

    monkeypatch.setattr("edgeshard.storage.linked.os.link", refused)
    monkeypatch.setattr("edgeshard.storage.linked.fcntl.ioctl", refused)


@pytest.fixture
async def run_store(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[StoreServer]]]:
    servers: list[StoreServer] = []

    async def run(name: str = "coordinator") -> StoreServer:
        server = await StoreServer(tmp_path / name).start()
        servers.append(server)
        return server

    yield run
    for server in servers:
        await server.stop()


@pytest.fixture
async def run_wire() -> AsyncIterator[Callable[..., Awaitable[tuple[Wire, str]]]]:
    wires: list[Wire] = []

    async def run(target: str, **holds: int) -> tuple[Wire, str]:
        wire = Wire(target, **holds)
        wires.append(wire)
        return wire, await wire.start()

    yield run
    for wire in wires:
        await wire.stop()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], grpc.aio.Channel]]:
    channels: list[grpc.aio.Channel] = []

    def open_to(address: str) -> grpc.aio.Channel:
        channels.append(open_channel(address, None))
        return channels[-1]

    yield open_to
    for channel in channels:
        await channel.close()
