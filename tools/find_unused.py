"""Library code without a product path: public functions and classes that nothing reaches which a
user runs or imports.

Product paths begin at the console scripts of pyproject.toml, at `__main__` modules, at the SDK's
exports and at the classes that registries discover. They follow names through the syntax trees of
the product's modules. Code that only tests, benches and tools call is not on one. A class is
reached as a whole: methods are not looked at. `make check` runs it.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("edgeshard", "agent/edgeshard_agent", "coordinator/edgeshard_coordinator")
GENERATED = "edgeshard.proto"
SDK = ("edgeshard", "edgeshard.client")
"""Packages whose public names are for users to import."""

DISCOVERED = {
    "edgeshard.architectures.families": ("ARCHITECTURE", "REFUSED"),
    "edgeshard_agent.model.families": ("MODULES",),
}
"""Packages whose modules are found by being there -> the names that their registry takes from
each."""

ALLOWED = {
    "edgeshard_agent.ops.native.use_kernels": "tests run the kernels of lesser processors than the "
    "one they are on",
    "edgeshard_coordinator.core.values.state.validate_state": "the invariants that tests check "
    "after each event",
}
"""Full name -> why it may stay though no product path reaches it."""

Place = tuple[str, str]
"""(module, a name at its top level)."""
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(slots=True)
class Module:
    """One file: its names at top level with their nodes, what imports bind, and what importing it
    runs or registers."""

    name: str
    path: Path
    is_package: bool
    named: dict[str, list[ast.AST]] = field(default_factory=dict)
    imported: dict[str, Place] = field(default_factory=dict)
    run: list[ast.AST] = field(default_factory=list)
    registered: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, name: str, path: Path) -> Module:
        module = cls(name, path, path.name == "__init__.py")
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for statement in _statements(tree.body):
            module._add(statement)
        for node in ast.walk(tree):
            module._add_import(node)
        module.registered = [
            name for name, nodes in module.named.items() if any(map(module._is_registered, nodes))
        ]
        return module

    def _is_registered(self, node: ast.AST) -> bool:
        """Whether a decorator hands it to a value of this module, as `@app.command()` does."""
        for part in (
            node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ()
        ):
            names = [inner.id for inner in ast.walk(part) if isinstance(inner, ast.Name)]
            if any(name in self.named for name in names):
                return True
        return False

    def _add(self, statement: ast.stmt) -> None:
        """Values are reached by their names, as definitions are; a statement that names nothing
        runs on import."""
        names: list[str] = []
        if isinstance(statement, _Definition):
            names = [statement.name]
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [
                node.id
                for target in targets
                for node in ast.walk(target)
                if isinstance(node, ast.Name)
            ]
        for name in names:
            self.named.setdefault(name, []).append(statement)
        if not names:
            self.run.append(statement)

    def _add_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                self.imported[alias.asname or whole] = (whole, "")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.imported[alias.asname or alias.name] = (self._source(node), alias.name)

    def _source(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        kept = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements, those under `if` and `try` too."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)
        else:
            yield statement


class Reach:
    """The code that is reached from some places: `places`, and the modules that are imported on the
    way."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.places: set[Place] = set()
        self._modules = modules
        self._imported: set[str] = set()
        self._waiting: list[tuple[Module, ast.AST]] = []

    def add(self, place: Place) -> None:
        """Reach a name, through any module that only passes it on, and all that it uses."""
        self._reach(*place)
        while self._waiting:
            self._follow(*self._waiting.pop())

    def _reach(self, name: str, what: str) -> None:
        submodule = f"{name}.{what}" if what else name
        if submodule in self._modules:
            self._load(submodule)
        module = self._modules.get(name)
        if module is None or (name, what) in self.places:
            return
        self._load(name)
        self.places.add((name, what))
        if what in module.named:
            self._waiting += [(module, node) for node in module.named[what]]
        elif what in module.imported:
            self._reach(*module.imported[what])

    def _load(self, name: str) -> None:
        """Import a module, and the packages it is in."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = self._modules.get(".".join(parts[:end]))
            if module is not None and module.name not in self._imported:
                self._imported.add(module.name)
                self._waiting += [(module, statement) for statement in module.run]
                for what in module.registered:
                    self._reach(module.name, what)

    def _follow(self, module: Module, root: ast.AST) -> None:
        for node in ast.walk(root):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._load(alias.name)
            elif isinstance(node, ast.ImportFrom):
                self._load(module._source(node))
            elif isinstance(node, ast.Name):
                self._reach(module.name, node.id)
            elif isinstance(node, ast.Attribute):
                self._reach_attribute(module, node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                name, _, what = node.value.partition(":")
                # relative to the module's package, as `import_module` takes it
                if name.startswith("."):
                    name = f"{module.name.rpartition('.')[0]}{name}"
                # as in `python -m NAME`, and "NAME:WHAT" as in an entry point
                if name in self._modules:
                    self._load(name)
                    self._reach(name, what)

    def _reach_attribute(self, module: Module, node: ast.Attribute) -> None:
        """`alias.name` and `package.module.name`."""
        names = [node.attr]
        value = node.value
        while isinstance(value, ast.Attribute):
            names.insert(0, value.attr)
            value = value.value
        if isinstance(value, ast.Name) and value.id in module.imported:
            source, what = module.imported[value.id]
            owner = f"{source}.{what}" if what else source
            for name in names:
                self._reach(owner, name)
                owner = f"{owner}.{name}"


def read_modules(root: Path) -> dict[str, Module]:
    modules = {}
    for package in PACKAGES:
        top = root / package
        for path in sorted(top.rglob("*.py")):
            parts = path.relative_to(top.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if not name.startswith(GENERATED):
                modules[name] = Module.read(name, path)
    return modules


def entries(root: Path, modules: Mapping[str, Module]) -> Iterator[Place]:
    """The entry points of users."""
    scripts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "scripts"
    ]
    for script in scripts.values():
        name, _, what = script.partition(":")
        yield name, what
    for name in modules:
        if name.endswith("__main__"):
            yield name, ""
        package, _, _ = name.rpartition(".")
        for what in DISCOVERED.get(package, ()):
            if what in modules[name].named:
                yield name, what
    for name in SDK:
        module = modules.get(name)
        for what in () if module is None else {**module.named, **module.imported}:
            if not what.startswith("_"):
                yield name, what


def unused(root: Path, allowed: Mapping[str, str]) -> list[str]:
    """A line for each public function or class that is not reached, and for each name allowed in
    vain."""
    modules = read_modules(root)
    reach = Reach(modules)
    for place in entries(root, modules):
        reach.add(place)
    found = []
    for full in allowed:
        name, _, what = full.rpartition(".")
        if name not in modules or what not in modules[name].named or (name, what) in reach.places:
            found.append(
                f"{full} is allowed to be unused, but is used or gone: take it off the list"
            )
    for full in allowed:
        name, _, what = full.rpartition(".")
        reach.add((name, what))
    for module in modules.values():
        for what, (node, *_) in module.named.items():
            if (
                what.startswith("_")
                or not isinstance(node, _Definition)
                or (module.name, what) in reach.places
            ):
                continue
            where = f"{module.path.relative_to(root)}:{node.lineno}"
            found.append(
                f"{where}: {what} is on no product path: use it, delete it, or move it to bench/ "
                "or tests/"
            )
    return found


def main() -> int:
    found = unused(ROOT, ALLOWED)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
