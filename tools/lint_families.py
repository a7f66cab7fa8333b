"""Find the names of model families outside the files that are about one: `architectures/families/`,
in the library and the agent's parts of single families. The names come from the registry.

    python tools/lint_families.py [FILE ...]
        without files, all of the library, the agent and the coordinator

tests/ and bench/ build models to test and to measure, and may say which. `make check` runs it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeshard.architectures.registry import RECORDS, REFUSED

ROOT = Path(__file__).resolve().parent.parent
LOOKED_AT = ("edgeshard", "agent", "coordinator")
ALLOWED = (
    "edgeshard/architectures/families/",
    "agent/edgeshard_agent/model/families/",
    "edgeshard/importing/gguf_tokenizer.py",  # kinds of tokenizers have names of families there
    # and kinds of files, as another program calls them
    "edgeshard/importing/stores/ollama_forms.py",
)
_NAMING = frozenset({"architecture", "model_type"})
"""Variables that hold a family's name: a decision by it belongs into the record."""


def _names() -> frozenset[str]:
    names = set(REFUSED)
    for record in RECORDS.values():
        names |= {record.name, *record.answers_to, *record.nested.values()}
    return frozenset(names)


NAMES = _names()
CLASSES = tuple(sorted({record.library.prefix for record in RECORDS.values()}))
_CLASS_ENDS = ("Config", "DecoderLayer", "ForCausalLM", "Model", "RMSNorm", "RotaryEmbedding", "")


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check(path: str, source: str) -> list[Finding]:
    """Literals that are a family's name or class, and comparisons of an architecture with a
    text."""
    if path.startswith(ALLOWED):
        return []
    return sorted(set(_findings(path, ast.parse(source))))


def _findings(path: str, tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _is_family(node.value)
        ):
            yield Finding(
                path, line, f"names the family {node.value!r}; ask its record, or add a field to it"
            )
        elif isinstance(node, ast.Compare) and _decides([node.left, *node.comparators]):
            yield Finding(
                path,
                line,
                "compares an architecture with a text; ask its record, or add a field to it",
            )
        elif _looks_into(node):
            yield Finding(
                path,
                line,
                "looks into an architecture's name; ask its record, or add a field to it",
            )


def _is_family(text: str) -> bool:
    if text in NAMES:
        return True
    return any(text == prefix + end for prefix in CLASSES for end in _CLASS_ENDS)


def _decides(sides: list[ast.expr]) -> bool:
    return any(map(_holds_name, sides)) and any(_is_text(side) for side in sides)


def _holds_name(node: ast.expr) -> bool:
    match node:
        case (
            ast.Attribute(attr=name)
            | ast.Name(id=name)
            | ast.Subscript(slice=ast.Constant(value=str(name)))
        ):
            return name in _NAMING
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
            return name in _NAMING
    return False


def _looks_into(node: ast.AST) -> bool:
    match node:
        case ast.Call(
            func=ast.Attribute(value=owner, attr="startswith" | "endswith" | "removeprefix")
        ):
            return _holds_name(owner)
    return False


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_text, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != ""


def main(arguments: list[str]) -> int:
    paths = [Path(argument).resolve() for argument in arguments]
    paths = paths or sorted(path for name in LOOKED_AT for path in (ROOT / name).rglob("*.py"))
    findings: list[Finding] = []
    for path in paths:
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        findings += check(name, path.read_text(encoding="utf-8"))
    for finding in findings:
        print(finding, file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
