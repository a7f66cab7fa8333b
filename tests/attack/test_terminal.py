"""No node and no client steers a terminal, neither by present messages nor by an old state."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.text import Text

from edgeshard import cli
from edgeshard.cli.render.output import plain_console, show_text
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
async def test_a_node_and_a_client_are_refused_by_the_field(
    text: str, open_site: Any, tmp_path: Path
) -> None:
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
        *(
            ("describe", "node", node.name, "-o", form)
            for form in ("table", "wide", "json", "yaml")
        ),
    ):
        result = edgectl(*command)
        assert result.exit_code == 0, result.stderr
        for line in result.stdout.split("\n"):
            assert is_plain(line), command


OWN = "\n\t"
"""Characters that texts of several lines keep."""


@pytest.mark.parametrize("text", [text for text in terminal.STEERING if not set(text) & set(OWN)])
def test_what_a_command_prints_is_plain(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_text(f"note: {text}")
    show_text(f"a client: {text}", err=True)
    for kind in (False, True):
        console = plain_console()(
            force_terminal=kind, no_color=True, width=60, file=(target := io.StringIO())
        )
        console.print(f"a condition: {text}", Text(text), Panel(text, title=text), markup=False)
        with console.status("starting") as status:
            status.update(f"deploying {text}")
        shown = target.getvalue()
        assert text not in shown.replace("\r\x1b", "")
        assert text == "\r" or escaped(text) in shown  # rich itself drops a \r
    out, err = capsys.readouterr()
    assert all(is_plain(line) for line in (out + err).split("\n"))


@pytest.mark.parametrize("text", terminal.STEERING)
def test_lines_of_a_log_on_a_terminal_are_plain(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    done = on_a_terminal(LOGGING.format(text=text))
    lines = done.replace("\r\n", "\n").split("\n")
    assert all(is_plain(line.replace("\t", "")) for line in lines), done
    assert done.count(escaped(text)) >= 3, done


LOGGING = """
import logging
import structlog
from edgeshard.domain.errors import UnavailableError
from edgeshard.process import logs
logs.configure_logging("info")
text = {text!r}
structlog.get_logger("edgeshard").warning("refused", why=text)
logging.getLogger("asyncio").warning("of a library: %s", text)
try:
    raise ValueError(text)
except ValueError:
    structlog.get_logger("edgeshard").exception("failed")
logs.report_failure(UnavailableError(text))
logs.tell_ready(text)
"""


def on_a_terminal(program: str) -> str:
    """The standard error of a program, which is a terminal."""
    ours, its = pty.openpty()
    done = subprocess.Popen([sys.executable, "-c", program], stderr=its)
    os.close(its)
    pieces = []
    with contextlib.suppress(OSError):  # the terminal is closed by its last writer
        while piece := os.read(ours, 65536):
            pieces.append(piece)
    os.close(ours)
    assert done.wait(60) == 0
    return b"".join(pieces).decode()


@pytest.mark.parametrize("text", [text for text in terminal.STEERING if not set(text) & set(OWN)])
async def test_a_log_that_edgectl_prints_is_plain(text: str, tmp_path: Path) -> None:
    (tmp_path / "b.log").write_text(f"a library wrote {text} here\n")
    command = [
        sys.executable,
        "-m",
        "edgeshard.cli.main",
        "logs",
        "b",
        "--directory",
        str(tmp_path),
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.decode() == f"a library wrote {escaped(text)} here\n"


def test_commands_print_through_one_function() -> None:
    """Except one line of edgectl's own, its version, and the pieces of an answer."""
    found = {
        path.name: len(
            re.findall(
                r"typer\.echo\(|click\.echo\(|\bprint\(|std(?:out|err)\.write\(|[^n]Console\(", text
            )
        )
        for path in (Path(cli.__file__).parent).rglob("*.py")
        if (
            text := re.sub(
                r"(?:console|self)\.\w*print\(|console\(\)\.print\(|def _print\(",
                "",
                path.read_text(),
            )
        )
    }
    allowed = {"main.py": 2, "output.py": 1, "chat.py": 1, "generate.py": 1}
    assert {name: count for name, count in found.items() if count} == allowed


@pytest.mark.parametrize("text", terminal.STEERING)
def test_labels_of_metrics_are_plain(text: str) -> None:
    metrics = Metrics(lambda: [gauge("nodes", "Nodes.", ["node"], [((f"b{text}",), 1.0)])])
    shown = metrics.exposition()[0].decode()
    (line,) = [line for line in shown.split("\n") if line.startswith("nodes{")]
    assert is_plain(line)
