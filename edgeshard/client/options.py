"""What a request may ask for, as the keyword arguments of `generate` and `complete`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from edgeshard.errors import InvalidArgumentError
from edgeshard.generation import Generation, Sampling


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `Client.generate`, where each is explained."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int
    stop: str | Sequence[str]
    stop_tokens: Sequence[int]
    logprobs: bool
    top_logprobs: int
    ignore_eos: bool
    priority: int
    request_id: str
    timeout_s: float | None


def generation_of(prompt: str | Sequence[int], options: GenerateOptions) -> Generation:
    """The request behind these options. Raises InvalidArgumentError naming the first field that is wrong."""
    # Python does not check the keys of a TypedDict; an option misspelt must not be an option ignored.
    for name in options:
        if name not in GenerateOptions.__annotations__:
            known = ", ".join(GenerateOptions.__annotations__)
            raise InvalidArgumentError(f"{name} is not an option; the options are {known}", field=name)
    stop = options.get("stop", ())
    top_logprobs = options.get("top_logprobs", 0)
    generation = Generation(
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        max_new_tokens=options.get("max_new_tokens", 128),
        sampling=Sampling(
            temperature=options.get("temperature", 0.0),
            top_k=options.get("top_k", 0),
            top_p=options.get("top_p", 1.0),
            repetition_penalty=options.get("repetition_penalty", 1.0),
            seed=options.get("seed", 0),
            # Asking for the best tokens implies asking for the chosen one.
            logprobs=options.get("logprobs", False) or top_logprobs > 0,
            top_logprobs=top_logprobs,
        ),
        stop_tokens=tuple(options.get("stop_tokens", ())),
        stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=options.get("ignore_eos", False),
        priority=options.get("priority", 0),
    )
    generation.validate()
    for field, texts in (("prompt", (generation.prompt,)), ("stop", generation.stop_strings)):
        for text in texts:
            if isinstance(text, str):
                _check_text(text, field)
    return generation


def _check_text(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # A lone surrogate: what Python makes of bytes that are not UTF-8, in arguments and file names for instance.
        raise InvalidArgumentError(
            f"{field} is not text: character {error.start} stands for a byte that is not UTF-8", field=field
        ) from None
