"""The words of docs/paper/README.md. Numbers that a run gives are filled in by `report`."""

from __future__ import annotations

INTRODUCTION = """\
# Compare plans with the EdgeShard paper

This page has the experiments of Zhang et al. ("EdgeShard", IEEE IoT-J 12(10), 2025), computed by EdgeShard's
planner and simulator for the same nodes (`deploy/examples/paper-testbed.toml`). It has 12 Jetson AGX Orin, 2 Orin
NX and one RTX 3090 as the cloud. Models are Llama2 in fp32, with 32 tokens in and 96 out and at most 8 requests.
Links have 1 Mb/s between source and cloud and 50 Mb/s elsewhere. [HPipe's](hpipe.md) and [FlexGen's](flexgen.md)
test beds have other pages. `python -m bench.edgeshard_paper` writes this page and `tables.json` (all placements and
bandwidths). `--check` reports changes, and `--pictures DIR` draws the figures.

Nodes are rooflines of their data sheets (`edgeshard/planning/inputs/catalogue.py`), and nothing is fitted to the
paper. *ms/token* is one request's under the latency plan. *tokens/s* counts prompts, under the throughput plan. b x
m is sequences in a micro-batch x micro-batches in flight. Differences are ours over the paper's. The paper's
numbers are from notes of it (S) or recalled and not checked (R).
[Constants](../planning/assumptions.md#what-is-counted) come from no data sheet; steps have no fixed cost and links
no delay.
"""

PERFORMANCE = """\
- **Agreement.** At 1 Mb/s Cloud-Edge-Opt is Edge-Solo: a token's hidden state takes 131 ms over that link. The 7B
  plan avoids it through another AGX and needs {share:.2f} of Edge-Solo's time. Only many nodes hold 70B.
- **7B is faster here.** A roofline has no kernels below the memory's bandwidth, no launches and no software between
  nodes. Measured profiles have these costs.
- **70B.** Its 276 GB in fp32 take 1.3 s at the nodes' bandwidths. The paper's 3.1 s is more than twice that, and a
  hop of 5 ms does not explain it. The reason is unknown.
- **Throughput.** Here the sequences of a batch share one reading of the weights. The paper's Edge-Solo has 3.4
  times one request's rate with up to 8 sequences, so its nodes do not batch for free.
- **13B on two nodes** does not fit: half of it is 26 GB and the RTX 3090 has 24. If memory had no limit,
  Cloud-Edge-Even would take {even:.0f} ms and Cloud-Edge-Opt {opt:.0f} ms (the paper: 319 and 243).
"""

LAB = """\
`python -m bench.edgeshard_paper --lab` runs these plans in sixteen real processes ([docs/lab.md](../lab.md)). Each
node computes a small model and then waits until the emulated node would have finished. *Off* is (prediction -
measurement) / measurement. Plans of many nodes take longer because of the software of a hop, {hop} ms for each
stage here; set `step_overhead_s` to include it. Rates are of eight requests.
"""

SWEEP = """\
Only this link changes; the others keep 50 Mb/s. *Unlimited* strategies have no limit of memory.

The paper reports a steep gain from 1 to 10 Mb/s and little beyond, and so it is here with 7B: Cloud-Edge-Opt gains
{steep:.0f} ms up to 10 Mb/s and {flat:.0f} ms beyond. EdgeShard hardly needs this link if a neighbour has a better
one to the cloud. From 1 to 50 Mb/s its token gets {saved_7b:.0f} % quicker with 7B, {saved_13b:.0f} % with 13B and
{saved_70b:.1f} % with 70B, because the cloud holds a smaller part of a larger model. With 13B the unlimited pair
overtakes EdgeShard at {overtakes} Mb/s.
"""

SOURCES = """\
The slow link follows the source. As in the paper, the source matters little to EdgeShard and much to
Cloud-Edge-Opt, which sends every token over 1 Mb/s if the source cannot hold the model.
"""

PREMISE = """\
The paper plans with prefill times, decode times or their mean, and finds that it hardly matters which [S], though
prefill takes {factor:.0f} times as long [R]. A roofline has that factor only if arithmetic is the limit: with eight
prompts together, or prompts ten times as long. One block, prefill / decode:
"""

PROFILING = """\
*prefill*, *decode* and *mean* plan with one time for a layer and a token's hops, as the paper does. *both* has
separate times and hops for prompt and tokens, as EdgeShard does. *prefill with its hops* plans for the first token.
Profiles with equal costs share a row.

With 32 tokens the first three hardly differ. With 320 they do, because prefill / decode is ten on an AGX Orin and
four on an RTX 3090. Plans by prefill take {long_prefill:.0f} % longer than by both for one request and
{rate_prefill:.0f} % for eight. Decode is the better guide ({rate_decode:+.0f} % for eight). A prompt's hops for
every token are worst: one request takes {long_hops:.1f} times as long.
"""

MODES = """\
*gain* is no-bubbles minus bubbles with the same plan and load. *gain, own plans* gives bubbles the plan and load
that are best for it (in brackets). The gains are larger than the paper's because the rates are. In theory decode
gains at most the factor 2 - 1/m; here it reaches at most {bound:.0f} % of that.
"""
