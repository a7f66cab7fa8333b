"""Calls as models write them that were not taught JSON: in Python's form, and in Gemma's. Pure."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_MOST_DEPTH = 64
_NAME, _WORD = re.compile(r"[A-Za-z0-9_.-]+"), re.compile(r"[A-Za-z0-9_.+-]+")
_MARKED = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_QUOTED = re.compile(
    r"'''((?:[^\\]|\\.)*?)'''|\"\"\"((?:[^\\]|\\.)*?)\"\"\"|'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": "", "/": "/"}
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and arguments of a list of calls, `[f(a=1), g(b=["x"])]`, with every argument's name;
    None if the text is no such list."""
    reader = _Reader(text)
    try:
        reader.need("[")
        calls = [reader.python_call()]
        while reader.take(","):
            calls.append(reader.python_call())
        reader.need("]")
        reader.end()
    except ValueError:
        return None
    return calls


def gemma_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments of `call:f{a:1,b:<|"|>x<|"|>}`; None if the text has another
    form."""
    reader = _Reader(text)
    try:
        reader.need("call:")
        name = reader.name()
        reader.need("{")
        arguments = reader.pairs("}", ":", 0)
        reader.end()
    except ValueError:
        return None
    return name, arguments


class _Reader:
    """Reads a text from its beginning. Every method raises ValueError if it finds something
    else."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def take(self, sign: str) -> bool:
        """Whether this is next, after white space; then it is consumed."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        is_next = self._text.startswith(sign, self._at)
        self._at += len(sign) * is_next
        return is_next

    def need(self, sign: str) -> None:
        if not self.take(sign):
            raise ValueError(sign)

    def end(self) -> None:
        self.take("")
        if self._at < len(self._text):
            raise ValueError("more")

    def name(self) -> str:
        return self._next(_NAME)

    def python_call(self) -> tuple[str, dict[str, Any]]:
        name = self.name()
        self.need("(")
        return name, self.pairs(")", "=", 0)

    def pairs(self, close: str, sign: str, depth: int) -> dict[str, Any]:
        """Keys and values up to `close`, with `sign` between the two and commas between pairs."""
        pairs: dict[str, Any] = {}
        while not self.take(close):
            key = self._string()
            key = self.name() if key is None else key
            self.need(sign)
            pairs[key] = self._value(depth + 1)
            if not self.take(","):
                self.need(close)
                break
        return pairs

    def _items(self, close: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.take(close):
            items.append(self._value(depth + 1))
            if not self.take(","):
                self.need(close)
                break
        return items

    def _value(self, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise ValueError("too deep")
        for sign, close in (("[", "]"), ("(", ")")):
            if self.take(sign):
                return self._items(close, depth)
        if self.take("{"):
            return self.pairs("}", ":", depth)
        text = self._string()
        if text is not None:
            return text
        word = self._next(_WORD)
        return _WORDS[word] if word in _WORDS else strict_json(word)

    def _next(self, pattern: re.Pattern[str]) -> str:
        self.take("")
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError("something else")
        self._at = match.end()
        return match[0]

    def _string(self) -> str | None:
        """The next text in quotes; None if there is none."""
        self.take("")
        marked = _MARKED.match(self._text, self._at)
        quoted = None if marked else _QUOTED.match(self._text, self._at)
        match = marked or quoted
        if match is None:
            return None
        self._at = match.end()
        inside = next(part for part in match.groups() if part is not None)
        return inside if marked else _unescaped(inside)


def strict_json(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError for any other text, and for one with NaN, Infinity or a number beyond a
    double's range: such a value cannot be written as JSON again. Raises RecursionError for one that
    is nested too deeply.
    """
    return STRICT_DECODER.decode(text)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(text)
    return value


STRICT_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
"""Reads what `strict_json` does."""


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = match[1] or match[2]
        return (
            chr(int(code, 16))
            if code
            else _ESCAPES.get(match[3], match[0] if match[3].isalnum() else match[3])
        )

    joined = _ESCAPE.sub(character, text)
    # Two escapes may be the halves of one character.
    return joined.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
