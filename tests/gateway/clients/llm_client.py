"""Simon Willison's llm against a gateway, as a model that its configuration adds: URL and KEY are
the arguments."""

# mypy: ignore-errors

import json
import os
import sys
import tempfile
from pathlib import Path

import llm.cli
from click.testing import CliRunner

URL, KEY = sys.argv[1:]
MODELS = f"""\
- model_id: tales
  model_name: tales
  api_base: {URL}/v1
  api_key_name: edgeshard
  supports_tools: true
  supports_schema: true
"""
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "on": {"type": "boolean"}},
    "required": ["color", "on"],
    "additionalProperties": False,
}
TOOL = 'def king(name: str) -> str:\n    "Who a king is."\n    return name\n'


def run(*arguments, stdin=""):
    """Its command line, whose imports take seconds: once for all."""
    done = CliRunner().invoke(llm.cli.cli, arguments, input=stdin)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout.strip()


with tempfile.TemporaryDirectory() as home:
    os.environ |= {"LLM_USER_PATH": home}
    Path(home, "extra-openai-models.yaml").write_text(MODELS)
    run("keys", "set", "edgeshard", "--value", KEY)
    assert "tales" in run("models", "list")
    ask = ("-m", "tales", "-o", "temperature", "0")
    whole = run("Tell me of a king", *ask, "-o", "max_tokens", "12", "--no-stream")
    assert whole and run("Tell me of a king", *ask, "-o", "max_tokens", "12") == whole
    assert run(*ask, "-o", "max_tokens", "12", stdin="Tell me of a king") == whole
    assert run("And then?", "-c", "-o", "max_tokens", "12"), "it goes on with the talk"
    assert run("Go on", *ask, "-o", "max_tokens", "12", "-s", "Once upon a time")
    lamp = json.loads(run("x", *ask, "-o", "max_tokens", "60", "--schema", json.dumps(SCHEMA)))
    assert lamp["color"] in ("red", "green") and isinstance(lamp["on"], bool)
    assert run("Tell me of a king", *ask, "-o", "max_tokens", "12", "--functions", TOOL), (
        "it may call a tool"
    )
sys.stdout.write("ok\n")
