"""Folders as Ollama and LM Studio keep models in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYER = "application/vnd.ollama.image."
TOOLS_TEMPLATE = """{%- if tools %}<s>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call one: <tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call></s>
{% endif %}{% for message in messages %}<s>{{ message.role }}
{{ message.content }}</s>
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""
"""A chat template with tools, in the demo model's special tokens."""


@dataclass
class OllamaFolder:
    """A models folder of Ollama; `add` writes a model."""

    folder: Path

    def blob(self, data: bytes) -> str:
        """The digest of a blob, which is written."""
        digest = hashlib.sha256(data).hexdigest()
        path = self.folder / "blobs" / f"sha256-{digest}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return f"sha256:{digest}"

    def manifest(
        self, weights: bytes | None, config: Mapping[str, Any], **texts: str
    ) -> dict[str, Any]:
        """A manifest of these blobs; `texts` by the kind of their layer."""
        named = {"model_format": "gguf", **config}
        layers = [] if weights is None else [self._layer("model", weights)]
        layers += [self._layer(kind, text.encode()) for kind, text in texts.items()]
        docker = "application/vnd.docker."
        return {
            "schemaVersion": 2,
            "mediaType": f"{docker}distribution.manifest.v2+json",
            "config": {
                "mediaType": f"{docker}container.image.v1+json",
                "digest": self.blob(json.dumps(named).encode()),
                "size": 1,
            },
            "layers": layers,
        }

    def write(self, name: str, manifest: Mapping[str, Any], below: str = "manifests") -> Path:
        """`name` is HOST/NAMESPACE/MODEL/TAG."""
        path = self.folder / below / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(manifest))
        return path

    def add(
        self,
        name: str,
        weights: bytes | None,
        config: Mapping[str, Any] | None = None,
        **texts: str,
    ) -> Path:
        """A model of Ollama's library, NAME/TAG."""
        manifest = self.manifest(weights, config or {}, **texts)
        return self.write(f"registry.ollama.ai/library/{name}", manifest)

    def _layer(self, kind: str, data: bytes) -> dict[str, Any]:
        return {"mediaType": LAYER + kind, "digest": self.blob(data), "size": len(data)}
