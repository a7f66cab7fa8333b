"""A conversation from a stranger: JSON text to messages and tools of the form that chat templates
take.

The form is the one of OpenAI's chat completions. Parts of text are joined into one text, and the
arguments of calls are objects that also have their text. A null is an absent field. Parts that a
text model cannot read are refused by name. A model's own earlier messages are not refused: unknown
fields and parts are dropped, and a call of another form is passed as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgeshard.chat.template_forms import REASONING_NAMES, Arguments
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.conversation import Conversation
from edgeshard.domain.requests.generation import PROMPT_LIMIT_BYTES, text_bytes
from edgeshard.storage.forms import JSON_VALUES_LIMIT, json_values

TEXTS = ("messages", "tools", "variables")
"""The fields of a conversation that are JSON texts."""
VARIABLES_LIMIT_BYTES = 64 << 10
"""Limit of a template's further variables: switches and short texts. A template may go through all
of them over and over."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
MESSAGE_FIELDS: Mapping[str, str] = {
    "role": "system, developer, user, assistant, tool or function",
    "content": "a text, or a list of parts of text",
    "name": "the speaker, or the tool",
    "tool_calls": "calls that the assistant made",
    "tool_call_id": "the call that a tool's message answers",
    "function_call": "the older form of tool_calls",
    "reasoning_content": "what the assistant thought",
    "reasoning": "another name of it",
    "thinking": "another name of it",
}
"""The fields of a message that are used; others are ignored."""
_CALLS = ("tool_calls", "function_call")
_PAST_ROLES = ("assistant", "tool", "function")
_TEXTS = ("name", "tool_call_id")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def check_sizes(conversation: Conversation) -> None:
    """Raise InvalidArgumentError naming a text of a conversation that is too long, before it is
    read."""
    for field in TEXTS:
        _check_size(getattr(conversation, field), field)


def parse_messages(text: str) -> list[dict[str, Any]]:
    """Raises InvalidArgumentError naming the field at fault, such as `messages[2].content`."""
    messages = _parsed(text, "messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "is not a list of at least one message")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def parse_tools(text: str) -> list[dict[str, Any]]:
    """The tools; empty if the text is "". Raises InvalidArgumentError naming the field at fault,
    such as `tools[0].function`."""
    tools = _parsed(text, "tools") if text else []
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise _wrong("tools", "is not a list")
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        tool = tools[place] = _present(tool)
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(tool, dict)
            or tool.get("type", "function") != "function"
            or not isinstance(function, dict)
        ):
            raise _wrong(where, 'is not of the form {"type": "function", "function": {...}}')
        function = tool["function"] = _present(function)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _wrong(f"{where}.function.name", "is missing")
        if not isinstance(function.get("parameters", {}), dict):
            raise _wrong(f"{where}.function.parameters", "is not a JSON schema")
    return tools


def parse_variables(text: str) -> dict[str, Any]:
    """Further variables of the template; empty if the text is "". Raises InvalidArgumentError
    naming `variables`."""
    variables = _present(_parsed(text, "variables")) if text else {}
    if not isinstance(variables, dict):
        raise _wrong("variables", "is not an object")
    conflicts = sorted(_RESERVED & variables.keys())
    if conflicts:
        raise _wrong(f"variables.{conflicts[0]}", "has an argument of its own")
    return variables


def _parsed(text: str, field: str) -> Any:
    _check_size(text, field)
    if json_values(text) > JSON_VALUES_LIMIT:
        raise _wrong(
            field, f"may hold more than {JSON_VALUES_LIMIT} values, the most that are read"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(field, "is not valid JSON") from None


def _check_size(text: str, field: str) -> None:
    limit, reason = PROMPT_LIMIT_BYTES, "PROMPT_TOO_LONG"
    if field == "variables":
        limit, reason = VARIABLES_LIMIT_BYTES, "VARIABLES_TOO_LONG"
    if text_bytes(text) > limit:
        raise _wrong(field, f"has more than {limit} bytes; shorten it", reason)


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(where, "is not an object with a role and a content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(sorted(_ROLES))}")
    result = {key: value for key, value in _present(message).items() if key in MESSAGE_FIELDS}
    for key in _TEXTS:
        if not isinstance(result.get(key, ""), str):
            raise _wrong(f"{where}.{key}", "is not text")
    for key in REASONING_NAMES:
        if not isinstance(result.get(key, ""), str):
            del result[key]  # Another server's form of it.
    is_past = role == "assistant"
    result["role"] = "tool" if role == "function" else role
    result["content"] = _content(message.get("content"), f"{where}.content", is_past=is_past)
    if any(key in result for key in _CALLS):
        _take_calls(result)
    elif "content" not in message and role not in _PAST_ROLES:
        raise _wrong(f"{where}.content", "is missing")
    return result


def _present(value: Any) -> Any:
    """An object without its nulls; other values as they are."""
    return (
        {key: part for key, part in value.items() if part is not None}
        if isinstance(value, dict)
        else value
    )


def _content(content: Any, where: str, *, is_past: bool) -> str:
    """The text of a message's content; what a model wrote before (`is_past`) may have parts that
    are no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _text(content, where)
    if not isinstance(content, list):
        raise _wrong(where, "is neither text nor a list of parts")
    texts: list[str] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal" and is_past:
            kind, part = "text", {"text": part.get("refusal")}
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(_text(part["text"], f"{where}[{place}].text"))
        elif not is_past:
            raise _wrong(
                f"{where}[{place}].type",
                f"is {str(kind)[:40]!r}; only parts of type text are supported",
            )
    return "".join(texts)


def _take_calls(message: dict[str, Any]) -> None:
    """Put a message's calls into one form. A call without a function's name becomes a part of the
    message's text."""
    older = message.pop("function_call", None)
    raw_calls = message.pop("tool_calls", [])
    calls = raw_calls if isinstance(raw_calls, list) else [raw_calls]
    if older is not None:
        calls = [*calls, {"function": older}]
    functions: list[dict[str, Any]] = []
    for call in calls:
        function = _called(call)
        if function is None:
            message["content"] += json.dumps(call)
        else:
            functions.append(function)
    message["tool_calls"] = functions


def _called(call: Any) -> dict[str, Any] | None:
    """A call of a function; None if it names none. Arguments that are no JSON object stay as the
    model wrote them."""
    present = _present(call)
    if not isinstance(present, dict):
        return None
    custom = _present(present.pop("custom", None))
    if isinstance(custom, dict):
        present["function"] = {
            "name": custom.get("name"),
            "arguments": {"input": custom.get("input")},
        }
    function = _present(present.get("function"))
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = _arguments(function.get("arguments"))
    return {**present, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(raw_value: Any) -> Arguments | str:
    """The arguments of a call, as an object and as text; only as text if they are no JSON
    object."""
    text = raw_value if isinstance(raw_value, str) else json.dumps(raw_value, ensure_ascii=False)
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    if values is None:
        return Arguments({}, "{}")
    return Arguments(values, text or "{}") if isinstance(values, dict) else text


def _text(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _wrong(where, "holds half of a surrogate pair, which is not text") from None
    return text


def _wrong(field: str, what: str, reason: str = "INVALID_MESSAGES") -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} {what}", field=field, reason=reason)
