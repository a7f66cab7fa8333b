"""Which GGUF file a quantisation's name means, as llama.cpp's -hf has it."""

from __future__ import annotations

import pytest

from edgeshard.domain.errors import NotFoundError
from edgeshard.importing.gguf_selection import select_gguf, tag_of

FILES = [
    "README.md",
    "imatrix_unsloth.gguf",
    "mmproj-F16.gguf",
    "m-BF16.gguf",
    "m-F16.gguf",
    "m-IQ4_XS.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "m-UD-Q4_K_XL.gguf",
    "m.q5_k_m.gguf",
    "mtp-m-Q6_K.gguf",
    "BIG/m-Q6_K-00002-of-00002.gguf",
    "BIG/m-Q6_K-00001-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("", ("m-Q4_K_M.gguf",)),
        ("q4_k_m", ("m-Q4_K_M.gguf",)),
        ("F16", ("m-F16.gguf",)),
        ("Q4_K_XL", ("m-UD-Q4_K_XL.gguf",)),
        ("UD-Q4_K_XL", ("m-UD-Q4_K_XL.gguf",)),
        ("Q5_K_M", ("m.q5_k_m.gguf",)),
        ("Q6_K", ("BIG/m-Q6_K-00001-of-00002.gguf", "BIG/m-Q6_K-00002-of-00002.gguf")),
    ],
)
def test_a_quantisation_names_a_file_or_its_parts(tag: str, expected: tuple[str, ...]) -> None:
    assert select_gguf(FILES, tag, "a/m") == expected


def test_without_a_name_it_is_the_usual_one_or_the_first() -> None:
    assert select_gguf(["m-BF16.gguf", "m-Q8_0.gguf"], "", "a/m") == ("m-Q8_0.gguf",)
    assert select_gguf(["m-IQ2_M.gguf", "m-Q6_K.gguf"], "", "a/m") == ("m-IQ2_M.gguf",)
    assert select_gguf(["ggml-model.gguf"], "", "a/m") == ("ggml-model.gguf",)


def test_an_unknown_quantisation_lists_what_is_there() -> None:
    with pytest.raises(NotFoundError) as caught:
        select_gguf(FILES, "Q3_K", "a/m")
    assert caught.value.message == (
        "a/m has no Q3_K; it has BF16, F16, IQ4_XS, Q4_K_M, Q8_0, UD-Q4_K_XL, Q5_K_M, Q6_K"
    )
    with pytest.raises(NotFoundError, match="a/m has no GGUF file of a model"):
        select_gguf(["mmproj-F16.gguf", "x.safetensors"], "", "a/m")
    with pytest.raises(NotFoundError, match="a/m has no GGUF file of a model"):
        select_gguf(["m-Q6_K-00002-of-00002.gguf"], "Q6_K", "a/m")
    with pytest.raises(NotFoundError, match="without part 2 of 2; use another"):
        select_gguf(["m-Q6_K-00001-of-00002.gguf"], "Q6_K", "a/m")


def test_a_tag_is_read_from_a_name() -> None:
    assert [
        tag_of(name) for name in ("a-UD-IQ2_M.gguf", "a.Q8_0-00001-of-00003.gguf", "model.gguf")
    ] == [
        "UD-IQ2_M",
        "Q8_0",
        "",
    ]
