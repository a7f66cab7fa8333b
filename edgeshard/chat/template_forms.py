"""What a chat template reads of a message, and messages in the forms that it reads.

Templates differ: some join a call's arguments as text, others walk through an object. Some test
`content is none`. Each reads reasoning under a name of its own. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import nodes

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""The names of a message's reasoning, in clients and in templates."""
_PROBE = "edgeshard-probe"
"""A text that no template contains."""

Message = Mapping[str, Any]


class Arguments(dict[str, Any]):
    """The arguments of a call: an object for templates that walk through it, its JSON text for
    those that join it."""

    __slots__ = ("_text",)

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """The form in which a template gets messages.

    `reasoning_names` are those that it reads. `null_content`: the empty content of a message with
    calls is None. `content_parts`: a text is a list of one part. `thinking_parts`: reasoning is a
    part of the content, of that type. `text_arguments`: arguments are text even if they are an
    object. `empty_arguments`: text that is no JSON object is an object without members.
    `has_reasoning` is False if reasoning is left out.
    """

    reasoning_names: tuple[str, ...] = REASONING_NAMES
    null_content: bool = False
    content_parts: bool = False
    thinking_parts: bool = False
    text_arguments: bool = False
    empty_arguments: bool = False
    has_reasoning: bool = True

    def alternatives(self) -> Iterator[TemplateForm]:
        """This form, then those to try if the template fails on it: with one difference each, then
        with all."""
        yield self
        for difference in _DIFFERENCES:
            yield replace(self, **difference)
        yield replace(self, empty_arguments=True, null_content=False, has_reasoning=False)

    def of(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """`messages`, as `parse_messages` returns them, in this form."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> dict[str, Any]:
        names = [name for name in REASONING_NAMES if message.get(name)]
        changed = {name: value for name, value in message.items() if name not in names}
        calls = changed.pop("tool_calls", [])
        if calls:
            changed["tool_calls"] = [self._call(call) for call in calls]
        changed["content"] = self._content(message["content"], has_calls=bool(calls))
        if not names or not self.has_reasoning:
            return changed
        read = [name for name in names if name in self.reasoning_names]
        reasoning = message[(read or names)[0]]
        if self.thinking_parts:
            changed["content"] = [
                {"type": "thinking", "thinking": reasoning},
                *_parts(message["content"]),
            ]
        else:
            changed[(read or self.reasoning_names or names)[0]] = reasoning
        return changed

    def _content(self, content: str, *, has_calls: bool) -> Any:
        if self.null_content and has_calls and not content:
            return None
        return _parts(content) if self.content_parts else content

    def _call(self, call: Message) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, Arguments):
            arguments = str(arguments) if self.text_arguments else arguments
        elif self.empty_arguments:
            arguments = Arguments({}, arguments)
        return {**call, "function": {**function, "arguments": arguments}}


_DIFFERENCES: tuple[dict[str, Any], ...] = (
    {"empty_arguments": True},
    {"text_arguments": True},
    {"null_content": False},
    {"content_parts": True},
    {"has_reasoning": False},
)


def form_of(tree: nodes.Template) -> TemplateForm:
    """What the syntax tree of a template shows of the form that it reads; not whether it reads
    parts only."""
    names = _read_names(tree)
    thinking_parts = names == ("thinking",) and _tests_thinking_parts(tree)
    return TemplateForm(names, _tests_null(tree), thinking_parts=thinking_parts)


def reads_parts_only(render: Callable[[Sequence[Message]], str]) -> bool:
    """Whether a text is in a template's prompt as a part, but not as it is.

    `render` returns the prompt of messages, "" if the template fails on them.
    """
    return _PROBE not in render(_user_says(_PROBE)) and _PROBE in render(_user_says(_parts(_PROBE)))


def _parts(text: str) -> list[dict[str, str]]:
    """A content that is a list of parts."""
    return [{"type": "text", "text": text}] if text else []


def _user_says(content: Any) -> list[Message]:
    return [{"role": "user", "content": content}]


def _read_names(tree: nodes.Template) -> tuple[str, ...]:
    """The names of reasoning that a template reads, in their order; if it reads none by itself,
    those in its texts."""
    read = [
        _key(node)
        for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call, nodes.Compare))
    ]
    texts = [node.value for node in tree.find_all(nodes.Const)]
    for keys in (read, texts):
        names = dict.fromkeys(key for key in keys if key in REASONING_NAMES)
        if names:
            return tuple(names)
    return ()


def _key(node: nodes.Node) -> str:
    """The key that `x.key`, `x["key"]`, `x.get("key")` or `"key" in x` reads; "" for any other
    expression."""
    match node:
        case nodes.Getattr(attr=str(key)):
            return key
        case nodes.Getitem(arg=nodes.Const(value=str(key))):
            return key
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=str(key)), *_]):
            return key
        case nodes.Compare(
            expr=nodes.Const(value=str(key)), ops=[nodes.Operand(op="in" | "notin"), *_]
        ):
            return key
    return ""


def _tests_thinking_parts(tree: nodes.Template) -> bool:
    """Whether a template compares the type of a part with `thinking`."""
    compared = (node for node in tree.find_all(nodes.Compare) if _key(node.expr) == "type")
    operands = (operand.expr for node in compared for operand in node.ops)
    return any(
        isinstance(operand, nodes.Const) and operand.value == "thinking" for operand in operands
    )


def _tests_null(tree: nodes.Template) -> bool:
    """Whether a template tests a message's content for None."""
    names = _content_names(tree)
    tests = (test.node for test in tree.find_all(nodes.Test) if test.name == "none")
    compared = (
        comparison.expr
        for comparison in tree.find_all(nodes.Compare)
        if any(_is_none(operand.expr) for operand in comparison.ops)
    )
    return any(_is_content(node, names) for node in (*tests, *compared))


def _is_none(expression: nodes.Expr) -> bool:
    return isinstance(expression, nodes.Const) and expression.value is None


def _content_names(tree: nodes.Template) -> set[str]:
    """The variables that hold a message's content."""
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        target = assignment.target
        if isinstance(target, nodes.Name) and _is_content(assignment.node, names):
            names.add(target.name)
    return names


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    return node.name in names if isinstance(node, nodes.Name) else _key(node) == "content"
