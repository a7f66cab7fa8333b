"""The search finds code that no product path reaches, however it is called otherwise, and skips
code that one reaches.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tools.find_unused import ALLOWED, ROOT, unused

PROJECT = '[project.scripts]\nedgectl = "edgeshard.cli:main"\n'


def found(root: Path, cli: str, allowed: dict[str, str] | None = None, **files: str) -> list[str]:
    """The unused parts of a project of `edgeshard/cli.py`, whose `main` is run, and a file
    `edgeshard/NAME.py` each."""
    (root / "pyproject.toml").write_text(PROJECT)
    package = root / "edgeshard"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, text in {"cli": cli, **files}.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return unused(root, allowed or {})


USED = {
    "called": ("from edgeshard.lib import f\ndef main(): f()", "def f(): ..."),
    "imported where it is needed": (
        "def main():\n    from edgeshard.lib import f\n    f()",
        "def f(): ...",
    ),
    "through its module": ("from edgeshard import lib\ndef main(): lib.f()", "def f(): ..."),
    "through its whole name": (
        "import edgeshard.lib\ndef main(): edgeshard.lib.f()",
        "def f(): ...",
    ),
    "under another name": ("from edgeshard.lib import f as g\ndef main(): g()", "def f(): ..."),
    "relatively": ("from .lib import f\ndef main(): f()", "def f(): ..."),
    "by another that is used": (
        "from edgeshard.lib import f\ndef main(): f()",
        "def g(): ...\ndef f(): g()",
    ),
    "by a value": ("from edgeshard.lib import F\ndef main(): F[0]()", "def f(): ...\nF = (f,)"),
    "as a type": ("from edgeshard.lib import A\ndef main(a: A): ...", "class A: ..."),
    "as a base": ("from edgeshard.lib import B\ndef main(): B()", "class A: ...\nclass B(A): ..."),
    "by a method": (
        "from edgeshard.lib import A\ndef main(): A()",
        "def f(): ...\nclass A:\n  def go(self): f()",
    ),
    "registered": (
        "from edgeshard.lib import app\ndef main(): app()",
        "app = []\n@app.command()\ndef f(): ...",
    ),
    "on import": ("import edgeshard.lib\ndef main(): ...", "def f(): ...\nprint(f())"),
    "as a program": (
        "def main(): return ['-m', 'edgeshard.lib']",
        "def f(): ...\nif __name__ == '__main__':\n  f()",
    ),
    "as an entry point": ("def main(): return 'edgeshard.lib:f'", "def f(): ..."),
    "as a relative entry point": ("def main(): return '.lib:f'", "def f(): ..."),
    "under a condition": (
        "from edgeshard.lib import f\ndef main(): f()",
        "try:\n  x\nexcept E:\n  def f(): ...",
    ),
}


@pytest.mark.parametrize("how", USED)
def test_what_is_used_is_left_alone(how: str, tmp_path: Path) -> None:
    cli, lib = USED[how]
    assert found(tmp_path, cli, lib=lib) == []


UNUSED = {
    "by nobody": ("def main(): ...", "def f(): ..."),
    "by an import alone": ("from edgeshard.lib import f\ndef main(): ...", "def f(): ..."),
    "by itself": ("from edgeshard import lib\ndef main(): lib.x", "x = 1\ndef f(): f()"),
    "by a namesake": ("def f(): ...\ndef main(): f()", "def f(): ..."),
    "by a namesake's attribute": ("def main(a): a.f()", "def f(): ..."),
    "in a module that is not imported": ("def main(): ...", "def f(): ...\nF = f()"),
    "in a text": ("def main(): return 'f'", "def f(): ..."),
    "a class": ("def main(): ...", "class f: ..."),
    "with a decorator of others": (
        "import edgeshard.lib\ndef main(): ...",
        "import x\n@x.cache\ndef f(): ...",
    ),
}


@pytest.mark.parametrize("how", UNUSED)
def test_what_is_not_used_is_found_with_its_place(how: str, tmp_path: Path) -> None:
    cli, lib = UNUSED[how]
    (line,) = found(tmp_path, cli, lib=lib)
    assert line.startswith("edgeshard/lib.py:") and " f is on no product path" in line


def test_two_that_use_each_other_are_both_found(tmp_path: Path) -> None:
    lines = found(tmp_path, "def main(): ...", lib="def f(): g()\ndef g(): f()")
    assert [line.split()[1] for line in lines] == ["f", "g"]


def test_private_names_and_what_only_tests_call_are_as_one_expects(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_lib.py").write_text("from edgeshard.lib import f\nf()\n")
    (line,) = found(tmp_path, "def main(): ...", lib="def f(): ...\ndef _g(): ...")
    assert "lib.py:1: f " in line


def test_what_the_sdk_exports_is_used_through_every_module_that_passes_it_on(
    tmp_path: Path,
) -> None:
    files = {
        "client/__init__": "from edgeshard.lib import f",
        "lib": "from edgeshard.deep import f",
    }
    assert found(tmp_path, "def main(): ...", None, **files, deep="def f(): ...") == []


def test_what_a_registry_discovers_is_used_and_nothing_else_of_the_file(tmp_path: Path) -> None:
    file = "def _block(): shape()\ndef shape(): ...\nARCHITECTURE = (_block,)\ndef left(): ..."
    (line,) = found(
        tmp_path,
        "def main(): ...",
        None,
        **{"architectures/__init__": "", "architectures/families/a": file},
    )
    assert "a.py:4: left " in line


def test_what_is_allowed_is_not_found_nor_what_it_uses(tmp_path: Path) -> None:
    assert (
        found(
            tmp_path,
            "def main(): ...",
            {"edgeshard.lib.f": "because"},
            lib="def f(): g()\ndef g(): ...",
        )
        == []
    )


@pytest.mark.parametrize("lib", ["def f(): ...", "def g(): ..."], ids=["used", "gone"])
def test_what_is_allowed_in_vain_is_said(lib: str, tmp_path: Path) -> None:
    cli = "from edgeshard import lib\ndef main(): lib.f(), lib.g()"
    assert found(tmp_path, cli, {"edgeshard.lib.f": "because"}, lib=lib) == [
        "edgeshard.lib.f is allowed to be unused, but is used or gone: take it off the list"
    ]


@pytest.mark.long
def test_the_repository_has_no_library_code_without_a_product_path() -> None:
    assert unused(ROOT, ALLOWED) == []
    assert all(reason for reason in ALLOWED.values())
