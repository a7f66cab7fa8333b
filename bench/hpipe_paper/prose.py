"""The words of docs/paper/hpipe.md. Numbers that a run gives are filled in by `report`."""

from __future__ import annotations

INTRODUCTION = """\
# Compare slices of long prompts with HPipe

Ma et al. ("HPipe", NAACL 2024) cut a long prompt into slices that follow each other through unequal nodes. This
page computes their test bed, four P100 and two RTX 3090, and their models, LLaMA-7B and GPT3-2B, by EdgeShard's
planner and simulator (`deploy/examples/hpipe-testbed.toml`). `python -m bench.hpipe_paper` writes this page and
`hpipe-tables.json` (placements, slices, all rates of the link). `--check` reports changes, and `--pictures DIR`
draws the figures.

**Sources.** Our notes have the paper's nodes, models, network, the names of its six baselines and two results: up
to {speed_up:g} times the throughput and {energy:.1f} % less energy [S]. Only these two are compared. Nodes are
rooflines of data sheets; watts are the boards' (`edgeshard/planning/inputs/catalogue.py`). Nothing is fitted.

**Assumptions.**

- Prompts have {prompt:,} tokens, with one token out, in half precision. "GPT3-2B" is taken to be the GPT-3 paper's
  model of 2.7 billion parameters, with dense attention. The paper may mean another shape.
- The P100 are PCIe boards of 16 GB. GPUs of one kind share a computer and PCIe of 10 GB/s; Ethernet of 1 Gb/s joins
  the computers [S] ([other rates](#the-link-between-the-computers)). Links have no delay. Prompts start at an RTX
  3090.
- Layers are cut between whole blocks; [half blocks](#cuts-inside-a-block) are priced below.
- Slices are multiples of 128 tokens. HPipe's may all be in flight; EdgeShard's head sends at most one a node.
"""

SCHEDULES = """\
The six names between "one node" and HPipe are the paper's baselines [S]. "Equal shares" cover all six nodes, the
RTX 3090 first. "By speed" is HPipe's [balanced partition](../../docs/papers.md#slices-of-long-prompts) in that
order. TP-T is TeraPipe with tensor parallelism inside each computer.
"""

FIGURES = """\
TTFT is for a single prompt. The rate (prompt tokens a second) and the energy of one prompt are for {prompts}
prompts at once. Memory is weights, KV cache and workspace on all used nodes, with the number of prompts that the
rate needs in brackets. *Fullest* is the largest used share of a node. "HPipe" columns compare HPipe with the row.
"""

FOUND = """\
**Results.**

- **Throughput.** The paper has up to {speed_up:g} times. HPipe has {gpipe:.2f} and {gpipe_gpt:.2f} times the rate
  of GPipe (LLaMA-7B and GPT3-2B), {megatron_lm:.2f} and {megatron_lm_gpt:.2f} times Megatron-LM's, {terapipe:.2f}
  and {terapipe_gpt:.2f} times TeraPipe's. GP-B has the same layers, and HPipe {gp_b:.2f} and {gp_b_gpt:.2f} times
  its rate.
- **TP-T** takes {tp_t_ms:.0f} ms to the first token of LLaMA-7B and reaches {tp_t_rate:,.0f} tokens/s. HPipe is
  {tp_t_sooner:.2f} times sooner and has {tp_t:.2f} times the rate, because TP-T's layers cannot follow the nodes'
  speed.
- **The first token** arrives {gpipe_ttft:.1f} times sooner than with GPipe (LLaMA-7B).
- **Energy.** HPipe takes {base_j:.0f} % less than Base and {gpipe_j:.0f} % less than GPipe. The paper's
  {energy:.1f} % would be true against Base if each computer took {host_w:.0f} W besides its boards. One RTX 3090
  takes less than any six nodes: {per_3090:.1f} W for a TFLOPS, a P100 {per_p100:.1f}.
- **Memory.** Slices of two prompts fill the pipeline; whole prompts need {gpipe_held}. HPipe needs {memory:.0f} %
  less than GPipe (LLaMA-7B).
- **EdgeShard's plans** may leave nodes out: two RTX 3090 are best for GPT3-2B. The plan for the first token has a
  certified gap: no cut is more than {gap:.0f} % sooner with LLaMA-7B. The plan for throughput sends whole prompts,
  so slices can exceed it.
"""

HALVES = """\
HPipe also cuts between a block's attention and its MLP. Here the same searches run on 64 half blocks. Such a cut
sends the hidden states once ({row:,} bytes a position with LLaMA-7B, {row_gpt:,} with GPT3-2B).

The best gain is {best:.1f} %, and {most:.1f} % over any link (at {mbps:,} Mb/s). It is below 5 %, so agents hold
[whole blocks](../decisions/planning.md#choice-agents-hold-whole-blocks). No cut by halves has a rate of whole prompts
more than
{certified:.1f} % above the plan's.
"""

UTILISATION = """\
Utilisation is a block's rate for a slice over the device's peak. By the rooflines a P100 is busy from 32 tokens on
and an RTX 3090 from 128 on, so slices of 128 tokens cost nothing.
"""

MEASURED = """\
Real kernels differ. One core of an {cpu} with the agent's kernels (`{kernels}`; {fma:.0f} GFLOP/s of FMA,
{read:.0f} GB/s) was measured with blocks of `bench.engine`'s Llama in bfloat16
(`python -m bench.hpipe_paper --measure`). It reaches {busiest:.0f} %. Products are computed for six rows at a time,
so seven tokens take {dearer:.1f} times as long as six ({before_step:.0f} % with six, {after_step:.0f} % with
seven).
"""

SWEEP = """\
A prompt's hidden states are {size:.1f} MB with LLaMA-7B and take {hop:.2f} s over 1 Gb/s, about as long as the
busiest node computes. If the link is slower, it is the bottleneck of every schedule that uses both computers, and
EdgeShard plans for the two RTX 3090 only.
"""
