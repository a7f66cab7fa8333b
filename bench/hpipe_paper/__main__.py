"""Write docs/paper/hpipe.md and its pictures: HPipe and other ways of using its test bed, computed from data sheets.

    python -m bench.hpipe_paper [--output docs/paper] [--check]

It takes about ten seconds and gives the same every time. With --check it writes nothing and exits 1 when a file would
change.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.hpipe_paper.experiments import run_all
from bench.hpipe_paper.report import page, pictures
from bench.pages import write_or_check

OUTPUT = Path(__file__).parents[2] / "docs" / "paper"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hpipe_paper")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file would change")
    arguments = parser.parse_args()
    results = run_all()
    return write_or_check(arguments.output, {"hpipe.md": page(results), **pictures(results)}, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
