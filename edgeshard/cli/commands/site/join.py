"""edgectl join: become part of a site, by the token that its operator made."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli.commands.command_options import argument, option, switch, with_option_groups
from edgeshard.cli.commands.site import install
from edgeshard.cli.connect import run
from edgeshard.cli.render.output import show_text
from edgeshard.domain.errors import AlreadyExistsError, DeniedError, EdgeShardError
from edgeshard.domain.identity import Invitation, Role, authority_digest
from edgeshard.local.child_daemons import ChildDaemon, keep_running
from edgeshard.local.user_files import (
    AGENT_PORT,
    AGENT_PORTS,
    agent_line,
    path_from,
    state_home,
    tls_values,
    to_toml,
    write_client_settings,
)
from edgeshard.process.extras import check_extras
from edgeshard.process.systemd_units import Daemon as Unit

if TYPE_CHECKING:
    from edgeshard.rpc.tls import TlsFiles

_SERVICE_FILES = Path("/etc/edgeshard/agent-pki")
_STOP_GRACE_S = 60.0
"""An agent that is still starting handles the signal late."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """More settings of an agent."""

    advertise: Annotated[
        str | None,
        option(
            "HOST:PORT", "Announce this address to other nodes (default: the --listen address)."
        ),
    ] = None
    memory: Annotated[
        str | None,
        option(
            "SIZE",
            "Use at most SIZE of memory for weights and KV cache, for example 2GiB (default: the "
            "free memory less "
            "512 MiB).",
        ),
    ] = None
    device: Annotated[str | None, option("DEVICE", "Compute on cpu (default) or cuda.")] = None
    labels: Annotated[
        str | None,
        option("KEY=VALUE,...", "Set labels for the rules of deployments, such as zone=hall1."),
    ] = None

    def given(self) -> dict[str, str]:
        """Settings by their names. Errors are raised before the token is used up."""
        from edgeshard.domain.nodes.labels import parse_labels
        from edgeshard.process.config import parse_bytes
        from edgeshard.rpc.tls import split_address

        if self.memory is not None:
            parse_bytes(self.memory, "memory")
        if self.advertise is not None:
            split_address(self.advertise, "advertise")
        parse_labels(self.labels or "")
        return {name: value for name, value in asdict(self).items() if value is not None}


@with_option_groups
def join(
    token: Annotated[
        str, argument("TOKEN", "Use this token of `edgectl token create`; - reads it from stdin.")
    ],
    listen: Annotated[
        str | None,
        option(
            "HOST:PORT",
            "Accept connections from other nodes at this address (default: this machine's address, "
            "at port "
            f"{AGENT_PORT} or the next free port).",
        ),
    ] = None,
    state_dir: Annotated[
        Path | None, option("DIR", "Keep the node's identity and weights in this directory.")
    ] = None,
    *,
    agent: AgentOptions,
    foreground: Annotated[
        bool, switch("--foreground", "Run the agent here, even if systemd could run it.")
    ] = False,
    force: Annotated[
        bool, switch("--force", "Replace the credentials that your user has for another site.")
    ] = False,
) -> None:
    """Join a site with a token, as a node, an application or an operator. A node runs an agent. If
    you are root and the machine has systemd, this command installs the agent as a service and
    starts it. Otherwise, or if you give --foreground or --state-dir, it runs the agent in the
    foreground until Ctrl-C. The credentials of an application or an operator are stored for this
    user; edgectl and the SDK use them.
    """
    from edgeshard.client.joining import invitation_from_text, located

    decoded = invitation_from_text(sys.stdin.readline() if token == "-" else token)
    extra = agent.given()
    if not decoded.has_address:
        decoded = run(located(decoded))
        show_text(f"site {decoded.principal.site} is at {decoded.coordinator}", err=True)
    if decoded.principal.role is not Role.AGENT:
        _join_user(decoded, force)
    elif not foreground and state_dir is None and _can_install():
        _join_service(decoded, listen, extra)
    else:
        _join_here(decoded, listen, state_dir, extra)


def _join_user(token: Invitation, force: bool) -> None:
    from edgeshard.client.site_access import configuration, directory

    if configuration().exists() and not force:
        raise AlreadyExistsError(
            f"{configuration()} has credentials already; --force puts these in their place",
            field="force",
        )
    _enrol(token, directory())
    write_client_settings(token.coordinator, directory())
    show_text(
        f"{token.principal} of site {token.principal.site}: edgectl and the SDK of this user find "
        "it now",
        err=True,
    )


def _join_service(token: Invitation, listen: str | None, extra: dict[str, str]) -> None:
    name = token.principal.id
    settings: dict[str, str | None] = {
        "name": name,
        "coordinator": token.coordinator,
        "listen": listen or _own_address(token, ports=1),
        "credentials": str(_SERVICE_FILES),
        **extra,
    }
    _enrol_once(token, _SERVICE_FILES)
    install.install_daemon(Unit.AGENT, install.MACHINE, False, settings)
    install.systemctl("enable", Unit.AGENT.unit)
    install.systemctl("restart", Unit.AGENT.unit)  # one that ran before takes the certificate up
    show_text(
        f"node {name} runs as {Unit.AGENT.unit}.service; edgectl get nodes shows it", err=True
    )


def _join_here(
    token: Invitation, listen: str | None, state_dir: Path | None, extra: dict[str, str]
) -> None:
    from edgeshard.rpc.tls_files import write_private

    check_extras("edgectl join", "agent")  # before the token is used up
    name = token.principal.id
    state = (state_dir or state_home() / name).absolute()
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)  # or the agent finds it open to others
    except OSError as error:
        raise DeniedError(
            f"--state-dir {state}: {error.strerror}", field="state-dir", reason="STATE_DIR"
        ) from None
    files = _enrol_once(token, state / "pki")
    values = {
        "name": name,
        "coordinator": token.coordinator,
        "listen": listen or _own_address(token),
        "state_dir": path_from(state, state),
        **tls_values(files, state),
        **extra,
    }
    config = state / "agent.toml"
    write_private(config, to_toml("agent", values).encode())
    raise typer.Exit(run(_serve(name, token.principal.site, config), endless=True))


async def _serve(name: str, site: str, config: Path) -> int:
    """Run the agent until a signal ends this command, and again whenever the agent ends; its log is
    on stderr. Its exit code, 128 + the number of a signal that ended it."""
    agent = ChildDaemon(
        name,
        "edgeshard_agent",
        ["--config", str(config)],
        config.parent,
        in_view=True,
        configured=True,
    )
    await agent.start()
    try:
        if await agent.ready(math.inf):
            show_text(
                f"node {name} has joined site {site} and serves until Ctrl-C\n{agent_line(config)} "
                "starts it again",
                err=True,
            )
            code = await keep_running(agent, lambda text: show_text(text, err=True))
        else:
            code = await agent.exited()
    except asyncio.CancelledError:
        await agent.stop(_STOP_GRACE_S)
        code = await agent.exited()
    finally:
        agent.send_signal(signal.SIGKILL)  # after a second interrupt
    return code if code >= 0 else 128 - code


def _enrol_once(token: Invitation, directory: Path) -> TlsFiles:
    """The files of the token's principal. Files from an earlier time are good while they have not
    expired."""
    from edgeshard.rpc.tls_files import tls_files

    files = tls_files(directory)
    try:
        files.check()
        if files.principal() == token.principal and _trusts(files, token):
            return files
    except EdgeShardError:
        pass  # there are none, or no valid ones
    return _enrol(token, directory)


def _trusts(files: TlsFiles, token: Invitation) -> bool:
    from edgeshard.identity.certificates import ders_of

    return token.authority in map(authority_digest, ders_of(files.ca.read_bytes()))


def _enrol(token: Invitation, directory: Path) -> TlsFiles:
    from edgeshard.client.joining import enrol
    from edgeshard.identity.authority import load_key, new_key, private_pem
    from edgeshard.rpc.tls_files import tls_files, write_files, write_private

    waiting = directory / "joining.pem"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        # The key is on disk first: a token is good for one key, which another try has then.
        if not waiting.exists():
            write_private(waiting, private_pem(new_key()))
        key = waiting.read_bytes()
        certificate, authorities = run(enrol(token, load_key(key)))
        write_files(directory, authorities, certificate, key)
        waiting.unlink()
    except OSError as error:
        raise DeniedError(
            f"{directory}: {error.strerror}", field="state-dir", reason="STATE_DIR"
        ) from None
    return tls_files(directory)


def _own_address(token: Invitation, ports: int = AGENT_PORTS) -> str:
    """The address of this machine for the site: the address by which it reaches the coordinator,
    and the first free one of `ports`. Another node of this machine may have the first; a service is
    the machine's only one."""
    from edgeshard.rpc.addresses import free_port, outgoing_address
    from edgeshard.rpc.tls import join_address, split_address

    host = outgoing_address(split_address(token.coordinator)[0])
    return join_address(host, free_port(host, AGENT_PORT, ports))


def _can_install() -> bool:
    return shutil.which("systemctl") is not None and install.runs_systemd() and os.geteuid() == 0
