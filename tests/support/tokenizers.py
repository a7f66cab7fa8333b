"""Files that the tokenizer library accepts as tokenizers, some of which make its Rust code
panic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PANICS: dict[str, dict[str, Any]] = {
    # A prefix that is longer than its text.
    "load": {
        "model": {
            "type": "BPE",
            "continuing_subword_prefix": "####",
            "vocab": {"0": 0, "1": 1, "01": 2},
            "merges": [["0", "1"]],
        }
    },
    # A special token that is nowhere defined.
    "encode": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[X]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {},
        }
    },
    # Strips "2" at both ends of a token that is nothing else; tokens "0" and "1" are decoded.
    "decode": {"decoder": {"type": "Strip", "content": "2", "start": 1, "stop": 1}},
}
"""Parts of a tokenizer.json, by what panics with them. The parts before it work."""


def write_tokenizer(path: Path, **parts: object) -> Path:
    """A tokenizer.json of the letters 0, 1 and 2, their own ids, and "01" with id 3, with some
    parts changed."""
    whole: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "vocab": {"0": 0, "1": 1, "2": 2, "01": 3},
            "merges": [["0", "1"]],
        },
    }
    path.write_text(json.dumps(whole | parts))
    return path
