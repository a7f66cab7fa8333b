"""An installed wheel serves a model of Ollama's store, which answers a chat with tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

import hatch_build
from tests.support.gguf_files import everywhere, write_demo_gguf
from tests.support.model_stores import TOOLS_TEMPLATE, OllamaFolder
from tests.support.running import Running

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timing, pytest.mark.timeout(900)]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


def installed_wheel(directory: Path) -> Path:
    """A folder with the files that this checkout's wheel installs; its kernels are the
    checkout's."""
    environment = os.environ | {
        hatch_build.READY_LIBRARY: str(hatch_build.LIBRARY),
        hatch_build.READY_PLATFORM: "linux_x86_64",
    }
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=300)
    (wheel,) = directory.glob("*.whl")
    target = directory / "installed"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--target",
        str(target),
    ]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=300)
    return target


def maps_files_of(directory: Path) -> bool:
    """Whether a process has a file of the directory in memory."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if str(directory) in path.read_text():
                return True
    return False


def posted(url: str, key: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=180) as answer:
        return json.load(answer)


def test_a_wheel_serves_ollamas_model_with_tools(tmp_path: Path) -> None:
    if not hatch_build.LIBRARY.exists():
        pytest.skip("the kernels are not compiled: make setup")
    installed = installed_wheel(tmp_path)
    weights = write_demo_gguf(
        tmp_path / "demo.gguf", everywhere(GGMLQuantizationType.Q8_0), TOOLS_TEMPLATE
    )
    store = OllamaFolder(tmp_path / "models")
    texts = {"params": '{"temperature": 0.5}', "template": "{{ .Prompt }}"}
    store.add("tales/1b", weights.read_bytes(), {"parser": "x"}, **texts)
    settings = {
        "OLLAMA_MODELS": str(store.folder),
        "PYTHONPATH": str(installed),
        "PYTHONSAFEPATH": "1",
    }
    arguments = ["serve", "ollama:tales:1b", "--state-dir", str(tmp_path / "site")]
    arguments += ["--listen", "127.0.0.1:0", "--port", "0"]
    running = Running(tmp_path, "edgectl", *arguments, settings=settings, cwd=tmp_path)
    try:
        url, key = running.until(r"^URL +(\S+)$")[1], running.until(r"^API key +(\S+)$")[1]
        assert maps_files_of(installed), "the agent's kernels are the wheel's"
        question = {
            "model": "tales-1b",
            "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
            "tools": [TOOL],
            "tool_choice": "required",
            "max_tokens": 200,
        }
        choice = posted(url, key, "/chat/completions", question)["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["town"] in ("Rome", "Oslo")
    finally:
        running.stop()
