"""Find the replica that had a prompt with the same beginning, since its prefix cache may have that beginning.

No text of a prompt is kept. Its blocks are hashed with a key of this process, each with the
preceding blocks and its client, since no client shares another's cache.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

from edgeshard.domain.ids import DeploymentName

TEXT_BLOCK, TOKEN_BLOCK = 256, 64
"""Characters or tokens of a block; a prompt that is shorter is not remembered."""
MOST_BLOCKS = 128
"""Blocks of one prompt that count."""
MOST_KNOWN = 16_384
"""Beginnings that are remembered; the longest unused is forgotten first."""


class PrefixBook:
    """The replicas that prompts went to, by their beginnings."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, DeploymentName] = OrderedDict()

    def marks(self, name: DeploymentName, client: str, prompt: str | tuple[int, ...]) -> list[bytes]:
        """A mark for each whole block of a prompt and the preceding blocks. Replicas are of one `name`."""
        mark = blake2b(f"{name}\0{client}\0{type(prompt).__name__}".encode(), key=self._key, digest_size=16).digest()
        marks = []
        for block in _blocks(prompt):
            mark = blake2b(mark + block, key=self._key, digest_size=16).digest()
            marks.append(mark)
        return marks

    def holder(self, marks: list[bytes]) -> DeploymentName | None:
        """The replica that had the longest of these beginnings."""
        return next((self._known[mark] for mark in reversed(marks) if mark in self._known), None)

    def went_to(self, marks: list[bytes], deployment: DeploymentName) -> None:
        """Note that a replica gets a prompt with these marks."""
        for mark in marks:
            self._known[mark] = deployment
            self._known.move_to_end(mark)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)


def _blocks(prompt: str | tuple[int, ...]) -> Iterator[bytes]:
    size = TEXT_BLOCK if isinstance(prompt, str) else TOKEN_BLOCK
    for end in range(size, min(len(prompt), size * MOST_BLOCKS) + 1, size):
        block = prompt[end - size : end]
        yield block.encode("utf-8", "surrogatepass") if isinstance(block, str) else array("q", block).tobytes()
