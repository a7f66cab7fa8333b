"""The options of a command for the form of an answer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from edgeshard.cli.commands.options import option, switch
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.generation import GUIDE_LIMIT_BYTES, Guide, GuideKind


@dataclass(frozen=True, slots=True)
class GuideOptions:
    """The options; at most one may be given."""

    json: Annotated[bool, switch("--json", "Make the answer a JSON object.")] = False
    json_schema: Annotated[Path | None, option("FILE", "Make the answer JSON that matches this JSON schema.")] = None
    regex: Annotated[str | None, option("REGEX", "Make the answer match this regular expression.")] = None
    grammar: Annotated[Path | None, option("FILE", "Make the answer follow this grammar, in Lark's syntax.")] = None

    def guide(self) -> Guide | None:
        """Raises InvalidArgumentError naming the option for a second guide, or a file that cannot be read."""
        names = [item.name for item in fields(self) if getattr(self, item.name) not in (None, False)]
        if len(names) > 1:
            flag = f"--{names[-1].replace('_', '-')}"
            raise InvalidArgumentError(f"{flag}: an answer has one guide; leave out the others", field=flag)
        if self.json_schema is not None:
            return _guide_of_file(GuideKind.JSON_SCHEMA, self.json_schema, "--json-schema")
        if self.grammar is not None:
            return _guide_of_file(GuideKind.GRAMMAR, self.grammar, "--grammar")
        if self.regex is not None:
            return Guide(GuideKind.REGEX, self.regex)
        return Guide(GuideKind.JSON_OBJECT) if self.json else None


def _guide_of_file(kind: GuideKind, path: Path, option: str) -> Guide:
    try:
        with path.open("rb") as file:
            # A byte more than a guide may have, so that a huge file named by mistake is refused by its size.
            return Guide(kind, file.read(GUIDE_LIMIT_BYTES + 1).decode())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidArgumentError(f"{option}: {path} cannot be read: {why}", field=option) from None
