"""docs/http.md, beyond this machine: a site's URL on one machine, and clients on another that trust
its authority."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.house.documents import ROOT, blocks
from tests.support.clients import CLIENTS, needs_clients

pytestmark = [pytest.mark.netns, pytest.mark.long]
PATIENCE_S = 120.0
PORT = 8443


@needs_clients
def test_another_machine_asks_over_tls(namespaces: ModuleType, tmp_path: Path) -> None:
    (shown,) = [
        b for b in blocks(ROOT / "docs" / "http.md") if b.text.startswith("first$ edgectl serve")
    ]
    serve, _, curl, chat = shown.text.splitlines()
    with namespaces.Network(("first", "second"), "100mbit") as network:
        address = network.address("first")
        log = tmp_path / "serve.log"
        state = tmp_path / "state"
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("EDGESHARD", "XDG_"))
        }
        environment = {**clean, "HOME": str(tmp_path)}
        arguments = serve.removeprefix("first$ edgectl ").split()
        assert f"0.0.0.0:{PORT}" in arguments and "myhost.local" in arguments
        command = [
            sys.executable,
            "-m",
            "edgeshard.cli.main",
            *arguments,
            "--state-dir",
            str(state),
        ]
        with log.open("wb") as out:
            entered = network.enter("first", *command)
            process = subprocess.Popen(
                entered, stdout=out, stderr=out, env=environment, start_new_session=True
            )
        try:
            url = until(r"^URL +(\S+)$", log, process)
            key = until(r"^API key +(\S+)$", log, process)
            assert url == f"https://myhost.local:{PORT}/v1"
            shutil.copy(until(r"^trust +(\S+),", log, process), tmp_path / "site-ca.pem")

            def second(command: str, **more: str) -> subprocess.CompletedProcess[str]:
                entered = network.enter("second", "bash", "-c", command)
                return subprocess.run(
                    entered, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S,
                    check=False, env={**environment, "KEY": key, **more},
                )  # fmt: skip

            line = curl.removeprefix("second$ ")
            by_name = line.replace("curl ", f"curl -sS --resolve myhost.local:{PORT}:{address} ")
            assert [model["id"] for model in json.loads(second(by_name).stdout)["data"]] == [
                "fairy-tales"
            ]
            assert second(by_name.replace("--cacert site-ca.pem ", "")).returncode == 60, (
                "nobody trusts it by itself"
            )
            assert "no_api_key" in second(by_name.replace("$KEY", "")).stdout, (
                "and nobody comes in without a key"
            )
            assert second(f"curl -s http://{address}:{PORT}/health").returncode != 0, (
                "never in plaintext"
            )
            # The library by its address, for no name is looked up here.
            python = chat.removeprefix("second$ ").replace(
                "python chat.py", f"{CLIENTS / 'bin' / 'python'} chat.py"
            )
            (tmp_path / "chat.py").write_text(
                "import os, openai\n"
                f"client = openai.OpenAI(base_url='https://{address}:{PORT}/v1', "
                "api_key=os.environ['KEY'])\n"
                "print(client.models.list().data[0].id)\n"
            )
            told = second(python)
            assert told.stdout.strip() == "fairy-tales", told.stderr
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def until(pattern: str, log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while (found := re.search(pattern, log.read_text(), re.M)) is None:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found[1]
