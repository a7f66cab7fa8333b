"""Errors as values: their text fits everywhere."""

from __future__ import annotations

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.wire.codec import from_failure, to_failure
from edgeshard.wire.status import to_status


def test_an_error_that_quotes_a_strangers_input_fits_into_a_status() -> None:
    """A status is a header, of 8 KiB in all; it holds the message twice."""
    error = InvalidArgumentError("x" * 10**6 + " is no name", field="y" * 10**6)
    assert (
        len(error.message) < 2100 and error.message.endswith("...") and str(error) == error.message
    )
    assert len(to_status(error).SerializeToString()) < 6000
    assert from_failure(to_failure(error)) == error
    short = InvalidArgumentError("x" * 2000, field="y")
    assert short.message == "x" * 2000
