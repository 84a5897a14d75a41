"""Jobs that run: from anywhere, on any number of ranks, each line once, every value as asked for."""

from __future__ import annotations

import array
import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
import tomli

from tests.blackbox.conftest import FinishedRun, StartJob, losses
from tests.blackbox.job import REPOSITORY


def test_b19_starts_from_any_folder_and_keeps_to_its_paths(finished_run: FinishedRun, corpus: Path) -> None:
    """Outputs lie in the working directory, data beside the configuration; the absolute paths are logged."""
    assert finished_run.ended.status == 0, finished_run.ended.stderr
    assert (finished_run.folder / "metrics.jsonl").is_file()
    assert str(finished_run.folder) in finished_run.ended.stdout
    assert str(finished_run.config.parent / "data") in finished_run.ended.stdout


def test_b15_resolved_configuration_is_what_ran(finished_run: FinishedRun) -> None:
    resolved = tomli.loads((finished_run.folder / "config.toml").read_text())
    assert resolved["training"]["steps"] == 6
    assert resolved["training"]["global_batch_size"] == 8
    assert resolved["job"]["dump_folder"] == str(finished_run.folder)
    assert sorted(losses(finished_run.folder)) == [1, 2, 3, 4, 5, 6]


def test_b27_each_line_appears_once(finished_run: FinishedRun) -> None:
    lines = finished_run.ended.stdout.splitlines()
    assert len(lines) == len(set(lines))
    steps = [line for line in lines if "loss:" in line]
    assert len(steps) == 6, finished_run.ended.stdout
    assert finished_run.ended.stderr == ""


@pytest.mark.parametrize(("num_ranks", "degrees"), [(1, (1, 1)), (2, (2, 1))], ids=["b28-one-rank", "b28-replicated"])
def test_b28_ranks_and_meshes_agree(
    num_ranks: int, degrees: tuple[int, int], finished_run: FinishedRun, small_config: Path, start: StartJob
) -> None:
    """Loss and gradient norm of the same global batch, against 2 ranks that shard. NGPU and CONFIG_FILE do it too."""
    replicate, shard = degrees
    ended = start(
        f"--parallelism.data_parallel_replicate_degree={replicate}",
        f"--parallelism.data_parallel_shard_degree={shard}",
        cwd=small_config.parent,
        NGPU=str(num_ranks),
        CONFIG_FILE="small.toml",
    ).end()
    assert ended.status == 0, ended.stderr
    found, wanted = losses(small_config.parent / "run"), losses(finished_run.folder)
    assert found.keys() == wanted.keys()
    for step, figures in found.items():
        assert figures == pytest.approx(wanted[step], rel=1e-5), f"step {step}"
    assert wanted[6][0] < wanted[1][0]


def test_a_kernel_that_cannot_run_here_is_reported_once(small_config: Path, start: StartJob) -> None:
    """Not once a rank, nor once a step: plain torch runs instead, whether a rank owns matrices or not."""
    flags = ("--optimizer.ns_kernel=triton", "--training.steps=2", "--training.local_batch_size=2")
    ended = start("--config", str(small_config), *flags, cwd=small_config.parent, NGPU="4").end()
    assert ended.status == 0, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("[titan]")
    assert line.endswith("ns_kernel = 'triton': Newton-Schulz runs in plain torch, for there is no GPU")
    assert "ns_kernel" not in ended.stdout


def test_torchrun_starts_the_same_program(finished_run: FinishedRun, small_config: Path, start: StartJob) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    arguments = ("-m", "dmuon_titan.train", "--config", str(small_config))
    job = start(*arguments, "--job.dump_folder", str(small_config.parent / "run"), cwd=REPOSITORY, command=torchrun)
    ended = job.end()
    assert ended.status == 0, ended.stderr
    assert losses(small_config.parent / "run") == losses(finished_run.folder)


SAVING = ("--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2")


@pytest.mark.parametrize(
    "flags",
    [(), ("--training.dataloader.num_workers=2",), SAVING, (*SAVING, "--checkpoint.async_mode=async")],
    ids=["alone", "readers", "saves", "a save under way"],
)
def test_b26_data_that_one_rank_cannot_read_end_the_job(
    flags: tuple[str, ...], finished_run: FinishedRun, corpus: Path, small_config: Path, start: StartJob
) -> None:
    """Only rank 1 reads the broken window, at step 3: its message comes once, and the status says data.

    Nothing of the job lives on, so that with sound data the same command works at once.
    """
    folder = small_config.parent / "broken"
    shutil.copytree(corpus, folder)
    break_window(folder / "tokens-00000.bin", read_by(finished_run, rank=1, step=3))
    ended = start("--config", str(small_config), "--training.dataset_path", str(folder), *flags).end(timeout_s=60)
    assert ended.status == 3, ended.stderr
    (error,) = [line for line in ended.stderr.splitlines() if "error:" in line]
    assert error.startswith("[rank 1] error: ")
    assert str(folder) in error
    assert "Traceback" not in ended.stderr
    assert sorted(losses(small_config.parent / "run")) == [1, 2]
    if flags:
        again = start("--config", str(small_config), *flags).end()
        assert again.status == 0, again.stderr
        assert losses(small_config.parent / "run") == losses(finished_run.folder)


def read_by(run: FinishedRun, *, rank: int, step: int) -> list[int]:
    """The first ids of a window that a rank read."""
    records = [json.loads(line) for line in (run.folder / "trace" / f"rank-{rank}.jsonl").read_text().splitlines()]
    ids: list[int] = next(record["first8"][0] for record in records if record["step"] == step)
    return ids


def break_window(shard: Path, begin: list[int]) -> None:
    """Puts an id outside of the vocabulary into the window of 64 tokens that begins like this."""
    tokens = array.array("H", shard.read_bytes())
    (first,) = [at for at in range(0, len(tokens), 64) if tokens[at : at + 8].tolist() == begin]
    tokens[first + 9] = 65535
    shard.write_bytes(tokens.tobytes())


def test_two_nodes_train_as_one(finished_run: FinishedRun, small_config: Path, start: StartJob) -> None:
    """Two launchers with one rank each, as on two machines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [
        start(
            *("--config", str(small_config), "--job.dump_folder", str(small_config.parent / "run")),
            NPROC_PER_NODE="1",
            NNODES="2",
            NODE_RANK=str(node),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        for node in range(2)
    ]
    first, second = [node.end() for node in nodes]
    assert (first.status, second.status) == (0, 0), first.stderr + second.stderr
    assert losses(small_config.parent / "run") == losses(finished_run.folder)
    assert second.stdout == ""
