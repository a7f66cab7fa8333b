"""Builds .venv-clients by its locks: client libraries for the tests of the HTTP gateway, and
published chat templates.

    python -m tools.setup_clients      `make clients`

uv installs it, which takes a third of pip's time for this number of packages. The libraries for
Node are left out if npm is not installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from tools.lock import CLIENTS, ROOT, LockError, find_uv

HOME = ROOT / ".venv-clients"
NODE = HOME / "node"
TEMPLATES = CLIENTS.parent / "templates.txt"
_NODE_FILES = ("package.json", "package-lock.json", ".npmrc")


def main() -> int:
    try:
        uv, environment = find_uv()
    except LockError as error:
        print(f"clients: {error}", file=sys.stderr)
        return 1
    print("clients: installing the clients of others into .venv-clients", flush=True)
    shutil.rmtree(HOME, ignore_errors=True)
    subprocess.run(
        (str(uv), "venv", "--quiet", "--python", sys.executable, str(HOME)),
        env=environment,
        check=True,
    )
    locks = ("-r", str(CLIENTS.with_suffix(".txt")), "-r", str(TEMPLATES))
    install = (
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--python",
        str(HOME / "bin" / "python"),
    )
    code = subprocess.run((str(uv), *install, *locks), env=environment, check=False).returncode
    return code or install_for_node()


def install_for_node() -> int:
    npm = shutil.which("npm")
    if npm is None:
        print("clients: npm is not installed, so those for Node are left out", file=sys.stderr)
        return 0
    NODE.mkdir()
    for name in _NODE_FILES:
        shutil.copy(CLIENTS.parent / name, NODE)
    # No package's own programs are run.
    install = (npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error")
    return subprocess.run(install, cwd=NODE, stdout=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
