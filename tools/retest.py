"""Run what failed in the last test run once more, one test at a time: for `.ci/run`, after `make test-all` failed.

Only a test marked `timing`, which uses processes or clocks, can fail because the machine stood still at the wrong
moment. One that passes alone is named as flaky and mended later; it does not throw away the work of everybody else. A
failure of any other test is a finding: nothing is run again, nor after more than a few failures, or a run that broke
before it could say which tests failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MOST_FAILURES = 3
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
LAST = (sys.executable, "-m", "pytest", "--long", "--last-failed", "--last-failed-no-failures", "none")
NOTHING_COLLECTED = 5


def main() -> int:
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not 0 < len(failed) <= MOST_FAILURES:
        print(f"retest: {len(failed)} failures are on record; only 1 to {MOST_FAILURES} are run again", file=sys.stderr)
        return 1
    others = [*LAST, "--collect-only", "-m", "not timing"]
    found = subprocess.run(others, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode != NOTHING_COLLECTED:
        print("retest: these use neither processes nor clocks: mend them", found.stdout, sep="\n", file=sys.stderr)
        return 1
    print("retest: each of these is flaky if it passes now:", *failed, sep="\n  ", flush=True)
    os.execv(sys.executable, LAST)


if __name__ == "__main__":
    sys.exit(main())
