"""The GGUF file that a quantisation's name means among the files of a repository or a folder. Pure.

The rule is that of llama.cpp's option `-hf OWNER/NAME:TAG`, so that both programs use the same
file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from edgeshard.domain.errors import NotFoundError

DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
_SIDECARS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-")
"""Parts of the names of files that are no model: projectors for pictures, statistics, draft
models."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_TAG = re.compile(r"[-.]((?:UD-)?[A-Z0-9_]+)$", re.IGNORECASE)
_MAX_NAMES = 40


def is_model_file(path: str) -> bool:
    """Whether a GGUF file is a model by its name: no projector, statistics or draft model."""
    name = path.rpartition("/")[2].lower()
    return name.endswith(".gguf") and not any(sidecar in name for sidecar in _SIDECARS)


def first_files(paths: Iterable[str]) -> list[str]:
    """The files that each begin a model, in their order: no later parts, no sidecars."""
    models = [path for path in paths if is_model_file(path)]
    return [path for path in models if (part := _PART.fullmatch(path)) is None or int(part[2]) == 1]


def select_gguf(paths: Sequence[str], tag: str, place: str) -> tuple[str, ...]:
    """The files of one model: a single one, or all of its parts by number.

    `tag` is a quantisation such as `Q4_K_M`, in any case; "" means the first of `DEFAULT_TAGS` that
    is there, then the first model. `place` is the name of the repository or folder, for messages.
    Raises NotFoundError, which lists the quantisations that are there.
    """
    models = first_files(paths)
    selected = None
    for candidate in (tag,) if tag else DEFAULT_TAGS:
        selected = selected or _matching(models, candidate)
    if selected is None and not tag and models:
        selected = models[0]
    if selected is None:
        raise NotFoundError(
            _nothing(models, tag, place), field="model", reason="UNKNOWN_QUANTISATION"
        )
    return _with_parts(paths, selected, place)


def tag_of(path: str) -> str:
    """The quantisation in a file's name, such as `Q4_K_M`; "" if it has none."""
    part = _PART.fullmatch(path)
    stem = path[: -len(".gguf")] if part is None else part[1]
    tag = _TAG.search(stem)
    return "" if tag is None else tag[1].upper()


def _matching(models: Sequence[str], tag: str) -> str | None:
    """The first file with the tag as a whole word (F16 is no BF16), then the first with it at
    all."""
    anywhere = re.escape(tag) + "[.-]"
    for pattern in (f"(?<![A-Za-z0-9]){anywhere}", anywhere):
        matching = [path for path in models if re.search(pattern, path, re.IGNORECASE)]
        if matching:
            return matching[0]
    return None


def _with_parts(paths: Sequence[str], first: str, place: str) -> tuple[str, ...]:
    part = _PART.fullmatch(first)
    if part is None:
        return (first,)
    count = int(part[3])
    parts = {
        int(other[2]): path
        for path in paths
        if (other := _PART.fullmatch(path)) and other[1] == part[1]
    }
    missing = [number for number in range(1, count + 1) if number not in parts]
    if missing:
        what = f"{place} has {first} without part {missing[0]} of {count}; use another quantisation"
        raise NotFoundError(what, field="model", reason="MISSING_PART")
    return tuple(parts[number] for number in range(1, count + 1))


def _nothing(models: Sequence[str], tag: str, place: str) -> str:
    if not models:
        return f"{place} has no GGUF file of a model"
    names = [tag_of(path) or path for path in models]
    listed = ", ".join(dict.fromkeys(names[:_MAX_NAMES]))
    return f"{place} has no {tag[:40]}; it has {listed[:1000]}"
