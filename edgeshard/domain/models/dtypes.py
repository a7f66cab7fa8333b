"""Element types of tensors and weights, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from edgeshard.domain.errors import InvalidArgumentError, invalid

_Format = TypeVar("_Format", bound=StrEnum)


def _member(kind: type[_Format], text: str, field: str) -> _Format:
    """The member of an enumeration that `text` names. Raises InvalidArgumentError naming `field`
    for another text."""
    try:
        return kind(text)
    except ValueError:
        raise invalid(field, f"{text!r} is unknown: use one of {', '.join(kind)}") from None


class DType(StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.FLOAT32 else 2

    @classmethod
    def parse(cls, text: str, field: str = "dtype") -> DType:
        return _member(cls, text, field)


KV_VECTOR = 16
"""The numbers of a head that the native kernels read at once; a head of another width has no whole
vectors."""
UNSUPPORTED_KV_DTYPE = "UNSUPPORTED_KV_DTYPE"
"""Reason of the error for keys and values that cannot be stored as requested."""


class KvFormat(StrEnum):
    """How keys and values are kept: as numbers of a dtype, or of 4 bits in groups.

    A group is 32 consecutive numbers of a token in one head (16 if 32 do not divide the head's
    width). It has its minimum, 4 bytes, and the step between two of sixteen values, 2 bytes.
    """

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT4 = "int4"

    @classmethod
    def parse(cls, text: str, field: str = "kv_dtype") -> KvFormat:
        return _member(cls, text, field)

    @staticmethod
    def group(head_dim: int) -> int:
        """Numbers that share a minimum and a step if they have 4 bits."""
        return 16 if head_dim % 32 else 32

    def check_heads(self, head_dim: int) -> None:
        """Raise InvalidArgumentError if the kernels do not read keys and values of heads of this
        width in this format."""
        if self is KvFormat.INT4 and head_dim % KV_VECTOR:
            why = (
                f"int4 takes heads whose width is a multiple of {KV_VECTOR}; this model's is "
                f"{head_dim}"
            )
            raise InvalidArgumentError.about(
                "kv_dtype", f"{why}; use bfloat16", UNSUPPORTED_KV_DTYPE
            )

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of a token's keys, or of its values, in one head."""
        if self is KvFormat.INT4:
            return head_dim // 2 + 6 * -(-head_dim // self.group(head_dim))
        return head_dim * DType(self).itemsize


STORED_GROUP = 32
"""Inputs of a row that share a scale in a model that is stored as small integers."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Sizes of a block of consecutive inputs of a row: their number, and its bytes in the store and
    packed."""

    inputs: int
    stored_bytes: int
    packed_bytes: int


class IntegerFormat(StrEnum):
    """A matrix as small integers, with a scale for each group of inputs.

    The names that begin with `int` are EdgeShard's own. The others are llama.cpp's: several groups
    may share a block, which has scales of its groups, and in some formats minima. Nothing is
    rounded to those; a model is stored so. Nothing is rounded to `INT4_ZEROS` either. Each 32
    inputs have a float16 scale, the integer that stands for zero (a byte), and integers of 4 bits
    as in Q4_0.
    """

    INT2 = "int2"
    INT4 = "int4"
    INT8 = "int8"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    IQ4_XS = "iq4_xs"
    Q2_K = "q2_k"
    Q3_K = "q3_k"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    IQ4_NL = "iq4_nl"
    IQ3_S = "iq3_s"
    IQ3_XXS = "iq3_xxs"
    IQ2_S = "iq2_s"
    IQ2_XS = "iq2_xs"
    IQ2_XXS = "iq2_xxs"
    IQ1_S = "iq1_s"
    IQ1_M = "iq1_m"
    TQ1_0 = "tq1_0"
    TQ2_0 = "tq2_0"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    Q1_0 = "q1_0"
    Q2_0 = "q2_0"
    INT4_ZEROS = "int4_zeros"

    @classmethod
    def parse(cls, text: str, field: str = "quantisation") -> IntegerFormat:
        """A format for whole models, of `MODEL_FORMATS`."""
        if text not in MODEL_FORMATS:
            raise invalid(field, f"{text!r} is unknown: use {' or '.join(MODEL_FORMATS)}")
        return cls(text)

    @classmethod
    def parse_stored(cls, text: str, field: str) -> IntegerFormat:
        """A format in which tensors are stored, of `STORED_FORMATS`."""
        if text not in STORED_FORMATS:
            raise invalid(field, f"{text!r} is unknown: use one of {', '.join(STORED_FORMATS)}")
        return cls(text)

    @property
    def layout(self) -> BlockLayout | None:
        """The sizes of its blocks, in `BLOCK_FORMATS`; None otherwise."""
        return _LAYOUTS.get(self)

    @property
    def bits(self) -> int:
        """Bits of one weight, without its scale, in a format of EdgeShard's own."""
        return int(self.removeprefix("int"))

    @property
    def group(self) -> int:
        """Consecutive inputs of a row that share a scale, if a node rounds the weights itself."""
        return 64 if self is IntegerFormat.INT8 else 32

    def matrix_bytes(self, rows: int, columns: int, group: int | None = None) -> int:
        """Bytes of a packed matrix of this many outputs and inputs: its integers, and what scales
        them."""
        if self.layout is not None:
            return rows * columns // self.layout.inputs * self.layout.packed_bytes
        return rows * (-(-columns * self.bits // 8) + 2 * -(-columns // (group or self.group)))

    @property
    def stored_block(self) -> int:
        """Inputs of a row in a block of the store."""
        return STORED_GROUP if self.layout is None else self.layout.inputs

    @property
    def stored_block_bytes(self) -> int:
        """Bytes of `stored_block` inputs of a row in the store.

        int8 (Q8_0 of llama.cpp) has a float16 scale, then a byte for each integer. int4 (Q4_0) has
        16 bytes after the scale. Their low nibbles are inputs 0 to 15, the high ones 16 to 31, each
        integer + 8. llama.cpp's ggml-common.h has the layouts of the others.
        """
        assert self in STORED_FORMATS
        if self.layout is not None:
            return self.layout.stored_bytes
        return 34 if self is IntegerFormat.INT8 else 18


_LAYOUTS = {
    IntegerFormat.Q4_K: BlockLayout(256, 144, 148),
    IntegerFormat.Q5_K: BlockLayout(256, 176, 180),
    IntegerFormat.Q6_K: BlockLayout(256, 210, 210),
    IntegerFormat.IQ4_XS: BlockLayout(256, 136, 138),
    IntegerFormat.Q2_K: BlockLayout(256, 84, 84),
    IntegerFormat.Q3_K: BlockLayout(256, 110, 110),
    IntegerFormat.Q4_1: BlockLayout(32, 20, 20),
    IntegerFormat.Q5_0: BlockLayout(32, 22, 22),
    IntegerFormat.Q5_1: BlockLayout(32, 24, 24),
    IntegerFormat.IQ4_NL: BlockLayout(32, 18, 18),
    IntegerFormat.IQ3_S: BlockLayout(256, 110, 110),
    IntegerFormat.IQ3_XXS: BlockLayout(256, 98, 98),
    IntegerFormat.IQ2_S: BlockLayout(256, 82, 82),
    IntegerFormat.IQ2_XS: BlockLayout(256, 74, 74),
    IntegerFormat.IQ2_XXS: BlockLayout(256, 66, 66),
    IntegerFormat.IQ1_S: BlockLayout(256, 50, 50),
    IntegerFormat.IQ1_M: BlockLayout(256, 56, 56),
    IntegerFormat.TQ1_0: BlockLayout(256, 54, 54),
    IntegerFormat.TQ2_0: BlockLayout(256, 66, 66),
    IntegerFormat.MXFP4: BlockLayout(32, 17, 17),
    IntegerFormat.NVFP4: BlockLayout(64, 36, 36),
    IntegerFormat.Q1_0: BlockLayout(128, 18, 18),
    IntegerFormat.Q2_0: BlockLayout(64, 18, 18),
    IntegerFormat.INT4_ZEROS: BlockLayout(32, 19, 19),
}
BLOCK_FORMATS = tuple(_LAYOUTS)
MODEL_FORMATS = (IntegerFormat.INT8, IntegerFormat.INT4)
"""Formats for all of a model's matrices, and for one that is stored. int2 is for single experts
(`ExpertWidths`): in every matrix it would cost most of a model's quality."""
STORED_FORMATS = (*MODEL_FORMATS, *BLOCK_FORMATS)
"""Formats of single tensors in the store."""


@dataclass(frozen=True, slots=True)
class ExpertWidths:
    """How a quantised model keeps each expert, by what each was measured to cost.

    `layers` has a text for every layer, in which an expert is one digit, its bits: 2, 4 or 8. A
    layer without experts has the empty text.
    """

    layers: tuple[str, ...]

    def of(self, layer: int, expert: int) -> IntegerFormat:
        return IntegerFormat(f"int{self.layers[layer][expert]}")


WHOLE_HEAD = "none"
"""The word for weights, or an LM head, that keep the dtype."""


class Quantisation(StrEnum):
    """How a node keeps a model's weights as small integers: the matrices of its blocks, and its LM
    head.

    Activations, KV and embeddings keep the deployment's dtype. The head is int8 unless the name has
    another format. Unquantised it is up to half of a small model's bytes, and int4 in only the head
    costs nearly as much quality as in all blocks. In `STORED` every matrix, embedding and head
    included, keeps the format in which it is stored.
    """

    INT8 = "int8"
    INT4 = "int4"
    INT8_HEAD_INT4 = "int8-head-int4"
    INT4_HEAD_INT4 = "int4-head-int4"
    INT8_HEAD_WHOLE = "int8-head-none"
    INT4_HEAD_WHOLE = "int4-head-none"
    STORED = "stored"

    @classmethod
    def of(cls, blocks: str, head: str | None = None) -> Quantisation:
        """`blocks` is `int8`, `int4` or `stored`. `head` is `int8`, `int4` or `none`; None is the
        default."""
        return cls(blocks if head in (None, IntegerFormat.INT8) else f"{blocks}-head-{head}")

    @classmethod
    def parse(cls, text: str, field: str = "quantisation") -> Quantisation:
        return _member(cls, text, field)

    @property
    def blocks(self) -> IntegerFormat:
        """The format of the matrices of blocks; not for `STORED`, in which each has a format of its
        own."""
        return IntegerFormat(self.partition("-")[0])

    @property
    def head(self) -> IntegerFormat | None:
        """The format of the LM head; None if it keeps the dtype. Not for `STORED`."""
        written = self.partition("-head-")[2] or IntegerFormat.INT8
        return None if written == WHOLE_HEAD else IntegerFormat(written)


ROUNDED = tuple(
    quantisation for quantisation in Quantisation if quantisation is not Quantisation.STORED
)
"""Those that fit any model whose architecture quantises."""


def parse_quantisation(blocks: str | None, head: str | None) -> Quantisation | None:
    """The formats of `--quantise` and `--head-quantisation`. Raises InvalidArgumentError naming the
    option at fault."""
    if blocks is None:
        if head is not None:
            raise InvalidArgumentError(
                "--head-quantisation is about quantised weights: give --quantise too",
                field="head_quantisation",
            )
        return None
    if blocks == Quantisation.STORED:
        if head is not None:
            raise InvalidArgumentError(
                "--head-quantisation is for weights that are rounded: leave it out with --quantise "
                "stored",
                field="head_quantisation",
            )
        return Quantisation.STORED
    if head not in (None, WHOLE_HEAD, *MODEL_FORMATS):
        raise InvalidArgumentError(
            f"--head-quantisation {head!r} is unknown: use none, int8 or int4",
            field="head_quantisation",
        )
    return Quantisation.of(IntegerFormat.parse(blocks, "quantise"), head)


def weights_text(dtype: DType, quantisation: Quantisation | None) -> str:
    """The format in which a node stores its weights, in words."""
    return str(dtype) if quantisation is None else f"{quantisation} with {dtype}"
