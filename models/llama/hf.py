"""To and from the names, layouts and config.json of transformers' LlamaForCausalLM.

Values are moved, never computed with: there and back is equal bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from models.llama.sizes import LlamaSize, RopeScaling

_OUTSIDE_BLOCKS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE_BLOCKS = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_ROTARY = ("attention.wq.weight", "attention.wk.weight")
_TIED_HEAD = "output.weight"
_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
# What transformers takes for fields that a config.json doesn't have.
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def hf_names(size: LlamaSize) -> dict[str, str]:
    """Our name -> theirs of each parameter, in the model's order. A tied head is no parameter of its own."""
    names = {}
    for ours in size.parameter_shapes():
        block = re.fullmatch(r"layers\.(\d+)\.(.+)", ours)
        names[ours] = f"model.layers.{block[1]}.{_INSIDE_BLOCKS[block[2]]}" if block else _OUTSIDE_BLOCKS[ours]
    return names


def num_reordered_rows(name: str, size: LlamaSize) -> int:
    """How many neighbouring rows of one of our parameters change places among themselves: a head's of wq and wk."""
    return size.head_dim if name.endswith(_ROTARY) else 1


def rows_to_hf(name: str, rows: Tensor, size: LlamaSize) -> Tensor:
    """Rows of one of our parameters, whole groups of `num_reordered_rows`, in their order. May be a view."""
    return _halves_from_pairs(rows, size.head_dim) if name.endswith(_ROTARY) else rows


def rows_from_hf(name: str, rows: Tensor, size: LlamaSize) -> Tensor:
    """The inverse of `rows_to_hf`."""
    return _pairs_from_halves(rows, size.head_dim) if name.endswith(_ROTARY) else rows


def to_hf(state: Mapping[str, Tensor], size: LlamaSize) -> dict[str, Tensor]:
    """Renames a model's state, any part of it, and reorders the rows of wq and wk. A tied head is kept if it is there.

    Raises:
        ValueError: a name is no parameter of this model.
    """
    names = _names_and_head(size)
    _check_names(state, names, "parameters")
    return {theirs: rows_to_hf(ours, state[ours], size) for ours, theirs in names.items() if ours in state}


def from_hf(state: Mapping[str, Tensor], size: LlamaSize) -> dict[str, Tensor]:
    """The inverse of `to_hf`. Rotary tables, which old files hold, are left out.

    Raises:
        ValueError: a name is no parameter of this model.
    """
    names = _names_and_head(size)
    state = {name: value for name, value in state.items() if not is_rotary_table(name)}
    _check_names(state, names.values(), "Hugging Face parameters")
    return {ours: rows_from_hf(ours, state[theirs], size) for ours, theirs in names.items() if theirs in state}


def is_rotary_table(name: str) -> bool:
    """Whether one of their names is that of a table which old files hold, and which follows from the configuration."""
    return name.endswith("rotary_emb.inv_freq")


def hf_config(size: LlamaSize) -> dict[str, Any]:
    """What config.json says about a model of this size; the tokenizer's special ids and the dtype are not in it."""
    scaling = size.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        **_FIXED,
        "hidden_size": size.dim,
        "intermediate_size": size.ffn_hidden_dim,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab_size,
        "max_position_embeddings": size.max_seq_len,
        "rms_norm_eps": size.norm_eps,
        "rope_theta": size.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        },
        "tie_word_embeddings": size.tie_embeddings,
    }


def size_from_hf_config(config: Mapping[str, Any]) -> LlamaSize:
    """The size that a config.json describes, of transformers 4 or 5; what it leaves out is what transformers assumes.

    The feed-forward width, which our sizes compute from two numbers, is kept.

    Raises:
        ValueError: it isn't a Llama that `models.llama.model` can be, and in which field.
    """
    for field, legal in _FIXED.items():
        found = config.get(field, _DEFAULTS.get(field))
        if found != legal:
            raise ValueError(f"{field} is {found!r}, legal is {legal!r}")
    dim, ffn_dim = _count(config, "hidden_size"), _count(config, "intermediate_size")
    num_heads, num_kv_heads = _count(config, "num_attention_heads"), config.get("num_key_value_heads")
    rope_theta, rope_scaling = _rope(config)
    size = LlamaSize(
        dim,
        _count(config, "num_hidden_layers"),
        num_heads,
        num_heads if num_kv_heads is None else _count(config, "num_key_value_heads"),
        _count(config, "vocab_size"),
        # In the middle between this width and the next: rounding can't make it another.
        ffn_dim_multiplier=(ffn_dim + 0.5) / int(8 * dim / 3),
        multiple_of=1,
        rope_theta=rope_theta,
        norm_eps=config.get("rms_norm_eps", _DEFAULTS["rms_norm_eps"]),
        tie_embeddings=config.get("tie_word_embeddings", False),
        max_seq_len=_count(config, "max_position_embeddings"),
        rope_scaling=rope_scaling,
    )
    head_dim = config.get("head_dim")
    if head_dim not in (None, size.head_dim):
        raise ValueError(f"head_dim is {head_dim}, legal is hidden_size / num_attention_heads = {size.head_dim}")
    assert size.ffn_hidden_dim == ffn_dim
    return size


def _count(config: Mapping[str, Any], field: str) -> int:
    found = config.get(field, _DEFAULTS.get(field))
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"{field} is {found!r}, legal is a positive integer")
    return found


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        raise ValueError(f"rope_scaling is {stated!r}, legal is an object or null")
    theta = stated.get("rope_theta", config.get("rope_theta", _DEFAULTS["rope_theta"]))
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_scaling is of the type {kind!r}, legal is 'default' or 'llama3'")
    fields = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    if not fields <= stated.keys():
        raise ValueError(f"rope_scaling lacks {', '.join(sorted(fields - stated.keys()))}")
    return theta, RopeScaling(
        factor=stated["factor"],
        low_freq_factor=stated["low_freq_factor"],
        high_freq_factor=stated["high_freq_factor"],
        original_max_position=stated["original_max_position_embeddings"],
    )


def _names_and_head(size: LlamaSize) -> dict[str, str]:
    """As `hf_names`, with a tied head too: state dicts may list it."""
    return hf_names(size) | {_TIED_HEAD: _OUTSIDE_BLOCKS[_TIED_HEAD]}


def _check_names(state: Mapping[str, Tensor], known: Container[str], kind: str) -> None:
    strangers = [name for name in state if name not in known]
    if strangers:
        raise ValueError(f"not among the {kind} of this Llama: {', '.join(strangers)}")


def _halves_from_pairs(weight_ND: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from (0, 1), (2, 3) ... to all the first of the pairs, then all the second."""
    return weight_ND.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _pairs_from_halves(weight_ND: Tensor, head_dim: int) -> Tensor:
    return weight_ND.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
