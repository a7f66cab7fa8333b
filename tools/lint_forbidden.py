"""Refuse what must never be in this repository; `make check` runs it.

In Python files (found in the syntax tree, so that neither an alias hides it nor a comment triggers
it):

* a format that runs code when it is read: pickle and its relatives, `torch.load`,
  `numpy.load(allow_pickle=...)`;
* `trust_remote_code` set to anything but a literal False;
* YAML read by anything but the safe loader;
* `eval` and `exec`.

In every text file: the host name of a package registry (an installation uses the site's own pip
configuration). Outside tests/: an absolute path of somebody's machine.

    python tools/lint_forbidden.py [FILE...]
        all of the repository's files by default; exits 1 on a finding
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PICKLING_MODULES = {"pickle", "_pickle", "cPickle", "pickle5", "pickletools", "cloudpickle", "dill"}
PICKLING_MODULES |= {"marshal", "shelve", "joblib", "jsonpickle"}
FORBIDDEN_NAMES = {
    "torch.load": "unpickles; read safetensors",
    "torch.save": "writes a pickle; write safetensors",
    "torch.serialization.load": "unpickles; read safetensors",
    "torch.serialization.save": "writes a pickle; write safetensors",
    "torch.jit.load": "runs what the file says; read safetensors",
    "torch.hub.load": "runs downloaded code",
    "torch.hub.load_state_dict_from_url": "unpickles a download",
    "pandas.read_pickle": "unpickles",
    "numpy.lib.format.read_array": "may unpickle; use numpy.load",
    "yaml.unsafe_load": "runs what the file says; use yaml.safe_load",
    "yaml.unsafe_load_all": "runs what the file says; use yaml.safe_load_all",
    "yaml.full_load": "builds objects; use yaml.safe_load",
    "yaml.full_load_all": "builds objects; use yaml.safe_load_all",
    "builtins.eval": "runs text",
    "builtins.exec": "runs text",
    "builtins.__import__": "hides an import; write an import statement",
}
FALSE_ONLY = {"trust_remote_code", "allow_pickle"}
SAFE_LOADERS = {
    "yaml.SafeLoader",
    "yaml.CSafeLoader",
    "yaml.loader.SafeLoader",
    "yaml.cyaml.CSafeLoader",
}
BUILTINS = {"eval", "exec", "__import__"}

# Spelt in parts, so that this file does not name them.
_REGISTRIES = "pypi org, pythonhosted org, pytorch org, npmjs org, npmjs com, crates io"
REGISTRY_HOST = re.compile(
    "|".join(rf"\b{host.strip().replace(' ', '[.]')}\b" for host in _REGISTRIES.split(",")), re.I
)
MACHINE_PATH = re.compile(r"(?<![\w.~$}\])-])/(?:home|root|work|Users|tmp|private/tmp|mnt)/[\w.]")
LARGEST_TEXT_BYTES = 2 << 20


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check_python(path: str, source: str) -> list[Finding]:
    """The forbidden parts of a Python file; a file that does not parse is a finding too."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return [Finding(path, error.lineno or 1, f"does not parse: {error.msg}")]
    visitor = _Visitor(path)
    visitor.visit(tree)
    return sorted(set(visitor.findings))


def check_text(path: str, text: str) -> list[Finding]:
    """The forbidden parts of a text file of any kind."""
    in_tests = path.startswith("tests/")
    findings = []
    for number, line in enumerate(text.splitlines(), 1):
        if host := REGISTRY_HOST.search(line):
            findings.append(
                Finding(
                    path,
                    number,
                    f"names a package registry ({host[0]}); leave that to pip's configuration",
                )
            )
        if not in_tests and (match := MACHINE_PATH.search(line)):
            findings.append(
                Finding(path, number, f"has an absolute path of one machine ({match[0]}...)")
            )
    return findings


class _Visitor(ast.NodeVisitor):
    def __init__(self, path: str) -> None:
        self.path = path
        self.findings: list[Finding] = []
        # The meaning of a name, from the file's imports wherever they are: {"t": "torch", "rd":
        # "torch.load"}.
        self._names: dict[str, str] = {name: f"builtins.{name}" for name in BUILTINS}

    def visit_Module(self, node: ast.Module) -> None:
        for child in ast.walk(node):
            if isinstance(child, ast.Import):
                self._bind(child)
            elif isinstance(child, ast.ImportFrom) and child.level == 0:
                self._bind_from(child)
        self.generic_visit(node)

    def _bind(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self._names[alias.asname or top] = alias.name if alias.asname else top
            self._check_module(node, alias.name)

    def _bind_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        self._check_module(node, module)
        for alias in node.names:
            self._names[alias.asname or alias.name] = f"{module}.{alias.name}"
            self._check_module(node, f"{module}.{alias.name}")
            self._check_name(node, f"{module}.{alias.name}")

    def _check_module(self, node: ast.AST, module: str) -> None:
        # The last part too: `from six.moves import cPickle`, `from multiprocess import dill`.
        for part in {module.partition(".")[0], module.rpartition(".")[2]} & PICKLING_MODULES:
            self._report(node, f"imports {part}, whose format runs code when it is read")

    def _check_name(self, node: ast.AST, name: str) -> None:
        if reason := FORBIDDEN_NAMES.get(name):
            self._report(node, f"{name.removeprefix('builtins.')} {reason}")

    def _check_false(self, node: ast.AST, name: str | None, value: ast.expr) -> None:
        if name in FALSE_ONLY and not (isinstance(value, ast.Constant) and value.value is False):
            self._report(node, f"{name} may only be a literal False")

    def _report(self, node: ast.AST, message: str) -> None:
        self.findings.append(Finding(self.path, getattr(node, "lineno", 1), message))

    def _dotted(self, node: ast.AST) -> str | None:
        """`t.load` as "torch.load" when `t` is torch; None if a name comes neither from an import
        nor from builtins.
        """
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._dotted(node.value)
            return f"{base}.{node.attr}" if base else None
        return None

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and (name := self._dotted(node)):
            self._check_name(node, name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if name := self._dotted(node):
            self._check_name(node, name)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._dotted(node.func)
        for keyword in node.keywords:
            self._check_false(keyword.value, keyword.arg, keyword.value)
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if called in {"importlib.import_module", "importlib.__import__"} and isinstance(first, str):
            self._check_module(node, first)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
            owner, attribute = self._dotted(node.args[0]), node.args[1]
            if owner and isinstance(attribute, ast.Constant) and isinstance(attribute.value, str):
                self._check_name(node, f"{owner}.{attribute.value}")
        if called in {"yaml.load", "yaml.load_all"}:
            self._check_yaml(node)
        self.generic_visit(node)

    def _check_yaml(self, node: ast.Call) -> None:
        loaders = [
            keyword.value for keyword in node.keywords if keyword.arg == "Loader"
        ] + node.args[1:2]
        if not loaders or self._dotted(loaders[0]) not in SAFE_LOADERS:
            self._report(node, "yaml.load without SafeLoader builds objects; use yaml.safe_load")

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._check_false(value, key.value, value)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._check_false(node, _assigned(target), node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._check_false(node, _assigned(node.target), node.value)
        self.generic_visit(node)


def _assigned(target: ast.expr) -> str | None:
    """The last name of an assignment's target: `x`, `config.x` and `kwargs["x"]` all give "x"."""
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
    return None


def repository_files() -> Iterator[Path]:
    """Files git tracks or would track; without git, every file outside hidden folders."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    try:
        names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(
            "\0"
        )
        paths = {ROOT / name for name in names if name}
    except (OSError, subprocess.CalledProcessError):
        paths = {
            p
            for p in ROOT.rglob("*")
            if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)
        }
    yield from sorted(path for path in paths if path.is_file() and not path.is_symlink())


def check_file(path: Path) -> list[Finding]:
    data = path.read_bytes()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    if b"\0" in data[:8192]:
        return []
    findings: list[Finding] = []
    text = data.decode("utf-8", errors="replace")
    if path.suffix in {".py", ".pyi"}:
        findings += check_python(name, text)
    if len(data) <= LARGEST_TEXT_BYTES:
        findings += check_text(name, text)
    return findings


def main(arguments: list[str]) -> int:
    paths = [Path(argument).resolve() for argument in arguments] or list(repository_files())
    findings = [finding for path in paths for finding in check_file(path)]
    for finding in findings:
        print(finding, file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
