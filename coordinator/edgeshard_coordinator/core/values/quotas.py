"""The share of one identity of a site: its requests at once, its tokens a minute, and its highest
priority.

An identity is a certificate's role and id, such as `client/app`, or a key's (`key_identity`), which
the file of quotas names `key/app`; '' is everyone in plaintext.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import KEY_ROLE, Role, shown_identity
from edgeshard.domain.ids import check_name

QUEUED_PER_SLOT = 4
"""Requests that may wait at a head for each one that may run; more are refused at once."""
QUEUED_OF_ONE = 2
"""The number of these that one identity may have, unless a quota sets another: the others have the
rest."""
EVERYONE_ELSE = "*"
MOST_IDENTITIES = 10_000
_ROLES = (Role.CLIENT, Role.OPERATOR, KEY_ROLE)
_LIMITS = {
    "requests": (1, 1_000_000),
    "tokens_per_minute": (1, 1_000_000_000),
    "max_priority": (-10, 10),
}
"""Least and most of each key."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of an identity; None if one was not given.

    `requests` are at once, at all deployments together; without it an identity has a share of each
    deployment's. `tokens_per_minute` counts prompts' and new tokens. `max_priority` is the highest
    that a request may have.
    """

    requests: int | None = None
    tokens_per_minute: int | None = None
    max_priority: int | None = None


@dataclass(frozen=True, slots=True)
class Quotas:
    """The quotas of the `named` identities, and that of all others."""

    named: Mapping[str, Quota] = field(default_factory=dict)
    others: Quota = Quota()

    def of(self, identity: str) -> Quota:
        return self.named.get(shown_identity(identity), self.others)

    def max_priority_of(self, identity: str) -> int:
        """The highest priority of an identity. A client with a higher one would make all others
        wait, so it needs a quota for it."""
        priority = self.of(identity).max_priority
        if priority is not None:
            return priority
        is_client = identity.startswith((f"{Role.CLIENT}/", f"{KEY_ROLE}/"))
        return 0 if is_client else _LIMITS["max_priority"][1]


def most_requests(running: int) -> int:
    """The number of requests that may run or wait at a deployment that runs `running` of them at
    once."""
    return running * (1 + QUEUED_PER_SLOT)


def parse_quotas(document: Mapping[str, Any], what: str) -> Quotas:
    """The quotas of a decoded TOML file: a section for each identity, and `*` for everyone else.
    Keys of `*` also count for an identity whose own section lacks them.

    Raises InvalidArgumentError of the key at fault; `what` begins its message.
    """
    if len(document) > MOST_IDENTITIES:
        raise InvalidArgumentError(
            f"{what}: has more than {MOST_IDENTITIES} identities", field="quotas"
        )
    sections = {name: _section(what, name, section) for name, section in document.items()}
    everyone = sections.pop(EVERYONE_ELSE, {})
    return Quotas(
        {name: Quota(**{**everyone, **section}) for name, section in sections.items()},
        Quota(**everyone),
    )


def _section(what: str, name: str, section: Any) -> dict[str, int]:
    _check_identity(what, name)
    if not isinstance(section, dict):
        raise InvalidArgumentError(
            f'{what}: {name[:80]} must be a section, ["{name[:80]}"]', field=name
        )
    for key, value in section.items():
        if key not in _LIMITS:
            raise InvalidArgumentError(
                f'{what}: unknown key {key[:80]!r} in ["{name}"]; keys are {", ".join(_LIMITS)}',
                field=key,
                reason="UNKNOWN_KEY",
            )
        least, most = _LIMITS[key]
        if type(value) is not int or not least <= value <= most:
            raise InvalidArgumentError(
                f'{what}: {key} in ["{name}"] must be a whole number from {least} to {most}',
                field=key,
            )
    return section


def _check_identity(what: str, name: str) -> None:
    if name == EVERYONE_ELSE:
        return
    role, _, id = name.partition("/")
    try:
        if role in _ROLES and check_name(id, name):
            return
    except InvalidArgumentError:
        pass  # The next check reports it for the whole.
    raise InvalidArgumentError(
        f"{what}: {name[:80]!r} is not an identity: write client/NAME, operator/NAME, key/NAME, or "
        "* for all others",
        field=name,
        reason="UNKNOWN_KEY",
    )
