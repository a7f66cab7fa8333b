"""Settings of a daemon: command line > environment (`EDGESHARD__SECTION__KEY`) > TOML file section > defaults."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_origin

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.rpc.tls import TlsFiles, chosen_tls, tls_from_options
from edgeshard.storage.inputs import read_toml

SECTIONS = ("coordinator", "agent", "client")
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}{suffix}": 1000**power for power, letter in enumerate("kmgt", 1) for suffix in ("", "b")}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int, field: str = "size") -> int:
    """Bytes of `2GiB`, `512MiB`, `1.5GB` (decimal) or a plain number. Raises InvalidArgumentError naming `field`."""
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise InvalidArgumentError(
            f"{field} {str(text)[:80]!r} is not a size: give a number of bytes or a unit, such as 2GiB or 500MB",
            field=field,
            reason="INVALID_SIZE",
        )
    unit = _UNITS[match[2].lower()]
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _size(value: str | int, info: ValidationInfo) -> int:
    return parse_bytes(value, (info.field_name or "size").replace("_", "-"))


ByteCount = Annotated[int, BeforeValidator(_size)]
"""A settings field that takes `2GiB` as well as a number of bytes."""


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhd])\s*")


def parse_duration(text: str | float, field: str = "duration") -> float:
    """Seconds of `90s`, `15m`, `12h`, `30d` or a plain number. Raises InvalidArgumentError naming `field`."""
    if isinstance(text, int | float):
        return float(text)
    match = _DURATION.fullmatch(text if text.strip()[-1:].isalpha() else f"{text}s")
    if match is None:
        raise InvalidArgumentError(
            f"{field} {text[:80]!r} is not a duration: give seconds or a unit, such as 90s, 15m, 12h or 30d",
            field=field,
            reason="INVALID_DURATION",
        )
    return float(match[1]) * _SECONDS[match[2]]


def _duration(value: str | float, info: ValidationInfo) -> float:
    return parse_duration(value, (info.field_name or "duration").replace("_", "-"))


Duration = Annotated[float, BeforeValidator(_duration)]
"""A settings field in seconds that takes `15m` as well as a number."""


def _several(value: Any) -> Any:
    return [text for text in re.split(r"[\s,]+", value) if text] if isinstance(value, str) else value


Several = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_several)]
"""A settings field whose option may be repeated; in the environment its values have commas or spaces between them."""


class DaemonSettings(BaseSettings):
    """Settings that every daemon takes. Each field is a `--option` of the same name with `-` for `_`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")
    section: ClassVar[str]

    listen: str = Field(description="HOST:PORT to listen on; port 0 picks a free one")
    state_dir: Path = Field(description="directory for what must survive a restart")
    tls_ca: Path | None = Field(default=None, description="PEM file of the site's authority")
    tls_cert: Path | None = Field(default=None, description="PEM file of this process's certificate")
    tls_key: Path | None = Field(default=None, description="PEM file of this process's key")
    plaintext: bool = Field(default=False, description="speak without TLS, on loopback alone: anyone there may call")
    metrics_listen: str | None = Field(
        default=None, description="HOST:PORT where Prometheus reads /metrics: over TLS where there is, else on loopback"
    )
    ready_file: Path | None = Field(default=None, description="file to write once the daemon serves")
    parent: int | None = Field(default=None, description="process that starts this one, and does not leave it behind")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **_others: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load_settings` merges the sources, so that constructing settings in a test reads nothing but its arguments.
        return (init_settings,)

    def tls(self) -> TlsFiles | None:
        """The three TLS files, or None in plaintext.

        Raises InvalidArgumentError where only some are given, DeniedError where neither files nor plaintext are.
        """
        return chosen_tls(tls_from_options(self.tls_ca, self.tls_cert, self.tls_key), self.plaintext)


SettingsT = TypeVar("SettingsT", bound=DaemonSettings)


def load_settings(kind: type[SettingsT], program: str, arguments: Sequence[str] | None = None) -> SettingsT:
    """The settings of a daemon from its command line (default: the process's), environment and `--config` file.

    Raises InvalidArgumentError naming the option or key at fault.
    """
    parser = argparse.ArgumentParser(prog=program, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help=f"TOML file; its [{kind.section}] section is read")
    for name, info in kind.model_fields.items():
        shown = "required" if info.is_required() else f"default: {info.default}"
        form: dict[str, Any] = {}
        if info.annotation is bool:
            form = {"nargs": "?", "const": True}  # A switch needs no value.
        elif get_origin(info.annotation) is tuple:
            form = {"action": "append"}
            shown = "may be repeated"
        parser.add_argument(
            _option(name), metavar="VALUE", **form, help=f"{info.description or name} ({shown})".replace("%", "%%")
        )
    command_line = vars(parser.parse_args(arguments))
    config = command_line.pop("config", None)
    file_values = _read_section(Path(config), kind) if config is not None else {}
    return build_settings(kind, {**file_values, **_read_environment(kind), **command_line})


def build_settings(kind: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """Settings from merged values. Raises InvalidArgumentError naming the first option that is wrong or missing."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "config"
        why = " is required" if first["type"] == "missing" else f": {first['msg'].lower()}"
        raise InvalidArgumentError(
            _option(name) + why, field=name.replace("_", "-"), reason="INVALID_SETTING"
        ) from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read_environment(kind: type[DaemonSettings]) -> dict[str, Any]:
    prefix = f"EDGESHARD__{kind.section.upper()}__"
    for name in os.environ:
        key = name.removeprefix(prefix).lower()
        if name.startswith(prefix) and key not in kind.model_fields:
            raise InvalidArgumentError(f"unknown environment variable {name}", field=name, reason="UNKNOWN_KEY")
    return EnvSettingsSource(kind, env_prefix=prefix)()


def _read_section(path: Path, kind: type[DaemonSettings]) -> dict[str, Any]:
    document = read_toml(path, f"--config {path}", "config", "CONFIG_FILE")
    for name in document:
        if name not in SECTIONS:
            choices = ", ".join(SECTIONS)
            raise InvalidArgumentError(
                f"--config {path}: unknown key {name!r}; sections are {choices}", field=name, reason="UNKNOWN_KEY"
            )
    section = document.get(kind.section, {})
    if not isinstance(section, dict):
        raise InvalidArgumentError(
            f"--config {path}: {kind.section} must be a section, [{kind.section}]", field=kind.section
        )
    for key in section:
        if key not in kind.model_fields:
            raise InvalidArgumentError(
                f"--config {path}: unknown key {key!r} in [{kind.section}]", field=key, reason="UNKNOWN_KEY"
            )
    return section


def write_ready_file(path: Path, address: str, gateway: str = "", enrolment: str = "") -> None:
    """Write the JSON file that tells a parent where this process serves. Readers see the whole file or none.

    `address` and `enrolment`, where others join, are host:port; `gateway` is the URL of its HTTP. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        json.dump({"address": address, "gateway": gateway, "enrolment": enrolment, "pid": os.getpid()}, file)
    Path(file.name).replace(path)
