"""A conversation from a stranger: JSON text to messages and tools of the form that chat templates take.

The form is that of OpenAI's chat completions, with two changes that templates expect: parts of text are one text, and
the arguments of calls are objects. What a text model cannot read is refused by name.
"""

from __future__ import annotations

import json
from typing import Any

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.chat import Conversation
from edgeshard.domain.requests.generation import PROMPT_LIMIT_BYTES, text_bytes
from edgeshard.storage.forms import JSON_VALUES_LIMIT, json_values

TEXTS = ("messages", "tools", "variables")
"""The fields of a conversation that are JSON texts."""
VARIABLES_LIMIT_BYTES = 64 << 10
"""Of a template's further variables: switches and short texts. A template may go through all of them over and over."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking", "refusal"}
)
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def check_sizes(conversation: Conversation) -> None:
    """Raise InvalidArgumentError naming a text of a conversation that is too long, before anybody reads it."""
    for field in TEXTS:
        _check_size(getattr(conversation, field), field)


def parse_messages(text: str) -> list[dict[str, Any]]:
    """Raises InvalidArgumentError naming the field at fault, such as `messages[2].content`."""
    messages = _parsed(text, "messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "is not a list of at least one message")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def parse_tools(text: str) -> list[dict[str, Any]]:
    """The tools; none for "". Raises InvalidArgumentError naming the field at fault, such as `tools[0].function`."""
    tools = _parsed(text, "tools") if text else []
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise _wrong("tools", "is not a list")
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise _wrong(where, 'is not of the form {"type": "function", "function": {...}}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _wrong(f"{where}.function.name", "is missing")
        if not isinstance(function.get("parameters", {}), dict):
            raise _wrong(f"{where}.function.parameters", "is not a JSON schema")
    return tools


def parse_variables(text: str) -> dict[str, Any]:
    """Further variables of the template; none for "". Raises InvalidArgumentError naming `variables`."""
    variables = _parsed(text, "variables") if text else {}
    if not isinstance(variables, dict):
        raise _wrong("variables", "is not an object")
    taken = sorted(_RESERVED & variables.keys())
    if taken:
        raise _wrong(f"variables.{taken[0]}", "has an argument of its own")
    return variables


def _parsed(text: str, field: str) -> Any:
    _check_size(text, field)
    if json_values(text) > JSON_VALUES_LIMIT:
        raise _wrong(field, f"may hold more than {JSON_VALUES_LIMIT} values, the most that are read")
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
    unknown = sorted(message.keys() - _KEYS)
    if unknown:
        raise _wrong(f"{where}.{unknown[0]}", f"is not supported; a message has {', '.join(sorted(_KEYS))}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(sorted(_ROLES))}")
    result = {key: value for key, value in message.items() if value is not None and key != "refusal"}
    for key in _TEXTS:
        if not isinstance(result.get(key, ""), str):
            raise _wrong(f"{where}.{key}", "is not text")
    result["content"] = _content(message.get("content"), f"{where}.content")
    if "tool_calls" in result:
        result["tool_calls"] = _calls(result["tool_calls"], f"{where}.tool_calls")
    elif "content" not in message:
        raise _wrong(f"{where}.content", "is missing")
    return result


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return _text(content, where)
    if not isinstance(content, list):
        raise _wrong(where, "is neither text nor a list of parts")
    texts: list[str] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise _wrong(f"{where}[{place}].type", f"is {str(kind)[:40]!r}; only parts of type text are supported")
        texts.append(_text(part["text"], f"{where}[{place}].text"))
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(where, "is not a list")
    return [_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(f"{where}.function", "is not an object with a name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise _wrong(f"{where}.function.arguments", "is not valid JSON") from None
    if not isinstance(arguments, dict):
        raise _wrong(f"{where}.function.arguments", "is not a JSON object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _text(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _wrong(where, "holds half of a surrogate pair, which is no text") from None
    return text


def _wrong(field: str, what: str, reason: str = "INVALID_MESSAGES") -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} {what}", field=field, reason=reason)
