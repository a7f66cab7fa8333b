"""GGUF models by llama.cpp's converter and quantiser (tools/make_gguf_models.py), compared with transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.projection import whole
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from edgeshard.architectures import read_config
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from edgeshard.importing.blocks import Width
from edgeshard.importing.gguf_model import open_gguf
from tests.support.imports import nothing, tensors_of

MODELS = Path(__file__).parent / "gguf"
NAMES = ("dense", "head_norms", "unit_norms", "mixture", "hybrid")
LENGTH, BLOCK = 24, 16
CLEAR = 1e-3
"""A difference of two log-probabilities that decides which token is greedy."""


class Oracle:
    """The checkpoint that transformers would have of a file: its converter's changes undone here, once more."""

    def __init__(self, directory: Path) -> None:
        self.config = transformers.AutoConfig.from_pretrained(directory)
        reader = gguf.GGUFReader(directory / "model.gguf")
        self._file = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
        kind = reader.fields["general.architecture"].contents()
        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
        self._names = gguf.get_tensor_name_map(number, self.config.num_hidden_layers)
        self._kind = kind

    def model(self) -> torch.nn.Module:
        made = transformers.AutoModelForCausalLM.from_config(
            self.config, dtype=torch.float32, attn_implementation="eager"
        )
        state = {name: self.tensor(name, tuple(value.shape)) for name, value in made.state_dict().items()}
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
            heads = self.config.num_attention_heads if part[1] == "q" else self.config.num_key_value_heads
            return found.reshape(heads, -1, 2, found.shape[1]).swapaxes(1, 2).reshape(found.shape)
        if self._kind in ("gemma3", "qwen35") and re.search(r"(?<!linear_attn\.)norm\.weight$", name):
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
        return np.concatenate((found[:before], self._rows_grouped(found[before:], keys, values, width)))

    def _rows_grouped(self, rows: np.ndarray, keys: int, values: int, width: int) -> np.ndarray:
        apart = rows.reshape(values // keys, keys, width, *rows.shape[1:])
        return apart.swapaxes(0, 1).reshape(rows.shape)


@pytest.fixture(scope="module", params=NAMES)
def directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    torch.set_num_threads(1)
    yield MODELS / request.param


def test_weights_are_bitwise_those_of_the_file(directory: Path, tmp_path: Path) -> None:
    oracle = Oracle(directory)
    expected = {name.removeprefix("model."): value for name, value in oracle.model().state_dict().items()}
    manifest, source = tensors_of(open_gguf(directory / "model.gguf", tmp_path, Width.FLOAT32, nothing))
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
            continue  # the value heads stay in the file's order; the tokens show whether that is right
        else:
            value = expected[name]
        assert torch.equal(found.view(value.shape), value), name
        checked += 1
    assert checked > 10


def logits_of(path: Path, scratch: Path, ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] with whole weights and activations of float32."""
    manifest, source = tensors_of(open_gguf(path, scratch, Width.FLOAT32, nothing))
    shape = read_config(manifest.config).shape
    layers = LayerRange(0, shape.layer_count)
    weights = StageWeights.load(source, manifest.config, layers, dtype=DType.FLOAT32, device="cpu")
    stage = StageModel.with_kv(weights, KvMemory(DType.FLOAT32, 4, BLOCK, slots=1))
    slot = 0 if any(shape.states) else None
    grant = KvGrant(0, 0, tuple(range(-(-len(ids) // BLOCK))), slot=slot)
    span = Span(0, 0, len(ids), sample=True, sampling=Sampling())
    return stage.logits(StepPlan(grants=(grant,), spans=(span,)), np.array(ids)).float().clone()


def test_tokens_are_those_of_transformers(directory: Path, tmp_path: Path) -> None:
    model = Oracle(directory).model()
    ids = torch.randint(0, model.config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(5))
    while ids.shape[1] < LENGTH:  # greedily, so that the log-probabilities of all its tokens are compared
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    found = logits_of(directory / "model.gguf", tmp_path, ids[0].tolist()).log_softmax(-1)
    assert (found - expected).abs().max() < 1e-4
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLEAR
    assert clear.sum() > LENGTH // 2
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


def test_tokenizers_give_the_ids_of_the_model_s_own(directory: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    imported = open_gguf(directory / "model.gguf", tmp_path, Width.INT8, nothing)
    files = {file.name: file.path for file in imported.checkpoint.files}
    found, own = Tokenizer.from_file(str(files["tokenizer.json"])), Tokenizer.from_file(str(directory / "tokenizer.json"))
    for token in ("<tool_call>", "<|im_start|>"):
        assert found.token_to_id(token) == own.token_to_id(token)
    text = "<|im_start|>user\nsay hello<|im_end|>"
    assert found.decode(found.encode(text, add_special_tokens=False).ids) is not None
    settings = json.loads(files["tokenizer_config.json"].read_text())
    assert "<tool_call>" in settings["chat_template"] and settings["eos_token"] == "<|endoftext|>"
