"""Element types of tensors and weights, without torch."""

from __future__ import annotations

from enum import StrEnum

from edgeshard.domain.errors import InvalidArgumentError


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
        try:
            return cls(text)
        except ValueError:
            choices = ", ".join(cls)
            raise InvalidArgumentError(f"{field} {text!r} is unknown: use one of {choices}", field=field) from None


class Quantisation(StrEnum):
    """Weights as small integers, a scale for each group of inputs; activations and KV keep the deployment's dtype."""

    INT8 = "int8"
    INT4 = "int4"

    @classmethod
    def parse(cls, text: str, field: str = "quantisation") -> Quantisation:
        try:
            return cls(text)
        except ValueError:
            choices = " or ".join(cls)
            raise InvalidArgumentError(f"{field} {text!r} is unknown: use {choices}", field=field) from None

    @property
    def group(self) -> int:
        """Consecutive inputs of a row that share a scale."""
        return 64 if self is Quantisation.INT8 else 32

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix of this many outputs and inputs: its integers and the scales, 2 bytes each."""
        bits = 8 if self is Quantisation.INT8 else 4
        return rows * (-(-columns * bits // 8) + 2 * -(-columns // self.group))


def weights_text(dtype: DType, quantisation: Quantisation | None) -> str:
    """How a box keeps its weights, in words."""
    return str(dtype) if quantisation is None else f"{quantisation} with {dtype}"
