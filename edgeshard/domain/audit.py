"""Actions of callers on a site, and refusals."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
BEGUN = "begun"
"""The result of a call that takes a while, until it has another."""
CALLER_LEFT = "CALLER_LEFT"
"""Its caller left before the answer: it may have taken effect."""
SUPPRESSED = "SUPPRESSED"
"""The result of an entry that only counts others."""
MOST_ENTRIES = 1000
"""That are read at once."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """`time` is UTC by ISO 8601. `who` is a certificate's role and id (`operator/admin`), in plaintext the address.

    `what` is the method, `target` the name of what it was about, `result` `ok`, `begun` or an error's reason.
    `suppressed` entries like it came before it so fast that they were not written, or the disk refused them. Where the
    result is SUPPRESSED it says of nothing else: of entries of `what` with the result `target`.
    """

    time: str
    who: str
    what: str
    target: str
    result: str
    address: str
    suppressed: int = 0


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """The verdict of the seals on one file of the audit log, which has so many `lines`, seals among them.

    Those up to `sealed` are as they were written. `broken_at` is the first, from 1, of which that is not so, 0 for
    none, and `why` what is wrong. Lines behind the last seal of the newest file are not sealed yet.
    """

    file: str
    lines: int
    sealed: int
    broken_at: int = 0
    why: str = ""
