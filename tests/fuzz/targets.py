"""Readers of a stranger's bytes, each as a function of them: `fuzz_one` returns unless something is
wrong.

A typed error that names its field is an answer. Any other exception, and a broken promise, is a
finding. The functions keep nothing between inputs, so that any driver may call them: the loop of
`run`, hypothesis, atheris.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import struct
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.experts import ExpertTable
from edgeshard_agent.ops.block_formats import BlockWeight, layout_of
from edgeshard_agent.ops.linear import PackedLinear
from edgeshard_agent.ops.native import native_available
from edgeshard_agent.settings import AgentSettings
from edgeshard_coordinator.core.values.quotas import parse_quotas
from edgeshard_coordinator.settings import CoordinatorSettings
from google.protobuf.message import DecodeError

from edgeshard.architectures import KNOWN_MODELS, read_config
from edgeshard.chat.messages import parse_messages, parse_tools, parse_variables
from edgeshard.chat.parsing import AnswerParser
from edgeshard.chat.templates import ChatTemplate
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import DataLossError, EdgeShardError
from edgeshard.domain.identity import Enrolment, Invitation, Principal, Role
from edgeshard.domain.models.dtypes import BLOCK_FORMATS, STORED_FORMATS, DType
from edgeshard.domain.requests.conversation import (
    AnswerDelta,
    AnswerFormat,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolFormat,
)
from edgeshard.domain.requests.generation import Guide, GuideKind, Sampling, StageTiming
from edgeshard.domain.requests.step import (
    ForwardStep,
    KvGrant,
    ReturnedStep,
    SampledToken,
    Span,
    StateCopy,
    StepPlan,
    StepResult,
    Tensor,
)
from edgeshard.identity.authority import key_digest, new_key, request_for
from edgeshard.importing.gguf_config import config_of, targets_of
from edgeshard.importing.gguf_file import TYPES as GGUF_TYPES
from edgeshard.importing.gguf_file import read_gguf
from edgeshard.importing.gguf_tokenizer import tokenizer_files
from edgeshard.importing.imported import Imported
from edgeshard.importing.stores import ollama
from edgeshard.importing.stores.ollama_forms import FORMS, llama_cpp_form
from edgeshard.importing.stores.ollama_settings import Settings, with_settings
from edgeshard.importing.tiktoken import tokenizer_of
from edgeshard.planning.inputs.devices import parse_cluster
from edgeshard.planning.inputs.shapes import model_from_config
from edgeshard.planning.simulation.lab import parse_lab
from edgeshard.process.config import load_settings
from edgeshard.proto.v1 import identity_pb2, stage_pb2, store_pb2
from edgeshard.storage.blobs import blob_size, manifest_items
from edgeshard.storage.checkpoint import Checkpoint, StoredFile, open_checkpoint, read_header
from edgeshard.storage.forms import (
    EXPERT_TABLE,
    GENERATION,
    TOKENIZER,
    TOKENIZER_SETTINGS,
    check_small_file,
    decode_text,
    expert_table_of,
    parse_json_object,
    skim_small_file,
    special_tokens_of,
)
from edgeshard.storage.growth import loaded_growth
from edgeshard.storage.inputs import parse_toml
from edgeshard.storage.linked import LinkedFiles, read_note
from edgeshard.storage.local_model import check_places
from edgeshard.wire.frames import FrameContract, FrameReader, _checksum, encode_step
from edgeshard.wire.identity import enrolment_from_wire, enrolment_to_wire
from edgeshard.wire.invitations import TOKEN_PREFIX, invitation_from_text, invitation_to_text
from edgeshard.wire.site import dtype_to_wire
from edgeshard.wire.store import (
    local_model_from_wire,
    manifest_from_json,
    manifest_from_wire,
    validate_manifest,
)
from tests.support.model_stores import OllamaFolder

LONGEST_MESSAGE = 2200
"""Characters of an error: it goes into logs and into a status that has to fit into a header."""
FORWARD = FrameContract("tales", 3, DType.BFLOAT16, 8, max_tokens=32, window=4)
RETURN = FrameContract("tales", 3, DType.BFLOAT16, 0, max_tokens=32, window=4)
_SCRATCH = Path(tempfile.gettempdir()) / f"edgeshard-fuzz-{os.getpid()}"
_SPLIT = struct.Struct("<H")


class FindingError(AssertionError):
    """A promise that an input broke."""


@dataclass(frozen=True, slots=True)
class Target:
    """`read` is given an input; `seeds` are inputs to begin from, `words` texts that mean something
    to it."""

    name: str
    read: Callable[[bytes], str | None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    is_json: bool = False

    def fuzz_one(self, data: bytes) -> str:
        """The outcome of an input, in a few words that are the same for inputs of one kind."""
        try:
            return self.read(data) or "taken"
        except EdgeShardError as error:
            if (
                not error.message
                or len(error.message) > LONGEST_MESSAGE
                or len(error.field) > LONGEST_MESSAGE
            ):
                raise FindingError(
                    f"an error of {len(error.message)} characters: {error.message[:200]}"
                ) from error
            return f"{type(error).__name__} {error.reason} {_place(error)}"


def _place(error: BaseException) -> str:
    """The place of an error and its caller, which distinguish kinds of inputs."""
    frames = traceback.extract_tb(error.__traceback__)
    return " ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-4:])


def _words(text: str) -> str:
    """A library's message without its quotations."""
    letters = "".join(character if character.isalpha() else " " for character in text[:120])
    return " ".join(word for word in letters.split() if len(word) < 16)[:60]


def _scratch(name: str) -> Path:
    _SCRATCH.mkdir(exist_ok=True)
    return _SCRATCH / name


def _pieces(data: bytes) -> Iterator[bytes]:
    """A sequence of byte strings, each after its length."""
    at = 0
    while at + _SPLIT.size <= len(data):
        (size,) = _SPLIT.unpack_from(data, at)
        at += _SPLIT.size
        yield data[at : at + size]
        at += size


def _joined(*pieces: bytes) -> bytes:
    return b"".join(_SPLIT.pack(len(piece)) + piece for piece in pieces)


# -- frames ----------------------------------------------------------------------------------------


def _frames(data: bytes) -> str:
    """Pairs of header and payload come in as frames with a right checksum, and as they are."""
    met = set()
    for contract in (FORWARD, RETURN):
        reader, numbers = FrameReader(contract), list[int]()
        pieces = list(islice(_pieces(data), 32))
        sealed = [
            _seal_raw(header, payload)
            for header, payload in zip(pieces[::2], pieces[1::2], strict=False)
        ]
        for frame in [*sealed, *_raw_frames(pieces)]:
            before = reader.next_step
            try:
                numbers += [step.number for step in reader.accept(frame).steps]
            except EdgeShardError as error:
                met.add(_place(error).rpartition(" ")[2])
                if not error.message or reader.next_step != before:
                    raise FindingError(
                        "a frame that was refused changed what comes next"
                    ) from error
            held = sum(
                len(part)
                for partial in reader._partial.values()
                for part in partial.payloads.values()
            )
            if held > contract.window * max(contract.max_bytes, 1 << 20):
                raise FindingError(f"{held} bytes are held for steps that are not complete")
        if numbers != list(range(len(numbers))):
            raise FindingError(f"steps came out as {numbers}")
        met.add(f"{len(numbers)} steps")
    return " ".join(sorted(met))


def _seal_raw(header: bytes, payload: bytes) -> stage_pb2.Frame:
    return stage_pb2.Frame(header=header, crc32c=_checksum(header, payload), payload=payload)


def _raw_frames(pieces: list[bytes]) -> Iterator[stage_pb2.Frame]:
    for piece in pieces:
        try:
            yield stage_pb2.Frame.FromString(piece)
        except DecodeError:
            continue


def _frame_seeds() -> Iterator[bytes]:
    def forward(number: int, tokens: int) -> ForwardStep:
        guide = Guide(GuideKind.REGEX, "a+")
        span = Span(
            7, 5, tokens, True, Sampling(0.7, 5, 0.9, 1.1, 3, True, 2), (4, 9), guide, (6,), 11
        )
        copies = (StateCopy(7, 16, 3),)
        plan = StepPlan(
            (1, 2), (KvGrant(7, 0, (3,), 16),), (span,) if tokens else (), 0, (9,), copies, copies
        )
        hidden = Tensor(DType.BFLOAT16, (tokens, 8), bytes(tokens * 16)) if tokens else None
        return ForwardStep(number, plan, hidden, (StageTiming(0, 0.5, 0.25),))

    back = ReturnedStep(
        0, StepResult((SampledToken(7, 8, 5, -0.5, ()),), (StageTiming(1, 0.0, 0.5),), pending=(9,))
    )
    for steps in ([forward(0, 3)], [forward(0, 0), forward(1, 32)], [back]):
        frames = [frame for step in steps for frame in encode_step("tales", 3, step)]
        yield _joined(*(part for frame in frames for part in (frame.header, frame.payload)))
        yield _joined(*(frame.SerializeToString() for frame in frames))


# -- models ----------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_SHAPES = {
    "model.embed_tokens.weight": (8, 4),
    "model.norm.weight": (4,),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.layers.0.self_attn.o_proj.weight": (4, 4),
    "model.layers.0.mlp.gate_proj.weight": (8, 4),
    "model.layers.0.mlp.up_proj.weight": (8, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 8),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.layers.0.post_attention_layernorm.weight": (4,),
}
_DIGEST = "0123456789abcdef" * 4
WHOLE_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 3, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        },
    ],
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "_"}],
    },
    "pre_tokenizer": {
        "type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": False,
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}},
        ],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "model": {
        "type": "BPE", "vocab": {"0": 0, "1": 1, "01": 2}, "merges": [["0", "1"]],
        "unk_token": None,
    },
}  # fmt: skip


def _safetensors(shapes: Mapping[str, tuple[int, ...]] = _SHAPES) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def _gguf(data: bytes) -> None:
    path = _scratch("model.gguf")
    path.write_bytes(data)
    file = read_gguf(path)
    targets_of(file, config_of(file))
    tokenizer_files(file, [])
    for tensor in file.tensors.values():
        if tensor.offset + tensor.size > len(data):
            raise FindingError(
                f"tensor {tensor.name} ends at {tensor.offset + tensor.size}, beyond the file"
            )


def _ollama_form(data: bytes) -> None:
    path = _scratch("model.gguf")
    path.write_bytes(data)
    llama_cpp_form(read_gguf(path))


def _ollama_manifest(data: bytes) -> None:
    """A manifest in a store that has the blobs of the seed."""
    store = OllamaFolder(_scratch("ollama"))
    store.manifest(
        b"GGUF", {"model_format": "gguf", "file_type": "Q4_K_M"}, params="{}", system="Be brief."
    )
    path = store.folder / "manifest"
    path.write_bytes(data)
    ollama.read_model(ollama.Manifest("tales:latest", path, store.folder))


def _ollama_manifest_seed() -> bytes:
    store = OllamaFolder(_scratch("ollama"))
    config = {"model_format": "gguf", "file_type": "Q4_K_M"}
    return _json(store.manifest(b"GGUF", config, params="{}", system="Be brief."))


def _ollama_settings(data: bytes) -> None:
    """Parameters and a system text, and a template of the GGUF file's."""
    values = parse_json_object(decode_text(data, "params"), "params")
    folder = _scratch("settings")
    folder.mkdir(exist_ok=True)
    files = []
    texts = {
        "tokenizer.json": _json(WHOLE_TOKENIZER),
        "tokenizer_config.json": b'{"chat_template": "x"}',
    }
    for name, text in texts.items():
        (folder / name).write_bytes(text)
        files.append(StoredFile(name, folder / name, len(text)))
    imported = Imported(Checkpoint(folder, "{}", (), tuple(files)))
    settings = Settings("{{ .Prompt }}", "", str(values.get("system", "")), values)
    for file in with_settings(imported, settings, folder).checkpoint.files:
        check_small_file(file.name, file.path.read_bytes())


def _gguf_seed(type_number: int = 8) -> bytes:
    """A llama of one layer without its weights, with a tokenizer of SentencePiece's kind.

    `type_number` is the type of its embedding.
    """

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def many(kind: int, values: list[bytes]) -> bytes:
        return struct.pack("<IIQ", 9, kind, len(values)) + b"".join(values)

    number = struct.Struct("<II")
    entries = {
        "general.architecture": struct.pack("<I", 8) + text("llama"),
        "llama.block_count": number.pack(4, 1),
        "llama.embedding_length": number.pack(4, 32),
        "llama.context_length": number.pack(4, 64),
        "llama.feed_forward_length": number.pack(4, 32),
        "llama.attention.head_count": number.pack(4, 2),
        "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", 6, 1e-5),
        "tokenizer.ggml.model": struct.pack("<I", 8) + text("llama"),
        "tokenizer.ggml.tokens": many(8, [text(token) for token in ("<unk>", "a", "b", "ab")]),
        "tokenizer.ggml.scores": many(6, [struct.pack("<f", score) for score in (0, -1, -2, -3)]),
        "tokenizer.ggml.token_type": many(5, [struct.pack("<i", kind) for kind in (2, 1, 1, 1)]),
        "tokenizer.ggml.eos_token_id": number.pack(4, 0),
    }
    _, inputs, block_bytes = GGUF_TYPES[type_number]
    blocks = max(1, 32 // inputs)
    tensor = text("token_embd.weight") + struct.pack(
        "<IQQIQ", 2, blocks * inputs, 4, type_number, 0
    )
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, len(entries))
    header += b"".join(text(key) + value for key, value in entries.items()) + tensor
    return header + bytes(-len(header) % 32) + bytes(4 * blocks * block_bytes)


_BLOCK_ROWS = 40
"""The most rows of a matrix that is packed: more than a panel has."""


def _blocks(data: bytes) -> str | None:
    """The first byte chooses a block format, the others are rows of one block each: packed and
    multiplied."""
    if not data:
        return "no format"
    kind = BLOCK_FORMATS[data[0] % len(BLOCK_FORMATS)]
    layout = layout_of(kind)
    rows = min(_BLOCK_ROWS, (len(data) - 1) // layout.stored_bytes)
    if not rows:
        return "no whole block"
    stored = torch.frombuffer(
        bytearray(data[1 : 1 + rows * layout.stored_bytes]), dtype=torch.uint8
    )
    weight = BlockWeight.of(stored, (rows, layout.inputs), kind)
    layer, numbers = PackedLinear.pack_blocks(weight), weight.dequantize()
    if not _same_bits(layer.rows(torch.arange(rows)), numbers):
        raise FindingError(f"packed rows of {kind} are not its numbers")
    inputs = torch.linspace(-1, 1, 5 * layout.inputs).view(5, -1)
    together = layer(inputs)
    if native_available() and not _same_bits(layer(inputs[2:3]), together[2:3]):
        raise FindingError(f"a row alone differs from the row among others in {kind}")
    return None


def _same_bits(some: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether numbers are equal, or NaN on both sides."""
    return bool(((some == others) | (some.isnan() & others.isnan())).all())


def _block_seeds() -> Iterator[bytes]:
    for place, kind in enumerate(BLOCK_FORMATS):
        rows = BlockWeight.random(33, layout_of(kind).inputs, kind).data
        yield bytes([place]) + rows.numpy().tobytes()


def _header(data: bytes) -> None:
    path = _scratch("model.safetensors")
    path.write_bytes(data)
    end = 0
    for stored in read_header(path):
        if stored.offset < max(8, end) or stored.offset + stored.size > len(data):
            raise FindingError(
                f"tensor {stored.name} lies at {stored.offset}, beyond {end} or the file"
            )
        end = stored.offset + stored.size


def _config(data: bytes) -> None:
    config = parse_json_object(_text(data), "config.json")
    decoder = read_config(config)
    model = model_from_config("fuzzed", config)
    if (
        model.layer_count != decoder.shape.layer_count
        or len(decoder.windows()) != model.layer_count
    ):
        raise FindingError("layers are counted in two ways")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _manifest(data: bytes) -> None:
    try:
        message = store_pb2.Manifest.FromString(data)
    except DecodeError:
        manifest_from_json(_text(data), _DIGEST)  # type: ignore[arg-type]
        return
    for size in validate_manifest(manifest_from_wire(message)).values():
        if size < 0:
            raise FindingError(f"a blob of {size} bytes")


def _note(data: bytes) -> str:
    """A note of the store's linked files: it names no bytes that the file, as it was noted, does
    not have."""
    path = _scratch("linked") / f"{'0' * 32}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    locations = read_note(path)
    for at in locations.values():
        if at.path != path.with_suffix("") and (at.path != at.source or at.stamp is None):
            raise FindingError(f"a blob lies at {at.path}, which no read looks at first")
        if at.stamp is not None and at.stamp.size and at.offset + at.size > at.stamp.size:
            raise FindingError(f"a blob of {at.size} bytes in a file of {at.stamp.size}")
        if not 0 <= at.offset < 2**63 or (at.order is not None and not at.order.fits(at.size)):
            raise FindingError(f"a blob lies at {at}")
    linked = LinkedFiles(path.parent)
    for digest in locations:
        if linked.find(digest) is None and linked.lost(digest) is None:
            raise FindingError("a blob is neither there nor lost")
    return f"taken {bool(locations)} {any(at.order for at in locations.values())}"


def _note_seed(**changes: object) -> bytes:
    values = {
        "blobs": {_DIGEST: [32, 60]},
        "orders": {_DIGEST: [3, 2, 5]},
        "source": "/nowhere/model.gguf",
    }
    return _json(values | changes)


def _local_model(data: bytes) -> None:
    """The files of a model, by a client on the coordinator's machine."""
    try:
        model = local_model_from_wire(store_pb2.AddLocalModelRequest.FromString(data))
    except DecodeError:
        return
    check_places(model)
    for place, item in zip(model.places, manifest_items(model.manifest), strict=True):
        if place.offset + blob_size(item) > model.files[place.file].size:
            raise FindingError(f"{item.name} lies beyond its file")


def _local_model_message() -> store_pb2.AddLocalModelRequest:
    manifest, files = _manifest_message(), ("/a/model.gguf", "/a/tokenizer.json")
    places = [store_pb2.LocalPlace(file=0, offset=64) for _ in manifest.tensors]
    places[2].order.CopyFrom(store_pb2.RowOrder(first=2, second=2, row_bytes=16))
    return store_pb2.AddLocalModelRequest(
        manifest=manifest,
        files=[
            store_pb2.LocalFile(
                path=path,
                size=1000 if "gguf" in path else 100,
                head_sha256=_DIGEST,
                stays=True,
            )
            for path in files
        ],
        places=[*places, store_pb2.LocalPlace(file=1)],
    )


def _manifest_message() -> store_pb2.Manifest:
    float32 = dtype_to_wire(DType.FLOAT32)
    return store_pb2.Manifest(
        name="tiny",
        architecture="llama",
        config_json=json.dumps(TINY),
        tensors=[
            store_pb2.ManifestTensor(name=name, dtype=float32, shape=shape, sha256=f"{number:064x}")
            for number, (name, shape) in enumerate(_SHAPES.items())
        ],
        files=[store_pb2.ManifestFile(name=TOKENIZER, size=100, sha256=_DIGEST)],
    )


def _tokenizer(data: bytes) -> str | None:
    skim_small_file(TOKENIZER, [data[at : at + 64] for at in range(0, len(data), 64)])
    check_small_file(TOKENIZER, data)
    path = _scratch(TOKENIZER)
    path.write_bytes(data)
    try:
        tokenizer = Tokenizer.load(path)
    except DataLossError as error:
        return f"unread {_words(error.message)}"
    failed = 0
    for text in ("0 1 01", "\u00e9\U0001d400 " * 40):
        try:
            tokenizer.decode(tokenizer.encode(text)[:64])
        except EdgeShardError:
            failed += 1
        _check_growth(tokenizer, text)
    return f"failed {failed}" if failed else None


def _check_growth(tokenizer: Tokenizer, text: str) -> None:
    """Check that its normaliser makes no more of a text than the bound of its file allows."""
    library: Any = tokenizer._tokenizer
    if library.normalizer is None:
        return
    try:
        grown = len(library.normalizer.normalize_str(text).encode())
    except BaseException as error:
        # It panics at some steps. A panic's class is no Exception, and cannot be imported.
        if type(error).__name__ != "PanicException" and not isinstance(error, Exception):
            raise
        return
    if grown > loaded_growth(library) * len(text.encode()):
        raise FindingError(f"a text of {len(text.encode())} bytes became one of {grown}")


def _generation(data: bytes) -> None:
    check_small_file(GENERATION, data)


def _expert_table(data: bytes) -> None:
    """A table that the coordinator accepts, as a node reads it."""
    check_small_file(EXPERT_TABLE, data)
    ExpertTable.of_values(expert_table_of(json.loads(data)), 2, 2)


def _tokenizer_settings(data: bytes) -> None:
    check_small_file(TOKENIZER_SETTINGS, data)
    special_tokens_of(json.loads(data))


def _tiktoken(data: bytes) -> None:
    """Settings and ranks, separated by a zero; the result is read as a tokenizer.json is."""
    settings, _, ranks = data.partition(b"\0")
    made = tokenizer_of(
        "tiktoken.model", ranks, parse_json_object(_text(settings), TOKENIZER_SETTINGS)
    )
    if (failed := _tokenizer(made)) is not None:
        raise FindingError(f"a tokenizer.json that cannot be used: {failed}")


def _tiktoken_seeds() -> Iterator[bytes]:
    tokens = [*(bytes((byte,)) for byte in range(256)), b"01", b" 0", b" 01"]
    ranks = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    named = {"added_tokens_decoder": {"260": {"content": "<|x|>", "special": False}}}
    for settings in ({"tokenizer_class": "TikTokenTokenizer"}, {"tokenizer_class": "HYTokenizer"}):
        yield _json(settings | named) + b"\0" + ranks
    yield _json({"tiktoken_pattern": "o200k"}) + b"\0" + ranks


def _chat(data: bytes) -> None:
    """Messages and tools of a client, and the prompt that a template of ours makes of them."""
    text = data.decode("utf-8", "replace")
    for read in (parse_tools, parse_variables):
        with contextlib.suppress(EdgeShardError):
            read(text)
    _TEMPLATE.render(_TEMPLATE.form.of(parse_messages(text)))


def _answer(data: bytes) -> str:
    """A model's output, in pieces of any size: nothing is lost, except marked parts."""
    text = data.decode("utf-8", "replace")
    met = set()
    for form in ToolFormat:
        answer_format = AnswerFormat(form, "<think>", "</think>")
        at_once = AnswerParser(answer_format, _TOOLS)
        piecewise = AnswerParser(answer_format, _TOOLS)
        whole = [*at_once.feed(text), *at_once.finish()]
        parts = [
            delta for at in range(0, len(text), 7) for delta in piecewise.feed(text[at : at + 7])
        ]
        parts += piecewise.finish()
        if _said(whole) != _said(parts):
            raise FindingError(f"{form} reads an answer differently when it comes in pieces")
        met |= {type(delta).__name__ for delta in whole}
    return "taken " + " ".join(sorted(met))


def _said(deltas: list[AnswerDelta]) -> tuple[str, str, list[tuple[str, str]]]:
    return (
        "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)),
        "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
        [(delta.name, delta.arguments) for delta in deltas if isinstance(delta, ToolCall)],
    )


def _index(data: bytes) -> None:
    """The index of a checkpoint in shards, one of which exists."""
    folder = _scratch("sharded")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "model-1.safetensors").write_bytes(_safetensors())
    (folder / "model.safetensors.index.json").write_bytes(data)
    checkpoint = open_checkpoint(folder)
    if any(stored.file.parent != checkpoint.directory for stored in checkpoint.tensors):
        raise FindingError("a shard lies beside the directory")


# -- files of an operator --------------------------------------------------------------------------


def _settings(data: bytes) -> None:
    path = _scratch("edgeshard.toml")
    path.write_bytes(data)
    for kind in (CoordinatorSettings, AgentSettings):
        try:
            load_settings(kind, "fuzz", ["--config", str(path)])
        except EdgeShardError:
            continue
    load_settings(
        AgentSettings, "fuzz", ["--config", str(path), "--name", "a", "--state-dir", "/nowhere"]
    )


def _cluster(data: bytes) -> None:
    values = parse_toml(_text(data), "cluster", "cluster")
    if "lab" in values:
        parse_lab(values, lambda name: TINY)
    else:
        parse_cluster(values)


def _spec(data: bytes) -> None:
    parse_spec(parse_toml(_text(data), "spec", "file"))


_INVITATION = Invitation(
    b"d" * 24, Principal("mill", Role.AGENT, "b"), "10.0.0.1:7600", "10.0.0.1:7601", b"s" * 16
)


def _token(data: bytes) -> str | None:
    """The word that somebody was given on the telephone."""
    try:
        invitation_from_text(data.decode("utf-8", "replace"))
    except EdgeShardError as error:
        return error.reason
    return None


def _enrolment_message() -> bytes:
    return enrolment_to_wire(
        Enrolment("0123456789abcdef", b"s" * 32, request_for(new_key()))
    ).SerializeToString()


def _enrolment(data: bytes) -> str | None:
    """Any message of a caller who reaches the listener for joiners."""
    try:
        key_digest(enrolment_from_wire(identity_pb2.EnrolRequest.FromString(data)).request)
    except DecodeError:
        return "no message"  # gRPC refuses it
    except EdgeShardError as error:
        return error.reason
    return None


def _quotas(data: bytes) -> None:
    parse_quotas(parse_toml(_text(data), "quotas", "quotas"), "quotas")


_CLUSTER = """
source = "a-1"
[link]
bandwidth_bps = 1e9
latency_s = 1e-3
[[device]]
name = "a"
kind = "rtx-3090"
count = 2
[workload]
prompt_tokens = 128
new_tokens = 32
"""
_LAB = (
    _CLUSTER + '[lab]\nmodel = "tiny/config.json"\n[[lab.run]]\nlayers = "a-1=0:1"\nmode = '
    '"no-bubbles"\nstreams = 2\n'
)
_QUOTAS = """
["*"]
requests = 4
max_priority = -1
["client/app"]
tokens_per_minute = 60_000
"""
_SPEC = """
name = "tales"
model = "tiny"
source = "a-1"
layers = "a=0:4,b=4:9"
max_context = 512
[quantisation]
"""
_TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls "
    "}}{% endfor %}",
    {},
)
_TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
_MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "y"},
]
_ANSWERS = (
    b'<think>so</think>Yes <tool_call>{"name": "find", "arguments": {"a": 1}}</tool_call>',
    b"<tool_call><function=find><parameter=a>1</parameter></function></tool_call>",
    b'[TOOL_CALLS]find[ARGS]{"a": 1}',
    b'<|channel|>commentary to=functions.find<|message|>{"a": 1}<|call|>',
    b'{"name": "find", "parameters": {"a": 1}}',
)
_SETTINGS = """
[coordinator]
listen = "127.0.0.1:7600"
state_dir = "/nowhere"
log_level = "debug"
[agent]
listen = "127.0.0.1:0"
coordinator = "127.0.0.1:7600"
memory = "2GiB"
threads = 2
device = "cpu"
"""


def _examples() -> Iterator[bytes]:
    for path in sorted((Path(__file__).parents[2] / "deploy" / "examples").glob("*.toml")):
        yield path.read_bytes()


# --------------------------------------------------------------------------------------------------

_NUMBERS = (
    b"0", b"-1", b"1e999", b"NaN", b"Infinity", b"1000000000", b"9223372036854775807",
    b"18446744073709551616", b"9" * 400, b"null", b"true", b'""', b"[]", b"{}", b'"\\ud800"',
    b"1.5",
)  # fmt: skip


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


_JSON_TARGETS = frozenset(
    [
        "chat",
        "config",
        "expert-table",
        "generation",
        "index",
        "note",
        "ollama-manifest",
        "ollama-settings",
        "tokenizer",
        "tokenizer-settings",
    ]
)


@dataclass(frozen=True, slots=True)
class _All:
    targets: dict[str, Target] = field(default_factory=dict)

    def add(
        self,
        name: str,
        read: Callable[[bytes], str | None],
        *seeds: bytes,
        words: tuple[bytes, ...] = (),
    ) -> None:
        is_json = name in _JSON_TARGETS
        self.targets[name] = Target(name, read, seeds, (*words, *_NUMBERS), is_json)


def _made() -> dict[str, Target]:
    every = _All()
    every.add("frame", _frames, *_frame_seeds())
    every.add(
        "header",
        _header,
        _safetensors(),
        words=(b'"F4"', b'"dtype"', b'"data_offsets"', b"__metadata__"),
    )
    every.add(
        "config", _config, _json(TINY), *(_json(dict(config)) for config in KNOWN_MODELS.values())
    )
    every.add(
        "blocks",
        _blocks,
        *_block_seeds(),
        words=(b"\x00\x7c", b"\xff\x7b", b"\x00\xfc", b"\xff\xff\xff\xff"),
    )
    words = (b"GGUF", b"tokenizer.ggml.tokens", b"llama.block_count")
    every.add("gguf", _gguf, *map(_gguf_seed, (8, *GGUF_TYPES)), words=words)
    architectures = tuple(name.encode() for form in FORMS for name in form.architectures)
    every.add(
        "ollama-form",
        _ollama_form,
        _gguf_seed(),
        words=(*architectures, b"tokenizer.ggml.pre", b"v.", b"mtp."),
    )
    every.add(
        "ollama-manifest",
        _ollama_manifest,
        _ollama_manifest_seed(),
        words=(b"sha256:", b'"manifests"'),
    )
    parameters = {
        "temperature": 0.5,
        "stop": ["</s>"],
        "num_ctx": 4096,
        "mirostat": 1,
        "system": "Be brief.",
    }
    every.add("ollama-settings", _ollama_settings, _json(parameters))
    message = _manifest_message()
    formats = tuple(kind.encode() for kind in STORED_FORMATS)
    every.add("manifest", _manifest, message.SerializeToString(), words=formats)
    in_place = {"in_place": True, "stamp": [1000, 5]}
    every.add(
        "note",
        _note,
        _note_seed(),
        _note_seed(**in_place),
        words=(b"in_place", b"stamp", b"orders"),
    )
    every.add("local-model", _local_model, _local_model_message().SerializeToString())
    every.add("tokenizer", _tokenizer, _json(WHOLE_TOKENIZER), *map(_json, _tokenizers()))
    square = [[[1, -2], [0, 5]], [[3, 4], [9, 9]]]
    every.add(
        "expert-table",
        _expert_table,
        _json({"base": [[1, 2], [3, 4]], "last": square, "earlier": square}),
    )
    every.add(
        "generation",
        _generation,
        _json({"eos_token_id": [1, 2], "bos_token_id": 1}),
        _json({"eos_token_id": 2}),
    )
    named = [{"name": "default", "template": "x"}]
    settings = {"bos_token": {"content": "<s>"}, "chat_template": named}
    every.add(
        "tokenizer-settings", _tokenizer_settings, _json(settings), _json({"chat_template": "x"})
    )
    every.add(
        "tiktoken",
        _tiktoken,
        *_tiktoken_seeds(),
        words=(b"MDE= ", b"tiktoken_pattern", b"<|x|>", b"\0"),
    )
    every.add("chat", _chat, _json(_MESSAGES), _json(_TOOLS))
    every.add(
        "answer",
        _answer,
        *_ANSWERS,
        words=(b"<tool_call>", b"</think>", b"[TOOL_CALLS]", b"<|message|>"),
    )
    every.add(
        "index",
        _index,
        _json({"metadata": {}, "weight_map": dict.fromkeys(_SHAPES, "model-1.safetensors")}),
    )
    every.add("settings", _settings, _SETTINGS.encode(), *_examples())
    every.add("cluster", _cluster, _CLUSTER.encode(), _LAB.encode(), *_examples())
    every.add("spec", _spec, _SPEC.encode())
    every.add("quotas", _quotas, _QUOTAS.encode(), words=(b"max_priority", b'["operator/a"]'))
    every.add(
        "token",
        _token,
        invitation_to_text(_INVITATION).encode(),
        words=(TOKEN_PREFIX.encode(), b"_", b"-", b"="),
    )
    every.add(
        "enrolment",
        _enrolment,
        _enrolment_message(),
        words=(b"-----BEGIN CERTIFICATE REQUEST-----", b"MI"),
    )
    return every.targets


def _tokenizers() -> Iterator[dict[str, Any]]:
    plain = {
        **WHOLE_TOKENIZER,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
    }
    yield {**plain, "model": {"type": "WordLevel", "vocab": {"0": 0, "?": 1}, "unk_token": "?"}}
    yield {
        **plain,
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [["?", 0.0], ["0", -1.0]],
            "byte_fallback": False,
        },
    }
    yield {
        **plain,
        "model": {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": {"?": 0, "0": 1, "##1": 2}},
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }  # fmt: skip
    yield {
        **plain,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
    }
    yield {**plain, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}}


TARGETS: dict[str, Target] = _made()
