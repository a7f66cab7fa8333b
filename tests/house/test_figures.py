"""Figures of the documents name the program that measured them, and the code it ran on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.house import documents
from tools.figures import (
    UNKNOWN,
    Figures,
    code_of,
    figures_of,
    marker,
    stamped,
    tree_hash,
    trees_now,
)

ROOT = documents.ROOT
NAMES = [str(path.relative_to(ROOT)) for path in documents.DOCUMENTS]
WRITTEN_FROM_DATA_SHEETS = ("docs/paper",)
"""By programs of bench/ that give the same every time and look with --check whether a page still
has it."""
WITHOUT = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/decisions/")
"""Commands only, and decisions, whose figures are as they were when the choice was made."""
PROGRAM = re.compile(
    r"python -m (bench\.(?!\w*_report|\w*_paper)\w+|tests\.chaos\.\w+)"
    r"|\bmake (bench-plan|bench|soak|chaos-long|chaos|sim|fuzz)\b"
)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


def sections(text: str) -> list[str]:
    """From one heading to the next; a # in a fenced block is none."""
    hidden = FENCED.sub(lambda block: re.sub(r"^#", " ", block[0], flags=re.MULTILINE), text)
    edges = [match.start() for match in re.finditer(r"^#+ ", hidden, re.MULTILINE)]
    return [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]


def has_table_of_figures(section: str) -> bool:
    """Whether more than half of the cells of its tables begin with a number."""
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in row if not re.fullmatch(r"[ :-]+", cell)]
    return 2 * sum(bool(re.match(r"[-+]?\d", cell)) for cell in cells) > len(cells)


def missing(section: str) -> list[str]:
    """The parts of a section without the comment they need: programs, and its tables."""
    commands = [found.command for found in figures_of(section)]
    prose = COMMENT.sub("", FENCED.sub("", section))
    named = {match[1] or f"make {match[2]}" for match in PROGRAM.finditer(prose)}
    lacking = sorted(
        name
        for name in named
        if not any(re.search(rf"\b{name}(?![\w-])", command) for command in commands)
    )
    return lacking + (["its table"] if has_table_of_figures(section) and not commands else [])


@pytest.mark.parametrize(
    "name", [n for n in NAMES if not n.startswith((*WRITTEN_FROM_DATA_SHEETS, *WITHOUT))]
)
def test_figures_name_what_measured_them_and_the_trees(name: str) -> None:
    """A section that names a benchmark in its text, or has a table of figures, has such a
    comment."""
    for section in sections((ROOT / name).read_text()):
        heading = section.partition("\n")[0]
        assert not missing(section), (
            f"{name}, {heading}: write `<!-- figures: COMMAND @ ROOM:TREE -->` (tools/figures.py)"
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_comment_names_a_program_and_rooms_that_are_there(name: str) -> None:
    text = (ROOT / name).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(figures_of(text)) == len(re.findall(r"^ *<!-- figures\b", text, re.MULTILINE)), (
        "one is malformed"
    )
    answered = (ROOT / "docs" / "decisions" / "tests.md").read_text().splitlines()
    for found in figures_of(text):
        module, target = (
            re.search(form, found.command) for form in (r"python -m ([\w.]+)", r"^make ([a-z-]+)")
        )
        assert module or target, (
            f"{name}:{found.line}: neither `python -m MODULE` nor `make TARGET`"
        )
        if module:
            path = ROOT / module[1].replace(".", "/")
            kept = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            assert kept == (found.commit is None), (
                f"{name}:{found.line}: (of COMMIT) is of programs that are not kept"
            )
            if not kept:
                row = next((line for line in answered if f"`{path.name}.py`" in line), "")
                assert f"| {found.commit} |" in row, (
                    f"{name}:{found.line}: docs/decisions/tests.md has no such program and commit"
                )
        assert target is None or target[1] in targets, f"{name}:{found.line}"
        for room, tree in found.trees.items():
            assert (ROOT / room).exists(), f"{name}:{found.line}: there is no {room}"
            assert re.fullmatch(r"[0-9a-f]{10}", tree), (
                f"{name}:{found.line}: {tree} is no tree of 10 digits"
            )


def test_what_lacks_a_comment_is_found() -> None:
    table = "| a | ms |\n| --- | --- |\n| 1 | 2.0 |\n| 3 | 4.0 |\n"
    fence = "```console\n$ python -m bench.hop\n```\n"
    told = "It takes 1 ms (`python -m bench.hop`).\n"
    assert missing(f"# A\n\n{fence}") == [] and missing(f"# A\n\n{told}") == ["bench.hop"]
    assert missing(f"# A\n\n{table}") == ["its table"] and missing("# A\n\n`make soak` ran.\n") == [
        "make soak"
    ]
    comment = marker("python -m bench.hop --rounds 3", {"agent": "0" * 10})
    assert missing(f"# A\n\n{comment}\n\n{told}\n{table}") == []
    assert len(sections(f"# A\n\n```bash\n# no heading\n```\n\n## B\n\n{told}")) == 3


def test_a_room_that_changes_makes_its_figures_stale_until_they_are_stamped(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True
        )

    for room in ("agent", "edgeshard"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("1\n")
    git("init", "-q")
    git("add", "--all")
    git("commit", "-q", "-m", "first")
    rooms = ("agent", "edgeshard")
    first = trees_now(rooms, tmp_path)
    page = f"# A\n\n{marker('python -m bench.hop', first)}\n\nfigures\n"
    (found,) = figures_of(page)
    assert found == Figures(3, "python -m bench.hop", first) and not found.changed(
        trees_now(rooms, tmp_path)
    )
    assert (
        found.commit is None and Figures(3, "make gone (of 01234567)", first).commit == "01234567"
    )
    (tmp_path / "agent" / "a.py").write_text('"""A docstring."""\n1  # a comment\n')
    assert trees_now(rooms, tmp_path) == first
    (tmp_path / "agent" / "b.py").write_text("2\n")
    now = trees_now(rooms, tmp_path)
    assert found.changed(now) == ["agent"], "what is not committed counts, too"
    git("add", "--all")
    git("commit", "-q", "-m", "second")
    assert trees_now(rooms, tmp_path) == now
    assert not figures_of(stamped(page, now, 3))[0].changed(now)
    with pytest.raises(ValueError, match="line 4"):
        stamped(page, now, 4)
    assert (
        trees_now(("gone",), tmp_path) == {"gone": UNKNOWN} == trees_now(("gone",), tmp_path.parent)
    )


PYTHON = '''"""Module."""
# comment
A = "#"  # trailing
"""Attribute."""


def f(x: str = "#") -> str:
    """Docstring,
    of two lines."""
    return f"{x} # {A}" """kept"""
'''


def test_the_hash_ignores_comments_and_docstrings_only() -> None:
    expected = 'A = "#"\ndef f(x: str = "#") -> str:\n    return f"{x} # {A}" """kept"""'
    assert code_of("a.py", PYTHON.encode()) == expected.encode()
    header = b'// one\nint a;  // two\n/* three\n four */\nchar *u = "http://x";\n'
    assert code_of("a.h", header) == b'int a;\nchar *u = "http://x";'
    for name, content in (("a.toml", b"# kept\n"), ("a.py", b"def ( # kept"), ("a.py", b"\xff")):
        assert code_of(name, content) == content
    first = tree_hash({"a.py": b"1\n", "b.py": b"2\n"})
    assert tree_hash({"b.py": b"# new\n2\n", "a.py": b"1\n"}) == first
    assert (
        len({first, tree_hash({"a.py": b"1\n"}), tree_hash({"a.py": b"1\n", "c.py": b"2\n"})}) == 3
    )
