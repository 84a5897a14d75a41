"""Owners: balanced, deterministic, within the memory cap, consecutive ones in different rows."""

import time
from collections import Counter

import pytest

from dmuon.assignment import Owner, assign, newton_schulz_flops, slot_owner
from models.llama.sizes import FLAVORS


def llama_shapes(num_layers: int, dim: int, kv_dim: int, ffn: int) -> dict[str, tuple[int, int]]:
    block = {"wq": (dim, dim), "wk": (kv_dim, dim), "wv": (kv_dim, dim), "wo": (dim, dim)}
    block |= {"w1": (ffn, dim), "w2": (dim, ffn), "w3": (ffn, dim)}
    return {f"layers.{i}.{name}": shape for i in range(num_layers) for name, shape in block.items()}


def test_cost_is_the_cheaper_of_the_two_forms() -> None:
    assert newton_schulz_flops((4096, 4096)) == 20 * 4096**3
    assert newton_schulz_flops((1024, 4096)) == (6 * 4 + 14) * 1024**3
    assert newton_schulz_flops((4096, 1024)) == newton_schulz_flops((1024, 4096))
    assert newton_schulz_flops((7, 1024, 4096)) == 7 * newton_schulz_flops((1024, 4096))


def test_every_parameter_has_one_owner_and_loads_add_up() -> None:
    shapes = llama_shapes(5, 64, 16, 192)
    result = assign(shapes, num_replicate=2, num_shard=3)
    assert result.owners.keys() == shapes.keys()
    for owner, flops in result.flops.items():
        mine = [name for name, chosen in result.owners.items() if chosen == owner]
        assert flops == sum(newton_schulz_flops(shapes[name]) for name in mine)
    assert len(result.flops) == 6


def test_order_of_the_model_does_not_matter() -> None:
    shapes = llama_shapes(4, 64, 16, 192)
    backwards = dict(reversed(shapes.items()))
    assert assign(shapes, 1, 4).owners == assign(backwards, 1, 4).owners


def test_real_models_are_balanced_in_cost_and_in_bytes() -> None:
    for shapes, slots in [
        (llama_shapes(32, 4096, 1024, 14336), 8),
        (llama_shapes(32, 4096, 1024, 14336), 64),
        (llama_shapes(16, 2048, 512, 8192), 2),
    ]:
        result = assign(shapes, 1, slots)
        assert result.imbalance < 1.1
        largest = max(rows * cols for rows, cols in shapes.values())
        mean = sum(result.numel.values()) / slots
        assert max(result.numel.values()) <= 1.15 * max(mean, largest)


@pytest.mark.parametrize("num_slots", [3, 9, 14, 16, 23, 40, 56, 72, 96, 112, 128, 192, 264, 408])
def test_no_count_of_slots_piles_matrices_up(num_slots: int) -> None:
    for sizes in FLAVORS.values():
        for size in sizes.values():
            shapes = {n: s for n, s in size.parameter_shapes().items() if n.startswith("layers.") and len(s) == 2}
            result = assign(shapes, 1, num_slots)
            largest = max(rows * cols for rows, cols in shapes.values())
            numel_ratio = max(result.numel.values()) / max(sum(result.numel.values()) / num_slots, largest)
            assert result.imbalance < 1.5
            assert numel_ratio < 1.5


def test_equal_matrices_are_spread_evenly() -> None:
    for num_matrices, num_slots in [(14, 9), (5, 3), (7, 7), (3, 8)]:
        shapes = {f"w{i}": (16, 16) for i in range(num_matrices)}
        counts = Counter(assign(shapes, 1, num_slots).owners.values())
        assert max(counts.values()) == -(-num_matrices // num_slots)


def test_more_slots_than_matrices_and_no_matrices() -> None:
    result = assign({"a": (8, 8), "b": (4, 8)}, 1, 16)
    assert result.owners["a"] != result.owners["b"]
    assert sum(flops > 0 for flops in result.flops.values()) == 2
    assert assign({}, 1, 2).imbalance == 1.0


def test_consecutive_slots_lie_in_different_rows() -> None:
    assert [slot_owner(slot, 2) for slot in range(4)] == [Owner(0, 0), Owner(1, 0), Owner(0, 1), Owner(1, 1)]


def test_thousands_of_parameters_over_thousands_of_slots() -> None:
    started = time.process_time()
    assign(llama_shapes(1000, 8192, 1024, 28672), 64, 64)
    assert time.process_time() - started < 5
