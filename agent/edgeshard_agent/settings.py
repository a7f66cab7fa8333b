"""The settings of an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.nodes.labels import check_labels, parse_labels
from edgeshard.process.config import ByteCount, DaemonSettings

LEAST_MEMORY_BYTES = 16 << 20
"""Less is a unit forgotten: not even the demo's layers fit, and every deployment would be refused
later."""


def _labels(value: object) -> object:
    return parse_labels(value) if isinstance(value, str) else value


Labels = Annotated[
    dict[str, str],
    NoDecode,
    BeforeValidator(_labels),
    AfterValidator(lambda labels: check_labels(labels, "labels")),
]


class AgentSettings(DaemonSettings):
    section: ClassVar[str] = "agent"
    summary: ClassVar[str] = "Run the agent of a node: compute layers of models for a site."
    examples: ClassVar[tuple[str, ...]] = (
        "edgeshard-agent --config agent.toml",
        "edgeshard-agent --name attic --state-dir ./attic --plaintext --memory 8GiB",
    )
    reloaded: ClassVar[tuple[str, ...]] = ("log_level", "cache_limit")

    listen: str = Field(default="127.0.0.1:0", description="HOST:PORT to listen on for other nodes")
    coordinator: str = Field(default="127.0.0.1:7600", description="HOST:PORT of the coordinator")
    name: str = Field(description="the node's name in the site")
    advertise: str | None = Field(
        default=None, description="HOST:PORT that other nodes dial, if it differs from --listen"
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="cores to compute on; by default all that the process and its CPU quota allow",
    )
    memory: ByteCount | None = Field(
        default=None, description="memory limit of stages, such as 2GiB"
    )
    device: str = Field(default="cpu", description="device to compute on: cpu, cuda or cuda:N")
    idle_spin_s: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="seconds to spin after a step, so that the next step starts sooner. Works only "
        "if the agent "
        "is pinned to cores, and not under a CPU quota, on an accelerator or in the lab. If other "
        "processes keep these cores busy, the agent exits slowly",
    )
    bf16_products: bool = Field(
        default=True,
        description="multiply bfloat16 with AVX512-BF16 instructions if the processor has them. "
        "They round "
        "differently from other processors; with false, this node computes the same bits as the "
        "others, and multiplies bfloat16 more slowly",
    )
    labels: Labels = Field(
        default_factory=dict,
        description="labels for the rules of deployments, such as zone=hall1,gpu=yes",
    )
    emulate: Path | None = Field(
        default=None, description="lab file; emulate the node of this name in it"
    )
    shared_store: Path | None = Field(
        default=None,
        description="directory of the coordinator's models on this machine, to read in place",
    )

    @property
    def packs(self) -> bool:
        return self.pack == "always" or (self.pack == "auto" and self.shared_store is None)

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, value: int | None) -> int | None:
        if value is not None and value < LEAST_MEMORY_BYTES:
            raise InvalidArgumentError(
                f"--memory: {value} bytes hold no stage; give at least "
                f"{LEAST_MEMORY_BYTES >> 20}MiB, with its unit, "
                "such as 2GiB",
                field="memory",
                reason="INVALID_SETTING",
            )
        return value

    cache_limit: ByteCount = Field(
        default=20 << 30, description="disk limit of fetched and packed weights"
    )
    pack: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="pack loaded weights on disk, so that the next load only reads them: always, "
        "never or auto. "
        "auto packs unless --shared-store is set, because that would be a second copy",
    )
