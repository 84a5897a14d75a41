"""Checkpoints: written aside, published complete or not at all, found, verified, loaded and retained.

Written by torch.distributed.checkpoint, as logical tensors that any mesh can read (keys.py), with a manifest that says
what belongs to them (manifest.py). A folder counts only once it has its final name and its manifest (folder.py).
"""

from dmuon_titan.checkpoint.checkpointer import Checkpointer, checkpoint_group
from dmuon_titan.checkpoint.finding import Start, find_newest, find_start
from dmuon_titan.checkpoint.state import TrainState

__all__ = ["Checkpointer", "Start", "TrainState", "checkpoint_group", "find_newest", "find_start"]
