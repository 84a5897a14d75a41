"""What the harness adds to a step: its whole step against a hand-written loop with the same model and optimizer.

Both run in turns in one process (or in each process under torchrun), so that whatever slows the machine slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import dmuon
from benchmarks.record import record
from dmuon_titan.config import load_config, resolved_degrees
from dmuon_titan.console import StatusLine
from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.environment import WorkerEnvironment
from dmuon_titan.job import embedded_corpus, new_train_state
from dmuon_titan.mesh import build_mesh, init_process_group, local_device, rendezvous_store
from dmuon_titan.signals import StopWatcher
from dmuon_titan.trainer import Trainer
from models.llama.sizes import FLAVORS


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(overrides, Path(folder))
        sides: dict[str, Callable[[], None]] = {"harness": trainer.step, "hand_written": _hand_written(trainer)}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(arguments.rounds + 1):
            for name in sorted(sides, reverse=turn % 2 == 1):
                seconds[name].append(_time(sides[name], arguments.steps, trainer.mesh.device))
        trainer.metrics.close()  # its writer has a thread, and the folder is about to go
    ratios = [ours / theirs for ours, theirs in zip(seconds["harness"][1:], seconds["hand_written"][1:], strict=True)]
    figures = {f"{name}_s": round(statistics.median(times[1:]), 5) for name, times in seconds.items()}
    low, median, high = statistics.quantiles(ratios, n=4)
    ratio = {"median": round(median, 4), "quartiles": [round(low, 4), round(high, 4)]}
    if dist.get_rank() == 0:
        print(json.dumps(record("harness_overhead", num_ranks=dist.get_world_size(), **figures, ratio=ratio)))
    dist.barrier()
    dist.destroy_process_group()


def _trainer(overrides: list[str], folder: Path) -> Trainer:
    """A trainer as a job would build it; overrides are the job's own flags."""
    config = load_config([*overrides, "--job.dump_folder", str(folder)]).config
    config = replace(config, checkpoint=replace(config.checkpoint, enable=False))
    environment = WorkerEnvironment.read()
    device = local_device(environment)
    store = rendezvous_store(environment, config.comm.init_timeout_seconds)
    dataset_folder = config.training.dataset_path or embedded_corpus(config, environment, store)
    assert dataset_folder is not None
    init_process_group(config.comm, str(folder), environment, store, device)
    dataset = TokenDataset(Path(dataset_folder), config.training.seq_len)
    mesh = build_mesh(device, resolved_degrees(config, environment.num_ranks))
    watcher = StopWatcher(lambda status, reason: None)
    size = FLAVORS[config.model.name][config.model.flavor]
    trainer = Trainer(config, mesh, size, new_train_state(config, dataset), watcher)
    trainer.start(dataset, None, StatusLine())
    return trainer


def _hand_written(trainer: Trainer) -> Callable[[], None]:
    """The loop that a person writes for one kind of batch: no valid-token count, no check, no metrics, no signals."""
    model, optimizer, device = trainer.model, trainer.optimizer, trainer.mesh.device
    factor = 1 / trainer.num_micro_batches

    def step() -> None:
        for batch in trainer.batches.next(0):
            logits_BSV = model(batch.input_BS.to(device))
            loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), batch.label_BS.to(device).flatten())
            (loss * factor).backward()
        dmuon.clip_grad_norm_(model, trainer.config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _time(step: Callable[[], None], num_steps: int, device: torch.device) -> float:
    """Seconds of a step."""
    _synchronize(device)
    begin_s = time.perf_counter()
    for _ in range(num_steps):
        step()
    _synchronize(device)
    return (time.perf_counter() - begin_s) / num_steps


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
