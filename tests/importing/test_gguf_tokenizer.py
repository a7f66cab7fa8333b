"""The tokenizer in a GGUF file's metadata: the tokens of the one that it was made from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from bench.quantisation import VALIDATION
from edgeshard.domain.errors import InvalidArgumentError, UnsupportedModelError
from edgeshard.importing.blocks import Width
from edgeshard.importing.gguf_config import record_of
from edgeshard.importing.gguf_file import GgufFile
from edgeshard.importing.gguf_model import open_gguf
from edgeshard.importing.gguf_tokenizer import tokenizer_files
from tests.support.gguf_files import TEMPLATE, everywhere, write_demo_gguf
from tests.support.imports import nothing

# As transformers has it for qwen2.
PRETOKENIZE_REGEX = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_LLAMA3 = PRETOKENIZE_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|")
TEXTS = (
    "Once upon a time there were 12345 kings, who didn't  know\n\n what 7 e\u0301 or é was.",
    "日本語 and ελληνικά\t!!  <|end|>after 🙂",
    "   ",
)


def trained(pattern: str, composed: bool) -> Tokenizer:
    """Byte-level BPE as the family's own, trained on a little text."""
    made = Tokenizer(models.BPE())
    if composed:
        made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([VALIDATION.read_text(encoding="utf-8")[:100_000], *TEXTS], trainer)
    made.add_special_tokens(["<|end|>"])
    return made


_QWEN35 = PRETOKENIZE_REGEX.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"\s\p{L}", r"\s\p{L}\p{M}"
)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("qwen2", PRETOKENIZE_REGEX),
        ("llama-bpe", _LLAMA3),
        ("qwen35", _QWEN35),
        ("falcon3", _LLAMA3),
        ("dbrx", _LLAMA3),
    ],
)
def test_byte_level_bpe_gives_the_same_tokens(kind: str, pattern: str) -> None:
    original = trained(pattern, composed=kind in ("qwen2", "qwen35"))
    model = json.loads(original.to_str())["model"]
    size = original.get_vocab_size()
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": [original.id_to_token(index) for index in range(size)],
        "tokenizer.ggml.token_type": [3 if index == size - 1 else 1 for index in range(size)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": size - 1,
        "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    files = tokenizer_files(GgufFile(Path("x.gguf"), metadata, {}), [])
    found = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in (*TEXTS, VALIDATION.read_text(encoding="utf-8")[100_000:110_000]):
        assert found.encode(text).ids == original.encode(text).ids
        assert found.decode(found.encode(text).ids) == original.decode(original.encode(text).ids)
    assert found.token_to_id("<|end|>") in found.encode(TEXTS[1]).ids
    assert json.loads(files["generation_config.json"]) == {
        "bos_token_id": size - 1,
        "eos_token_id": [size - 1],
    }
    metadata["tokenizer.ggml.add_bos_token"] = True
    files = tokenizer_files(GgufFile(Path("x.gguf"), metadata, {}), [])
    assert Tokenizer.from_str(files["tokenizer.json"].decode()).encode("a").ids[0] == size - 1


def by_definition(text: str, pieces: list[str], scores: list[float]) -> list[str]:
    """SentencePiece's BPE: of all neighbours whose union is a piece, the union with the best score,
    the first of them, until there is none; what is no piece by itself becomes bytes."""
    best = dict(zip(pieces, scores, strict=True))
    parts = list(text.replace(" ", "▁"))
    while True:
        unions = [
            (-best[a + b], at)
            for at, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in best
        ]
        if not unions:
            break
        _, at = min(unions)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelled = (
        [part] if part in best else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts
    )
    return [piece for part in spelled for piece in part]


def test_sentencepiece_gives_the_tokens_of_its_definition(tmp_path: Path) -> None:
    path = write_demo_gguf(tmp_path / "demo.gguf", everywhere(Type.Q4_0))
    imported = open_gguf(path, tmp_path, Width.INT8, nothing)
    files = {file.name: file.path.read_bytes() for file in imported.checkpoint.files}
    found = Tokenizer.from_str(files["tokenizer.json"].decode())
    model = json.loads(files["tokenizer.json"])["model"]
    pieces = [piece for piece in model["vocab"] if not piece.startswith("<")]
    rank = {
        "".join(merge): position for position, merge in reversed(list(enumerate(model["merges"])))
    }
    scores = [-float(rank.get(piece, len(model["merges"]))) for piece in pieces]
    assert json.loads(files["tokenizer_config.json"]) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    text = VALIDATION.read_text(encoding="utf-8")[:600] + " ζ"
    assert found.encode(text).tokens == by_definition(text, pieces, scores)
    assert found.decode(found.encode(text).ids) == text


MIXED = "I'LL take 1234 of ΔΣ, don't\n\nx"


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        (
            "gpt-2",
            ["I", "'", "LL", " take", " 1234", " of", " ΔΣ", ",", " don", "'t", "\n", "\n", "x"],
        ),
        (
            "command-r",
            [
                "I",
                "'",
                "LL",
                " take",
                " ",
                *"1234",
                " of",
                " ΔΣ",
                ",",
                " don",
                "'t",
                "\n",
                "\n",
                "x",
            ],
        ),
        (
            "glm4",
            ["I", "'LL", " take", " ", "123", "4", " of", " ΔΣ", ",", " don", "'t", "\n\n", "x"],
        ),
        ("gpt-4o", ["I'LL", " take", " ", "123", "4", " of", " ΔΣ", ",", " don't", "\n\n", "x"]),
        (
            "tekken",
            ["I", "'LL", " take", " ", *"1234", " of", " ΔΣ", ",", " don", "'t", "\n\n", "x"],
        ),
        (
            "seed-coder",
            ["I", "'LL", " take", " ", *"1234", " of", " ΔΣ", ",", " don", "'t", "\n\n", "x"],
        ),
        (
            "deepseek-llm",
            [
                "I",
                "'",
                "LL",
                " take",
                " ",
                *"1234",
                " of",
                " ΔΣ",
                ",",
                " don",
                "'",
                "t",
                "\n",
                "\n",
                "x",
            ],
        ),
        (
            "deepseek-coder",
            [
                "I",
                "'",
                "LL",
                " take",
                " ",
                *"1234",
                " of",
                " ΔΣ",
                ",",
                " don",
                "'",
                "t",
                "\n",
                "\n",
                "x",
            ],
        ),
        (
            "deepseek-v3",
            ["I", "'LL", " take", " ", "123", "4", " of", " ΔΣ", ",", " don", "'t", "\n\n", "x"],
        ),
        (
            "exaone-moe",
            ["I", "'LL", " take", " ", *"1234", " of ΔΣ", ",", " don", "'t", "\n\n", "x"],
        ),
    ],
)
def test_each_kind_splits_text_by_its_rule(kind: str, pieces: list[str]) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.add_bos_token": False,
    }
    files = tokenizer_files(GgufFile(Path("x.gguf"), metadata, {}), [])
    found = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert found.pre_tokenizer is not None
    places = [place for _, place in found.pre_tokenizer.pre_tokenize_str(MIXED)]
    assert [MIXED[begin:end] for begin, end in places] == pieces


def test_a_tokenizer_of_another_kind_is_left_out_and_said() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "nobody-knows",
        "tokenizer.ggml.tokens": ["a"],
    }
    notes: list[str] = []
    assert tokenizer_files(GgufFile(Path("x.gguf"), metadata, {}), notes) == {}
    assert "nobody-knows" in notes[0] and "safetensors" in notes[0]


def test_pieces_that_would_take_for_ever_to_merge_are_refused() -> None:
    pieces = ["a", "a" * 100_000]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0, -1.0],
    }
    with pytest.raises(InvalidArgumentError, match="tokens"):
        tokenizer_files(GgufFile(Path("x.gguf"), metadata, {}), [])


def test_names_that_are_no_text_are_refused() -> None:
    metadata: dict[str, Any] = {
        "general.architecture": ["llama"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": ["gpt-2"],
        "tokenizer.ggml.tokens": ["a"],
    }
    file = GgufFile(Path("x.gguf"), metadata, {})
    assert tokenizer_files(file, []) == {}
    with pytest.raises(UnsupportedModelError, match="cannot be read from a GGUF file"):
        record_of(file)


ENDING = [
    "<s>",
    "</s>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "a",
    "<|im_start|>",
]


def files_with(kinds: list[int], **metadata: Any) -> dict[str, Any]:
    """The generation_config.json and the tokenizer_config.json of a file with the tokens of ENDING,
    of these kinds."""
    values = {f"tokenizer.{key.replace('__', '.')}": value for key, value in metadata.items()}
    values |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ENDING,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 1,
    }
    files = tokenizer_files(GgufFile(Path("x.gguf"), values, {}), [])
    generation, settings = (
        json.loads(files[f"{name}_config.json"]) for name in ("generation", "tokenizer")
    )
    return {"ends": generation["eos_token_id"], "template": settings.get("chat_template")}


@pytest.mark.parametrize(
    ("kinds", "metadata", "ends"),
    [
        ([3, 3, 1, 1, 1, 1, 1, 3], {}, [1]),
        ([3, 3, 3, 1, 1, 1, 1, 3], {}, [1, 2]),
        ([3, 3, 3, 3, 3, 4, 1, 3], {}, [1, 2, 3, 4, 5]),
        ([3, 3, 1, 1, 1, 1, 1, 3], {"ggml__eot_token_id": 4, "ggml__eom_token_id": 3}, [1, 3, 4]),
        ([3, 3, 1, 1, 1, 1, 1, 3], {"ggml__eot_token_id": 2**32 - 1}, [1]),
    ],
)
def test_an_answer_ends_with_each_token_that_a_file_names_or_marks_as_an_end(
    kinds: list[int], metadata: dict[str, Any], ends: list[int]
) -> None:
    assert files_with(kinds, **metadata)["ends"] == ends


def test_named_templates_are_kept_by_their_names() -> None:
    plain = [1] * len(ENDING)
    assert files_with(plain)["template"] is None
    assert files_with(plain, chat_template="x")["template"] == "x"
    named = {"chat_templates": ["absent"], "chat_template__tool_use": "y"}
    tool_use = {"name": "tool_use", "template": "y"}
    assert files_with(plain, **named)["template"] == [tool_use]
    found = files_with(plain, chat_template="x", **named)["template"]
    assert found == [{"name": "default", "template": "x"}, tool_use]
