"""One model family as a value. The families themselves are files of `families/`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import KvHeads, ModelShape, StateSize
from edgeshard.architectures.windows import Windows
from edgeshard.domain.models.model import Part

ACTIVATIONS = frozenset(
    {"silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu"}
)
"""The activations that the agent's own blocks compute."""
Shapes = dict[str, tuple[int, ...]]
"""Tensors of a checkpoint with their shapes as stored."""
BlockTensors = Callable[[ConfigFields, ModelShape, int], Shapes]
"""Tensors of the block with this index, named without `layers.N.`."""
OuterTensors = Callable[[ConfigFields, ModelShape], Shapes]
"""Tensors outside the blocks, without the token embedding and the LM head."""
Current = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""The decoder's part of a config.json under the keys that the family reads. Raises
UnsupportedModelError."""
Check = Callable[[ConfigFields, int], None]
"""(fields, number of blocks): raises UnsupportedModelError for a config.json that this family
cannot run."""


@dataclass(frozen=True, slots=True)
class SizeKeys:
    """The keys under which config.json has the sizes. Without `head_dim` the heads share `hidden`
    evenly."""

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    head_dim: str = "head_dim"
    context: str = "max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Library:
    """The names of a family in transformers: the module
    `transformers.models.MODULE.modeling_MODULE`, and its classes.

    A class is named by `prefix` and its kind, unless its name is given. `norm` may be a class of
    `torch.nn` too.
    """

    module: str
    prefix: str
    config: str = ""
    layer: str = ""
    norm: str = ""
    rotary: str = ""

    @property
    def config_class(self) -> str:
        return self.config or f"{self.prefix}Config"

    @property
    def layer_class(self) -> str:
        return self.layer or f"{self.prefix}DecoderLayer"

    @property
    def rotary_class(self) -> str:
        return self.rotary or f"{self.prefix}RotaryEmbedding"

    @property
    def norm_class(self) -> str:
        return self.norm or f"{self.prefix}RMSNorm"


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor of a checkpoint that holds the same part of all experts of a layer, one after the
    other.

    `tensor` is its name in a block. `parts` are the names of its equal parts of one expert, also
    one after the other, with `{}` for the expert's index.
    """

    tensor: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts.

    It has the keys for the number of experts (one of `count`) and for the number that a token uses,
    and the common part of their tensors' names (a regular expression). If it has a `switch`, there
    are none unless that flag is set.

    If a checkpoint has `joined` tensors, each expert's are read out of them. `transposed` matrices
    are stored as [inputs, outputs]. With `both_layouts` some checkpoints have them as [outputs,
    inputs], and the sizes decide: such a family refuses square matrices.
    """

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k: str = "num_experts_per_tok"
    tensors: str = r"\bexperts\."
    switch: str = ""
    joined: tuple[Joined, ...] = ()
    transposed: bool = False
    both_layouts: bool = False


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits select the experts of a token: the `top_k` ones of the largest
    softmax. If it is `sigmoid`, the largest sigmoid plus a correction selects them; the shares do
    not include the correction.

    Shares add up to 1 if they are `normalised`, then are multiplied by `scale`. If there are
    several `groups` of experts, only the `kept_groups` whose best two have the largest sum take
    part. `float32` is the router's product.
    """

    top_k: int
    normalised: bool = True
    sigmoid: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    float32: bool = False


@dataclass(frozen=True, slots=True)
class Clamp:
    """The gating gate * sigmoid(alpha * gate) * (up + 1), with the gate at most `limit` and up
    within it on both sides.

    Rows of the two alternate.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class BlockStyle:
    """The properties of a block that its tensors do not show, for blocks of the agent's own.

    `scaling` multiplies the scores of attention. `rotary` is the type of layer whose rotary
    embedding the block uses, "" if there is one for all, None if the block has no positions.
    `unit_offset` norms multiply by 1 + weight in float32, `rounded_last` ones by the weight in
    float32, others by the weight in the model's dtype. `softcap` caps scores: cap * tanh(scores /
    cap). `residual_scale` multiplies the outputs of attention and of the MLP before they are added.
    `routing` is for mixtures; with a `clamp` their experts have no `activation`. `values_normed`
    are a head's values over their root mean square. With `tiled_heads`, value heads of the gated
    delta rule take the key heads in turn.
    """

    eps: float
    scaling: float
    activation: str
    rotary: str | None = ""
    unit_offset: bool = False
    rounded_last: bool = False
    softcap: float | None = None
    residual_scale: float = 1.0
    routing: Routing | None = None
    clamp: Clamp | None = None
    values_normed: bool = False
    tiled_heads: bool = False


@dataclass(frozen=True, slots=True)
class Ends:
    """The computing before the first block and after the last.

    Embeddings are multiplied by `embedding_scale`, which is rounded to the model's dtype first if
    it is `rounded`. The final norm has `eps` and the form of a block's. Logits are divided by
    `logit_divisor`, then capped: cap * tanh(logits / cap).
    """

    eps: float
    embedding_scale: float = 1.0
    rounded: bool = False
    unit_offset: bool = False
    rounded_last: bool = False
    logit_divisor: float = 1.0
    logit_cap: float | None = None


Style = Callable[[ConfigFields, ModelShape, int], BlockStyle]
BlockHeads = Callable[[ConfigFields, ModelShape, int], KvHeads]
"""The keys and values that the block of this index keeps."""
BlockStates = Callable[[ConfigFields, ModelShape, int], tuple[StateSize, ...]]
"""The states that the block of this index keeps of a request."""
BlockChunk = Callable[[ConfigFields, int], int]
"""The positions of the chunks within which the block of this index attends; 0 if it attends to
all."""
MakeEnds = Callable[[ConfigFields, ModelShape], Ends]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a block's tensor in the agent's modules: the path of a parameter or a buffer, or
    of the part with this `index`."""

    parameter: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """The family runs in the agent's own blocks: RMS norms, rotary grouped-query attention, gated
    MLPs or a mixture.

    `renames` (regular expressions and their replacements) turn a tensor's name in a block into the
    Llama kind's. `float32` (a regular expression) are the parameters that keep full precision in
    any dtype.
    """

    style: Style
    renames: tuple[tuple[str, str], ...] = ()
    float32: str = ""


@dataclass(frozen=True, slots=True)
class Plugged:
    """The family runs in transformers' decoder layers, which call our attention.

    `renames` and `parts` lead from the name of a block's tensor to its place in the layer; without
    either it is the same. `float32` (a regular expression) are the parameters and buffers that keep
    full precision in any dtype.

    `experts` is the path of the layer's experts, if the agent's own gated MLPs replace them. The
    tensors of each lead to `EXPERTS.N.PART.weight`, of gate_proj and up_proj, or both as
    gate_up_proj, or only up_proj, and of down_proj.

    `modules` names a module class of its own in the agent, for work that a generic stage does not
    do. `mixers` maps the name of a part of a layer to the agent's own module that replaces it if
    the layer has it (`model.mixers`).
    """

    renames: tuple[tuple[str, str], ...] = ()
    parts: Mapping[str, Place] = field(default_factory=dict)
    float32: str = ""
    experts: str = ""
    modules: str = ""
    mixers: Mapping[str, str] = field(default_factory=dict)


def rms_final_norm(fields: ConfigFields, shape: ModelShape) -> Shapes:
    return {"norm.weight": (shape.hidden_size,)}


def plain_ends(fields: ConfigFields, shape: ModelShape) -> Ends:
    return Ends(fields.number("rms_norm_eps"))


_KEYS = SizeKeys()
_ROPE = Rope()


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model family. A regular expression here matches with `re.search` in a canonical name (see
    `tensors`).

    Of a config.json: `model_types` are the values of model_type that the family answers to.
    `nested` maps the model_type of a config.json that holds the decoder in its `text_config` to the
    model_type in there. A model_type that is in both may have the decoder's keys at the top
    instead. `current` turns older keys into those that transformers' configuration class has, if
    the class does not do so itself. `defaults` are the values of that class for keys that
    checkpoints leave out; without one a key is required. `nested_defaults` are further ones: a
    `text_config` leaves out each key that has the class's default. `either_ties` has each
    model_type of `nested` whose `tie_word_embeddings` counts at either level. `activation` is a
    key, `activations` its values. `flags`, `sizes` and `numbers` are keys that are checked for
    their type, `refused` keys that may only be missing, null or false, with the reason. Families
    with learned positions, or without any, have no `rope`. `chunks` is for families with blocks
    that attend within chunks of positions.

    Fields of a checkpoint:

    `prefixes` are removed from names, and `aliases` (regular expressions and their replacements)
    turn further names into canonical ones. `block_list` is the name of the blocks' list, `computed`
    names in a block that are not read. `further_blocks` is the key for the number of following
    blocks that are not run. `outer_names` are all possible tensors outside the blocks, with their
    unit; `outer` has a config's. `kv` is for families whose blocks do not all have the same heads;
    a block without attention has none. `states` is for families with a state of fixed size for each
    request: it cannot be cut to fewer positions, as keys and values can.

    Fields for running it: `runs`, `ends`, `library`. Matrices of blocks may be small integers if
    `quantises`, except if their names match `whole`. `models` are configs known by name. `gguf` is
    the form in which llama.cpp writes the family, None if its GGUF files are not supported.
    """

    name: str
    model_types: tuple[str, ...] = ()
    nested: Mapping[str, str] = field(default_factory=dict)
    current: Current = lambda values: values
    defaults: Mapping[str, Any]
    nested_defaults: Mapping[str, Any] = field(default_factory=dict)
    either_ties: frozenset[str] = frozenset()
    keys: SizeKeys = _KEYS
    activation: str = "hidden_act"
    activations: frozenset[str] = ACTIVATIONS
    flags: tuple[str, ...] = ("attention_bias", "mlp_bias")
    sizes: tuple[str, ...] = ("intermediate_size",)
    numbers: tuple[str, ...] = ("rms_norm_eps",)
    refused: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    rope: Rope | None = _ROPE
    windows: Windows | None = None
    chunks: BlockChunk | None = None
    experts: Experts | None = None

    prefixes: tuple[str, ...] = ("model.",)
    aliases: tuple[tuple[str, str], ...] = ()
    block_list: str = "layers"
    computed: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    further_blocks: str = ""
    embedding: str = "embed_tokens.weight"
    embedding_width: Callable[[ConfigFields, ModelShape], int] = lambda fields, shape: (
        shape.hidden_size
    )
    outer_names: Mapping[str, Part] = field(default_factory=lambda: {"norm.weight": Part.HEAD})
    outer: OuterTensors = rms_final_norm
    block: BlockTensors
    kv: BlockHeads | None = None
    states: BlockStates | None = None

    library: Library
    runs: Fused | Plugged
    ends: MakeEnds = plain_ends
    quantises: bool = True
    whole: str = r"gate\.weight$"
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gguf: Gguf | None = None

    @property
    def own_types(self) -> tuple[str, ...]:
        """The values of model_type of a decoder."""
        return self.model_types or (self.name,)

    @property
    def answers_to(self) -> tuple[str, ...]:
        """The values of model_type at the top of a config.json."""
        return (*self.own_types, *self.nested)

    def is_expert(self, name: str) -> bool:
        """Whether this tensor belongs to experts of which a token uses a few only."""
        return self.experts is not None and re.search(self.experts.tensors, name) is not None

    @property
    def has_expert_modules(self) -> bool:
        """Whether each expert is a module of the agent's own: a unit that is kept, read and
        quantised by itself."""
        return self.experts is not None and (
            isinstance(self.runs, Fused) or bool(self.runs.experts)
        )

    def expert_index(self, name: str) -> int | None:
        """The index of the expert of this tensor in a block, if experts are modules; else None."""
        if not self.has_expert_modules or not self.is_expert(name):
            return None
        match = re.search(r"\bexperts\.(\d+)\.", self.place(name).parameter)
        return None if match is None else int(match[1])

    def matrix(self, name: str, size: tuple[int, ...], hidden: int) -> tuple[int, ...]:
        """The size [outputs, inputs] of the matrix in a block that is stored in this `size`; others
        are as stored."""
        return size[::-1] if self.is_transposed(name, size, hidden) else size

    def is_transposed(self, name: str, size: tuple[int, ...], hidden: int) -> bool:
        """Whether the tensor of this name in a block is a matrix that is stored, in this `size`, as
        [inputs, outputs].

        The size does not show it if a matrix is square. It counts only for families with
        `both_layouts`, whose down projections have `hidden` outputs and the others `hidden` inputs.
        """
        experts = self.experts
        if experts is None or not experts.transposed or len(size) != 2 or not self.is_expert(name):
            return False
        hidden_at = 1 if "down_proj" in name else 0
        return not experts.both_layouts or size[hidden_at] == hidden

    def place(self, name: str) -> Place:
        """The place of the tensor of this name in a block; name and path are without
        `layers.N.`."""
        if isinstance(self.runs, Plugged) and name in self.runs.parts:
            return self.runs.parts[name]
        for pattern, replacement in self.runs.renames:
            name = re.sub(pattern, replacement, name)
        return Place(name)

    def keeps_float32(self, name: str) -> bool:
        """Whether the tensor of this name in a block keeps full precision in any dtype."""
        float32 = self.runs.float32
        return bool(float32 and re.search(float32, self.place(name).parameter))

    def is_quantised(self, name: str, dimensions: int) -> bool:
        """Whether the tensor of this name in a block becomes small integers on request."""
        if not self.quantises or dimensions != 2 or re.search(self.whole, name):
            return False
        return self.place(name).index is None
