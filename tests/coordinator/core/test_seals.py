"""A log whose lines were written and sealed in order is sound; whatever is done to it afterwards is
found."""

from __future__ import annotations

import pytest
from edgeshard_coordinator.core.values.seals import (
    LINES_PER_SEAL,
    Chain,
    SealKey,
    check_files,
    seal_of,
)
from hypothesis import given
from hypothesis import strategies as st

KEY = SealKey(b"k" * 32)
Files = list[tuple[str, bytes]]


def written(*files: int, key: SealKey = KEY, log: str = "a") -> tuple[Files, str]:
    """Files with these numbers of lines, as a writer leaves them, and the last seal."""
    chain, found = Chain(key, log, ""), Files()
    for number, count in enumerate(files):
        lines: list[bytes] = []
        for index in range(count):
            lines.append(f'{{"time": "{number}.{index}"}}\n'.encode())
            chain.take(lines[-1])
            if chain.unsealed == LINES_PER_SEAL:
                lines.append(chain.sealed())
        if chain.unsealed:
            lines.append(chain.sealed())
        found.append((f"a.{len(files) - number}.jsonl", b"".join(lines)))
    return found, chain.head


def faults(
    files: Files, head: str | None, key: SealKey = KEY, *, is_whole: bool = True
) -> list[tuple[str, int]]:
    checks = check_files(key, "a", files, head, is_whole=is_whole)
    return [(check.file, check.broken_at) for check in checks if check.broken_at]


def changed(files: Files, index: int, change: object) -> Files:
    """With the lines of one file changed by a function."""
    name, content = files[index]
    lines = content.splitlines(keepends=True)
    assert callable(change)
    change(lines)
    return [*files[:index], (name, b"".join(lines)), *files[index + 1 :]]


@given(st.lists(st.integers(1, 250), min_size=1, max_size=4))
def test_what_nobody_touched_is_sound(counts: list[int]) -> None:
    files, head = written(*counts)
    assert faults(files, head) == []
    for (_, content), check in zip(
        files, check_files(KEY, "a", files, head, is_whole=True), strict=True
    ):
        assert check.sealed == check.lines == len(content.splitlines())
    if len(files) > 1:
        assert faults(files[1:], head, is_whole=False) == [], "the oldest is given up for its age"


@given(st.lists(st.integers(1, 250), min_size=1, max_size=3), st.data())
def test_a_line_that_is_removed_or_changed_is_found_where_it_was(
    counts: list[int], data: st.DataObject
) -> None:
    files, head = written(*counts)
    index = data.draw(st.integers(0, len(files) - 1))
    lines = files[index][1].splitlines(keepends=True)
    at = data.draw(
        st.sampled_from([number for number, line in enumerate(lines) if seal_of(line) is None])
    )

    def change(lines: list[bytes]) -> None:
        match data.draw(st.sampled_from(["removed", "changed", "added", "moved"])):
            case "removed":
                del lines[at]
            case "changed":
                lines[at] = lines[at].replace(b"time", b"item")
            case "added":
                lines.insert(at, b'{"time": "x"}\n')
            case "moved":
                lines[at] = lines[at][:-1] + b" \n"

    (found,) = faults(changed(files, index, change), head)
    begin = at - at % (LINES_PER_SEAL + 1)
    assert found == (files[index][0], begin + 1)


@given(st.integers(2, 4), st.data())
def test_a_file_that_is_missing_between_others_is_found(count: int, data: st.DataObject) -> None:
    files, head = written(*[30] * count)
    index = data.draw(st.integers(0, count - 1))
    left = files[:index] + files[index + 1 :]
    assert faults(left, head) != []
    swapped = [
        (name, files[index - 1][1] if name == files[index][0] else content)
        for name, content in files
    ]
    assert faults(swapped, head) != []


@pytest.mark.parametrize("cut", [1, 2, 50, 102])
def test_an_end_that_was_cut_off_is_found_while_the_writer_runs(cut: int) -> None:
    files, head = written(150)
    assert faults(changed(files, 0, lambda lines: lines.__delitem__(slice(-cut, None))), head) != []


def test_seals_can_be_neither_made_nor_left_out_without_the_key() -> None:
    files, head = written(150, 150)
    forged, _ = written(150, 150, key=SealKey(b"x" * 32))
    assert faults(forged, head)[0][0] == files[0][0]
    assert faults(written(150, 150, log="b")[0], head) != [], "another log's files"

    def without(lines: list[bytes]) -> None:
        lines[:] = [line for line in lines if seal_of(line) is None]

    assert faults(changed(files, 0, without), head) != []
    assert faults(changed(files, 1, without), head) != []


def test_lines_from_before_there_were_seals_are_no_fault() -> None:
    old = ("a.3.jsonl", b'{"time": "old"}\n' * 5)
    files, head = written(20, 20)
    assert faults([old, *files], head) == []
    name, content = files[0]
    chain = Chain(KEY, "a", "", content := b'{"time": "old"}\n' * 5)
    mixed = content + chain.sealed()
    assert faults([(name, mixed)], chain.head) == []


def test_a_seal_that_was_cut_off_is_a_line_like_others() -> None:
    chain = Chain(KEY, "a", "")
    chain.take(b'{"time": "1"}\n')
    content = b'{"time": "1"}\n' + chain.sealed()[:40] + b"\n"
    resumed = Chain(KEY, "a", "", content)
    content += resumed.sealed()
    assert faults([("a.jsonl", content)], resumed.head) == []
