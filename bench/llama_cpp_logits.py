"""Logits by llama.cpp, for `bench.gguf_mixtures`: run by an interpreter that has the package
llama-cpp-python.

    PYTHON -P bench/llama_cpp_logits.py MODEL.gguf TOKENS.npy LOGITS.npy

TOKENS are [texts, tokens] in int32, each text from position 0. LOGITS are [texts, tokens,
vocabulary] in float32.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp.llama_cpp as library
import numpy as np


def main() -> int:
    model_path, tokens_path, logits_path = map(Path, sys.argv[1:])
    tokens = np.load(tokens_path)
    library.llama_backend_init()
    model = library.llama_model_load_from_file(
        str(model_path).encode(), library.llama_model_default_params()
    )
    options = library.llama_context_default_params()
    options.n_ctx = tokens.shape[1]
    options.n_batch = tokens.shape[1]
    options.n_threads = 1
    options.n_threads_batch = 1
    context = library.llama_init_from_model(model, options)
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    found = [_logits(context, text, size) for text in tokens]
    np.save(logits_path, np.stack(found))
    return 0


def _logits(context: ctypes.c_void_p, text: np.ndarray, size: int) -> np.ndarray:
    library.llama_memory_clear(library.llama_get_memory(context), True)
    batch = library.llama_batch_init(len(text), 0, 1)
    batch.n_tokens = len(text)
    for position, token in enumerate(text):
        batch.token[position] = int(token)
        batch.pos[position] = position
        batch.n_seq_id[position] = 1
        batch.seq_id[position][0] = 0
        batch.logits[position] = 1
    if library.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    values = library.llama_get_logits(context)
    found = np.ctypeslib.as_array(values, (len(text), size)).copy()
    library.llama_batch_free(batch)
    return found


if __name__ == "__main__":
    sys.exit(main())
