"""GGUF files in the mixtures of llama-quantize: their quality, their memory and their speed, next
to llama.cpp's.

Quality is measured with the demo model on text it was not trained on, against the file's own
numbers in float32. It is perplexity, and the rms of the log-probabilities of the ten likeliest
tokens. Speed is of a random Llama on one core. llama.cpp reads the same file, as
`llama-batched-bench`; the two take turns, and a row has the medians. `memory` is the stage's
weights over the file's tensors.

    python -m bench.gguf_mixtures [--llama-cpp DIR] [--logits-by PYTHON] [--mixtures Q4_K_M,...]
                                  [--shapes 316m,1b] [--turns N] [-o FILE]

DIR is a build of llama.cpp (`bench/llama_cpp.py`). PYTHON is an interpreter with the package
llama-cpp-python; its library is that of DIR. Without a build only Q8_0 is measured, which the
package `gguf` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.cached_source import CachedTensorSource
from edgeshard_agent.model.weights.weights import StageWeights

from bench.engine_others import usable_llama_cpp
from bench.engine_stage import BLOCK_TOKENS, DecodingStage
from bench.llama_cpp import head_format, write_gguf, write_quantised
from bench.one_core import (
    CONTEXT,
    PROMPT_TOKENS,
    STEPS,
    STREAMS,
    WORKLOADS,
    Row,
    line,
    measure_llama_cpp,
    take_turns,
)
from bench.quantisation import MODEL, VALIDATION
from bench.random_llama import CONFIG
from bench.safetensors_directory import SafetensorsDirectory
from bench.sizes import sized
from edgeshard.architectures import parse_config
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from edgeshard.importing.blocks import Width
from edgeshard.importing.gguf_file import read_gguf
from edgeshard.importing.gguf_model import open_gguf
from edgeshard.storage.checkpoint import blob_locations, build_manifest

MIXTURES = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS")
SHAPES: dict[str, dict[str, Any]] = {
    "316m": CONFIG,
    "1b": CONFIG
    | {
        "hidden_size": sized(2048, 256),
        "intermediate_size": sized(5632, 512),
        "num_hidden_layers": sized(22, 2),
        "num_attention_heads": sized(32, 4),
        "num_key_value_heads": sized(4, 2),
        "vocab_size": sized(32_000, 512),
    },
}
"""Random models by name; "1b" has the shape of TinyLlama 1.1B."""
TEXTS = sized(16, 1)
TEXT_TOKENS = 180
LIKELIEST = 10


@dataclass(frozen=True, slots=True)
class Model:
    """A GGUF file as a node reads it."""

    config: dict[str, Any]
    source: CachedTensorSource
    stored_as: Quantisation | None

    @property
    def layers(self) -> LayerRange:
        return LayerRange(0, parse_config(self.config).layer_count)

    def stage(self, dtype: DType, quantisation: Quantisation | None) -> StageModel:
        """All layers in one stage, with room for one text."""
        weights = StageWeights.load(
            self.source,
            self.config,
            self.layers,
            dtype=dtype,
            device="cpu",
            quantisation=quantisation,
        )
        return StageModel.with_kv(
            weights, KvMemory(dtype, -(-TEXT_TOKENS // BLOCK_TOKENS), BLOCK_TOKENS)
        )


def opened(path: Path, scratch: Path) -> Model:
    """The model of a file; `scratch` is an empty folder that must stay."""
    scratch.mkdir()
    checkpoint = open_gguf(path, scratch, Width.INT8, lambda what, done, total: None).checkpoint
    manifest = build_manifest("model", checkpoint)
    locations = blob_locations(checkpoint, manifest)
    source = CachedTensorSource(locations.__getitem__, manifest.tensors)
    return Model(dict(manifest.config), source, parse_config(manifest.config).stored_as)


@dataclass(frozen=True, slots=True)
class Quality:
    """How near to a file's own numbers a program is; perplexity of a token."""

    perplexity: float
    rms: float


@dataclass(frozen=True, slots=True)
class File:
    """A file of the demo model. `memory` is bytes of the stage's weights over bytes of the file's
    tensors."""

    mixture: str
    bytes: int
    memory: float
    perplexity: float
    ours: Quality
    llama_cpp: Quality | None


def write_mixture(build: Path | None, source: Path, mixture: str, target: Path) -> None:
    """Write the bfloat16 file `source` in a mixture, by llama-quantize, or Q8_0 by the package
    `gguf`."""
    if build is not None:
        write_quantised(build, source, mixture, target)
        return
    import gguf

    kind = gguf.GGMLQuantizationType[mixture]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(target), "llama")
    for entry in reader.fields.values():
        if not entry.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(entry.name, entry.contents(), entry.types[0])
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def texts() -> np.ndarray:
    """Tokens of text that the demo model has not seen, [TEXTS, TEXT_TOKENS]."""
    ids = Tokenizer.load(MODEL / "tokenizer.json").encode(VALIDATION.read_text(encoding="utf-8"))
    return np.array(ids[: TEXTS * TEXT_TOKENS], dtype=np.int32).reshape(TEXTS, TEXT_TOKENS)


def log_probabilities(stage: StageModel, tokens: np.ndarray) -> torch.Tensor:
    """The log-probabilities of each next token, [texts, tokens, vocabulary] in float32."""
    blocks = tuple(range(-(-tokens.shape[1] // BLOCK_TOKENS)))
    found = []
    for number, text in enumerate(tokens):
        frees = (number - 1,) if number else ()
        span = Span(number, 0, len(text), sampling=Sampling())
        plan = StepPlan(frees, (KvGrant(number, 0, blocks),), (span,))
        found.append(torch.log_softmax(stage.logits(plan, text.astype(np.int64)).float(), -1))
    return torch.stack(found)


def llama_cpp_log_probabilities(
    build: Path, python: str, model: Path, tokens: np.ndarray
) -> torch.Tensor:
    """As `log_probabilities`, by llama.cpp with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "tokens.npy")
        found = Path(folder, "logits.npy")
        np.save(given, tokens)
        program = Path(__file__).with_name("llama_cpp_logits.py")
        environment = {
            **os.environ,
            "LLAMA_CPP_LIB_PATH": str(build),
            "LD_LIBRARY_PATH": str(build),
        }
        # bench has a llama_cpp, too
        command = [
            python,
            "-P",
            str(program),
            str(model),
            str(given),
            str(found),
        ]
        subprocess.run(command, env=environment, capture_output=True, timeout=600, check=True)
        return torch.log_softmax(torch.from_numpy(np.load(found)), -1)


def perplexity(found: torch.Tensor, tokens: np.ndarray) -> float:
    """The perplexity of the texts' tokens except the first."""
    following = torch.from_numpy(tokens[:, 1:].astype(np.int64))
    return float(torch.exp(-found[:, :-1].gather(-1, following[..., None]).mean()))


def quality(found: torch.Tensor, exact: torch.Tensor, tokens: np.ndarray) -> Quality:
    places = exact.topk(LIKELIEST, -1).indices
    difference = found.gather(-1, places) - exact.gather(-1, places)
    return Quality(perplexity(found, tokens), float(difference.square().mean().sqrt()))


def measure_quality(
    build: Path | None, python: str | None, mixtures: Sequence[str], folder: Path
) -> list[File]:
    """A row for each mixture of the demo model."""
    config = json.loads((MODEL / "config.json").read_text())
    write_gguf(folder / "demo.gguf", config, SafetensorsDirectory(MODEL))
    tokens = texts()
    files = []
    for mixture in mixtures:
        path = folder / f"demo-{mixture}.gguf"
        write_mixture(build, folder / "demo.gguf", mixture, path)
        model = opened(path, folder / f"demo-{mixture}")
        exact = log_probabilities(model.stage(DType.FLOAT32, None), tokens)
        stage = model.stage(DType.BFLOAT16, model.stored_as)
        size = sum(tensor.size for tensor in read_gguf(path).tensors.values())
        theirs = None
        if build is not None and python is not None:
            theirs = quality(
                llama_cpp_log_probabilities(build, python, path, tokens), exact, tokens
            )
        ours = quality(log_probabilities(stage, tokens), exact, tokens)
        files.append(
            File(
                mixture, size, stage.parameter_bytes / size, perplexity(exact, tokens), ours, theirs
            )
        )
        print(quality_line(files[-1]), flush=True)
    return files


def measure_speed(
    build: Path | None, mixture: str, shape: str, turns: int, core: int, folder: Path
) -> list[Row]:
    """The rows of one file; ours and llama.cpp's in turns."""
    source = folder / f"{shape}.gguf"
    if not source.exists():
        write_gguf(source, SHAPES[shape])
    path = folder / f"{shape}-{mixture}.gguf"
    write_mixture(build, source, mixture, path)
    model = opened(path, folder / f"{shape}-{mixture}")
    stage = DecodingStage(
        model.layers,
        max(STREAMS),
        CONTEXT,
        STEPS,
        max_prompt=PROMPT_TOKENS,
        quantisation=model.stored_as,
        config=model.config,
        source=model.source,
    )
    head = head_format(path)
    rows = [Row(f"{mixture} {shape} ", workload, head, head) for workload in WORKLOADS]
    take_turns(
        rows, stage, turns, None if build is None else lambda: measure_llama_cpp(build, path, core)
    )
    path.unlink()
    for row in rows:
        print(line(row), flush=True)
    return rows


def quality_line(row: File) -> str:
    text = (
        f"{row.mixture:<8}{row.bytes / 1e6:>7.2f} MB, memory {row.memory:.3f}, perplexity "
        f"{row.perplexity:.3f}; "
    )
    text += f"ours {row.ours.perplexity:.3f}, rms {row.ours.rms:.4f}"
    if row.llama_cpp is not None:
        text += f"; llama.cpp {row.llama_cpp.perplexity:.3f}, rms {row.llama_cpp.rms:.4f}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help="the folder of its llama-quantize"
    )
    parser.add_argument(
        "--logits-by", metavar="PYTHON", help="an interpreter with llama-cpp-python"
    )
    parser.add_argument(
        "--mixtures", default=",".join(MIXTURES), metavar="NAME,...", help="default: %(default)s"
    )
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), metavar="NAME,...", help="default: %(default)s"
    )
    parser.add_argument(
        "--turns", type=int, default=sized(5, 1), metavar="N", help="default: %(default)s"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file for the JSON")
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    build = usable_llama_cpp(options.llama_cpp)
    mixtures = options.mixtures.split(",") if build is not None else ["Q8_0"]
    rates = []
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-gguf-") as scratch:
        folder = Path(scratch)
        files = measure_quality(build, options.logits_by, mixtures, folder)
        for shape in filter(None, options.shapes.split(",")):
            for mixture in mixtures:
                rates += measure_speed(build, mixture, shape, options.turns, core, folder)
    if options.output:
        found = {
            "files": [asdict(row) for row in files],
            "rates": [asdict(row) | {"ratio": row.ratio} for row in rates],
        }
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
