"""transformers.LlamaForCausalLM on the same weights is the oracle for what the model computes."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.llama.hf import from_hf, hf_config, size_from_hf_config, to_hf
from models.llama.model import Llama
from models.llama.sizes import FLAVORS, LlamaSize, RopeScaling, size_from_dict, size_to_dict
from tests.unit.test_llama_model import build

SIZE = LlamaSize(64, 3, 4, 2, 100, 1.3, 32, 10000.0, max_seq_len=64)
SIZES = {
    "grouped": SIZE,
    "one kv head a query head": replace(SIZE, num_kv_heads=4),
    "one kv head": replace(SIZE, num_kv_heads=1),
    "tied": replace(SIZE, tie_embeddings=True),
    # Head dim 16 has wavelengths from 6 to 20,000: some stay, some are stretched, some lie between.
    "stretched": replace(SIZE, rope_scaling=RopeScaling(factor=8.0, original_max_position=64)),
    "stretched and tied": replace(
        SIZE, tie_embeddings=True, rope_scaling=RopeScaling(factor=32.0, original_max_position=64)
    ),
    "other epsilon and theta": replace(SIZE, norm_eps=1e-2, rope_theta=5e5),
}


def build_uneven(size: LlamaSize) -> Llama:
    """A model with sharp attention and uneven norms, as after training: at first both hardly matter."""
    model, generator = build(size, max_seq_len=64), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.mul_(torch.rand(param.shape, generator=generator) + 0.5)
            elif "layers" in name:
                param.mul_(8)
    return model


def transformers_model(size: LlamaSize, model: Llama) -> Any:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_config(size)))
    theirs.load_state_dict(to_hf(model.state_dict(), size))
    return theirs


@pytest.mark.hf
@pytest.mark.parametrize("case", SIZES)
def test_logits_and_gradients_equal_transformers(case: str) -> None:
    size = SIZES[case]
    ours = build_uneven(size)
    theirs = transformers_model(size, ours)
    ids = torch.randint(size.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    logits, their_logits = ours(ids), theirs(ids).logits
    torch.testing.assert_close(logits, their_logits, rtol=1e-5, atol=1e-5)

    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * direction).sum().backward()
    (their_logits * direction).sum().backward()
    gradients = from_hf({name: param.grad for name, param in theirs.named_parameters()}, size)
    for name, param in ours.named_parameters():
        assert param.grad is not None
        assert (param.grad - gradients[name]).norm() <= 1e-5 * param.grad.norm(), name


@pytest.mark.hf
def test_layout_matters() -> None:
    """The control of the comparison above: without the reordered rows it must fail."""
    ours = build_uneven(SIZE)
    theirs = transformers_model(SIZE, ours)
    theirs.model.layers[0].self_attn.q_proj.weight.data.copy_(ours.layers[0].attention.wq.weight.data)
    ids = torch.arange(64)[None]
    assert (ours(ids) - theirs(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize("case", SIZES)
def test_round_trip_is_equal_bit_for_bit(case: str) -> None:
    size = SIZES[case]
    state = build(size).state_dict()
    moved = to_hf(state, size)
    returned = from_hf({**moved, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, size)
    assert set(returned) == set(state)
    assert all(torch.equal(returned[name], state[name]) for name in state)
    assert not torch.equal(moved["model.layers.0.self_attn.q_proj.weight"], state["layers.0.attention.wq.weight"])


def test_strange_names_are_refused() -> None:
    with pytest.raises(ValueError, match="layers\\.7\\.ffn_norm\\.weight"):
        to_hf({"layers.7.ffn_norm.weight": torch.ones(64)}, SIZE)
    with pytest.raises(ValueError, match="model\\.layers\\.0\\.self_attn\\.q_proj\\.bias"):
        from_hf({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, SIZE)


def test_sizes_of_the_table_are_found_again() -> None:
    """Wrong if a converted Llama 3 isn't the flavor that a configuration names."""
    for flavors in FLAVORS.values():
        for size in flavors.values():
            found = size_from_hf_config(json.loads(json.dumps(hf_config(size))))
            assert hf_config(found) == hf_config(size)
            assert found.parameter_shapes() == size.parameter_shapes()
            assert size_from_dict(json.loads(json.dumps(size_to_dict(size)))) == size
    with pytest.raises(ValueError, match="lacks dim, "):
        size_from_dict({"name": "llama3"})


def test_fields_that_a_config_leaves_out() -> None:
    """As in the files of the first Llama: what is left out is what transformers assumes."""
    required = (
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    config = {
        field: value for field, value in hf_config(SIZES["one kv head a query head"]).items() if field in required
    }
    size = size_from_hf_config(config)
    assert (size.num_kv_heads, size.norm_eps, size.rope_theta, size.max_seq_len) == (4, 1e-6, 10000.0, 2048)
    assert not size.tie_embeddings
