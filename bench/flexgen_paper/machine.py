"""The subjects of FlexGen's cost model: a node with three tiers of memory, an OPT model, a
workload. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

GIB = 1 << 30
TERA = 1e12


@dataclass(frozen=True, slots=True)
class TierMachine:
    """A node with an accelerator, host memory and a disk. Bytes, bytes a second, operations a
    second.

    Names say from where to where: `host_to_gpu`, `gpu_to_host`, `disk_to_host`, `host_to_disk`.
    Rates differ by what moves, because the KV cache is gathered from pieces. `dense` rates are for
    matrices, `attention` rates for attention on the accelerator. Both are given for prompts and for
    tokens; `host_attention` is attention where the cache lies in host memory. `usable` is the part
    of each tier that may be planned with.
    """

    gpu_bytes: float
    host_bytes: float
    disk_bytes: float
    host_to_gpu: float
    gpu_to_host_cache: float
    gpu_to_host_hidden: float
    disk_to_host: float
    host_to_disk_cache: float
    host_to_disk_hidden: float
    host_to_disk_token: float
    prompt_dense: float
    token_dense: float
    prompt_attention: float
    token_attention: float
    host_attention: float
    usable: float = 0.8

    def host_attention_at(self, batch: int, hidden: int) -> float:
        """Operations a second of attention on the host, which small batches and narrow models reach
        less of."""
        few, narrow = max(0.0, log2(64 / batch)), max(0.0, log2(4096 / hidden))
        return self.host_attention * max(
            0.1, 1 + 0.0168 * few * narrow - 0.0328 * few - 0.0621 * narrow
        )


T4 = TierMachine(
    gpu_bytes=15 * GIB,
    host_bytes=204 * GIB,
    disk_bytes=1500 * GIB,
    host_to_gpu=12.89 * GIB,
    gpu_to_host_cache=0.97 * GIB,
    gpu_to_host_hidden=4.82 * GIB,
    disk_to_host=0.473 * GIB,
    host_to_disk_cache=0.746 * GIB,
    host_to_disk_hidden=2.015 * GIB,
    host_to_disk_token=2.015 * GIB,
    prompt_dense=21.24 * TERA,
    token_dense=4.3 * TERA,
    prompt_attention=9.97 * TERA,
    token_attention=0.079 * TERA,
    host_attention=0.0123 * TERA,
)
"""The paper's node: a T4 with 16 GB, 208 GB of memory and 1.5 TB of SSD. The constants are those
that its authors fitted to runs and released with their cost model."""


@dataclass(frozen=True, slots=True)
class TierModel:
    """A decoder of equal layers in 16 bits, whose MLP has two matrices, as OPT's."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int

    @property
    def layer_bytes(self) -> int:
        """Weights of one layer."""
        return 8 * self.hidden**2 + 4 * self.hidden * self.inner


OPT_6_7B = TierModel("OPT-6.7B", 32, 4096, 4 * 4096, 32)
OPT_30B = TierModel("OPT-30B", 48, 7168, 4 * 7168, 56)
OPT_175B = TierModel("OPT-175B", 96, 12288, 4 * 12288, 96)


@dataclass(frozen=True, slots=True)
class TierWorkload:
    """Tokens in and out of each sequence."""

    prompt: int = 512
    new: int = 32
