"""Write docs/paper/hpipe.md and its tables: HPipe and other ways of using its test bed, computed
from data sheets.

    python -m bench.hpipe_paper [--output docs/paper] [--pictures DIR] [--check | --measure]

It takes about half a minute and gives the same every time. With --check it writes nothing and exits
1 when a file would change. With --pictures the figures are drawn into DIR. With --measure this
machine's kernels are measured first, two minutes of one core, and the figures are kept in
docs/paper/hpipe-kernels.json, from where the page has them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.hpipe_paper import measured
from bench.hpipe_paper.experiments import run_all
from bench.hpipe_paper.report import page, pictures, tables
from bench.pages import page_parser, table_file, write_or_check

OUTPUT = Path(__file__).parents[2] / "docs" / "paper"
MEASURED = "hpipe-kernels.json"
TABLES = "hpipe-tables.json"


def main() -> int:
    parser, either = page_parser("bench.hpipe_paper", OUTPUT)
    either.add_argument(
        "--measure", action="store_true", help="measure this machine's kernels first"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        arguments.output.mkdir(parents=True, exist_ok=True)
        measured.write(arguments.output / MEASURED, measured.measure())
    kernels = measured.read(arguments.output / MEASURED)
    results = run_all()
    files = {"hpipe.md": page(results, kernels), TABLES: table_file(tables(results, kernels))}
    if arguments.pictures is not None:
        write_or_check(arguments.pictures, pictures(results, kernels), check=False)
    return write_or_check(arguments.output, files, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
