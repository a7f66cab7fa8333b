"""Train a draft of the demo model: a tenth of its parameters, its tokenizer, its training text.

    python -m bench.training.train_draft_model --corpus DIR --out bench/draft_model

It learns the demo model's distribution for each token of the text, not the token itself: a guess is
right if both models draw the same. In addition to the demo model's record, its record has how often
the two agree on the likeliest token.

Reproducible as the demo model's training is. The demo model's output for a window is computed once
and kept, a gigabyte of memory for the whole text.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from bench.training.train_demo_model import (
    Muon,
    build_model,
    encode_corpus,
    learning_rate_factor,
    options_of,
    read_corpus,
    sample,
    save,
    show_progress,
    training_record,
)

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"

JUDGED_TOKENS = 1 << 14
"""Tokens of the validation text, for the agreement of the two models."""


class Teacher:
    """The demo model's output for the windows of a text, [window + 1] tokens each."""

    def __init__(self, model: LlamaForCausalLM, windows: torch.Tensor) -> None:
        self._model = model.train(False)
        self._windows = windows
        self._hidden = torch.empty(
            len(windows), windows.shape[1] - 1, model.config.hidden_size, dtype=torch.bfloat16
        )
        self._known = torch.zeros(len(windows), dtype=torch.bool)

    @torch.no_grad()
    def logprobs(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows x window, vocabulary], after each token of these windows except the last."""
        missing = rows[~self._known[rows]]
        if len(missing):
            self._hidden[missing] = self._model.model(
                self._windows[missing, :-1], use_cache=False
            ).last_hidden_state
            self._known[missing] = True
        return F.log_softmax(self._model.lm_head(self._hidden[rows]).float(), -1).flatten(0, 1)


@torch.no_grad()
def begin_from(model: LlamaForCausalLM, teacher: LlamaForCausalLM) -> None:
    """Give the draft the demo model's embedding, as far as its fewer dimensions hold it: what
    tokens have in common need not be learned again."""
    embedding = teacher.model.embed_tokens.weight.float() * teacher.model.norm.weight.float()
    directions = torch.linalg.svd(embedding, full_matrices=False).Vh[: model.config.hidden_size]
    model.model.embed_tokens.weight.copy_(embedding @ directions.T)


def orders(count: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Rows for ever, `batch` at a time: all of them in a new order each time."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator)[: count // batch * batch].view(
            -1, batch
        )


def train(
    model: LlamaForCausalLM, teacher: Teacher, windows: torch.Tensor, arguments: argparse.Namespace
) -> None:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices, momentum=0.95, weight_decay=arguments.weight_decay)
    adam = torch.optim.AdamW(
        others, lr=arguments.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    average, started = 0.0, time.monotonic()
    for step, rows in zip(
        range(arguments.steps), orders(len(windows), arguments.batch, arguments.seed), strict=False
    ):
        factor = learning_rate_factor(step, arguments.steps, arguments.warmup)
        adam.param_groups[0]["lr"] = arguments.adam_lr * factor
        wanted = teacher.logprobs(rows)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(windows[rows, :-1], use_cache=False).logits
        said = F.log_softmax(logits.float(), -1).flatten(0, 1)
        loss = F.kl_div(said, wanted, log_target=True, reduction="batchmean")
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step(arguments.muon_lr * factor)
        adam.step()
        adam.zero_grad(set_to_none=True)
        average = (
            float(loss.detach()) if step == 0 else 0.98 * average + 0.02 * float(loss.detach())
        )
        show_progress(step + 1, arguments.steps, average, time.monotonic() - started)


@torch.no_grad()
def agreement(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM, ids: list[int], window: int
) -> float:
    """The fraction of the first validation tokens after which both find the same token
    likeliest."""
    windows = torch.tensor(ids[: JUDGED_TOKENS // window * window]).view(-1, window)
    same = [
        (model(part).logits.argmax(-1) == teacher(part).logits.argmax(-1)).float().mean()
        for part in windows.split(8)
    ]
    return float(torch.stack(same).mean())


def main() -> None:
    parser = options_of(__doc__ or "")
    parser.set_defaults(
        out=Path("bench/draft_model"), hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1
    )
    # Twelve minutes on one core. 350 steps find the demo model's likeliest token for 48 of 100,
    # 1,500 for 58.
    parser.set_defaults(
        steps=5000, batch=8, window=128, warmup=20, adam_lr=0.004, dropout=0.0, threads=1
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    texts = read_corpus(arguments.corpus)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ids = {part: encode_corpus(tokenizer, text) for part, text in texts.items()}
    model = build_model(arguments)
    teacher = LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.bfloat16)
    begin_from(model, teacher)
    window = arguments.window
    windows = torch.tensor(ids["train"]).unfold(0, window + 1, window)
    print(
        f"{model.num_parameters() / 1e6:.2f} M parameters, {len(windows)} windows", file=sys.stderr
    )
    started = time.monotonic()
    train(model, Teacher(teacher, windows), windows, arguments)
    record = training_record(model, texts, ids["valid"], arguments, "cpu")
    record |= {
        "agrees_with_demo_model": round(agreement(model, teacher, ids["valid"], window), 4),
        "train_seconds": round(time.monotonic() - started),
    }
    tensors = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save(model, tensors, tokenizer, arguments.out, record)
    # The same bytes as the demo model's, so that the two need no comparison.
    (arguments.out / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    print(sample(model, tokenizer, "Once upon a time", "cpu"))


if __name__ == "__main__":
    main()
