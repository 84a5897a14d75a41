"""What follows from a configuration and the number of ranks: mesh degrees, batches, schedule. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmuon_titan.config.schema import JobConfig, LRScheduler
from dmuon_titan.errors import ConfigError


def resolved_degrees(config: JobConfig, num_ranks: int) -> tuple[int, int, int]:
    """The mesh's (replicate, shard, tp) degrees, with a shard degree of -1 resolved to the rest.

    Raises:
        ConfigError: the degrees are not positive or don't multiply to the number of ranks.
    """
    options = config.parallelism
    replicate, shard, tp = (
        options.data_parallel_replicate_degree,
        options.data_parallel_shard_degree,
        options.tensor_parallel_degree,
    )
    if shard == -1 and replicate > 0 and tp > 0:
        # Where nothing is left, the product with one shard is what the message shows.
        shard = max(1, num_ranks // (replicate * tp))
    product = replicate * shard * tp
    if min(replicate, shard, tp) > 0 and product == num_ranks:
        return replicate, shard, tp
    raise ConfigError(
        f"parallelism: replicate x shard x tp = {product} but world size = {num_ranks}: "
        f"data_parallel_replicate_degree = {options.data_parallel_replicate_degree}, "
        f"data_parallel_shard_degree = {options.data_parallel_shard_degree}, "
        f"tensor_parallel_degree = {options.tensor_parallel_degree}; each must be at least 1 and their product the "
        "number of ranks; the shard degree alone may be -1, for the rest"
    )


def num_data_parallel_ranks(config: JobConfig, num_ranks: int) -> int:
    """How many ranks read different data. Raises ConfigError as `resolved_degrees`."""
    replicate, shard, _ = resolved_degrees(config, num_ranks)
    return replicate * shard


def global_batch_size(config: JobConfig, num_ranks: int) -> int:
    """Sequences in one step over all ranks, with -1 resolved to one micro-batch a rank."""
    if config.training.global_batch_size != -1:
        return config.training.global_batch_size
    return config.training.local_batch_size * num_data_parallel_ranks(config, num_ranks)


def num_microbatches(config: JobConfig, num_ranks: int) -> int:
    """Micro-batches whose gradients one step accumulates on each rank.

    Raises:
        ConfigError: the global batch is not a multiple of what all ranks take at once, or see `resolved_degrees`.
    """
    dp_world = num_data_parallel_ranks(config, num_ranks)
    local = config.training.local_batch_size
    at_once = local * dp_world
    batch = global_batch_size(config, num_ranks)
    if batch % at_once:
        below = batch // at_once * at_once
        nearest = " or ".join(str(legal) for legal in (below, below + at_once) if legal)
        raise ConfigError(
            f"training.global_batch_size = {batch}: not a multiple of training.local_batch_size x data-parallel "
            f"ranks = {local} x {dp_world} = {at_once}; nearest: {nearest}"
        )
    return batch // at_once


@dataclass(frozen=True)
class ScheduleLengths:
    """Steps of each part of the learning-rate schedule; they add up to `total`."""

    warmup: int
    stable: int
    decay: int

    @property
    def total(self) -> int:
        return self.warmup + self.stable + self.decay


def schedule_lengths(options: LRScheduler, num_steps: int) -> ScheduleLengths:
    """The schedule as it runs: a warm-up longer than the whole is cut to it, and a decay to what is left.

    Args:
        num_steps: steps of the training, which the schedule spans unless `total_steps` says otherwise.
    """
    total = options.total_steps or num_steps
    warmup = min(options.warmup_steps, total)
    decay = min(_asked_decay_steps(options, total), total - warmup)
    return ScheduleLengths(warmup, total - warmup - decay, decay)


def schedule_notes(options: LRScheduler, num_steps: int) -> list[str]:
    """How the schedule differs from what was asked for."""
    lengths = schedule_lengths(options, num_steps)
    notes = []
    if options.warmup_steps > lengths.warmup:
        notes.append(
            f"lr_scheduler.warmup_steps = {options.warmup_steps} exceeds the schedule of {lengths.total} steps: "
            f"warming up over {lengths.warmup}"
        )
    asked = _asked_decay_steps(options, lengths.total)
    if options.decay_ratio is not None and asked > lengths.decay:
        notes.append(
            f"lr_scheduler.decay_ratio = {options.decay_ratio:g} asks for {asked} steps of {lengths.total}, the "
            f"warm-up leaves {lengths.decay}: decaying over {lengths.decay}"
        )
    return notes


def _asked_decay_steps(options: LRScheduler, total: int) -> int:
    return total if options.decay_ratio is None else round(total * options.decay_ratio)
