"""The loss: a sum over valid tokens, so that micro-batches and ranks can be put together."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dmuon_titan import loss as module
from dmuon_titan.config.schema import Compile
from dmuon_titan.loss import IGNORE_INDEX, build_loss, cross_entropy_sum


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
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 17 * 4)
    chunked = cross_entropy_sum(logits, label)
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=0)
    assert torch.equal(gradient(chunked, logits), expected)


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits, label = batch(dtype=torch.bfloat16)
    loss = cross_entropy_sum(logits, label)
    torch.testing.assert_close(loss.double(), by_hand(logits, label), rtol=1e-6, atol=0)
    assert gradient(loss, logits).dtype == torch.bfloat16


def test_compiled_loss_is_the_same() -> None:
    logits, label = batch()
    assert build_loss(Compile(enable=False)) is cross_entropy_sum
    assert build_loss(Compile(enable=True, components=("model",))) is cross_entropy_sum
    compiled = build_loss(Compile(enable=True, components=("loss",), backend="aot_eager"))
    loss = compiled(logits, label)
    torch.testing.assert_close(loss, cross_entropy_sum(logits, label))
    torch.testing.assert_close(gradient(loss, logits), gradient(cross_entropy_sum(logits, label), logits))
