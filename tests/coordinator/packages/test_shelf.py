"""Folders of wheels: chosen by platform, Python and accelerator, and refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgeshard_coordinator.packages.shelf import Shelf, WheelTarget

from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError


def lay_out(folder: Path, *wheels: str) -> Path:
    folder.mkdir(parents=True)
    for name in ("install.sh", "requirements.txt", *wheels):
        (folder / name).touch()
    return folder


def test_the_accelerator_then_the_newest_python_chooses(tmp_path: Path) -> None:
    for name in (
        "x86_64-py311-cpu",
        "x86_64-py312-cpu",
        "x86_64-py311-cu130",
        "x86_64-py313-cu130",
        "aarch64-py312-cpu",
        "other",
    ):
        lay_out(tmp_path / name)
    shelf = Shelf(tmp_path)
    cases = [
        (WheelTarget("x86_64", ["3.12", "3.11"]), "x86_64-py312-cpu"),
        (WheelTarget("x86_64", ["3.12", "3.11"], "cuda"), "x86_64-py311-cu130"),
        (WheelTarget("x86_64", ["3.12"], "cuda"), "x86_64-py312-cpu"),
        (WheelTarget("x86_64", ["3.13"]), "x86_64-py313-cu130"),
        (WheelTarget("aarch64", ["3.13", "3.12"], "cuda"), "aarch64-py312-cpu"),
    ]
    assert [shelf.folder_for(machine).name for machine, _ in cases] == [name for _, name in cases]
    with pytest.raises(FailedPreconditionError) as refusal:
        shelf.folder_for(WheelTarget("aarch64", ["3.13"]))
    said = refusal.value.message
    assert (
        "aarch64 with Python 3.12, x86_64 with Python 3.11 and 3.12 and 3.13, "
        "but this machine is aarch64 with Python 3.13" in said
    )


def test_a_folder_without_such_a_name_is_what_its_wheels_say(tmp_path: Path) -> None:
    wheels = [
        "numpy-2.4.0-cp312-cp312-manylinux_2_28_aarch64.whl",
        "torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_aarch64.whl",
    ]
    (folder,) = Shelf(lay_out(tmp_path / "wheels", *wheels)).folders
    assert (folder.name, folder.python) == ("aarch64-py312-cpu", "3.12")


@pytest.mark.parametrize("made", ["nothing", "no requirements", "no platform"])
def test_what_is_no_folder_of_wheels_is_refused_by_the_option(tmp_path: Path, made: str) -> None:
    folder = tmp_path / "wheels"
    if made == "no requirements":
        lay_out(folder, "a-1-py3-none-any.whl")
        (folder / "requirements.txt").unlink()
    elif made == "no platform":
        lay_out(folder, "a-1-py3-none-any.whl")
    with pytest.raises(InvalidArgumentError) as refusal:
        Shelf(folder)
    assert refusal.value.field == "wheels"
