"""Guessed tokens beside llama.cpp's own: the demo model whole on one box of one thread, texts of `bench.speculation`.

    python -m bench.guesses_beside LLAMA_CPP_BIN [--rounds 5] [-o FILE]

LLAMA_CPP_BIN has `llama-server`. It gets the same weights in bfloat16 and the same token ids, and says itself how long
the tokens behind the first took; of EdgeShard a client measures it. All ways take turns. Each answer of llama.cpp is of a server that was just started, for
some of its ways remember what other answers said. Prints JSON: a row a task.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from edgeshard_agent.engine.tokenizer import Tokenizer
from gguf import GGMLQuantizationType

from bench.llama_cpp import _free_port
from bench.sites import demo_site, write_rows
from bench.speculation import DEMO, DRAFT, DRAFTED, NEW_TOKENS, SCHEMAS, TASKS, answer, name_of
from edgeshard.domain.deployments.deployment import parse_spec
from tests.support import gguf_files

WAYS = {
    "off": ["--spec-type", "none"],
    "ngram-simple": ["--spec-type", "ngram-simple"],
    "ngram-map-k": ["--spec-type", "ngram-map-k"],
    "ngram-mod": ["--spec-type", "ngram-mod"],
    "ngram-cache": ["--spec-type", "ngram-cache"],
    "draft": ["--spec-type", "draft-simple"],
}
OURS = {"off": {"speculation": "off"}, "auto": {}, "draft": {"draft": "small-tales"}}
ASKED = [task for task in DRAFTED] + ["a list that goes on", "an answer with quotes"]


def write_gguf(of: Path, path: Path) -> Path:
    gguf_files.DEMO = of
    return gguf_files.write_demo_gguf(path, gguf_files.everywhere(GGMLQuantizationType.BF16))


class Server:
    def __init__(self, folder: Path, model: Path, draft: Path, way: str) -> None:
        self._port = _free_port()
        options = WAYS[way] + (["-md", str(draft), "-td", "1", "-tbd", "1"] if way == "draft" else [])
        command = [str(folder / "llama-server"), "-m", str(model), "-t", "1", "-tb", "1", "-c", "512", "-np", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--cache-ram", "0", "-fa", "on", *options]
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        give_up = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health").read()
                return
            except OSError:
                if time.monotonic() > give_up or self._process.poll() is not None:
                    self._log.seek(0)
                    raise RuntimeError(self._log.read().decode()[-3000:]) from None
                time.sleep(0.1)

    def rate(self, ids: list[int], temperature: float) -> dict[str, Any]:
        wanted = {
            "prompt": ids, "n_predict": NEW_TOKENS, "ignore_eos": True, "temperature": temperature, "seed": 3,
            "top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": False,
            "samplers": ["temperature"],
        }  # fmt: skip
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/completion", json.dumps(wanted).encode())
        return dict(json.loads(urllib.request.urlopen(request).read())["timings"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


def once(folder: Path, model: Path, draft: Path, way: str, ids: list[int], temperature: float) -> dict[str, Any]:
    server = Server(folder, model, draft, way)
    try:
        return server.rate(ids, temperature)
    finally:
        server.close()


async def run(folder: Path, rounds: int) -> list[dict[str, Any]]:
    tokenizer = Tokenizer.load(DEMO / "tokenizer.json")
    rows = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, draft = write_gguf(DEMO, scratch / "model.gguf"), write_gguf(DRAFT, scratch / "draft.gguf")
        async with demo_site(("a",), "tales", threads=1) as (cluster, client):
            await client.add_model(DRAFT, "small-tales")
            for way, keys in OURS.items():
                values = {"name": name_of("tales", 1, way), "model": "tales", "layers": "a=0:12", **keys}
                await client.deploy(parse_spec({**values, "concurrency": 1}))
            for task in ASKED:
                assert task not in SCHEMAS
                prompt, temperature = {**TASKS, **DRAFTED}[task]
                ids = tokenizer.encode(prompt)
                tps: dict[str, list[float]] = {}
                share: dict[str, float] = {}
                for number in range(rounds + 1):
                    for way in OURS:
                        found = await answer(client, cluster, name_of("tales", 1, way), task)
                        tps.setdefault(f"edgeshard {way}", []).append(found.tps)
                    for way in WAYS:
                        said = await asyncio.to_thread(once, folder, model, draft, way, ids, temperature)
                        tps.setdefault(f"llama.cpp {way}", []).append(
                            1000 * (said["predicted_n"] - 1) / said["predicted_ms"]
                        )
                        if said.get("draft_n"):
                            share[way] = said["draft_n_accepted"] / said["draft_n"]
                row: dict[str, Any] = {"task": task}
                for way, seen in tps.items():
                    of = tps[f"{way.split()[0]} off"]
                    row[way] = [
                        round(median(seen[1:]), 1),
                        round(median(a / b for a, b in zip(seen[1:], of[1:], strict=True)), 2),
                    ]
                rows.append(row | {"llama.cpp right": share})
                print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(run(options.folder, options.rounds))
    print(json.dumps(rows, indent=1))
    write_rows(options.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
