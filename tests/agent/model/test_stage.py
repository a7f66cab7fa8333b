"""One stage: its input, its memory, its refusals, and its output."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.tensors import TORCH_DTYPES, bytes_to_hidden, hidden_to_bytes
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops.linear import PackedLinear
from edgeshard_agent.ops.native import native_available
from safetensors.torch import load_file, save_file

from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.architectures import architecture_named, held_bytes, stage_tensors
from edgeshard.domain.errors import (
    DataLossError,
    EdgeShardError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnsupportedModelError,
)
from edgeshard.domain.models.dtypes import ROUNDED, DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StageFilling, WeightLoadingWork
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan, StepResult
from tests.support.sizes import parameter_bytes

RANGES = [LayerRange(0, 2), LayerRange(1, 3), LayerRange(2, 4), LayerRange(0, 4)]


class RecordingSource:
    """A source that records reads, and may hide or change one tensor."""

    def __init__(self, inner: SafetensorsDirectory, hidden: str = "", changed: str = "") -> None:
        self._inner = inner
        self._hidden = hidden
        self._changed = changed
        self.read_names: list[str] = []

    def names(self) -> Collection[str]:
        return [name for name in self._inner.names() if name != self._hidden]

    def read(self, name: str) -> torch.Tensor:
        self.read_names.append(name)
        tensor = self._inner.read(name)
        return tensor[..., :-1] if name == self._changed else tensor


def load(checkpoint: Any, source: Any, layers: LayerRange, **options: Any) -> StageModel:
    kv = KvMemory(options.pop("kv_dtype", DType.FLOAT32), options.pop("kv_blocks", 4), 4, slots=4)
    weights = {"dtype": DType.FLOAT32, "device": "cpu"} | options
    return StageModel.with_kv(StageWeights.load(source, checkpoint.config, layers, **weights), kv)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("broken", [0, 1], ids=["in the first stage", "in the second"])
@pytest.mark.one_in(10)
def test_numbers_that_are_not_finite_are_an_error_that_names_the_layers(
    checkpoint: Any, broken: int, bad: float
) -> None:
    """They pass from node to node: only the sampling stage checks, and reports their layers."""
    first, last = (
        load(checkpoint, SafetensorsDirectory(checkpoint.path), layers) for layers in RANGES[::2]
    )
    with torch.no_grad():
        for parameter in (first, last)[broken]._modules.parameters():
            parameter.fill_(bad)
    plan = StepPlan((), (KvGrant(0, 0, (0,), slot=0),), (Span(0, 0, 2, True, Sampling()),))
    hidden = first.execute(plan, np.array([3, 4])).hidden
    with pytest.raises(InternalError) as caught:
        last.execute(plan, hidden)
    assert caught.value.reason == "LOGITS_NOT_FINITE" and caught.value.field == "dtype"
    assert ("before 2" if broken == 0 else "in layers 2:4") in caught.value.message


@pytest.mark.parametrize("layers", RANGES, ids=str)
@pytest.mark.one_in(4)
def test_only_the_stages_tensors_are_read_and_weighed(checkpoint: Any, layers: LayerRange) -> None:
    source = RecordingSource(SafetensorsDirectory(checkpoint.path))
    seen: list[StageFilling] = []
    stage = load(checkpoint, source, layers, dtype=DType.BFLOAT16, progress=seen.append)
    wanted = stage_tensors(checkpoint.manifest, layers)
    assert sorted(source.read_names) == sorted(tensor.name for tensor in wanted)
    assert stage.parameter_bytes == held_bytes(checkpoint.config, wanted, layers, DType.BFLOAT16)
    done = [filling.done_bytes for filling in seen]
    assert done == sorted(done) and len(done) == len(wanted) and done[-1] == seen[0].total_bytes
    assert done[-1] == stage.parameter_bytes and {filling.work for filling in seen} == {
        WeightLoadingWork.CONVERTING
    }
    float32 = getattr(architecture_named(stage.shape.architecture).runs, "float32", "") or "nothing"
    rounded = {
        part.dtype
        for name, part in stage._modules.named_parameters()
        if not re.search(float32, name)
    }
    assert rounded <= {torch.bfloat16}


@pytest.mark.parametrize(
    "variant",
    [
        "llama-options",
        "qwen3-tied",
        "gemma3-text",
        "qwen3_moe-sparse-step",
        "mixtral-window",
        "phi3-partial",
        "glm4-plain",
        "glm4_moe-groups",
        "gpt_oss-yarn",
        "gemma4-experts",
        "granitemoe-options",
        "qwen3_5_moe-options",
        "qwen3_vl_moe-nested",
    ],
)
@pytest.mark.parametrize("quantisation", ROUNDED)
@pytest.mark.one_in(3)
def test_quantised_weights_weigh_what_placing_counts(
    checkpoint: Any, quantisation: Quantisation
) -> None:
    for layers in RANGES:
        stage = load(
            checkpoint, SafetensorsDirectory(checkpoint.path), layers, quantisation=quantisation
        )
        wanted = stage_tensors(checkpoint.manifest, layers)
        assert stage.parameter_bytes == held_bytes(
            checkpoint.config, wanted, layers, DType.FLOAT32, quantisation
        )
        assert stage.parameter_bytes < parameter_bytes(wanted, DType.FLOAT32)


@pytest.mark.skipif(not native_available(), reason="the native kernels are not built")
@pytest.mark.parametrize("variant", ["qwen3-tied", "gemma3-text"])
@pytest.mark.parametrize("quantisation", ROUNDED)
def test_a_tied_model_has_the_same_bits_however_it_is_cut(
    checkpoint: Any, tiny_head: Any, quantisation: Quantisation
) -> None:
    """The embedding keeps its dtype next to a head of integers, whether or not one node has
    both."""
    found = []
    for ends in ((4,), (2, 4), (1, 2, 3, 4)):
        ranges = [LayerRange(first, end) for first, end in pairwise((0, *ends))]
        stages = [
            load(
                checkpoint,
                SafetensorsDirectory(checkpoint.path),
                layers,
                quantisation=quantisation,
                kv_blocks=40,
            )
            for layers in ranges
        ]
        found.append(tiny_head(stages, checkpoint.sequences).step([(0, 21)])[0])
        first: Any = stages[0]._modules
        last: Any = stages[-1]._modules
        assert last.lm_head.packed.scheme == (quantisation.head or "fp32")
        (name,) = [
            tensor.name
            for tensor in checkpoint.manifest.tensors
            if tensor.name.endswith("embed_tokens.weight")
        ]
        embedding = SafetensorsDirectory(checkpoint.path).read(name)
        if len(stages) > 1 or quantisation.head is not None:
            assert torch.equal(first.embed_tokens.weight, embedding.float())
        else:
            assert not hasattr(first, "embed_tokens"), "embedding and head are one matrix in memory"
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


@pytest.mark.parametrize("variant", ["qwen3-tied", "llama-plain"])
def test_the_head_alone_decides_between_quantisations_that_differ_in_it(
    checkpoint: Any, tiny_head: Any
) -> None:
    """Tied or not: hidden states before the head are the same, logits stray as far as the head's
    format lets them."""
    logits = {}
    for quantisation in (
        Quantisation.INT8_HEAD_WHOLE,
        Quantisation.INT8,
        Quantisation.INT8_HEAD_INT4,
    ):
        stage = load(
            checkpoint,
            SafetensorsDirectory(checkpoint.path),
            LayerRange(0, 4),
            quantisation=quantisation,
            kv_blocks=40,
        )
        logits[quantisation.head] = tiny_head([stage], checkpoint.sequences).step([(0, 21)])[0]
    whole = logits[None]
    errors = {
        head: float((found - whole).abs().mean() / whole.std()) for head, found in logits.items()
    }
    assert 0 < errors[IntegerFormat.INT8] < 0.02 < errors[IntegerFormat.INT4] < 0.3, errors


def test_quantised_logits_stay_near(checkpoint_of: Callable[[str], Any], tiny_head: Any) -> None:
    checkpoint = checkpoint_of("llama-plain")
    errors = []
    for quantisation in (Quantisation.INT8, Quantisation.INT4):
        source = SafetensorsDirectory(checkpoint.path)
        stage = load(checkpoint, source, LayerRange(0, 4), quantisation=quantisation, kv_blocks=40)
        logits = tiny_head([stage], checkpoint.sequences).step([(0, 21)])[0]
        errors.append(
            float((logits - checkpoint.reference[0]).abs().mean() / checkpoint.reference[0].std())
        )
    assert 0 < errors[0] < 0.03 < errors[1] < 0.4


@pytest.mark.parametrize("variant", ["gpt2-plain", "opt-plain"])
def test_quantisation_is_refused_where_the_layers_are_not_ours(checkpoint: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load(
            checkpoint,
            SafetensorsDirectory(checkpoint.path),
            LayerRange(0, 1),
            quantisation=Quantisation.INT8,
        )
    assert caught.value.field == "quantisation"


@pytest.mark.parametrize("variant", ["llama-plain", "qwen3_moe-dense-layer", "opt-350m"])
def test_a_missing_or_misshapen_tensor_is_named(checkpoint: Any) -> None:
    directory = SafetensorsDirectory(checkpoint.path)
    for tensor in stage_tensors(checkpoint.manifest, LayerRange(1, 2)):
        with pytest.raises(DataLossError) as missing:
            load(checkpoint, RecordingSource(directory, hidden=tensor.name), LayerRange(1, 2))
        assert tensor.name.endswith(missing.value.field)
        with pytest.raises(InvalidArgumentError) as changed:
            load(checkpoint, RecordingSource(directory, changed=tensor.name), LayerRange(1, 2))
        assert changed.value.field == tensor.name


@pytest.mark.parametrize("layers", [(0, 0), (2, 5), (-1, 2), (3, 2)])
def test_layers_the_model_does_not_have(
    checkpoint_of: Callable[[str], Any], layers: tuple[int, int]
) -> None:
    checkpoint = checkpoint_of("llama-plain")
    with pytest.raises(InvalidArgumentError) as caught:
        load(checkpoint, SafetensorsDirectory(checkpoint.path), LayerRange(*layers))
    assert caught.value.field == "layers"


def test_a_config_transformers_refuses_is_a_typed_error(
    checkpoint_of: Callable[[str], Any],
) -> None:
    checkpoint = checkpoint_of("apertus-llama3")
    broken = replace(checkpoint, config=checkpoint.config | {"initializer_range": "much"})
    with pytest.raises(UnsupportedModelError):
        load(broken, SafetensorsDirectory(checkpoint.path), LayerRange(0, 1))


def test_code_that_a_config_names_is_not_run(
    checkpoint_of: Callable[[str], Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of("minimax_m2-partial")
    trace = tmp_path / "trace"
    for name in ("modeling.py", "configuration.py"):
        (tmp_path / name).write_text(f"import os\nos.mkdir({str(trace)!r})\n")
    monkeypatch.chdir(tmp_path)  # transformers would look here, and next to the weights
    auto_map = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}
    named = replace(
        checkpoint,
        config=checkpoint.config | {"auto_map": auto_map, "_name_or_path": str(tmp_path)},
    )
    load(named, SafetensorsDirectory(checkpoint.path), LayerRange(0, 4))
    assert not trace.exists() and not (tmp_path / "__pycache__").exists()


def test_the_stage_keeps_nothing_of_the_file(
    checkpoint_of: Callable[[str], Any], tmp_path: Any, tiny_head: Any
) -> None:
    checkpoint = checkpoint_of("llama-plain")
    copy = tmp_path / "model.safetensors"
    save_file(load_file(checkpoint.path / "model.safetensors"), copy)
    stage = load(checkpoint, SafetensorsDirectory(tmp_path), LayerRange(0, 4), kv_blocks=40)
    with copy.open("r+b") as file:
        file.seek(0)
        file.write(os.urandom(copy.stat().st_size))
    logits = tiny_head([stage], checkpoint.sequences).step([(0, 21)])[0]
    assert (logits - checkpoint.reference[0]).abs().max() < 1e-4


# -- steps -----------------------------------------------------------------------------------------


def opened(checkpoint: Any, layers: LayerRange) -> StageModel:
    """A stage in which request 1 holds 5 tokens in block 3, and request 2 has a grant of block
    0."""
    stage: StageModel = checkpoint.stage(layers)
    plan = StepPlan(
        grants=(KvGrant(1, 0, (3, 1)), KvGrant(2, 0, (0,))),
        spans=(Span(1, 0, 5, sampling=Sampling()),),
    )
    stage.execute(plan, inputs_of(stage, 5))
    return stage


def inputs_of(stage: StageModel, count: int) -> Any:
    if stage.is_first:
        return np.arange(count, dtype=np.int64)
    return torch.ones(count, stage.shape.frame_width)


def state(stage: StageModel) -> object:
    pool = stage.pool
    arenas = [pool.arena(layer) for layer in range(stage.layers.first, stage.layers.end)]
    tables = {request: pool.table(request) for request in pool.requests}
    return (
        tables,
        pool.bytes_in_use,
        [(arena.keys.tolist(), arena.values.tolist()) for arena in arenas],
        1 in stage._sampler,
    )


STEP_REFUSED: dict[str, tuple[StepPlan, int]] = {
    "free then a span without a table": (
        StepPlan(frees=(1,), spans=(Span(1, 5, 1, sampling=Sampling()),)),
        1,
    ),
    "a second span that is wrong": (StepPlan(spans=(Span(1, 5, 1), Span(2, 1, 1))), 2),
    "table too short": (StepPlan(frees=(1,), spans=(Span(2, 0, 17, sampling=Sampling()),)), 17),
    "block in use": (StepPlan(grants=(KvGrant(1, 2, (0,)),), spans=(Span(1, 5, 1),)), 1),
    "truncation": (StepPlan(frees=(2,), spans=(Span(1, 4, 1),)), 1),
    "too few inputs": (StepPlan(frees=(2,), spans=(Span(1, 5, 2),)), 1),
    "too many inputs": (StepPlan(frees=(2,), spans=(Span(1, 5, 1),)), 2),
    "inputs without a span": (StepPlan(frees=(2,)), 1),
    "beyond the context": (
        StepPlan(grants=(KvGrant(1, 2, tuple(range(10, 30))),), spans=(Span(1, 5, 60),)),
        60,
    ),
}


@pytest.mark.parametrize("layers", [LayerRange(0, 1), LayerRange(1, 2), LayerRange(3, 4)], ids=str)
@pytest.mark.parametrize("case", STEP_REFUSED)
@pytest.mark.one_in(3)
def test_a_refused_step_changes_nothing(
    checkpoint_of: Callable[[str], Any], layers: LayerRange, case: str
) -> None:
    stage = opened(checkpoint_of("llama-plain"), layers)
    plan, count = STEP_REFUSED[case]
    before = state(stage)
    with pytest.raises((InvalidArgumentError, FailedPreconditionError)) as caught:
        stage.execute(plan, inputs_of(stage, count))
    assert caught.value.field
    assert state(stage) == before


@pytest.mark.parametrize(
    "span",
    [
        Span(2, 0, 1, sample=True),
        Span(2, 0, 1, sampling=Sampling(top_p=2.0)),
        Span(2, 0, 1, sampling=Sampling(), seen_tokens=(61,)),
    ],
)
def test_the_last_stage_refuses_wrong_sampling(
    checkpoint_of: Callable[[str], Any], span: Span
) -> None:
    stage = opened(checkpoint_of("llama-plain"), LayerRange(3, 4))
    before = state(stage)
    with pytest.raises(EdgeShardError) as caught:
        stage.execute(StepPlan(frees=(1,), spans=(span,)), inputs_of(stage, 1))
    assert caught.value.field
    assert state(stage) == before


@pytest.mark.parametrize(
    "inputs",
    [
        np.array([61]),
        np.array([-1]),
        np.array([1.0]),
        np.array([[1]]),
        np.array([1], dtype=np.int32),
        torch.tensor([1]),
        torch.ones(1, 32),
        None,
    ],
    ids=repr,
)
def test_the_first_stage_refuses_what_are_not_tokens(
    checkpoint_of: Callable[[str], Any], inputs: Any
) -> None:
    stage = opened(checkpoint_of("llama-plain"), LayerRange(0, 1))
    before = state(stage)
    with pytest.raises(InvalidArgumentError) as caught:
        stage.execute(StepPlan(frees=(2,), spans=(Span(1, 5, 1),)), inputs)
    assert caught.value.field == "inputs"
    assert state(stage) == before


@pytest.mark.parametrize(
    "inputs",
    [np.array([1]), torch.ones(1, 31), torch.ones(1, 32, dtype=torch.bfloat16), None],
    ids=repr,
)
def test_a_later_stage_refuses_other_hidden_states(
    checkpoint_of: Callable[[str], Any], inputs: Any
) -> None:
    stage = opened(checkpoint_of("llama-plain"), LayerRange(1, 2))
    with pytest.raises(InvalidArgumentError) as caught:
        stage.execute(StepPlan(spans=(Span(1, 5, 1),)), inputs)
    assert caught.value.field == "inputs"


def test_a_step_without_spans_only_frees(checkpoint_of: Callable[[str], Any]) -> None:
    for layers in (LayerRange(0, 1), LayerRange(1, 4)):
        stage = opened(checkpoint_of("llama-plain"), layers)
        output = stage.execute(StepPlan(frees=(1, 2)))
        assert (output.hidden, output.result) == (None, StepResult())
        assert stage.pool.bytes_in_use == 0
        assert 1 not in stage._sampler


def test_only_spans_that_sample_give_tokens(checkpoint_of: Callable[[str], Any]) -> None:
    checkpoint = checkpoint_of("qwen3-tied")
    stage = checkpoint.stage(LayerRange(0, 4))
    greedy = Sampling(logprobs=True, top_logprobs=2)
    plan = StepPlan(
        grants=(KvGrant(1, 0, (4, 2, 9)), KvGrant(2, 0, (1,)), KvGrant(3, 0, (0, 3))),
        spans=(
            Span(1, 0, 9, sample=True, sampling=greedy),
            Span(2, 0, 3, sampling=greedy),
            Span(3, 0, 7, sample=True, sampling=Sampling(temperature=0.8, seed=6)),
        ),
    )
    ids = np.concatenate(
        [checkpoint.sequences[0][:9], checkpoint.sequences[1][:3], checkpoint.sequences[2][:7]]
    )
    output = stage.execute(plan, ids)
    assert output.hidden is None
    assert [(token.request, token.position) for token in output.result.tokens] == [(1, 9), (3, 7)]
    reference = torch.log_softmax(checkpoint.reference[0][8].double(), -1)
    first = output.result.tokens[0]
    assert first.token == int(reference.argmax())
    assert first.logprob == pytest.approx(reference.max().item(), abs=1e-4)
    assert [entry.token for entry in first.top] == reference.topk(2).indices.tolist()


SAMPLINGS = {
    "plain": Sampling(temperature=1.2, top_p=0.9, repetition_penalty=1.1, seed=77),
    "every option": Sampling(
        temperature=1.6,
        top_k=200,
        top_p=0.97,
        min_p=0.001,
        repetition_penalty=1.1,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        logit_bias=((3, -100.0), (7, 2.5)),
        seed=78,
    ),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_sampled_sentence_is_the_same_alone_and_in_company_and_however_the_model_is_cut(
    checkpoint_of: Callable[[str], Any], name: str
) -> None:
    checkpoint = checkpoint_of("mistral-window")
    sampling = SAMPLINGS[name]

    def sentence(company: bool, cuts: tuple[int, ...] = (0, 2, 4), replayed: int = 0) -> list[int]:
        """With `replayed`, that many tokens were generated by an earlier epoch, and the prompt runs
        with them."""
        stages = [checkpoint.stage(LayerRange(*layers)) for layers in pairwise(cuts)]
        prompt, tokens = checkpoint.sequences[0][:6], alone[:replayed] if replayed else []
        prompt = np.concatenate([prompt, np.array(tokens, dtype=np.int64)])
        spans = [
            Span(
                1,
                0,
                len(prompt),
                True,
                sampling,
                tuple(prompt.tolist()),
                answer_tokens=tuple(tokens),
            )
        ]
        grants = [KvGrant(1, 0, (7, 0, 3, 5))]
        ids = [prompt]
        if company:
            grants.append(KvGrant(2, 0, (1, 9, 2, 8, 4)))
        for position in range(len(prompt), 14):
            if company:
                first = position - 6
                spans.insert(
                    0,
                    Span(
                        2, first, 1, True, Sampling(seed=1, temperature=3.0) if first == 0 else None
                    ),
                )
                ids.insert(0, np.array([position]))
            plan = StepPlan(grants=tuple(grants), spans=tuple(spans))
            inputs: Any = np.concatenate(ids)
            for stage in stages:
                output = stage.execute(plan, inputs)
                inputs = output.hidden
            token = next(token.token for token in output.result.tokens if token.request == 1)
            tokens.append(token)
            spans = [Span(1, position, 1, True)]
            grants = []
            ids = [np.array([token])]
        return tokens

    alone = sentence(company=False)
    assert sentence(company=True) == alone
    assert (
        sentence(company=True, cuts=(0, 4)) == sentence(company=False, cuts=(0, 1, 3, 4)) == alone
    )
    for replayed in (1, 4, 7):
        assert sentence(company=False, replayed=replayed) == alone
    assert len(set(alone)) > 3


# -- the folder of a checkpoint --------------------------------------------------------------------


def test_a_folder_without_safetensors_is_refused(tmp_path: Any) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(NotFoundError):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "{}"])
def test_a_broken_index_is_refused(tmp_path: Any, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DataLossError):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/x.safetensors", "pytorch_model.bin", "a/b.safetensors"]
)
def test_an_index_cannot_name_other_files(tmp_path: Any, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{file}"}}}}')
    with pytest.raises(InvalidArgumentError):
        SafetensorsDirectory(tmp_path)


def test_broken_files_are_data_loss(tmp_path: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    )
    (tmp_path / "one.safetensors").write_bytes(b"\x00" * 20)
    source = SafetensorsDirectory(tmp_path)
    for name in ("a", "b", "c"):
        with pytest.raises(DataLossError) as caught:
            source.read(name)
        assert caught.value.field == name
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(DataLossError):
        SafetensorsDirectory(tmp_path)


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("shape", [(3, 5), (1, 8), (0, 4)])
def test_hidden_states_survive_the_wire(dtype: DType, shape: tuple[int, int]) -> None:
    hidden = torch.randn(shape[1], shape[0]).t().to(TORCH_DTYPES[dtype])
    raw = hidden_to_bytes(hidden)
    assert len(raw) == shape[0] * shape[1] * dtype.itemsize
    back = bytes_to_hidden(raw, dtype, shape)
    assert back.dtype == hidden.dtype and torch.equal(back, hidden)


def test_bytes_are_little_endian_and_row_major() -> None:
    assert hidden_to_bytes(torch.tensor([[1.0, 2.0]])) == np.array([1, 2], "<f4").tobytes()
    assert hidden_to_bytes(torch.tensor([[1.0]], dtype=torch.bfloat16)) == b"\x80\x3f"


@pytest.mark.parametrize("shape", [(2, 3), (2, -2), (5,)])
def test_bytes_that_do_not_fit_the_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError):
        bytes_to_hidden(b"\0" * 16, DType.FLOAT32, shape)


@pytest.mark.parametrize("kv_dtype", [dtype for dtype in DType if dtype is not DType.FLOAT32])
def test_keys_and_values_may_be_of_another_dtype(
    checkpoint_of: Callable[[str], Any], kv_dtype: DType
) -> None:
    checkpoint = checkpoint_of("llama-plain")
    found = []
    for each in (DType.FLOAT32, kv_dtype):
        stage = load(
            checkpoint, SafetensorsDirectory(checkpoint.path), LayerRange(0, 4), kv_dtype=each
        )
        stage.execute(
            StepPlan(grants=(KvGrant(0, 0, (0, 1)),), spans=(Span(0, 0, 5, sampling=Sampling()),)),
            np.arange(5),
        )
        found.append(stage.logits(StepPlan(spans=(Span(0, 5, 1),)), np.array([7])))
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "error", [OSError(12, "Cannot allocate memory"), MemoryError(), torch.OutOfMemoryError("no "
                                                                                           "memory"),
              RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 "
                           "bytes.")],
    ids=["mapping", "python", "accelerator", "torch"],
)  # fmt: skip
def test_memory_that_runs_short_while_loading_is_a_typed_error(
    checkpoint_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def short(*_: Any, **__: Any) -> None:
        raise error

    checkpoint = checkpoint_of("llama-plain")
    monkeypatch.setattr(PackedLinear, "pack", short)
    with pytest.raises(ResourceExhaustedError) as caught:
        load(checkpoint, SafetensorsDirectory(checkpoint.path), LayerRange(0, 4))
    assert caught.value.field


def test_other_failures_while_loading_are_not_called_a_lack_of_memory(
    checkpoint_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the tensor shapes do not fit")

    checkpoint = checkpoint_of("llama-plain")
    monkeypatch.setattr(PackedLinear, "pack", broken)
    with pytest.raises(RuntimeError, match="do not fit"):
        load(checkpoint, SafetensorsDirectory(checkpoint.path), LayerRange(0, 4))
