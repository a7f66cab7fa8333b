"""A chat with what `edgectl serve` serves, by the openai library: the key that it printed is the argument."""

import sys

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=sys.argv[1])
hello = [{"role": "user", "content": "Once upon a time"}]
for event in client.chat.completions.create(model="fairy-tales", messages=hello, seed=7, stream=True):
    sys.stdout.write(event.choices[0].delta.content or "")
    sys.stdout.flush()
