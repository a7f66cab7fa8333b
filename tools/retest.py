"""Run what failed in the last test run once more, one test at a time: for `.ci/run`, after `make test` failed.

A test of processes can fail because the machine stood still at the wrong moment. One that passes alone is named as
flaky and mended later; it does not throw away the work of everybody else. A run with more than a few failures, or one
that broke before it could say which tests failed, is not run again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

MOST_FAILURES = 3
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not 0 < len(failed) <= MOST_FAILURES:
        print(f"retest: {len(failed)} failures are on record; only 1 to {MOST_FAILURES} are run again", file=sys.stderr)
        return 1
    print("retest: each of these is flaky if it passes now:", *failed, sep="\n  ", flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "--last-failed", "--last-failed-no-failures", "none"])


if __name__ == "__main__":
    sys.exit(main())
