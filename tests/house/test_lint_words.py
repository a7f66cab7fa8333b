"""A new sentence that readers have to decode is refused, in any file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import falling
from tools.lint_words import EVENT_RULE, RULES, TOO_LONG, broken_rules, findings, hits_in

SENTENCES = {
    "write 'if' for a condition, not 'where'": "Retry where there is no answer in time.",
    "begin with the subject, not with 'Of ...,'": "Of two equal plans, the first one is kept.",
    "make a noun the subject, not 'What ... is'": "What a node holds is written to its disk.",
    "only people say, tell and ask": "The node says that it is ready.",
    "write 'after' or 'next to', not 'behind' or 'beside'": "A step runs behind the step of "
    "another request.",
    "write 'no' and a noun, not 'nobody' or 'none where'": "A key that nobody uses expires.",
    "give the number, not 'so many' or 'so long'": "Wait at most so long for an answer.",
    "write 'only', not 'alone'": "This key is for reading alone.",
    "write 'continues', 'arrives' or 'returns'": "The answer goes on after a pause.",
    "write 'except' or 'without'": "Every node but for the first one waits.",
    TOO_LONG: "A sentence has too many words if " + "it has one more word and " * 6 + "an end.",
}
PLACES = {
    "page.md": "# Title\n\n{}\n",
    "edgeshard/docstring.py": '"""{}"""\n',
    "agent/comment.py": "# {}\nx = 1\n",
    "agent/kernel.cpp": "// {}\n",
    "proto/frames.proto": "// {}\n",
    "coordinator/page.js": "// {}\n",
    "tools/run.sh": "# {}\n",
}
SEEN = {
    "edgeshard/help.py": 'def f(a=option("N", "{}")): ...\n',
    "edgeshard/command.py": 'app.command(help="{}")\n',
    "edgeshard/error.py": 'raise NotFoundError(f"{}", field="x")\n',
    "coordinator/label.js": 'const label = "{}";\n',
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def plant(tree: Path, file: str, content: str) -> None:
    (tree / file).parent.mkdir(parents=True, exist_ok=True)
    (tree / file).write_text(content)
    subprocess.run(["git", "add", file], cwd=tree, check=True)


def test_there_is_a_sentence_for_each_rule() -> None:
    assert SENTENCES.keys() == {*RULES, TOO_LONG}


@pytest.mark.parametrize("rule", SENTENCES)
def test_one_new_hit_of_a_rule_is_refused_in_each_place(tree: Path, rule: str) -> None:
    assert list(broken_rules(SENTENCES[rule])) == [rule]
    for file, content in (PLACES | SEEN).items():
        plant(tree, file, content.format(SENTENCES[rule]))
    found = "\n".join(findings(tree, {}))
    for file in PLACES | SEEN:
        assert f"{file}:1: {rule}" in found or f"{file}:3: {rule}" in found


def test_plain_sentences_pass(tree: Path) -> None:
    for file, content in (PLACES | SEEN).items():
        plant(tree, file, content.format("If the node does not answer, the coordinator replans."))
    assert not findings(tree, {})


def test_clauses_of_a_message_are_sentences() -> None:
    fault = "the file " + "that has a long name and " * 3 + "ends here"
    assert list(broken_rules(f"{fault}: {fault}; {fault}")) == [TOO_LONG]
    assert not list(
        hits_in("edgeshard/error.py", f'raise NotFoundError("{fault}: {fault}; {fault}")')
    )


def test_no_baseline_covers_what_users_see(tree: Path) -> None:
    plant(
        tree,
        "edgeshard/help.py",
        SEEN["edgeshard/help.py"].format("The node says that it is ready."),
    )
    assert findings(tree, {"edgeshard/help.py": 5})


def test_an_event_with_a_private_word_is_refused() -> None:
    code = 'log.info("link_dialled_anew", why=1)\nlog.info("link_redialled")\n'
    (hit,) = hits_in("agent/link.py", code)
    assert (hit.rule, hit.line, hit.seen) == (EVENT_RULE, 1, True)


def test_a_baseline_falls_and_moves_with_its_file() -> None:
    baseline = {"a.md": 3, "b.md": 2}
    both = frozenset({"a.md", "b.md"})
    assert falling.excess({"a.md": 3, "b.md": 2}, baseline, both) == {}
    assert falling.excess({"a.md": 4, "b.md": 1}, baseline, both) == {"a.md": 1}
    moved = frozenset({"a.md", "c.md", "d.md"})
    assert falling.excess({"a.md": 3, "c.md": 2}, baseline, moved) == {}
    assert falling.excess({"a.md": 3, "c.md": 2, "d.md": 1}, baseline, moved) == {"d.md": 1}
    assert falling.excess({"a.md": 5}, baseline, moved) == {"a.md": 2}, (
        "only a new file takes a free number"
    )
