"""The loss: a sum over valid tokens, so that micro-batches and ranks can be put together."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dmuon_titan.config import JobConfig, load_config
from dmuon_titan.loss import IGNORE_INDEX, build_loss, cross_entropy_sum, linear_cross_entropy_sum
from dmuon_titan.memory import LOGITS_AT_ONCE
from models.llama.initialization import Initializer
from models.llama.model import Llama
from models.llama.sizes import FLAVORS

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def batch(num_valid: tuple[int, int] = (5, 31), dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 31, 17, generator=generator).to(dtype).requires_grad_()
    label = torch.randint(17, (2, 31), generator=generator)
    for row, valid in enumerate(num_valid):
        label[row, valid:] = IGNORE_INDEX
    return logits, label


def by_hand(logits: Tensor, label: Tensor) -> Tensor:
    valid = label != IGNORE_INDEX
    log_probabilities = F.log_softmax(logits.double(), dim=-1)
    return -log_probabilities[valid].gather(-1, label[valid][:, None]).sum()


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits)[0]


def test_value_and_gradient() -> None:
    logits, label = batch()
    loss, expected = cross_entropy_sum(logits, label), by_hand(logits, label)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient(loss, logits), gradient(expected, logits), rtol=1e-5, atol=1e-7)
    assert not gradient(cross_entropy_sum(logits, label), logits)[label == IGNORE_INDEX].any()


def test_micro_batches_add_up() -> None:
    """Wrong if sequences with 5 and 31 targets weigh the same: the mean of means."""
    logits, label = batch()
    parts = sum(cross_entropy_sum(logits[row : row + 1], label[row : row + 1]) for row in range(2))
    torch.testing.assert_close(parts, cross_entropy_sum(logits, label), rtol=1e-6, atol=0)


def test_no_valid_token_is_zero_and_finite() -> None:
    logits, label = batch((0, 0))
    loss = cross_entropy_sum(logits, label)
    assert loss.item() == 0
    assert not gradient(loss, logits).any()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, label = batch()
    whole = cross_entropy_sum(logits, label)
    expected = gradient(whole, logits)
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 17 * 4)
    chunked = cross_entropy_sum(logits, label)
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=0)
    assert torch.equal(gradient(chunked, logits), expected)


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits, label = batch(dtype=torch.bfloat16)
    loss = cross_entropy_sum(logits, label)
    torch.testing.assert_close(loss.double(), by_hand(logits, label), rtol=1e-6, atol=0)
    assert gradient(loss, logits).dtype == torch.bfloat16


def head(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 31, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(17, 8, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, batch()[1]


def of_all_logits(hidden: Tensor, weight: Tensor, label: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float64."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = by_hand(hidden @ weight.T, label)
    return (loss.detach(), *torch.autograd.grad(loss * scale, (hidden, weight)))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
@pytest.mark.parametrize("logits_at_once", [1 << 20, 17 * 7], ids=["one chunk", "nine chunks"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-7), (torch.bfloat16, 6e-3)])
def test_loss_of_a_head_without_its_logits(
    dtype: torch.dtype, tolerance: float, logits_at_once: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGITS_AT_ONCE, device, logits_at_once)
    hidden, weight, label = (tensor.detach().to(device) for tensor in head(dtype))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    scale = torch.tensor(0.3, dtype=torch.float64, device=device)
    scaled, loss = linear_cross_entropy_sum(hidden, weight, label, scale)
    expected, *gradients = of_all_logits(hidden, weight, label, 0.3)
    assert (scaled.dtype, loss.dtype, loss.requires_grad) == (torch.float32, torch.float32, False)
    assert relative(loss, expected) < tolerance
    assert relative(scaled.detach(), expected * 0.3) < tolerance
    for found, gradient_ in zip(torch.autograd.grad(scaled, (hidden, weight)), gradients, strict=True):
        assert found.dtype == dtype
        assert relative(found, gradient_) < tolerance


def test_a_chunk_of_ignored_tokens_alone_and_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 17 * 10)
    hidden, weight, label = head()
    label[1] = IGNORE_INDEX
    scaled, _ = linear_cross_entropy_sum(hidden, weight.detach(), label, torch.ones(()))
    (found,) = torch.autograd.grad(scaled, hidden)
    assert relative(found, of_all_logits(hidden, weight, label, 1.0)[1]) < 5e-7
    assert not found[1].any()


def test_without_gradients_the_loss_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGITS_AT_ONCE, "cpu", 17 * 10)
    arguments = (*head(), torch.ones(()))
    with torch.no_grad():
        found = linear_cross_entropy_sum(*arguments)
    assert all(map(torch.equal, found, linear_cross_entropy_sum(*arguments)))


def config_of(*flags: str) -> JobConfig:
    return load_config(["--config", "debug_model", *flags], environ={}).config


@pytest.mark.parametrize("flags", [[], ["--compile.enable", "--compile.backend", "aot_eager"]])
def test_the_loss_of_a_job_equals_the_model_s_logits(flags: list[str]) -> None:
    size = FLAVORS["llama3"]["debugmodel"]
    model = Llama(size, 64)
    for name, param in model.named_parameters():
        with torch.no_grad():
            param.copy_(Initializer(size, 0)(name, param.shape, 0, len(param)))
    tokens, label = torch.randint(size.vocab_size, (2, 2, 64), generator=torch.Generator().manual_seed(0))
    expected = cross_entropy_sum(model(tokens), label)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    scaled, loss = build_loss(config_of(*flags))(model, tokens, label, torch.tensor(0.5))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(scaled, list(model.parameters()))
    torch.testing.assert_close(gradients, [g * 0.5 for g in expected_gradients], rtol=1e-4, atol=1e-6)
