"""What every benchmark's JSON line carries besides its figures."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from typing import Any

import torch

from dmuon_titan.config.resolved import versions


def record(benchmark: str, **figures: Any) -> dict[str, Any]:
    """One result: commit, versions, machine and the command that made it, then the figures.

    Where the code is a copy without its history, the variable COMMIT says which commit it is.
    """
    cuda = torch.cuda.is_available()
    return {
        "benchmark": benchmark,
        "commit": os.environ.get("COMMIT") or versions()["commit"],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else f"cpu ({platform.machine()})",
        "num_devices": torch.cuda.device_count() if cuda else 0,
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        **figures,
    }
