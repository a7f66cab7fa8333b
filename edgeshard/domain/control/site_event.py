"""The latest events of a site, for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MOST_EVENTS = 1000
"""That a coordinator keeps, and that are read at once."""


class Subject(StrEnum):
    """The thing that an event is about."""

    NODE = "node"
    LINK = "link"
    DEPLOYMENT = "deployment"


@dataclass(frozen=True, slots=True)
class SiteEvent:
    """`number` counts a coordinator's events from 1, anew after each of its starts; `time` is UTC by ISO 8601.

    `name` is the node's or the deployment's, `FROM -> TO` of a link; `what` one word or two, such as `away` or a
    deployment's phase; `detail` says more, and may be empty. `warning` is whether somebody may have to do something.
    """

    number: int
    time: str
    subject: Subject
    name: str
    what: str
    detail: str = ""
    warning: bool = False
