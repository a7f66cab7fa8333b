"""instructor against a gateway, in its modes for OpenAI: URL and KEY are the arguments."""

# mypy: ignore-errors

import asyncio
import sys
from typing import Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, model_validator

URL, KEY = sys.argv[1:]
ASKED = {
    "model": "tales",
    "messages": [{"role": "user", "content": "Tell me of a king"}],
    "max_tokens": 80,
}
SHARED = {"base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}


class King(BaseModel):
    """A king of a tale."""

    mood: Literal["glad", "sad"]
    sons: Literal[1, 2, 3]
    is_old: bool


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(**SHARED), mode=mode)
    assert isinstance(
        client.chat.completions.create(**ASKED, response_model=King, max_retries=1), King
    )
    parts = list(
        client.chat.completions.create_partial(**ASKED, response_model=King, max_retries=1)
    )
    assert parts[-1].mood in ("glad", "sad") and parts[-1].sons in (1, 2, 3)
king, said = instructor.from_openai(OpenAI(**SHARED)).chat.completions.create_with_completion(
    **ASKED, response_model=King
)
assert isinstance(king, King) and said.usage.completion_tokens > 0


class Sad(King):
    """A king that is refused once: the library sends its call back, and why."""

    @model_validator(mode="after")
    def refuse(self):
        refused.append(self)
        if len(refused) == 1:
            raise ValueError("try again")
        return self


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    refused = []
    client = instructor.from_openai(OpenAI(**SHARED), mode=mode)
    assert isinstance(
        client.chat.completions.create(**ASKED, response_model=Sad, max_retries=2, top_p=0.9), Sad
    )
    assert len(refused) == 2


async def at_once():
    several = instructor.from_openai(AsyncOpenAI(**SHARED), mode=instructor.Mode.JSON_SCHEMA)
    kings = [
        several.chat.completions.create(**ASKED, response_model=King, seed=seed)
        for seed in range(4)
    ]
    assert all(isinstance(king, King) for king in await asyncio.gather(*kings))


asyncio.run(at_once())
sys.stdout.write("ok\n")
