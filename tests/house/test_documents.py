"""The documents tell the truth: their commands run, their links and files exist, their make targets
too."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from edgeshard.cli.main import COMMANDS
from tests.house import documents

pytestmark = pytest.mark.timing

ROOT: Path = documents.ROOT
LANGUAGES = {"bash", "console", "python", "toml", "yaml", "json", "text", "mermaid"}
TIMEOUT_S = 400
NAMES = [str(path.relative_to(ROOT)) for path in documents.DOCUMENTS]
DECISIONS = [
    path for path in sorted((ROOT / "docs" / "decisions").glob("*.md")) if path.name != "README.md"
]
CODE = {".py", ".cpp", ".h", ".proto", ".js", ".sh"}
FIRST = "README.md"
"""Also in the quick form."""
RUNNABLE = [
    n for n in NAMES if any(b.language in ("bash", "python") for b in documents.blocks(ROOT / n))
]


def script(name: str) -> str:
    """One bash script of all the document's bash and python blocks, in order: one reader, one
    terminal."""
    parts = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT"]
    for block in documents.blocks(ROOT / name):
        parts.append(f"echo '@@ {block.place}' >&2")
        if block.language == "bash":
            parts.append(block.text)
        elif block.language == "python":
            parts.append(f"python - <<'END_OF_PYTHON'\n{block.text}END_OF_PYTHON")
    return on_free_ports("\n".join(parts))


def on_free_ports(text: str) -> str:
    """Each loopback port that the text names, replaced by a port that is free now."""
    free: dict[str, int] = {}
    for port in set(re.findall(r"127\.0\.0\.1:(\d{4,5})", text)):
        free[port] = free_port(taken=free.values())
    return re.sub(r"127\.0\.0\.1:(\d{4,5})", lambda match: f"127.0.0.1:{free[match[1]]}", text)


def free_port(taken: Collection[int]) -> int:
    """A port that stays free until it is used: the system gives it to no process that requests any
    port."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = max(range(10_000, first), range(last + 1, 65_536), key=len)
    for port in random.sample(ports, len(ports)):
        if port not in taken:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                return port
    raise AssertionError(f"no port of {ports} is free")


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == FIRST else pytest.mark.long) for n in RUNNABLE]
)
def test_the_commands_of_a_document_run(name: str, tmp_path: Path) -> None:
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("EDGESHARD__", "XDG_"))
    }
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
    }
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    process = subprocess.Popen(
        ["bash", "-c", script(name)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # The daemons a document starts are in its own process group.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{name} did not finish in {TIMEOUT_S} s:\n{output}\n{logs(tmp_path)}")
    assert process.returncode == 0, f"{output}\n{logs(tmp_path)}"


def logs(directory: Path) -> str:
    """The ends of the logs that a document's daemons left."""
    tails = [
        f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:])
        for path in directory.rglob("*.log")
    ]
    return "\n".join(tails)


@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_run_or_says_why_not(name: str) -> None:
    for block in documents.blocks(ROOT / name):
        assert block.language in LANGUAGES, (
            f"{block.place}: language {block.language!r} is none of {sorted(LANGUAGES)}"
        )
        if block.language == "console":
            assert block.reason, (
                f"{block.place}: write `<!-- not run: REASON -->` above it, or make it bash"
            )


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"(?:\[([^\[\]]*))?\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        link, _, anchor = (target[1] or target[2]).partition("#")
        if "://" in link:
            continue
        page = (ROOT / name).parent / link if link else ROOT / name
        assert page.exists(), f"{name} links to {link}, which does not exist"
        text = target[0]
        if re.fullmatch(r"[\w./-]+\.md", text):
            named = page.resolve().relative_to(ROOT)
            assert text == str(named), (
                f"{name} links to {named} and says {text}: one kind of path, from the root"
            )
        if anchor and page.suffix == ".md":
            assert anchor in documents.anchors(page), (
                f"{name} links to #{anchor}, no heading of {page.name}"
            )


@pytest.mark.parametrize("name", NAMES)
def test_files_and_make_targets_named_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for path in re.findall(r"`([\w.-]+/[\w./-]*)`", text):
        assert (ROOT / path).exists(), (
            f"{name} names {path}, which does not exist (paths are from the root)"
        )
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"\bmake ([a-z][a-z0-9-]+)`|^make ([a-z0-9-]+)", text, re.MULTILINE):
        assert (target[0] or target[1]) in targets, f"{name} names `make {target[0] or target[1]}`"


def test_commands_of_the_page_for_others_users_exist() -> None:
    """Its tables have no blocks that run, so each command and each option of it is looked up."""
    page = (ROOT / "docs" / "coming-from.md").read_text()
    lines = re.findall(r"`edgectl ([^`]+)`", page)
    assert len(lines) > 30
    commands = {command.name: command for command in COMMANDS}
    for line in lines:
        first, *words = line.split()
        assert first in commands, f"edgectl {line}: there is no {first}"
        command = commands[first].load()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert not hasattr(command, "commands"), f"edgectl {line} is a group of commands"
        options = {name for parameter in command.params for name in parameter.opts}
        unknown = {word for word in words if word.startswith("--")} - options
        assert not unknown, f"edgectl {line}: there is no {sorted(unknown)}"


@pytest.mark.parametrize("name", NAMES)
def test_tests_named_exist(name: str) -> None:
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / name).read_text()):
        assert re.search(rf"^(?:async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), (
            f"{path} has no {test}"
        )


def test_each_cell_of_who_can_do_what_names_a_test() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    section = text.partition("## Who can do what")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \|(.*)\|$", section, re.MULTILINE)
    assert [who for who, _ in rows[1:]] == [
        "outsider",
        "key",
        "operator",
        "node",
        "head",
        "stage",
        "middle",
        "user",
    ]
    for who, cells in rows[1:]:
        for cell in cells.split("|"):
            assert re.search(r"`tests/[\w/]+\.py::\w+`", cell), f"{who}: {cell}"


@pytest.mark.parametrize("name", NAMES)
def test_a_table_begins_a_paragraph(name: str) -> None:
    """Behind a line of text it would be text as well, and the line is likely one that was cut."""
    lines = (ROOT / name).read_text().splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r"\|( -+:? \|)+", line) and number > 1:
            assert not lines[number - 2].strip(), (
                f"{name}:{number}: put an empty line in front of the table"
            )


def test_the_index_of_decisions_has_each_page_once() -> None:
    directory = ROOT / "docs" / "decisions"
    rows = re.findall(
        r"^- \[([\w-]+)\]\(\1\.md\): \S", (directory / "README.md").read_text(), re.MULTILINE
    )
    pages = sorted(path.stem for path in directory.glob("*.md") if path.name != "README.md")
    assert sorted(rows) == pages


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name)
def test_each_heading_of_a_decision_names_a_choice(path: Path) -> None:
    headings = re.findall(r"^##+ (.+)$", path.read_text(), re.MULTILINE)
    assert headings, f"{path.name} has no choice"
    assert all(heading.startswith("Choice: ") for heading in headings), (
        f"{path.name}: write `## Choice: ...`"
    )
    assert len(set(headings)) == len(headings), f"{path.name} has one heading twice"


def test_each_decision_that_code_cites_exists() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    cited = 0
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if path.suffix not in CODE or path == Path(__file__):
            continue
        text = path.read_text()
        assert not re.search(r"\b[Dd]ecision 0\d{3}\b", text), f"{name} cites a decision by number"
        for page, anchor in re.findall(r"decisions/([\w-]+\.md)(?:#([\w-]+))?", text):
            place = ROOT / "docs" / "decisions" / page
            # tests/house/test_systems.py plants a wrong one.
            if anchor == "choice-replay":
                continue
            assert place.exists(), f"{name} cites {page}, no page of docs/decisions"
            assert not anchor or anchor in documents.anchors(place), (
                f"{name} cites #{anchor}, no heading of {page}"
            )
            cited += 1
    assert cited > 5 or not tracked.stdout, "the pattern finds no citations any more"


def test_drawings_are_short_and_on_a_page() -> None:
    """A drawing that a program can repeat is not stored; a table decides as well."""
    drawings = sorted((ROOT / "docs").glob("**/*.svg"))
    text = "".join((ROOT / name).read_text() for name in NAMES)
    assert all(path.name in text for path in drawings)
    assert sum(len(path.read_text().splitlines()) for path in drawings) <= 2000


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_prose_are_short(name: str) -> None:
    found = documents.long_lines((ROOT / name).read_text())
    assert not found, f"{name}: lines {found} have more than {documents.LONGEST_LINE} characters"


def test_a_long_line_is_found_where_it_could_be_broken() -> None:
    short, word = "word " * 24, "w" * 130
    assert documents.long_lines(f"{short.strip()}\n{short}more\n") == [2]
    assert documents.long_lines(f"- {word}\n1. https://{word}\n{word}\n") == []
    assert (
        documents.long_lines(f"| {short}more |\n<!-- {short}more -->\n```text\n{short}more\n```\n")
        == []
    )
    assert documents.long_lines(
        f"<!-- a\nb -->\n```text\na\n```\n{short}more\n  - {short}more\n"
    ) == [6, 7]


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_the_map_has_every_page(path: Path) -> None:
    section = (
        (ROOT / "ARCHITECTURE.md").read_text().partition("## Documents")[2].partition("\n## ")[0]
    )
    assert f"(docs/{path.name})" in section, (
        f"name docs/{path.name} under Documents in ARCHITECTURE.md"
    )


def test_what_the_readme_tells_a_newcomer_to_type_is_what_continuous_integration_types() -> None:
    typed = {
        line.partition("#")[0].strip()
        for block in documents.blocks(ROOT / "README.md")
        if block.language == "console"
        for line in block.text.splitlines()
    }
    commands = {line for line in typed if line.startswith("make ")}
    assert {"make serve", "make demo", "make test", "make test-all"} <= commands
    automated = {
        line.partition(" ||")[0] for line in (ROOT / ".ci" / "run").read_text().splitlines()
    }
    # The first listens beyond loopback: tests/cli/test_serve.py runs its commands on loopback.
    # test-all contains test.
    assert commands - automated == {"make serve", "make test"}


def test_the_reader_of_documents_sees_blocks_reasons_and_indentation(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "a\n\n```bash\necho 1\n```\n<!-- not run: costs money -->\n\n- b\n  ```console\n  $ pay\n  "
        "```\n"
    )
    first, second = documents.blocks(path)
    assert (first.language, first.text, first.reason, first.line) == ("bash", "echo 1\n", "", 3)
    assert (second.language, second.text) == ("console", "$ pay\n")
    assert second.reason == ""


def test_a_document_with_a_wrong_command_fails(tmp_path: Path) -> None:
    """The harness itself: the first failing command ends a script, and its children with it."""
    text = (
        "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\nsleep 60 "
        "&\nfalse\necho reached\n"
    )
    result = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert result.returncode == 1
    assert "reached" not in result.stdout
