"""Tokenizers of a few kilobytes that make gigabytes of a short text."""

from __future__ import annotations

from typing import Any

DOUBLING = {"type": "Replace", "pattern": {"String": "0"}, "content": "00"}
PROMPT = "0000"


def chains(count: int = 40) -> dict[str, dict[str, Any]]:
    """Parts of a tokenizer.json by their names, each of `count` steps that double a text or its
    tokens; some steps have no type, which the library lets pass."""
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    twice = [{"Sequence": {"id": "A", "type_id": 0}}] * 2
    template = {"type": "TemplateProcessing", "single": twice, "pair": _PAIR, "special_tokens": {}}
    halves = [{"normalizers": [{"prepend": "00"}, DOUBLING]}] * (count // 2)
    return {
        "replaced": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * count}},
        "in pairs": {"normalizer": {"normalizers": halves}},
        "by expression": {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"Regex": "(?=0)"}, "content": "0"}]
                * count,
            }
        },
        "bytes as letters": {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "ByteLevel",
                        "add_prefix_space": False,
                        "trim_offsets": True,
                        "use_regex": False,
                    }
                ]
                * count,
            }
        },
        "spaces": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [spaces] * count}},
        "decoded": {"decoder": {"type": "Sequence", "decoders": [DOUBLING] * count}},
        "tokens": {"post_processor": {"type": "Sequence", "processors": [template] * count}},
    }


_PAIR = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
