"""To and from the names and layouts of transformers' LlamaForCausalLM.

Values are moved, never computed with: there and back is equal bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.llama.sizes import LlamaSize

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


def to_hf(state: Mapping[str, Tensor], size: LlamaSize) -> dict[str, Tensor]:
    """Renames a model's state, any part of it, and reorders the rows of wq and wk. A tied head is kept if it is there.

    Raises:
        ValueError: a name is no parameter of this model.
    """
    named = {}
    for ours, theirs in _names(size).items():
        if ours in state:
            rotary = ours.endswith(_ROTARY)
            named[theirs] = _halves_from_pairs(state[ours], size.head_dim) if rotary else state[ours]
    _check_names(state, _names(size), "parameters")
    return named


def from_hf(state: Mapping[str, Tensor], size: LlamaSize) -> dict[str, Tensor]:
    """The inverse of `to_hf`. Rotary tables, which old files hold, are left out.

    Raises:
        ValueError: a name is no parameter of this model.
    """
    state = {name: value for name, value in state.items() if not name.endswith("rotary_emb.inv_freq")}
    named = {}
    for ours, theirs in _names(size).items():
        if theirs in state:
            rotary = ours.endswith(_ROTARY)
            named[ours] = _pairs_from_halves(state[theirs], size.head_dim) if rotary else state[theirs]
    _check_names(state, set(_names(size).values()), "Hugging Face parameters")
    return named


def hf_config(size: LlamaSize) -> dict[str, Any]:
    """What config.json says about a model of this size; the tokenizer's special ids and the dtype are not in it."""
    scaling = size.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.dim,
        "intermediate_size": size.ffn_hidden_dim,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
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
        "attention_bias": False,
        "mlp_bias": False,
    }


def _names(size: LlamaSize) -> dict[str, str]:
    """Our name -> theirs, in the model's order. A tied head has a name too: state dicts may list it."""
    names = {}
    for ours in {**size.parameter_shapes(), "output.weight": ()}:
        block = re.fullmatch(r"layers\.(\d+)\.(.+)", ours)
        names[ours] = f"model.layers.{block[1]}.{_INSIDE_BLOCKS[block[2]]}" if block else _OUTSIDE_BLOCKS[ours]
    return names


def _check_names(state: Mapping[str, Tensor], known: Any, kind: str) -> None:
    strangers = [name for name in state if name not in known]
    if strangers:
        raise ValueError(f"not among the {kind} of this Llama: {', '.join(strangers)}")


def _halves_from_pairs(weight_ND: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from (0, 1), (2, 3) ... to all the first of the pairs, then all the second."""
    return weight_ND.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _pairs_from_halves(weight_ND: Tensor, head_dim: int) -> Tensor:
    return weight_ND.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
