"""Settings of a daemon: command line > environment (`EDGESHARD__SECTION__KEY`) > TOML file section
> defaults.

A file of settings can be checked before a daemon is started with it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from edgeshard.domain.errors import EXIT_CODES, INTERRUPTED, EdgeShardError, InvalidArgumentError
from edgeshard.rpc.tls import TlsFiles, chosen_tls, tls_from_options
from edgeshard.storage.inputs import read_toml

SECTIONS = ("coordinator", "agent", "client")
_UNITS = {"": 1, "b": 1}
_UNITS |= {
    f"{letter}{suffix}": 1000**power
    for power, letter in enumerate("kmgt", 1)
    for suffix in ("", "b")
}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int, field: str = "size") -> int:
    """Bytes of `2GiB`, `512MiB`, `1.5GB` (decimal) or a plain number. Raises InvalidArgumentError
    naming `field`."""
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise InvalidArgumentError(
            f"{field} {str(text)[:80]!r} is not a size: give a number of bytes or a unit, such as "
            "2GiB or 500MB",
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
    """Seconds of `90s`, `15m`, `12h`, `30d` or a plain number. Raises InvalidArgumentError naming
    `field`."""
    if isinstance(text, int | float):
        return float(text)
    match = _DURATION.fullmatch(text if text.strip()[-1:].isalpha() else f"{text}s")
    if match is None:
        raise InvalidArgumentError(
            f"{field} {text[:80]!r} is not a duration: give seconds or a unit, such as 90s, 15m, "
            "12h or 30d",
            field=field,
            reason="INVALID_DURATION",
        )
    return float(match[1]) * _SECONDS[match[2]]


def _duration(value: str | float, info: ValidationInfo) -> float:
    return parse_duration(value, (info.field_name or "duration").replace("_", "-"))


Duration = Annotated[float, BeforeValidator(_duration)]
"""A settings field in seconds that takes `15m` as well as a number."""


def _several(value: Any) -> Any:
    return (
        [text for text in re.split(r"[\s,]+", value) if text] if isinstance(value, str) else value
    )


Several = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_several)]
"""A settings field whose option may be repeated; in the environment its values have commas or
spaces between them."""


class DaemonSettings(BaseSettings):
    """Settings that every daemon takes. Each field is a `--option` of the same name with `-` for
    `_`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")
    section: ClassVar[str]
    summary: ClassVar[str]
    """What the daemon does, in a sentence of its help."""
    examples: ClassVar[tuple[str, ...]]
    """Two or more command lines for its help."""
    reloaded: ClassVar[tuple[str, ...]] = ("log_level",)
    """Settings that a running daemon takes up on SIGHUP; all others wait for a restart."""

    listen: str = Field(description="HOST:PORT to listen on; port 0 picks a free one")
    state_dir: Path = Field(description="directory of the state that survives restarts")
    tls_ca: Path | None = Field(default=None, description="PEM file of the site's authority")
    tls_cert: Path | None = Field(
        default=None, description="PEM file of this process's certificate"
    )
    tls_key: Path | None = Field(default=None, description="PEM file of this process's key")
    plaintext: bool = Field(
        default=False, description="run without TLS, on loopback only; any local process may call"
    )
    metrics_listen: str | None = Field(
        default=None,
        description="HOST:PORT of /metrics for Prometheus: over TLS if TLS files are given, else "
        "on loopback only",
    )
    ready_file: Path | None = Field(
        default=None, description="file to write when the daemon is ready"
    )
    parent: int | None = Field(
        default=None, description="process id of the parent; the daemon exits when the parent does"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest level to log"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: Any,
        **_others: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load_settings` merges the sources, so that constructing settings in a test reads nothing
        # but its arguments.
        return (init_settings,)

    def check(self) -> None:
        """Raise InvalidArgumentError for a wrong file that is named here and that a running daemon
        reads again."""

    def tls(self) -> TlsFiles | None:
        """The three TLS files, or None in plaintext.

        Raises InvalidArgumentError if only some are given, DeniedError if neither files nor
        plaintext are.
        """
        return chosen_tls(
            tls_from_options(self.tls_ca, self.tls_cert, self.tls_key), self.plaintext
        )


SettingsT = TypeVar("SettingsT", bound=DaemonSettings)


@dataclass(frozen=True, slots=True)
class Given:
    """A daemon's settings from each source, by field: its command line, its environment and its
    `file`."""

    line: Mapping[str, Any]
    environment: Mapping[str, Any]
    file_values: Mapping[str, Any]
    file: Path | None
    section: str

    def merged(self) -> dict[str, Any]:
        return {**self.file_values, **self.environment, **self.line}

    def source_of(self, name: str) -> str:
        """Source of a field's value."""
        if name in self.line:
            return option(name)
        if name in self.environment:
            return variable(self.section, name)
        return str(self.file) if name in self.file_values else "default"


def load_settings(
    kind: type[SettingsT], program: str, arguments: Sequence[str] | None = None
) -> SettingsT:
    """The settings of a daemon from its command line (default: the process's), environment and
    `--config` file.

    Raises InvalidArgumentError naming the option or key at fault.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=kind.summary,
        epilog=_usage(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"read the [{kind.section}] section of this TOML file"
    )
    for name, info in kind.model_fields.items():
        note = "required" if info.is_required() else f"default: {_shown_default(info.default)}"
        form: dict[str, Any] = {}
        if info.annotation is bool:
            form = {"nargs": "?", "const": True}  # A switch needs no value.
        elif get_origin(info.annotation) is tuple:
            form = {"action": "append"}
            note = "may be repeated"
        parser.add_argument(
            option(name),
            metavar="VALUE",
            **form,
            help=f"{info.description or name} ({note})".replace("%", "%%"),
        )
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise _unknown_option(unknown[0].partition("=")[0], kind)
    line = vars(namespace)
    config = line.pop("config", None)
    return build_settings(
        kind, given(kind, None if config is None else Path(config), line).merged()
    )


def _usage(kind: type[DaemonSettings]) -> str:
    """The end of a daemon's help: its examples, the exit codes and the other places of its
    settings."""
    examples = "".join(f"\n  {line}" for line in kind.examples)
    codes = "; ".join(
        f"{code} {meaning}" for code, meaning in EXIT_CODES.items() if code < INTERRUPTED
    )
    return (
        f"examples:{examples}\n\nexit codes: {codes}\n\n"
        "An option overrides its environment variable (such as "
        f"{variable(kind.section, 'log_level')}),\n"
        "which overrides the key in the file of --config."
    )


def _shown_default(default: Any) -> str:
    """A setting's default in the help; one that a function makes is empty."""
    return "none" if default in (None, "") or default is PydanticUndefined else str(default)


def _unknown_option(text: str, kind: type[DaemonSettings]) -> InvalidArgumentError:
    near = nearest(text, ["--config", *map(option, kind.model_fields)])
    return InvalidArgumentError(
        f"unknown option {text[:80]}{near}", field=text[:80], reason="UNKNOWN_OPTION"
    )


def given(kind: type[DaemonSettings], file: Path | None, line: Mapping[str, Any]) -> Given:
    """A daemon's settings from its file, from this process's environment and from `line`, the
    values of its command line. Raises InvalidArgumentError naming a key or a variable that does not
    exist."""
    values = {} if file is None else read_section(file, kind)
    return Given(line, _read_environment(kind), values, file, kind.section)


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message on an unknown name: the nearest known one, '' if none is near."""
    matches = get_close_matches(name[:80], list(names), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def build_settings(kind: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """Settings from merged values. Raises InvalidArgumentError naming the first option that is
    wrong or missing."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "config"
        why = " is required" if first["type"] == "missing" else f": {first['msg'].lower()}"
        raise InvalidArgumentError(
            option(name) + why, field=name.replace("_", "-"), reason="INVALID_SETTING"
        ) from None


def option(name: str) -> str:
    """The option of a setting."""
    return "--" + name.replace("_", "-")


def variable(section: str, name: str) -> str:
    """The environment variable of a setting."""
    return f"EDGESHARD__{section.upper()}__{name.upper()}"


def _read_environment(kind: type[DaemonSettings]) -> dict[str, Any]:
    prefix = variable(kind.section, "")
    for name in os.environ:
        key = name.removeprefix(prefix).lower()
        if name.startswith(prefix) and key not in kind.model_fields:
            near = nearest(name, (variable(kind.section, field) for field in kind.model_fields))
            raise InvalidArgumentError(
                f"unknown environment variable {name}{near}", field=name, reason="UNKNOWN_KEY"
            )
    return EnvSettingsSource(kind, env_prefix=prefix)()


def read_sections(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a file of settings. Raises InvalidArgumentError if it has others than
    SECTIONS."""
    document = read_toml(path, f"--config {path}", "config", "CONFIG_FILE")
    for name, section in document.items():
        if name not in SECTIONS:
            raise InvalidArgumentError(
                f"--config {path}: unknown key {name[:80]!r}; sections are {', '.join(SECTIONS)}",
                field=name,
                reason="UNKNOWN_KEY",
            )
        if not isinstance(section, dict):
            raise InvalidArgumentError(
                f"--config {path}: {name} must be a section, [{name}]", field=name
            )
    return document


def read_section(path: Path, kind: type[DaemonSettings]) -> dict[str, Any]:
    """A daemon's section of a file, {} if it has none. Raises as `read_sections`, and for an
    unknown key."""
    section = read_sections(path).get(kind.section, {})
    for key in section:
        if key not in kind.model_fields:
            raise InvalidArgumentError(
                unknown_key(path, key, kind), field=key, reason="UNKNOWN_KEY"
            )
    return with_paths(path, kind, section)


def with_paths(
    path: Path, kind: type[DaemonSettings], section: Mapping[str, Any]
) -> dict[str, Any]:
    """A daemon's section of the file `path`, with each relative path taken from the folder of the
    file."""
    fields = kind.model_fields
    return {
        key: str(path.parent / value)
        if isinstance(value, str) and _is_path(fields[key].annotation)
        else value
        for key, value in section.items()
    }


def _is_path(annotation: Any) -> bool:
    return annotation is Path or Path in get_args(annotation)


def unknown_key(path: Path, key: str, kind: type[DaemonSettings]) -> str:
    """The message on a key that a daemon's section does not have."""
    return (
        f"--config {path}: unknown key {key[:80]!r} in "
        f"[{kind.section}]{nearest(key, kind.model_fields)}"
    )


def write_ready_file(path: Path, address: str, gateway: str = "", enrolment: str = "") -> None:
    """Write the JSON file that names this process's addresses for its parent. Readers see the whole
    file or none.

    `address` and `enrolment`, the address for joining, are host:port; `gateway` is the URL of its
    HTTP. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        json.dump(
            {"address": address, "gateway": gateway, "enrolment": enrolment, "pid": os.getpid()},
            file,
        )
    Path(file.name).replace(path)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a daemon. `value` is None if it has none, and `source` is the place that sets
    it. A `reloaded` one is applied on SIGHUP."""

    key: str
    option: str
    variable: str
    value: Any
    source: str
    default: Any
    required: bool
    reloaded: bool
    meaning: str


def problems(path: Path, kinds: Mapping[str, type[DaemonSettings]]) -> list[str]:
    """All mistakes in the daemons' sections of a file, in words that name the key. A missing key
    may be on a command line, so it is no mistake. Raises InvalidArgumentError for a file that is no
    file of settings."""
    mistakes = []
    for section, values in read_sections(path).items():
        if section in kinds:
            mistakes += _wrong(path, kinds[section], values)
    return mistakes


def _wrong(path: Path, kind: type[DaemonSettings], values: Mapping[str, Any]) -> list[str]:
    mistakes = [unknown_key(path, key, kind) for key in values if key not in kind.model_fields]
    valid_values = {key: value for key, value in values.items() if key in kind.model_fields}
    valid_values = _completed(kind, with_paths(path, kind, valid_values))
    where = f"--config {path}: [{kind.section}]"
    while True:
        try:
            kind(**valid_values).check()
            return mistakes
        except ValidationError as error:
            wrong = {
                key: f"{key}: {one['msg'].lower()}"
                for one in error.errors()
                if (key := str(one["loc"][0]))
            }
        except EdgeShardError as error:
            wrong = {error.field.replace("-", "_"): error.message}
        mistakes += [f"{where} {why}" for why in wrong.values()]
        if not wrong.keys() & valid_values.keys():
            return mistakes
        # The next pass checks the rest.
        valid_values = _completed(
            kind, {key: value for key, value in valid_values.items() if key not in wrong}
        )


def _completed(kind: type[DaemonSettings], values: Mapping[str, Any]) -> dict[str, Any]:
    """With something for each required setting that is missing."""
    return {name: "-" for name, field in kind.model_fields.items() if field.is_required()} | dict(
        values
    )


def settings_of(kind: type[DaemonSettings], sources: Given) -> list[Setting]:
    """Each setting of a daemon with the value that it would have. Raises InvalidArgumentError as
    `build_settings`, except for a missing required one."""
    values = sources.merged()
    absent = [
        name
        for name, field in kind.model_fields.items()
        if field.is_required() and name not in values
    ]
    built = build_settings(kind, _completed(kind, values)).model_dump(mode="json")
    return [
        Setting(
            name,
            option(name),
            variable(kind.section, name),
            None if name in absent else built[name],
            "missing" if name in absent else sources.source_of(name),
            None
            if (default := field.get_default(call_default_factory=True)) is PydanticUndefined
            else default,
            field.is_required(),
            name in kind.reloaded,
            field.description or "",
        )
        for name, field in kind.model_fields.items()
    ]
