"""A commit's subject is an imperative, and its body has the reason."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.lint_commits import FIRST, ROOT, commits, faults, findings, message_faults

IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@b.c"]


def git(tree: Path, *arguments: str) -> str:
    ended = subprocess.run(
        ["git", *IDENTITY, *arguments], cwd=tree, capture_output=True, text=True, check=True
    )
    return ended.stdout.strip()


@pytest.mark.parametrize(
    ("subject", "body", "lines", "word"),
    [
        ("The line of seeds is short", "", 1, "verb"),
        ("Wrapped a long line", "", 1, "verb"),
        ("Wrap " + "a long " * 12 + "line", "", 1, "72"),
        ("Wrap long lines", "", 51, "body"),
    ],
)
def test_a_bad_message_is_refused(subject: str, body: str, lines: int, word: str) -> None:
    (fault,) = faults(subject, body, lines)
    assert word in fault


def test_a_good_message_passes() -> None:
    assert not list(faults("Wrap a long line", "", 50)) and not list(
        faults("Wrap lines", "They end at 100.", 51)
    )


def test_commits_since_the_rule_are_read_and_merges_are_not(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Old words of before")
    first = git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "checkout", "-q", "-b", "side")
    (tmp_path / "long").write_text("line\n" * 60)
    git(tmp_path, "add", "long")
    git(tmp_path, "commit", "-q", "-m", "Lines that are long")
    git(tmp_path, "checkout", "-q", "main")
    git(tmp_path, "merge", "-q", "--no-ff", "-m", "The side", "side")
    (commit,) = commits(tmp_path, first)
    assert (commit.subject, commit.lines) == ("Lines that are long", 60)
    assert len(list(findings(tmp_path, first))) == 2
    assert not commits(tmp_path, "0" * 40), "a tree without that history"


def test_a_message_is_checked_before_it_is_committed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "long").write_text("line\n" * 60)
    git(tmp_path, "add", "long")
    assert list(message_faults(tmp_path, "Add lines\n# a comment\n"))
    assert not list(message_faults(tmp_path, "Add lines\n\nThey were missing.\n"))
    assert not list(message_faults(tmp_path, "Merge branch 'side'\n"))


def test_this_tree_passes() -> None:
    assert not list(findings(ROOT, FIRST))
