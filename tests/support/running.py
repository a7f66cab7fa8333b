"""edgectl as its user runs it: the installed program, in the background, from any directory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

EDGECTL = str(Path(sys.executable).with_name("edgectl"))
READY_S = 90.0
POLL_S = 0.05


def wrong_modules(folder: Path) -> Path:
    """Fill a folder with what Python, standing there, would take for our modules and for its
    own."""
    (folder / "edgeshard").mkdir()
    for name in ("edgeshard/__init__", "agent", "types", "json"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')\n")
    return folder


def environment_of(home: Path) -> dict[str, str]:
    """The environment of a user whose settings and states are under `home`."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("EDGESHARD__")}
    return clean | {
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_STATE_HOME": str(home / "state-home"),
    }


class Running:
    """An edgectl in the background, and its output."""

    def __init__(
        self,
        home: Path,
        name: str,
        *arguments: str,
        settings: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.log = home / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [EDGECTL, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_of(home) | dict(settings or {}),
                cwd=cwd,
                start_new_session=True,
            )

    def until(self, pattern: str, times: int = 1) -> re.Match[str]:
        """The last match of the pattern, once there are `times` matches."""
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            found = list(re.finditer(pattern, self.log.read_text(), re.M))
            if len(found) >= times:
                return found[-1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(POLL_S)
        raise AssertionError(f"no {pattern!r} in {self.log.read_text()}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(READY_S)


def processes_of(state: Path) -> list[str]:
    """Command lines of the daemons of a site that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if str(state) in text and "edgeshard_" in text:
            found.append(text)
    return found
