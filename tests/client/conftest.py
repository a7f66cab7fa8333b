"""The scripted site of `tests.support`, for the tests of the client."""

from __future__ import annotations

from tests.support.scripted_site import site

__all__ = ["site"]
