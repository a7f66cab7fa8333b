"""One measurement of ik_llama.cpp for `bench.single_box`; runs in an environment with `ik-llama-cpp-python` alone.

PYTHON bench/ik_llama.py GGUF THREADS STREAMS PROMPT_TOKENS NEW_TOKENS VOCABULARY     JSON on stdout

Its high-level class decodes one stream; several need the library's own calls, as `llama-batched-bench` makes them: all
streams advance in one batch, and the next tokens are any, since only the time counts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import ik_llama_cpp._ctypes_api as c  # type: ignore[import-not-found]


def fill(batch: Any, tokens: Sequence[tuple[int, int, int, bool]]) -> None:
    """Each token is (id, position, stream, whether its logits are wanted)."""
    batch.n_tokens = len(tokens)
    for index, (token, position, stream, wanted) in enumerate(tokens):
        batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, stream


def main() -> int:
    path, (threads, streams, depth, new_tokens, vocabulary) = sys.argv[1], map(int, sys.argv[2:])
    c.llama_backend_init()
    model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    params = c.llama_context_default_params()
    params.n_ctx, params.n_seq_max = streams * (depth + new_tokens + 1), streams
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn = True
    context = c.llama_init_from_model(model, params)
    chunk = 512
    batch = c.llama_batch_init(max(chunk, streams), 0, 1)
    for stream in range(streams):
        for first in range(0, depth, chunk):
            end = min(first + chunk, depth)
            fill(batch, [(7919 * p % vocabulary, p, stream, p == depth - 1) for p in range(first, end)])
            if c.llama_decode(context, batch):
                raise RuntimeError("a prompt was refused")
    began = time.perf_counter()
    for step in range(new_tokens):
        fill(batch, [((31 * step + 7 * s) % vocabulary, depth + step, s, True) for s in range(streams)])
        if c.llama_decode(context, batch):
            raise RuntimeError("a step was refused")
        c.llama_get_logits_ith(context, streams - 1)
    print(json.dumps({"tokens_per_s": streams * new_tokens / (time.perf_counter() - began)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
