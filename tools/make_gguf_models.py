"""Make the small GGUF models of tests/importing/gguf with llama.cpp's converter and quantiser.

    python tools/make_gguf_models.py LLAMA_CPP QUANTIZE [NAME ...]

LLAMA_CPP is a checkout of llama.cpp, QUANTIZE its program llama-quantize. Weights are random, by a
fixed seed. Each model is of a family whose converter changes something else, with types mixed as in
published files. `config.json` next to a model is transformers' own; all models share
`tokenizer.json`. CI runs neither program, but reads the files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "importing" / "gguf"
TEXT = ROOT / "README.md"
VOCABULARY = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson "
    "}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BASE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


@dataclass(frozen=True)
class Model:
    """A model: its class of configurations, the kind of its tokenizer, and types of tensors by
    their names."""

    config: str
    options: dict[str, Any]
    pre: str
    base: str
    types: dict[str, str] = field(default_factory=dict)


MODELS = {
    "dense": Model(
        "LlamaConfig",
        {"rope_parameters": _ROPE},
        "llama-bpe",
        "Q4_K_M",
        {
            "blk.1.attn_q": "iq4_xs",
            "blk.0.ffn_up": "iq3_s",
            "blk.1.ffn_up": "q8_0",
            "blk.1.ffn_gate": "q5_k",
        },
    ),
    "head_norms": Model(
        "Qwen3Config",
        {"rope_parameters": _ROPE},
        "qwen2",
        "Q4_K_M",
        {
            "blk.0.ffn_gate": "q3_k",
            "blk.1.ffn_gate": "iq4_nl",
            "blk.0.ffn_up": "mxfp4",
            "blk.1.attn_q": "q2_k",
        },
    ),
    "unit_norms": Model(
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "intermediate_size": 32,
            "num_attention_heads": 1,
            "sliding_window": 16,
            "query_pre_attn_scalar": 64,
            "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        },
        "gpt-2",
        "Q4_K_M",
        {
            "blk.0.ffn_up": "q4_1",
            "blk.1.ffn_up": "q5_0",
            "blk.2.ffn_up": "q5_1",
            "blk.3.ffn_up": "q4_0",
        },
    ),
    "mixture": Model(
        "Qwen3MoeConfig",
        {
            "rope_parameters": _ROPE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        "qwen2",
        "Q4_K_M",
        {"blk.0.ffn_gate_exps": "q5_k", "blk.1.ffn_up_exps": "iq4_xs"},
    ),
    "hybrid": Model(
        "Qwen3_5TextConfig",
        {
            "intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 64,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": _ROPE
            | {
                "partial_rotary_factor": 0.25,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
        },
        "qwen35",
        "Q4_K_M",
        {"ssm_out": "q6_k", "attn_gate": "q5_k", "ssm_alpha": "q8_0"},
    ),
}


def tokenizer() -> Tokenizer:
    """A byte-level tokenizer of `VOCABULARY` tokens, trained on a text of this repository."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator([TEXT.read_text(encoding="utf-8")], trainer)
    return made


def save(model: Model, directory: Path) -> None:
    """Write the checkpoint with random weights; norms and biases spread, too."""
    torch.manual_seed(11)
    config = getattr(transformers, model.config)(**(_BASE | model.options))
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "eos_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def convert(directory: Path, pre: str, out: Path, llama_cpp: Path) -> None:
    """Run the converter on a checkpoint; the kind of tokenizer, which it knows by a hash, is
    given."""
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    import gguf
    from conversion import ModelBase, get_model_class
    from conversion.base import ModelType, get_model_architecture

    architecture = get_model_architecture(ModelBase.load_hparams(directory, False), ModelType.TEXT)
    converter = get_model_class(architecture)
    converter.get_vocab_base_pre = lambda self, tokenizer: pre
    converter.set_vocab = converter._set_vocab_gpt2  # the others need the package of SentencePiece
    converter.no_mtp = True
    converter(directory, gguf.LlamaFileType.ALL_F32, out).write()


def main(arguments: list[str]) -> int:
    """Make the models of these names, all without any."""
    llama_cpp, quantiser, *names = arguments
    torch.set_num_threads(1)
    for name in names or MODELS:
        model, out = MODELS[name], OUT / name
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            directory, whole = Path(scratch) / "checkpoint", Path(scratch) / "whole.gguf"
            save(model, directory)
            convert(directory, model.pre, whole, Path(llama_cpp))
            types = []
            for tensor, kind in model.types.items():
                types += ["--tensor-type", f"{tensor}={kind}"]
            target = out / "model.gguf"
            subprocess.run(
                [quantiser, *types, str(whole), str(target), model.base, "1"], check=True
            )
            (out / "config.json").write_bytes((directory / "config.json").read_bytes())
            (OUT / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
