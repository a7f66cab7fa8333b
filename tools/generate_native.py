"""Generate edgeshard_agent/ops/layouts.py, the kernels' structs and functions for ctypes, from
their C++ sources.

    python tools/generate_native.py           write it
    python tools/generate_native.py --check   exit 1 if the committed file differs: `make check`

It reads `kernels.h`, the functions of `library.h`, and `blocks.cpp`, which declares its own. It
understands only their style: numbers of fixed size, and pointers. Anything else in a struct or a
function is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "agent/edgeshard_agent/ops/kernels"
OUTPUT = ROOT / "agent/edgeshard_agent/ops/layouts.py"
STRUCT_SOURCES = ("kernels.h", "blocks.cpp")
FUNCTION_SOURCES = ("library.h", "blocks.cpp")
INTERNAL = frozenset({"Activations", "Output", "AttentionUnit", "Kernels", "Buffers"})
"""Structs that never leave the library."""
NUMBERS = {
    "double": "c_double",
    "float": "c_float",
    "int32_t": "c_int32",
    "int64_t": "c_int64",
    "uint32_t": "c_uint32",
    "uint64_t": "c_uint64",
}
POINTER = "c_void_p"
TEXT = "c_char_p"
MAX_LINE = 100

_COMMENT = re.compile(r"//[^\n]*")
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FUNCTION = r"([\w ]+?\*?) (edgeshard_\w+)\(([^()]*)\)"
_DECLARED = re.compile(rf"^{_FUNCTION};", re.MULTILINE)
_EXPORTED = re.compile(rf'^extern "C" {_FUNCTION} \{{', re.MULTILINE)
_TYPED = re.compile(r"(?:const )?(\w+)\b(.*)", re.DOTALL)
_NAME = re.compile(r"((?:\* ?(?:const)?)*) *(\w+)")

HEADER = '''\
"""The kernels' structs and functions for ctypes. Written by tools/generate_native.py; do not
edit."""

from __future__ import annotations

import ctypes
from ctypes import {types}
'''


class UnknownFormError(Exception):
    """A declaration that the parser does not understand."""


@dataclass(frozen=True, slots=True)
class Struct:
    """A struct of `source`, and its fields: name and type of ctypes, in order."""

    name: str
    source: str
    fields: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the library: what it returns, or None, and the types of its arguments."""

    name: str
    result: str | None
    arguments: tuple[str, ...]


def structs_of(source: str, text: str) -> Iterator[Struct]:
    """The structs of a source that callers fill in, in order. Raises UnknownFormError."""
    for name, body in _STRUCT.findall(_COMMENT.sub("", text)):
        if name not in INTERNAL:
            declarations = [part for part in body.split(";") if part.strip()]
            yield Struct(
                name, source, tuple(item for part in declarations for item in _names(part))
            )


def functions_of(source: str, text: str) -> Iterator[Function]:
    """The functions that a header declares, or that another source exports. Raises
    UnknownFormError."""
    plain = _COMMENT.sub("", text)
    is_header = source.endswith(".h")
    matches = (_DECLARED if is_header else _EXPORTED).findall(plain)
    if len(matches) != plain.count("edgeshard_" if is_header else 'extern "C"'):
        raise UnknownFormError(f"{source} has a function that is declared in another style")
    for result, name, arguments in matches:
        listed = [item for part in arguments.split(",") if part.strip() for item in _names(part)]
        yield Function(name, _result(result), tuple(kind for _, kind in listed))


def _names(declaration: str) -> Iterator[tuple[str, str]]:
    """Each name that a declaration has, with its type."""
    text = " ".join(declaration.split())
    typed = _TYPED.fullmatch(text)
    if typed is None:
        raise UnknownFormError(text)
    for part in typed[2].split(","):
        declarator = _NAME.fullmatch(part.strip())
        if declarator is None:
            raise UnknownFormError(text)
        stars, name = declarator.groups()
        if not stars and typed[1] not in NUMBERS:
            raise UnknownFormError(text)
        yield name, POINTER if stars else NUMBERS[typed[1]]


def _result(text: str) -> str | None:
    if text == "void":
        return None
    if text == "const char*":
        return TEXT
    if text not in NUMBERS:
        raise UnknownFormError(text)
    return NUMBERS[text]


def generated(texts: Mapping[str, str]) -> str:
    """The module, from the sources' texts by name. Raises UnknownFormError."""
    structs = [struct for source in STRUCT_SOURCES for struct in structs_of(source, texts[source])]
    functions = {
        one.name: one for source in FUNCTION_SOURCES for one in functions_of(source, texts[source])
    }
    types = {kind for struct in structs for _, kind in struct.fields}
    types |= {kind for one in functions.values() for kind in (one.result, *one.arguments) if kind}
    blocks = [HEADER.format(types=", ".join(sorted(types)))]
    for struct in structs:
        lines = [
            f"class {struct.name}Struct(ctypes.Structure):",
            f'    """`{struct.name}` of {struct.source}."""',
        ]
        lines += [
            "",
            "    _fields_ = (",
            *(f'        ("{name}", {kind}),' for name, kind in struct.fields),
            "    )",
        ]
        blocks.append("\n".join(lines) + "\n")
    lines = [
        "SIGNATURES = {",
        *(line for one in functions.values() for line in _signature(one)),
        "}",
    ]
    docstring = '"""By name: the type of the result, and the types of the arguments."""'
    blocks.append("\n".join([*lines, docstring]) + "\n")
    return "\n\n".join(blocks)


def _signature(function: Function) -> list[str]:
    """The lines of a function, formatted as ruff formats them."""
    listed = ", ".join(function.arguments) + ("," if len(function.arguments) == 1 else "")
    whole = f'    "{function.name}": ({function.result}, ({listed})),'
    if len(whole) <= MAX_LINE:
        return [whole]
    inner = f"        ({listed}),"
    arguments = [inner]
    if len(inner) > MAX_LINE:
        arguments = [
            "        (",
            *(f"            {kind}," for kind in function.arguments),
            "        ),",
        ]
    return [f'    "{function.name}": (', f"        {function.result},", *arguments, "    ),"]


def main() -> int:
    sources = dict.fromkeys((*STRUCT_SOURCES, *FUNCTION_SOURCES))
    text = generated({name: (KERNELS / name).read_text(encoding="utf-8") for name in sources})
    if "--check" not in sys.argv[1:]:
        OUTPUT.write_text(text, encoding="utf-8")
        return 0
    if OUTPUT.is_file() and OUTPUT.read_text(encoding="utf-8") == text:
        return 0
    print(
        f"{OUTPUT.relative_to(ROOT)} differs from the kernels; run tools/generate_native.py",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
