"""Configuration: TOML file and command line in, one checked `JobConfig` out. Imports no torch."""

from dmuon_titan.config.derived import (
    ScheduleLengths,
    global_batch_size,
    num_data_parallel_ranks,
    num_microbatches,
    resolved_degrees,
    schedule_lengths,
)
from dmuon_titan.config.help import help_text
from dmuon_titan.config.loading import LoadedConfig, load_config, wants_help
from dmuon_titan.config.resolved import flat, versions, write_resolved
from dmuon_titan.config.schema import JobConfig
from dmuon_titan.config.validation import World, notes, validate

__all__ = [
    "JobConfig",
    "LoadedConfig",
    "ScheduleLengths",
    "World",
    "flat",
    "global_batch_size",
    "help_text",
    "load_config",
    "notes",
    "num_data_parallel_ranks",
    "num_microbatches",
    "resolved_degrees",
    "schedule_lengths",
    "validate",
    "versions",
    "wants_help",
    "write_resolved",
]
