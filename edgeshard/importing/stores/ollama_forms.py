"""GGUF files of Ollama's own converter in llama.cpp's form: other names, missing keys, pictures
inside. Pure.

Ollama's models are translated when it loads them; `FORMS` has the 22 kinds that it translates
(Ollama 0.33). A kind is translated here too, or refused with the reason. Files without a kind's
marks stay as they are. A family that EdgeShard does not read from GGUF files is refused by name
after its translation (`gguf_config.form_of`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.importing.gguf_file import GgufFile, GgufTensor
from edgeshard.importing.imported import mebibytes

_ARCHITECTURE = "general.architecture"
_PRE = "tokenizer.ggml.pre"
_TOKENS = "tokenizer.ggml.tokens"
_PICTURES = ("v.", "mm.")
_FURTHER = "mtp."
_LONG_CONTEXT = 131_072
_SECTIONS = 4


@dataclass(frozen=True, slots=True)
class OllamaForm:
    """A kind of file of some architectures: `marks` is true for its files; `refused` is why it does
    not run, or ""."""

    name: str
    architectures: tuple[str, ...]
    marks: Callable[[GgufFile], bool]
    translate: Callable[[_Draft], None] = lambda draft: None
    refused: str = ""


class _Draft:
    """The metadata and tensors of a file while they are translated."""

    def __init__(self, file: GgufFile) -> None:
        self.metadata = dict(file.metadata)
        self.tensors = dict(file.tensors)
        self.dropped: list[GgufTensor] = []

    @property
    def architecture(self) -> str:
        return str(self.metadata[_ARCHITECTURE])

    def become(self, architecture: str) -> None:
        """Change the architecture, and the beginning of its keys."""
        old = f"{self.architecture}."
        changed = {
            f"{architecture}.{key.removeprefix(old)}": value
            for key, value in self.metadata.items()
            if key.startswith(old)
        }
        self.metadata = {
            key: value for key, value in self.metadata.items() if not key.startswith(old)
        } | changed
        self.metadata[_ARCHITECTURE] = architecture

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def set(self, key: str, value: object) -> None:
        """Set a key of the architecture."""
        self.metadata[f"{self.architecture}.{key}"] = value

    def default(self, key: str, value: object) -> None:
        """Set a key of the architecture that is missing."""
        self.metadata.setdefault(f"{self.architecture}.{key}", value)

    def move(self, old: str, new: str) -> None:
        """Give a key of the architecture another name, unless there is one of that name."""
        value = self.metadata.pop(f"{self.architecture}.{old}", None)
        if value is not None:
            self.default(new, value)

    def pad_sections(self, key: str) -> None:
        """Three sections of rotary dimensions, as llama.cpp has them: four."""
        value = self.get(key)
        if isinstance(value, list):
            self.metadata.pop(f"{self.architecture}.{key}")
            self.set("rope.dimension_sections", (value + [0] * _SECTIONS)[:_SECTIONS])

    def rename(self, pattern: str, new: str) -> None:
        """Replace the names of tensors that match, whole."""
        tensors = {}
        for tensor in self.tensors.values():
            name = re.sub(f"^{pattern}$", new, tensor.name)
            tensors[name] = replace(tensor, name=name)
        self.tensors = tensors

    def drop(self, prefixes: Iterable[str]) -> None:
        """Leave out tensors whose names begin so."""
        beginnings = tuple(prefixes)
        self.dropped += [
            tensor for name, tensor in self.tensors.items() if name.startswith(beginnings)
        ]
        self.tensors = {
            name: tensor for name, tensor in self.tensors.items() if not name.startswith(beginnings)
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, row length last; () if there is none."""
        tensor = self.tensors.get(name)
        return () if tensor is None else tensor.shape

    def cut_vocabulary(self) -> None:
        """Tokens without a row in the embedding, such as those for pictures, are left out."""
        rows = self.shape("token_embd.weight")[:1]
        for key in ("tokens", "scores", "token_type"):
            value = self.metadata.get(f"tokenizer.ggml.{key}")
            if rows and isinstance(value, list):
                self.metadata[f"tokenizer.ggml.{key}"] = value[: rows[0]]


def llama_cpp_form(file: GgufFile) -> tuple[GgufFile, tuple[str, ...]]:
    """The file as llama.cpp's converter would have written it, and notes; the same file unless it
    is one of `FORMS`.

    Raises UnsupportedModelError, which names the kind and why it does not run.
    """
    form = form_of_file(file)
    if form is None:
        return file, ()
    if form.refused:
        raise UnsupportedModelError(
            f"{file.path.name} is {form.name}, which EdgeShard does not run: {form.refused}",
            field=_ARCHITECTURE,
            reason="UNSUPPORTED_GGUF",
        )
    draft = _Draft(file)
    form.translate(draft)
    return GgufFile(file.path, draft.metadata, draft.tensors), _left_out_notes(draft.dropped)


def _left_out_notes(dropped: Iterable[GgufTensor]) -> tuple[str, ...]:
    further = 0
    others = 0
    for tensor in dropped:
        if tensor.name.startswith(_FURTHER):
            further += tensor.size
        else:
            others += tensor.size
    notes = []
    if further:
        notes.append(
            f"its blocks for predicting further tokens ({mebibytes(further)}) are left out"
        )
    if others:
        size = mebibytes(others)
        notes.append(
            f"only its text is run: its weights for pictures and sound ({size}) are left out"
        )
    return tuple(notes)


def form_of_file(file: GgufFile) -> OllamaForm | None:
    """The kind of a file; None if it is in llama.cpp's form."""
    architecture = file.metadata.get(_ARCHITECTURE)
    for form in FORMS:
        if architecture in form.architectures and form.marks(file):
            return form
    return None


def _always(file: GgufFile) -> bool:
    return True


def _has_tensors(file: GgufFile, *prefixes: str) -> bool:
    return any(name.startswith(prefixes) for name in file.tensors)


def _has_keys(file: GgufFile, *keys: str) -> bool:
    architecture = file.metadata.get(_ARCHITECTURE)
    return any(f"{architecture}.{key}" in file.metadata for key in keys)


def _has_pictures(file: GgufFile) -> bool:
    return _has_tensors(file, *_PICTURES)


def _lacks_split(file_or_draft: GgufFile | _Draft) -> bool:
    return file_or_draft.metadata.get(_PRE) in (None, "", "default")


def _marks_gemma3(file: GgufFile) -> bool:
    keys = ("mm.tokens_per_image", "rope.global.freq_base", "rope.local.freq_base")
    flags = ("tokenizer.ggml.add_padding_token", "tokenizer.ggml.add_unknown_token")
    lacks_epsilon = not _has_keys(file, "attention.layer_norm_rms_epsilon")
    return (
        _has_pictures(file)
        or _has_keys(file, *keys)
        or lacks_epsilon
        or any(key in file.metadata for key in flags)
    )


def _gemma3(draft: _Draft) -> None:
    draft.move("rope.global.freq_base", "rope.freq_base")
    draft.move("rope.local.freq_base", "rope.freq_base_swa")
    draft.default("attention.layer_norm_rms_epsilon", 1e-6)
    draft.default("rope.freq_base", 1_000_000.0)
    draft.default("rope.freq_base_swa", 10_000.0)
    context = draft.get("context_length")
    if isinstance(context, int) and context >= _LONG_CONTEXT:
        draft.default("rope.scaling.type", "linear")
        draft.default("rope.scaling.factor", 8.0)
    draft.cut_vocabulary()
    draft.drop(_PICTURES)


def _marks_gemma4(file: GgufFile) -> bool:
    inside = ("a.", *_PICTURES, "model.vision_tower.")
    return _has_tensors(file, *inside) or file.metadata.get("tokenizer.ggml.model") == "llama"


def _gemma4(draft: _Draft) -> None:
    if draft.metadata.get("tokenizer.ggml.model") == "llama":  # its vocabulary has merges
        draft.metadata["tokenizer.ggml.model"] = "gemma4"
    draft.rename(r"(blk\.\d+)\.ffn_gate_inp\.per_expert_scale", r"\1.ffn_down_exps.scale")
    draft.drop(("a.", *_PICTURES, "model.vision_tower."))


def _gpt_oss(draft: _Draft) -> None:
    draft.become("gpt-oss")
    experts = draft.shape("blk.0.ffn_gate_exps.weight")
    if len(experts) == len(("expert", "output", "input")):
        draft.default("expert_feed_forward_length", experts[1])
    draft.default("rope.scaling.type", "yarn")
    draft.metadata[_PRE] = "gpt-4o"
    draft.rename(r"(blk\.\d+)\.attn_out\.(weight|bias)", r"\1.attn_output.\2")
    draft.rename(r"(blk\.\d+)\.attn_sinks", r"\1.attn_sinks.weight")
    draft.rename(r"(blk\.\d+)\.ffn_norm\.weight", r"\1.post_attention_norm.weight")


def _marks_lfm2(file: GgufFile) -> bool:
    return "output_norm.weight" in file.tensors and "token_embd_norm.weight" not in file.tensors


def _lfm2(draft: _Draft) -> None:
    draft.rename(r"output_norm\.weight", "token_embd_norm.weight")
    draft.metadata[_PRE] = "lfm2"
    gate = draft.shape("blk.0.ffn_gate.weight")
    if gate:
        draft.set("feed_forward_length", gate[0])


def _marks_mistral3(file: GgufFile) -> bool:
    keys = ("rope.scaling.beta_fast", "rope.scaling.mscale_all_dim", "rope.scaling_beta")
    return _has_pictures(file) or _has_keys(file, *keys)


def _mistral3(draft: _Draft) -> None:
    draft.move("rope.scaling.beta_fast", "rope.scaling.yarn_beta_fast")
    draft.move("rope.scaling.beta_slow", "rope.scaling.yarn_beta_slow")
    draft.move("rope.scaling.mscale_all_dim", "rope.scaling.yarn_log_multiplier")
    draft.move("rope.scaling_beta", "attention.temperature_scale")
    if _lacks_split(draft):
        draft.metadata[_PRE] = "tekken"
    draft.drop(_PICTURES)


def _marks_qwen35(file: GgufFile) -> bool:
    keys = (
        "vision.block_count",
        "image_token_id",
        "ssm.v_head_reordered",
        "rope.mrope_interleaved",
    )
    is_mixture = file.metadata[_ARCHITECTURE] == "qwen35moe"
    return (
        _has_tensors(file, "v.", _FURTHER)
        or _has_keys(file, *keys)
        or (is_mixture and _has_keys(file, "feed_forward_length"))
    )


def _qwen35(draft: _Draft) -> None:
    _qwen3_next(draft)
    draft.pad_sections("rope.dimension_sections")
    draft.drop((*_PICTURES, _FURTHER))


def _marks_qwen3_next(file: GgufFile) -> bool:
    return any(name.endswith(".ssm_dt") for name in file.tensors)


def _qwen3_next(draft: _Draft) -> None:
    heads = draft.get("attention.head_count_kv")
    if isinstance(heads, list):  # 0 for layers without keys
        draft.set(
            "attention.head_count_kv",
            max((head for head in heads if isinstance(head, int)), default=0),
        )
    draft.rename(r"(blk\.\d+\.ssm_dt)", r"\1.bias")


def _qwen25_vl(draft: _Draft) -> None:
    draft.become("qwen2vl")
    draft.pad_sections("rope.mrope_section")
    draft.drop(_PICTURES)


def _marks_qwen3_vl(file: GgufFile) -> bool:
    return not _has_keys(file, "rope.dimension_sections")


def _qwen3_vl(draft: _Draft) -> None:
    draft.set("rope.dimension_sections", [24, 20, 20, 0])
    deepstack = draft.get("vision.deepstack_visual_indexes")
    draft.default("n_deepstack_layers", len(deepstack) if isinstance(deepstack, list) else 0)
    draft.drop(_PICTURES)


def _marks_nemotron(file: GgufFile) -> bool:
    return _has_tensors(file, _FURTHER) or any(".ffn_latent_in" in name for name in file.tensors)


def _nemotron(draft: _Draft) -> None:
    latent = [
        tensor for tensor in draft.tensors.values() if tensor.name.endswith(".ffn_latent_in.weight")
    ]
    if latent:
        draft.default("moe_latent_size", latent[0].shape[0])
    draft.rename(r"(blk\.\d+)\.ffn_latent_in\.(\w+)", r"\1.ffn_latent_down.\2")
    draft.rename(r"(blk\.\d+)\.ffn_latent_out\.(\w+)", r"\1.ffn_latent_up.\2")
    draft.drop((_FURTHER,))


def _nemotron_omni(draft: _Draft) -> None:
    has_experts = bool(draft.get("expert_count") or draft.get("expert_used_count"))
    draft.become("nemotron_h_moe" if has_experts else "nemotron_h")
    draft.drop(("a.", *_PICTURES))
    if has_experts:
        _nemotron(draft)


def _marks_llama3(file: GgufFile) -> bool:
    tokens = file.metadata.get(_TOKENS)
    if (
        not isinstance(tokens, list)
        or "<|eot_id|>" not in tokens
        or "<|start_header_id|>" not in tokens
    ):
        return False
    end = file.metadata.get("tokenizer.ggml.eos_token_id")
    return _lacks_split(file) or _token(tokens, end) == "<|end_of_text|>"


def _llama3(draft: _Draft) -> None:
    tokens = draft.metadata[_TOKENS]
    if _lacks_split(draft):
        draft.metadata[_PRE] = "llama-bpe"
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        if _token(tokens, draft.metadata.get(key)) in (None, "<|end_of_text|>"):
            draft.metadata[key] = tokens.index("<|eot_id|>")


def _token(tokens: list[Any], index: object) -> object:
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _drop_pictures(draft: _Draft) -> None:
    draft.drop(_PICTURES)


def _olmo3(draft: _Draft) -> None:
    draft.become("olmo2")


def _has_dense(file: GgufFile) -> bool:
    return "dense.0.weight" in file.tensors


def _has_own_vocabulary(file: GgufFile) -> bool:
    rows = file.tensors.get("token_embd.weight")
    layer_rows = file.tensors.get("per_layer_token_embd.weight")
    return rows is not None and layer_rows is not None and _rows(rows) != _rows(layer_rows)


def _rows(tensor: GgufTensor) -> int:
    return tensor.shape[0]


def _is_snowflake(file: GgufFile) -> bool:
    return file.metadata.get("tokenizer.ggml.model") == "t5"


def _marks_laguna(file: GgufFile) -> bool:
    keys = ("rope.swa.dimension_count", "rope.swa.freq_base")
    return _has_keys(file, *keys) or "blk.0.attn_g.weight" in file.tensors


def _lacks_projector_type(file: GgufFile) -> bool:
    return (
        "clip.projector_type" not in file.metadata and file.metadata.get("general.type") != "mmproj"
    )


_EMBEDDINGS = "it makes embeddings of texts, not text"
_PICTURES_ONLY = "it reads text in pictures, and only texts are run"
_TOKEN_VECTORS = "every block reads vectors made from token ids, which only the first stage has"

FORMS = (
    OllamaForm("EmbeddingGemma", ("gemma3",), _has_dense, refused=_EMBEDDINGS),
    OllamaForm("Gemma 3", ("gemma3",), _marks_gemma3, _gemma3),
    OllamaForm("Snowflake Arctic Embed 2", ("bert",), _is_snowflake, refused=_EMBEDDINGS),
    OllamaForm("Gemma 3n", ("gemma3n",), _has_own_vocabulary, refused=_TOKEN_VECTORS),
    OllamaForm("Gemma 4", ("gemma4",), _marks_gemma4, _gemma4),
    OllamaForm("gpt-oss", ("gptoss",), _always, _gpt_oss),
    OllamaForm("LFM2", ("lfm2",), _marks_lfm2, _lfm2),
    OllamaForm("OLMo 3", ("olmo3",), _always, _olmo3),
    OllamaForm("Mistral 3", ("mistral3",), _marks_mistral3, _mistral3),
    OllamaForm("Qwen3.5", ("qwen35", "qwen35moe"), _marks_qwen35, _qwen35),
    OllamaForm("Qwen3-Next", ("qwen3next",), _marks_qwen3_next, _qwen3_next),
    OllamaForm("Qwen2.5-VL", ("qwen25vl",), _always, _qwen25_vl),
    OllamaForm("Qwen3-VL", ("qwen3vl", "qwen3vlmoe"), _marks_qwen3_vl, _qwen3_vl),
    OllamaForm("DeepSeek-OCR", ("deepseekocr",), _always, refused=_PICTURES_ONLY),
    OllamaForm("GLM-OCR", ("glmocr",), _always, refused=_PICTURES_ONLY),
    OllamaForm(
        "GLM-4.7-Flash",
        ("glm4moelite",),
        _always,
        refused="it keeps a latent state in place of keys and values",
    ),
    OllamaForm("Laguna", ("laguna",), _marks_laguna, refused="EdgeShard has no such family"),
    OllamaForm("Nemotron-H", ("nemotron_h_moe",), _marks_nemotron, _nemotron),
    OllamaForm("Nemotron 3 Omni", ("nemotron_h_omni",), _always, _nemotron_omni),
    OllamaForm("Llama 3", ("llama",), _marks_llama3, _llama3),
    OllamaForm("Llama 4", ("llama4",), _has_pictures, _drop_pictures),
    OllamaForm(
        "a projector for pictures",
        ("clip",),
        _lacks_projector_type,
        refused="it is no model by itself",
    ),
)
"""The kinds, in the order in which they are tried."""
