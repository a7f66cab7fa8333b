"""The words of docs/paper/flexgen.md. `__main__` fills in the links."""

from __future__ import annotations

INTRODUCTION = """\
# Compare three tiers of memory with FlexGen

Sheng et al. (*FlexGen*, ICML 2023) generate with OPT models on one T4 (16 GB) with 208 GB of memory and 1.5 TB of
SSD. Prompts have 512 tokens and answers 32; rates are of a whole block of sequences with its prompts.
`python -m bench.flexgen_paper` writes this page; `--check` reports changes, and `--pictures DIR` draws the last
table.

Nothing here ran on such a node. Times come from the authors' released cost model with its fitted constants, and our
own linear program chooses the fractions ([the
algorithm]({ALGORITHM})). *Batches* are sequences in a batch x
batches that share each read of a layer. *Its batches* uses the published ones; *best* chooses them with 80 % of
each memory, as the released search. The released disk reads 0.473 GiB/s; the last two columns assume 2 GB/s.
"""
TABLE_SAYS = """
The model is near the measured rates in some rows only:

- **FlexGen with OPT-30B** is within 5 %.
- **FlexGen with OPT-175B** depends on the disk: a quarter of the measured rate with the released one, and 0.54 against
  0.69 with 2 GB/s. A cache of about 650 GB is read for every token.
- **OPT-6.7B on the accelerator** is 2.4 times too fast, because the model has no term for reading weights from the
  accelerator's own memory.
- **Compressed** rows are 1.4 to 2.1 times too fast, because packing and unpacking count as nothing.
- **Accelerate and DeepSpeed with OPT-30B** are 1.5 to 3 times too fast, because the model is another system's.

EdgeShard uses these parts of the paper:

| of the paper | here |
| --- | --- |
| a layer's weights are read once for all batches | sweeps of micro-batches ([docs/memory.md](../memory.md#streaming)) |
| weights by layer in memory or on disk | exact, with the cut ([nodes that stream]({STREAMING})) |
| 4 bits by group | weights are symmetric int4; [KV](../kernels.md#keys-and-values-of-4-bits) has groups of 32 |
| attention at the cache's place | always: a stage's KV is on its node |
| cache on disk | no ([tried](../decisions/memory.md#choice-no-running-kv-on-the-disk)), except for preempted requests |
| activations on the disk, attention over the highest scores | no: too small; it changes the tokens |
"""
POLICIES = """\
Per cent on accelerator / host / disk:
"""
ABLATION = """\
Each row removes one part, at the published batches, with the disk at 2 GB/s. "No disk" chooses its batches anew.
The paper's figures are recalled. Only attention on the host differs much: by the fitted constants it takes as long
as moving the cache over the bus.
"""
FRONTIER = """\
The highest rate if the whole block, with its prompts, must finish within the bound; the disk at 2 GB/s.
"""
