"""Learning rates step by step: 1-based counts, no step at zero by accident, no division by zero."""

import itertools
import math

import pytest

from dmuon_titan.config import ScheduleLengths
from dmuon_titan.config.schema import LRScheduler
from dmuon_titan.lr_scheduler import build_schedule, learning_rate_factor


def factors(
    warmup: int,
    stable: int,
    decay: int,
    decay_type: str = "linear",
    min_factor: float = 0.0,
    num_steps: int | None = None,
) -> list[float]:
    lengths = ScheduleLengths(warmup, stable, decay)
    steps = range(1, (num_steps or lengths.total) + 1)
    return [learning_rate_factor(step, lengths, decay_type, min_factor) for step in steps]


@pytest.mark.parametrize("decay_type", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("min_factor", [0.0, 0.1])
@pytest.mark.parametrize(
    ("warmup", "stable", "decay"), [(0, 10, 0), (4, 2, 4), (10, 0, 0), (0, 0, 10), (1, 0, 9), (3, 0, 1), (0, 0, 1)]
)
def test_first_peak_and_last_step(warmup: int, stable: int, decay: int, decay_type: str, min_factor: float) -> None:
    values = factors(warmup, stable, decay, decay_type, min_factor)
    peak = max(warmup, 1)
    assert values[0] > 0
    assert values[peak - 1] == 1.0
    assert all(value < 1.0 for value in values[: peak - 1])
    assert all(value == 1.0 for value in values[peak - 1 : warmup + stable])
    assert all(0 <= min_factor <= value <= 1 for value in values[peak - 1 :])
    only_step = warmup + stable + decay == 1
    assert values[-1] == (min_factor if decay and not only_step else 1.0)
    descent = values[max(warmup + stable, 1) - 1 :]
    assert all(later < earlier for earlier, later in itertools.pairwise(descent))


def test_shapes_by_hand() -> None:
    assert factors(4, 2, 4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert factors(0, 1, 4, "sqrt")[1:] == [1 - math.sqrt(part / 4) for part in (1, 2, 3, 4)]
    assert factors(0, 1, 2, "cosine", 0.5) == pytest.approx([1.0, 0.75, 0.5])


def test_steps_after_the_schedule_keep_its_last_rate() -> None:
    assert factors(1, 1, 2, min_factor=0.2, num_steps=6)[3:] == [0.2, 0.2, 0.2]
    assert factors(2, 1, 0, num_steps=5)[3:] == [1.0, 1.0]


def test_options_of_a_run() -> None:
    """Wrong if the keys of [lr_scheduler] mean something else than their documentation says."""
    stable = build_schedule(LRScheduler(warmup_steps=2, decay_ratio=0.5, min_lr_factor=0.1), 10)
    assert [stable(step) for step in (1, 2, 5)] == [0.5, 1.0, 1.0]
    assert stable(10) == pytest.approx(0.1)
    at_once = build_schedule(LRScheduler(warmup_steps=2, decay_ratio=None), 10)
    assert at_once(3) == 1 - 1 / 8
    too_long = build_schedule(LRScheduler(warmup_steps=20), 10)
    assert [too_long(step) for step in (1, 10)] == [0.1, 1.0]
    longer = build_schedule(LRScheduler(warmup_steps=0, total_steps=101, decay_ratio=None), 10)
    assert longer(10) == pytest.approx(1 - 9 / 100)
