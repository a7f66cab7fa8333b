"""The structs and signatures for ctypes equal the kernels' sources, and unknown declarations are
refused."""

from __future__ import annotations

import ctypes

import pytest
from edgeshard_agent.ops import layouts

from tools.generate_native import (
    FUNCTION_SOURCES,
    KERNELS,
    OUTPUT,
    STRUCT_SOURCES,
    UnknownFormError,
    functions_of,
    generated,
    structs_of,
)


def sources() -> dict[str, str]:
    return {name: (KERNELS / name).read_text() for name in (*STRUCT_SOURCES, *FUNCTION_SOURCES)}


def test_the_committed_module_is_what_the_sources_generate() -> None:
    assert OUTPUT.read_text() == generated(sources())


def test_a_changed_field_changes_the_module() -> None:
    texts = sources()
    changed = texts["kernels.h"].replace("int32_t top_k, logprobs,", "int32_t logprobs, top_k,")
    assert changed != texts["kernels.h"]
    assert generated(texts | {"kernels.h": changed}) != OUTPUT.read_text()


def test_the_fields_of_a_struct_are_read_in_order() -> None:
    text = """
struct Example {
    const void *rows, *scales;  // two pointers; of one declaration
    const Other* const* others;
    int32_t count, width;

    float scale;
};
"""
    (struct,) = structs_of("example.h", text)
    assert struct.name == "Example"
    assert struct.fields == (
        ("rows", "c_void_p"),
        ("scales", "c_void_p"),
        ("others", "c_void_p"),
        ("count", "c_int32"),
        ("width", "c_int32"),
        ("scale", "c_float"),
    )


def test_a_function_may_stand_on_several_lines() -> None:
    text = (
        "int64_t edgeshard_example(const Other* other, int64_t stride,\n    float eps);\nvoid "
        "edgeshard_rest();\n"
    )
    example, rest = functions_of("example.h", text)
    assert (example.result, example.arguments) == ("c_int64", ("c_void_p", "c_int64", "c_float"))
    assert (rest.result, rest.arguments) == (None, ())


@pytest.mark.parametrize(
    "field", ["int32_t counts[4];", "int32_t flag : 1;", "bool wide;", "void (*call)(int32_t);"]
)
def test_other_fields_are_refused(field: str) -> None:
    with pytest.raises(UnknownFormError):
        list(structs_of("example.h", f"struct Example {{\n    {field}\n}};\n"))


@pytest.mark.parametrize(
    "function",
    [
        "bool edgeshard_example();",
        "void edgeshard_example(bool wide);",
        "void edgeshard_example(void (*call)(int32_t));",
        "  void edgeshard_example() noexcept;",
    ],
)
def test_other_functions_are_refused(function: str) -> None:
    with pytest.raises(UnknownFormError):
        list(functions_of("example.h", function + "\n"))


def test_pointers_keep_fields_at_the_addresses_of_c() -> None:
    """`Linear` has two pointers, seven numbers of four bytes and two pointers, which begin at a
    multiple of eight."""
    assert ctypes.sizeof(layouts.LinearStruct) == 2 * 8 + 7 * 4 + 4 + 2 * 8
