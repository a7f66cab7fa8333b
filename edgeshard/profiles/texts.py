"""Profiles as JSON text, in which they are kept, and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeVar

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.nodes.profile import PROFILE_VERSION, ComputeProfile, LinkProfile
from edgeshard.forms import Forms

ProfileT = TypeVar("ProfileT", ComputeProfile, LinkProfile)

_PROFILE = Forms("profile", "measure again")


@dataclass(frozen=True, slots=True)
class _Versioned:
    version: int

    def check(self) -> None:
        if self.version != PROFILE_VERSION:
            raise InvalidArgumentError(
                f"the profile is of version {self.version}, not {PROFILE_VERSION}; measure again", field="version"
            )


def profile_text(profile: ComputeProfile | LinkProfile) -> str:
    """A profile and its version as JSON: a link's in one line, a node's in many."""
    plain = {"version": PROFILE_VERSION, **_PROFILE.write(type(profile), profile)}
    return json.dumps(plain, indent=1 if isinstance(profile, ComputeProfile) else None)


def parse_profile(kind: type[ProfileT], text: str) -> ProfileT:
    """The profile of a text. Raises InvalidArgumentError naming the field at fault, also for another version."""
    _PROFILE.from_text(_Versioned, text)
    return _PROFILE.from_text(kind, text)
