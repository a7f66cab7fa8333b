"""The tokenizer of a GGUF file as the small files that travel with a model: tokenizer.json and
those beside it.

Also chat templates for models that have none, by the markers of their form.

Two kinds: "gpt2", byte-level BPE with merges and the name of a rule that splits text first, and
"llama", the BPE of SentencePiece, whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.importing.bpe import WORDS, WordSplit, added_token, bpe_document, byte_level_document
from edgeshard.importing.gguf_file import GgufFile
from edgeshard.storage.forms import (
    GENERATION,
    TOKENIZER,
    TOKENIZER_SETTINGS,
    check_small_file,
    malformed,
)

_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_SPACE = "▁"
_TEMPLATE = "tokenizer.chat_template"
_MERGES_LIMIT = 1 << 30
"""The most of the squares of pieces' lengths together, which their merges take as time; real ones
have a thousandth."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(digits: str, suffix: str = "") -> str:
    """Words of capitals followed by small letters, then `suffix`; `digits` is how many digits stay
    together."""
    upper, lower = _LETTERS
    start = r"[^\r\n\p{L}\p{N}]?"
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return (
        rf"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}|\p{{N}}{digits}|{rest}"
    )


_MARKED_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUNCTUATED_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACED_SYLLABLES = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CODE_WORDS = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NOT_CASED = (
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    "\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001df1e"
)
"""Cased letters that an older version of Unicode does not count as such."""
_CASED = rf"\s?(?:(?![{_NOT_CASED}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])+"
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_FULL_WIDTH = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"


_GPT2 = WordSplit()
_DIGITS = WordSplit(digits_first=True)
_CL100K = WordSplit((WORDS % "{1,3}",))
_LLAMA3 = replace(_CL100K, whole=True, begins=True)
_ONE_DIGIT = WordSplit((WORDS % "",))
_COMPOSED = replace(_ONE_DIGIT, composed=True)
_O200K = WordSplit((_cased_words("{1,3}", f"{_CONTRACTIONS}?"),))
_DEEPSEEK3 = WordSplit((r"\p{N}{1,3}", _HAN_AND_KANA, _PUNCTUATED_WORDS))
_SPLITS = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "exaone4"), _GPT2
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS
    ),
    "command-r": replace(_DIGITS, composed=True),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("glm4", "glm5"), replace(_CL100K, whole=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3,
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _COMPOSED),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _ONE_DIGIT),
    "qwen35": WordSplit((_MARKED_WORDS,), composed=True),
    "tekken": WordSplit((_cased_words(""),), whole=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _O200K),
    "seed-coder": WordSplit((_CODE_WORDS,)),
    "exaone-moe": WordSplit((_SPACED_SYLLABLES,)),
    "deepseek-llm": WordSplit((r"[\r\n]", _CASED, _FULL_WIDTH, r"\s+$", _HAN), digits_last=True),
    "deepseek-coder": WordSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN), digits_last=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
}
"""By the file's `tokenizer.ggml.pre`."""
_IN_ANSWERS = re.compile(r"</?[\w:]*(?:tool|arg|func|param|think)[\w:]*>")
"""Tokens that answers write calls and reasoning with: files may mark them as control tokens,
models' own do not."""
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|eot|>", "<|eom|>", "<|im_end|>"),
        *("<|endoftext|>", "<|end|>", "<|return|>", "<|call|>", "<|end_of_turn|>", "<end_of_turn>"),
        *(
            "<|END_OF_TURN_TOKEN|>",
            "<turn|>",
            "<end_of_utterance>",
            "[|endofturn|]",
            "[EOS]",
            "[EOT]",
        ),
        *("<EOT>", "_<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    }
)
"""The tokens that end an answer in the chat templates of published models."""


def tokenizer_files(file: GgufFile, notes: list[str], template_hint: str = "") -> dict[str, bytes]:
    """The small files by name. A tokenizer of an unknown kind gives none, and a note of it in
    `notes`.

    A file without a chat template gets a known one, by the markers in `template_hint` or in its
    special tokens.

    Raises InvalidArgumentError for metadata that contradicts itself.
    """
    whole = file.metadata.get("tokenizer.huggingface.json")
    tokenizer = _object(whole) if isinstance(whole, str) else _tokenizer(file, notes)
    if tokenizer is None:
        return {}
    settings = _config(file)
    if "chat_template" not in settings:
        settings |= _known_template(file, template_hint, notes)
    files = {TOKENIZER: tokenizer, TOKENIZER_SETTINGS: settings, GENERATION: _generation(file)}
    encoded = {
        name: json.dumps(value, ensure_ascii=False).encode() for name, value in files.items()
    }
    for name, data in encoded.items():
        check_small_file(name, data)
    return encoded


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _tokenizer(file: GgufFile, notes: list[str]) -> dict[str, Any] | None:
    kind, split = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if kind == "llama":
        return _sentencepiece(file)
    if kind == "gemma4":
        return _sentencepiece(file, _merges(file))
    if kind == "gpt2" and isinstance(split, str) and split in _SPLITS:
        return _byte_level(file, split)
    what = (
        "no tokenizer"
        if kind is None
        else f"an unknown tokenizer ({str(kind)[:20]}, {str(split)[:20]})"
    )
    notes.append(f"{file.path.name} has {what}; the checkpoint as safetensors has its own")
    return None


def _byte_level(file: GgufFile, split: str) -> dict[str, Any]:
    tokens, types = _tokens(file)
    kind = _SPLITS[split]
    return byte_level_document(
        _vocab(tokens),
        _added(tokens, types),
        _merges(file),
        kind,
        post=_post(file, tokens, default=kind.begins),
    )


def _merges(file: GgufFile) -> list[list[str]]:
    merges = []
    for merge in _list(file, "merges", str):
        halves = merge.split(" ")
        if len(halves) != 2:
            raise _malformed(file, "merges")
        merges.append(halves)
    return merges


def _merges_of_scores(
    file: GgufFile, tokens: Sequence[str], types: Sequence[int]
) -> list[list[str]]:
    scores = _list(file, "scores", float)
    if len(scores) != len(tokens):
        raise _malformed(file, "scores")
    if sum(len(token) ** 2 for token in tokens) > _MERGES_LIMIT:
        raise _malformed(file, "tokens")
    return merges_by_score(tokens, types, scores)


def _sentencepiece(file: GgufFile, merges: list[list[str]] | None = None) -> dict[str, Any]:
    """The tokenizer of SentencePiece's BPE; without `merges` they follow from the scores."""
    tokens, types = _tokens(file)
    if merges is None:
        merges = _merges_of_scores(file, tokens, types)
    prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return bpe_document(
        _vocab(tokens),
        _added(tokens, types),
        normalizer={"type": "Sequence", "normalizers": [*prefix, space]},
        pre_tokenizer=None,
        post_processor=_post(file, tokens, default=True),
        decoder={
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        model={
            "merges": merges,
            "unk_token": _text_of(tokens, unknown),
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
        },
    )


def _vocab(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def merges_by_score(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[list[str]]:
    """The merges of BPE that join as SentencePiece does: two neighbours whose union has the highest
    score go first."""
    vocabulary = {
        token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)
    }
    ranked = sorted(
        (-score, index) for index, score in enumerate(scores) if tokens[index] in vocabulary
    )
    return [
        [token[:cut], token[cut:]]
        for token in (tokens[index] for _, index in ranked)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def _tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    tokens = _list(file, "tokens", str)
    types = (
        _list(file, "token_type", int)
        if "tokenizer.ggml.token_type" in file.metadata
        else [_NORMAL] * len(tokens)
    )
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens) or not tokens:
        raise _malformed(file, "tokens")
    return tokens, types


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    return [
        added_token(index, token, kind != _USER_DEFINED and _IN_ANSWERS.fullmatch(token) is None)
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post(file: GgufFile, tokens: Sequence[str], default: bool) -> dict[str, Any] | None:
    """The post-processor that puts tokens before and behind each text, where the model wants
    them."""
    ends = []
    for flag, key, fallback in (
        ("add_bos_token", "bos_token_id", default),
        ("add_eos_token", "eos_token_id", False),
    ):
        is_added = file.metadata.get(f"tokenizer.ggml.{flag}", fallback) is True
        ends.append(
            _text_of(tokens, file.metadata.get(f"tokenizer.ggml.{key}")) if is_added else None
        )
    if ends == [None, None]:
        return None
    before, behind = (
        [] if end is None else [{"SpecialToken": {"id": end, "type_id": 0}}] for end in ends
    )
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*text, {"Sequence": {"id": "B", "type_id": 0}}]
    special = {
        end: {"id": end, "ids": [tokens.index(end)], "tokens": [end]}
        for end in ends
        if end is not None
    }
    return {
        "type": "TemplateProcessing",
        "single": [*before, *text, *behind],
        "pair": [*before, *pair, *behind],
        "special_tokens": special,
    }


def _known_template(file: GgufFile, hint: str, notes: list[str]) -> dict[str, Any]:
    tokens, types = _tokens(file)
    special = [
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    template = template_for([hint]) or template_for(special)
    if template is None:
        return {}
    notes.append(
        f"{file.path.name} has no chat template: EdgeShard's own for {template.name} is used"
    )
    return {"chat_template": template.text}


def _config(file: GgufFile) -> dict[str, Any]:
    tokens, _ = _tokens(file)
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    values = {
        name: _text_of(tokens, file.metadata.get(f"tokenizer.ggml.{key}_token_id"))
        for name, key in named.items()
    }
    return {name: value for name, value in values.items() if value is not None} | _templates(file)


def _templates(file: GgufFile) -> dict[str, Any]:
    """The chat template as a tokenizer_config.json has it: a text, or a list if the file names
    others."""
    default = file.metadata.get(_TEMPLATE)
    templates = {"default": default} if isinstance(default, str) else {}
    for key, template in file.metadata.items():
        if key.startswith(f"{_TEMPLATE}.") and isinstance(template, str):
            templates.setdefault(key.removeprefix(f"{_TEMPLATE}."), template)
    if not templates:
        return {}
    if templates.keys() == {"default"}:
        return {"chat_template": default}
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}


def _generation(file: GgufFile) -> dict[str, Any]:
    """The generation_config.json: an answer ends with the end of a text, of a turn or of a message.

    Keys name them. Many files name one of them only, and mark the others as control tokens.
    """
    tokens, types = _tokens(file)
    named = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    listed = file.metadata.get("tokenizer.ggml.eos_token_ids")
    named += listed if isinstance(listed, list) else []
    ends = {token for token in named if type(token) is int and 0 <= token < len(tokens)}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if token in _ENDS and kind in (_CONTROL, _USER_DEFINED):
            ends.add(index)
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    return ({"eos_token_id": sorted(ends)} if ends else {}) | (
        {"bos_token_id": bos} if isinstance(bos, int) else {}
    )


def _text_of(tokens: Sequence[str], index: object) -> str | None:
    return tokens[index] if type(index) is int and 0 <= index < len(tokens) else None


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    items = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(items, list) or any(type(item) is not kind for item in items):
        raise _malformed(file, key)
    return items


def _malformed(file: GgufFile, key: str) -> InvalidArgumentError:
    name = f"tokenizer.ggml.{key}"
    return malformed(
        f"{file.path.name}: {name}", "is missing or contradicts the rest of the tokenizer", name
    )


@dataclass(frozen=True, slots=True)
class KnownTemplate:
    """A form of chats: Jinja `text` as a tokenizer_config.json has it, for texts that hold all of
    `markers`."""

    name: str
    markers: tuple[str, ...]
    text: str


_TOOLS = """{%- macro tool_list() -%}
These functions can be called:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
To call one, write its name and its arguments as JSON between these tags:
<tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call>
{%- endmacro -%}
"""

_CHATML = (
    _TOOLS
    + """{%- set system = '' -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if system or tools -%}
<|im_start|>system
{{ system }}{% if system and tools %}

{% endif %}{% if tools %}{{ tool_list() }}{% endif %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""
)

_LLAMA3_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{{ (message.content or '') | trim }}<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif -%}"""

_GEMMA = """{{- bos_token -}}
{%- set system = '' -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content + '\\n\\n' -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ system if loop.first else '' }}{{ (message.content or '') | trim }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}
<start_of_turn>model
{% endif -%}"""

_PHI3 = """{%- for message in messages -%}
<|{{ message.role }}|>
{{ message.content or '' }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{% endif -%}"""

TEMPLATES = (
    KnownTemplate("ChatML", ("<|im_start|>", "<|im_end|>"), _CHATML),
    KnownTemplate(
        "Llama 3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), _LLAMA3_TEMPLATE
    ),
    KnownTemplate("Gemma 3", ("<start_of_turn>", "<end_of_turn>"), _GEMMA),
    KnownTemplate("Phi 3", ("<|user|>", "<|assistant|>", "<|end|>"), _PHI3),
)


def template_for(texts: Collection[str]) -> KnownTemplate | None:
    """The template whose markers all occur in one of the texts, such as special tokens or a
    template of another kind; None if the form is unknown."""
    for template in TEMPLATES:
        if all(any(marker in text for text in texts) for marker in template.markers):
            return template
    return None
