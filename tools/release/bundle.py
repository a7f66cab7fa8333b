"""An archive of a wheel folder, which installs without a network: `make bundle`.

python -m tools.release.bundle --target x86_64-py311-cpu
    into dist/edgeshard-VERSION-x86_64-py311-cpu.tar
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.release.archives import Entry, source_epoch, version, write_tar
from tools.release.wheel_folder import Target, add_options, make_of_folders


def make_bundle(folder: Path, target: Target, into: Path) -> Path:
    """The archive of a wheel folder, in the directory `into`. It is not compressed, since wheels
    are."""
    name = f"edgeshard-{version()}-{target.name}"
    entries = [
        Entry(path.name, path, 0o755 if path.suffix == ".sh" else 0o644)
        for path in folder.iterdir()
        if path.is_file()
    ]
    made = into / f"{name}.tar"
    with made.open("wb") as file:
        write_tar(file, entries, source_epoch(), f"{name}/")
    return made


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bundle", description="Pack wheel folders.")
    add_options(parser)
    return make_of_folders("bundle", parser.parse_args(arguments), make_bundle)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
