"""The options of generation and of the form of an answer as options of a command, by reflection on
their one definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

from edgeshard.cli.commands.command_options import OptionGroup, declared, named_only, option, switch
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.options import OptionField, option_fields
from edgeshard.domain.requests.conversation import GenerationDefaults
from edgeshard.domain.requests.generation import (
    GUIDE_LIMIT_BYTES,
    Biases,
    Generation,
    Guide,
    GuideKind,
    Sampling,
)

UNSET = {
    "max_new_tokens": "Generate at most N tokens (default: 128). Use 0 only with --prompt-logprobs."
}
"""Options for which it matters whether they were given at all, and their help."""

_UNSET_IN_CHAT = {
    "max_new_tokens": "Generate at most N tokens (default: all that fit in the context)."
}
_RECOMMENDED = frozenset(item.name for item in fields(GenerationDefaults))
"""Options whose default in a chat is the value that the model recommends, if it has one."""


def _options() -> dict[str, OptionField]:
    """Options that have a flag, by their names as parameters: sampling follows the first of
    `Generation`."""
    first, *others = (item for item in option_fields(Generation) if item.flags)
    return {
        item.option.flag or item.keyword: item
        for item in (first, *option_fields(Sampling), *others)
    }


OPTIONS = _options()


def generation_option(name: str, help: str = "", **more: Any) -> Any:
    """One of them for a command's own parameter, in `Annotated`."""
    return declared(OPTIONS[name], help, **more)


def _value_of(options: dict[str, Any]) -> dict[str, Any]:
    """The values by the SDK's keywords, without those that can be repeated and were not given."""
    return {
        OPTIONS[name].keyword: _biases(value) if OPTIONS[name].kind == Biases else value
        for name, value in options.items()
        if value is not None
    }


def _biases(texts: Sequence[str]) -> dict[int, float]:
    """Raises InvalidArgumentError for a text that is not of the form ID=BIAS."""
    biases = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise InvalidArgumentError(
                f"logit_bias: {text!r} is not of the form ID=BIAS, such as 42=-100",
                field="logit_bias",
            ) from None
    return biases


def _parameter(
    name: str, item: OptionField, helps: Mapping[str, str], recommended: frozenset[str]
) -> Parameter:
    kind, default = item.kind, item.default
    if item.keyword in UNSET:
        kind, default = kind | None, None
    if isinstance(default, tuple):
        kind, default = list[str] | None, None
    default_text = (
        {"show_default": f"the model's, else {default}"} if item.name in recommended else {}
    )
    about = declared(item, helps.get(item.keyword, ""), min=item.option.low, **default_text)
    return named_only(name, Annotated[kind, about], default)


def _group(helps: Mapping[str, str], recommended: frozenset[str] = frozenset()) -> OptionGroup:
    return OptionGroup(
        [_parameter(name, item, helps, recommended) for name, item in OPTIONS.items()], _value_of
    )


GENERATION = _group(UNSET)
"""All of them; a command gets their values by the SDK's keywords."""

CHAT_GENERATION = _group(_UNSET_IN_CHAT, _RECOMMENDED)
"""The same options, with the defaults of a chat in the help."""


@dataclass(frozen=True, slots=True)
class GuideOptions:
    """The options; at most one may be given."""

    json: Annotated[bool, switch("--json", "Make the answer a JSON object.")] = False
    json_schema: Annotated[
        Path | None, option("FILE", "Make the answer JSON that matches this JSON schema.")
    ] = None
    regex: Annotated[
        str | None, option("REGEX", "Make the answer match this regular expression.")
    ] = None
    grammar: Annotated[
        Path | None, option("FILE", "Make the answer follow this grammar, in Lark's syntax.")
    ] = None

    def guide(self) -> Guide | None:
        """Raises InvalidArgumentError naming the option for a second guide, or a file that cannot
        be read."""
        names = [
            item.name for item in fields(self) if getattr(self, item.name) not in (None, False)
        ]
        if len(names) > 1:
            flag = f"--{names[-1].replace('_', '-')}"
            raise InvalidArgumentError(
                f"{flag}: an answer has one guide; leave out the others", field=flag
            )
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
            # A byte more than a guide may have, so that a huge file named by mistake is refused by
            # its size.
            return Guide(kind, file.read(GUIDE_LIMIT_BYTES + 1).decode())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidArgumentError(
            f"{option}: {path} cannot be read: {why}", field=option
        ) from None
