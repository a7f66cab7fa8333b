"""The files of a site on its coordinator's machine, in a backup and restored from it.

A backup holds the authority, certificates, state, keys, quotas and the audit log. Weights are not
in it, only the names and digests of the models.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeshard import WIRE_VERSION, __version__
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from edgeshard.local.user_files import path_from, state_home, to_toml
from edgeshard.process import installation
from edgeshard.process.config import read_sections
from edgeshard.process.systemd_units import CREDENTIALS, Daemon
from edgeshard.storage.archive import Archive, ArchivedFile, extract, read_archive, write_archive
from edgeshard.storage.files import sync

FORMAT = 1
_PATHS = {
    "tls_ca": "site/coordinator/ca.pem",
    "tls_cert": "site/coordinator/cert.pem",
    "tls_key": "site/coordinator/key.pem",
    "ca_key": "site/ca.key",
    "quotas": "site/quotas.toml",
    "http_tls_cert": "site/http-cert.pem",
    "http_tls_key": "site/http-key.pem",
}
"""The settings of a coordinator that name files, and the names of these in a backup."""
_OF_PROCESS = ("state_dir", "ready_file", "parent")
"""Settings of one machine's process, which a backup leaves out."""
_SKIPPED_SUFFIXES = (".lock", ".tmp", ".sqlite-wal", ".sqlite-shm", ".sqlite-journal", ".partial")
_CONFIG = "coordinator.toml"


@dataclass(frozen=True, slots=True)
class SiteFiles:
    """A site on this machine: its files by their names in a backup.

    `settings` are the coordinator's, without those that name files of the backup. `served` is True
    for a site of `edgectl serve`. `models` are the digests of its models by name.
    """

    where: Path
    files: Mapping[str, Path]
    settings: Mapping[str, Any] = field(default_factory=dict)
    served: bool = False
    models: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Backup:
    """A backup that was read. `made_at` is in seconds since 1970; `models` are digests by name.
    `served` and `settings` are as in `SiteFiles`."""

    archive: Archive
    site: str
    made_at: float
    version: str
    wire_version: int
    served: bool
    settings: Mapping[str, Any]
    models: Mapping[str, str]


def of_config(
    config: Path, tls: Mapping[str, str] | None = None, state_dir: Path | None = None
) -> SiteFiles:
    """The site of a coordinator's file of settings. `tls` and `state_dir` are settings from its
    unit.

    Raises InvalidArgumentError for a file without a state directory, or one that names files which
    are not there.
    """
    settings: dict[str, Any] = {**read_sections(config).get("coordinator", {}), **(tls or {})}
    folder = config.parent
    state = state_dir or (folder / settings["state_dir"] if "state_dir" in settings else None)
    if state is None or not (state / "state.sqlite").is_file():
        raise InvalidArgumentError(
            f"--config {config}: its state_dir ({state or 'not given'}) has no state.sqlite: start "
            "the coordinator "
            "once, or give the file that it is started with",
            field="config",
        )
    files = _state_files(state)
    for key, member in _PATHS.items():
        if key in settings:
            files[member] = folder / settings[key]
    if "ca_key" in settings:
        files |= _authority_files((folder / settings["ca_key"]).parent, files)
    rest = {key: value for key, value in settings.items() if key not in (*_PATHS, *_OF_PROCESS)}
    return SiteFiles(config, _present(files), rest, models=_models(state))


def of_installed() -> SiteFiles:
    """The site of the coordinator that `edgectl install` laid out. Raises DataLossError for a
    damaged record."""
    config = Path(installation.config_path(Daemon.COORDINATOR))
    record_path = Path(installation.record_path(Daemon.COORDINATOR))
    credentials = str(config.parent / "tls")  # of the Debian package's unit
    tls: dict[str, str] = {}
    if record_path.exists():
        options = installation.from_text(
            record_path.read_text(encoding="utf-8"), str(record_path)
        ).options
        credentials = options.credentials
        if options.ca_key:
            tls["ca_key"] = options.ca_key
    if credentials and Path(credentials, CREDENTIALS[0]).is_file():
        tls |= {f"tls_{name.removesuffix('.pem')}": f"{credentials}/{name}" for name in CREDENTIALS}
    return of_config(config, tls, Path(installation.state_directory(Daemon.COORDINATOR)))


def of_served(folder: Path) -> SiteFiles:
    """The site that `edgectl serve` keeps in a folder. Raises NotFoundError if there is none."""
    state = folder / "coordinator"
    if not (state / "state.sqlite").is_file():
        raise NotFoundError(f"--state-dir {folder} has no site of edgectl serve", field="state-dir")
    files = _state_files(state)
    files |= {f"site/{name}": folder / "site" / name for name in ("ca.pem", "ca.key")}
    own = [folder / "api-key", *sorted(folder.glob("*/node-id"))]
    files |= {f"own/{path.relative_to(folder)}": path for path in own if path.is_file()}
    return SiteFiles(folder, _present(files), served=True, models=_models(state))


def find_site(directory: Path) -> SiteFiles:
    """The site that `edgectl init` made in `directory`, else the installed one, else that of
    `edgectl serve`.

    Raises NotFoundError if this machine has none of them.
    """
    if (directory / _CONFIG).is_file():
        return of_config(directory / _CONFIG)
    if Path(installation.config_path(Daemon.COORDINATOR)).is_file():
        return of_installed()
    served = state_home() / "serve"
    if served.is_dir():
        return of_served(served)
    raise NotFoundError(
        f"there is no coordinator of this user here ({directory / _CONFIG}, "
        f"{installation.CONFIGURATION}, {served}): "
        "give --config FILE, with which the coordinator is started, or --state-dir DIR of edgectl "
        "serve",
        field="config",
    )


def write_backup(
    site: SiteFiles, path: Path, made_at: float, *, force: bool
) -> dict[str, ArchivedFile]:
    """Write a backup and return its files. Raises as `write_archive`."""
    about = {
        "format": FORMAT,
        "site": site_name(site),
        "made_at": made_at,
        "edgeshard": __version__,
        "wire": WIRE_VERSION,
        "served": site.served,
        "settings": dict(site.settings),
        "models": dict(site.models),
    }
    return write_archive(path, about, site.files, force=force)


def site_name(site: SiteFiles) -> str:
    """The name in the coordinator's certificate, "here" for a site of `edgectl serve`, "" for one
    in plaintext."""
    from edgeshard.local.cluster import SITE
    from edgeshard.rpc.tls import TlsFiles

    names = [_PATHS[key] for key in ("tls_ca", "tls_cert", "tls_key")]
    if not all(name in site.files for name in names):
        return SITE if site.served else ""
    return TlsFiles(*(site.files[name] for name in names)).principal().site


def read_backup(path: Path) -> Backup:
    """A backup, with all its hashes checked.

    Raises as `read_archive`, and FailedPreconditionError for one of a newer EdgeShard.
    """
    archive = read_archive(path)
    about = archive.about
    if about.get("format") != FORMAT:
        raise FailedPreconditionError(
            f"{path} was made by EdgeShard {str(about.get('edgeshard'))[:40]}, in a form that "
            f"{__version__} cannot "
            "read: restore it with that version",
            field="file",
            reason="BACKUP_VERSION",
        )
    try:
        backup = Backup(
            archive,
            str(about["site"]),
            float(about["made_at"]),
            str(about["edgeshard"]),
            int(about["wire"]),
            bool(about["served"]),
            {str(key): value for key, value in about["settings"].items()},
            {str(name): str(digest) for name, digest in about["models"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidArgumentError(
            f"{path}: its manifest has another form", field="file", reason="NO_BACKUP"
        ) from None
    for name in archive.files:
        if name.partition("/")[0] not in ("site", "state", "own"):
            raise InvalidArgumentError(
                f"{path} has a file {name!r}, which no site has", field="file"
            )
    return backup


def restore_site(
    backup: Backup, directory: Path, state_dir: Path, prepare_state: Callable[[Path], None]
) -> Path:
    """Write a backup's files to `directory` and `state_dir`; for a site of `edgectl serve` only to
    `state_dir`. Returns the coordinator's file of settings, or the folder of `edgectl serve`.

    `prepare_state` changes the state's file before it is put in its place. Raises
    FailedPreconditionError for a directory that is in use or not empty, and nothing is written
    then; OSError.
    """
    targets: dict[Path, tuple[str, ...]]
    if backup.served:
        targets = {state_dir: ("site", "state", "own")}
        places = {"site": state_dir / "site", "state": state_dir / "coordinator", "own": state_dir}
    else:
        targets = {directory: ("site",), state_dir: ("state",)}
        places = {"site": directory, "state": state_dir}
    for target in targets:
        _check_free(target)
    staged = {target: _staging(target) for target in targets}
    try:
        roots = {
            part: staged[target] / places[part].relative_to(target)
            for target, parts in targets.items()
            for part in parts
        }
        extract(backup.archive, lambda name: roots[name.partition("/")[0]] / name.partition("/")[2])
        prepare_state(roots["state"] / "state.sqlite")
        if not backup.served:
            _write_settings(backup, roots["site"], directory, state_dir)
        for target, staging_dir in staged.items():
            sync(staging_dir)
            staging_dir.rename(target)  # over an empty directory, or none
            sync(target.parent)
    finally:
        for staging_dir in staged.values():
            shutil.rmtree(staging_dir, ignore_errors=True)
    return state_dir if backup.served else directory / _CONFIG


def _write_settings(backup: Backup, site_root: Path, directory: Path, state_dir: Path) -> None:
    """The coordinator's settings, with the paths that its files have now."""
    from edgeshard.rpc.tls_files import write_private

    values = {**backup.settings, "state_dir": path_from(directory, state_dir)}
    for key, member in _PATHS.items():
        if member in backup.archive.files:
            values[key] = path_from(directory, directory / member.removeprefix("site/"))
    write_private(site_root / _CONFIG, to_toml("coordinator", values).encode())


def _staging(target: Path) -> Path:
    """A new directory next to the target, for only its owner."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))


def _check_free(target: Path) -> None:
    for lock in (
        target / "state.lock",
        target / "serve.lock",
        target / "coordinator" / "state.lock",
    ):
        if lock.is_file() and _is_locked(lock):
            raise FailedPreconditionError(
                f"{target} is in use by a coordinator; stop it first, or restore to another "
                "directory",
                field="state-dir",
                reason="STATE_DIR_IN_USE",
            )
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise FailedPreconditionError(
            f"{target} is not an empty directory: move it away, or restore to another one",
            field="state-dir",
            reason="NOT_EMPTY",
        )


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _state_files(state: Path) -> dict[str, Path]:
    """All files of a state directory except models, locks and temporary files."""
    return {
        f"state/{path.relative_to(state)}": path
        for path in _files_of(state)
        if not _is_skipped(path, state)
    }


def _is_skipped(path: Path, state: Path) -> bool:
    relative = path.relative_to(state)
    is_hidden = any(part.startswith(".") for part in relative.parts)
    return relative.parts[0] == "models" or is_hidden or path.name.endswith(_SKIPPED_SUFFIXES)


def _files_of(directory: Path) -> Iterator[Path]:
    """Its regular files, at any depth. Links are not followed."""
    for path in sorted(directory.iterdir()):
        if path.is_symlink():
            continue
        if path.is_dir():
            if path.name != "models":
                yield from _files_of(path)
        elif path.is_file():
            yield path


def _authority_files(directory: Path, files: Mapping[str, Path]) -> dict[str, Path]:
    """The files of `edgectl init` and `edgectl certificate`, except those that the settings
    name."""
    own = [directory / "ca.pem", directory / "site"]
    for folder in sorted(directory.iterdir()):
        if folder.is_dir() and not folder.is_symlink():
            own += [folder / name for name in CREDENTIALS]
    named = {f"site/{path.relative_to(directory)}": path for path in own if path.is_file()}
    return {name: path for name, path in named.items() if name not in files}


def _present(files: Mapping[str, Path]) -> dict[str, Path]:
    """The files. Raises InvalidArgumentError for one that is not there or cannot be read."""
    for path in files.values():
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise InvalidArgumentError(
                f"{path}, a file of the site, cannot be read: {error.strerror}; run the command as "
                "the coordinator's "
                "user or as root",
                field="config",
            ) from None
    return dict(files)


def _models(state: Path) -> dict[str, str]:
    """The digests of the site's models by name."""
    try:
        names = json.loads((state / "models" / "names.json").read_text(encoding="utf-8"))
        return {str(name): str(digest) for name, digest in names.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(
            f"{state / 'models' / 'names.json'} cannot be read: {error}", field="state-dir"
        ) from None
