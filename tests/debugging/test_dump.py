"""The document of a site's dumps: one process's answer does not cost the others theirs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgeshard.debugging.dump import ProcessDump, site_document, site_parts, to_text
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import NodeName


@pytest.mark.parametrize(
    "text", [b"{", b"5", b"\xff", b"[" * 200_000], ids=["cut", "number", "no text", "deep"]
)
def test_a_node_that_answers_nonsense_is_named_and_the_others_are_there(text: bytes) -> None:
    dumps = [
        ProcessDump(NodeName(""), b'{"state": 1}'),
        ProcessDump(NodeName("a"), text),
        ProcessDump(NodeName("b"), b'{"state": 2}'),
        ProcessDump(NodeName("c"), failure=UnavailableError("away", reason="NODE_AWAY")),
    ]
    document = site_document(dumps, "now")
    assert document["nodes"]["a"]["failure"]["reason"] == "NOT_JSON"
    assert document["nodes"]["c"]["failure"]["reason"] == "NODE_AWAY"
    assert site_parts(document) == ({"state": 1}, {"b": {"state": 2}})


def test_a_part_that_is_no_object_is_no_node() -> None:
    assert site_parts({"dump": 1, "coordinator": {}, "nodes": {"a": 5}}) == ({}, {})


def test_text_is_the_document() -> None:
    document: dict[str, Any] = {"state": {"ä": [1.5, None, "x"]}, "ring": []}
    assert json.loads(to_text(document)) == document
