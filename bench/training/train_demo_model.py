"""Train the demo model: a byte-fallback BPE tokenizer and a small Llama, from plain text.

    python bench/training/train_demo_model.py --corpus DIR --out edgeshard/demo_model

DIR holds `*.train.txt` and `*.valid.txt`. The result is a Hugging Face directory: config.json,
tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json, and
model.safetensors in bfloat16. It also has `training.json`, which records every setting, the bits
per byte reached and the hash of the corpus.

Reproducible: batches come from a seeded generator, the schedule counts steps and not seconds, and
`--threads` is fixed. So two runs on the same kind of machine give the same weights. It runs on a
GPU when torch sees one.

Hidden matrices are trained with Muon (momentum, orthogonalised by a Newton-Schulz iteration),
embeddings and norms with AdamW.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 4096
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def read_corpus(directory: Path) -> dict[str, str]:
    """The texts to train on and to judge by."""
    texts = {}
    for part in ("train", "valid"):
        files = sorted(directory.glob(f"*.{part}.txt"))
        if not files:
            sys.exit(f"--corpus {directory} holds no *.{part}.txt")
        texts[part] = "\n\n".join(file.read_text(encoding="utf-8").strip() for file in files)
    return texts


def train_tokenizer(text: str) -> Tokenizer:
    """A BPE tokenizer with byte fallback whose decode(encode(text)) is text, for any text.

    A space becomes the visible mark U+2581 and sticks to the front of the next word. Words,
    punctuation and runs of newlines are merged separately, which spends the small vocabulary on
    words rather than on word-and-comma pairs.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=False))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    pattern = Regex(r"▁?[\p{L}\p{M}]+|▁?[^\p{L}\p{M}▁\n]+|▁+|\n+")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS + BYTE_TOKENS,
        initial_alphabet=["▁", "\n"],
        show_progress=False,
    )
    paragraphs = (paragraph + "\n\n" for paragraph in text.split("\n\n"))
    tokenizer.train_from_iterator(paragraphs, trainer)
    return mark_byte_tokens_ordinary(tokenizer)


def mark_byte_tokens_ordinary(tokenizer: Tokenizer) -> Tokenizer:
    """Byte tokens had to be special for the trainer to keep them; in use they are ordinary
    vocabulary."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in SPECIAL_TOKENS]
    return Tokenizer.from_str(json.dumps(state))


def is_title(paragraph: str) -> bool:
    """Whether a paragraph is a story's title: short and all capitals. A story ends before the next
    title."""
    letters = [c for c in paragraph if c.isalpha()]
    return len(letters) > 3 and len(paragraph) < 80 and all(c.isupper() for c in letters)


def encode_corpus(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of the whole text with `</s>` in front of every story's title."""
    end_of_story: int = tokenizer.token_to_id("</s>") or 0
    stories: list[list[str]] = [[]]
    for paragraph in text.split("\n\n"):
        if is_title(paragraph) and stories[-1]:
            stories.append([])
        stories[-1].append(paragraph)
    encoded = tokenizer.encode_batch(["\n\n".join(story) for story in stories])
    ids: list[int] = []
    for story in encoded:
        ids += story.ids
        ids.append(end_of_story)
    return ids


def build_model(arguments: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=arguments.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.02,
    )
    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            # every block starts as the identity: deep and narrow trains faster
            torch.nn.init.zeros_(weight)
    return model


def orthogonalise(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrix to each [..., rows, columns] matrix, by a quintic
    Newton-Schulz iteration."""
    a = 3.4445
    b = -4.7750
    c = 2.0315
    # only the direction is needed; bfloat16 is several times faster on CPUs that have it
    x = matrix.bfloat16()
    transposed = x.size(-2) > x.size(-1)
    if transposed:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.mT if transposed else x
    return result


class Muon:
    """Momentum whose update is orthogonalised, for weight matrices. Matrices of one shape are
    stepped as one batch."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], momentum: float, weight_decay: float
    ) -> None:
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._groups: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            self._groups.setdefault(parameter.shape, []).append(parameter)
        self.averages = {
            shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every matrix from its gradient and drop the gradient."""
        for shape, parameters in self._groups.items():
            gradient = torch.stack([p.grad for p in parameters if p.grad is not None])
            average = self.averages[shape] = self.averages[shape].to(gradient.device)
            average.lerp_(gradient, 1 - self._momentum)
            update = orthogonalise(gradient.lerp(average, self._momentum))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, delta in zip(parameters, update, strict=True):
                parameter.mul_(1 - lr * self._weight_decay)
                parameter.add_(delta, alpha=-lr * scale)
                parameter.grad = None


def forward_loss(
    model: LlamaForCausalLM, inputs: torch.Tensor, targets: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Mean cross-entropy in nats of `targets` [batch, time] given `inputs` [batch, time]."""
    embedded = F.dropout(model.model.embed_tokens(inputs), dropout, training=dropout > 0)
    hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def bits_per_byte(
    model: PreTrainedModel, ids: list[int], text_bytes: int, context: int, device: str
) -> float:
    """Total bits of the validation tokens over its bytes. Every scored token sees at least half a
    context."""
    data = torch.tensor(ids, device=device)
    half = context // 2
    nats = 0.0
    for start in range(0, len(ids) - 1, half):
        begin = max(0, start - half)
        window = data[begin : start + half + 1]
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(window[None, :-1], use_cache=False).logits[0].float()
        first = start - begin
        nats += float(F.cross_entropy(logits[first:], window[first + 1 :], reduction="sum"))
    return nats / math.log(2) / text_bytes


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, flat for 40 % of the run, then linear decay to zero."""
    flat_until = warmup + 0.4 * (steps - warmup)
    if step < warmup:
        return (step + 1) / warmup
    if step < flat_until:
        return 1.0
    return (steps - step) / (steps - flat_until)


def batches(ids: list[int], arguments: argparse.Namespace, device: str) -> Iterator[torch.Tensor]:
    """Blocks [batch, window + 1] for ever: each epoch cuts the text at a new random offset, in a
    new order."""
    data = torch.tensor(ids, device=device)
    generator = torch.Generator().manual_seed(arguments.seed)
    while True:
        offset = int(torch.randint(arguments.window, (1,), generator=generator))
        starts = torch.arange(offset, len(ids) - arguments.window - 1, arguments.window)
        order = starts[torch.randperm(len(starts), generator=generator)]
        for rows in order[: len(order) // arguments.batch * arguments.batch].view(
            -1, arguments.batch
        ):
            yield torch.stack([data[s : s + arguments.window + 1] for s in rows.tolist()])


def train(
    model: LlamaForCausalLM, ids: list[int], arguments: argparse.Namespace, device: str
) -> None:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices, momentum=0.95, weight_decay=arguments.weight_decay)
    adam = torch.optim.AdamW(
        others, lr=arguments.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    average, started = 0.0, time.monotonic()
    for step, block in zip(range(arguments.steps), batches(ids, arguments, device), strict=False):
        factor = learning_rate_factor(step, arguments.steps, arguments.warmup)
        adam.param_groups[0]["lr"] = arguments.adam_lr * factor
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = forward_loss(model, block[:, :-1], block[:, 1:], arguments.dropout)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step(arguments.muon_lr * factor)
        adam.step()
        adam.zero_grad(set_to_none=True)
        average = (
            float(loss.detach()) if step == 0 else 0.98 * average + 0.02 * float(loss.detach())
        )
        show_progress(step + 1, arguments.steps, average, time.monotonic() - started)


def show_progress(step: int, steps: int, loss: float, elapsed: float) -> None:
    """A progress bar on stderr: redrawn in place on a terminal, a line every 50 steps in a log."""
    terminal = sys.stderr.isatty()
    if not terminal and step % 50 and step != steps:
        return
    filled = 30 * step // steps
    left = elapsed / step * (steps - step)
    line = (
        f"[{'#' * filled}{'.' * (30 - filled)}] {step}/{steps} loss {loss:.3f} {elapsed:.0f}s, "
        f"{left:.0f}s left"
    )
    print(
        ("\r" if terminal else "") + line,
        end="" if terminal and step < steps else "\n",
        file=sys.stderr,
        flush=True,
    )


CHAT_TEMPLATE = (
    "{#- The model continues fairy tales and was never taught to converse: it reads what was said "
    "as one text. -#}"
    """
{%- for message in messages -%}
{{- message.content -}}
{%- if not loop.last %}{{ "\\n\\n" }}{% endif -%}
{%- endfor -%}
"""
)


def save(
    model: PreTrainedModel,
    tensors: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    out: Path,
    record: dict[str, Any],
    written: tuple[str, ...] = ("num_hidden_layers",),
) -> None:
    """The tensors, the config, the tokenizer with its settings and template, as transformers reads
    them, and the record of the training. `written` are keys of the config that are there though
    they have a default's value."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in model.config.to_diff_dict().items() if not k.startswith("_")}
    config |= {
        "architectures": [type(model).__name__],
        "model_type": model.config.model_type,
        "dtype": "bfloat16",
    }
    write_json(
        out / "config.json", config | {name: getattr(model.config, name) for name in written}
    )
    write_json(out / "training.json", record)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(out / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.max_position_embeddings,
        },
    )
    tokenizer.save(str(out / "tokenizer.json"))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, device: str) -> str:
    """120 tokens of a story at temperature 0.7, to look at."""
    ids = tokenizer.encode(prompt).ids
    for _ in range(120):
        logits = model(torch.tensor([ids], device=device)).logits[0, -1].float()
        ids.append(int(torch.multinomial(torch.softmax(logits / 0.7, -1), 1)))
    return str(tokenizer.decode(ids))


def training_record(
    model: PreTrainedModel,
    texts: dict[str, str],
    ids: list[int],
    arguments: argparse.Namespace,
    device: str,
) -> dict[str, Any]:
    """The settings, and the bits per byte that the weights to be shipped, those in bfloat16,
    reach."""
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    reached = bits_per_byte(model, ids, len(texts["valid"].encode()), arguments.context, device)
    print(f"{reached:.4f} bits per byte on the validation text")
    left_out = ("corpus", "out", "checkpoint", "checkpoint_steps", "tokenizer")
    return {
        "settings": {
            name: value for name, value in vars(arguments).items() if name not in left_out
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "valid_bits_per_byte": round(reached, 4),
        "torch": torch.__version__,
        "device": device,
        "corpus_sha256": {
            part: hashlib.sha256(text.encode()).hexdigest() for part, text in texts.items()
        },
    }


def options_of(description: str) -> argparse.ArgumentParser:
    """The options of both models' training, with the demo model's defaults."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument(
        "--corpus", type=Path, required=True, help="directory with *.train.txt and *.valid.txt"
    )
    parser.add_argument("--out", type=Path, default=Path("edgeshard/demo_model"))
    parser.add_argument("--steps", type=int, default=1700)
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--window", type=int, default=256, help="tokens per window")
    parser.add_argument("--context", type=int, default=512, help="max_position_embeddings")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="on the embedded tokens, while training"
    )
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def main() -> None:
    arguments = options_of(__doc__ or "").parse_args()
    torch.set_num_threads(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = read_corpus(arguments.corpus)
    tokenizer = train_tokenizer(texts["train"])
    assert tokenizer.decode(tokenizer.encode(texts["valid"]).ids) == texts["valid"]
    ids = {part: encode_corpus(tokenizer, text) for part, text in texts.items()}
    model = build_model(arguments)
    torch.nn.Module.to(model, device)
    print(
        f"{model.num_parameters() / 1e6:.2f} M parameters, {len(ids['train'])} training tokens, "
        f"{len(texts['valid'].encode()) / len(ids['valid']):.2f} bytes per token",
        file=sys.stderr,
    )
    started = time.monotonic()
    train(model, ids["train"], arguments, device)
    record = training_record(model, texts, ids["valid"], arguments, device)
    tensors = {
        n: p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in model.named_parameters()
    }
    save(
        model,
        tensors,
        tokenizer,
        arguments.out,
        record | {"train_seconds": round(time.monotonic() - started)},
    )
    print(sample(model, tokenizer, "Once upon a time", device))


if __name__ == "__main__":
    main()
