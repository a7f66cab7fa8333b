"""edgectl init and edgectl certificate: the authority of a site, and the files of its processes.
Nothing is dialled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edgeshard.cli.commands.command_options import argument, option
from edgeshard.cli.render.output import show_text
from edgeshard.domain.errors import AlreadyExistsError, InvalidArgumentError
from edgeshard.domain.identity import Principal, Role, coordinator_of
from edgeshard.domain.ids import check_name
from edgeshard.local.cluster import own_address
from edgeshard.local.user_files import (
    path_from,
    state_home,
    tls_values,
    to_toml,
    write_client_settings,
)

if TYPE_CHECKING:
    from edgeshard.identity.authority import Authority

Directory = Annotated[
    Path, option("DIR", "Keep the authority in this directory.", "--directory", "-d")
]
_PKI = Path("pki")


def init(
    site: Annotated[str, argument("SITE", "Name the site, such as mill.")],
    directory: Directory = _PKI,
    listen: Annotated[
        str,
        option(
            "HOST:PORT",
            "Make the coordinator listen at this address. It accepts joins at the next port (7601 "
            "by default).",
        ),
    ] = "0.0.0.0:7600",
    http_listen: Annotated[
        str | None,
        option(
            "HOST:PORT",
            "Serve the HTTP gateway at this address (default: no gateway). A loopback address such "
            "as 127.0.0.1:8000 "
            "uses plain HTTP, any other such as 0.0.0.0:8443 uses TLS.",
        ),
    ] = None,
) -> None:
    """Create a site: its authority, and the certificates of its coordinator and of its first
    operator, admin. Keep DIR/ca.key on this machine and secret: it can sign any certificate of the
    site. DIR/coordinator and DIR/admin hold ca.pem, cert.pem and key.pem each. DIR/coordinator.toml
    holds the coordinator's settings: start it with
    `edgeshard-coordinator --config DIR/coordinator.toml`. edgectl then acts as admin for your user.
    If your user already belongs to a site, that stays so: pass --coordinator, and --tls-ca,
    --tls-cert and --tls-key from DIR/admin.
    """
    from edgeshard.identity.authority import Authority, now
    from edgeshard.rpc.tls import split_address
    from edgeshard.rpc.tls_files import write_private

    check_name(site, "site")
    host, port = split_address(listen, "listen")
    if http_listen is not None:
        split_address(http_listen, "http-listen")
    if (directory / "ca.key").exists():
        raise AlreadyExistsError(
            f"{directory} has the authority of a site already; give another --directory",
            field="directory",
        )
    authority = Authority.create(site, now())
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(directory / "ca.pem", authority.certificate_pem)
    write_private(directory / "site", f"{site}\n".encode())
    for principal in (coordinator_of(site), Principal(site, Role.OPERATOR, "admin")):
        _write(authority, principal, directory)
    _write_settings(directory.absolute(), host, port, http_listen)
    # last: a half made authority can be made again
    write_private(directory / "ca.key", authority.key_pem)
    config = directory.absolute() / "coordinator.toml"
    show_text(f"site {site} is made. Next: edgeshard-coordinator --config {config}")
    show_text(
        f"Back the site up when the coordinator runs: edgectl backup FILE --config {config}. "
        "The loss of ca.key without a backup makes every node join again"
    )


def certificate(
    role: Annotated[Role, argument("ROLE", "Choose the role: agent, client or operator.")],
    name: Annotated[str, argument("NAME", "Name the process; for an agent, the name of its node.")],
    directory: Directory = _PKI,
) -> None:
    """Make the certificate of a process of the site: ca.pem, cert.pem and key.pem in DIR/NAME. Copy
    them to its machine.
    """
    from edgeshard.identity.authority import Authority

    if role is Role.COORDINATOR:
        raise InvalidArgumentError("ROLE: edgectl init made the coordinator's files", field="role")
    check_name(name, "name")
    if (directory / name).exists():
        raise AlreadyExistsError(
            f"{directory / name} exists already; remove it first", field="name"
        )
    try:
        pem = (directory / "ca.pem").read_bytes(), (directory / "ca.key").read_bytes()
        site = (directory / "site").read_text().strip()
    except OSError as error:
        raise InvalidArgumentError(
            f"--directory {directory} holds no authority ({error.strerror}); make one with edgectl "
            "init",
            field="directory",
        ) from None
    _write(Authority.load(*pem), Principal(check_name(site, "site"), role, name), directory)


def _write_settings(directory: Path, host: str, port: int, http_listen: str | None) -> None:
    """The coordinator's configuration, and the settings of this user's edgectl."""
    from edgeshard.client.site_access import configuration
    from edgeshard.rpc.tls import join_address
    from edgeshard.rpc.tls_files import tls_files, write_private

    files, config = tls_files(directory / "coordinator"), directory / "coordinator.toml"
    values = {
        "listen": join_address(host, port),
        "enrol_listen": join_address(host, port + 1 if port else 0),
        "state_dir": path_from(directory, state_home() / "coordinator"),
        **tls_values(files, directory),
        "ca_key": path_from(directory, directory / "ca.key"),
    }
    if http_listen is not None:
        values["http_listen"] = http_listen
    write_private(config, to_toml("coordinator", values).encode())
    show_text(f"{config}: edgeshard-coordinator --config starts it")
    if http_listen is not None:
        show_text(_of_gateway(http_listen, directory))
    if configuration().exists():
        show_text(f"{configuration()} stays as it is: edgectl of this user belongs to another site")
    else:
        write_client_settings(own_address(join_address(host, port)), directory / "admin")
        show_text(f"{configuration()}: edgectl of this user is operator admin")


def _of_gateway(http_listen: str, directory: Path) -> str:
    """The words about the HTTP gateway."""
    from edgeshard.rpc.tls import is_loopback, split_address

    keys = "programs show a key of edgectl key create NAME"
    if is_loopback(split_address(http_listen)[0]):
        return f"its HTTP gateway: http://{http_listen}/v1; {keys}"
    return (
        f"its HTTP gateway: {http_listen} over TLS, by a certificate of {directory / 'ca.pem'}; "
        f"{keys}"
    )


def _write(authority: Authority, principal: Principal, directory: Path) -> None:
    from edgeshard.rpc.tls_files import issue_files

    files = issue_files(authority, principal, directory / principal.id)
    show_text(f"{files.key.parent}: {principal}")
