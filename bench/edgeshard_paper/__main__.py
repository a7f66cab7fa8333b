"""Write docs/paper: the paper's tables and figures, computed from data sheets, next to the paper's
own numbers.

    python -m bench.edgeshard_paper [--output docs/paper] [--pictures DIR] [--check | --lab]

It takes about a minute and gives the same every time. With --check it writes nothing and exits 1
when a file would change. With --pictures the figures are drawn into DIR. With --lab the 7B plans
are also run by the lab, ten minutes in real processes, and what they take is kept in
docs/paper/lab.json, from where the page has it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.edgeshard_paper import by_lab
from bench.edgeshard_paper.report import page, pictures, tables
from bench.edgeshard_paper.results import run_all
from bench.pages import page_parser, table_file, write_or_check

OUTPUT = Path(__file__).parents[2] / "docs" / "paper"
MEASURED = OUTPUT / "lab.json"
TABLES = "tables.json"


def main() -> int:
    parser, either = page_parser("bench.edgeshard_paper", OUTPUT)
    either.add_argument("--lab", action="store_true", help="run the 7B plans by the lab as well")
    arguments = parser.parse_args()
    results = run_all()
    plans = results.performance[by_lab.MODEL]
    if arguments.lab:
        by_lab.write(MEASURED, by_lab.measure_all(row.run for row in by_lab.lab_rows(plans, {})))
    lab = by_lab.lab_rows(plans, by_lab.read(MEASURED))
    files = {"README.md": page(results, lab), TABLES: table_file(tables(results))}
    if arguments.pictures is not None:
        write_or_check(arguments.pictures, pictures(results), check=False)
    return write_or_check(arguments.output, files, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
