"""Extras of EdgeShard that are installed, detected without importing them."""

from __future__ import annotations

from importlib.util import find_spec

from edgeshard.domain.errors import FailedPreconditionError, extra_line

_NEEDED = {
    "agent": ("torch", "transformers", "safetensors", "tokenizers", "psutil"),
    "coordinator": ("psutil",),
    "gateway": ("fastapi", "uvicorn"),
    "models": ("gguf", "huggingface_hub"),
    "rules": ("ortools",),
    "discovery": ("zeroconf",),
}
"""Modules that are installed with an extra and not with the bare package."""


def missing(*extras: str) -> list[str]:
    """The extras of which a module is not installed."""
    return [extra for extra in extras if any(find_spec(name) is None for name in _NEEDED[extra])]


def check_extras(program: str, *extras: str) -> None:
    """Raise FailedPreconditionError naming the extras that `program` needs and this installation
    lacks."""
    lacking = missing(*extras)
    if lacking:
        named = (
            " and ".join([", ".join(lacking[:-1]), lacking[-1]]) if len(lacking) > 1 else lacking[0]
        )
        raise FailedPreconditionError(
            f"{program} needs the {named} extra{'s' if len(lacking) > 1 else ''}: "
            f"{extra_line(','.join(lacking))}",
            reason="MISSING_EXTRA",
        )
