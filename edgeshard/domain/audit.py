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
    """`time` is UTC by ISO 8601. `who` is a certificate's role and id (`operator/admin`), in
    plaintext the address.

    `what` is the method, `target` the name of the object, `result` `ok`, `begun` or an error's
    reason. `suppressed` counts earlier entries like it that were not written, because they came too
    fast or the disk refused them. If the result is SUPPRESSED, the entry only counts others:
    entries of `what` with the result `target`.
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
    """The verdict of the seals on one file of the audit log, which has `lines` lines, including
    seals.

    Lines up to `sealed` are unchanged. `broken_at` is the first line, from 1, that was changed, 0
    if there is none, and `why` is the reason. Lines after the last seal of the newest file are not
    sealed yet.
    """

    file: str
    lines: int
    sealed: int
    broken_at: int = 0
    why: str = ""
