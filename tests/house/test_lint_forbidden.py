"""The lint finds each thing it is there to find, under every disguise listed, and nothing in
innocent code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = ROOT / "tools" / "lint_forbidden.py"

BAD_PYTHON = {
    "import pickle": "pickle",
    "import pickle as p": "pickle",
    "from pickle import loads": "pickle",
    "import cPickle": "cPickle",
    "from six.moves import cPickle": "cPickle",
    "import _pickle": "_pickle",
    "import dill": "dill",
    "import cloudpickle": "cloudpickle",
    "import marshal": "marshal",
    "import shelve": "shelve",
    "def f():\n    import shelve": "shelve",
    "import importlib\nimportlib.import_module('pickle')": "pickle",
    "from importlib import import_module as get\nget('marshal')": "marshal",
    "__import__('pickle')": "__import__",
    "import torch\ntorch.load('x')": "torch.load",
    "import torch as t\nt.load('x')": "torch.load",
    "import torch\nf = torch.load": "torch.load",
    "import torch\ngetattr(torch, 'load')('x')": "torch.load",
    "from torch import load": "torch.load",
    "from torch import load as read\nread('x')": "torch.load",
    "from torch.serialization import load": "torch.serialization.load",
    "import torch.serialization\ntorch.serialization.load('x')": "torch.serialization.load",
    "import torch\ntorch.save({}, 'x')": "torch.save",
    "import torch\ntorch.jit.load('x')": "torch.jit.load",
    "from torch import hub\nhub.load('x', 'y')": "torch.hub.load",
    "import numpy as np\nnp.load('x', allow_pickle=True)": "allow_pickle",
    "f(trust_remote_code=True)": "trust_remote_code",
    "f(trust_remote_code=flag)": "trust_remote_code",
    "f(trust_remote_code=not False)": "trust_remote_code",
    "f(trust_remote_code=0)": "trust_remote_code",
    "f(**{'trust_remote_code': True})": "trust_remote_code",
    "options = dict()\noptions['trust_remote_code'] = True": "trust_remote_code",
    "config.trust_remote_code = True": "trust_remote_code",
    "trust_remote_code: bool = True": "trust_remote_code",
    "import yaml\nyaml.load(s)": "yaml.load",
    "import yaml\nyaml.load(s, Loader=yaml.Loader)": "yaml.load",
    "import yaml\nyaml.load(s, yaml.FullLoader)": "yaml.load",
    "from yaml import load as read\nread(s)": "yaml.load",
    "import yaml\nyaml.load_all(s)": "yaml.load",
    "import yaml\nyaml.unsafe_load(s)": "yaml.unsafe_load",
    "from yaml import full_load": "yaml.full_load",
    "eval('1')": "eval",
    "run = eval": "eval",
    "exec('x = 1')": "exec",
    "import builtins\nbuiltins.exec('x')": "exec",
    "def f(:": "does not parse",
}

GOOD_PYTHON = [
    "# pickle, torch.load, eval(x), trust_remote_code=True",
    "text = 'import pickle; torch.load(x); eval(y)'",
    "model.eval()\nsession.exec(query)",
    "import safetensors.torch\nsafetensors.torch.load_file('x')",
    "f(trust_remote_code=False)",
    "f(**{'trust_remote_code': False})",
    "import numpy as np\nnp.load('x')\nnp.load('x', allow_pickle=False)",
    "import yaml\nyaml.safe_load(s)\nyaml.load(s, Loader=yaml.SafeLoader)\nyaml.load(s, "
    "yaml.CSafeLoader)",
    "import json\njson.load(f)",
    "from tools import load\nload('x')",
    "torch = read()\ntorch.load('x')",
]


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(LINT), str(path)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("source", BAD_PYTHON, ids=lambda source: source.replace("\n", "; "))
def test_finds(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("\n\n" + source + "\n")
    result = lint(path)
    assert result.returncode == 1, "nothing was found"
    assert BAD_PYTHON[source] in result.stderr
    line = int(result.stderr.split(":")[1])
    assert 3 <= line <= 2 + len(source.splitlines())


@pytest.mark.parametrize("source", GOOD_PYTHON, ids=lambda source: source.replace("\n", "; "))
def test_leaves_innocent_code_alone(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source + "\n")
    result = lint(path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.md", "see https://" + "pypi" + ".org/simple", "registry"),
        ("a.toml", 'index = "https://download.' + "pytorch" + '.org/whl"', "registry"),
        ("a.md", "cd " + "/home/" + "alice/edgeshard", "absolute path"),
        ("a.py", 'DATA = "' + "/work/" + 'main"', "absolute path"),
        ("a.json", '{"dir": "' + "/tmp/" + 'run1"}', "absolute path"),
    ],
)
def test_finds_in_any_text_file(name: str, text: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text + "\n")
    result = lint(path)
    assert result.returncode == 1
    assert found in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "https://example.com/home/page",
        "$HOME/edgeshard",
        "$TMPDIR/work/x",
        "~/work/x",
        "/etc/edgeshard/ca.pem",
        "src/work/x",
    ],
)
def test_leaves_other_paths_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text(text + "\n")
    assert lint(path).returncode == 0, lint(path).stderr


def test_binary_files_are_not_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"\0\1" + b"/home/" + b"alice")
    assert lint(path).returncode == 0


@pytest.mark.long
def test_the_repository_is_clean() -> None:
    result = subprocess.run([sys.executable, str(LINT)], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
