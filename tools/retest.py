"""Run the failed tests of the last run once more, and no others: for `.ci/run`, after `make
test-all` failed.

Only a test marked `timing`, which uses processes or clocks, can fail because the machine stood
still at the wrong moment. It runs once more, with its whole file if that is marked `in_order`. One
that passes then is named as flaky and mended later; it does not throw away the work of everybody
else. A failure of any other test is a finding, and nothing is run again. The same holds for more
than a few failures, and for a run that broke before it could report which tests failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MAX_FAILURES = 6
"""Four workers share two cores, so several tests may wait too long in one run."""
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
PYTEST = (sys.executable, "-m", "pytest", "--long")
NOTHING_COLLECTED = 5


def collected(failed: list[str], mark: str) -> list[str]:
    """The failed tests that the expression of marks chooses."""
    command = [
        *PYTEST,
        "-o",
        "addopts=--import-mode=importlib -q",
        "--collect-only",
        "-m",
        mark,
        *failed,
    ]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode not in (0, NOTHING_COLLECTED):
        sys.exit(f"retest: the tests cannot be collected:\n{found.stdout}")
    return [test for test in failed if test in found.stdout.splitlines()]


def main() -> int:
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not 0 < len(failed) <= MAX_FAILURES:
        print(
            f"retest: {len(failed)} failures are on record; only 1 to {MAX_FAILURES} are run again",
            file=sys.stderr,
        )
        return 1
    if findings := collected(failed, "not timing"):
        print(
            "retest: these use neither processes nor clocks: mend them",
            *findings,
            sep="\n  ",
            file=sys.stderr,
        )
        return 1
    in_order = collected(failed, "in_order")
    again = sorted({test.partition("::")[0] if test in in_order else test for test in failed})
    print("retest: each of these is flaky if it passes now:", *failed, sep="\n  ", flush=True)
    os.execv(sys.executable, [*PYTEST, *again])


if __name__ == "__main__":
    sys.exit(main())
