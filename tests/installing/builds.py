"""Second builds of a real folder of wheels and of a real package: the same files, with another
version."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tools.release.archives import CHECKSUMS, checksums, write_ar
from tools.release.wheel_folder import REQUIREMENTS


def make_build(folder: Path, into: Path, version: str) -> None:
    """Write the folder of wheels `into`, with EdgeShard of that version."""
    into.mkdir(parents=True)
    (own,) = folder.glob("edgeshard-*.whl")
    for path in folder.iterdir():
        if path not in (own, folder / REQUIREMENTS, folder / CHECKSUMS):
            os.link(path, into / path.name)
    number = own.name.split("-")[1]
    other = into / own.name.replace(f"edgeshard-{number}-", f"edgeshard-{version}-", 1)
    _rewrite(own, other, number, version)
    digests = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in (own, other)]
    text = (folder / REQUIREMENTS).read_text().replace(digests[0], digests[1])
    text = re.sub(
        rf"^(edgeshard(\[\w+\])?)=={re.escape(number)} ", rf"\1=={version} ", text, flags=re.M
    )
    (into / REQUIREMENTS).write_text(text)
    (into / CHECKSUMS).write_text(checksums(into))


def _rewrite(wheel: Path, other: Path, number: str, version: str) -> None:
    about = f"edgeshard-{number}.dist-info/"
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for item in source.infolist():
            content = source.read(item)
            if item.filename == f"{about}METADATA":
                content = content.replace(
                    f"Version: {number}\n".encode(), f"Version: {version}\n".encode(), 1
                )
            elif item.filename == f"{about}RECORD":
                content = _without_digests(
                    content.decode().replace(about, f"edgeshard-{version}.dist-info/")
                )
            name = item.filename.replace(about, f"edgeshard-{version}.dist-info/", 1)
            target.writestr(name, content)


def _without_digests(record: str) -> bytes:
    """A RECORD that lists the same files; pip takes it without their SHA-256."""
    return "".join(f"{line.split(',')[0]},,\n" for line in record.splitlines()).encode()


def make_package(package: Path, into: Path, version: str) -> None:
    """Write a package of Debian `into`, with the same files and another version."""
    members: list[tuple[str, bytes | Path]] = []
    for name, content in _members_of(package.read_bytes()):
        members.append(
            (name, _with_version(content, version) if name == "control.tar.gz" else content)
        )
    write_ar(into, members, 0)


def _members_of(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """The files of an archive of `ar`, see deb(5)."""
    start = len(b"!<arch>\n")
    while start < len(archive):
        header = archive[start : start + 60]
        size = int(header[48:58])
        yield header[:16].decode().strip().rstrip("/"), archive[start + 60 : start + 60 + size]
        start += 60 + size + size % 2


def _with_version(control: bytes, version: str) -> bytes:
    changed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(control)) as source,
        tarfile.open(fileobj=changed, mode="w:gz") as target,
    ):
        for member in source:
            file = source.extractfile(member)
            content = b"" if file is None else file.read()
            if member.name.removeprefix("./") == "control":
                content = re.sub(
                    rb"^Version: .*$", f"Version: {version}".encode(), content, flags=re.M
                )
                member.size = len(content)
            target.addfile(member, io.BytesIO(content))
    return changed.getvalue()
