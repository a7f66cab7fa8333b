"""lm-evaluation-harness against a gateway, on a task of paragraphs. URL, KEY, the model's directory
and a text are the arguments; prints its result for each paragraph."""

# mypy: ignore-errors

import json
import os
import sys
import tempfile
from pathlib import Path

URL, os.environ["OPENAI_API_KEY"], MODEL, TEXT = sys.argv[1:]
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

import lm_eval  # noqa: E402 - it reads the environment
from lm_eval.tasks import TaskManager  # noqa: E402

TASK = """\
task: paragraphs
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
"""
paragraphs = [part for part in Path(TEXT).read_text().split("\n\n") if 200 < len(part) < 900][:4]
with tempfile.TemporaryDirectory() as folder:
    os.environ["HF_DATASETS_CACHE"] = folder
    file = Path(folder, "paragraphs.json")
    file.write_text("".join(json.dumps({"text": part}) + "\n" for part in paragraphs))
    Path(folder, "paragraphs.yaml").write_text(TASK.format(file=file))
    arguments = (
        f"model=tales,base_url={URL}/v1/completions,tokenizer={MODEL},tokenizer_backend=huggingface"
    )
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=f"{arguments},max_length=512,num_concurrent=2",
        tasks=["paragraphs"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
said = [
    {"text": s["doc"]["text"], "score": float(s["resps"][0][0])}
    for s in results["samples"]["paragraphs"]
]
sys.stdout.write("\n" + json.dumps(said) + "\n")
