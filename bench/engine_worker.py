"""A process of its own on one core that answers questions, one JSON object a line: what `bench.engine` compares with.

python -m bench.engine_worker transformers DIRECTORY     a Hugging Face directory under `generate`, one thread
python -m bench.engine_worker stage FIRST:END ROWS PROMPT_TOKENS NEW_TOKENS
                                                         some layers of the random Llama, and how long a step takes
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from edgeshard.domain.models.model import LayerRange

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Worker:
    """The process, for as long as the `with` lasts. `send` and `receive` apart let two of them work at once."""

    def __init__(self, core: int, *arguments: str) -> None:
        self._core, self._arguments = core, arguments
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        command = ["taskset", "-c", str(self._core), sys.executable, "-m", "bench.engine_worker", *self._arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(10)

    def send(self, question: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Raises RuntimeError when the process has ended."""
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._arguments)} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self.send(question)
        return self.receive()


def transformers_answers(directory: str) -> Answer:
    """{streams, prompt_tokens, new_tokens} -> {began_s, arrivals_s}: when each step's tokens were there."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteriaList

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model.eval()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        arrivals: list[float] = []

        def stamp(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            arrivals.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        shape = (question["streams"], question["prompt_tokens"])
        ids = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(shape[0]))
        began = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=question["new_tokens"],
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([stamp]),
        )
        return {"began_s": began, "arrivals_s": arrivals}

    return answer


def stage_answers(layers: str, rows: int, context: int, steps: int) -> Answer:
    """{rows, seconds}: decode that many requests for so long -> {step_s}."""
    from bench.engine_stage import DecodingStage

    first, end = (int(part) for part in layers.split(":"))
    stage = DecodingStage(LayerRange(first, end), None, rows, context, steps)
    return lambda question: {"step_s": statistics.median(stage.decode(question["rows"], question["seconds"]))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("transformers", "stage"))
    parser.add_argument("what", metavar="DIRECTORY|FIRST:END")
    parser.add_argument("numbers", metavar="ROWS PROMPT_TOKENS NEW_TOKENS", type=int, nargs="*")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    answer = (
        transformers_answers(options.what)
        if options.kind == "transformers"
        else stage_answers(options.what, *options.numbers)
    )
    print(json.dumps({}), flush=True)  # ready
    with torch.inference_mode():
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
