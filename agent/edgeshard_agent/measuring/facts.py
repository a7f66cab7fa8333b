"""The facts of this node, its accelerator included."""

from __future__ import annotations

from dataclasses import replace

import torch

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard_agent.measuring.machine_facts import (
    available_bytes,
    budget_bytes,
    machine_facts,
    no_device,
)
from edgeshard_agent.ops.fingerprint import bits_fingerprint
from edgeshard_agent.ops.kernel_speed import kernel_speed


def read_facts(
    device: str, memory_limit_bytes: int | None, known_bits: str | None = None
) -> DeviceFacts:
    """Facts of `cpu` or of a CUDA device; raises InvalidArgumentError for a device that is not
    there.

    The fingerprint of a processor's bits takes a second or two; if given, `known_bits` replaces it,
    and the kernels' speed is left out.
    """
    facts = machine_facts(device, memory_limit_bytes)
    if device == "cpu":
        bits = bits_fingerprint() if known_bits is None else known_bits
        speed = kernel_speed() if known_bits is None else None
        return replace(
            facts,
            bits_fingerprint=bits,
            takes_guesses=bool(bits),
            keeps_states_of_guesses=bool(bits),
            kernels=speed,
        )
    if not torch.cuda.is_available():
        raise no_device(device)
    try:
        available, total = torch.cuda.mem_get_info(device)
        properties = torch.cuda.get_device_properties(device)
    except (AssertionError, RuntimeError, ValueError):  # a number too high, or not a device's name
        raise InvalidArgumentError(
            f"device {device!r} is not on this machine, which has {torch.cuda.device_count()} CUDA "
            "devices",
            field="device",
        ) from None
    unified = bool(properties.is_integrated)
    if unified:  # one memory, counted once: the accelerator can use the system's free memory
        available = min(available, available_bytes())
    budget = budget_bytes(total, available, memory_limit_bytes)
    return replace(
        facts,
        model=properties.name,
        memory_total_bytes=total,
        memory_budget_bytes=budget,
        unified_memory=unified,
    )
