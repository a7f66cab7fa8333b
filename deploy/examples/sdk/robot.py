# ruff: noqa: T201
"""A robot asks a model what to do next. When no answer comes in time, it does what is safe.

    python robot.py MODEL [--deadline SECONDS] < readings.txt

Every line of standard input is a reading of its sensors. One line of output for each of them names
its action and the reason.
"""

from __future__ import annotations

import argparse
import sys
import time

from edgeshard import SyncClient, errors
from edgeshard.client import Guide, GuideKind

ACTIONS = ("forward", "left", "right", "stop")
SAFE = "stop"
ONE_ACTION = Guide(GuideKind.REGEX, "|".join(ACTIONS))
"""The model can answer with nothing else."""
SYSTEM = f"You steer a robot. Answer with one word: {', '.join(ACTIONS)}."


def decide(client: SyncClient, model: str, reading: str, deadline_s: float) -> tuple[str, str]:
    """The action, and its reason. It never takes longer than the deadline by more than a moment,
    and never raises."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": reading}]
    try:
        # The deadline holds for prompt and answer together; after it the request is cancelled on
        # every node.
        answer = client.complete_chat(
            model,
            messages,
            max_new_tokens=8,
            temperature=0.0,
            guide=ONE_ACTION,
            timeout_s=deadline_s,
        )
    except errors.DeadlineError:
        return SAFE, f"no answer within {1000 * deadline_s:.0f} ms"
    except (
        errors.EdgeShardError
    ) as error:  # A node or the coordinator is away, there is no room, ...
        return SAFE, error.reason
    if answer.content not in ACTIONS:  # max_new_tokens came before the word's end.
        return SAFE, f"the model began to say {answer.content!r}"
    return answer.content, "the model says so"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--deadline", type=float, default=0.5)
    options = parser.parse_args()
    with SyncClient() as client:
        for line in sys.stdin:
            began = time.monotonic()
            action, why = decide(client, options.model, line.strip(), options.deadline)
            print(f"{action:8} {1000 * (time.monotonic() - began):5.0f} ms  {why}", flush=True)


if __name__ == "__main__":
    main()
