"""Watts from the files that kernels show, and from a library that stands in for NVML."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from edgeshard_agent.measuring import compute, power
from edgeshard_agent.measuring.compute import Profiler
from edgeshard_agent.measuring.power import Ina3221, Nvml, PowerMeter, Rapl
from edgeshard_agent.measuring.rotation import LayerForm

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.profile import EnergyProfile
from edgeshard.profiles.grid import Grid, Repeats
from edgeshard.profiles.report import profile_lines

pytestmark = pytest.mark.timing


def write(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")


def test_a_jetson_that_measures_its_input_is_that_rail_alone(tmp_path: Path) -> None:
    write(tmp_path / "class/hwmon/hwmon0", name="tmp451", in1_input=5000, curr1_input=9000)
    monitor = tmp_path / "class/hwmon/hwmon1"
    write(monitor, name="ina3221", in1_label="VDD_IN", in1_input=5000, curr1_input=1500)
    write(monitor, in2_label="VDD_CPU_GPU_CV", in2_input=5000, curr2_input=800)
    write(monitor, in7_label="sum of shunt voltages", in7_input=12)
    sensor = Ina3221.find(tmp_path)
    assert sensor is not None and sensor.watts() == pytest.approx(7.5)
    write(monitor, curr1_input=3000)
    assert sensor.watts() == pytest.approx(15.0)


def test_a_jetson_with_rails_only_is_their_sum(tmp_path: Path) -> None:
    first, second = tmp_path / "class/hwmon/hwmon1", tmp_path / "class/hwmon/hwmon2"
    write(first, name="ina3221", in1_label="VDD_GPU_SOC", in1_input=20000, curr1_input=400)
    write(first, in2_label="VDD_CPU_CV", in2_input=20000, curr2_input=100)
    write(
        second,
        name="ina3221",
        in1_label="VIN_SYS_5V0",
        in1_input=5000,
        curr1_input=1000,
        in2_input="",
    )
    sensor = Ina3221.find(tmp_path)
    assert sensor is not None and sensor.watts() == pytest.approx(8 + 2 + 5)


def test_a_processors_counters_are_power_over_time_and_survive_their_wrap(tmp_path: Path) -> None:
    zones = tmp_path / "class/powercap"
    for zone, name, energy in [
        ("intel-rapl:0", "package-0", 1_000_000),
        ("intel-rapl:0:0", "core", 500_000),  # part of the package
        ("intel-rapl:0:1", "dram", 0),
        ("intel-rapl:1", "package-1", 9_999_999),
    ]:
        write(zones / zone, name=name, energy_uj=energy, max_energy_range_uj=9_999_999)
    now = [10.0]
    sensor = Rapl.find(tmp_path, lambda: now[0])
    assert sensor is not None
    now[0] = 12.0
    write(zones / "intel-rapl:0", energy_uj=7_000_000)
    write(zones / "intel-rapl:0:1", energy_uj=2_000_000)
    write(zones / "intel-rapl:1", energy_uj=3_999_999)  # once round: 4 J
    assert sensor.watts() == pytest.approx((6 + 2 + 4) / 2)
    now[0] = 13.0
    assert sensor.watts() == 0


def test_a_machine_that_tells_nothing_has_no_sensor(tmp_path: Path) -> None:
    assert Ina3221.find(tmp_path) is None and Rapl.find(tmp_path) is None
    write(tmp_path / "class/powercap/intel-rapl:0", name="package-0", max_energy_range_uj=1)
    assert Rapl.find(tmp_path) is None, "a counter that only root may read is none"


class FakeNvml:
    """As much of pynvml as is used."""

    class NVMLError(Exception):
        pass

    def __init__(self, milliwatts: int | None) -> None:
        self.milliwatts = milliwatts

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1234":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if self.milliwatts is None:
            raise self.NVMLError("not supported")
        return self.milliwatts


def test_an_accelerator_is_asked_by_its_id() -> None:
    library = FakeNvml(71_500)
    sensor = Nvml.find(library, "1234")
    assert sensor is not None and (sensor.watts(), sensor.source) == (71.5, "nvml")
    library.milliwatts = None
    with pytest.raises(OSError, match="not supported"):
        sensor.watts()
    assert Nvml.find(library, "1234") is None and Nvml.find(FakeNvml(1), "9") is None


class Load:
    """A sensor of a device that draws 5 W, and 20 W while `busy` is set. Fails after `limit`
    readings."""

    source = "rapl"

    def __init__(self, limit: int = 10**6) -> None:
        self.busy = threading.Event()
        self.readings = 0
        self._limit = limit

    def watts(self) -> float:
        self.readings += 1
        if self.readings > self._limit:
            raise OSError("gone")
        return 20.0 if self.busy.is_set() else 5.0


def wait_for(sensor: Load, readings: int) -> None:
    ends = time.monotonic() + 60
    while sensor.readings < readings:
        assert time.monotonic() < ends
        time.sleep(0.001)


@pytest.fixture
def sensor(monkeypatch: pytest.MonkeyPatch) -> Load:
    """A sensor for which a rest lasts as long as a few readings, however late the reading thread
    begins."""
    sensor = Load()
    rest = SimpleNamespace(
        sleep=lambda _: wait_for(sensor, sensor.readings + 5), monotonic=time.monotonic
    )
    monkeypatch.setattr(power, "time", rest)
    return sensor


def test_rest_and_work_are_told_apart(sensor: Load) -> None:
    meter = PowerMeter(sensor, interval_s=0.001)
    meter.rest(0.05)
    sensor.busy.set()
    with meter.busy():
        wait_for(sensor, sensor.readings + 5)
    assert meter.profile() == EnergyProfile(5.0, 20.0, "rapl")
    assert "power" not in {thread.name for thread in threading.enumerate()}


def test_a_sensor_that_goes_away_harms_nothing() -> None:
    meter = PowerMeter(Load(limit=1), interval_s=0.001)
    meter.rest(0.01)
    with meter.busy():
        pass
    assert meter.profile() is None


def test_without_a_sensor_no_time_is_spent_and_nothing_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited for nothing"))
    meter = PowerMeter(None)
    meter.rest(2.0)
    with meter.busy():
        pass
    assert meter.profile() is None


def test_a_profile_tells_the_power_of_its_measurement(
    tiny_config: dict[str, Any], sensor: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(what: str, done: int, total: int) -> None:
        if what.startswith("block"):  # the layers are measured while the sensor is read
            wait_for(sensor, sensor.readings + 2)

    monkeypatch.setattr(compute, "find_sensor", lambda device: sensor)
    monkeypatch.setattr(compute, "PowerMeter", lambda found: PowerMeter(found, interval_s=0.001))
    small = Grid((1, 40), (0, 8), (1, 2), (40,), Repeats(1, 1, 1, 0.0))
    form = LayerForm(tiny_config, DType.FLOAT32, "cpu")
    profile = Profiler(form, 1, small, cache=1 << 10, progress=told).run()
    assert profile.energy == EnergyProfile(5.0, 5.0, "rapl")
    assert any("5.0 W while measuring (rapl)" in line for line in profile_lines(profile))
