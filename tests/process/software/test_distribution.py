"""How an installation is recognised, and the commands that are named for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgeshard.domain.errors import FailedPreconditionError
from edgeshard.process.distribution import Managed, Scripted, distribution_of, program_words


def test_a_version_of_the_script_knows_its_prefix(tmp_path: Path) -> None:
    environment = tmp_path / "versions" / "0.1.0-abc"
    environment.mkdir(parents=True)
    (tmp_path / ".edgeshard-prefix").touch()
    found = distribution_of(environment, environment / "lib" / "edgeshard")
    assert found == Scripted(tmp_path, environment)
    with pytest.raises(FailedPreconditionError, match=r"install\.sh is missing"):
        found.check()
    (environment / "install.sh").touch()
    found.check()


@pytest.mark.parametrize("name", ["edgeshard", "edgeshard-cuda"])
def test_a_package_is_for_apt(tmp_path: Path, name: str) -> None:
    dpkg = tmp_path / "dpkg"
    dpkg.mkdir()
    (dpkg / f"{name}.list").touch()
    found = distribution_of(
        tmp_path / "deb", tmp_path / "code" / "edgeshard", tmp_path / "deb", dpkg
    )
    assert isinstance(found, Managed)
    assert found.remove == f"sudo apt-get remove {name}"
    assert found.purge == f"sudo apt-get purge {name}"
    assert found.upgrade.startswith(f"sudo apt-get install ./{name}_")
    assert f"Run: {found.purge}" in found.error(found.purge).message


def test_an_image_is_for_the_containers_program(tmp_path: Path) -> None:
    found = distribution_of(
        tmp_path / "deb", tmp_path / "code" / "edgeshard", tmp_path / "deb", tmp_path / "none"
    )
    assert isinstance(found, Managed) and "image" in found.what


def test_a_checkout_is_for_git_and_make(tmp_path: Path) -> None:
    checkout = tmp_path / "my checkout"
    (checkout / "deploy").mkdir(parents=True)
    (checkout / "deploy" / "install.sh").touch()
    (checkout / "pyproject.toml").touch()
    found = distribution_of(checkout / ".venv", checkout / "edgeshard")
    assert isinstance(found, Managed)
    assert found.upgrade == f"git -C '{checkout}' pull && make -C '{checkout}' setup"
    assert found.remove == f"rm -rf '{checkout}/.venv'"
    elsewhere = distribution_of(tmp_path / "env", checkout / "edgeshard")
    assert isinstance(elsewhere, Managed)
    assert elsewhere.remove == f"{tmp_path}/env/bin/python -m pip uninstall edgeshard"


def test_any_other_environment_is_for_pip(tmp_path: Path) -> None:
    found = distribution_of(tmp_path / "env", tmp_path / "env" / "lib" / "edgeshard")
    assert isinstance(found, Managed)
    assert found.upgrade.startswith(f"{tmp_path}/env/bin/python -m pip install")
    assert ".local/state/edgeshard" in found.purge


def test_a_program_is_named_by_its_path_unless_the_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "of mine" / "versions" / "0.1.0"
    program = environment / "bin" / "edgeshard-agent"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    current = tmp_path / "of mine" / "current"
    current.symlink_to(environment)
    (tmp_path / "of mine" / ".edgeshard-prefix").touch()
    monkeypatch.setattr(sys, "prefix", str(environment))
    assert program_words("edgeshard-agent") == f"'{current}/bin/edgeshard-agent'"
    monkeypatch.setenv("PATH", f"{current}/bin")
    assert program_words("edgeshard-agent") == "edgeshard-agent"
    assert program_words("absent") == "absent"
