"""The file of quotas: their owners, and that errors in it are named."""

from __future__ import annotations

from typing import Any

import pytest
from edgeshard_coordinator.core.values.quotas import MOST_IDENTITIES, Quota, parse_quotas

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.storage.inputs import parse_toml


def parsed(text: str) -> Any:
    return parse_quotas(parse_toml(text, "quotas", "quotas"), "quotas")


def test_everyone_elses_keys_count_where_an_identity_has_none_of_its_own() -> None:
    quotas = parsed("""
        ["*"]
        requests = 4
        tokens_per_minute = 6000
        ["client/app"]
        tokens_per_minute = 60_000
        max_priority = 3
    """)
    assert quotas.of("client/app") == Quota(4, 60_000, 3)
    assert (
        quotas.of("client/other")
        == quotas.of("operator/app")
        == quotas.of("")
        == Quota(4, 6000, None)
    )


def test_a_client_may_not_push_in_unless_somebody_says_so() -> None:
    quotas = parsed('["client/app"]\nmax_priority = 5\n["operator/night"]\nmax_priority = -5\n')
    highest = {
        who: quotas.max_priority_of(who)
        for who in ("client/app", "client/b", "operator/a", "operator/night", "")
    }
    assert highest == {
        "client/app": 5,
        "client/b": 0,
        "operator/a": 10,
        "operator/night": -5,
        "": 10,
    }
    assert parsed('["*"]\nmax_priority = 2\n').max_priority_of("client/b") == 2


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('["client/app"]\nrequest = 1\n', "request"),
        ('["client/app"]\nrequests = 0\n', "requests"),
        ('["client/app"]\nrequests = 1_000_001\n', "requests"),
        ('["client/app"]\nrequests = true\n', "requests"),
        ('["client/app"]\nrequests = 1.5\n', "requests"),
        ('["client/app"]\ntokens_per_minute = "many"\n', "tokens_per_minute"),
        ('["client/app"]\ntokens_per_minute = -1\n', "tokens_per_minute"),
        ('["*"]\nmax_priority = 11\n', "max_priority"),
        ("[app]\nrequests = 1\n", "app"),
        ('["agent/a"]\nrequests = 1\n', "agent/a"),
        ('["client/"]\nrequests = 1\n', "client/"),
        ('["client/../app"]\nrequests = 1\n', "client/../app"),
        ('["client/a/b"]\nrequests = 1\n', "client/a/b"),
        ('"client/app" = 3\n', "client/app"),
        ("requests = 3\n", "requests"),
        ("[client/app]\n", "quotas"),
        ("".join(f'["client/a{n}"]\n' for n in range(MOST_IDENTITIES + 1)), "quotas"),
    ],
)
def test_a_file_that_is_wrong_is_named(text: str, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        parsed(text)
    assert refused.value.field == field and refused.value.message.startswith("quotas")
