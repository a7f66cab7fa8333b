"""The ways in: make's targets, the set-up script's decisions, and the script continuous integration
calls."""

from __future__ import annotations

import configparser
import copy
import fcntl
import importlib.util
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TARGETS = (
    "help",
    "install",
    "fuzz",
    "fuzz-agents",
    "fuzz-bodies",
    "attack",
    "setup",
    "clients",
    "docs",
    "demo",
    "serve",
    "wheels",
    "test",
    "test-all",
    "retest",
    "check",
    "collect",
    "proto",
    "proto-baseline",
    "drawings",
    "bench",
    "bench-plan",
    "figures",
    "soak",
    "chaos",
    "chaos-long",
    "chaos-quick",
    "sim",
    "format",
    "lock",
    "sbom",
    "licences",
    "pictures",
    "folders",
    "bundle",
    "deb",
    "image",
    "release",
    "aarch64",
)


@pytest.fixture
def setup_environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "setup_environment", ROOT / "tools" / "setup_environment.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_make_alone_lists_every_target() -> None:
    result = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    listed = [line.split()[1] for line in result.stdout.splitlines()]
    assert sorted(listed) == sorted(TARGETS)


def test_compiled_modules_are_kept_whatever_the_environment_says() -> None:
    """Not only set-up, which is to compile torch once and for all."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    target = 'told: ; @echo "[$${PYTHONDONTWRITEBYTECODE-}]"'
    command = ["make", "--eval", target, "told"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "[]\n", result


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_a_recipe(target: str) -> None:
    result = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_bench_runs_what_the_suite_leaves_out(project: dict[str, Any]) -> None:
    """Both are pytest files, so that pytest-benchmark measures; only the one target names them."""
    assert project["tool"]["pytest"]["ini_options"]["testpaths"] == ["tests"]
    result = subprocess.run(
        ["make", "--dry-run", "bench"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    for path in sorted((ROOT / "bench").glob("test_*.py")):
        assert f"bench/{path.name}" in result.stdout
    assert "bench.engine --quick" in result.stdout and "--llama-cpp" not in result.stdout


def test_what_runs_is_set_up_without_what_developers_need() -> None:
    """Every target depends on the level that it needs, except targets that need none or run the
    script each time."""
    text = (ROOT / "Makefile").read_text()
    needed = dict(re.findall(r"^([a-z0-9-]+): \$\((RUNS|STAMP)\)", text, re.M))
    assert {target for target, level in needed.items() if level == "RUNS"} == {
        "install",
        "demo",
        "serve",
    }
    of_wheels = set(re.findall(r"^([a-z-]+): wheels ", text, re.M))
    assert of_wheels == {"folders", "bundle", "deb", "image", "release"}
    assert set(TARGETS) - set(needed) - of_wheels == {"help", "setup", "clients", "docs", "lock"}
    missing = ["make", "--dry-run", "RUNS=runs.none", "STAMP=stamp.none"]
    for target, called in (
        ("demo", "tools/setup_environment.py runtime"),
        ("check", "tools/setup_environment.py"),
    ):
        done = subprocess.run(
            [*missing, target], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.partition(" ||")[0].rstrip().endswith(called)


def test_setup_is_done_again_only_for_what_is_installed(
    setup_environment: ModuleType, project: dict[str, Any]
) -> None:
    levels = setup_environment.LEVELS
    runs = setup_environment.fingerprint(project, "lock", "runtime")
    before = setup_environment.fingerprint(project, "lock", *levels)
    lint_only, dependency, group = (copy.deepcopy(project) for _ in range(3))
    lint_only["tool"]["ruff"]["line-length"] = 80
    dependency["project"]["dependencies"].append("attrs")
    group["dependency-groups"]["dev"].append("attrs")
    assert setup_environment.fingerprint(copy.deepcopy(project), "lock", *levels) == before
    assert setup_environment.fingerprint(lint_only, "lock", *levels) == before
    assert setup_environment.fingerprint(dependency, "lock", *levels) != before
    assert setup_environment.fingerprint(group, "lock", *levels) != before
    assert setup_environment.fingerprint(project, "another lock", *levels) != before
    assert setup_environment.fingerprint(group, "lock", "runtime") == runs != before, (
        "a linter is nothing that runs"
    )
    assert setup_environment.fingerprint(dependency, "lock", "runtime") != runs


def test_setup_takes_torch_at_the_pinned_version(
    setup_environment: ModuleType, project: dict[str, Any]
) -> None:
    assert setup_environment.torch_requirement(project).startswith("torch==")


REPORT = '{"install": [{"metadata": {"version": "2.13.0+cpu"}}]}'
FIRST_IMPORT = (
    "import edgeshard.client, edgeshard_coordinator.daemon, edgeshard_agent.hosting.loading"
)
FAKE_PYTHON = f"""#!/bin/sh
echo "$@" >> calls
case "$*" in *--report*) echo '{REPORT}' ;; esac
[ ! -e broken ]
"""


class Checkout:
    """The parts of a checkout that set-up needs, with a fake pip that records its calls and fails
    while `broken` exists.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "tools").mkdir()
        shutil.copy(ROOT / "tools" / "setup_environment.py", root / "tools")
        for name in ("pyproject.toml", "constraints.lock"):
            shutil.copy(ROOT / name, root)
        python = root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE_PYTHON)
        python.chmod(0o755)
        self.stamp = root / ".venv" / ".setup-stamp"
        self.runs = root / ".venv" / ".runtime-stamp"
        self.broken = root / "broken"

    def setup(self, *arguments: str, **extra: str) -> tuple[int, list[str], str]:
        """The status, the calls, and the output on stderr."""
        calls = self.root / "calls"
        calls.write_text("")
        done = self.run(*arguments, **extra)
        return done.returncode, calls.read_text().splitlines(), done.stderr

    def run(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Set-up, without a terminal."""
        command = [sys.executable, str(self.root / "tools" / "setup_environment.py"), *arguments]
        left_out = ("TORCH_INDEX_URL", "EDGESHARD_UNLOCKED")
        environment = {
            key: value for key, value in os.environ.items() if key not in left_out
        } | extra
        return subprocess.run(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_finished_setup_does_nothing_and_an_interrupted_one_is_not_taken_for_finished(
    checkout: Checkout,
) -> None:
    """The first run installs, the second not, a failed one leaves no stamp, and a changed lock is
    installed."""
    checkout.broken.touch()
    assert checkout.setup()[0] == 1
    assert not checkout.stamp.exists()

    checkout.broken.unlink()
    status, calls, _ = checkout.setup()
    assert status == 0 and any("--editable" in call for call in calls)
    status, calls, _ = checkout.setup()
    assert status == 0
    assert calls == ["hatch_build.py"], (
        "a finished set-up was done again, not only the kernels looked at"
    )

    lock = checkout.root / "constraints.lock"
    lock.write_text(lock.read_text().replace("sha256:0", "sha256:1", 1))
    assert any("--editable" in call for call in checkout.setup()[1])


def test_what_runs_comes_first_and_what_developers_need_is_added_to_it(checkout: Checkout) -> None:
    status, calls, _ = checkout.setup("runtime")
    assert status == 0 and checkout.runs.exists() and not checkout.stamp.exists()
    (packages,) = (call for call in calls if " psutil>=7,<8" in call)
    assert "hatchling==" in packages and "editables>=" in packages and "textual>=" in packages
    for text in ("pytest", "mypy", "ruff", "ortools", "types-", "uv=="):
        assert f" {text}" not in packages
    assert checkout.setup("runtime")[1] == ["hatch_build.py"], "what runs was installed again"

    status, calls, _ = checkout.setup()
    assert status == 0 and checkout.stamp.exists()
    (packages, check, kernels) = calls
    assert (
        " ortools==" in packages and " torch==" not in packages and "--require-hashes" in packages
    )
    assert (check, kernels) == ("-m pip check", "hatch_build.py")

    for level in ("runtime", None):
        assert checkout.setup(*([level] if level else []))[1] == ["hatch_build.py"], (
            "nothing is left to install"
        )
    project = checkout.root / "pyproject.toml"
    project.write_text(project.read_text().replace('"hypothesis>=6.140,<7",', ""))
    assert checkout.setup("runtime")[1] == ["hatch_build.py"], "only developers need another thing"
    assert len(checkout.setup()[1]) == 3


def test_everything_that_setup_downloads_is_held_to_the_lock(checkout: Checkout) -> None:
    status, calls, _ = checkout.setup()
    assert status == 0
    installs = [call for call in calls if " install " in call and "--dry-run" not in call]
    own_pip, torch, runs, project, developers = installs
    assert own_pip.endswith(
        f"--require-hashes --no-deps --requirement {checkout.root / '.venv' / 'pip.lock'}"
    )
    pinned = (checkout.root / ".venv" / "pip.lock").read_text().splitlines()
    assert (
        pinned[0].startswith("pip==")
        and all("--hash=sha256:" in line for line in pinned[1:])
        and len(pinned) > 1
    )
    held = (
        f"--require-hashes --only-binary :all: --constraint {checkout.root / 'constraints.lock'} "
    )
    assert held in torch and torch.endswith(" --no-deps torch==2.13.0+cpu"), (
        "the build that pip's configuration leads to"
    )
    assert held in runs and held in developers
    for text in ("hatchling==1.33.0", "pyyaml>=6,<7", "psutil>=7,<8", "transformers>=5.23,<5.24"):
        assert f" {text}" in runs
    assert " types-PyYAML>=6,<7" in developers
    assert "edgeshard" not in (runs + developers).replace(str(checkout.root), "")
    assert project.endswith(f"--no-deps --no-build-isolation --editable {checkout.root}")
    assert all("--no-compile" in call for call in installs), (
        "what nobody imports need not be compiled"
    )
    assert calls.index(f"-c {FIRST_IMPORT}") > calls.index(project) and calls[-2:] == [
        "-m pip check",
        "hatch_build.py",
    ]


def test_setup_takes_torch_alone_from_its_own_index(checkout: Checkout) -> None:
    for extra in ({}, {"EDGESHARD_UNLOCKED": "1"}):
        checkout.runs.unlink(missing_ok=True)
        status, calls, _ = checkout.setup(TORCH_INDEX_URL="file:///somewhere", **extra)
        assert status == 0
        (torch,) = (call for call in calls if "--index-url" in call)
        assert torch.endswith("--no-deps --index-url file:///somewhere torch==2.13.0")
        assert ("--require-hashes" in torch) == (not extra)


def test_a_refused_installation_says_what_to_do_and_unlocked_leaves_the_lock_aside(
    checkout: Checkout,
) -> None:
    checkout.broken.touch()
    status, _, said = checkout.setup()
    assert status == 1 and "EDGESHARD_UNLOCKED=1" in said and "hashes that do not match" in said
    checkout.broken.unlink()
    status, calls, _ = checkout.setup(EDGESHARD_UNLOCKED="1")
    assert status == 0
    assert not any("--require-hashes" in call or "constraints.lock" in call for call in calls)
    assert any(call.endswith(f"--editable {checkout.root}[all]") for call in calls)
    assert any(" ortools==" in call for call in calls)
    assert any("--editable" in call for call in checkout.setup()[1]), (
        "an unlocked set-up was taken for a locked one"
    )


def test_continuous_integration_runs_set_up_check_and_test_in_order() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)], timeout=60).returncode == 0
    lines = path.read_text().splitlines()
    assert lines[0].endswith("bash")
    assert "set -euo pipefail" in lines
    steps = [line.partition("#")[0].strip() for line in lines if line.startswith("make ")]
    assert steps == [
        "make demo",
        "make setup",
        "make clients",
        "make docs",
        "make collect &",
        "make check",
        "make test-all || make retest",
    ]


def test_every_hook_before_a_commit_is_a_part_of_make_check() -> None:
    """So that no hook needs more than `make check`, and none fetches a tool from the network."""
    check = subprocess.run(
        ["make", "--dry-run", "check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout
    hooks = [
        hook
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repository["hooks"]
        if repository["repo"] == "local"
    ]
    assert len(hooks) >= 5
    for hook in hooks:
        of_message = hook.get("stages") == ["commit-msg"]
        assert (hook["language"], hook.get("pass_filenames", True)) == ("system", of_message), hook[
            "id"
        ]
        entry = hook["entry"].removesuffix(" --message")
        assert entry in check.splitlines(), f"{hook['id']}: {entry!r} is no line of `make check`"


def test_no_hook_comes_from_elsewhere() -> None:
    configuration = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repository["repo"] for repository in configuration["repos"]} == {"local"}


def test_editors_are_told_what_the_formatter_holds(project: dict[str, Any]) -> None:
    parser = configparser.ConfigParser()
    parser.read_string("[DEFAULT]\n" + (ROOT / ".editorconfig").read_text())
    length = project["tool"]["ruff"]["line-length"]
    assert parser["*.{py,pyi}"]["max_line_length"] == str(length)
    assert parser["Makefile"]["indent_style"] == "tab"


CUDA_BUILD = (
    '{"install": [{"metadata": {"version": "2.13.0", "requires_dist": '
    '["nvidia-nccl-cu13==2; linux"]}}]}'
)


def test_setup_says_what_it_does_before_it_does_it(checkout: Checkout) -> None:
    """Also if its output is a pipe, which Python would fill first."""
    process = checkout.run()
    said = [line for line in process.stdout.splitlines() if line.startswith("setup: ")]
    assert said[0] == "setup: installing torch==2.13.0+cpu"
    assert said[-1].startswith("setup: done")


def test_setup_prints_five_lines_and_keeps_what_pip_prints_in_a_file(checkout: Checkout) -> None:
    python = checkout.root / ".venv" / "bin" / "python"
    python.write_text(
        FAKE_PYTHON.replace("[ ! -e broken ]", "for n in $(seq 30); do echo chatter $n; done >&2")
    )
    done = checkout.run()
    assert (
        done.returncode == 0 and len(done.stdout.splitlines()) <= 5 and "chatter" not in done.stdout
    )
    log = (checkout.root / ".venv" / "setup.log").read_text()
    assert log.count("chatter 30\n") >= 5 and "-m pip check" in log


def test_a_failed_setup_prints_the_end_of_the_log_and_its_path(checkout: Checkout) -> None:
    python = checkout.root / ".venv" / "bin" / "python"
    failing = FAKE_PYTHON.replace(
        "[ ! -e broken ]", "seq -f 'line %g' 40 >&2; case $* in *--editable*) exit 3 ;; esac"
    )
    python.write_text(failing)
    status, _, said = checkout.setup("runtime")
    assert status == 1 and "line 40\n" in said and "line 20\n" not in said
    assert (
        f"failed with status 3; its whole output is in {checkout.root / '.venv' / 'setup.log'}"
        in said
    )


def test_an_interrupted_setup_prints_one_line(checkout: Checkout) -> None:
    python = checkout.root / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\ntouch started\nexec sleep 60\n")
    command = [sys.executable, str(checkout.root / "tools" / "setup_environment.py"), "runtime"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (checkout.root / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and said == "setup: interrupted; the same command continues\n"


INTERRUPTIBLE = """#!/bin/sh
trap 'echo ended by Ctrl-C; exit STATUS' INT
echo running
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("target", "status"), [("serve", 0), ("demo", 130), ("setup", 130), ("install", 130)]
)
def test_make_adds_no_line_to_that_of_a_command_which_ctrl_c_ends(
    tmp_path: Path, target: str, status: int
) -> None:
    """On a terminal, which sends the signal to make, too."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (
        "pyproject.toml",
        "constraints.lock",
        "hatch_build.py",
        "tools/setup_environment.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    script = tmp_path / ".venv/bin/edgectl"
    script.parent.mkdir(parents=True)
    script.write_text(INTERRUPTIBLE.replace("STATUS", str(status)))
    script.chmod(0o755)
    command = ["make", target, f"PYTHON={script}"]
    if target in ("serve", "demo"):
        command += ["-o", ".venv/.runtime-stamp"]
        (tmp_path / ".venv/.runtime-stamp").touch()
    own, terminal = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    said = b""
    try:
        while b"running" not in said:
            said += os.read(own, 4096)
        os.write(own, b"\x03")
        with suppress(OSError):  # the terminal has no other end any more
            while piece := os.read(own, 4096):
                said += piece
    finally:
        process.kill()
        os.close(own)
    assert process.wait() in (-signal.SIGINT, 128 + signal.SIGINT)
    assert said.split() == b"running ^Cended by Ctrl-C".split()


FAKE_UV = """#!/bin/sh
echo "uv $@" >> calls
[ ! -e unreachable ]
"""


def without_driver(checkout: Checkout) -> None:
    """A machine without a driver whose pip leads to the CUDA build."""
    script = checkout.root / "tools" / "setup_environment.py"
    script.write_text(script.read_text().replace("/dev/nvidiactl", str(checkout.root / "none")))
    programs = checkout.root / ".venv" / "bin"
    (programs / "python").write_text(FAKE_PYTHON.replace(REPORT, CUDA_BUILD))
    (programs / "uv").write_text(FAKE_UV)
    (programs / "uv").chmod(0o755)


@pytest.mark.parametrize("unlocked", ["", "1"])
def test_without_a_driver_the_cpu_build_is_installed_and_nothing_is_asked(
    checkout: Checkout, unlocked: str
) -> None:
    without_driver(checkout)
    status, calls, _ = checkout.setup("runtime", EDGESHARD_UNLOCKED=unlocked)
    assert status == 0
    (uv,) = (call for call in calls if call.startswith("uv "))
    assert " --torch-backend cpu " in uv and " --no-deps " in uv
    assert not any(
        call.endswith("--no-deps torch==2.13.0") for call in calls if not call.startswith("uv ")
    )
    (before,) = (call for call in calls if call.split()[-1].startswith("uv=="))
    assert ("--require-hashes" in before) == ("--require-hashes" in uv) == (not unlocked)
    if unlocked:
        assert uv.endswith(" torch==2.13.0")
    else:
        pinned = checkout.root / ".venv" / "torch.lock"
        assert uv.endswith(f" --requirement {pinned}") and pinned.read_text().startswith(
            "torch==2.13.0 "
        )


def test_if_the_cpu_build_is_out_of_reach_pip_decides_and_the_page_is_named(
    checkout: Checkout,
) -> None:
    without_driver(checkout)
    (checkout.root / "unreachable").touch()
    done = checkout.run("runtime")
    assert done.returncode == 0, done.stderr
    calls = (checkout.root / "calls").read_text().splitlines()
    assert any(call.endswith("--no-deps torch==2.13.0") for call in calls)
    assert (
        "TORCH_INDEX_URL" in done.stdout
        and "Start Locally" in done.stdout
        and "2.9 GB" in done.stdout
    )


def test_a_build_that_brings_cuda_is_told_by_what_it_needs(checkout: Checkout) -> None:
    python = checkout.root / ".venv" / "bin" / "python"
    python.write_text(FAKE_PYTHON.replace(REPORT, CUDA_BUILD))
    script = checkout.root / "tools" / "setup_environment.py"
    script.write_text(script.read_text().replace("/dev/nvidiactl", str(script)))
    process = checkout.run()
    assert "setup: installing torch==2.13.0 (2.9 GB to fetch, 5.3 GB on disk)" in process.stdout


def test_make_setup_looks_at_the_kernels_each_time(tmp_path: Path) -> None:
    """A compiler that was installed later is no file that make could see."""
    finished = tmp_path / "stamp"
    finished.touch()
    command = ["make", "--dry-run", f"STAMP={finished}", "setup"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("tools/setup_environment.py") == 1
