"""The only exception tree. Foreign errors are translated once, at the boundary where they arise.

Every error names the field at fault if there is one, the remedy, and a stable `reason`. Its class
decides the gRPC status (`edgeshard.wire.status`), and the exit code of `edgectl`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar, Self

INTERRUPTED = 128 + 2
"""The exit code of a command that Ctrl-C (SIGINT) ended before it was done."""
EXIT_CODES = {
    **{
        0: "ok",
        1: "failed",
        2: "wrong usage",
        3: "not found",
        4: "denied",
        5: "unreachable",
        6: "timeout",
    },
    INTERRUPTED: "Ctrl-C",
}
"""What an exit code of EdgeShard's programs means."""

_LONGEST = 2000
_LONGEST_FIELD = 200
"""Characters of an error's message and of its field."""


class Code(IntEnum):
    """The google.rpc.Code values in use."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class EdgeShardError(Exception):
    """Base of every error EdgeShard raises on purpose.

    `reason` is a stable upper-case name for programs, `field` the input at fault ('' if there is
    none). `retry_after_s` is the number of seconds after which a retry may succeed (None if a retry
    would not help or is unknown).

    Errors are part of a daemon's state, and values like the rest of it: two with the same content
    are equal.
    """

    partial_text: str = ""
    """In the SDK: what a request that failed had been answered until then."""
    code: ClassVar[Code] = Code.INTERNAL
    exit_code: ClassVar[int] = 1
    default_reason: ClassVar[str] = "INTERNAL"
    """If a class names none, its code's name, or its base class's reason."""

    def __init_subclass__(cls) -> None:
        if "code" in vars(cls) and "default_reason" not in vars(cls):
            cls.default_reason = cls.code.name

    def __init__(
        self, message: str, *, field: str = "", reason: str = "", retry_after_s: float | None = None
    ) -> None:
        # It may quote a stranger's input, and has to fit into a log line and into the header of a
        # status.
        message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."
        super().__init__(message)
        self.message = message
        self.field = field[:_LONGEST_FIELD]
        self.reason = reason or self.default_reason
        self.retry_after_s = retry_after_s

    @classmethod
    def about(cls, field: str, why: str, reason: str = "") -> Self:
        """The error of a field at fault, whose name its message begins with."""
        return cls(f"{field}: {why}", field=field, reason=reason)

    def within(self, field: str) -> Self:
        """The same error of a value in this field of another."""
        path = f"{field}.{self.field}" if self.field else field
        begins = self.field and self.message.startswith(self.field)
        message = f"{field}.{self.message}" if begins else f"{field}: {self.message}"
        return type(self)(message, field=path, reason=self.reason, retry_after_s=self.retry_after_s)

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and isinstance(other, EdgeShardError)
            and self._said() == other._said()
        )

    def __hash__(self) -> int:
        return hash((type(self), *self._said()))

    def _said(self) -> tuple[str, str, str, float | None]:
        return self.message, self.field, self.reason, self.retry_after_s


class InternalError(EdgeShardError):
    """A bug or a broken invariant."""


class InvalidArgumentError(EdgeShardError):
    """The input is wrong whatever the state of the system."""

    code = Code.INVALID_ARGUMENT
    exit_code = 2


def invalid(field: str, why: str, reason: str = "") -> InvalidArgumentError:
    """The error for `field`; `why` follows its name in a sentence, and states the fault and the
    remedy."""
    return InvalidArgumentError(f"{field} {why}", field=field, reason=reason)


class UnsupportedModelError(InvalidArgumentError):
    """A model, or an option of its config.json, that EdgeShard does not run."""

    default_reason = "UNSUPPORTED_MODEL"


class PlacementError(InvalidArgumentError):
    """An explicit placement that cannot be: a gap, an overlap, an unknown node, the source not
    first."""

    default_reason = "INVALID_PLACEMENT"


class NotFoundError(EdgeShardError):
    code = Code.NOT_FOUND
    exit_code = 3


class AlreadyExistsError(EdgeShardError):
    code = Code.ALREADY_EXISTS


class DeniedError(EdgeShardError):
    code = Code.PERMISSION_DENIED
    exit_code = 4


class UnauthenticatedError(EdgeShardError):
    """No certificate, or one of another authority."""

    code = Code.UNAUTHENTICATED
    exit_code = 4


class ResourceExhaustedError(EdgeShardError):
    """Memory, KV blocks or places in a queue are short."""

    code = Code.RESOURCE_EXHAUSTED


class FailedPreconditionError(EdgeShardError):
    """The request is right but the system is not in the state for it."""

    code = Code.FAILED_PRECONDITION


class WireVersionError(FailedPreconditionError):
    default_reason = "WIRE_VERSION"


class StaleEpochError(FailedPreconditionError):
    """Something of a lower epoch arrived late and is refused."""

    default_reason = "STALE_EPOCH"


class AbortedError(EdgeShardError):
    """Lost a race with another change; asking again may succeed."""

    code = Code.ABORTED


class UnavailableError(EdgeShardError):
    """A process cannot be reached or is going away."""

    code = Code.UNAVAILABLE
    exit_code = 5


class DeadlineError(EdgeShardError):
    code = Code.DEADLINE_EXCEEDED
    exit_code = 6


class DataLossError(EdgeShardError):
    """Bytes that do not match their checksum, or a file that ends too early."""

    code = Code.DATA_LOSS


class CancelledRequestError(EdgeShardError):
    code = Code.CANCELLED


ERROR_BY_CODE: dict[int, type[EdgeShardError]] = {
    error.code: error for error in EdgeShardError.__subclasses__()
}
"""The class of errors for each code, without its subclasses."""


def extra_line(extra: str) -> str:
    """The command that installs a missing extra of the package; no index has the package, so not
    its name."""
    return f"pip install '.[{extra}]' in a checkout of EdgeShard, with the pip of this environment"
