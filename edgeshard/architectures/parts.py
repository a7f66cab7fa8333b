"""Tensors, styles and checks that families have in common. Pure; nothing here depends on the
family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgeshard.architectures.fields import ConfigFields, shown
from edgeshard.architectures.limits import MAX_EXPERTS, MAX_EXPERTS_IN_ALL
from edgeshard.architectures.record import (
    ACTIVATIONS,
    BlockStyle,
    BlockTensors,
    Check,
    Ends,
    Experts,
    Joined,
    MakeEnds,
    Routing,
    Shapes,
    Style,
)
from edgeshard.architectures.shape import ModelShape

LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
"""Before attention and before the MLP."""
BEHIND_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
SANDWICH_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    BEHIND_NORMS[1],
)


# -- tensors ---------------------------------------------------------------------------------------


def linear(name: str, width_out: int, width_in: int, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (width_out, width_in)}
    if bias:
        shapes[f"{name}.bias"] = (width_out,)
    return shapes


def norms(width: int, *names: str, bias: bool = False) -> Shapes:
    """Tensors of norms over `width` numbers; LayerNorm has a bias too."""
    shapes: Shapes = {f"{name}.weight": (width,) for name in names}
    if bias:
        shapes |= {f"{name}.bias": (width,) for name in names}
    return shapes


def attention(
    shape: ModelShape,
    *,
    input_bias: bool = False,
    output_bias: bool = False,
    output: str = "o_proj",
) -> Shapes:
    """Projections of queries, keys, values and of attention's output."""
    hidden = shape.hidden_size
    query, key_value = shape.attention_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return (
        linear("self_attn.q_proj", query, hidden, input_bias)
        | linear("self_attn.k_proj", key_value, hidden, input_bias)
        | linear("self_attn.v_proj", key_value, hidden, input_bias)
        | linear(f"self_attn.{output}", hidden, query, output_bias)
    )


def head_norms(shape: ModelShape) -> Shapes:
    """Norms of each head's query and key."""
    return norms(shape.head_dim, "self_attn.q_norm", "self_attn.k_norm")


def gated_mlp(shape: ModelShape, inner: int, *, path: str = "mlp", bias: bool = False) -> Shapes:
    """Tensors of down(activation(gate(x)) * up(x)), `inner` numbers wide inside."""
    return (
        linear(f"{path}.gate_proj", inner, shape.hidden_size, bias)
        | linear(f"{path}.up_proj", inner, shape.hidden_size, bias)
        | linear(f"{path}.down_proj", shape.hidden_size, inner, bias)
    )


def row_norms(shape: ModelShape) -> Shapes:
    """Norms over the whole rows of queries and keys."""
    queries = norms(shape.attention_heads * shape.head_dim, "self_attn.q_norm")
    return queries | norms(shape.kv_heads * shape.head_dim, "self_attn.k_norm")


def llama_block(
    *,
    bias: str = "",
    mlp_bias: str = "",
    norm_names: tuple[str, ...] = LLAMA_NORMS,
    attention_norms: Callable[[ModelShape], Shapes] = lambda shape: {},
) -> BlockTensors:
    """Norms, attention and a gated MLP; `bias` and `mlp_bias` name the flags for their biases.

    `attention_norms` are the norms of queries and keys, `head_norms` or `row_norms`, if there are
    any.
    """

    def block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
        biased = bool(bias) and fields.flag(bias)
        return (
            norms(shape.hidden_size, *norm_names)
            | attention(shape, input_bias=biased, output_bias=biased)
            | attention_norms(shape)
            | gated_mlp(
                shape,
                fields.size("intermediate_size"),
                bias=bool(mlp_bias) and fields.flag(mlp_bias),
            )
        )

    return block


def expert_mlps(
    shape: ModelShape,
    count: int,
    inner: int,
    path: str = "mlp.experts",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Shapes:
    """Gated MLPs of experts, each with tensors of its own; `names` are of gate, up and down."""
    gate, up, down = names
    shapes: Shapes = {}
    for expert in range(count):
        shapes |= linear(f"{path}.{expert}.{gate}", inner, shape.hidden_size)
        shapes |= linear(f"{path}.{expert}.{up}", inner, shape.hidden_size)
        shapes |= linear(f"{path}.{expert}.{down}", shape.hidden_size, inner)
    return shapes


def joined_mlps(path: str = "mlp.experts", gate_up: str = "", down: str = "") -> tuple[Joined, ...]:
    """The tensors of `expert_mlps` if a checkpoint has gates and ups of all experts in one, and
    downs in another."""
    gates_and_ups = (f"{path}.{{}}.gate_proj.weight", f"{path}.{{}}.up_proj.weight")
    return (
        Joined(gate_up or f"{path}.gate_up_proj", gates_and_ups),
        Joined(down or f"{path}.down_proj", (f"{path}.{{}}.down_proj.weight",)),
    )


def transposed_mlps(
    shape: ModelShape, count: int, inner: int, bias: bool = False, experts: str = "mlp.experts"
) -> Shapes:
    """Gated MLPs of experts, gate and up in one, as [inputs, outputs]: a part of a checkpoint's
    single tensor (`joined_transposed`)."""
    hidden, shapes = shape.hidden_size, dict[str, tuple[int, ...]]()
    for expert in range(count):
        path = f"{experts}.{expert}"
        shapes |= {
            f"{path}.gate_up_proj": (hidden, 2 * inner),
            f"{path}.down_proj": (inner, hidden),
        }
        if bias:
            shapes |= {
                f"{path}.gate_up_proj_bias": (2 * inner,),
                f"{path}.down_proj_bias": (hidden,),
            }
    return shapes


def joined_transposed(experts: str = "mlp.experts") -> tuple[Joined, ...]:
    """The tensors of `transposed_mlps` as a checkpoint has them."""
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    return tuple(Joined(f"{experts}.{name}", (f"{experts}.{{}}.{name}",)) for name in names)


W_RENAMES = (
    (r"(\bexperts\.\d+)\.w1\.", r"\1.gate_proj."),
    (r"(\bexperts\.\d+)\.w3\.", r"\1.up_proj."),
    (r"(\bexperts\.\d+)\.w2\.", r"\1.down_proj."),
)
"""From experts whose matrices are w1, w3 and w2 to gated MLPs."""
TRANSPOSED_RENAMES = ((r"_proj$", "_proj.weight"), (r"_proj_bias$", "_proj.bias"))
"""From the names of `transposed_mlps` to the names of gated MLPs."""


# -- styles and ends -------------------------------------------------------------------------------


def llama_style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    """The style of blocks of the Llama kind."""
    return BlockStyle(
        fields.number("rms_norm_eps"),
        shape.head_dim**-0.5,
        fields.choice("hidden_act", ACTIVATIONS),
    )


def mixture_style(normalised: bool | None = None) -> Style:
    """The style of such blocks with experts.

    Their shares are normalised by `normalised` or, if it is None, by the flag `norm_topk_prob`.
    """

    def style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
        top_k = fields.size("num_experts_per_tok")
        shares = fields.flag("norm_topk_prob") if normalised is None else normalised
        return replace(llama_style(fields, shape, layer), routing=Routing(top_k, shares))

    return style


def multiplied_style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    """The style of blocks with multipliers of scores and of residual branches."""
    plain, scale = llama_style(fields, shape, layer), fields.number("residual_multiplier")
    return replace(plain, scaling=fields.number("attention_multiplier"), residual_scale=scale)


def scalar_style(fields: ConfigFields) -> BlockStyle:
    """The style of blocks whose norms multiply by 1 + weight and whose scores are scaled by
    `query_pre_attn_scalar`."""
    scaling = fields.number("query_pre_attn_scalar") ** -0.5
    activation = fields.choice("hidden_activation", ACTIVATIONS)
    return BlockStyle(fields.number("rms_norm_eps"), scaling, activation, unit_offset=True)


def scaled_ends(fields: ConfigFields, shape: ModelShape) -> Ends:
    """Embeddings multiplied by `embedding_multiplier`, logits divided by `logits_scaling`."""
    return Ends(
        eps=fields.number("rms_norm_eps"),
        embedding_scale=fields.number("embedding_multiplier"),
        logit_divisor=fields.number("logits_scaling"),
    )


def gemma_ends(unit_offset: bool = False, rounded_last: bool = False) -> MakeEnds:
    """Embeddings multiplied by the root of their width, and capped logits."""

    def ends(fields: ConfigFields, shape: ModelShape) -> Ends:
        return Ends(
            eps=fields.number("rms_norm_eps"),
            embedding_scale=shape.hidden_size**0.5,
            rounded=True,
            unit_offset=unit_offset,
            rounded_last=rounded_last,
            logit_cap=fields.optional_number("final_logit_softcapping"),
        )

    return ends


# -- reading and checking --------------------------------------------------------------------------


def fixed_values(**values: object) -> Check:
    """The check that each of these keys has the value given here, is null or is missing: nothing
    else is run."""

    def check(fields: ConfigFields, layer_count: int) -> None:
        for key, value in values.items():
            config_value = fields.values.get(key)
            if config_value is not None and (
                config_value != value
                or isinstance(config_value, bool) is not isinstance(value, bool)
            ):
                raise fields.refuse(
                    key, f"is {shown(config_value)}; {fields.family} runs with {shown(value)} only"
                )

    return check


def never_null(*keys: str) -> Check:
    """The check that none of these keys is null, which means something else to transformers than a
    key left out."""

    def check(fields: ConfigFields, layer_count: int) -> None:
        for key in keys:
            if key in fields.values and not fields.given(key):
                raise fields.refuse(key, "is null; give the number")

    return check


def even_split(fields: ConfigFields, total_key: str, total: int, parts_key: str, parts: int) -> int:
    """`total` over `parts`. Raises UnsupportedModelError naming `total_key` if that is no whole
    number."""
    if total % parts:
        raise fields.refuse(
            total_key, f"is {total}, which is not a multiple of {parts_key} {parts}"
        )
    return total // parts


def expert_count(experts: Experts, fields: ConfigFields) -> int:
    """Experts of one mixture layer, under the first of the keys that is given; 0 if they are
    switched off."""
    if experts.switch and not fields.flag(experts.switch):
        return 0
    return fields.size(next((key for key in experts.count if fields.given(key)), experts.count[-1]))


def chosen_experts(experts: Experts, fields: ConfigFields) -> int:
    """Experts a token uses in one mixture layer; 0 if they are switched off."""
    if experts.switch and not fields.flag(experts.switch):
        return 0
    return fields.size(experts.top_k)


def check_experts(experts: Experts, fields: ConfigFields, layer_count: int) -> None:
    """Raise UnsupportedModelError naming the key for more experts than EdgeShard runs, or more
    chosen than all."""
    count = expert_count(experts, fields)
    if count > MAX_EXPERTS:  # before anything is listed by expert
        raise fields.refuse(experts.count[0], f"is {count}; EdgeShard runs at most {MAX_EXPERTS}")
    if count * layer_count > MAX_EXPERTS_IN_ALL:
        raise fields.refuse(
            experts.count[0],
            f"is {count} in {layer_count} layers; EdgeShard runs at most {MAX_EXPERTS_IN_ALL} in "
            "all",
        )
    top_k = chosen_experts(experts, fields)
    if top_k > count:
        raise fields.refuse(experts.top_k, f"is {top_k}, more than the {count} experts there are")


def expert_groups(experts: Experts) -> Check:
    """The check of experts that are chosen out of `topk_group` of `n_group` groups."""

    def check(fields: ConfigFields, layer_count: int) -> None:
        count = expert_count(experts, fields)
        groups = fields.size("n_group")
        kept_groups = fields.size("topk_group")
        in_group = even_split(fields, experts.count[0], count, "n_group", groups)
        if in_group < 2:
            raise fields.refuse(
                "n_group",
                f"is {groups}; a group is ranked by its best two experts, so it needs two",
            )
        if kept_groups > groups:
            raise fields.refuse(
                "topk_group", f"is {kept_groups}, more than the {groups} groups there are"
            )
        if (top_k := chosen_experts(experts, fields)) > kept_groups * in_group:
            raise fields.refuse(
                experts.top_k,
                f"is {top_k}, more than {kept_groups} groups of {in_group} experts have",
            )

    return check
