"""The model by itself. What it computes is compared with transformers in test_llama_hf.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.llama.initialization import Initializer
from models.llama.model import Llama, RotaryEmbedding, scale_frequencies
from models.llama.sizes import FLAVORS, LlamaSize, RopeScaling

SIZE = LlamaSize(64, 2, 4, 2, 100, None, 32, 10000.0)


def build(size: LlamaSize, max_seq_len: int = 32) -> Llama:
    model, init = Llama(size, max_seq_len), Initializer(size, seed=1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(init(name, param.shape, 0, param.shape[0]))
    return model


def tokens(num_tokens: int = 32) -> Tensor:
    return torch.randint(100, (2, num_tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_parameters_are_those_of_the_size(tie_embeddings: bool) -> None:
    size = replace(SIZE, tie_embeddings=tie_embeddings)
    model = Llama(size, 32)
    assert {name: tuple(param.shape) for name, param in model.named_parameters()} == size.parameter_shapes()
    assert (model.output.weight is model.tok_embeddings.weight) == tie_embeddings


def test_every_flavor_can_be_built_on_meta() -> None:
    for flavors in FLAVORS.values():
        for size in flavors.values():
            with torch.device("meta"):
                model = Llama(size, 16)
            assert sum(param.numel() for param in model.parameters()) == size.num_parameters()


def test_rotary_table_is_real_on_a_meta_model() -> None:
    """Wrong if a model built on the meta device has positions without values, or saves them with its weights."""
    with torch.device("meta"):
        model = Llama(SIZE, 32)
    buffers, real = dict(model.named_buffers()), dict(Llama(SIZE, 32).named_buffers())
    assert len(buffers) == 2  # one table for all blocks
    for name, buffer in buffers.items():
        assert torch.equal(buffer, real[name])
    assert set(model.state_dict()) == set(SIZE.parameter_shapes())


def test_a_longer_sequence_than_the_table_is_refused() -> None:
    model = build(SIZE, max_seq_len=32)
    with pytest.raises(ValueError, match=r"33 tokens.* at most 32"):
        model(tokens(33))


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model, ids = build(SIZE), tokens()
    changed = ids.clone()
    changed[:, 20:] = 7
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_rotary_angles_survive_half_precision() -> None:
    """Wrong if positions are rounded to bfloat16, in which 1000 and 1001 are the same number."""
    rope = RotaryEmbedding(SIZE, 2048)
    x_BSHE = torch.randn(1, 2048, 2, SIZE.head_dim, generator=torch.Generator().manual_seed(0))
    rotated = rope(x_BSHE.bfloat16())
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rope(x_BSHE.bfloat16().float()).bfloat16())


def test_scaled_frequencies() -> None:
    """Short wavelengths stay, long ones are stretched, and the two meet without a jump."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    wavelengths = torch.tensor([6.28, 2047.0, 2048.0, 8192.0, 9000.0, 1e6])
    ratio = scale_frequencies(2 * torch.pi / wavelengths, scaling) * wavelengths / (2 * torch.pi)
    torch.testing.assert_close(ratio, torch.tensor([1.0, 1.0, 1.0, 0.125, 0.125, 0.125]))
    middle = 2 * torch.pi / torch.tensor([8192 / 2.5])
    torch.testing.assert_close(scale_frequencies(middle, scaling), middle * (0.5 + 0.5 / 8))


def test_bfloat16_follows_float32() -> None:
    model, ids = build(SIZE), tokens()
    expected = model(ids)
    model.to(torch.bfloat16)
    for buffer in model.buffers():
        buffer.data = buffer.float()
    logits = model(ids)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() < 0.03 * expected.norm()


def test_blocks_compile_into_one_whole_graph() -> None:
    """Wrong if something in a block breaks the graph, or every block of a deep model is compiled again."""
    size = replace(SIZE, num_layers=10)  # more than dynamo's limit of recompilations
    model, ids = build(size), tokens()
    expected = model(ids)
    torch._dynamo.reset()
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(model(ids), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.bfloat16, ("flash", "cudnn")), (torch.float32, ("fmha",))],
)
def test_attention_never_stores_all_scores(dtype: torch.dtype, kernel: tuple[str, ...]) -> None:
    """Wrong if grouped heads fall to the kernel that holds S x S scores."""
    model = build(replace(SIZE, dim=512), max_seq_len=256).to("cuda")
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
        torch.autocast("cuda", dtype, enabled=dtype != torch.float32),
    ):
        model(tokens(32).to("cuda")).sum().backward()
    names = [event.key for event in profile.key_averages()]
    assert any(word in name for word in kernel for name in names), names
