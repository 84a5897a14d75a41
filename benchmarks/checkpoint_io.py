"""What saving and loading cost, through the job's own Checkpointer on two gloo ranks, for 200 MB of weights.

Stall: how long training waits for a synchronous save and for an asynchronous one, and what the latter takes from the
steps that are made meanwhile. Throughput: of a save, and of finding, verifying and loading a checkpoint, against one
process that writes and reads as many bytes with `torch.save` and `torch.load`, flushed (fsync), read back and
checksummed (CRC-32) the same way. Memory: the most that a rank had at once beyond what it had before, by the kernel's
own account (VmHWM).

All are measured in turns. A save is read back from the page cache; before a load, files are dropped from it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import dmuon
from benchmarks.record import record
from dmuon.parameter import local
from dmuon_titan.checkpoint import Checkpointer, TrainState, find_start
from dmuon_titan.checkpoint.manifest import read_manifest, store
from dmuon_titan.config.schema import JobConfig, build
from dmuon_titan.disk import sync
from dmuon_titan.mesh import build_mesh
from dmuon_titan.optimizer import build_optimizer
from dmuon_titan.parallelize import build_model
from models.llama.sizes import LlamaSize

# Most of the bytes are embeddings: on a CPU, Newton-Schulz of as many in matrices would make a step take minutes.
SIZE = LlamaSize(256, 20, 8, 4, 65536, None, 64, 10000.0)
CPU = torch.device("cpu")
SEQ_LEN = 16
SYNC, ASYNC = "disabled", "async"
MB = 1e6


@dataclass
class Job:
    """A model whose steps are made by hand. Every method is called by all ranks together."""

    savers: dict[str, Checkpointer]  # by `async_mode`
    folder: Path

    @property
    def saver(self) -> Checkpointer:
        return self.savers[SYNC]

    def step(self) -> float:
        """Seconds that a step took."""
        begin_s = time.perf_counter()
        job = self.saver
        generator = torch.Generator().manual_seed(job.state.step)
        tokens_BS = torch.randint(SIZE.vocab_size, (1, SEQ_LEN), generator=generator)
        job.model(tokens_BS).float().square().mean().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.state.step += 1
        dist.barrier()
        return time.perf_counter() - begin_s

    def save(self, mode: str) -> float:
        """Seconds until training may go on."""
        dist.barrier()
        begin_s = time.perf_counter()
        self.savers[mode].save()
        return slowest(time.perf_counter() - begin_s)

    def finish(self) -> None:
        """The save under way is complete, and older ones have gone."""
        for saver in self.savers.values():
            saver.finish()
            saver.proved()
        dist.barrier()

    def load(self) -> float:
        """Seconds from looking for a checkpoint until it is loaded."""
        self.drop_from_cache()
        begin_s = time.perf_counter()
        start = find_start(self.saver.options, self.saver.state.step + 1, self.saver.group)
        assert start is not None
        self.saver.load(start)
        return slowest(time.perf_counter() - begin_s)

    def drop_from_cache(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self.folder.rglob("*"):
                if path.is_file():
                    drop_from_cache(path)
        dist.barrier()


class OneProcess:
    """The same tensors, whole, in one process; on rank 0, while the others wait.

    Two files are kept, as of checkpoints: memory that a file has just left is quicker to fill than any other.
    """

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder, self.paths = folder / "one-process", [folder / "one-process" / f"{name}.pt" for name in "abc"]
        self.folder.mkdir(exist_ok=True)
        self.tensors: dict[str, Tensor] = {}
        if dist.get_rank() == 0:
            entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items()
            self.tensors = {
                name: torch.rand(entry.size).to(entry.properties.dtype)
                for name, entry in entries
                if isinstance(entry, TensorStorageMetadata)
            }

    def save(self) -> float:
        """Seconds to write, flush, and read back for the checksum."""
        return alone(self._save)

    def load(self) -> float:
        """Seconds to read for the checksum, and to load."""
        return alone(self._load)

    def _save(self) -> float:
        path = self.paths[-1]
        begin_s = time.perf_counter()
        with path.open("wb") as stream:
            torch.save(self.tensors, stream)
            stream.flush()
            os.fsync(stream.fileno())
        sync(self.folder)
        store(path)
        duration_s = time.perf_counter() - begin_s
        self.paths = [path, *self.paths[:-1]]
        self.paths[-1].unlink(missing_ok=True)
        return duration_s

    def _load(self) -> float:
        drop_from_cache(self.paths[0])
        begin_s = time.perf_counter()
        store(self.paths[0])
        torch.load(self.paths[0])
        return time.perf_counter() - begin_s


def main() -> None:
    """Print one JSON line; a table goes to standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured; default: for temporary files")
    parser.add_argument("--output", type=Path, help="file to which the JSON line is written too")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        mp.spawn(_measure, (arguments, Path(folder)), nprocs=arguments.ranks)
        figures = json.loads((Path(folder) / "figures.json").read_text())
    line = json.dumps(record("checkpoint_io", ranks=arguments.ranks, repeats=arguments.repeats, **figures))
    print(line)
    if arguments.output:
        arguments.output.write_text(line + "\n")
    sys.stderr.write(table(figures))


def _measure(rank: int, arguments: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.ranks)
    (folder / "checkpoint").mkdir(exist_ok=True)  # as a job does before it begins
    job = _job(folder / "checkpoint")
    for _ in range(2):
        job.step()
    memory = _memory(job)
    job.step()
    job.save(SYNC)
    job.finish()
    checkpoint = job.folder / f"step-{job.saver.state.step}"
    one_process = OneProcess(folder, checkpoint)
    num_bytes = read_manifest(checkpoint).num_bytes
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        for name, value in _one_round(job, one_process):
            seconds.setdefault(name, []).append(value)
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps({**_figures(seconds, num_bytes), "memory": memory}))
    dist.barrier()
    dist.destroy_process_group()


def _one_round(job: Job, one_process: OneProcess) -> Iterator[tuple[str, float]]:
    yield "step alone", job.step()
    yield "step alone", job.step()
    yield "synchronous save", job.save(SYNC)
    job.finish()
    yield "one process saves", one_process.save()
    job.step()
    begin_s = time.perf_counter()
    yield "asynchronous save", job.save(ASYNC)
    step = job.saver.state.step
    while not slowest((job.folder / f"step-{step}").exists()):
        yield "step beside a save", job.step()
    job.finish()
    yield "asynchronous save, complete", time.perf_counter() - begin_s
    yield "load", job.load()
    yield "one process loads", one_process.load()


def _figures(seconds: dict[str, list[float]], num_bytes: int) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    num_saves = len(seconds["asynchronous save"])
    slowed_s = sum(seconds["step beside a save"]) - len(seconds["step beside a save"]) * median["step alone"]
    rate = {name: num_bytes / MB / median[name] for name in ("synchronous save", "load")}
    alone = {"save": num_bytes / MB / median["one process saves"], "load": num_bytes / MB / median["one process loads"]}
    return {
        "weights_mb": round(SIZE.num_parameters() * 4 / MB),
        "checkpoint_mb": round(num_bytes / MB),
        "stall_ratio": round(median["asynchronous save"] / median["synchronous save"], 3),
        "steps_slowed_by_a_save_s": round(slowed_s / num_saves, 2),
        "save_mb_per_s": round(rate["synchronous save"]),
        "one_process_save_mb_per_s": round(alone["save"]),
        "save_ratio": round(rate["synchronous save"] / alone["save"], 2),
        "load_mb_per_s": round(rate["load"]),
        "one_process_load_mb_per_s": round(alone["load"]),
        "load_ratio": round(rate["load"] / alone["load"], 2),
        "seconds": {
            name: {"median": round(median[name], 3), "min": round(min(values), 3), "max": round(max(values), 3)}
            for name, values in seconds.items()
        },
    }


def _memory(job: Job) -> dict[str, Any]:
    """The most that a rank had at once beyond what it had before, of the rank that had the most."""
    tensors = [local(tensor) for tensor in _tensors(dmuon.get_state_dict(job.saver.model, job.saver.optimizer))]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    share, largest = sum(sizes), max(sizes)
    job.step()
    beyond = {"synchronous save": peak_bytes(lambda: job.save(SYNC))}
    job.finish()
    job.step()

    def save_beside() -> None:
        job.save(ASYNC)
        job.savers[ASYNC].finish()

    beyond["asynchronous save"] = peak_bytes(save_beside)
    job.finish()
    beyond["load"] = peak_bytes(job.load)
    return {
        "share_mb": round(slowest(share) / MB),
        "largest_tensor_mb": round(slowest(largest) / MB),
        "beyond_mb": {name: round(slowest(value) / MB) for name, value in beyond.items()},
        "of_share_and_tensor": {name: round(slowest(value / (share + largest)), 2) for name, value in beyond.items()},
    }


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, Tensor):
        yield tree


def _job(folder: Path) -> Job:
    def config(mode: str) -> JobConfig:
        values = {"training.mixed_precision_param": "float32", "activation_checkpoint.mode": "none"}
        options = {"checkpoint.folder": str(folder), "checkpoint.keep_latest_k": 2, "checkpoint.async_mode": mode}
        return build({"training.seq_len": SEQ_LEN, **values, **options})

    model, _ = build_model(config(SYNC), SIZE, build_mesh(CPU, (1, dist.get_world_size(), 1)))
    optimizer = build_optimizer(config(SYNC).optimizer, model)
    state = TrainState(0, SEQ_LEN, "none", "none", 1, num_ranks=dist.get_world_size(), num_threads=1)
    savers = {mode: Checkpointer(config(mode), SIZE, model, optimizer, state, CPU) for mode in (SYNC, ASYNC)}
    return Job(savers, folder)


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    largest = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def alone(action: Callable[[], float]) -> float:
    """What an action of rank 0 returns; the others wait."""
    dist.barrier()
    return slowest(action() if dist.get_rank() == 0 else 0.0)


def peak_bytes(action: Callable[[], object]) -> int:
    """The most memory that this process had during an action beyond what it had before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = _resident_bytes("VmRSS")
    action()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def drop_from_cache(path: Path) -> None:
    """Has a file that lies on the disk read from there next time."""
    with path.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def table(figures: dict[str, Any]) -> str:
    memory, seconds = figures["memory"], figures["seconds"]
    sync, beside = (seconds[f"{mode} save"]["median"] for mode in ("synchronous", "asynchronous"))
    rows = [
        ("training waits for a save", f"{sync:.2f} s", f"asynchronous {beside:.2f} s", figures["stall_ratio"]),
        *(
            (
                f"{what} of {figures['checkpoint_mb']} MB",
                f"{figures[f'{what}_mb_per_s']} MB/s",
                f"one process {figures[f'one_process_{what}_mb_per_s']} MB/s",
                figures[f"{what}_ratio"],
            )
            for what in ("save", "load")
        ),
        *(
            (
                f"memory of a {what}",
                f"{mb} MB",
                f"share {memory['share_mb']} + tensor {memory['largest_tensor_mb']} MB",
                memory["of_share_and_tensor"][what],
            )
            for what, mb in memory["beyond_mb"].items()
        ),
    ]
    return "".join(f"{what:<30}{value:>12}  {other:<34}{ratio:>7}\n" for what, value, other, ratio in rows)


if __name__ == "__main__":
    main()
