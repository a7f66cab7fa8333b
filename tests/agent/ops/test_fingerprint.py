"""The fingerprint of a node's bits: the same each time, and another one wherever an operator gives
other bits."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
from edgeshard_agent.ops import fingerprint as fingerprint_module
from edgeshard_agent.ops import native
from edgeshard_agent.ops.fingerprint import bits_fingerprint


def test_it_is_the_same_each_time_and_for_any_number_of_threads(kernels: str) -> None:
    if kernels == "torch":
        assert bits_fingerprint() == ""
        return
    before = torch.get_num_threads()
    found = {bits_fingerprint()}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.add(bits_fingerprint())
    torch.set_num_threads(before)
    assert len(found) == 1 and len(found.pop()) == 16


@pytest.mark.skipif(
    len(native.kernel_names()) < 2 or platform.machine() == "aarch64",
    reason="all kernels of this CPU have the same bits",
)
def test_instruction_sets_that_multiply_otherwise_have_other_ones() -> None:
    names = native.kernel_names()
    found = []
    for name in (names[0], names[-1]):
        native.use_kernels(name)
        found.append(bits_fingerprint())
    native.use_kernels(names[0])
    assert found[0] != found[1]


def _nudged(real: Callable[..., Any]) -> Callable[..., Any]:
    def other(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        one = result[0] if isinstance(result, tuple) else result
        one.view(-1)[-1] = (
            torch.nextafter(one.view(-1)[-1].float(), torch.tensor(9e9)).to(one.dtype) + 2**-7
        )
        return result

    return other


@pytest.mark.skipif(not native.native_available(), reason="the native kernels are not built")
@pytest.mark.parametrize(
    "operator",
    [
        "rms_norm",
        "swiglu",
        "geglu",
        "clamped_swiglu",
        "attend",
        "gelu",
        "quick_gelu",
        "softcap",
        "rotary_angles",
    ],
)
def test_one_other_bit_of_an_operator_shows(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = bits_fingerprint()
    monkeypatch.setattr(
        fingerprint_module, operator, _nudged(getattr(fingerprint_module, operator))
    )
    assert bits_fingerprint() != usual
