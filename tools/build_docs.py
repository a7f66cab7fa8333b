"""Build the documents as a site with search: dist/docs. Neither the build nor the site needs a
network.

    python -m tools.build_docs
        what `make docs` runs
    python -m tools.build_docs --set-up
        install the builder into .venv-docs by its lock, tools/docs.txt

The builder refuses links that leave its folder. README.md, ARCHITECTURE.md, CONTRIBUTING.md and
CHANGELOG.md lie outside docs/, so pages are copied into one folder and their links are rewritten. A
link to a file that is no page becomes the path of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from tools.lock import DOCS, ROOT, LockError, find_uv

HOME = ROOT / ".venv-docs"
SITE = ROOT / "dist" / "docs"
OUTER = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages outside docs/, each with its name in the site."""
REST = "Understand it"
"""The part of all pages that no part names."""
PARTS = {
    "Use it": [
        "index",
        "coming-from",
        "serving",
        "joining",
        "deploy",
        "dashboard",
        "http",
        "http-fields",
        "sdk",
        "guides",
        "models",
        "gguf",
        "replicas",
        "speculation",
    ],
    "Operate it": [
        "install",
        "services",
        "configure",
        "limits",
        "security",
        "metrics",
        "troubleshoot",
        "backup",
        "upgrade",
        "cuda",
        "licences",
    ],
    REST: ["architecture", "planning", "papers", "benchmarks"],
    "Change it": ["contributing", "changelog"],
}
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)")
_ITEM = re.compile(r"( *)([-*+]|\d+\.)( +)")
_WIDTH = 4
"""Spaces by which the builder's Markdown indents what belongs to an item of a list."""


def site_names() -> dict[Path, PurePosixPath]:
    """Each page by its path, with its name in the site."""
    names = {ROOT / name: PurePosixPath(target) for name, target in OUTER.items()}
    docs = ROOT / "docs"
    for path in sorted(docs.rglob("*.md")):
        name = PurePosixPath(path.relative_to(docs))
        names[path] = name.with_name("index.md") if name.name == "README.md" else name
    return names


def rewrite_links(text: str, page: Path, names: Mapping[Path, PurePosixPath]) -> str:
    """The page's text with links that hold in the site."""
    here = names[page].parent

    def rewrite(match: re.Match[str]) -> str:
        picture, label, link = match.groups()
        target, _, anchor = link.partition("#")
        if "://" in link or not target:
            return match[0]
        path = Path(os.path.normpath(page.parent / target))
        if path in names:
            place = names[path]
        elif path.suffix != ".md" and path.is_file() and path.is_relative_to(ROOT / "docs"):
            place = PurePosixPath(path.relative_to(ROOT / "docs"))
        else:
            shown = path.relative_to(ROOT)
            return label if str(shown) in label else f"{label} (`{shown}`)"
        relative = os.path.relpath(place, here)
        return f"{picture}[{label}]({relative}{'#' * bool(anchor)}{anchor})"

    parts = _FENCED.split(text)
    return "".join(
        part if number % 2 else _LINK.sub(rewrite, part) for number, part in enumerate(parts)
    )


def widen_lists(text: str) -> str:
    """The text with items of lists indented as the builder's Markdown requires, and an empty line
    before each list."""
    lines: list[str] = []
    contents: list[int] = []
    in_fence = False
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        item = None if in_fence else _ITEM.match(line)
        if line.strip() and not in_fence:
            while contents and indent < contents[-1]:
                contents.pop()
        if (
            item
            and not contents
            and lines
            and lines[-1].strip()
            and not _ITEM.match(lines[-1].lstrip())
        ):
            is_item_text = lines[-1].startswith(" ")
            lines += [] if is_item_text else [""]
        if line.strip() and contents:
            outer = min(contents[-1], indent)
            line = " " * (_WIDTH * len(contents) + indent - outer) + line.lstrip()
        lines.append(line)
        if item:
            contents.append(item.end())
        if line.lstrip().startswith("```"):
            in_fence = not in_fence
    return "\n".join(lines) + "\n"


def navigation(names: Iterable[PurePosixPath]) -> list[dict[str, list[str]]]:
    """The parts of the site, each with its pages. Raises ValueError if a part names a page that
    does not exist."""
    pages = {str(name.with_suffix("")): str(name) for name in names}
    missing = [name for part in PARTS.values() for name in part if name not in pages]
    if missing:
        raise ValueError(
            f"PARTS of tools/build_docs.py names pages that do not exist: {', '.join(missing)}"
        )
    listed = {name for part in PARTS.values() for name in part}
    others = sorted(name for name in pages if name not in listed)
    return [
        {part: [pages[name] for name in (*chosen, *(others if part == REST else ()))]}
        for part, chosen in PARTS.items()
    ]


def write_sources(folder: Path) -> Path:
    """Copy all pages and their pictures into the folder. Returns the builder's configuration
    there."""
    names = site_names()
    source = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    for page, name in names.items():
        text = widen_lists(rewrite_links(page.read_text(encoding="utf-8"), page, names))
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    for path in (ROOT / "docs").rglob("*"):
        if path.suffix in (".svg", ".png", ".webp"):
            target = source / path.relative_to(ROOT / "docs")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    parts = ", ".join(
        f"{{{json.dumps(part)} = {json.dumps(pages)}}}"
        for entry in navigation(names.values())
        for part, pages in entry.items()
    )
    configuration = folder / "zensical.toml"
    configuration.write_text(_CONFIGURATION.format(parts=parts), encoding="utf-8")
    return configuration


_CONFIGURATION = """\
[project]
site_name = "EdgeShard"
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
nav = [{parts}]

[project.theme]
font = false
language = "en"

[project.plugins.search]

[project.markdown_extensions.toc]
slugify = {{object = "pymdownx.slugs.slugify", kwds = {{case = "lower"}}}}

[project.markdown_extensions.tables]

[project.markdown_extensions.pymdownx.superfences]
"""


def build(site: Path) -> int:
    """Build the site in this folder. Returns the builder's exit status: a link that leads nowhere
    is an error."""
    configuration = write_sources(site.with_name(f"{site.name}-source"))
    command = (
        str(HOME / "bin" / "zensical"),
        "build",
        "--strict",
        "--config-file",
        configuration.name,
    )
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=configuration.parent, env=environment, text=True, stdout=subprocess.PIPE
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        return done.returncode
    shutil.rmtree(site, ignore_errors=True)
    (configuration.parent / "site").rename(site)
    return 0


def set_up() -> int:
    """Install the builder into .venv-docs."""
    try:
        uv, environment = find_uv()
    except LockError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    print("docs: installing the builder into .venv-docs", flush=True)
    shutil.rmtree(HOME, ignore_errors=True)
    subprocess.run(
        (str(uv), "venv", "--quiet", "--python", sys.executable, str(HOME)),
        env=environment,
        check=True,
    )
    install = (
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--python",
        str(HOME / "bin" / "python"),
    )
    lock = ("-r", str(DOCS.with_suffix(".txt")))
    return subprocess.run((str(uv), *install, *lock), env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="build_docs", description="Build the documents as a site with search."
    )
    parser.add_argument("--set-up", action="store_true", help="install the builder into .venv-docs")
    if parser.parse_args(arguments).set_up:
        return set_up()
    status = build(SITE)
    if status == 0:
        folder = SITE.relative_to(ROOT)
        print(
            f"docs: to read {folder} in a browser, run: python3 -m http.server --bind 127.0.0.1 "
            f"--directory {folder}"
        )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
