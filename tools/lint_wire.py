"""Refuse conversions between protobuf and domain values outside edgeshard/wire; `make check` runs
it.

Elsewhere a message is only wrapped and unwrapped, which the syntax tree shows:

* of generated code only envelopes are named, messages whose name ends in Request or Response: no
  other, and no enum;
* an envelope is built by keywords, of at most two fields (one that has more is a value, with a pair
  of functions);
* a field that was read from an envelope is passed on as it is: nothing of it is read, whatever name
  it goes by.

An envelope is a name that is annotated as one, built, tested by isinstance, or taken from an
iterator annotated so. The result of a call that awaits an answer to an envelope is one, too.

    python tools/lint_wire.py [FILE...]
        the library's and the daemons' files by default; exits 1 on a finding
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("edgeshard", "agent/edgeshard_agent", "coordinator/edgeshard_coordinator")
EXEMPT = ("edgeshard/wire/", "edgeshard/proto/")
ENVELOPES = ("Request", "Response")
MOST_FIELDS = 2

Function = ast.FunctionDef | ast.AsyncFunctionDef
Finding = tuple[int, str]


def check_source(source: str) -> list[Finding]:
    """(line, fault) of every conversion in a file outside wire/."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.endswith("_pb2")
    }
    findings = set(_imports(tree))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and _is_generated(node, modules)
            and not _is_envelope(node, modules)
        ):
            findings.add((node.lineno, f"names {node.attr}, which is no envelope"))
        if (
            isinstance(node, ast.Call)
            and _is_envelope(node.func, modules)
            and not _only_wraps(node)
        ):
            findings.add((node.lineno, f"builds a message of more than {MOST_FIELDS} named fields"))
        if isinstance(node, Function):
            findings |= _Reads(node, modules).findings()
    return sorted(findings)


def _imports(tree: ast.Module) -> Iterator[Finding]:
    """Imports that would hide code from the other rules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(
            alias.name.endswith("_pb2") for alias in node.names
        ):
            yield (
                node.lineno,
                "imports generated code by its path; write `from edgeshard.proto.v1 import "
                "..._pb2`",
            )
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("_pb2"):
            yield node.lineno, "imports names out of generated code; import the module"


def _is_generated(node: ast.AST, modules: set[str]) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    )


def _is_envelope(node: ast.AST, modules: set[str]) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and _is_generated(node, modules)
        and node.attr.endswith(ENVELOPES)
    )


def _only_wraps(call: ast.Call) -> bool:
    return (
        not call.args
        and len(call.keywords) <= MOST_FIELDS
        and all(item.arg for item in call.keywords)
    )


class _Reads:
    """The names of one function that hold messages: envelopes, iterators of them, or fields of
    them."""

    def __init__(self, function: Function, modules: set[str]) -> None:
        self._modules = modules
        self._nodes = list(ast.walk(function))
        self._envelopes: set[str] = set()
        self._streams: set[str] = set()
        self._fields: set[str] = set()

    def findings(self) -> set[Finding]:
        known = -1
        # A name may be bound by one that comes later in the walk.
        while known != (known := len(self._envelopes) + len(self._streams) + len(self._fields)):
            for node in self._nodes:
                self._bind(node)
        return {
            (node.lineno, f"reads {node.attr} of a message's field")
            for node in self._nodes
            if isinstance(node, ast.Attribute) and self._is_field(node.value)
        }

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as annotation):
                self._annotate(name, annotation)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                self._annotate(name, annotation)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(name, value)
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                self._assign(name, value)
            case ast.Call(func=ast.Name(id="isinstance"), args=[subject, kind]) if (
                self._names_envelope(kind)
            ):
                subject = subject.target if isinstance(subject, ast.NamedExpr) else subject
                if isinstance(subject, ast.Name):
                    self._envelopes.add(subject.id)
            case ast.withitem(context_expr=value, optional_vars=ast.Name(id=name)):
                if any(self._is_call(inner) for inner in ast.walk(value)):
                    self._streams.add(name)
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                if isinstance(node.target, ast.Name):
                    self._iterate(node.target.id, node.iter)

    def _annotate(self, name: str, annotation: ast.expr) -> None:
        parts = [annotation]
        while parts:
            part = parts.pop()
            if isinstance(part, ast.BinOp):
                parts += [part.left, part.right]
            elif _is_envelope(part, self._modules):
                self._envelopes.add(name)
            elif isinstance(part, ast.Subscript) and self._names_envelope(part.slice):
                self._streams.add(name)

    def _assign(self, name: str, value: ast.expr) -> None:
        if self._is_message(value):
            self._envelopes.add(name)
        elif self._is_field(value):
            self._fields.add(name)
        elif isinstance(value, ast.Name) and value.id in self._streams:
            self._streams.add(name)

    def _iterate(self, name: str, items: ast.expr) -> None:
        if (isinstance(items, ast.Name) and items.id in self._streams) or self._is_call(items):
            self._envelopes.add(name)
        elif self._is_field(items):
            self._fields.add(name)

    def _names_envelope(self, node: ast.AST) -> bool:
        return any(_is_envelope(part, self._modules) for part in ast.walk(node))

    def _is_message(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self._envelopes
            case ast.NamedExpr(value=value):
                return self._is_message(value)
            case ast.Await(value=value):
                return self._is_call(value)
            case ast.Call(func=func):
                # Built here, or read from bytes.
                return self._names_envelope(func)
        return False

    def _is_call(self, node: ast.AST) -> bool:
        """Whether a message is handed to somebody, whose answer is one then."""
        return isinstance(node, ast.Call) and any(
            self._is_message(argument) for argument in node.args
        )

    def _is_field(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self._fields
            case ast.Attribute(value=value):
                return self._is_message(value)
            case ast.Subscript(value=value):
                return self._is_field(value)
        return False


def product_files() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not str(path.relative_to(ROOT)).startswith(EXEMPT):
                yield path


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments] or list(product_files())
    found = [
        (path, *finding)
        for path in paths
        for finding in check_source(path.read_text(encoding="utf-8"))
    ]
    for path, line, message in found:
        print(f"{path}:{line}: {message}; convert in edgeshard/wire", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
