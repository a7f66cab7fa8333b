"""Builds .venv-clients by its lock: the clients of others, which tests try the HTTP gateway with.

    python -m tools.setup_clients

uv installs it, which takes a third of pip's time for so many packages.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from tools.lock import CLIENTS, ROOT, LockError, find_uv

HOME = ROOT / ".venv-clients"


def main() -> int:
    try:
        uv, environment = find_uv()
    except LockError as error:
        print(f"clients: {error}", file=sys.stderr)
        return 1
    print("clients: installing the clients of others into .venv-clients", flush=True)
    shutil.rmtree(HOME, ignore_errors=True)
    subprocess.run((str(uv), "venv", "--quiet", "--python", sys.executable, str(HOME)), env=environment, check=True)
    lock = str(CLIENTS.with_suffix(".txt"))
    install = ("pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", str(HOME / "bin" / "python"))
    return subprocess.run((str(uv), *install, "-r", lock), env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
