"""Refuse sentences that readers have to decode; `make check` runs it.

It reads Markdown, docstrings, comments (Python, C++, JavaScript, shell, protocol files) and what
users see: help texts of options and commands, error messages, log events and the dashboard's
labels. Texts that users see have no hit. The rest has a baseline by file (tools/lint_words.json),
which may only fall.

    python tools/lint_words.py
        exits 1 on a new hit
    python tools/lint_words.py FILE...
        print each hit of these files
    python tools/lint_words.py --lower
        write the baseline of today, if no file has more than before
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import falling  # noqa: E402

BASELINE = ROOT / "tools" / "lint_words.json"
MAX_WORDS = 30
MIN_WORDS = 4
_CONDITION = (
    "a|an|it|they|there|none|no|nobody|one|that|this|these|some|something|what|any|many|nothing|he|she|you|its|their"
    "|another|other|both|only|not"
)
RULES = {
    "write 'if' for a condition, not 'where'": rf"\b[Ww]here (?:{_CONDITION})\b"
    r"(?! (?:is|are|lives?|lie|lies|stands?) (?:stored|kept|in|at)\b)",
    "begin with the subject, not with 'Of ...,'": r"^(?:Of|From|By|Behind|Beside|Beyond|With|For"
    r"|To) (?!course|example|instance|each of|now|run|see|use|get|find|change|make)[^,.]{3,60}, "
    r"(?:the|a|an|each|those|these|no|one|it|they|there)\b",
    "make a noun the subject, not 'What ... is'": r"^(?:What|Who|Whoever|Whatever|Which|That) "
    r"(?!is new|is it|is this|are|to)[a-z]+ [^?]{3,80}"
    r"\b(?:is|are|has|have|was|were|takes?|goes|comes|costs?|needs?|stands?|gets?)\b(?![^.]*\?)",
    "only people say, tell and ask": r"\b(?:says|said|tells|told|is asked|are asked|be asked|asks "
    r"for|believed)\b",
    "write 'after' or 'next to', not 'behind' or 'beside'": r"\b(?:behind|beside)\b"
    r"(?! (?:NAT|a (?:proxy|router|firewall|reverse|load)|the proxy))",
    "write 'no' and a noun, not 'nobody' or 'none where'": r"\b(?:[Nn]obody|[Nn]one where|[Nn]one "
    r"for)\b",
    "give the number, not 'so many' or 'so long'": r"\b(?:so many|so much|so long|how many it|for "
    r"as long as)\b"
    r"(?! (?:as to|that))",
    "write 'only', not 'alone'": r"\b\w+ alone[.,;:)]?(?: |$)",
    "write 'continues', 'arrives' or 'returns'": r"\b(?:goes on|go on|went on|comes of|came "
    r"of|comes back"
    r"|come as they|stands apart|on its way)\b",
    "write 'except' or 'without'": r"\b(?:but for|of those that|of one that|than those"
    r"|that of (?:a|an|the)|those of)\b",
}
TOO_LONG = f"at most {MAX_WORDS} words and one semicolon a sentence"
EVENT_WORDS = frozenset(
    {"told", "asked", "said", "believed", "anew", "behind", "beside", "owed", "nobody", "alone"}
)
"""Words that no log event has in its name."""
EVENT_RULE = "name a log event by what happened, in the field's words"
_LOG_CALLS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
_HELP_KEYWORDS = frozenset({"help", "epilog", "short_help", "description"})
_CODE_COMMENT = re.compile(r"(?:^|\s)(?://|\*|#) ([A-Z].*)$")
_PYTHON_COMMENT = re.compile(r"(?:^ *|  )# (?!noqa|type:|pragma)(.*)$")
_LABEL = re.compile(r"\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'|>([^<>`]+)<")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose. `seen` if users see it: a help text, an error message, a log event or a
    label."""

    line: int
    text: str
    seen: bool = False
    event: bool = False


@dataclass(frozen=True, slots=True)
class Hit:
    """A sentence that breaks a rule, in a file of the tree."""

    file: str
    line: int
    rule: str
    sentence: str
    seen: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.sentence[:160]}"


def texts_of(file: str, content: str) -> Iterator[Text]:
    """The prose of a file, by the end of its name."""
    if file.endswith(".md"):
        yield from _markdown(content)
    elif file.endswith(".py"):
        yield from _python(content)
    elif file.endswith((".h", ".cpp", ".proto", ".js", ".sh")):
        for number, line in enumerate(content.split("\n"), 1):
            if (match := _CODE_COMMENT.search(line)) is not None:
                yield Text(number, match[1])
            elif file.endswith(".js"):
                yield from _labels(number, line)


def _labels(number: int, line: str) -> Iterator[Text]:
    for match in _LABEL.finditer(line):
        label = next(group for group in match.groups() if group is not None)
        if " " in label:
            yield Text(number, re.sub(r"\$\{[^}]*\}", "X", label), seen=True)


def _markdown(content: str) -> Iterator[Text]:
    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    content = re.sub(r"```.*?```|<!--.*?-->", blank, content, flags=re.DOTALL)
    for match in re.finditer(r"[^\n]+(?:\n(?![-*#|>]|\d+\.)[^\n]+)*", content):
        if not match[0].lstrip().startswith(("|", "#", "![", "[!")):
            yield Text(content[: match.start()].count("\n") + 1, match[0])


def _python(content: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(content)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield Text(node.lineno, node.value.value)
        elif isinstance(node, ast.Call):
            yield from _called(node)
    for number, line in enumerate(content.split("\n"), 1):
        if (match := _PYTHON_COMMENT.search(line)) is not None:
            yield Text(number, match[1])


def _called(node: ast.Call) -> Iterator[Text]:
    """The texts of a call that users see: a help text, an error message or a log event."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    for keyword in node.keywords:
        if keyword.arg in _HELP_KEYWORDS and (text := _literal(keyword.value)):
            yield Text(keyword.value.lineno, text, seen=True)
    if name in ("option", "argument") or (name.endswith("Error") and name[:1].isupper()):
        for argument in node.args:
            if text := _literal(argument):
                yield Text(argument.lineno, text, seen=True)
    elif (
        name in _LOG_CALLS
        and node.args
        and (text := _literal(node.args[0]))
        and re.fullmatch(r"[a-z_0-9]+", text)
    ):
        yield Text(node.args[0].lineno, text, seen=True, event=True)


def _literal(node: ast.expr) -> str:
    """The text of a literal; "X" for each value that a formatted one inserts; '' for other
    expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _literal(node.left) + _literal(node.right)
    return ""


def sentences(text: Text) -> Iterator[tuple[int, str]]:
    """Line and words of each sentence of at least MIN_WORDS words; code is X.

    Clauses of what users see are sentences: a message is "fault: remedy; another remedy".
    """
    end = r"(?<=[.;:!?])\s+" if text.seen else r"(?<=[.;:!?])\s+(?=[A-Z\"\[*])"
    plain = re.sub(r"`[^`]*`", "X", text.text)
    plain = re.sub(r"\]\([^)]*\)", "]", plain)
    position = 0
    for piece in re.split(end, plain):
        begin = plain.find(piece, position)
        position = begin + len(piece)
        words = " ".join(piece.split()).strip("*-> ")
        if len(words.split()) >= MIN_WORDS:
            yield text.line + plain[:begin].count("\n"), words


def broken_rules(sentence: str) -> Iterator[str]:
    """The rules that a sentence breaks."""
    for rule, pattern in RULES.items():
        if re.search(pattern, sentence):
            yield rule
    if len(sentence.split()) > MAX_WORDS or sentence.count(";") > 1:
        yield TOO_LONG


def hits_in(file: str, content: str) -> Iterator[Hit]:
    """Every hit of a file, one a rule and sentence."""
    product = file.split("/")[0] in ("edgeshard", "agent", "coordinator")
    for text in texts_of(file, content):
        if text.event:
            if product and EVENT_WORDS & set(text.text.split("_")):
                yield Hit(file, text.line, EVENT_RULE, text.text, seen=True)
            continue
        for line, sentence in sentences(text):
            for rule in broken_rules(sentence):
                yield Hit(file, line, rule, sentence, text.seen and product)


def tracked_files(root: Path) -> list[str]:
    """Files of the tree that hold prose."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    )
    ends = (".md", ".py", ".h", ".cpp", ".proto", ".js", ".sh")
    files = (file for file in listed.stdout.splitlines() if file.endswith(ends))
    return [
        file
        for file in files
        if "_pb2" not in file and "/vendor/" not in file and (root / file).is_file()
    ]


def findings(root: Path, baseline: falling.Counts) -> list[str]:
    """A line for each new hit, and for each file with more hits than its baseline."""
    files = tracked_files(root)
    found = [
        hit for file in files for hit in hits_in(file, (root / file).read_text(encoding="utf-8"))
    ]
    lines = [str(hit) for hit in found if hit.seen]
    counts = Counter(hit.file for hit in found if not hit.seen)
    for file, more in falling.excess(counts, baseline, frozenset(files)).items():
        lines.append(
            f"{file}: {more} more than the {baseline.get(file, 0)} that tools/lint_words.json has "
            "for it:"
        )
        lines += [f"  {hit}" for hit in found if hit.file == file and not hit.seen]
    return lines


def main() -> int:
    arguments = sys.argv[1:]
    if arguments and arguments != ["--lower"]:
        for file in arguments:
            for hit in hits_in(file, Path(file).read_text(encoding="utf-8")):
                print(hit)
        return 0
    lines = findings(ROOT, falling.read(BASELINE))
    for line in lines:
        print(line, file=sys.stderr)
    if lines:
        return 1
    if arguments:
        files = tracked_files(ROOT)
        found = (
            hit
            for file in files
            for hit in hits_in(file, (ROOT / file).read_text(encoding="utf-8"))
        )
        falling.write(BASELINE, Counter(hit.file for hit in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
