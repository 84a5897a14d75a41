"""Initial weights: the same bits for whoever draws whichever part."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from models.llama.initialization import Initializer
from models.llama.sizes import LlamaSize

SIZE = LlamaSize(96, 2, 4, 2, 1000, None, 32, 10000.0)
WIDE = "layers.1.feed_forward.w1.weight"
SHAPE = (2011, 997)  # 262 rows a block; nothing divides anything


def whole(seed: int = 1, name: str = WIDE) -> torch.Tensor:
    return Initializer(SIZE, seed)(name, SHAPE, 0, SHAPE[0])


@pytest.mark.parametrize(
    "bounds",
    [
        [0, 1006, 2011],  # as FSDP2 shards over 2 ranks
        [*range(0, 2011, 252), 2011],  # over 8
        [0, 1, 261, 262, 263, 524, 525, 1500, 1500, 2011],  # across, at and beside the blocks' bounds, and empty
    ],
)
def test_any_split_gives_the_same_bits(bounds: list[int]) -> None:
    """Wrong if weights depend on the number of ranks."""
    init = Initializer(SIZE, 1)
    parts = [init(WIDE, SHAPE, start, stop) for start, stop in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(parts), whole())


def test_threads_do_not_change_bits() -> None:
    expected, num_threads = whole(), torch.get_num_threads()
    try:
        for other in (1, 3):
            torch.set_num_threads(other)
            assert torch.equal(whole(), expected)
    finally:
        torch.set_num_threads(num_threads)


def test_seed_and_name_and_nothing_else_decide() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = whole()
    assert torch.equal(torch.get_rng_state(), state)  # the training's generator is left alone
    with torch.device("meta"):
        assert torch.equal(whole(), first)
    assert torch.equal(Initializer(replace(SIZE, num_layers=9, vocab_size=7), 1)(WIDE, SHAPE, 0, SHAPE[0]), first)
    assert not torch.equal(whole(seed=2), first)
    assert not torch.equal(whole(name="layers.0.feed_forward.w1.weight"), first)
    assert not torch.equal(first[:262], first[262:524])  # nor do blocks repeat


def test_bits_of_a_seed_stay() -> None:
    """Wrong if a change of this code changes what a seed means: runs would no longer be repeatable."""
    values = Initializer(SIZE, 1)("layers.0.attention.wq.weight", (96, 96), 50, 51)[0, :4]
    expected = torch.tensor([-0.011273225, -0.036380142, -0.017316446, -0.018102096])
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "tie_embeddings", "std"),
    [
        ("tok_embeddings.weight", False, 1.0),
        ("tok_embeddings.weight", True, 96**-0.5),
        ("output.weight", False, 96**-0.5),
        ("layers.0.attention.wq.weight", False, 0.02),
        ("layers.1.attention.wk.weight", False, 0.02),
        ("layers.0.attention.wo.weight", False, 0.02 / 2**0.5),
        ("layers.7.feed_forward.w2.weight", False, 0.02 / 4),
        ("layers.7.feed_forward.w3.weight", False, 0.02 / 4),
    ],
)
def test_distribution(name: str, tie_embeddings: bool, std: float) -> None:
    values = Initializer(replace(SIZE, tie_embeddings=tie_embeddings), 3)(name, (1000, 1000), 0, 1000) / std
    assert values.abs().max() <= 3.0001
    assert values.abs().max() > 2.99
    # A normal cut off at three sigma has this variance; a million draws know it to a thousandth.
    variance = 1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2))
    assert values.mean().abs() < 5e-3
    assert abs(values.var().item() - variance) < 1e-2
    within_one = (values.abs() < 1).float().mean().item()
    assert abs(within_one - math.erf(1 / math.sqrt(2)) / math.erf(3 / math.sqrt(2))) < 3e-3


def test_norms_are_ones() -> None:
    for name in ("norm.weight", "layers.1.attention_norm.weight", "layers.0.ffn_norm.weight"):
        assert torch.equal(Initializer(SIZE, 1)(name, (96,), 10, 20), torch.ones(10))


def test_every_parameter_has_an_initial_value_and_strangers_have_none() -> None:
    init = Initializer(SIZE, 1)
    for name, shape in SIZE.parameter_shapes().items():
        assert init(name, shape, 0, shape[0]).shape == shape
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.wz\.weight"):
        init("layers.0.attention.wz.weight", (4, 4), 0, 4)
