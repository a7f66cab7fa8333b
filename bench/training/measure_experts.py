"""Widths per expert by measured loss, and the table that forecasts experts, for a mixture model's
directory.

    python -m bench.training.measure_experts widths MODEL --text TEXT [--tolerance NATS]
        prints the curve, writes config.json
    python -m bench.training.measure_experts table MODEL --text TEXT
        writes edgeshard_experts.json

`widths` follows EdgeMoE. With all matrices int4 it sets the experts of each layer to int2, and
measures the loss on the text. An expert's part in that loss is proportional to its share of the
layer's tokens. Then the experts that cost least are int2 together, in the largest number that the
tolerance allows, found by bisection. The loss from int2 is compensated by int8 in the experts that
gain most by it: several numbers of those are tried, and the fewest bits win. The loss that must not
be passed is that of all int4, plus the tolerance.

With `--single` the experts of the layers that cost least are measured one by one, as EdgeMoE does.
The loss of a single one is smaller than 76,000 tokens of a small model can separate from chance:
such a choice increases the loss of other texts. Judge the result by another text (`--judge`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from edgeshard_agent.model.blocks import GatedMlp

from bench.training.expert_learning import learn
from bench.training.expert_runs import Mixture, token_ids
from edgeshard.architectures import EXPERT_WIDTHS, held_bytes
from edgeshard.domain.models.dtypes import DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import LayerRange, TensorInfo
from edgeshard.storage.forms import EXPERT_TABLE

Expert = tuple[int, int]
LOW = IntegerFormat.INT2
MIDDLE = IntegerFormat.INT4
HIGH = IntegerFormat.INT8


@dataclass
class Widths:
    """A model whose experts are there in every width, so that one takes another at once."""

    mixture: Mixture
    ids: list[int]
    kinds: dict[IntegerFormat, list[list[GatedMlp]]]
    measured: dict[frozenset[tuple[Expert, IntegerFormat]], float] = field(default_factory=dict)

    @classmethod
    def load(cls, model: Path, ids: list[int]) -> Widths:
        layers = int(json.loads((model / "config.json").read_text())["num_hidden_layers"])
        kinds = {}
        for kind in (LOW, HIGH, MIDDLE):
            experts = _experts_of(model)
            widths = [str(kind.bits) * experts] * layers
            mixture = Mixture.load(model, Quantisation.INT4, **{EXPERT_WIDTHS: widths})
            kinds[kind] = [list(layer.experts) for layer in mixture.mixtures()]
        return cls(mixture, ids, kinds)  # type: ignore[arg-type]

    def shares(self) -> list[list[float]]:
        """Each expert's share of the text's choices, by layer."""
        choices = self.mixture.routing(self.ids)
        return [
            (
                np.bincount(choices[:, layer].ravel(), minlength=len(experts))
                / choices[:, layer].size
            ).tolist()
            for layer, experts in enumerate(self.kinds[MIDDLE])
        ]

    def loss(self, chosen: dict[Expert, IntegerFormat]) -> float:
        """Nats per token with these experts in these widths and all others int4."""
        key = frozenset(chosen.items())
        if key not in self.measured:
            for layer, mixture in enumerate(self.mixture.mixtures()):
                for expert in range(len(mixture.experts)):
                    kind = chosen.get((layer, expert), MIDDLE)
                    mixture.experts[expert] = self.kinds[kind][layer][expert]
            self.measured[key] = self.mixture.nats_per_token(self.ids, overlap=0)
        return self.measured[key]


def _experts_of(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return int(next(config[key] for key in ("num_experts", "num_local_experts") if key in config))


def most_within(
    order: Sequence[Expert], loss: Callable[[Sequence[Expert]], float], limit: float, fewest: int
) -> int | None:
    """How many of the experts, taken in order, keep the loss within the limit: found by bisection
    from `fewest` on.

    None if `fewest` do not. The loss grows with their number except for noise, so the result holds
    although a larger number might, too.
    """
    low = fewest - 1
    high = len(order)
    middle = fewest
    while low < high:
        found = loss(order[:middle])
        print(f"  {middle:4d} experts: {found:.5f} nats per token, limit {limit:.5f}", flush=True)
        if found <= limit:
            low = middle
        elif middle == fewest:
            return None
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low if low >= fewest else None


def choose_widths(widths: Widths, tolerance: float, single: int) -> dict[Expert, IntegerFormat]:
    """As many experts at int2 as the tolerance allows, once the experts that int8 helps most have
    it.

    Each expert of the `single` layers that cost least is measured by itself.
    """
    plain = widths.loss({})
    limit = plain + tolerance
    print(f"all int4: {plain:.4f} nats per token")
    shares = widths.shares()
    cost, of_layers = dict[Expert, float](), dict[int, float]()
    print("layer: nats per token that int2 costs; least and most of its tokens that an expert has")
    for layer, of_layer in enumerate(shares):
        every = [(layer, expert) for expert in range(len(of_layer))]
        costs = widths.loss(dict.fromkeys(every, LOW)) - plain
        print(f"  layer {layer}: {costs:+.5f}; {min(of_layer):.4f} {max(of_layer):.4f}", flush=True)
        of_layers[layer] = costs
        cost |= {expert: costs * share for expert, share in zip(every, of_layer, strict=True)}
    for layer in sorted(of_layers, key=lambda layer: of_layers[layer])[:single]:
        for expert in range(len(shares[layer])):
            cost[layer, expert] = widths.loss({(layer, expert): LOW}) - plain
            print(f"  layer {layer} expert {expert}: {cost[layer, expert]:+.6f}", flush=True)
    best: dict[Expert, IntegerFormat] = {}
    total = len(cost)
    fewest = MIDDLE.bits * total
    # The loss of int4 is about a sixteenth of int2's, as its steps are a quarter. So the experts
    # that lose most in int2 gain most from int8. An expert at int8 costs what two at int2 save.
    cheapest = sorted(cost, key=lambda expert: cost[expert])
    for high in (0, *(total // part for part in (64, 32, 16, 8, 4) if total >= part)):
        raised = dict.fromkeys(cheapest[total - high :], HIGH)
        order = cheapest[: total - high]
        bits = MIDDLE.bits * total + (HIGH.bits - MIDDLE.bits) * high
        saved = MIDDLE.bits - LOW.bits
        print(f"{high} experts at int8:", flush=True)
        count = most_within(
            order,
            lambda some, raised=raised: widths.loss(raised | dict.fromkeys(some, LOW)),  # type: ignore[misc]
            limit,
            fewest=(bits - fewest) // saved + 1,
        )
        if count is None:
            continue
        fewest, best = bits - saved * count, raised | dict.fromkeys(order[:count], LOW)
        print(f"  {count} at int2, {fewest / total:.3f} bits an expert's weight without scales")
    return best


def bits_per_weight(model: Path, mixture: Mixture, widths: list[str] | None) -> float:
    """Mean of the experts' weights, scales counted."""
    from safetensors import safe_open

    config = mixture.config | {EXPERT_WIDTHS: widths}
    with safe_open(model / "model.safetensors", "pt") as file:
        tensors = [
            TensorInfo(name, DType.BFLOAT16, tuple(file.get_slice(name).get_shape()), "")  # type: ignore[arg-type]
            for name in file.keys()  # noqa: SIM118 (no mapping)
            if ".experts." in name
        ]
    layers = LayerRange(0, config["num_hidden_layers"])
    weights = sum(tensor.element_count for tensor in tensors)
    return 8 * held_bytes(config, tensors, layers, DType.BFLOAT16, Quantisation.INT4) / weights


def measure_widths(options: argparse.Namespace) -> None:
    ids = token_ids(options.model, options.text, options.bytes)
    widths = Widths.load(options.model, ids)
    chosen = choose_widths(widths, options.tolerance, options.single)
    per_layer = [
        "".join(str(chosen.get((layer, expert), MIDDLE).bits) for expert in range(len(some)))
        for layer, some in enumerate(widths.kinds[MIDDLE])
    ]
    mixture = widths.mixture
    print(f"chosen: {widths.loss(chosen):.5f} nats per token, all int4 {widths.loss({}):.5f}")
    print(
        "bits per weight of experts, scales counted: "
        f"{bits_per_weight(options.model, mixture, per_layer):.3f}, "
        f"all int4 {bits_per_weight(options.model, mixture, None):.3f}"
    )
    if options.judge is not None:
        widths.ids = token_ids(options.model, options.judge, None)
        widths.measured.clear()
        print(
            f"on the other text: {widths.loss(chosen):.5f} nats per token, all int4 "
            f"{widths.loss({}):.5f}"
        )
    path = options.model / "config.json"
    config = json.loads(path.read_text()) | {EXPERT_WIDTHS: per_layer}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def measure_table(options: argparse.Namespace) -> None:
    mixture = Mixture.load(options.model, None)
    choices = mixture.routing(token_ids(options.model, options.text, options.bytes))
    table = learn(choices, _experts_of(options.model))
    (options.model / EXPERT_TABLE).write_text(json.dumps(table.values()) + "\n", encoding="utf-8")
    print(f"learned from {len(choices)} tokens")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("widths", "table"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--judge", type=Path, help="another text, of which the loss is printed")
    parser.add_argument("--bytes", type=int, help="of the text, its first")
    parser.add_argument(
        "--single", type=int, default=0, help="layers whose experts are measured one by one"
    )
    parser.add_argument("--tolerance", type=float, default=0.0, help="nats per token over all int4")
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"widths": measure_widths, "table": measure_table}[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
