"""The latest events of a site, for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MOST_EVENTS = 1000
"""Most events that a coordinator keeps, and that are read at once."""


class Subject(StrEnum):
    """The thing that an event is about."""

    NODE = "node"
    LINK = "link"
    DEPLOYMENT = "deployment"


@dataclass(frozen=True, slots=True)
class SiteEvent:
    """`number` counts a coordinator's events from 1 after each of its starts; `time` is UTC by ISO 8601.

    `name` is the node's or the deployment's, `FROM -> TO` of a link. `what` is one word or two,
    such as `away` or a deployment's phase. `detail` adds more, and may be empty. `warning` is
    whether an operator may have to act.
    """

    number: int
    time: str
    subject: Subject
    name: str
    what: str
    detail: str = ""
    warning: bool = False
