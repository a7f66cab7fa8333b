"""Write docs/benchmarks.md from the rows of `bench.engine`.

python -m bench.engine_report ROWS.json docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.engine_cases import FULL
from bench.engine_rows import LLAMA_CPP
from bench.pages import figures_comment, markdown_table, wrapped

Row = dict[str, Any]

WHOLE = "whole"
DEFAULT = "2 stages, the default"
COMMAND = "python -m bench.engine"

INTRODUCTION = """# Compare the engine with other engines

Two nodes of one core each run on a machine with two cores. The model is a Llama of 316 M random parameters: 24 layers
of 1,024, 16 heads, 8 KV heads, inner size 2,816, vocabulary 16,000. Two real agents have one thread each, pinned to a
core each. *Whole* is the same engine as one stage on the first agent. Client and coordinator use the same two cores.

Other pages: [kernels](benchmarks/kernels.md), [weights from the disk](benchmarks/memory.md), [a token's
time](benchmarks/token.md), [a coordinator of many nodes](benchmarks/coordinator.md), [AVX2 and
AVX-512](benchmarks/processors.md), [measured once](benchmarks/once.md), [plans of real models](real-models.md). This
page was measured on {machine}, and a program writes it from a run. `make figures` lists figures whose code has changed:

<!-- not run: it wants two idle cores and, in full, most of an hour -->
```console
$ python -m bench.engine{quick} --llama-cpp ~/llama.cpp/build/bin -o .benchmarks/engine.json
$ python -m bench.engine_report .benchmarks/engine.json docs/benchmarks.md
```

`--quick` is a short form. If you have no build of llama.cpp (`-DGGML_RPC=ON`) and no package `gguf`, leave
`--llama-cpp` out. All engines take turns within a round, and figures are {rounds}. Tokens per second are counted
while all streams generate, without prompts and first tokens. The load of the machine (one
minute) was {load:.1f} in the median, of which the benchmark itself makes about 2.
"""  # noqa: E501

SLOWER = """## When two nodes are slower than one

If one node holds the whole model, a second one makes few streams slower. Each token passes both nodes in turn, one
waits while the other computes, and two hops are added. With enough streams both compute at the same time, and two nodes
are faster. Split a model if it does not fit on one node, if the KV of your streams does not, or if you have many
streams. A planned deployment (without `--layers`) of profiled nodes uses one node if that is better.
"""  # noqa: E501

THEORY = """## Two stages against the theory

If m micro-batches of b streams run, a ring gives at most m b / max(R, m B): R is the sum of all stages and hops, B the
longest of them. *Of it* is the measured share of that. Stage times come from a separate run of half of the layers on
each core. *Cores* is the rate of two cores in that run, in rates of one; they share memory. *Simulated* is the
planner's simulator with the same times. A bubble is time in which a stage does not compute.
"""  # noqa: E501


def document(rows: Sequence[Row]) -> str:
    """The page. Sections that the rows have nothing for are left out."""
    quick = " --quick" if _rounds(rows) < FULL.rounds else ""
    rounds = f"medians of {_rounds(rows)} rounds" if _rounds(rows) > 1 else "of one round"
    introduction = INTRODUCTION.format(
        quick=quick, rounds=rounds, load=_load(rows), machine=_machine(rows)
    )
    parts = [
        introduction,
        _speed(rows),
        SLOWER + _slower(rows),
        THEORY + "\n" + _theory(rows),
        _weights(rows),
        _prompts(rows),
        _limit(rows),
        _beside(rows),
    ]
    return wrapped("\n".join(part for part in parts if part))


def _speed(rows: Sequence[Row]) -> str:
    counts = sorted({row["streams"] for row in rows if _is_short(row)})
    table = [
        [
            "tokens per second",
            *(f"{count} streams" if count > 1 else "1 stream" for count in counts),
        ]
    ]
    tokens = next(row["prompt_tokens"] for row in rows if _is_short(row))
    for label in _labels(rows):
        table.append([label, *(_cell(rows, label, count) for count in counts)])
    if any(row["engine"] == LLAMA_CPP for row in rows):
        for name, mine in ((DEFAULT, [DEFAULT]), ("best of 2 stages, m by hand,", _by_hand(rows))):
            table.append(
                [
                    f"{name} over {LLAMA_CPP}",
                    *(_over_llama_cpp(rows, mine, count) for count in counts),
                ]
            )
    text = (
        f"## Tokens per second\n\nbf16, prompts of {tokens} tokens. Brackets have the ratio to "
        "`transformers.generate` "
        "with the same number of streams. *The default* is what users get: the head chooses the "
        "number of "
        "micro-batches, m, at run time. In other rows of 2 stages m is set by hand; *best of* "
        "takes the best of these "
        "for each number of streams.\n"
    )
    return f"{text}\n{_figures(rows, table)}"


def _cell(rows: Sequence[Row], label: str, streams: int) -> str:
    found = next(
        (r for r in rows if _is_short(r) and _label(r) == label and r["streams"] == streams), None
    )
    if found is None:
        return ""
    other = next(
        (r for r in rows if r["engine"] == "transformers" and r["streams"] == streams), None
    )
    ratio = (
        f" ({found['tokens_per_s'] / other['tokens_per_s']:.1f}x)"
        if other and found is not other
        else ""
    )
    return f"{found['tokens_per_s']:.1f}{ratio}"


def _over_llama_cpp(rows: Sequence[Row], labels: Collection[str], streams: int) -> str:
    found = [
        row for row in rows if _is_short(row) and row["streams"] == streams and row["stages"] == 2
    ]
    theirs = [row["tokens_per_s"] for row in found if row["engine"] == LLAMA_CPP]
    ours = [row["tokens_per_s"] for row in found if _label(row) in labels]
    return f"{max(ours) / theirs[0]:.2f}x" if theirs and ours else ""


def _by_hand(rows: Sequence[Row]) -> set[str]:
    return {_label(row) for row in rows if _is_short(row) and _is_cut(row)} - {DEFAULT}


def _slower(rows: Sequence[Row]) -> str:
    """The rate of the default of two nodes, relative to one node's."""
    rates = {(_label(row), row["streams"]): row["tokens_per_s"] for row in rows if _is_short(row)}
    shares = [
        f"{rates[DEFAULT, count] / whole:.2f} at {count}"
        for (label, count), whole in rates.items()
        if label == WHOLE and (DEFAULT, count) in rates
    ]
    return (
        f"\nHere the default reaches these shares of one node's rate: {', '.join(shares)} "
        "streams.\n"
        if shares
        else ""
    )


def _theory(rows: Sequence[Row]) -> str:
    table = [
        [
            "mode",
            "streams",
            "m",
            "stages, ms",
            "hop, ms",
            "tokens/s",
            "of it",
            "simulated, off",
            "bubbles",
            "cores",
            "x whole at 8",
        ]
    ]
    whole = next(
        (r for r in rows if _is_short(r) and _label(r) == WHOLE and r["streams"] == 8), None
    )
    for row in rows:
        if not _is_short(row) or not _is_cut(row) or row["efficiency"] is None:
            continue
        rate, simulated = row["tokens_per_s"], row["simulated_tokens_per_s"]
        table.append(
            [
                row["mode"],
                str(row["streams"]),
                str(row["micro_batches"]),
                " + ".join(f"{1e3 * seconds:.1f}" for seconds in row["stage_s"]),
                f"{1e3 * row['hop_s'][0]:.2f}",
                f"{rate:.1f}",
                f"{row['efficiency']:.2f}",
                f"{simulated:.1f}, {simulated / rate - 1:+.0%}",
                f"{row['bubble_share']:.0%}",
                f"{row['kernel_ratio']:.2f}" if "kernel_ratio" in row else "",
                f"{rate / whole['tokens_per_s']:.2f}" if whole else "",
            ]
        )
    return _figures(rows, table)


def _weights(rows: Sequence[Row]) -> str:
    table = [["one stream", "weights", "tokens/s", "x bf16"]]
    for row in _single_by_weights(rows):
        base = next(
            r
            for r in _single_by_weights(rows)
            if r["dtype"] == "bf16" and r["stages"] == row["stages"]
        )
        ratio = row["tokens_per_s"] / base["tokens_per_s"]
        table.append(
            [_cut(row["stages"]), row["dtype"], f"{row['tokens_per_s']:.1f}", f"{ratio:.2f}"]
        )
    return f"## Weights of 8 and 4 bits\n\n{_figures(rows, table)}"


def _prompts(rows: Sequence[Row]) -> str:
    found = [row for row in rows if _is_long(row)]
    if not found:
        return ""
    table = [["prompt", "pipeline", "time to first token, s", "of unsliced", "then, tokens/s"]]
    for row in found:
        unsliced = next(
            (
                r
                for r in found
                if _is_cut(r)
                and r["mode"] == "sequential"
                and r["prompt_tokens"] == row["prompt_tokens"]
            ),
            None,
        )
        ratio = f"{row['ttft_s'] / unsliced['ttft_s']:.2f}" if unsliced and _is_cut(row) else ""
        table.append(
            [
                f"{row['prompt_tokens']:,}",
                _label(row),
                f"{row['ttft_s']:.2f}",
                ratio,
                f"{row['tokens_per_s']:.1f}",
            ]
        )
    text = (
        "## Long prompts\n\nOne stream. *Unsliced* is the mode `sequential`: each chunk of 512 "
        "tokens passes all "
        "stages before the next begins. The last column is the rate of the 16 tokens that follow.\n"
    )
    return f"{text}\n{_figures(found, table)}"


def _limit(rows: Sequence[Row]) -> str:
    row = next((row for row in rows if "max_inter_token_latency_s" in row), None)
    if row is None:
        return ""
    measured = figures_comment(f"{COMMAND} --limit", [row])
    return (
        f"## A long prompt among streams\n\n{measured}\n\nBy itself: `python -m bench.engine "
        "--limit`. "
        f"{row['streams'] - 1} streams generate when a prompt of {row['prompt_tokens']:,} tokens "
        "arrives; "
        f"`max_inter_token_latency_s` is {row['max_inter_token_latency_s']:g}. Meanwhile the time "
        "between their tokens "
        f"was {row['inter_token_latency_s']:.3f} s in the median, "
        f"{row['p99_inter_token_latency_s']:.3f} s at the 99th "
        f"percentile and {row['largest_inter_token_latency_s']:.3f} s at most. The prompt's first "
        "token took "
        f"{row['ttft_s']:.1f} s; with only one other stream and chunks sized by the same promise, "
        f"{row['ttft_alone_s']:.1f} s.\n"
    )


def _beside(rows: Sequence[Row]) -> str:
    table = [["pipeline", "streams", "coordinator, ms/token", "client, ms/token"]]
    for row in rows:
        if (
            _is_short(row)
            and "processor_s_per_token" in row
            and row["mode"] == "no-bubbles"
            and row["streams"] in (1, 16)
            and _label(row) in (WHOLE, DEFAULT)
        ):
            used = row["processor_s_per_token"]
            table.append(
                [
                    _label(row),
                    str(row["streams"]),
                    *(f"{1e3 * used[name]:.2f}" for name in ("coordinator", "client")),
                ]
            )
    text = (
        "## What client and coordinator take\n\nProcessor time for each token, requests and "
        "prompts included. It is "
        "taken from the same two cores; a site with other machines for them is faster by it.\n"
    )
    return f"{text}\n{_figures(rows, table)}"


def _is_cut(row: Row) -> bool:
    return bool(row["engine"] == "edgeshard" and row["stages"] == 2)


def _is_short(row: Row) -> bool:
    return bool(row["dtype"] == "bf16" and row["section"] == "decoding")


def _is_long(row: Row) -> bool:
    return bool(row["section"] == "prompts")


def _single_by_weights(rows: Sequence[Row]) -> list[Row]:
    stages = {row["stages"] for row in rows if row["dtype"] != "bf16"}
    found = [
        row
        for row in rows
        if row["engine"] == "edgeshard"
        and row["streams"] == 1
        and row["mode"] == "no-bubbles"
        and row["section"] == "decoding"
        and row["stages"] in stages
        and row["placed_micro_batches"]
    ]
    return sorted(
        found, key=lambda row: (row["stages"], ("bf16", "int8", "int4").index(row["dtype"]))
    )


def _label(row: Row) -> str:
    if row["engine"] != "edgeshard":
        return str(row["engine"])
    if row["stages"] == 1:
        return WHOLE
    if _is_long(row):
        return "2 stages, unsliced" if row["mode"] == "sequential" else "2 stages, sliced"
    if row["mode"] == "no-bubbles" and not row["placed_micro_batches"]:
        return DEFAULT
    return f"2 stages, {row['mode']}" + (
        f", m = {row['placed_micro_batches']}" if row["mode"] != "sequential" else ""
    )


def _labels(rows: Sequence[Row]) -> list[str]:
    found = dict.fromkeys(_label(row) for row in rows if _is_short(row))
    return sorted(found, key=lambda label: label != DEFAULT)


def _cut(stages: int) -> str:
    return WHOLE if stages == 1 else f"{stages} stages"


def _rounds(rows: Sequence[Row]) -> int:
    return max(len(row.get("samples_tokens_per_s", ())) for row in rows)


def _machine(rows: Iterable[Row]) -> str:
    return next((row["machine"] for row in rows if "machine" in row), "an unnamed processor")


def _load(rows: Iterable[Row]) -> float:
    return next((row["load_1_minute"] for row in rows if "load_1_minute" in row), 0.0)


def _figures(rows: Sequence[Row], table: Sequence[Sequence[str]]) -> str:
    return f"{figures_comment(COMMAND, rows)}\n\n{markdown_table(table[0], table[1:])}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("document", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.rows.read_text(encoding="utf-8"))
    options.document.write_text(document(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
