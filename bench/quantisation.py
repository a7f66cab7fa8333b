"""Measure the loss of quality from weights as small integers: the demo model's bits per byte of
unseen text.

One stage that holds all layers scores the demo model's validation text with float32, bf16, int8 and
int4 weights. With int8 and int4 the LM head is whole, int8 and int4. Every scored token sees at
least half a context. Fewer bits are better. `perplexity` is of a token, `perplexity_per_byte` 2 to
the bits of a byte. `perplexity_over_whole_head` compares with the same blocks under a head in bf16,
`perplexity_of_kv_int4_over_whole` the same weights with keys and values of 4 bits and in bf16.

    python -m bench.quantisation [--bytes 60000]    JSON on stdout
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.model.stage import StageModel

from bench.scoring import nats, whole_stage
from edgeshard.domain.models.dtypes import ROUNDED, WHOLE_HEAD, DType, KvFormat, Quantisation

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "edgeshard" / "demo_model"
VALIDATION = ROOT / "tests" / "data" / "fairy-tales.valid.txt"
SCHEMES: dict[str, tuple[DType, Quantisation | None]] = {
    "float32": (DType.FLOAT32, None),
    "bf16": (DType.BFLOAT16, None),
    **{str(quantisation): (DType.BFLOAT16, quantisation) for quantisation in ROUNDED},
}


def demo_stage(scheme: str, kept: KvFormat | None = None) -> StageModel:
    """The whole demo model in one stage; keys and values are `kept` so, else in the dtype."""
    return whole_stage(MODEL, *SCHEMES[scheme], kept)


def bits_per_byte(stage: StageModel, text: str) -> float:
    """The text's negative log2-likelihood under the stage, divided by its bytes in UTF-8."""
    return score(stage, text)[0] / math.log(2) / len(text.encode())


def perplexity(stage: StageModel, text: str) -> float:
    """The perplexity of a token of the text."""
    lost, tokens = score(stage, text)
    return math.exp(lost / tokens)


def score(stage: StageModel, text: str) -> tuple[float, int]:
    """The text's negative log-likelihood under the stage in nats, and the tokens it is the sum
    over."""
    ids = Tokenizer.load(MODEL / "tokenizer.json").encode(text)
    return nats(stage, ids), len(ids) - 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=60_000, help="of the validation text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = VALIDATION.read_text(encoding="utf-8")[: options.bytes]
    rows: list[dict[str, Any]] = []
    for scheme in SCHEMES:
        stage = demo_stage(scheme)
        lost, tokens = score(stage, text)
        bits = lost / math.log(2) / len(text.encode())
        rows.append(
            {
                "weights": scheme,
                "bits_per_byte": round(bits, 4),
                "perplexity_per_byte": round(2**bits, 4),
                "perplexity": round(math.exp(lost / tokens), 4),
                "parameter_bytes": stage.parameter_bytes,
            }
        )
        if scheme != "float32":
            small = perplexity(demo_stage(scheme, KvFormat.INT4), text)
            rows[-1]["perplexity_of_kv_int4_over_whole"] = round(
                small / math.exp(lost / tokens) - 1, 5
            )
        print(f"{scheme}: {bits:.4f} bits per byte", file=sys.stderr)
    for row in rows:
        row["bits_over_bf16"] = round(row["bits_per_byte"] - rows[1]["bits_per_byte"], 4)
        scheme = row["weights"]
        if scheme in ROUNDED:
            whole_head = Quantisation.of(Quantisation(scheme).blocks, WHOLE_HEAD)
            (whole,) = (other for other in rows if other["weights"] == whole_head)
            row["perplexity_over_whole_head"] = round(
                row["perplexity"] / whole["perplexity"] - 1, 5
            )
    print(
        json.dumps(
            {"benchmark": "quantisation", "scored_bytes": len(text.encode()), "rows": rows},
            indent=2,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
