"""The coordinator's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from edgeshard.process.config import DaemonSettings, Duration, Several
from edgeshard.storage.inputs import read_toml
from edgeshard_coordinator.core.values.quotas import Quotas, parse_quotas


class CoordinatorSettings(DaemonSettings):
    """The `[coordinator]` section, `EDGESHARD__COORDINATOR__*`, and the command line's options."""

    section: ClassVar[str] = "coordinator"
    reloaded: ClassVar[tuple[str, ...]] = ("log_level", "quotas")

    advertise: str = Field(default="", description="host that others dial, when not the listener's own")
    ca_key: Path | None = Field(default=None, description="PEM file of the authority's key: makes certificates")
    enrol_listen: str | None = Field(default=None, description="HOST:PORT where processes join with a token")
    announce: bool = Field(
        default=False, description="let who has a token find this site by multicast DNS (the discovery extra)"
    )
    wheels: Path | None = Field(
        default=None, description="folder of wheels, or of such folders, that machines without EdgeShard join by"
    )
    wheels_listen: str | None = Field(
        default=None, description="HOST:PORT where they fetch them; by default the next port after --enrol-listen"
    )
    certificate_life: Annotated[Duration, Field(ge=10, le=10 * 365 * 86400)] = Field(
        default=30 * 86400.0, description="how long certificates are good, such as 30d; they renew themselves before"
    )
    quotas: Path | None = Field(default=None, description="TOML file: what clients and operators may use, by identity")
    http_listen: str | None = Field(
        default=None, description="HOST:PORT of the HTTP gateway, such as 127.0.0.1:8000; off where it is not given"
    )
    http_tls_cert: Path | None = Field(default=None, description="PEM file of the gateway's certificate")
    http_tls_key: Path | None = Field(
        default=None, description="PEM file of its key; without them the site's authority (--ca-key) makes one"
    )
    http_name: Several = Field(
        default=(), description="host name of the gateway in the certificate that the site's authority makes for it"
    )
    no_dashboard: bool = Field(default=False, description="show browsers no dashboard at the gateway's /")
    dashboard_url: str | None = Field(
        default=None, description="where browsers find the dashboard behind a proxy, such as https://edge.example/edge"
    )
    model_folder: Several = Field(
        default=(), description="folder from which the dashboard may add models; may be repeated"
    )
    allow_hub: bool = Field(
        default=False, description="let the dashboard add models of the Hugging Face Hub (the models extra)"
    )
    http_no_key: bool = Field(default=False, description="answer programs of this machine without an API key")
    http_allow_origin: Several = Field(
        default=(), description="where web pages come from that may use the gateway, such as http://localhost:3000"
    )

    def check(self) -> None:
        self.read_quotas()

    def read_quotas(self) -> Quotas:
        """The current content of the file of quotas. Raises InvalidArgumentError naming the key at fault."""
        what = f"--quotas {self.quotas}"
        return (
            Quotas()
            if self.quotas is None
            else parse_quotas(read_toml(self.quotas, what, "quotas", "QUOTAS_FILE"), what)
        )
