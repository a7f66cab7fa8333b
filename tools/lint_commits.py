"""Refuse commit messages whose subject names no effect; `make check` and a hook of pre-commit run
it.

A subject begins with a verb in the imperative and has at most 72 characters. A commit that changes
more than 50 lines has a body with the reason. Merges are exempt, and so are commits before the
rule.

    python tools/lint_commits.py                 the commits since the rule; exits 1 on a finding
    python tools/lint_commits.py --message FILE  a message that is being written
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = "a2b49d64"
"""The last commit before the rule."""
MAX_SUBJECT = 72
MAX_LINES_WITHOUT_BODY = 50
_VERBS = """
Accept Add Admit Adopt Align Allow Answer Apply Assign Avoid Bound Break Build Bump Cache Cancel
Catch Change Charge Check Choose Clean Clear Close Collect Compare Compile Compress Compute Convert
Copy Correct Count Cover Create Cut Declare Decode Define Delete Describe Detect Disable Document
Download Draw Drop Enable Encode End Ensure Explain Export Expose Extend Extract Fetch Filter Find
Finish Fix Follow Forbid Format Free Generate Give Group Guard Handle Hash Hide Hold Ignore
Implement Import Improve Include Increase Index Inline Insert Install Introduce Join Keep Kill Lead
Leave Let Limit Link Lint List Load Lock Log Lower Make Map Mark Match Measure Mend Merge Migrate
Move Name Normalise Note Open Order Pack Pad Park Parse Pass Pin Place Plan Plot Poll Prefer Prepare
Preserve Prevent Print Prove Publish Pull Push Put Quantise Raise Read Rebuild Record Recover Reduce
Refactor Refresh Refuse Reject Release Remove Rename Render Repair Replace Replay Report Request
Require Reserve Resolve Restore Restrict Retry Return Reuse Revert Rewrite Round Route Run Save Say
Scale Schedule Score Search Send Separate Serve Set Share Ship Shorten Show Shrink Simplify Skip
Slice Sort Speed Split Start State Stop Store Stream Strip Support Swap Switch Sync Take Teach Test
Tidy Time Tolerate Track Train Translate Treat Try Turn Type Unify Unpack Update Upgrade Use
Validate Verify Wait Warn Watch Widen Wrap Write Yield
"""
VERBS = frozenset(_VERBS.split())


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit's name, its message, and the lines that it adds or removes."""

    name: str
    subject: str
    body: str
    lines: int


def faults(subject: str, body: str, lines: int) -> Iterator[str]:
    """The faults of a message."""
    verb = subject.split(" ", 1)[0]
    if verb not in VERBS:
        yield f"begins with {verb!r}, which is no verb of VERBS in tools/lint_commits.py"
    if len(subject) > MAX_SUBJECT:
        yield f"has {len(subject)} characters, at most {MAX_SUBJECT}"
    if lines > MAX_LINES_WITHOUT_BODY and not body.strip():
        yield f"changes {lines} lines and has no body: write the reason"


def commits(root: Path, first: str) -> list[Commit]:
    """The commits after `first` that are no merges; empty if this tree has no history back to
    `first`."""
    known = _git(root, "cat-file", "-e", f"{first}^{{commit}}")
    if known is None:
        return []
    text = (
        _git(
            root,
            "log",
            "--no-merges",
            "--format=%x00%h%x01%s%x01%b%x01",
            "--shortstat",
            f"{first}..HEAD",
        )
        or ""
    )
    found = []
    for record in text.split("\0")[1:]:
        name, subject, body, changes = record.split("\1")
        lines = sum(int(number) for number in re.findall(r"(\d+) (?:insertion|deletion)", changes))
        found.append(Commit(name, subject, body, lines))
    return found


def _git(root: Path, *arguments: str) -> str | None:
    """The output of git; None if it fails."""
    try:
        ended = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return ended.stdout if ended.returncode == 0 else None


def findings(root: Path, first: str = FIRST) -> Iterator[str]:
    for commit in commits(root, first):
        for fault in faults(commit.subject, commit.body, commit.lines):
            yield f"{commit.name}: {commit.subject!r} {fault}"


def message_faults(root: Path, message: str) -> Iterator[str]:
    """The faults of a message that is being written, for the staged changes."""
    written = "\n".join(line for line in message.split("\n") if not line.startswith("#"))
    subject, _, body = written.strip().partition("\n")
    if subject.startswith(("Merge ", "fixup! ", "squash! ")):
        return
    changes = _git(root, "diff", "--cached", "--shortstat") or ""
    lines = sum(int(number) for number in re.findall(r"(\d+) (?:insertion|deletion)", changes))
    for fault in faults(subject, body, lines):
        yield f"{subject!r} {fault}"


def main() -> int:
    if sys.argv[1:2] == ["--message"]:
        found = list(message_faults(ROOT, Path(sys.argv[2]).read_text(encoding="utf-8")))
    else:
        found = list(findings(ROOT))
    for finding in found:
        print(finding, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
