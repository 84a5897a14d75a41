"""debug.deterministic: the same bits on every data-parallel mesh of equally many ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.blackbox.conftest import StartJob, losses
from tests.blackbox.test_train_resume import tensors_of

Train = Callable[..., dict[int, tuple[float, float]]]


@pytest.fixture
def train(small_config: Path, start: StartJob) -> Train:
    """`train("run", (2, 2), "AdamW")`: losses and norms of a run of 6 steps on 4 ranks, in a folder of that name."""

    def run(
        name: str, mesh: tuple[int, int], optimizer: str, *options: str, deterministic: bool = True
    ) -> dict[int, tuple[float, float]]:
        folder = small_config.parent / name
        ended = start(
            *("--config", str(small_config), "--job.dump_folder", str(folder), "--optimizer.name", optimizer),
            *("--parallelism.data_parallel_replicate_degree", str(mesh[0])),
            *("--parallelism.data_parallel_shard_degree", str(mesh[1])),
            *("--debug.deterministic", str(deterministic).lower(), *options),
            NPROC_PER_NODE="4",
        ).end()
        assert ended.status == 0, ended.stderr
        return losses(folder)

    return run


def test_meshes_of_four_ranks_give_the_same_bits(train: Train) -> None:
    expected = train("shard", (1, 4), "Muon")
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    assert len({loss for loss, _ in expected.values()}) == 6
    assert train("both", (2, 2), "Muon") == expected
    assert train("replicate", (4, 1), "Muon") == expected
    # The control: sums of four parts in an order of the back-end's own.
    assert train("native", (1, 4), "Muon", deterministic=False) != expected


def test_a_checkpoint_of_one_mesh_continues_on_another_with_the_same_bits(train: Train, small_config: Path) -> None:
    checkpoints = ("--checkpoint.enable", "true", "--checkpoint.interval", "3")
    expected = train("replicate", (4, 1), "AdamW", *checkpoints)
    saved = small_config.parent / "replicate" / "checkpoint" / "step-3"
    weights = tensors_of(saved.with_name("step-6"))
    for mesh, deterministic in (((2, 2), True), ((1, 4), False)):
        name = f"{mesh}-{deterministic}"
        shutil.copytree(saved, small_config.parent / name / "checkpoint" / "step-3")
        continued = train(name, mesh, "AdamW", *checkpoints, deterministic=deterministic)
        assert sorted(continued) == [4, 5, 6]
        continued_weights = tensors_of(small_config.parent / name / "checkpoint" / "step-6")
        assert continued_weights.keys() == weights.keys()
        assert all(torch.equal(continued_weights[key], weights[key]) for key in weights) == deterministic
        if deterministic:
            assert continued == {step: expected[step] for step in continued}
