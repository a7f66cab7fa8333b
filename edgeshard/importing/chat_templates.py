"""Chat templates for models that have none, by the markers of their form. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownTemplate:
    """A form of chats: Jinja `text` as a tokenizer_config.json has it, for texts that hold all of `markers`."""

    name: str
    markers: tuple[str, ...]
    text: str


_TOOLS = """{%- macro tool_list() -%}
These functions can be called:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
To call one, write its name and its arguments as JSON between these tags:
<tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call>
{%- endmacro -%}
"""

_CHATML = (
    _TOOLS
    + """{%- set system = '' -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if system or tools -%}
<|im_start|>system
{{ system }}{% if system and tools %}

{% endif %}{% if tools %}{{ tool_list() }}{% endif %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""
)

_LLAMA3 = """{{- bos_token -}}
{%- for message in messages -%}
<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{{ (message.content or '') | trim }}<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif -%}"""

_GEMMA = """{{- bos_token -}}
{%- set system = '' -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content + '\\n\\n' -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ system if loop.first else '' }}{{ (message.content or '') | trim }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}
<start_of_turn>model
{% endif -%}"""

_PHI3 = """{%- for message in messages -%}
<|{{ message.role }}|>
{{ message.content or '' }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{% endif -%}"""

TEMPLATES = (
    KnownTemplate("ChatML", ("<|im_start|>", "<|im_end|>"), _CHATML),
    KnownTemplate("Llama 3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), _LLAMA3),
    KnownTemplate("Gemma 3", ("<start_of_turn>", "<end_of_turn>"), _GEMMA),
    KnownTemplate("Phi 3", ("<|user|>", "<|assistant|>", "<|end|>"), _PHI3),
)


def template_for(texts: Collection[str]) -> KnownTemplate | None:
    """The template whose markers all occur in one of the texts, such as special tokens or a template of another kind;
    None if the form is unknown."""
    for template in TEMPLATES:
        if all(any(marker in text for text in texts) for marker in template.markers):
            return template
    return None
