"""What somebody did to a site, or was refused."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
BEGUN = "begun"
"""The result of a call that takes a while, until it has another."""
CALLER_LEFT = "CALLER_LEFT"
"""Its caller left before the answer: it may have taken effect."""
MOST_ENTRIES = 1000
"""That are read at once."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """`time` is UTC by ISO 8601. `who` is a certificate's role and id (`operator/admin`), in plaintext the address.

    `what` is the method, `target` the name of what it was about, `result` `ok`, `begun` or an error's reason.
    `suppressed` entries of others than operators came before it so fast that they were not written.
    """

    time: str
    who: str
    what: str
    target: str
    result: str
    address: str
    suppressed: int = 0
