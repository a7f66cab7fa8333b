"""Which files of a model directory are the model's own, and what the small ones must look like.

A model directory may come from anyone, and what is added from it can be read back by every node. So a file counts only
if it lies in the directory itself. A link may lead to another place in there; in a snapshot of the Hugging Face cache
(`models--X/snapshots/REVISION`) also to a file of the same model's `blobs`. Devices and pipes are no files.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edgeshard.domain.errors import InvalidArgumentError, NotFoundError


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A directory with a model; `root` has no links in its path. `blobs` are the cache's beside its snapshots."""

    root: Path
    blobs: Path | None

    @classmethod
    def at(cls, path: Path) -> ModelDirectory:
        """Raises NotFoundError where there is no directory."""
        try:
            root = path.resolve(strict=True)
        except (OSError, RuntimeError):  # a link that leads to itself
            root = None
        if root is None or not root.is_dir():
            raise NotFoundError(f"model directory {path} does not exist", field="directory")
        return cls(root, root.parent.parent / "blobs" if root.parent.name == "snapshots" else None)

    def has(self, name: str) -> bool:
        """Whether there is anything of this name, also what `file` refuses."""
        return os.path.lexists(self.root / name)

    def file(self, name: str) -> Path:
        """Where the file of this name lies, without links in its path; `open_regular` opens it.

        Raises NotFoundError where there is none, InvalidArgumentError where it leads out of the model.
        """
        path = self.root / name
        try:
            real = path.resolve(strict=True)
        except FileNotFoundError:
            missing = "leads to a file that is missing" if path.is_symlink() else f"is missing from {self.root}"
            raise NotFoundError(f"{name} {missing}", field=name) from None
        except (OSError, RuntimeError):
            raise _refused(name, "is a link that leads nowhere") from None
        if not real.is_relative_to(self.root) and (self.blobs is None or real.parent != self.blobs):
            # Not where it leads: the message may go into a log that others read.
            raise _refused(
                name,
                "is a link out of the model's directory; put the file itself there (links into the blobs of the same "
                "Hugging Face cache entry are followed)",
                "LINK_OUT_OF_MODEL",
            )
        return real


def open_regular(path: Path, name: str = "") -> BinaryIO:
    """Open a file that `ModelDirectory` found, which messages call `name`.

    A link that has taken its place since, a device and a pipe are refused and never waited for. Raises NotFoundError or
    InvalidArgumentError.
    """
    name = name or path.name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise NotFoundError(f"{name} is missing from {path.parent}", field=name) from None
    except OSError as error:
        raise _refused(name, f"cannot be read: {error.strerror}", "UNREADABLE_FILE") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(name, "is no regular file", "NOT_A_FILE")
    return os.fdopen(descriptor, "rb")


def _refused(name: str, what: str, reason: str = "MALFORMED_CHECKPOINT") -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} {what}", field=name, reason=reason)
