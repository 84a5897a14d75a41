"""What the launcher tells a worker through environment variables. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WorkerEnvironment:
    """One worker's place in the job, as torchrun sets it; a process started without torchrun is a job of one rank.

    status_dir: folder in which the worker leaves its exit status for the launcher, which torchrun would flatten to 1.
    started_s: when the launcher was started, as `time.time()` counts; None without it.
    """

    rank: int
    local_rank: int
    num_ranks: int
    node: int
    status_dir: Path | None
    started_s: float | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> WorkerEnvironment:
        status_dir = environ.get("DMUON_TITAN_STATUS_DIR")
        started_s = environ.get("DMUON_TITAN_STARTED_S")
        return cls(
            rank=int(environ.get("RANK", 0)),
            local_rank=int(environ.get("LOCAL_RANK", environ.get("RANK", 0))),
            num_ranks=int(environ.get("WORLD_SIZE", 1)),
            node=int(environ.get("GROUP_RANK", 0)),
            status_dir=Path(status_dir) if status_dir else None,
            started_s=float(started_s) if started_s else None,
        )

    def leave_status(self, status: int) -> None:
        """Writes the status that this worker ends with where the launcher looks for it."""
        if self.status_dir is not None:
            self.status_dir.mkdir(parents=True, exist_ok=True)
            (self.status_dir / f"rank-{self.rank}").write_text(f"{int(status)}\n")


def nccl_settings(environ: Mapping[str, str] = os.environ) -> str:
    """The NCCL_* variables, which can change the order of sums, as "NAME=value NAME=value"."""
    return " ".join(f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith("NCCL_"))
