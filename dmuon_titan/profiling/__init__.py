"""Traces of training steps and what they say, and snapshots of GPU memory."""

from dmuon_titan.profiling.profiler import Profiler, settle

__all__ = ["Profiler", "settle"]
