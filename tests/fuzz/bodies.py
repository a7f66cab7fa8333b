"""Send bodies that are made of the forms of all routes: `make fuzz`, or
`python -m tests.fuzz.bodies --seconds 600`.

A body has values of its fields' types, and now and then others: of another type, too large,
infinite, or of a name that no field has. The gateway's application runs in this process. A finding
is an exception, an answer of status 500, one that is not JSON, or an error of more than
`MAX_ERROR_BYTES`. So is a callback of the event loop that takes more than `MAX_CALLBACK_S` of
processor time, and memory that grows by more than `MAX_GROWTH_BYTES` after the first `WARM_UP_S`.
Each is written to `findings/`, and the exit code is then 1. The same seed makes the same bodies.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import json
import random
import resource
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from edgeshard.gateway.app import FORMS
from tests.support.body_exchange import Exchange, Gateway

ROOT = Path(__file__).resolve().parents[2]
MAX_CALLBACK_S = 0.25
MAX_ERROR_BYTES = 8 << 10
MAX_GROWTH_BYTES = 50 << 20
WARM_UP_S = 60.0
MAX_LARGE = 2
"""The most large values of a body: the gateway reads no more than 16 MiB of it."""
MAX_FINDINGS = 20
"""The findings after which a run ends."""
_WORDS: dict[str, tuple[Any, ...]] = {
    "role": ("user", "assistant", "system", "tool", "function", "developer", "x"),
    "type": (
        "text", "function", "object", "string", "array", "message", "reasoning", "function_call",
        "json_schema", "function_call_output", "custom_tool_call", "web_search", "web_search_call",
        "allowed_tools", "input_text", "output_text", "image_url", "custom", "refusal",
        ["string", "null"],
    ),
    "name": ("f", "g", "", "x" * 300),
    "model": ("m",),
    "mode": ("auto", "required"),
    "$ref": ("#", "#/$defs/a", "#/properties/a", "#/allOf/0", "#/$defs/a/items", "http://x"),
    "arguments": ("{}", '{"a": 1}', "{", "", "null", "[[]]", '{"a": 1e999}'),
    "call_id": ("c", ""),
    "required": (["a"], []),
    "additionalProperties": (True, False),
}  # fmt: skip
"""Values that mean something under a key."""
_KEYS = (
    *_WORDS, "content", "text", "function", "parameters", "properties", "items", "anyOf", "allOf",
    "oneOf", "$defs", "enum", "const", "tools", "tool_calls", "id", "output", "input", "action",
    "summary", "if", "then", "images", "function_call", "custom", "allowed_tools",
    "reasoning_content", "thinking", "description", "a", "",
)  # fmt: skip
_LISTS = (
    "items",
    "anyOf",
    "allOf",
    "oneOf",
    "tools",
    "tool_calls",
    "content",
    "enum",
    "summary",
    "images",
)
_ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, float("inf"),
    float("nan"), 4.0, "", "x", "\x00", [], {}, [[]], [{}], {"": None}, "x" * 5000,
)  # fmt: skip


class BodyMaker:
    """A maker of bodies; `random_` decides all of them."""

    def __init__(self, random_: random.Random) -> None:
        self._random = random_
        self._large_left = 0

    def body(self, form: type[BaseModel]) -> bytes:
        """A body for a form, as JSON that may be damaged."""
        chance = self._random
        self._large_left = MAX_LARGE
        value = self._of_model(form, 0)
        if chance.random() < 0.03:
            value[chance.choice(("x", "\ud800", "x" * 100_000))] = self.json_value("a", 0)
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=chance.random() < 0.8).encode(
            "utf-8", "replace"
        )
        if chance.random() < 0.9:
            text = text.replace(b"Infinity", b"1e400").replace(b"NaN", b"1e400")
        if chance.random() < 0.03:
            at = chance.randrange(len(text) + 1)
            text = (
                text[:at]
                + chance.choice(
                    (b"", b"\x00", b"\\ud800", b'"', b"[" * 300, b"\\", b"\xff", b"}", text)
                )
                + text[at + 3 :]
            )
        return text

    def _of_model(self, form: type[BaseModel], depth: int) -> dict[str, Any]:
        chance = self._random
        likely = chance.choice((0.0, 0.02, 0.05, 0.3))
        value: dict[str, Any] = {}
        for name, info in form.model_fields.items():
            key = info.alias or name
            if chance.random() < (0.98 if info.is_required() else likely):
                value[key] = self._of_field(key, info.annotation, depth)
        if "tools" in form.model_fields and chance.random() < 0.3:
            value["tools"] = self._usual("tools")
            if "tool_choice" in form.model_fields:
                value["tool_choice"] = self._choice()
        return value

    def _of_field(self, name: str, annotation: Any, depth: int) -> Any:
        chance = self._random
        luck = chance.random()
        if luck < 0.02:
            return chance.choice(_ODD)
        if luck < 0.025:
            return self._large()
        if name in _WORDS and luck < 0.9:
            return chance.choice(_WORDS[name])
        if name in ("messages", "tools", "input") and luck < 0.7:
            return self._usual(name)
        if name == "tool_choice" and luck < 0.8:
            return self._choice()
        return self._of_type(name, annotation, depth)

    def _usual(self, name: str) -> list[dict[str, Any]]:
        """Messages or tools of the usual form, with a few changed values."""
        chance = self._random
        values: list[dict[str, Any]] = []
        for _ in range(chance.choice((1, 2, 5))):
            message = {"role": chance.choice(("user", "assistant")), "content": self._text()}
            function = {
                "name": "f",
                "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
            }
            tool = {"type": "function", "name": "f", "function": function}
            value = tool if name == "tools" else message
            if chance.random() < 0.2:
                key = chance.choice(_KEYS)
                chance.choice((value, function))[key] = self.json_value(key, 5)
            if chance.random() < 0.1:
                function["name"] = chance.choice(_ODD)
            values.append(value)
        return values

    def _choice(self) -> Any:
        """A choice of tools of the usual form, possibly with a changed value."""
        chance = self._random
        chosen: Any = {"type": "function", "function": {"name": chance.choice(("f", "f", *_ODD))}}
        if chance.random() < 0.1:
            chosen = chance.choice(_ODD)
        some = {"mode": chance.choice(_WORDS["mode"]), "tools": [chosen] * chance.choice((0, 1, 2))}
        lists = (
            {"type": "allowed_tools", "allowed_tools": some},
            {"type": "allowed_tools", **some},
        )
        return chance.choice(("none", "auto", "required", chosen, *lists))

    def _of_type(self, name: str, annotation: Any, depth: int) -> Any:
        chance = self._random
        origin, parts = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            return self._of_type(name, parts[0], depth)
        if origin in (Union, UnionType):
            kinds = [part for part in parts if part is not NoneType or chance.random() < 0.1]
            return self._of_type(name, chance.choice(kinds or [NoneType]), depth)
        if origin is Literal:
            return chance.choice(parts)
        if origin is list:
            return [
                self._of_field("", parts[0], depth + 1)
                for _ in range(chance.choice((0, 1, 1, 2, 3, 17)))
            ]
        if origin is dict:
            return self._object(name, depth + 1)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return self._of_model(annotation, depth + 1)
        if annotation is bool:
            return chance.random() < 0.5
        if annotation is int:
            return chance.choice((0, 1, 2, 16, 20, 100, -1, chance.randrange(2**32)))
        if annotation is float:
            return chance.choice((0, 1, 0.5, 1.5, 1e-9, 100))
        if annotation is str:
            return self._text()
        return None if annotation is NoneType else self.json_value(name, depth + 1)

    def json_value(self, name: str, depth: int) -> Any:
        """Any JSON value that may stand under a key."""
        chance = self._random
        luck = chance.random()
        if luck < 0.03:
            return chance.choice(_ODD)
        if name in _WORDS and luck < 0.9:
            return chance.choice(_WORDS[name])
        if depth > 8 or luck > 0.8:
            return self._text()
        if name in _LISTS and luck < 0.6:
            return [self.json_value("", depth + 1) for _ in range(chance.choice((0, 1, 2, 3)))]
        return self._object(name, depth + 1)

    def _object(self, name: str, depth: int) -> dict[str, Any]:
        if self._random.random() < 0.01:
            return {
                str(number): {} for number in range(self._random.choice((10, 300, 5000, 30_000)))
            }
        keys = self._random.sample(_KEYS, self._random.choice((0, 1, 2, 4, 8)))
        return {key: self.json_value(key, depth + 1) for key in keys}

    def _text(self) -> str:
        chance = self._random
        if self._large_left and chance.random() < 0.0005:
            self._large_left -= 1
            return chance.choice(("x", "\n", "é", "日")) * chance.choice(
                (1 << 16, 1 << 20, 4 << 20)
            )
        return chance.choice(("", "x", "Hello", "{}", "</s>", "é" * 20, "\x00", "a,b" * 50))

    def _large(self) -> Any:
        """A value of many parts, most of them at the bounds; None if the body has enough of
        them."""
        chance = self._random
        if not self._large_left:
            return None
        self._large_left -= 1
        count = chance.choice((1000, 4000, 16_000, 30_000))
        kind = chance.randrange(8)
        if kind == 0:
            return [chance.choice((0, 1, 2**32 - 1, 0.5, "x", True))] * (count * 8)
        if kind == 1:
            return {f"k{number}": chance.choice((1, "x", None)) for number in range(count)}
        if kind == 2:
            return [self._object("", 7)] * (count // 16)
        if kind == 3:
            deep: Any = []
            for _ in range(chance.choice((50, 63, 64, 65, 120, 180, 250))):
                deep = (
                    [deep]
                    if chance.random() < 0.5
                    else {chance.choice(("items", "properties", "a")): deep}
                )
            return deep
        if kind == 4:
            message = {"role": chance.choice(_WORDS["role"]), "content": "x"}
            return [message] * (count // 3)
        if kind == 5:
            key = chance.choice(("allOf", "anyOf", "properties", "$defs"))
            node = {"properties": {"a": {"$ref": "#"}}}
            nodes = [node] * (count // 6)
            return {key: nodes if key.endswith("Of") else dict(enumerate(nodes))}
        if kind == 6:
            call = {"id": "c", "function": {"name": "f", "arguments": {"a": chance.choice(_ODD)}}}
            return [{"role": "assistant", "tool_calls": [call] * (count // 6)}]
        return [{"type": "function", "name": "f", "function": {"name": "f"}}] * chance.choice(
            (1024, 1025, count // 6)
        )


@dataclass
class Report:
    """The result of a run. `longest_s` is processor time of one callback; memory is resident."""

    seed: int
    bodies: int = 0
    seconds: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    longest_s: float = 0.0
    warm_mib: float = 0.0
    peak_after_mib: float = 0.0
    findings: list[str] = field(default_factory=list)


def fault_of(answer: Exchange) -> str:
    """The fault of an answer, "" if it has none."""
    if answer.status == 500:
        return "status 500"
    if answer.status >= 400 and len(answer.body) > MAX_ERROR_BYTES:
        return f"an error of {len(answer.body)} bytes"
    texts = [answer.body.decode()]
    if "event-stream" in answer.content_type:
        lines = texts[0].splitlines()
        texts = [line[6:] for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    elif "ndjson" in answer.content_type:
        texts = texts[0].splitlines()
    for text in texts:
        try:
            json.loads(text, parse_constant=_no_number)
        except ValueError as error:
            return f"no JSON: {error}"
    return ""


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def tried(
    gateway: Gateway, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, float, str]:
    """The status of an answer, its longest callback, and the fault if there is one."""
    try:
        answer = gateway.post(path, body, headers)
        longest_s = answer.longest_s
        if longest_s > MAX_CALLBACK_S:  # of two turns the faster one counts
            longest_s = min(longest_s, gateway.post(path, body, headers).longest_s)
    except Exception:
        return 0, 0.0, traceback.format_exc(limit=-6)
    wrong = fault_of(answer)
    if not wrong and longest_s > MAX_CALLBACK_S:
        wrong = f"a callback of {longest_s:.2f} s"
    return answer.status, longest_s, wrong


def fuzz(seconds: float, seed: int, out: Path, most: int = sys.maxsize) -> Report:
    """Send bodies until the time is over or `most` were sent; findings are written below `out`."""
    gateway = Gateway()
    report, statuses = Report(seed), Counter[str]()
    warm = 0
    began = time.monotonic()
    while (
        time.monotonic() - began < seconds
        and report.bodies < most
        and len(report.findings) < MAX_FINDINGS
    ):
        random_ = random.Random(f"{seed}/{report.bodies}")
        path = random_.choice(list(FORMS))
        body, headers = BodyMaker(random_).body(FORMS[path]), dict[str, str]()
        if random_.random() < 0.1:
            body, headers = gzip.compress(body, 1), {"content-encoding": "gzip"}
        status, longest_s, wrong = tried(gateway, path, body, headers)
        report.bodies += 1
        statuses[f"{path} {status}"] += 1
        report.longest_s = max(report.longest_s, longest_s)
        if wrong:
            report.findings.append(f"body {report.bodies - 1} to {path}: {wrong}")
            _write(out / "findings" / "bodies", body, f"{path} {headers}\n{wrong}")
        if report.bodies % 500 == 0:
            gc.collect()
            now = _resident_bytes()
            if time.monotonic() - began > WARM_UP_S:
                warm = warm or now
                report.peak_after_mib = max(report.peak_after_mib, now / 2**20)
    gateway.close()
    report.seconds = round(time.monotonic() - began, 1)
    report.statuses = dict(sorted(statuses.items()))
    report.warm_mib = warm / 2**20
    if report.peak_after_mib - report.warm_mib > MAX_GROWTH_BYTES / 2**20:
        report.findings.append(
            f"memory grew from {report.warm_mib:.0f} to {report.peak_after_mib:.0f} MiB"
        )
    return report


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _write(folder: Path, body: bytes, wrong: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(body).hexdigest()[:16]
    path.write_bytes(body)
    path.with_suffix(".txt").write_text(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.bodies", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / ".benchmarks" / "fuzz", help="findings")
    options = parser.parse_args()
    report = fuzz(options.seconds, options.seed, options.out)
    sys.stdout.write(json.dumps(asdict(report)) + "\n")
    return int(bool(report.findings))


if __name__ == "__main__":
    sys.exit(main())
