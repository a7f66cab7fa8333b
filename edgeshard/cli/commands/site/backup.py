"""edgectl backup and edgectl restore: a site of this machine into a file, and from it. Nothing is
dialled."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated

from edgeshard import WIRE_VERSION, __version__
from edgeshard.cli.commands.command_options import argument, option, switch
from edgeshard.cli.render.output import human_bytes, show_text
from edgeshard.domain.errors import (
    DeniedError,
    EdgeShardError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from edgeshard.local.user_files import state_home, write_client_settings
from edgeshard.process.extras import check_extras

if TYPE_CHECKING:
    from edgeshard.local.site_backup import Backup

_PKI = Path("pki")
_PREPARE = "edgeshard_coordinator.control.persistence.persistence:prepare_restored"
"""By its name, because the library does not import the daemons."""
_FULL = (28, 122)
"""Error numbers of a full disk and of a full quota."""


def backup(
    file: Annotated[
        Path,
        argument("FILE", "Write the backup to this file, readable only by its owner (mode 0600)."),
    ],
    config: Annotated[
        Path | None, option("FILE", "Back up the coordinator that was started with this file.")
    ] = None,
    state_dir: Annotated[
        Path | None, option("DIR", "Back up the site that `edgectl serve` keeps in this directory.")
    ] = None,
    force: Annotated[bool, switch("--force", "Replace FILE if it exists.")] = False,
) -> None:
    """Back up a site to FILE, on the coordinator's machine: authority, certificates, state, keys,
    quotas and audit log. The coordinator may keep running. If you give neither --config nor
    --state-dir, the command backs up the first site that it finds, and prints which one. It looks
    for ./pki/coordinator.toml, then for the coordinator installed as a service, then for the site
    of `edgectl serve`. Model weights are not copied: keep their sources. Keep FILE secret: it holds
    the authority's key.
    """
    from edgeshard.local import site_backup

    if config is not None and state_dir is not None:
        raise InvalidArgumentError("give --config or --state-dir, not both", field="config")
    if config is not None:
        site = site_backup.of_config(config)
    elif state_dir is not None:
        site = site_backup.of_served(state_dir)
    else:
        site = site_backup.find_site(_PKI)
    try:
        files = site_backup.write_backup(site, file, time.time(), force=force)
    except OSError as error:
        raise _translated(error, file, "file") from None
    total_bytes = sum(of.size for of in files.values())
    name = site_backup.site_name(site) or "(plaintext)"
    show_text(
        f"{file}: site {name} of {site.where}, {len(files)} files, {human_bytes(total_bytes)}"
    )
    if "site/ca.key" not in files:
        show_text(f"not in the backup: the authority's key; {site.where} names none (ca_key)")
    if site.models:
        names = ", ".join(sorted(site.models))
        show_text(
            f"not in the backup: the weights of {names}; keep the files that they were added from"
        )


def restore(
    file: Annotated[Path, argument("FILE", "Read this file of `edgectl backup`.")],
    directory: Annotated[
        Path,
        option(
            "DIR",
            "Write the authority, the certificates and coordinator.toml to this directory.",
            "--directory",
            "-d",
        ),
    ] = _PKI,
    state_dir: Annotated[
        Path | None,
        option(
            "DIR",
            "Write the coordinator's state to this directory (default: "
            "~/.local/state/edgeshard/coordinator). If the "
            "backup is of an `edgectl serve` site, write all files here (default: "
            "~/.local/state/edgeshard/serve) and "
            "ignore --directory.",
        ),
    ] = None,
) -> None:
    """Restore a site from a backup, and print the remaining steps. First stop the original
    coordinator, and never start it again: two coordinators of one site would take nodes from each
    other. The directories of --directory and --state-dir must be empty or must not exist yet. Every
    hash is checked before anything is written.
    """
    check_extras("edgectl restore", "coordinator")
    from edgeshard.local.site_backup import read_backup, restore_site

    saved_site = read_backup(file)
    state = (
        state_dir or state_home() / ("serve" if saved_site.served else "coordinator")
    ).absolute()
    # No coordinator starts once a second since 1970, so that this is above any term, also after an
    # earlier restore.
    prepare = partial(resolve_name(_PREPARE), least_term=int(time.time()))
    try:
        place = restore_site(saved_site, directory.absolute(), state, prepare)
    except OSError as error:
        raise _translated(error, state, "state-dir") from None
    _show_restored(saved_site, file)
    _show_next(saved_site, place)


def _show_restored(backup: Backup, file: Path) -> None:
    backup_time = datetime.fromtimestamp(backup.made_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    show_text(f"site {backup.site or '(plaintext)'} is restored from {file}, as of {backup_time}")
    if (backup.version, backup.wire_version) != (__version__, WIRE_VERSION):
        show_text(
            f"the backup was made by EdgeShard {backup.version} (wire version "
            f"{backup.wire_version}), "
            f"this is {__version__} ({WIRE_VERSION}): nodes of another wire version are refused "
            "until "
            "they are upgraded"
        )
    show_text("Remaining steps:")
    show_text(
        f"- Nodes, clients, operators and API keys that were revoked after {backup_time} are valid "
        "again:"
    )
    show_text("  revoke them again with edgectl node revoke NAME and edgectl key revoke NAME.")
    show_text(
        f"- Keys and deployments that were created after {backup_time} are unknown, and those "
        "deleted since exist again."
    )
    for name, digest in sorted(backup.models.items()):
        show_text(
            f"- Add model {name} again: edgectl model add SOURCE --name {name} (manifest sha256 "
            f"{digest})"
        )
    show_text(
        "- If the coordinator's address changes, on each node: edgectl set-coordinator HOST:PORT"
    )


def _show_next(backup: Backup, place: Path) -> None:
    from edgeshard.client.site_access import configuration
    from edgeshard.local.cluster import own_address
    from edgeshard.rpc.tls_files import tls_files

    if backup.served:
        show_text(f"Next: edgectl serve MODEL --state-dir {place}")
        return
    admin = place.parent / "admin"
    listen = str(backup.settings.get("listen", ""))
    if listen and tls_files(admin).key.exists() and not configuration().exists():
        write_client_settings(own_address(listen), admin)
        show_text(f"{configuration()}: edgectl of this user is operator admin")
    plaintext = "" if "tls_ca" in place.read_text() else " --plaintext"
    show_text(f"Next: edgeshard-coordinator --config {place}{plaintext}")


def _translated(error: OSError, path: Path, field: str) -> EdgeShardError:
    """The typed error of a file that cannot be written."""
    where = f"{error.filename or path}: {error.strerror or error}"
    if error.errno in _FULL:
        return ResourceExhaustedError(
            f"{where}; free space, or choose another path", field=field, reason="DISK_FULL"
        )
    return DeniedError(
        f"{where}; choose another path, or run the command as a user who may write there",
        field=field,
    )
