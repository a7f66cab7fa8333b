"""Archives of backups: written ones are read again, and foreign ones are refused before a file is
made."""

from __future__ import annotations

import io
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from edgeshard.domain.errors import (
    AlreadyExistsError,
    DataLossError,
    EdgeShardError,
    InvalidArgumentError,
)
from edgeshard.storage import archive
from edgeshard.storage.archive import extract, read_archive, write_archive


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """An archive of two files."""
    (tmp_path / "one").write_bytes(b"1" * 5000)
    (tmp_path / "two").write_bytes(b"")
    path = tmp_path / "made.tar"
    write_archive(
        path, {"format": 1}, {"state/one": tmp_path / "one", "site/a/two": tmp_path / "two"}
    )
    return path


def test_files_and_what_is_said_about_them_are_read_again(made: Path, tmp_path: Path) -> None:
    assert made.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "made.tar"}
    found = read_archive(made)
    assert found.about == {"format": 1} and set(found.files) == {"state/one", "site/a/two"}
    extract(found, lambda name: tmp_path / "out" / name)
    assert (tmp_path / "out/state/one").read_bytes() == b"1" * 5000
    assert (tmp_path / "out/site/a/two").stat().st_mode & 0o777 == 0o600


def test_an_existing_file_is_replaced_by_force_only(made: Path, tmp_path: Path) -> None:
    before = made.read_bytes()
    with pytest.raises(AlreadyExistsError, match="--force"):
        write_archive(made, {}, {"one": tmp_path / "one"})
    assert made.read_bytes() == before
    write_archive(made, {}, {"one": tmp_path / "one"}, force=True)
    assert set(read_archive(made).files) == {"one"}


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "wrong.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(InvalidArgumentError, match=r"wrong\.sqlite"):
        write_archive(tmp_path / "made.tar", {}, {"wrong.sqlite": tmp_path / "wrong.sqlite"})
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.sqlite"]


def test_a_database_is_whole_while_another_writes_to_it(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "live.sqlite", isolation_level=None)) as live:
        live.execute("PRAGMA journal_mode=WAL")
        live.execute("CREATE TABLE rows (number INTEGER)")
        live.execute("INSERT INTO rows VALUES (1)")
        live.execute("BEGIN IMMEDIATE")
        live.execute("INSERT INTO rows VALUES (2)")
        write_archive(tmp_path / "made.tar", {}, {"live.sqlite": tmp_path / "live.sqlite"})
        live.execute("COMMIT")
    extract(read_archive(tmp_path / "made.tar"), lambda name: tmp_path / "out" / name)
    with closing(sqlite3.connect(tmp_path / "out/live.sqlite")) as copy:
        assert copy.execute("SELECT number FROM rows").fetchall() == [(1,)]


def test_each_changed_byte_of_content_is_found(made: Path) -> None:
    content = made.read_bytes()
    where = content.index(b"1" * 5000)
    for offset in (
        where,
        where + 4999,
        content.index(b'"sha256": "') + 12,
        content.index(b'"format"') + 2,
    ):
        made.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        if b'"gormat"' in made.read_bytes() or b'"fnrmat"' in made.read_bytes():
            assert read_archive(made).about != {"format": 1}  # its reader refuses unknown formats
            continue
        with pytest.raises(EdgeShardError):
            read_archive(made)


def test_an_archive_that_was_cut_is_refused_at_any_length(made: Path) -> None:
    content = made.read_bytes()
    end = content.index(b'"files"') + 100
    for length in (0, 100, 512, 1000, 5600, end):
        made.write_bytes(content[:length])
        with pytest.raises((InvalidArgumentError, DataLossError)) as refused:
            read_archive(made)
        assert refused.value.field == "file"


def foreign(
    name: str = "state/x", type: bytes = tarfile.REGTYPE, link: str = ""
) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = type, link
    return member


@pytest.mark.parametrize(
    "member",
    [
        foreign("/etc/passwd"),
        foreign("../x"),
        foreign("state/../../x"),
        foreign("state/./x"),
        foreign("state//x"),
        foreign("state\\x"),
        foreign("state/x y"),
        foreign("a" * 101),
        foreign(type=tarfile.SYMTYPE, link="/etc/passwd"),
        foreign(type=tarfile.LNKTYPE, link="state/y"),
        foreign(type=tarfile.DIRTYPE),
        foreign(type=tarfile.FIFOTYPE),
        foreign(type=tarfile.CHRTYPE),
    ],
    ids=lambda member: f"{member.name[:20]}-{member.type.decode()}",
)
def test_names_and_kinds_that_no_backup_has_are_refused(
    member: tarfile.TarInfo, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "foreign.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(member)
    with pytest.raises(InvalidArgumentError) as refused:
        read_archive(tmp_path / "foreign.tar")
    assert refused.value.reason == "NO_BACKUP"


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "foreign.tar", "w") as tar:
        tar.addfile(foreign())
        tar.addfile(foreign())
    with pytest.raises(InvalidArgumentError):
        read_archive(tmp_path / "foreign.tar")


def test_sizes_are_bounded_before_content_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 1000)
    (tmp_path / "large").write_bytes(b"x" * 1001)
    with pytest.raises(InvalidArgumentError, match="at most"):
        write_archive(tmp_path / "made.tar", {}, {"large": tmp_path / "large"})
    with tarfile.open(tmp_path / "foreign.tar", "w") as tar:
        member = foreign()
        member.size = 1001
        tar.addfile(member, io.BytesIO(b"x" * 1001))
    with pytest.raises(InvalidArgumentError, match="at most"):
        read_archive(tmp_path / "foreign.tar")


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: path.write_bytes(b"{}"),
    ],
    ids=["absent", "directory", "text"],
)
def test_what_is_no_archive_is_a_typed_error(change: Callable[[Path], object], made: Path) -> None:
    change(made)
    with pytest.raises(InvalidArgumentError) as refused:
        read_archive(made)
    assert refused.value.field == "file"


def test_an_archive_that_changes_between_the_checks_and_the_writing_is_refused(
    made: Path, tmp_path: Path
) -> None:
    found = read_archive(made)
    content = made.read_bytes()
    made.write_bytes(content.replace(b"1" * 5000, b"2" * 5000))
    with pytest.raises(DataLossError):
        extract(found, lambda name: tmp_path / "out" / name)
