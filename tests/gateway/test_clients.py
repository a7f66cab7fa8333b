"""The clients that people have, against a real three-box site, each in an environment of its own."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.support.http import Http

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(os.environ.get("EDGESHARD_TEST_CLIENTS", ROOT / ".venv-clients"))
needs_clients = pytest.mark.skipif(not (CLIENTS / "bin" / "python").exists(), reason="run `make clients` first")


async def run(*command: str | Path, timeout_s: float = 240.0) -> str:
    """What the command says; the test fails with it where it fails."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode == 0, said.decode()[-4000:]
    return said.decode()


@needs_clients
@pytest.mark.parametrize("name", ["openai", "langchain", "litellm", "ollama"])
async def test_a_client_that_people_have_works(http: Http, name: str) -> None:
    assert http.key is not None
    script = Path(__file__).parent / "clients" / f"{name}_client.py"
    assert (await run(CLIENTS / "bin" / "python", script, http.url, http.key)).rstrip().endswith("ok")


async def test_curl_works(http: Http) -> None:
    key = f"Authorization: Bearer {http.key}"
    body = '{"model": "tales", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": true}'
    said = await run("curl", "-sN", f"{http.url}/v1/chat/completions", "-H", key, "-d", body)
    assert said.endswith("data: [DONE]\n\n") and said.count("data: ") >= 4
