"""A chat with what `edgectl serve` serves, by the openai library. The argument is the printed key.
Without one it uses the key that `serve` keeps for this user, and none if the site needs none."""

import os
import sys
from pathlib import Path

from openai import APIConnectionError, AuthenticationError, OpenAI

URL = "http://127.0.0.1:8000/v1"
state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
kept = state / "edgeshard" / "serve" / "api-key"
key = sys.argv[1] if sys.argv[1:] else kept.read_text().strip() if kept.exists() else "none"
client = OpenAI(base_url=URL, api_key=key)
hello = [{"role": "user", "content": "Once upon a time"}]
try:
    for event in client.chat.completions.create(
        model="fairy-tales", messages=hello, seed=7, stream=True
    ):
        sys.stdout.write(event.choices[0].delta.content or "")
        sys.stdout.flush()
except APIConnectionError:
    sys.exit(f"nothing answers at {URL}: start it with `make serve`, or `edgectl serve demo`")
except AuthenticationError:
    sys.exit(
        "the site wants a key: give the one that `edgectl serve` printed, or of `edgectl key "
        "create me`"
    )
