"""Random state: seeded at the start, saved and restored with checkpoints; and what makes runs equal bit for bit."""

from __future__ import annotations

import os
import random

import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seeds the generators of torch (all devices) and Python; weights and data order have generators of their own."""
    random.seed(seed)
    torch.manual_seed(seed)


def use_deterministic_algorithms() -> None:
    """Makes equal commands give equal bits on CUDA; call it before the first CUDA operation."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def random_state(device: torch.device) -> dict[str, Tensor]:
    """This rank's random state as tensors of fixed shapes, for a checkpoint."""
    version, integers, gauss = random.getstate()
    assert version == 3, "the layout of Python's random state changed"
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(integers, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Puts back what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    has_gauss, gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss if has_gauss else None))
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
