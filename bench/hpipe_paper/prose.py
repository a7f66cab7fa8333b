"""The words of docs/paper/hpipe.md. Numbers that a run gives are filled in by `report`."""

from __future__ import annotations

INTRODUCTION = """\
# HPipe's test bed

Ma et al. ("HPipe: Large Language Model Pipeline Parallelism for Long Context on Heterogeneous Cost-effective
Devices", NAACL 2024) cut a long prompt into slices that follow each other through nodes of unequal speed. Here are its
test bed, four P100 and two RTX 3090, and its models, LLaMA-7B and GPT3-2B, by EdgeShard's planner and simulator
(`deploy/examples/hpipe-testbed.toml`). `python -m bench.hpipe_paper` writes this page and its pictures, `--check` says
whether they would change.

**Sources.** Our notes have the paper's nodes, models, network of 1,000 Mb/s and the names of its six baselines. They
have two of its results: up to {speed_up:g} times the throughput and latency, and {energy:.1f} % less energy [S]. They
do not have its meter, its tables, or the curves of its figure 2. So only these two numbers are compared with
the paper's.

**Where the numbers come from.** Nodes are rooflines of their data sheets, as on [the page of EdgeShard's
paper](README.md); their watts, idle and busy, are those of the boards alone, without the computers around them
(`edgeshard/planning/inputs/catalogue.py` has both). Times of blocks, links and slices, memory and energy are the
planner's;
what follows what is simulated. Nothing is fitted.

**What is assumed.**

- Prompts of {prompt:,} tokens, one token out: contexts are analysed, and both models have 2,048 positions.
- Half precision. LLaMA-7B: 32 layers, hidden size 4,096, 6.7 billion parameters. "GPT3-2B" is taken to be the GPT-3
  paper's model of 2.7 billion parameters (its table 2.1: 32 layers, hidden size 2,560, 32 heads), with its sparse
  attention counted as dense, as in the models published with that shape. The paper may mean another shape.
- The P100 are PCIe boards of 16 GB. GPUs of one kind are in one computer and reach each other at 10 GB/s over PCIe. An
  Ethernet of 1 Gb/s joins the two computers [S]; it is [swept below](#the-link-between-the-computers). No link has a
  delay. Prompts come in at an RTX 3090.
- Layers are divided at whole blocks, as EdgeShard's agents hold them; HPipe also divides a block
  between attention and MLP, and [what that would bring](#cuts-inside-a-block) is priced below.
- Slices are multiples of 128 tokens, as EdgeShard's head cuts prompts of this length. Any number may be on their way,
  as HPipe has it; EdgeShard's head sends no more at once than there are nodes.
"""

SCHEDULES = """\
The six names between "one node" and HPipe are the paper's baselines [S]. "Equal shares" are over all six nodes, the RTX
3090 first. "By speed" is HPipe's [balanced partition](../../docs/papers.md#slices-of-long-prompts) in that order. TP-T
is TeraPipe with tensor parallelism inside each computer. The paper finds that the two do not fit together: nodes that
share a block wait for each other's sums after each slice.
"""

FIGURES = """\
TTFT is of one prompt alone. The rate is in tokens of prompts a second, with {prompts} prompts there at once, and the
energy is one prompt's part of that run, of the nodes in use, idle or busy. Memory is weights, KV cache and workspace
on all nodes in use, with as many prompts at once as the rate needs (in brackets); "fullest" is the part of what a node
may give. "HPipe" columns: how many times sooner, how many times as many, and how much less energy than this row.
"""

FOUND = """\
**What this says.**

- **Throughput.** The paper has up to {speed_up:g} times, and our notes not the baseline. With LLaMA-7B and GPT3-2B,
  HPipe has {gpipe:.2f} and {gpipe_gpt:.2f} times the rate of GPipe. It has {megatron_lm:.2f} and
  {megatron_lm_gpt:.2f} times that of Megatron-LM, and {terapipe:.2f} and {terapipe_gpt:.2f} times that of TeraPipe.
  GP-B has the same layers as HPipe, which has {gp_b:.2f} and {gp_b_gpt:.2f} times its rate.
  With more prompts than {prompts} this last factor goes towards 1:
  slices only fill the pipeline sooner.
- **TP-T** has the first token of LLaMA-7B after {tp_t_ms:.0f} ms and {tp_t_rate:,.0f} tokens/s. HPipe is
  {tp_t_sooner:.2f} times sooner and has {tp_t:.2f} times the rate. The layers cannot follow the nodes' speed: each
  computer has half of them.
- **The first token** comes {gpipe_ttft:.1f} times sooner than with GPipe (LLaMA-7B). While a whole prompt alone is on
  one node, the five others are idle.
- **Energy.** HPipe takes {base_j:.0f} % less than Base, in which five nodes always wait, and {gpipe_j:.0f} % less than
  GPipe. The paper's {energy:.1f} % is more. A meter at the wall would read it against Base if each of the two computers
  took {host_w:.0f} W besides its boards. HPipe needs this power for a shorter time.
  One RTX 3090 takes less than any six nodes: by the data sheets it needs {per_3090:.1f} W for a TFLOPS, a P100
  {per_p100:.1f}.
- **Memory.** Two prompts at once fill the pipeline with slices; whole prompts take {gpipe_held}, whose KV cache is in
  memory at once. HPipe needs {memory:.0f} % less than GPipe (LLaMA-7B).
- **EdgeShard's own plans** may leave nodes out: for GPT3-2B over 1 Gb/s two RTX 3090 alone are best. There are too many
  cuts to look at all, so the plan for the first token has a certified gap: no cut is more than {gap:.0f} % sooner with
  LLaMA-7B. Within it, other rows may be slightly ahead. The plan for throughput sends whole prompts, so that rates by
  slices can be above it.
"""

HALVES = """\
HPipe also cuts between a block's attention and its MLP. Here the same searches run on 64 half blocks instead of 32
blocks. The attention half has its norm, its matrices and all of the block's KV cache, the MLP half the rest; their
weights, operations and times sum to the block's. Such a cut sends what a cut between blocks sends: the hidden states in
full width, once, since the attention half has added its residual ({row:,} bytes a position with LLaMA-7B, {row_gpt:,}
with GPT3-2B). "Gain" is in first tokens or prompt tokens a second; a plan has only what it is for.

The best gain is {best:.1f} %, and over any link [of the sweep](#the-link-between-the-computers) {most:.1f} % (at
{mbps:,} Mb/s). For less than 5 %, agents
[hold whole blocks](../decisions/planning.md#choice-agents-hold-whole-blocks). No cut by halves has
a rate of whole prompts more than {certified:.1f} % above the plan's, and none brings a first token 5 % sooner (that
decision names the function that examined all cuts).
"""

UTILISATION = """\
What a block computes of a slice in its time, over what the device could compute in that time, for a slice that begins a
prompt. The rooflines give the first table: a P100 is busy from 32 tokens on. An RTX 3090 has more operations for each
byte that it reads, and is busy from 128 on. So slices of 128 tokens cost neither anything. Shorter ones read all
weights of the block for fewer tokens.
"""

MEASURED = """\
Real kernels differ. This is one core of an {cpu} with the agent's kernels (`{kernels}`; {fma:.0f} GFLOP/s of FMA,
{read:.0f} GB/s), for blocks of `bench.engine`'s Llama in bfloat16, by `python -m bench.hpipe_paper --measure`. The
utilisation rises as in the paper's figure, to {busiest:.0f} %. It has steps: products are computed for six rows at a
time, so that seven tokens take {dearer:.1f} times as long as six ({before_step:.0f} % with six, {after_step:.0f} % with
seven). It declines with the positions before a slice, because attention is less busy than products are. We have not
seen the decline with the slice's own length before it converges.
"""

SWEEP = """\
A prompt's hidden states are {size:.1f} MB with LLaMA-7B and take {hop:.2f} s over 1 Gb/s, about as long as the busiest
node computes. Over slower links the link is the bottleneck of all that use both computers, sliced or not, and the two
RTX 3090 do better alone, as EdgeShard plans. Base is left out of pictures and tables here.
"""

TIMELINES = """\
## Three prompts of LLaMA-7B

![Whole prompts](hpipe-timeline-batches.svg)

![Slices](hpipe-timeline-slices.svg)

The same layers on the same nodes. With whole prompts the last node waits until five nodes have computed the first
prompt; with slices it begins when they have computed the first slice.
"""
