"""Generate edgeshard/proto/v1 from proto/edgeshard/proto/v1, or check that the committed code is
current.

    python tools/generate_proto.py           write: `make proto`
    python tools/generate_proto.py --check   exit 1 when what is committed differs from that:
                                             `make check`
"""

from __future__ import annotations

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
PACKAGE = Path("edgeshard/proto/v1")


def generate(out: Path) -> None:
    """Write the generated files under `out`; the proto path equals the Python path, so imports need
    no rewriting."""
    files = sorted(str(path.relative_to(SOURCES)) for path in (SOURCES / PACKAGE).glob("*.proto"))
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}"]
    command += [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([*command, *files], check=True)
    for package in (PACKAGE.parent, PACKAGE):
        (out / package / "__init__.py").touch()


def main() -> int:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = sorted(p.relative_to(scratch) for p in Path(scratch).rglob("*.py*") if p.is_file())
        stale = [
            str(p)
            for p in fresh
            if not (ROOT / p).exists() or not filecmp.cmp(Path(scratch) / p, ROOT / p, False)
        ]
        extra = {p.relative_to(ROOT) for p in (ROOT / PACKAGE).glob("*.py*")} - set(fresh)
        stale += [str(p) for p in sorted(extra)]
    for path in stale:
        print(f"{path} is not what proto/ generates; run `make proto`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
