"""Fetch the dashboard's libraries by npm, at the versions named here, and put them next to its own
files.

Browsers know no names of packages: the imports among the libraries become paths. Run it after a
change of a version; the files are part of the tree, so that neither a build nor a browser needs a
network.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path("coordinator/edgeshard_coordinator/dashboard/assets/vendor")
PACKAGES = {
    "preact@11.2.0": {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js"},
    "htm@3.1.1": {"dist/htm.module.js": "htm.js"},
    "uplot@1.6.32": {"dist/uPlot.iife.min.js": "uplot.js", "dist/uPlot.min.css": "uplot.css"},
}
SCRIPTS = {"uplot.js": "uPlot"}
"""Files that define global names and export nothing: their small form is a script."""
NAMES = ("preact",)


def main() -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("vendor_assets: there is no npm")
    shutil.rmtree(VENDOR, ignore_errors=True)
    VENDOR.mkdir(parents=True)
    licences = []
    for package, files in PACKAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            packed = subprocess.run(
                [npm, "pack", "--silent", package],
                cwd=folder,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            with tarfile.open(Path(folder) / packed.stdout.split()[-1]) as archive:
                archive.extractall(folder, filter="data")
            unpacked = Path(folder) / "package"
            for inside, name in files.items():
                export = f"export default {SCRIPTS[name]};\n" if name in SCRIPTS else ""
                (VENDOR / name).write_text(_with_paths((unpacked / inside).read_text()) + export)
            licences.append(f"{package}\n\n{(unpacked / 'LICENSE').read_text().strip()}\n")
    (VENDOR / "LICENSES").write_text("\n\n".join(licences))


def _with_paths(text: str) -> str:
    for name in NAMES:
        text = text.replace(f'from"{name}"', f'from"./{name}.js"')
    lines = [line for line in text.splitlines() if not line.startswith("//# sourceMappingURL=")]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
