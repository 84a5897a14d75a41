"""A run that moves from mesh to mesh is one run: what it was is what it is, and no sample is lost or seen twice.

Each leg is what a job is: it finds the newest checkpoint, loads it, trains and saves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dmuon
from dmuon_titan.checkpoint import checkpoint_group, find_start
from dmuon_titan.config.schema import JobConfig, build
from dmuon_titan.console import StatusLine
from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.job import new_train_state
from dmuon_titan.mesh import build_mesh
from dmuon_titan.phases import Phases
from dmuon_titan.run_folder import make_folders
from dmuon_titan.signals import StopWatcher
from dmuon_titan.trainer import Trainer
from models.llama.sizes import LlamaSize
from tests.debruijn import write_debruijn
from tests.distributed.pool import CALL_TIMEOUT_S, RankPool
from tests.distributed.test_reference_equality import whole

SIZE = LlamaSize(64, 2, 4, 2, 256, None, 16, 10000.0)
SEQ_LEN, GLOBAL_BATCH, STEPS_A_LEG = 32, 8, 2
Degrees = tuple[int, int, int]
WALK: list[Degrees] = [(2, 2, 1), (1, 4, 1), (4, 1, 1), (1, 2, 2), (1, 1, 2), (1, 1, 1), (2, 2, 1)]


def configured(folder: Path, degrees: Degrees, num_steps: int, optimizer: str) -> JobConfig:
    replicate, shard, tp = degrees
    return build(
        {
            "job.dump_folder": str(folder),
            "checkpoint.enable": True,
            "checkpoint.folder": str(folder / "checkpoint"),
            "comm.train_timeout_seconds": CALL_TIMEOUT_S,
            "debug.deterministic": True,
            "debug.trace_batches": True,
            "lr_scheduler.total_steps": 100,
            "lr_scheduler.warmup_steps": 3,
            "metrics.log_freq": 1,
            "optimizer.name": optimizer,
            "optimizer.lr": 3e-3,
            "optimizer.eps": 1e-5,  # so that gradients that are all rounding make no whole steps
            "parallelism.data_parallel_replicate_degree": replicate,
            "parallelism.data_parallel_shard_degree": shard,
            "parallelism.tensor_parallel_degree": tp,
            "training.global_batch_size": GLOBAL_BATCH,
            "training.local_batch_size": 2,
            "training.mixed_precision_param": "float32",
            "training.seq_len": SEQ_LEN,
            "training.steps": num_steps,
            "activation_checkpoint.mode": "none",
        }
    )


def leg(folder: Path, corpus: Path, degrees: Degrees, num_steps: int, optimizer: str) -> None:
    """Goes on to `num_steps`."""
    config = configured(folder, degrees, num_steps, optimizer)
    make_folders(config)
    mesh = build_mesh(torch.device("cpu"), degrees)
    dataset = TokenDataset(corpus, SEQ_LEN)
    watcher = StopWatcher(lambda status, reason: None)
    watcher.close()
    trainer = Trainer(config, mesh, SIZE, new_train_state(config, dataset), watcher)
    assert trainer.checkpointer is not None
    start = find_start(config.checkpoint, num_steps, checkpoint_group())
    if start is not None:
        trainer.checkpointer.load(start)
        check_equal_bits(trainer, start.path)
    trainer.start(dataset, None, StatusLine())
    trainer.train(Phases("test"))


def check_equal_bits(trainer: Trainer, checkpoint: Path) -> None:
    """What this rank holds is, put together with the others' parts, what plain torch reads in the files."""
    state = dmuon.get_state_dict(trainer.model, trainer.optimizer)
    held = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, slots in state["optimizer"]["state"].items():
        held |= {f"optimizer.state.{name}.{slot}": tensor for slot, tensor in slots.items()}
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    expected: dict[str, Any] = {
        name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in held
    }
    dcp.load(expected, checkpoint_id=checkpoint, no_dist=True)
    for name, tensor in held.items():
        assert torch.equal(whole(tensor), expected[name]), name
        assert expected[name].norm() > 0, name


def figures(folder: Path) -> dict[int, tuple[float, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: (record["loss_metrics/global_avg_loss"], record["grad_norm"]) for record in records}


def consumed(folder: Path) -> dict[int, list[int]]:
    """The samples of each step; tensor-parallel ranks have the same, which counts once."""
    samples: dict[int, list[int]] = {}
    for path in folder.glob("trace/*.jsonl"):
        for batch in map(json.loads, path.read_text().splitlines()):
            if batch["tp_rank"] == 0:
                samples.setdefault(batch["step"], []).extend(batch["sample_ids"])
    return {step: sorted(ids) for step, ids in samples.items()}


@pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])
def test_b01_a_walk_over_meshes_is_one_run(optimizer: str, tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    """Bit for bit where four data-parallel ranks sum by one tree, and to 1e-5 elsewhere."""
    corpus = write_debruijn(tmp_path / "corpus", num_tokens=40 * SEQ_LEN + 1)
    num_steps = STEPS_A_LEG * len(WALK)
    ranks(4).run(leg, tmp_path / "unbroken", corpus, WALK[0], num_steps, optimizer)
    for number, degrees in enumerate(WALK, start=1):
        world = degrees[0] * degrees[1] * degrees[2]
        ranks(world).run(leg, tmp_path / "walk", corpus, degrees, number * STEPS_A_LEG, optimizer)
    unbroken, walk = figures(tmp_path / "unbroken"), figures(tmp_path / "walk")
    assert sorted(unbroken) == sorted(walk) == list(range(1, num_steps + 1))
    exact = 3 * STEPS_A_LEG
    assert [walk[step] for step in range(1, exact + 1)] == [unbroken[step] for step in range(1, exact + 1)]
    for step, (loss, _) in unbroken.items():
        assert walk[step][0] == pytest.approx(loss, abs=1e-5), step
    assert unbroken[1][0] - unbroken[num_steps][0] > 0.1
    # Samples are counted over epochs: 40 windows make nearly three of them.
    assert consumed(tmp_path / "walk") == consumed(tmp_path / "unbroken")
    seen = [sample for _, ids in sorted(consumed(tmp_path / "walk").items()) for sample in ids]
    assert seen == list(range(num_steps * GLOBAL_BATCH))
