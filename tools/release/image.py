"""An image for containers, as an archive of the OCI image layout: `make image`.

    mmdebstrap --variant=minbase --include=python3,libstdc++6 bookworm root.tar
    python -m tools.release.image --target x86_64-py311-cpu --base root.tar

The base is a tar file of a root with the target's Python; it becomes the first layer as it is. The
second one is EdgeShard's environment in /opt/edgeshard/deb, a user without rights, and the
directory of its state. Neither a daemon nor a registry is needed, the machine's own platform may be
another one, and two runs make the same bytes.
`skopeo copy oci-archive:FILE docker-daemon:edgeshard`, `podman load` and `ctr image import` take
it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.lock import ROOT
from tools.release.archives import (
    Entry,
    ReleaseError,
    sha256_of,
    size_text,
    source_epoch,
    version,
    write_tar,
    write_tar_gz,
)
from tools.release.deb import HOME
from tools.release.environment import lay_out
from tools.release.wheel_folder import Target, add_options, make_folders

USER = 10001
"""The number by which the image's processes run; no user of a host has it by custom."""
STATE = "/var/lib/edgeshard"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


def image_config(target: Target, diff_ids: list[str], epoch: int) -> dict[str, Any]:
    """The image's configuration. `diff_ids` are the digests of its layers before compression."""
    return {
        "architecture": target.architecture,
        "os": "linux",
        "created": f"{datetime.datetime.fromtimestamp(epoch, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        "config": {
            "User": f"{USER}:{USER}",
            "Env": [
                f"PATH={HOME}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                f"HOME={STATE}",
                # Programs may not be written to: what Python compiles at the first start is kept
                # with the state.
                f"PYTHONPYCACHEPREFIX={STATE}/compiled",
            ],
            "Cmd": ["edgectl", "--help"],
            "WorkingDir": STATE,
            "Labels": {
                "org.opencontainers.image.title": "edgeshard",
                "org.opencontainers.image.version": version(),
            },
        },
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }


def make_image(folder: Path, target: Target, base: Path, into: Path) -> Path:
    """The image of a wheel folder on the root in `base`, in the directory `into`."""
    epoch = source_epoch()
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        plain, layer = Path(scratch) / "layer.tar", Path(scratch) / "layer.tar.gz"
        entries = lay_out(folder, target, HOME, Path(scratch) / "wheels")
        entries.append(Entry(STATE.strip("/"), mode=0o700, owner=USER))
        with plain.open("wb") as file:
            write_tar(file, entries, epoch)
        write_tar_gz(layer, entries, epoch)
        layers = [_descriptor(_LAYER, base), _descriptor(f"{_LAYER}+gzip", layer)]
        diff_ids = [f"sha256:{sha256_of(path)}" for path in (base, plain)]
        plain.unlink()
        config = _json(image_config(target, diff_ids, epoch))
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
                "layers": layers,
            }
        )
        named = {"org.opencontainers.image.ref.name": f"edgeshard:{version()}"}
        top = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest) | {
            "annotations": named
        }
        blobs = [_blob(content) for content in (base, layer, config, manifest)]
        index = _json({"schemaVersion": 2, "manifests": [top]})
        layout = Entry("oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        made = into / f"edgeshard-{version()}-{target.name}.oci.tar"
        with made.open("wb") as file:
            write_tar(file, [*blobs, Entry("index.json", index), layout], epoch)
    return made


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(content: bytes | Path) -> str:
    return hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else sha256_of(content)


def _descriptor(media_type: str, content: bytes | Path) -> dict[str, Any]:
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    return {"mediaType": media_type, "digest": f"sha256:{_digest(content)}", "size": size}


def _blob(content: bytes | Path) -> Entry:
    return Entry(f"blobs/sha256/{_digest(content)}", content)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="image", description="Make images for containers.")
    add_options(parser)
    parser.add_argument(
        "--base", type=Path, required=True, help="a tar file of a root with the target's Python"
    )
    options = parser.parse_args(arguments)
    try:
        if not options.base.is_file():
            raise ReleaseError(
                f"--base {options.base} is no file: `mmdebstrap --include=python3 bookworm FILE` "
                "makes one"
            )
        for target, folder in make_folders(options):
            made = make_image(folder, target, options.base, ROOT / "dist")
            print(f"{made.relative_to(ROOT)}: {size_text(made)}", flush=True)
    except ReleaseError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
