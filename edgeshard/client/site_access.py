"""How an application finds its site: arguments, else `EDGESHARD__CLIENT__*`, else what
`edgectl join` or `edgectl init` wrote for this user."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeshard.domain.errors import DeniedError, InvalidArgumentError
from edgeshard.rpc.tls import TlsFiles, check_secure, tls_from_options
from edgeshard.storage.inputs import read_toml

DEFAULT_TARGET = "127.0.0.1:7600"
KEYS = ("coordinator", "tls_ca", "tls_cert", "tls_key", "plaintext")
_PREFIX = "EDGESHARD__CLIENT__"


@dataclass(frozen=True, slots=True)
class Access:
    """Address of the coordinator (host:port), and the protocol to reach it; `named_in` is the file
    with the address, if there is one."""

    target: str
    tls: TlsFiles | None = None
    plaintext: bool = False
    named_in: Path | None = None

    def check(self) -> None:
        """Raise DeniedError if the protocol is not set."""
        if self.tls is None and not self.plaintext:
            check_secure(self.target, self.tls, "coordinator")  # beyond loopback there is no choice
            raise DeniedError(
                f"there are no credentials for the site at {self.target}: join it with edgectl "
                "join TOKEN, give "
                "--tls-ca, --tls-cert and --tls-key, or --plaintext for a site on this machine "
                "that has no TLS; "
                "`edgectl serve MODEL` starts a new one",
                field="tls-cert",
                reason="TLS_REQUIRED",
            )


def directory() -> Path:
    """The directory of this user's credentials."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "edgeshard"


def configuration() -> Path:
    """The file that names the site and the credentials, in its section [client]."""
    return directory() / "client.toml"


def access(
    target: str | None = None, tls: TlsFiles | None = None, plaintext: bool | None = None
) -> Access:
    """The given access, else the configured one. Raises InvalidArgumentError naming a wrong or
    missing setting."""
    environment = {
        key: os.environ[_PREFIX + key.upper()]
        for key in KEYS
        if os.environ.get(_PREFIX + key.upper())
    }
    is_plaintext = (
        plaintext if plaintext is not None or tls is not None else _plaintext(environment)
    )
    if is_plaintext:
        return Access(
            target or environment.get("coordinator") or DEFAULT_TARGET, tls, plaintext=True
        )
    file = _read(configuration())
    tls = tls or _tls(environment) or _tls(file, directory())
    named_target, filed = target or environment.get("coordinator"), file.get("coordinator")
    return Access(
        named_target or filed or DEFAULT_TARGET,
        tls,
        named_in=configuration() if filed and not named_target else None,
    )


def _plaintext(environment: Mapping[str, str]) -> bool:
    text = environment.get("plaintext", "false").lower()
    if text not in ("1", "true", "yes", "0", "false", "no"):
        raise InvalidArgumentError(
            f"{_PREFIX}PLAINTEXT must be true or false, not {text[:40]!r}", field="plaintext"
        )
    return text in ("1", "true", "yes")


def _tls(values: Mapping[str, str], folder: Path = Path()) -> TlsFiles | None:
    """The PEM files of settings; relative paths begin at `folder`."""
    paths = [
        folder / values[key] if values.get(key) else None
        for key in ("tls_ca", "tls_cert", "tls_key")
    ]
    return tls_from_options(*paths)


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    section: Any = read_toml(path, f"{path}", "config", "CONFIG_FILE").get("client", {})
    if not isinstance(section, dict):
        raise InvalidArgumentError(f"{path}: client must be a section, [client]", field="client")
    for key, value in section.items():
        if key not in KEYS or not isinstance(value, str):
            raise InvalidArgumentError(
                f"{path}: {key!r} must be a text, and one of {', '.join(KEYS[:-1])}",
                field=key,
                reason="UNKNOWN_KEY",
            )
    return section
