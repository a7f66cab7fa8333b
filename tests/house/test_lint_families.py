"""No code outside a family's own files names it; its lint finds each way of doing it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = ROOT / "tools" / "lint_families.py"

BAD = [
    'SLIDING = {"gemma3", "x"}',
    'KIND = "gemma3_text"',
    'config = {"model_type": "llama"}',
    'config = {"architectures": ["LlamaForCausalLM"]}',
    'REFUSED = ("mamba2",)',
    "rotary = getattr(library, 'Qwen3MoeRotaryEmbedding')",
    "gemma = shape.architecture == 'gemma9'",
    "if shape.architecture in ('a', 'b'): pass",
    "if config['model_type'] != 'x': pass",
    "if config.get('model_type') == 'x': pass",
    "qwen = shape.architecture.startswith('qwen')",
]
GOOD = [
    '"""Norms as gemma has them."""',
    'rope = "llama3"',
    'models = ("llama2-7b", "cloud-edge-opt")',
    "if manifest.architecture != shape.architecture: pass",
    "if config.get('model_type') is None: pass",
    "if model_type == '': pass",
    "option = {'option': 'opting'}",
]


def lint(path: Path, source: str) -> subprocess.CompletedProcess[str]:
    path.write_text(source, encoding="utf-8")
    return subprocess.run([sys.executable, LINT, path], check=False, capture_output=True, text=True)


def test_the_code_names_no_family_outside_its_files() -> None:
    found = subprocess.run([sys.executable, LINT], check=False, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_each_way_of_naming_one_is_found(tmp_path: Path) -> None:
    result = lint(tmp_path / "bad.py", "\n".join(BAD))
    assert result.returncode == 1
    lines = {int(line.split(":")[1]) for line in result.stderr.splitlines()}
    assert lines == set(range(1, len(BAD) + 1))


@pytest.mark.parametrize("source", GOOD)
def test_what_names_none_passes(tmp_path: Path, source: str) -> None:
    result = lint(tmp_path / "good.py", source)
    assert (result.returncode, result.stderr) == (0, "")
