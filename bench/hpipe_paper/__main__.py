"""Write docs/paper/hpipe.md and its pictures: HPipe and other ways of using its test bed, computed from data sheets.

    python -m bench.hpipe_paper [--output docs/paper] [--check]

It takes about half a minute and gives the same every time. With --check it writes nothing and exits 1 when a file would
change.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.hpipe_paper.experiments import run_all
from bench.hpipe_paper.report import page, pictures
from bench.pages import run_page_program

OUTPUT = Path(__file__).parents[2] / "docs" / "paper"


def files() -> dict[str, str]:
    """The page and its pictures, by name."""
    results = run_all()
    return {"hpipe.md": page(results), **pictures(results)}


def main() -> int:
    return run_page_program("bench.hpipe_paper", OUTPUT, files)


if __name__ == "__main__":
    sys.exit(main())
