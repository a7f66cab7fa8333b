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
"""Less is a unit forgotten: not even the demo's layers fit, and every deployment would be refused later."""


def _labels(value: object) -> object:
    return parse_labels(value) if isinstance(value, str) else value


Labels = Annotated[
    dict[str, str], NoDecode, BeforeValidator(_labels), AfterValidator(lambda found: check_labels(found, "labels"))
]


class AgentSettings(DaemonSettings):
    section: ClassVar[str] = "agent"
    reloaded: ClassVar[tuple[str, ...]] = ("log_level", "cache_limit")

    listen: str = Field(default="127.0.0.1:0", description="HOST:PORT where neighbours reach this node's stages")
    coordinator: str = Field(default="127.0.0.1:7600", description="HOST:PORT of the coordinator")
    name: str = Field(description="the node's name in the site")
    advertise: str | None = Field(default=None, description="HOST:PORT to give neighbours, when not the listener's own")
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="cores that computing may use; all that the process and its quota may use if absent"
    )
    memory: ByteCount | None = Field(default=None, description="bytes stages may use, such as 2GiB")
    device: str = Field(default="cpu", description="cpu or cuda or cuda:N")
    idle_spin_s: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="seconds after a step for which cores do not halt, so that the next one finds them ready. Only "
        "where the agent is pinned to some cores; beside others that keep these busy, it is slow to end. Not under a "
        "CPU quota, on an accelerator or in the lab",
    )
    bf16_products: bool = Field(
        default=True,
        description="multiply bfloat16 by AVX512-BF16 instructions if the processor has them. They round otherwise "
        "than all other processors; false gives this node the others' bits, and its products of bfloat16 take longer",
    )
    labels: Labels = Field(
        default_factory=dict, description="labels for the rules of deployments, such as zone=hall1,gpu=yes"
    )
    emulate: Path | None = Field(default=None, description="lab file: pretend to be the node of this name in it")
    shared_store: Path | None = Field(
        default=None, description="directory of the coordinator's models on this machine, read in place"
    )

    @property
    def packs(self) -> bool:
        return self.pack == "always" or (self.pack == "auto" and self.shared_store is None)

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, value: int | None) -> int | None:
        if value is not None and value < LEAST_MEMORY_BYTES:
            raise InvalidArgumentError(
                f"--memory: {value} bytes hold no stage; give at least {LEAST_MEMORY_BYTES >> 20}MiB, with its unit, "
                "such as 2GiB",
                field="memory",
                reason="INVALID_SETTING",
            )
        return value

    cache_limit: ByteCount = Field(
        default=20 << 30, description="bytes of fetched and of packed weights to keep on disk"
    )
    pack: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="keep weights packed on disk once they were loaded, so that the next load reads them only; auto: "
        "unless the coordinator's models lie on this machine, where that would be a second copy",
    )
