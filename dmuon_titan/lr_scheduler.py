"""The learning rate as a function of the step alone: a run that continues needs no state of it."""

from __future__ import annotations

import math
from collections.abc import Callable

from dmuon_titan.config import ScheduleLengths, schedule_lengths
from dmuon_titan.config.schema import LRScheduler

_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


def learning_rate_factor(step: int, lengths: ScheduleLengths, decay_type: str, min_factor: float) -> float:
    """What the peak learning rate is multiplied by at a step; steps count from 1.

    Warm-up is linear, never 0, and reaches 1 at its last step. Decay starts after the last stable step and reaches
    `min_factor` at the last step of the schedule; later steps keep what the last one has. Without warm-up step 1 has
    the peak, also where decay follows at once.

    Args:
        lengths: steps of warm-up, stable part and decay.
        decay_type: linear, cosine or sqrt, which is 1 - sqrt(progress) (arXiv 2405.18392, section 4).
        min_factor: in 0 .. 1.
    """
    if step < lengths.warmup:
        return step / lengths.warmup
    last_at_peak = max(1, lengths.warmup + lengths.stable)
    if step <= last_at_peak or lengths.decay == 0:
        return 1.0
    progress = min(1.0, (step - last_at_peak) / (lengths.total - last_at_peak))
    return min_factor + (1 - min_factor) * _DECAYS[decay_type](progress)


def build_schedule(options: LRScheduler, num_steps: int) -> Callable[[int], float]:
    """The factor of each step as `[lr_scheduler]` asks for it, in a run of `num_steps` steps."""
    lengths = schedule_lengths(options, num_steps)
    return lambda step: learning_rate_factor(step, lengths, options.decay_type, options.min_lr_factor)
