"""Runs that several tests look at: each is made once, when it is first asked for. And their checkpoints, edited."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dmuon_titan.checkpoint.manifest import read_manifest, store
from models.llama.sizes import LlamaSize
from tests.blackbox.conftest import losses
from tests.blackbox.job import REPOSITORY, RUN_TRAIN, Ended, Job
from tests.debruijn import debruijn_tokens, write_tokens

_TIMEOUT_S = 240


@dataclass(frozen=True)
class Run:
    """A job that has ended, and its folder."""

    ended: Ended
    folder: Path

    @property
    def steps(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm of each step."""
        return losses(self.folder)

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoint" / f"step-{step}"

    def published(self) -> list[str]:
        """Names of the checkpoints that count."""
        return sorted(path.name for path in self.folder.glob("checkpoint/step-*") if not path.suffix)


class Runs:
    """Makes runs by one configuration on the de Bruijn corpus, in a folder of their own."""

    def __init__(self, folder: Path, config: str, program: Path = RUN_TRAIN, validation_tokens: int = 0) -> None:
        """config: TOML whose data are `data`. program: run_train.sh of this repository, or of a copy."""
        self.folder, self._program = folder, program
        self._made: dict[str, Run] = {}
        write_tokens(folder / "data", debruijn_tokens(), vocab_size=256, validation_tokens=validation_tokens)
        (folder / "job.toml").write_text(config)

    def run(self, name: str, mesh: tuple[int, ...], *flags: str, status: int = 0) -> Run:
        """A job on a (replicate, shard) or (replicate, shard, tp) mesh, which must end with this status.

        Asked for again, it is the same run.
        """
        if name not in self._made:
            job = Job(
                [
                    *("--config", str(self.folder / "job.toml"), "--job.dump_folder", str(self.folder / name)),
                    *("--parallelism.data_parallel_replicate_degree", str(mesh[0])),
                    *("--parallelism.data_parallel_shard_degree", str(mesh[1])),
                    *("--parallelism.tensor_parallel_degree", str(mesh[2] if len(mesh) > 2 else 1), *flags),
                ],
                logs=self.folder,
                cwd=self.folder,
                environ={"NPROC_PER_NODE": str(math.prod(mesh)), "CUDA_VISIBLE_DEVICES": ""},
                command=(str(self._program),),
            )
            try:
                self._made[name] = Run(job.end(timeout_s=_TIMEOUT_S), self.folder / name)
            except subprocess.TimeoutExpired:
                pytest.fail(f"{name} was not over after {_TIMEOUT_S} s:\n{job.output()}")
        run = self._made[name]
        assert run.ended.status == status, run.ended.stdout + run.ended.stderr
        return run

    def again(self, name: str, mesh: tuple[int, ...], *flags: str, status: int = 0) -> Run:
        """One more job in the folder of an earlier run."""
        self._made.pop(name, None)
        return self.run(name, mesh, *flags, status=status)

    def copied(self, source: Run, name: str, *steps: int) -> None:
        """Puts checkpoints of a run into the folder of one that is still to be made."""
        for step in steps:
            shutil.copytree(source.checkpoint(step), self.folder / name / "checkpoint" / f"step-{step}")


def copy_with_sizes(folder: Path, sizes: dict[str, LlamaSize]) -> Path:
    """run_train.sh of a copy of this repository whose table of sizes has these as well."""
    for name in ("dmuon", "dmuon_titan", "models", "train_configs"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "run_train.sh", folder)
    with (folder / "models" / "llama" / "sizes.py").open("a") as table:
        table.write(f'\nFLAVORS["llama3"] |= {sizes!r}\n')
    return folder / "run_train.sh"


def edit(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes values of a checkpoint in place, by plain torch.distributed.checkpoint in one process.

    change: is given the nested state, and assigns into its tensors.
    """
    manifest = read_manifest(checkpoint)
    file = checkpoint.with_name(checkpoint.name + ".pt")
    dcp_to_torch_save(checkpoint, file)
    state = torch.load(file, weights_only=False)
    change(state)
    shutil.rmtree(checkpoint)
    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)
    replace(manifest, files={path.name: store(path) for path in checkpoint.iterdir()}).write(checkpoint)
    file.unlink()
