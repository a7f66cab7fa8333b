"""llama.cpp with the same random weights, for `bench.engine` (its RPC backend) and
`bench.one_core`.

A build is a folder with `ggml-rpc-server` and `llama-batched-bench`, and `llama-quantize` for
weights as integers:

    cmake -S llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_RPC=ON
    cmake --build build --target ggml-rpc-server llama-batched-bench llama-quantize

The weights are written with the `gguf` package, which only this needs.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from bench.random_llama import CONFIG, RandomWeights

if TYPE_CHECKING:
    import torch

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_SERVER_READY_S = 20.0
QUANTISED = {"int8": "Q8_0", "int4": "Q4_0"}
"""llama.cpp's formats that are compared with our weights as integers, by the name of ours."""


@dataclass(frozen=True, slots=True)
class Rate:
    """`streams` streams at once: tokens a second while generating, and seconds of the prompts
    before."""

    streams: int
    tokens_per_s: float
    prompt_s: float


def is_build(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("ggml-rpc-server", "llama-batched-bench"))


def has_quantiser(folder: Path) -> bool:
    """True if the build can write weights as integers."""
    return (folder / "llama-quantize").is_file()


def quantise(folder: Path, source: Path, dtype: str, target: Path) -> str:
    """Write the model of `source`, in bfloat16, as the format of `dtype`. Returns the format of its
    LM head.

    The build chooses the head's format: Q6_K with Q4_0, while our head is int8. So the two are not
    the same mixture.
    """
    write_quantised(folder, source, QUANTISED[dtype], target)
    return head_format(target)


def write_quantised(folder: Path, source: Path, mixture: str, target: Path) -> None:
    """Write the model of `source` in a mixture of types that llama-quantize knows, such as
    "Q4_K_M"."""
    command = [str(folder / "llama-quantize"), str(source), str(target), mixture, "1"]
    subprocess.run(command, env=_environment(folder), capture_output=True, timeout=1800, check=True)


def head_format(path: Path) -> str:
    """The format of the LM head's weights, such as "Q6_K"."""
    import gguf

    (head,) = (tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "output.weight")
    return gguf.GGMLQuantizationType(head.tensor_type).name


def write_gguf(path: Path, config: dict[str, Any] = CONFIG, weights: Weights | None = None) -> None:
    """Write a Llama in bfloat16, without a tokenizer; without `weights` they are random ones of
    this config.

    llama.cpp rotates neighbouring rows of queries and keys, a checkpoint rows half a head apart:
    they change places.
    """
    import gguf
    import torch

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    weights = weights or RandomWeights(config)
    for name in weights.names():
        tensor = weights.read(name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = tensor.view(-1, 2, config["head_dim"] // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if tensor.dim() == 1:
            writer.add_tensor(_gguf_name(name), tensor.float().numpy())
        else:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(_gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}"


class Weights(Protocol):
    """A checkpoint's tensors by their names."""

    def names(self) -> Collection[str]: ...

    def read(self, name: str) -> torch.Tensor: ...


class LlamaCppRpc:
    """Two servers of one thread and one core each, which run while the `with` lasts."""

    def __init__(self, folder: Path, model: Path, cores: Sequence[int]) -> None:
        self._folder = folder
        self._model = model
        self._cores = tuple(cores)
        self._servers: list[subprocess.Popen[bytes]] = []
        self._ports: list[int] = []

    def __enter__(self) -> LlamaCppRpc:
        for core in self._cores:
            port = _free_port()
            command = [
                str(self._folder / "ggml-rpc-server"),
                "-t",
                "1",
                "-H",
                "127.0.0.1",
                "-p",
                str(port),
            ]
            self._servers.append(self._started(command, core))
            self._ports.append(port)
        for port in self._ports:
            _wait_listening(port)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.wait(10)

    def rates(self, prompt_tokens: int, new_tokens: int, streams: Sequence[int]) -> list[Rate]:
        """As `llama-batched-bench` prints them, each number of streams once."""
        servers = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return batched_bench(
            self._folder,
            self._model,
            prompt_tokens,
            new_tokens,
            streams,
            ("--rpc", servers, "-ngl", "99"),
        )

    def _started(self, command: list[str], core: int) -> subprocess.Popen[bytes]:
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(
            ["taskset", "-c", str(core), *command], env=_environment(self._folder), **quiet
        )


def batched_bench(
    folder: Path,
    model: Path,
    prompt_tokens: int,
    new_tokens: int,
    streams: Sequence[int],
    options: Sequence[str] = (),
    core: int | None = None,
) -> list[Rate]:
    """The rates of one thread by `llama-batched-bench`, on one core if it is given."""
    context = max(streams) * (prompt_tokens + new_tokens)
    command = [str(folder / "llama-batched-bench"), "-m", str(model), "-t", "1", "-tb", "1"]
    command += ["-c", str(context), "-npp", str(prompt_tokens), "-ntg", str(new_tokens)]
    command += ["-npl", ",".join(map(str, streams)), "--output-format", "jsonl", *options]
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=_environment(folder), timeout=600, check=True
    )
    # A row may follow log output on the same line.
    rows = [json.loads(text) for text in re.findall(r"{.*}", ended.stdout)]
    return [Rate(int(row["pl"]), float(row["speed_tg"]), float(row["t_pp"])) for row in rows]


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_listening(port: int) -> None:
    give_up = time.monotonic() + _SERVER_READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
