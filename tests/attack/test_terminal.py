"""No node and no client steers a terminal: not by what they say now, and not by what an old state holds."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import Role
from edgeshard.domain.ids import check_plain, escaped
from edgeshard.metrics.exposition import Metrics
from edgeshard.metrics.families import gauge
from tests.attack import terminal
from tests.cli.conftest import edgectl, site
from tests.coordinator.conftest import open_site
from tests.support.identities import Identities

__all__ = ["edgectl", "open_site", "site"]


def is_plain(line: str) -> bool:
    """By Unicode's own tables."""
    turning = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return not any(
        unicodedata.category(c) in ("Cc", "Zl", "Zp")
        or unicodedata.bidirectional(c) in turning
        or c in "\u061c\u200e\u200f"
        for c in line
    )


@pytest.mark.timing
@pytest.mark.parametrize("text", terminal.STEERING)
async def test_a_node_and_a_client_are_refused_by_the_field(text: str, open_site: Any, tmp_path: Path) -> None:
    site = await open_site(identities=Identities(tmp_path))
    met = await terminal.say_as_a_node(site.channel_of(Role.AGENT, "b"), "b", text)
    assert met == {field: field for field in met}
    assert await terminal.say_as_a_client(site.channel_of(Role.CLIENT, "app"), text) == "request_id"
    assert not site.state.nodes


@given(st.text())
def test_what_is_plain_is_shown_as_it_is_and_the_rest_is_plain_then(text: str) -> None:
    shown = escaped(text)
    check_plain(shown, "text")
    try:
        check_plain(text, "text")
    except InvalidArgumentError:
        assert shown != text
    else:
        assert shown == text


@pytest.mark.parametrize("text", terminal.STEERING)
def test_what_an_old_state_holds_is_shown_with_escapes(text: str, edgectl: Any, site: Any) -> None:
    node = site.nodes[0]
    facts = replace(node.facts, kind=f"k{text}", model=f"m{text}", software=f"s{text}")
    site.nodes[0] = replace(node, address=f"h{text}:1", facts=facts)
    for command in (
        *(("get", "nodes", "-o", form) for form in ("table", "wide", "json", "yaml", "name")),
        *(("describe", "node", node.name, "-o", form) for form in ("table", "wide", "json", "yaml")),
    ):
        result = edgectl(*command)
        assert result.exit_code == 0, result.stderr
        for line in result.stdout.split("\n"):
            assert is_plain(line), command


@pytest.mark.parametrize("text", terminal.STEERING)
def test_labels_of_metrics_are_plain(text: str) -> None:
    metrics = Metrics(lambda: [gauge("nodes", "Nodes.", ["node"], [((f"b{text}",), 1.0)])])
    shown = metrics.exposition()[0].decode()
    (line,) = [line for line in shown.split("\n") if line.startswith("nodes{")]
    assert is_plain(line)
