"""A process of its own on one core that answers questions, one JSON object a line: what
`bench.engine` compares with.

    python -m bench.engine_worker transformers DIRECTORY
        a Hugging Face directory under `generate`, one thread
    python -m bench.engine_worker stage FIRST:END ROWS PROMPT_TOKENS NEW_TOKENS
        some layers of the random Llama, and how long a step takes
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.lines import LineProcess
from edgeshard.domain.models.model import LayerRange

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Worker(LineProcess):
    """This module with some arguments, on one core and with one thread."""

    def __init__(self, core: int, *arguments: str) -> None:
        command = [
            "taskset",
            "-c",
            str(core),
            sys.executable,
            "-m",
            "bench.engine_worker",
            *arguments,
        ]
        super().__init__(
            command, {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        )


def transformers_answers(directory: str) -> Answer:
    """{streams, prompt_tokens, new_tokens} -> {began_s, arrivals_s}: when each step's tokens were
    there."""
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
        ids = torch.randint(
            model.config.vocab_size, shape, generator=torch.Generator().manual_seed(shape[0])
        )
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
    """{rows, seconds}: decode `rows` requests for `seconds` -> {step_s}."""
    from bench.engine_stage import DecodingStage

    first, end = (int(part) for part in layers.split(":"))
    stage = DecodingStage(LayerRange(first, end), rows, context, steps)
    return lambda question: {
        "step_s": statistics.median(stage.decode(question["rows"], question["seconds"]))
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
