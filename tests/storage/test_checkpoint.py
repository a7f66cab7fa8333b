"""Reading checkpoints: accepted ones are right, and everything else is refused by name."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load_file, save, save_file

from edgeshard.domain.errors import (
    DataLossError,
    EdgeShardError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedModelError,
)
from edgeshard.storage.checkpoint import (
    HEADER_LIMIT_BYTES,
    Checkpoint,
    StoredTensor,
    blob_locations,
    build_manifest,
    open_checkpoint,
    read_header,
)
from edgeshard.storage.locations import read_chunks

MakeCheckpoint = Callable[..., Path]
SAMPLE = save(
    {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b.weight": np.arange(5, dtype=np.float16),
        "empty": np.zeros((0, 4), dtype=np.float32),
    },
    metadata={"format": "pt"},
)


def raw(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(
    begin: int, end: int, dtype: str = "F32", shape: list[Any] | None = None
) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": shape if shape is not None else [(end - begin) // 4],
        "data_offsets": [begin, end],
    }


def write(directory: Path, data: bytes) -> Path:
    path = directory / "model.safetensors"
    path.write_bytes(data)
    return path


def bytes_of(stored: StoredTensor) -> bytes:
    return stored.file.read_bytes()[stored.offset : stored.offset + stored.size]


def test_a_checkpoint_and_its_manifest_give_the_bytes_safetensors_gives(
    make_checkpoint: MakeCheckpoint,
) -> None:
    directory = make_checkpoint()
    expected = load_file(directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    steps: list[tuple[int, int]] = []
    manifest = build_manifest("tiny", checkpoint, lambda done, total: steps.append((done, total)))

    assert {t.name: (t.shape, t.sha256) for t in manifest.tensors} == {
        name: (array.shape, hashlib.sha256(array.tobytes()).hexdigest())
        for name, array in expected.items()
    }
    assert [file.name for file in manifest.files] == ["tokenizer.json", "generation_config.json"]
    assert manifest.architecture == "llama"
    assert steps[-1] == (manifest.stored_bytes, manifest.stored_bytes)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    for digest, location in blob_locations(checkpoint, manifest).items():
        data = b"".join(read_chunks(location, "blob", 100))
        assert hashlib.sha256(data).hexdigest() == digest
        assert b"".join(read_chunks(location, "blob", 7, start=5)) == data[5:]


def test_a_sharded_checkpoint_has_the_same_identity(make_checkpoint: MakeCheckpoint) -> None:
    single = build_manifest("tiny", open_checkpoint(make_checkpoint("single")))
    sharded = build_manifest("other", open_checkpoint(make_checkpoint("sharded", shards=3)))
    assert single.digest() == sharded.digest()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_mutated_file_is_refused_or_read_right(data: st.DataObject) -> None:
    content = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(
            st.sampled_from(list(b'{}[]":,0123456789eEF.-\\u\x00\xff')) | st.integers(0, 255)
        )
    content = content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))]
    content += data.draw(st.just(b"") | st.binary(max_size=4))
    check_reading(bytes(content))


@settings(max_examples=200, deadline=None)
@given(
    entries=st.dictionaries(
        st.text(max_size=4) | st.sampled_from(["a", "__metadata__"]),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(
                    ["F32", "F16", "BF16", "I64", "BOOL", "F4", "F99", 3, None]
                ),
                "shape": st.lists(
                    st.sampled_from([0, 1, 2, 3, -1, 2**63, 2**70, True, "2", 1.0]), max_size=3
                ),
                "data_offsets": st.lists(
                    st.sampled_from([0, 4, 8, 12, 24, -4, 2**64, False, None]), max_size=3
                ),
            }
        )
        | st.none()
        | st.lists(st.integers(), max_size=2),
        max_size=3,
    ),
    data_bytes=st.sampled_from([0, 4, 8, 24]),
)
def test_a_header_of_hostile_values_is_refused_or_read_right(
    entries: dict[str, Any], data_bytes: int
) -> None:
    check_reading(raw(entries, bytes(range(data_bytes))))


def check_reading(content: bytes) -> None:
    """Nothing but a typed error, or ranges inside the file that do not overlap and are what
    safetensors reads."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), content)
        try:
            tensors = read_header(path)
        except EdgeShardError as error:
            assert error.field and error.message
            return
        end = 0
        for stored in tensors:
            assert stored.offset > 0 and stored.offset >= end
            end = stored.offset + stored.size
            assert end <= len(content)
        try:
            oracle = deserialize(content)  # type: ignore[no-untyped-call]
        except SafetensorError:
            return
        assert {name: (v["dtype"], tuple(v["shape"]), bytes(v["data"])) for name, v in oracle} == {
            t.name: (t.stored_dtype, t.shape, bytes_of(t)) for t in tensors
        }


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"\x08\x00\x00", DataLossError, "header"),
        (struct.pack("<Q", HEADER_LIMIT_BYTES + 1) + b"{}", InvalidArgumentError, "at most"),
        (struct.pack("<Q", 1000) + b"{}", DataLossError, "header"),
        (raw(b"[]", b""), InvalidArgumentError, "JSON object"),
        (raw(b'{"a": ', b""), InvalidArgumentError, "JSON"),
        (raw(b"{" * 20000, b""), InvalidArgumentError, "JSON"),
        (raw(b'{"a":' * 20000, b""), InvalidArgumentError, "JSON"),
        (raw(b'{"\xff": 1}', b""), InvalidArgumentError, "UTF-8"),
        (raw({"w": tensor(0, 8)}, b"1234"), DataLossError, "tensor w"),
        (
            raw({"v": tensor(0, 8), "w": tensor(4, 8)}, b"12345678"),
            InvalidArgumentError,
            "overlaps",
        ),
        (
            raw({"v": tensor(0, 4), "w": tensor(8, 12)}, b"123456789012"),
            InvalidArgumentError,
            "hole",
        ),
        (raw({"w": tensor(0, 4)}, b"12345678"), InvalidArgumentError, "belong to no tensor"),
        (raw({"w": tensor(0, 4, shape=[2])}, b"1234"), InvalidArgumentError, "tensor w"),
        (raw({"w": tensor(0, 4, dtype="F99")}, b"1234"), InvalidArgumentError, "F99"),
        (raw({"w": tensor(4, 0, shape=[-1])}, b"1234"), InvalidArgumentError, "tensor w"),
        (raw({"w": tensor(0, 4) | {"x": 1}}, b"1234"), InvalidArgumentError, "other keys"),
        (raw({"__metadata__": {"a": 1}}, b""), InvalidArgumentError, "__metadata__"),
        (raw(b'{"w": {}, "w": {}}', b""), InvalidArgumentError, "twice"),
        (
            raw(b'{"\\ud800": ' + json.dumps(tensor(0, 0)).encode() + b"}", b""),
            InvalidArgumentError,
            "Unicode",
        ),
    ],
)
def test_each_broken_rule_is_named(
    tmp_path: Path, content: bytes, kind: type[EdgeShardError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        read_header(write(tmp_path, content))
    assert type(caught.value) is kind
    assert words in caught.value.message and "model.safetensors" in caught.value.message


def test_a_truncated_file_names_file_and_tensor(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint() / "model.safetensors"
    last = read_header(path)[-1]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(DataLossError, match=f"model.safetensors .*{last.name}") as caught:
        open_checkpoint(path.parent)
    assert caught.value.field == last.name


def test_a_file_cut_after_its_header_was_read_is_noticed(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = open_checkpoint(make_checkpoint())
    with checkpoint.tensors[0].file.open("r+b") as file:
        file.truncate(checkpoint.tensors[-1].offset)
    with pytest.raises(DataLossError, match=checkpoint.tensors[-1].name):
        build_manifest("tiny", checkpoint)


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..", "",
        ".safetensors", "a\\b.safetensors", "a..b.safetensors", "model.bin", "a\x00.safetensors", 7,
        None, ["a"],
    ],
)  # fmt: skip
def test_an_index_holds_names_and_no_paths(make_checkpoint: MakeCheckpoint, shard: object) -> None:
    directory = make_checkpoint(shards=2)
    index = directory / "model.safetensors.index.json"
    (directory.parent / "model.safetensors").write_bytes(SAMPLE)
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(InvalidArgumentError, match="plain") as caught:
        open_checkpoint(directory)
    assert caught.value.field == "weight_map"


def change_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    values = json.loads(path.read_text())
    change(values["weight_map"])
    path.write_text(json.dumps(values))


def test_a_missing_shard_is_named(make_checkpoint: MakeCheckpoint) -> None:
    directory = make_checkpoint(shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(NotFoundError, match="model-00002-of-00002"):
        open_checkpoint(directory)


def test_a_file_with_nothing_that_the_model_needs_may_be_missing(
    make_checkpoint: MakeCheckpoint,
) -> None:
    directory = make_checkpoint(shards=2)
    change_index(
        directory,
        lambda places: places.update({"vision.patch.weight": "model-00003-of-00003.safetensors"}),
    )
    checkpoint = open_checkpoint(directory)
    assert "vision.patch.weight" in checkpoint.notes[0]


def test_entries_of_an_index_without_a_tensor_are_ignored(make_checkpoint: MakeCheckpoint) -> None:
    directory = make_checkpoint(shards=2)
    plain = build_manifest("tiny", open_checkpoint(directory))
    more = {
        f"model.layers.{layer}.rotary.inv_freq": "model-00001-of-00002.safetensors"
        for layer in (0, 1)
    }
    change_index(directory, lambda places: places.update(more))
    checkpoint = open_checkpoint(directory)
    assert build_manifest("tiny", checkpoint) == plain
    (note,) = checkpoint.notes
    assert "names 2 tensors, such as model.layers.0.rotary.inv_freq, that no file has" in note


@pytest.mark.parametrize("place", [None, "model-00002-of-00002.safetensors"])
def test_tensors_that_an_index_does_not_name_at_their_place_are_added(
    place: str | None, make_checkpoint: MakeCheckpoint
) -> None:
    directory = make_checkpoint(shards=2)
    plain = build_manifest("tiny", open_checkpoint(directory))
    name = "model.embed_tokens.weight"

    def move(places: dict[str, str]) -> None:
        assert places.pop(name) == "model-00001-of-00002.safetensors"
        places.update({} if place is None else {name: place})

    change_index(directory, move)
    checkpoint = open_checkpoint(directory)
    assert set(build_manifest("tiny", checkpoint).tensors) == set(plain.tensors)
    (note,) = checkpoint.notes
    assert f"does not name tensor {name} at its place" in note


def test_a_needed_tensor_that_no_file_has_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    directory = make_checkpoint(shards=2)
    shard = directory / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    name = next(name for name in tensors if name.startswith("model.layers."))
    del tensors[name]
    save_file(tensors, shard)
    checkpoint = open_checkpoint(directory)
    assert name in checkpoint.notes[0]
    refused_before_hashing(checkpoint, DataLossError, re.escape(name))


def test_of_two_tensors_with_one_name_the_index_chooses(make_checkpoint: MakeCheckpoint) -> None:
    directory = make_checkpoint(shards=2)
    plain = build_manifest("tiny", open_checkpoint(directory))
    first, second = (directory / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor + 1}, second)
    checkpoint = open_checkpoint(directory)
    assert (
        set(build_manifest("tiny", checkpoint).tensors) == set(plain.tensors)
        and not checkpoint.notes
    )
    change_index(directory, lambda places: places.pop(name))
    with pytest.raises(InvalidArgumentError, match="does not name the file of tensor"):
        open_checkpoint(directory)


@pytest.mark.parametrize("config", [True, False])
def test_a_directory_with_a_gguf_file_only_names_the_file(
    config: bool, make_checkpoint: MakeCheckpoint
) -> None:
    directory = make_checkpoint()
    (directory / "model.safetensors").rename(directory / "tiny-Q4_K_M.gguf")
    (directory / "mmproj-F16.gguf").touch()
    if not config:
        (directory / "config.json").unlink()
    with pytest.raises(
        UnsupportedModelError, match=re.escape(f"name the file: {directory}/tiny-Q4_K_M.gguf")
    ):
        open_checkpoint(directory)


def test_pickled_weights_are_refused_with_the_way_out(make_checkpoint: MakeCheckpoint) -> None:
    directory = make_checkpoint()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="convert it to safetensors") as caught:
        open_checkpoint(directory)
    assert caught.value.reason == "PICKLED_WEIGHTS"
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(NotFoundError, match=r"model\.safetensors"):
        open_checkpoint(directory)


def test_missing_directory_and_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_an_element_type_matters_only_where_the_tensor_is_needed(
    make_checkpoint: MakeCheckpoint,
) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, dtype=np.float64)}
    manifest = build_manifest("tiny", open_checkpoint(make_checkpoint("buffer", extra=buffer)))
    assert not any("inv_freq" in tensor.name for tensor in manifest.tensors)

    wrong = {"model.norm.weight": np.ones(8, dtype=np.int8)}
    with pytest.raises(UnsupportedModelError, match="I8") as caught:
        build_manifest("tiny", open_checkpoint(make_checkpoint("wrong", extra=wrong)))
    assert caught.value.field == "model.norm.weight"


def refused_before_hashing(checkpoint: Checkpoint, kind: type[EdgeShardError], words: str) -> None:
    def progress(done: int, total: int) -> None:
        raise AssertionError("a byte was hashed")

    with pytest.raises(kind, match=words):
        build_manifest("tiny", checkpoint, progress)


def test_what_cannot_run_is_refused_before_anything_is_hashed(
    make_checkpoint: MakeCheckpoint,
) -> None:
    other = make_checkpoint("other", config={"model_type": "t5"})
    with pytest.raises(UnsupportedModelError, match="t5"):
        open_checkpoint(other)
    more = make_checkpoint("more", config={"num_hidden_layers": 3})
    refused_before_hashing(open_checkpoint(more), DataLossError, r"layers\.2\.")
    checkpoint = open_checkpoint(make_checkpoint("good"))
    with pytest.raises(InvalidArgumentError, match="name"):
        build_manifest("../tiny", checkpoint)
