"""The files of a model directory that are the model's own.

A model directory may come from anyone, and every node can read back the files that are added from
it. So a file counts only if it lies in the directory itself. A link may lead to another place in
there; in a snapshot of the Hugging Face cache (`models--X/snapshots/REVISION`) also to a file of
the same model's `blobs`. Devices and pipes are no files.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edgeshard.domain.errors import NotFoundError
from edgeshard.storage.forms import malformed


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A directory with a model. `root` has no links in its path; `blobs` is the cache's directory
    beside snapshots."""

    root: Path
    blobs: Path | None

    @classmethod
    def at(cls, path: Path) -> ModelDirectory:
        """The directory at `path`. Raises NotFoundError where there is none."""
        try:
            root = path.resolve(strict=True)
        except (OSError, RuntimeError):  # a link that leads to itself
            root = None
        if root is None or not root.is_dir():
            raise NotFoundError(f"model directory {path} does not exist", field="directory")
        return cls(root, root.parent.parent / "blobs" if root.parent.name == "snapshots" else None)

    def has(self, name: str) -> bool:
        """Whether there is anything of this name, even if `file` refuses it."""
        return os.path.lexists(self.root / name)

    def file(self, name: str) -> Path:
        """The path of the file of this name, without links; `open_regular` opens it.

        Raises NotFoundError where there is none, InvalidArgumentError where it leads out of the
        model.
        """
        path = self.root / name
        try:
            real = path.resolve(strict=True)
        except FileNotFoundError:
            missing = (
                "leads to a file that is missing"
                if path.is_symlink()
                else f"is missing from {self.root}"
            )
            raise NotFoundError(f"{name} {missing}", field=name) from None
        except (OSError, RuntimeError):
            raise malformed(name, "is a link that leads nowhere") from None
        if not real.is_relative_to(self.root) and (self.blobs is None or real.parent != self.blobs):
            # Not where it leads: the message may go into a log that others read.
            raise malformed(
                name,
                "is a link out of the model's directory; put the file itself there (links into the "
                "blobs of the same "
                "Hugging Face cache entry are followed)",
                reason="LINK_OUT_OF_MODEL",
            )
        return real


def open_regular(path: Path, name: str = "") -> BinaryIO:
    """Open a file that `ModelDirectory` found; messages call it `name`.

    A link that has taken its place since, a device and a pipe are refused without waiting for them.
    Raises NotFoundError or InvalidArgumentError.
    """
    name = name or path.name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise NotFoundError(f"{name} is missing from {path.parent}", field=name) from None
    except OSError as error:
        raise malformed(
            name, f"cannot be read: {error.strerror}", reason="UNREADABLE_FILE"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise malformed(name, "is not a regular file", reason="NOT_A_FILE")
    return os.fdopen(descriptor, "rb")
