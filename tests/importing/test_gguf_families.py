"""GGUF models by llama.cpp's converter and quantiser (tools/make_gguf_models.py), compared with
transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.projection import whole
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from edgeshard.architectures import parse_config, read_config
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError, UnsupportedModelError
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from edgeshard.importing.blocks import Width
from edgeshard.importing.gguf_model import open_gguf
from edgeshard.importing.imported import Imported
from tests.support.imports import nothing, tensors_of

MODELS = Path(__file__).parent / "gguf"
NAMES = ("dense", "head_norms", "unit_norms", "mixture", "hybrid")
LENGTH, BLOCK = 24, 16
CLEAR = 1e-3
"""A difference of two log-probabilities that decides which token is greedy."""


class Oracle:
    """The checkpoint that transformers would have of a file: its converter's changes undone here,
    once more."""

    def __init__(self, directory: Path) -> None:
        self.config = transformers.AutoConfig.from_pretrained(directory)
        reader = gguf.GGUFReader(directory / "model.gguf")
        self._file = {t.name: gguf.dequantize(t.data, t.tensor_type).copy() for t in reader.tensors}
        kind = reader.fields["general.architecture"].contents()
        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
        self._names = gguf.get_tensor_name_map(number, self.config.num_hidden_layers)
        self._kind = kind

    def model(self) -> Any:
        made: Any = transformers.AutoModelForCausalLM.from_config(
            self.config, dtype=torch.float32, attn_implementation="eager"
        )
        state = {
            name: self.tensor(name, tuple(value.shape)) for name, value in made.state_dict().items()
        }
        made.load_state_dict(state)
        return made.eval()

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        found = self._numbers(name)
        assert found.size == np.prod(shape), name
        return torch.from_numpy(np.ascontiguousarray(found.reshape(shape)))

    def _numbers(self, name: str) -> np.ndarray:
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            both = (self._file[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up"))
            return np.concatenate(list(both), 1)
        if name.endswith("experts.down_proj"):
            return self._file[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"]
        if name == "lm_head.weight":
            return self._file.get("output.weight", self._file["token_embd.weight"])
        if name.endswith("dt_bias"):
            return self._grouped(name, self._file[f"blk.{name.split('.')[2]}.ssm_dt.bias"])
        stored = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        found = self._file[stored]
        if self._kind == "llama" and (part := re.search(r"\.([qk])_proj\.", name)):
            heads = (
                self.config.num_attention_heads
                if part[1] == "q"
                else self.config.num_key_value_heads
            )
            return found.reshape(heads, -1, 2, found.shape[1]).swapaxes(1, 2).reshape(found.shape)
        if self._kind in ("gemma3", "qwen35") and re.search(
            r"(?<!linear_attn\.)norm\.weight$", name
        ):
            return found - np.float32(1)
        if name.endswith("A_log"):
            return self._grouped(name, np.log(-found))
        return self._grouped(name, found) if ".linear_attn." in name else found

    def _grouped(self, name: str, found: np.ndarray) -> np.ndarray:
        """Value heads that share a key head next to each other; the file has them in turn."""
        keys, values = self.config.linear_num_key_heads, self.config.linear_num_value_heads
        width = self.config.linear_value_head_dim
        part = name.split("linear_attn.")[1].removesuffix(".weight")
        if part == "norm":
            return found
        if part == "out_proj":
            return self._rows_grouped(found.T, keys, values, width).T
        if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
            return self._rows_grouped(found, keys, values, 1)
        before = len(found) - values * width
        return np.concatenate(
            (found[:before], self._rows_grouped(found[before:], keys, values, width))
        )

    def _rows_grouped(self, rows: np.ndarray, keys: int, values: int, width: int) -> np.ndarray:
        apart = rows.reshape(values // keys, keys, width, *rows.shape[1:])
        return apart.swapaxes(0, 1).reshape(rows.shape)


@pytest.fixture(scope="module", params=NAMES)
def directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    torch.set_num_threads(1)
    yield MODELS / request.param


def test_weights_are_bitwise_those_of_the_file(directory: Path, tmp_path: Path) -> None:
    oracle = Oracle(directory)
    expected = {
        name.removeprefix("model."): value for name, value in oracle.model().state_dict().items()
    }
    manifest, source = tensors_of(
        open_gguf(directory / "model.gguf", tmp_path, Width.FLOAT32, nothing)
    )
    checked = 0
    for tensor in manifest.tensors:
        name = tensor.name.removeprefix("model.")
        found = whole(source.read(tensor.name)).float()
        expert = re.fullmatch(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if expert is not None:
            stacked = "down_proj" if expert[3] == "down" else "gate_up_proj"
            value = expected[f"{expert[1]}.{stacked}"][int(expert[2])]
            if stacked == "gate_up_proj":
                value = value.chunk(2)[expert[3] == "up"]
        elif ".linear_attn." in name and not name.endswith("norm.weight"):
            # the value heads stay in the file's order; the tokens show whether that is right
            continue
        else:
            value = expected[name]
        assert torch.equal(found.view(value.shape), value), name
        checked += 1
    assert checked > 10


def logits_of(
    imported: Imported, ids: list[int], quantisation: Quantisation | None = None
) -> torch.Tensor:
    """[tokens, vocabulary] with activations of float32, and with whole weights unless
    `quantisation` is given."""
    manifest, source = tensors_of(imported)
    shape = read_config(manifest.config).shape
    layers = LayerRange(0, shape.layer_count)
    weights = StageWeights.load(
        source,
        manifest.config,
        layers,
        dtype=DType.FLOAT32,
        device="cpu",
        quantisation=quantisation,
    )
    stage = StageModel.with_kv(weights, KvMemory(DType.FLOAT32, 4, BLOCK, slots=1))
    slot = 0 if any(shape.states) else None
    grant = KvGrant(0, 0, tuple(range(-(-len(ids) // BLOCK))), slot=slot)
    span = Span(0, 0, len(ids), sample=True, sampling=Sampling())
    return stage.logits(StepPlan(grants=(grant,), spans=(span,)), np.array(ids)).float().clone()


def test_tokens_are_those_of_transformers(directory: Path, tmp_path: Path) -> None:
    model = Oracle(directory).model()
    ids = torch.randint(
        0, model.config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(5)
    )
    # greedily, so that the log-probabilities of all its tokens are compared
    while ids.shape[1] < LENGTH:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    imported = open_gguf(directory / "model.gguf", tmp_path, Width.FLOAT32, nothing)
    found = logits_of(imported, ids[0].tolist()).log_softmax(-1)
    assert (found - expected).abs().max() < 1e-4
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR
    assert clear.sum() > LENGTH // 2
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


def test_a_default_run_keeps_the_formats_and_is_near(directory: Path, tmp_path: Path) -> None:
    """Kernels round activations to 8 bits; types without kernels are rounded to int8."""
    model = Oracle(directory).model()
    ids = torch.randint(
        0, model.config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(7)
    )
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    imported = open_gguf(directory / "model.gguf", tmp_path, Width.INT8, nothing)
    stored_as = parse_config(imported.checkpoint.config).stored_as
    assert stored_as is Quantisation.STORED
    found = logits_of(imported, ids[0].tolist(), stored_as).log_softmax(-1)
    assert (found - expected).pow(2).mean().sqrt() < 0.05


def test_the_tokenizer_is_the_model_s_own(directory: Path, tmp_path: Path) -> None:
    imported = open_gguf(directory / "model.gguf", tmp_path, Width.INT8, nothing)
    files = {file.name: file.path for file in imported.checkpoint.files}
    found = json.loads(files["tokenizer.json"].read_text())
    own = json.loads((MODELS / "tokenizer.json").read_text())
    assert found["model"]["vocab"] == own["model"]["vocab"]
    assert found["model"]["merges"] == own["model"]["merges"]
    settings = json.loads(files["tokenizer_config.json"].read_text())
    assert "<tool_call>" in settings["chat_template"] and settings["eos_token"] == "<|endoftext|>"
    special = {token["content"]: token["special"] for token in found["added_tokens"]}
    assert special["<|im_end|>"] and not special["<tool_call>"], "answers write calls with it"


def rewritten(
    path: Path, out: Path, metadata: dict[str, int], tensors: dict[str, np.ndarray]
) -> Path:
    """A copy of a file with further tensors, and with other numbers in its metadata."""
    reader = gguf.GGUFReader(path)
    kind = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, kind)
    for field in reader.fields.values():
        if field.name.startswith(("GGUF.", "general.architecture")) or field.name in metadata:
            continue
        inside = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inside)
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, numbers in tensors.items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_blocks_for_further_tokens_and_weights_for_pictures_are_left_out(tmp_path: Path) -> None:
    plain = MODELS / "hybrid" / "model.gguf"
    numbers = np.ones((256, 256), np.float32)
    metadata = {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1}
    further = {
        "blk.2.nextn.eh_proj.weight": numbers,
        "blk.2.attn_q.weight": numbers,
        "v.patch_embd.weight": numbers,
    }
    path = rewritten(plain, tmp_path / "model.gguf", metadata, further)
    (tmp_path / "mmproj-model.gguf").write_bytes(b"")
    found = open_gguf(path, tmp_path, Width.INT8, nothing)
    assert set(found.notes) >= {
        "its blocks for predicting further tokens (0.5 MiB) are left out",
        "only its text is run: its weights for pictures and sound (0.2 MiB) are left out",
        "only its text is run: mmproj-model.gguf, for pictures, is left out",
    }
    scratch = tmp_path / "plain"
    scratch.mkdir()
    expected = open_gguf(plain, scratch, Width.INT8, nothing)
    names = {tensor.name for tensor in expected.checkpoint.tensors}
    assert {tensor.name for tensor in found.checkpoint.tensors} == names


def test_a_file_for_pictures_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_string("general.type", "mmproj")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError, match=r"mmproj\.gguf has only the part .* that reads pictures"
    ):
        open_gguf(tmp_path / "mmproj.gguf", tmp_path, Width.INT8, nothing)


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("blk.0.attn_gate.weight", np.ones((4, 256), np.float32), "has no place in a qwen3moe"),
        ("blk.0.exp_probs_b.bias", np.ones(6, np.float32), "has no place in a qwen3moe"),
        ("token_embd_norm.weight", np.ones(256, np.float32), "two tensors for norm.weight"),
    ],
)
def test_a_tensor_too_many_is_refused_by_name(
    name: str, numbers: np.ndarray, message: str, tmp_path: Path
) -> None:
    path = rewritten(
        MODELS / "mixture" / "model.gguf", tmp_path / "model.gguf", {}, {name: numbers}
    )
    with pytest.raises(EdgeShardError, match=message) as error:
        open_gguf(path, tmp_path, Width.INT8, nothing)
    assert error.value.field == name


def test_metadata_cannot_make_lists_that_the_file_does_not_justify(tmp_path: Path) -> None:
    metadata = {"qwen35.block_count": 2**31}
    path = rewritten(MODELS / "hybrid" / "model.gguf", tmp_path / "model.gguf", metadata, {})
    with pytest.raises(
        InvalidArgumentError, match=r"block_count is 2147483648; EdgeShard runs at most"
    ):
        open_gguf(path, tmp_path, Width.INT8, nothing)


def test_a_shape_that_contradicts_the_metadata_is_refused(tmp_path: Path) -> None:
    metadata = {"qwen3moe.expert_feed_forward_length": 64}
    path = rewritten(MODELS / "mixture" / "model.gguf", tmp_path / "model.gguf", metadata, {})
    with pytest.raises(
        InvalidArgumentError, match=r"blk\.0\.ffn_down_exps\.weight .* its metadata need"
    ):
        open_gguf(path, tmp_path, Width.INT8, nothing)


def test_experts_are_byte_ranges_of_the_file(tmp_path: Path) -> None:
    path = MODELS / "mixture" / "model.gguf"
    experts = [
        t
        for t in open_gguf(path, tmp_path, Width.INT8, nothing).checkpoint.tensors
        if ".experts." in t.name
    ]
    in_place = [tensor for tensor in experts if tensor.file == path.resolve()]
    kept = {"Q4_K", "Q5_K", "IQ4_XS", "Q8_0"}
    stacked = [
        t for t in gguf.GGUFReader(path).tensors if "_exps" in t.name and t.tensor_type.name in kept
    ]
    assert len(in_place) >= 6 * len(stacked) > 0
