"""Watts, if the device has a sensor: NVML for an accelerator, INA3221 on a Jetson, RAPL on other
processors.

Most virtual machines have none, and only root can read RAPL; then there is no figure.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from edgeshard.domain.nodes.profile import EnergyProfile

SYSTEM = Path("/sys")
INTERVAL_S = 0.2
# Rails that feed the whole module; if one exists, the others are parts of it.
_WHOLE_RAILS = frozenset({"VDD_IN", "POM_5V_IN", "VIN"})
_LATE_S = 1.0


class PowerSensor(Protocol):
    """A sensor of the device's power. `source` is its name in a profile."""

    @property
    def source(self) -> str: ...

    def watts(self) -> float:
        """Watts now, or the mean since the last reading. Raises OSError if the device reports none
        any more."""


class Nvml:
    """A discrete NVIDIA accelerator. `library` is the module `pynvml`."""

    source = "nvml"

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def find(cls, library: Any, uuid: str) -> Nvml | None:
        """The accelerator of this id, None when NVML has no power for it."""
        try:
            library.nvmlInit()
            nvml = cls(library, library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
            nvml.watts()
        except (OSError, library.NVMLError):
            return None
        return nvml

    def watts(self) -> float:
        try:
            return float(self._library.nvmlDeviceGetPowerUsage(self._handle)) / 1e3
        except self._library.NVMLError as error:
            raise OSError(f"NVML does not report the power: {error}") from None


class Ina3221:
    """The rail monitors of a Jetson: millivolts times milliamperes of each rail."""

    source = "ina3221"

    def __init__(self, rails: list[tuple[Path, Path]]) -> None:
        self._rails = rails

    @classmethod
    def find(cls, root: Path = SYSTEM) -> Ina3221 | None:
        """The rail of the whole module if it is measured, else all rails; None when there are no
        monitors."""
        rails: dict[str, tuple[Path, Path]] = {}
        for monitor in sorted((root / "class/hwmon").glob("hwmon*")):
            if _text(monitor / "name") != "ina3221":
                continue
            for voltage in sorted(monitor.glob("in[123]_input")):
                channel = voltage.name[2]
                current = monitor / f"curr{channel}_input"
                if _number(voltage) is not None and _number(current) is not None:
                    label = _text(monitor / f"in{channel}_label") or f"{monitor.name}-{channel}"
                    rails[label] = (voltage, current)
        whole = [rail for label, rail in rails.items() if label in _WHOLE_RAILS]
        return cls(whole[:1] or list(rails.values())) if rails else None

    def watts(self) -> float:
        return (
            sum(
                int(voltage.read_text()) * int(current.read_text())
                for voltage, current in self._rails
            )
            / 1e6
        )


class Rapl:
    """The energy counters of x86 packages and their memory, in microjoules."""

    source = "rapl"

    def __init__(self, zones: list[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._zones = zones
        self._clock = clock
        self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._last = self._read()

    @classmethod
    def find(cls, root: Path = SYSTEM, clock: Callable[[], float] = time.monotonic) -> Rapl | None:
        zones = []
        for zone in sorted((root / "class/powercap").glob("intel-rapl:*")):
            name = _text(zone / "name") or ""
            if re.fullmatch(r"package-\d+|dram", name) and _number(zone / "energy_uj") is not None:
                zones.append(zone)
        return cls(zones, clock) if zones else None

    def watts(self) -> float:
        (before, energies), (now, counters) = self._last, self._read()
        self._last = now, counters
        # A counter starts again at 0 once it is full.
        used = [
            (b - a) % (full + 1)
            for a, b, full in zip(energies, counters, self._ranges, strict=True)
        ]
        return sum(used) / 1e6 / max(now - before, 1e-6)

    def _read(self) -> tuple[float, list[int]]:
        return self._clock(), [int((zone / "energy_uj").read_text()) for zone in self._zones]


def find_sensor(device: str) -> PowerSensor | None:
    """The sensor of this device; None if it has no sensor."""
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if not properties.is_integrated:
            import pynvml

            return Nvml.find(pynvml, str(properties.uuid))
    return Ina3221.find() or Rapl.find()


class PowerMeter:
    """Samples a sensor while other work runs; without a sensor it does nothing. A reading across a
    stop of the process, which takes seconds, is dropped."""

    def __init__(self, sensor: PowerSensor | None, interval_s: float = INTERVAL_S) -> None:
        self._sensor = sensor
        self._interval_s = interval_s
        self._idle: list[float] = []
        self._busy: list[float] = []

    def rest(self, seconds: float) -> None:
        """Sample for `seconds` at rest; returns at once without a sensor."""
        with self._sampling(self._idle) as sampled:
            if sampled:
                time.sleep(seconds)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Sample while the block runs."""
        with self._sampling(self._busy):
            yield

    def profile(self) -> EnergyProfile | None:
        """Mean watts at rest and at work; None without a sensor or a reading."""
        if self._sensor is None or not self._idle or not self._busy:
            return None
        return EnergyProfile(
            statistics.fmean(self._idle), statistics.fmean(self._busy), self._sensor.source
        )

    @contextmanager
    def _sampling(self, into: list[float]) -> Iterator[bool]:
        sensor, ended = self._sensor, threading.Event()
        if sensor is None:
            yield False
            return

        def sample() -> None:
            try:
                sensor.watts()  # drop the counter's value from before this stretch
                read_at = time.monotonic()
                while not ended.wait(self._interval_s):
                    watts = sensor.watts()
                    before = read_at
                    read_at = time.monotonic()
                    if read_at - before < self._interval_s + _LATE_S:
                        into.append(watts)
            except (OSError, ValueError):
                return  # the device gives no more readings; the earlier ones hold

        thread = threading.Thread(target=sample, name="power", daemon=True)
        thread.start()
        try:
            yield True
        finally:
            ended.set()
            thread.join()


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None
