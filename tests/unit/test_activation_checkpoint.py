"""Recomputing changes nothing but memory and time: same gradients, same names, and what is said is computed again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dmuon_titan.activation_checkpoint import checkpoint_activations
from models.llama.model import Llama
from models.llama.sizes import LlamaSize

SIZE = LlamaSize(32, 4, 4, 2, 64, None, 16, 10000.0)
PRODUCTS_OF_A_BLOCK = 7
TOKENS = torch.arange(16).view(1, 16)


class CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function.overloadpacket)] += 1
        return function(*args, **(kwargs or {}))


def gradients(mode: str, option: str) -> tuple[dict[str, Tensor], Counter[str]]:
    """Gradients of a small Llama, and what its backward computed."""
    torch.manual_seed(0)
    model = Llama(SIZE, 16)
    checkpoint_activations(model.layers, mode, option)
    loss = model(TOKENS).square().mean()
    with CountOperators() as operators:
        loss.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}, operators.counts


@pytest.mark.parametrize(
    ("mode", "option", "recomputed"),
    [
        ("full", "op", 4 * PRODUCTS_OF_A_BLOCK),
        ("selective", "2", 2 * PRODUCTS_OF_A_BLOCK),
        ("selective", "op", 4 * (PRODUCTS_OF_A_BLOCK // 2)),
        ("selective", "op_all", 0),
    ],
)
def test_what_is_recomputed(mode, option, recomputed):
    expected, plain = gradients("none", "op")
    actual, counts = gradients(mode, option)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=0)
    # The last product of a block is needed by nobody's backward: recomputation stops before it.
    per_block_tail = recomputed - (counts["aten.mm"] - plain["aten.mm"])
    assert 0 <= per_block_tail <= len(nn.ModuleList(Llama(SIZE, 16).layers))
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert (counts[attention] > plain[attention]) == (option == "2" or mode == "full")
