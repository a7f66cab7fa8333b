"""The settings of edgectl after the folder of a site of `edgectl serve` was moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeshard.local.own_site import _is_of_moved_site
from edgeshard.local.user_files import write_client_settings


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def operator_files(folder: Path, authority: bytes) -> Path:
    """The folder with an operator's files of a site, and the site's authority."""
    files = folder / "pki" / "operator-admin"
    files.mkdir(parents=True)
    (files / "ca.pem").write_bytes(authority)
    (folder / "ca.pem").write_bytes(authority)
    return files


def test_settings_follow_a_folder_that_was_moved_or_copied(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert not _is_of_moved_site(tmp_path / "ca.pem"), "there are no settings"
    write_client_settings("127.0.0.1:1", operator_files(first, b"ours"))
    operator_files(second, b"ours")
    assert _is_of_moved_site(second / "ca.pem"), "a copy: both folders are of one site"
    (second / "ca.pem").write_bytes(b"theirs")
    assert not _is_of_moved_site(second / "ca.pem"), "another site, whose settings stay"
    first.rename(tmp_path / "third")
    assert _is_of_moved_site(second / "ca.pem"), "moved: the files that are named are gone"


def test_settings_of_a_join_stay_though_their_files_are_away(tmp_path: Path) -> None:
    write_client_settings("127.0.0.1:1", tmp_path / "unplugged" / "joined")
    (tmp_path / "ca.pem").write_bytes(b"ours")
    assert not _is_of_moved_site(tmp_path / "ca.pem")
