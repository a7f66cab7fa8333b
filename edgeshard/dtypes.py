"""Element types of tensors, without torch."""

from __future__ import annotations

from enum import StrEnum

from edgeshard.errors import InvalidArgumentError


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
