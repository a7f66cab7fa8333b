"""The words of docs/paper/README.md. Numbers that a run gives are filled in by `report`."""

from __future__ import annotations

INTRODUCTION = """\
# The paper's experiments

What Zhang et al. report ("EdgeShard", IEEE IoT-J 12(10), 2025) beside what EdgeShard's planner and simulator say of
the same nodes (`deploy/examples/paper-testbed.toml`): 12 Jetson AGX Orin, 2 Orin NX, one RTX 3090 as the cloud,
Llama2 in full precision, 32 tokens in, 96 out, 1 Mb/s between source and cloud and 50 Mb/s elsewhere, at most 8
requests at once. `python -m bench.edgeshard_paper` writes this page and its pictures, and with `--check` says whether
they would change. HPipe's test bed is [a page of its own](hpipe.md).

**Where the numbers come from.** Nodes are rooflines: the longer of reading the bytes (memory bandwidth) and of
computing (operations a second), both from data sheets
(`edgeshard/planning/inputs/catalogue.py`). Nothing is fitted to the
paper. Placements come from the planner, figures from the discrete-event simulator, with the context growing token
by token. "ms/token" is the time between two tokens of one request alone, under the latency plan; "tokens/s" is all
tokens over the whole run, prompts included, under the throughput plan. b x m is the load chosen: sequences in a
micro-batch, micro-batches in flight. Differences are ours over the paper's. The paper's numbers are from notes of
it (S) or recalled and not checked (R).

**Constants that no data sheet gives.** Memory kept for operating system, driver and daemon: 3 GB on a Jetson, 2 GB
on the GPU. 64 MiB of workspace for a stage. 128 bytes of framing for each part of a message, 16 for a returned
token. KV memory in blocks of 16 tokens. No fixed cost of a step and no delay of a link: the notes of the paper give
none.
"""

PERFORMANCE = """\
- **What agrees.** Cloud-Edge-Opt is Edge-Solo at 1 Mb/s: a token's hidden state alone takes 131 ms over that link.
  The 7B plan goes around it through another AGX and needs {share:.2f} of Edge-Solo's time. Only many nodes together
  hold 70B.
- **7B is faster here**, EdgeShard more so than Edge-Solo. A roofline has no kernels that fall short of the memory's
  bandwidth, no launches, and no software between nodes; the last costs a split plan once for each hop. Measured
  profiles carry such costs, data sheets do not.
- **70B.** Its 69 billion parameters are 276 GB in fp32, which the nodes in use read one after the other: 1.3 s at
  the bandwidths of their data sheets. The paper's 3.1 s is more than twice that. Its links do not explain it: a hop
  of 32 KB takes 5 ms. Why is not known here.
- **Throughput.** Here the sequences of a batch share one reading of the weights, so that a batch takes little
  longer than one token. The paper's Edge-Solo has 24.36 tokens/s, 3.4 times one request's rate, with up to 8
  sequences: its nodes do not batch for free, which is probably behind most of the differences in throughput.
- **13B on two nodes** does not fit: half of it is 26 GB and the RTX 3090 has 24. So the paper's rows have less than
  full precision, or count memory in another way. Without the limit of memory Cloud-Edge-Even would take {even:.0f}
  ms and Cloud-Edge-Opt {opt:.0f} ms, beside the paper's 319 and 243.
"""

LAB = """\
`python -m bench.edgeshard_paper --lab` runs these plans in sixteen real processes ([docs/lab.md](../lab.md)): a
coordinator and the fifteen nodes, each of which does a small model's mathematics and then waits until the node it
emulates would have finished. Emulated nodes know devices and links, not the plan. "off" is the prediction less the
measurement, over the measurement. What plans of many nodes take longer is the software of a hop, which no data sheet
has: {hop} ms for each stage here, with all sixteen processes on one machine's cores. (A node's `step_overhead_s`
in the cluster file tells the planner of it.) The rates are of eight requests, in as many micro-batches as the head
finds best while it runs; predicted is the best of those that share them evenly.
"""

SWEEP = """\
Only this link is swept; the others keep 50 Mb/s. "unlimited" are strategies as they would be without a limit of
memory: the paper has them for 13B, though half of it does not fit the RTX 3090.

The paper: from 1 to 10 Mb/s helps steeply, from 10 to 50 little; at 1 Mb/s Cloud-Edge-Opt falls back to the source
alone. So it is here with 7B: Cloud-Edge-Opt gains {steep:.0f} ms up to 10 Mb/s and {flat:.0f} ms beyond. EdgeShard
hardly needs this link as long as a neighbour has a better one to the cloud, and meets Cloud-Edge-Opt where the detour
no longer pays: from 1 to 50 Mb/s its token gets {saved_7b:.0f} % quicker with 7B, {saved_13b:.0f} % with 13B and
{saved_70b:.1f} % with 70B. The larger the model, the smaller the part of it that the cloud has memory for, and the
less its link matters. With 13B the pair without a limit of memory gains as 7B does, and overtakes EdgeShard at
{overtakes} Mb/s, since it may hold what no RTX 3090 can.
"""

SOURCES = """\
The slow link follows the source. As in the paper the source matters little to EdgeShard, which gives a weak one the
least it must have, and much to Cloud-Edge-Opt, which has to send every token over 1 Mb/s once the source cannot
hold the model. EdgeShard's rate depends less on the source than the paper's, and Cloud-Edge-Opt's more, because a
batch on the source itself costs a roofline hardly more than a token, while 1 Mb/s costs each sequence the same.
"""

PREMISE = """\
The paper measures layers by their prefill, their decode, or the mean of both, and finds that it hardly matters which
[S], though prefill takes {factor:.0f} times as long as decode [R]. A roofline has no such factor for one prompt of 32
tokens, because both read all weights once, and that is what takes the time. It has one where arithmetic is what takes
the time: with the prompts of eight requests together, or with prompts ten times as long. One block, prefill / decode:
"""

PROFILING = """\
"prefill", "decode" and "mean" plan with one time for a layer and a token's hops, as the paper does: the least time per
token or, with eight micro-batches, the highest rate. "both" knows that a request is one prompt and 96 tokens, each
with its own times and hops, which is what EdgeShard plans with. "prefill with its hops" plans for the first token
alone. Profiles that cost the same are one row. Prompts go in one piece, as in the paper.

With the paper's 32 tokens it hardly matters which of the first three is used, whatever the batch: as the paper says.
With prompts of 320 tokens it does, because an AGX Orin's prefill takes ten times as long as its decode and the RTX
3090's four times. A prefill profile makes the cloud look better than it is for tokens, and hops cheap beside the work:
7B by prefill then takes {long_prefill:.0f} % longer than by both for one request, and {rate_prefill:.0f} % longer for
eight. Decode is the better guide ({rate_decode:+.0f} % for eight), because an answer has 96 tokens and one prompt. To
count a prompt's *hops* for every token is worst: one request takes {long_hops:.1f} times as long. 70B takes nearly all
nodes, which leaves little to choose.
"""

MODES = """\
"gain" is no-bubbles less bubbles with the same plan and load, the one best for no-bubbles; "gain, own plans" gives
bubbles the plan and load that are best for it (in brackets). The notes of the paper give neither its placement nor
its micro-batches. The gains are larger than the paper's because the rates are. In theory decode gains at most the
factor 2 - 1/m; here it reaches at most {bound:.0f} % of that, prompts counted in. The timelines show five decode
steps of the 7B plan.
"""
