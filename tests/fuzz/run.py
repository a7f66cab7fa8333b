"""Feed readers of strangers' bytes with mutated inputs: `make fuzz`, or
`python -m tests.fuzz.run --target config`.

Each target has a process of its own, with a limit of memory, that begins from the seeds and the
kept corpus. An input with a new outcome joins the corpus of the run and, with `--keep`, the
project's too. Four things are findings: an untyped exception; an input that takes longer than
`SLOW_S`. Memory that grows by more than `GROWTH_BYTES` for one input or by more than `DRIFT_BYTES`
over the run. The end of the process. It is written to `findings/`; the exit code is then 1. If
atheris is installed, `--atheris` drives one target with it instead, guided by the executed code.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.mutating import mutated
from tests.fuzz.targets import TARGETS, Target

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).parent / "corpus"
SLOW_S = 2.0
GROWTH_BYTES = 128 << 20
DRIFT_BYTES = 256 << 20
MEMORY_BYTES = 4 << 30
"""Limit of the process's address space: beyond it an allocation ends with MemoryError, which is a
finding."""
_KEPT_BYTES = 4096
"""An input that is kept in the project is no longer than that."""


@dataclass
class Report:
    """The outcome of one target. `slowest_s` is processor time; `peak_mib` and `began_mib` are of
    resident memory."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    outcomes: int = 0
    taken: int = 0
    slowest_s: float = 0.0
    began_mib: float = 0.0
    peak_mib: float = 0.0
    now_mib: float = 0.0
    findings: list[str] = field(default_factory=list)


def corpus_of(target: Target) -> list[bytes]:
    """The kept inputs, after the seeds."""
    folder = CORPUS / target.name
    return [*target.seeds, *(path.read_bytes() for path in sorted(folder.glob("*")))]


def tried(target: Target, data: bytes) -> tuple[str, str]:
    """The outcome of an input, and the fault if there is one."""
    peak, began = _peak_bytes(), time.process_time()
    try:
        outcome = target.fuzz_one(data)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"finding {type(error).__name__} {Path(last.filename).name}:{last.lineno}",
            traceback.format_exc(),
        )
    took, growth = time.process_time() - began, _peak_bytes() - peak
    if took > SLOW_S:
        return f"finding slow {outcome}", f"took {took:.1f} s: {outcome}"
    if growth > GROWTH_BYTES:
        return f"finding growth {outcome}", f"grew by {growth >> 20} MiB: {outcome}"
    return outcome, ""


def fuzz(target: Target, seconds: float, seed: int, out: Path, keep: bool) -> Report:
    """Inputs until the time is over; new outcomes and findings are written below `out`."""
    random_ = random.Random(seed)
    corpus = corpus_of(target)
    met = set[str]()
    report = Report(target.name, began_mib=_now_bytes() / 2**20)
    (out / "corpus" / target.name).mkdir(parents=True, exist_ok=True)
    current = os.open(out / f"current-{target.name}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    ends, waiting = time.monotonic() + seconds, list(corpus)
    began = time.monotonic()
    while time.monotonic() < ends:
        data = waiting.pop() if waiting else mutated(random_, corpus, target.words, target.is_json)
        # Whatever ends the process, the supervisor finds the input here.
        os.ftruncate(current, 0)
        os.pwrite(current, data, 0)
        before = time.process_time()
        outcome, wrong = tried(target, data)
        report.slowest_s = max(report.slowest_s, time.process_time() - before)
        report.inputs += 1
        report.taken += outcome == "taken"
        if outcome in met:
            if outcome == "taken" and len(corpus) < 3000 and random_.random() < 0.002:
                corpus.append(data)
        else:
            met.add(outcome)
            corpus.append(data)
            if wrong:
                report.findings.append(
                    f"{outcome} [{_write(out / 'findings' / target.name, data, wrong)}]"
                )
            else:
                _write(out / "corpus" / target.name, data)
                if keep and len(data) <= _KEPT_BYTES:
                    _write(CORPUS / target.name, data)
        if report.inputs % 5000 == 0:
            gc.collect()
            _tell(report, began, met, out)
    gc.collect()
    _tell(report, began, met, out)
    if report.now_mib - report.began_mib > DRIFT_BYTES / 2**20:
        report.findings.append(
            f"memory grew from {report.began_mib:.0f} to {report.now_mib:.0f} MiB over the run"
        )
        _tell(report, began, met, out)
    return report


def _tell(report: Report, began: float, met: set[str], out: Path) -> None:
    report.seconds, report.outcomes = round(time.monotonic() - began, 1), len(met)
    report.peak_mib, report.now_mib = _peak_bytes() / 2**20, _now_bytes() / 2**20
    (out / f"report-{report.target}.json").write_text(json.dumps(asdict(report), indent=1))


def _write(folder: Path, data: bytes, wrong: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    if wrong:
        path.with_suffix(".txt").write_text(wrong)
    return path


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _now_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def supervised(target: Target, options: argparse.Namespace) -> dict[str, Any]:
    """Fuzz in another process, begun again when an input ends it; its report."""
    left = options.seconds
    ended = list[str]()
    sums = dict[str, Any]()
    while left > 0:
        began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "tests.fuzz.run",
            "--worker",
            "--target",
            target.name,
            "--seconds",
            str(left),
        ]
        command += [
            "--seed",
            str(options.seed + len(ended)),
            "--out",
            str(options.out),
            *["--keep"] * options.keep,
        ]
        # The tokenizer's library prints a page for each of its panics.
        quiet = {**os.environ, "RUST_BACKTRACE": "0"}
        with (options.out / f"stderr-{target.name}").open("wb") as stderr:
            done = subprocess.run(command, cwd=ROOT, check=False, env=quiet, stderr=stderr)
        path = options.out / f"report-{target.name}.json"
        last = json.loads(path.read_text()) if path.exists() else asdict(Report(target.name))
        path.unlink(missing_ok=True)
        for key in ("inputs", "seconds", "taken"):
            last[key] += sums.get(key, 0)
        last["findings"] = [*sums.get("findings", ()), *last["findings"]]
        sums = last
        if done.returncode == 0:
            break
        data = (options.out / f"current-{target.name}").read_bytes()
        where = _write(
            options.out / "findings" / target.name,
            data,
            f"the process ended with {done.returncode}",
        )
        ended.append(f"the process ended with {done.returncode} [{where}]")
        left -= time.monotonic() - began
        if len(ended) == 10:
            break
    sums["findings"] = [*sums["findings"], *ended]
    path = options.out / f"result-{target.name}.json"
    path.write_text(json.dumps(sums, indent=1))
    return sums


def by_atheris(target: Target, arguments: list[str]) -> None:
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], str(CORPUS / target.name), *arguments], target.fuzz_one)
    atheris.Fuzz()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.fuzz.run", description=__doc__)
    parser.add_argument(
        "--target", choices=sorted(TARGETS), help="one reader; every one in turn without it"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for each reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".benchmarks" / "fuzz", help="results, findings, corpus"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep inputs with new outcomes in tests/fuzz/corpus"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--atheris", action="store_true", help="drive --target with atheris, where it is installed"
    )
    return parser


def main() -> int:
    options, rest = parser().parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    targets = [TARGETS[options.target]] if options.target else list(TARGETS.values())
    if options.atheris:
        by_atheris(targets[0], rest)
        return 0
    if options.worker:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        fuzz(targets[0], options.seconds, options.seed, options.out, options.keep)
        return 0
    found = 0
    for target in targets:
        result = supervised(target, options)
        found += len(result["findings"])
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
