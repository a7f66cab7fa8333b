"""Train the mixture model: a small qwen3_moe with the demo model's tokenizer, from plain text.

    python -m bench.training.train_mixture_model --corpus DIR --out OUT

DIR holds `*.train.txt` and `*.valid.txt`. The result is a Hugging Face directory like the demo
model's, with one matrix per expert and projection as qwen3_moe is published. `training.json`
records every setting, the bits per byte reached and how unevenly each layer uses its experts.

The balance loss is weak on purpose. Users of this model (a cache of experts, widths by expert) need
routing that is skewed and follows from the layers before, as in mixtures of useful size.

Reproducible as the demo model's training is. `--checkpoint` names a file that is written every
`--checkpoint-steps`. If it exists, training continues from it, with the batches of a run that was
never stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.training.train_demo_model import (
    VOCABULARY,
    Muon,
    batches,
    encode_corpus,
    learning_rate_factor,
    options_of,
    read_corpus,
    sample,
    save,
    show_progress,
    training_record,
)


def build_model(arguments: argparse.Namespace) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        moe_intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.active,
        norm_topk_prob=True,
        max_position_embeddings=arguments.context,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.02,
    )
    config.head_dim = arguments.hidden // arguments.heads
    torch.manual_seed(arguments.seed)
    model = Qwen3MoeForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj")):
            torch.nn.init.zeros_(weight)  # every block starts as the identity, as in the demo model
        elif name.endswith(("gate_up_proj", "mlp.gate.weight")):
            torch.nn.init.normal_(weight, std=0.02)
    return model


class ExpertMuon:
    """The demo model's Muon for experts [experts, out, in]: each expert's projections are matrices
    of their own."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], momentum: float, weight_decay: float
    ) -> None:
        self._parameters = parameters
        self._views = [
            torch.nn.Parameter(torch.empty(0))
            for parameter in parameters
            for _ in range(
                parameter.shape[0] * (2 if parameter.shape[1] < parameter.shape[2] else 1)
            )
        ]
        self._bind()
        self.muon = Muon(self._views, momentum, weight_decay)

    def _matrices(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        # gate and up are in one tensor, down has its own
        halves = 2 if tensor.shape[1] < tensor.shape[2] else 1
        return [half for expert in tensor for half in expert.chunk(halves)]

    def _bind(self) -> None:
        matrices = [
            matrix for parameter in self._parameters for matrix in self._matrices(parameter.data)
        ]
        for view, matrix in zip(self._views, matrices, strict=True):
            view.data = matrix

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every expert from its gradient and drop the gradient."""
        gradients = [
            matrix
            for p in self._parameters
            if p.grad is not None
            for matrix in self._matrices(p.grad)
        ]
        for view, gradient in zip(self._views, gradients, strict=True):
            view.grad = gradient
        self.muon.step(lr)
        for parameter in self._parameters:
            parameter.grad = None


def balance_loss(router_logits: tuple[torch.Tensor, ...], active: int) -> torch.Tensor:
    """1 if layers spread tokens evenly over experts, more if not: the mean of layers [tokens,
    experts]

    experts * sum over experts of (share of the choices x mean probability), as in the Switch
    Transformer.
    """
    losses = []
    for logits in router_logits:
        probabilities = torch.softmax(logits.float(), -1)
        chosen = torch.zeros_like(probabilities).scatter_(
            1, probabilities.topk(active, -1).indices, 1.0 / active
        )
        losses.append(logits.shape[1] * (chosen.mean(0) * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def forward_loss(
    model: Qwen3MoeForCausalLM, block: torch.Tensor, arguments: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy in nats of a block [batch, window + 1] and its balance loss."""
    embedded = F.dropout(model.model.embed_tokens(block[:, :-1]), arguments.dropout)
    result = model.model(inputs_embeds=embedded, use_cache=False, output_router_logits=True)
    logits = model.lm_head(result.last_hidden_state)
    loss = F.cross_entropy(logits.float().flatten(0, 1), block[:, 1:].flatten())
    return loss, balance_loss(result.router_logits, arguments.active)


class Training:
    """The model's three optimisers, and their part of a checkpoint."""

    def __init__(self, model: Qwen3MoeForCausalLM, arguments: argparse.Namespace) -> None:
        self._model = model
        self._arguments = arguments
        named = list(model.named_parameters())
        experts = [p for n, p in named if ".experts." in n]
        matrices = [p for n, p in named if n.endswith("_proj.weight")]
        self._others = [
            p for n, p in named if ".experts." not in n and not n.endswith("_proj.weight")
        ]
        self._muon = Muon(matrices, momentum=0.95, weight_decay=arguments.weight_decay)
        self._experts = ExpertMuon(experts, momentum=0.95, weight_decay=arguments.weight_decay)
        self._adam = torch.optim.AdamW(
            self._others, lr=arguments.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, step: int, block: torch.Tensor) -> tuple[float, float]:
        """One update; the losses before it."""
        arguments = self._arguments
        factor = learning_rate_factor(step, arguments.steps, arguments.warmup)
        self._adam.param_groups[0]["lr"] = arguments.adam_lr * factor
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, balance = forward_loss(self._model, block, arguments)
        torch.autograd.backward(loss + arguments.balance * balance)
        torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        self._muon.step(arguments.muon_lr * factor)
        self._experts.step(arguments.muon_lr * factor)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return float(loss.detach()), float(balance.detach())

    def _state(self) -> dict[str, torch.Tensor]:
        state = {f"weight.{n}": p.data for n, p in self._model.named_parameters()}
        for name, muon in (("muon", self._muon), ("experts", self._experts.muon)):
            state |= {
                f"{name}.{'x'.join(map(str, shape))}": average
                for shape, average in muon.averages.items()
            }
        for index, parameter in enumerate(self._others):
            for key, value in self._adam.state.get(parameter, {}).items():
                state[f"adam.{index}.{key}"] = value
        return state

    def save(self, path: Path, step: int, average: float) -> None:
        """Everything but the batches, which follow from the seed and the step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        state = {name: tensor.contiguous() for name, tensor in self._state().items()}
        save_file(state, aside, metadata={"step": str(step), "average": str(average)})
        aside.replace(path)

    def load(self, path: Path) -> tuple[int, float]:
        """Continue from a checkpoint; its step and its mean loss."""
        with safe_open(path, "pt") as file:
            for parameter in self._others:
                zeros = torch.zeros_like(parameter)
                self._adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": zeros,
                    "exp_avg_sq": zeros.clone(),
                }
            for name, tensor in self._state().items():
                tensor.copy_(file.get_tensor(name))
            metadata = file.metadata()
        return int(metadata["step"]), float(metadata["average"])


def train(model: Qwen3MoeForCausalLM, ids: list[int], arguments: argparse.Namespace) -> None:
    training = Training(model, arguments)
    first, average = 0, 0.0
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        first, average = training.load(arguments.checkpoint)
    started = time.monotonic()
    for step, block in zip(range(arguments.steps), batches(ids, arguments, "cpu"), strict=False):
        if step < first:
            continue
        # for dropout, so that a stopped run continues in the same way
        torch.manual_seed(arguments.seed * 1_000_003 + step)
        loss, balance = training.step(step, block)
        average = loss if step == 0 else 0.98 * average + 0.02 * loss
        show_progress(
            step + 1,
            arguments.steps,
            average,
            (time.monotonic() - started) * (step + 1) / (step + 1 - first),
        )
        if (step + 1) % arguments.checkpoint_steps == 0:
            print(f"step {step + 1} balance {balance:.3f}", file=sys.stderr, flush=True)
            if arguments.checkpoint is not None:
                training.save(arguments.checkpoint, step + 1, average)


@torch.no_grad()
def expert_shares(
    model: Qwen3MoeForCausalLM, ids: list[int], arguments: argparse.Namespace
) -> list[list[float]]:
    """Each expert's share of its layer's choices on a text, largest first, by layer."""
    counts: list[torch.Tensor] = [torch.zeros(arguments.experts) for _ in range(arguments.layers)]
    for start in range(0, len(ids) - arguments.window, arguments.window):
        block = torch.tensor([ids[start : start + arguments.window]])
        result = model.model(block, use_cache=False, output_router_logits=True)
        for count, logits in zip(counts, result.router_logits, strict=True):
            count += torch.bincount(
                logits.topk(arguments.active, -1).indices.flatten(), minlength=arguments.experts
            )
    return [
        [round(float(s), 4) for s in (c / c.sum()).sort(descending=True).values] for c in counts
    ]


def published_tensors(model: Qwen3MoeForCausalLM) -> dict[str, torch.Tensor]:
    """The weights in bfloat16 by the names under which qwen3_moe is published: one matrix per
    expert and projection."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().to(torch.bfloat16)
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(weight):
                gate, up = both.chunk(2)
                tensors[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = (
                    gate.contiguous()
                )
                tensors[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(weight):
                tensors[name.replace("down_proj", f"{expert}.down_proj.weight")] = down.contiguous()
        else:
            tensors[name] = weight.contiguous()
    return tensors


def parse_arguments() -> argparse.Namespace:
    parser = options_of(__doc__ or "")
    parser.set_defaults(
        out=None, steps=1000, batch=8, intermediate=64, layers=8, dropout=0.0, threads=1
    )
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("edgeshard/demo_model/tokenizer.json")
    )
    parser.add_argument(
        "--experts", type=int, default=16, help="in each layer, as wide as --intermediate"
    )
    parser.add_argument("--active", type=int, default=2, help="experts per token")
    parser.add_argument("--balance", type=float, default=0.02, help="weight of the balance loss")
    parser.add_argument(
        "--checkpoint", type=Path, help="a safetensors file to continue from and to write"
    )
    parser.add_argument("--checkpoint-steps", type=int, default=100)
    arguments = parser.parse_args()
    if arguments.out is None:
        parser.error("--out is where the model goes")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    texts = read_corpus(arguments.corpus)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    ids = {part: encode_corpus(tokenizer, text) for part, text in texts.items()}
    model = build_model(arguments)
    parameters = model.num_parameters()
    print(
        f"{parameters / 1e6:.2f} M parameters, {len(ids['train'])} training tokens",
        file=sys.stderr,
        flush=True,
    )
    started = time.monotonic()
    train(model, ids["train"], arguments)
    record = training_record(model, texts, ids["valid"], arguments, "cpu")
    record |= {"train_seconds": round(time.monotonic() - started)}
    record |= {"expert_shares": expert_shares(model, ids["valid"], arguments)}
    written = ("num_hidden_layers", "num_experts", "num_experts_per_tok", "tie_word_embeddings")
    save(model, published_tensors(model), tokenizer, arguments.out, record, written)
    print(sample(model, tokenizer, "Once upon a time", "cpu"))


if __name__ == "__main__":
    main()
