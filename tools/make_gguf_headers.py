"""Write tests/importing/gguf/headers.json: the headers that llama.cpp's converter gives tiny models
of each family.

    python tools/make_gguf_headers.py LLAMA_CPP

LLAMA_CPP is a checkout of llama.cpp. The models are rows of tests/agent/model/families.py. A row
has what must differ there because the converter reads fewer configurations than EdgeShard, or other
keys. CI runs no converter.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.agent.model.families import VARIANTS

OUT = Path(__file__).resolve().parent.parent / "tests" / "importing" / "gguf" / "headers.json"
_SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 1}
ROWS: dict[str, dict[str, Any]] = {
    "arcee-yarn": {},
    "bamba-partial": {"head_dim": 8, "attn_rotary_emb": 4},
    "cohere2-windows": {"rotary_pct": 1.0},
    "dots1-windows": {},
    "ernie4_5-plain": {},
    "ernie4_5_moe-plain": {},
    "exaone4-windows": {},
    "exaone_moe-windows": {},
    "falcon_h1-norm-first": {"head_dim": 8},
    "gemma-plain": {},
    "gemma2-capped": {},
    "gemma3-text": {},
    "gemma4-dense": {},
    "gemma4-experts": {},
    "glm4-plain": {},
    "glm4_moe-groups": {},
    "gpt_oss-yarn": {"swiglu_limit": 7.0},
    "granite-tied": {},
    "granitemoe-options": {},
    "granitemoehybrid-experts": {"head_dim": 8},
    "granitemoeshared-options": {},
    "hunyuan_v1_dense-options": {},
    "lfm2-adjusted": {},
    "lfm2_moe-dense-layer": {},
    "llama-plain": {},
    "llama4-nested": {},
    "mamba2-tied": {},
    "minimax_m2-partial": {},
    "ministral3-plain": {},
    "mixtral-tied": {},
    "nemotron_h-groups": {"mamba_head_dim": 64, "mamba_num_heads": 4},
    "olmo2-plain": {},
    "olmo3-windows": {},
    "olmoe-clipped": {},
    "phi3-partial": {},
    "qwen2-tied": {},
    "qwen2_moe-windows": _SPARSE,
    "qwen2_vl-nested": {},
    "qwen3-tied": {},
    "qwen3_5-text": {},
    "qwen3_5_moe-joined": {},
    "qwen3_moe-dense-layer": _SPARSE,
    "qwen3_next-dense-layer": _SPARSE,
    "qwen3_vl-nested": {},
    "seed_oss-plain": {},
    "smollm3-interval": {"no_rope_layers": [1, 1, 1, 0]},
    "starcoder2-window": {},
}
_KINDS_OF_GRANITE = {"full_attention": "attention", "linear_attention": "mamba"}


def save(name: str, directory: Path) -> None:
    """Write the checkpoint of a row, and a vocabulary for those converters that count it."""
    config = VARIANTS[name].library_config()
    for key, value in ROWS[name].items():
        setattr(config, key, value)
    nested = "text_config" in config.to_dict()
    kind: Any = (
        transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
    )
    kind.from_config(config, dtype=torch.float32).save_pretrained(directory)
    vocabulary = {f"t{index}": index for index in range(61)}
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    saved = json.loads((directory / "config.json").read_text()) | ROWS[name]
    if name.startswith("granitemoehybrid"):
        saved["layer_types"] = [_KINDS_OF_GRANITE.get(kind, kind) for kind in saved["layer_types"]]
    (directory / "config.json").write_text(json.dumps(saved))


def header(directory: Path) -> dict[str, Any]:
    """The header of the file that the converter makes of a checkpoint, without a tokenizer."""
    import gguf
    from conversion import ModelBase, get_model_class
    from conversion.base import ModelType, get_model_architecture
    from conversion.llama import LlamaModel

    converter = get_model_class(
        get_model_architecture(ModelBase.load_hparams(directory, False), ModelType.TEXT)
    )
    for of in (converter, LlamaModel):
        of.set_vocab = lambda self: self.gguf_writer.add_eos_token_id(3)
    converter.no_mtp = True
    path = directory / "model.gguf"
    converter(directory, gguf.LlamaFileType.ALL_F32, path, hparams=None).write()
    reader = gguf.GGUFReader(path)
    hidden = ("GGUF.", "general.name", "general.size", "general.base", "general.tags", "tokenizer.")
    metadata = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith(hidden)
    }
    tensors: dict[str, list[int]] = {}
    for tensor in reader.tensors:
        block = tensor.name.split(".", 2)
        in_block = block[0] == "blk"
        stem = f"blk.*.{block[2]}" if in_block else tensor.name
        shape = [int(size) for size in reversed(tensor.shape)]
        tensors.setdefault(f"{stem} {shape}", []).append(int(block[1]) if in_block else -1)
    factors = {
        tensor.name: tensor.data.tolist()
        for tensor in reader.tensors
        if tensor.name.startswith("rope_f")
    }
    return {"changes": {}, "metadata": metadata, "tensors": tensors, "factors": factors}


def main(arguments: list[str]) -> int:
    """Write the headers of all rows."""
    llama_cpp = Path(arguments[0])
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = {}
    for name, changes in ROWS.items():
        with tempfile.TemporaryDirectory() as scratch:
            torch.manual_seed(3)
            save(name, Path(scratch))
            found[name] = header(Path(scratch)) | {"changes": changes}
    lines = [
        f"{json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in found.items()
    ]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
