"""A checkpoint is complete, sound and of this run, or it doesn't count; and all ranks think so together."""

from __future__ import annotations

import contextlib
import logging
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dmuon
from dmuon_titan.checkpoint import Checkpointer, TrainState, failed_ranks, find_checkpoint
from dmuon_titan.config.schema import Checkpoint, Optimizer, build
from dmuon_titan.console import logger
from dmuon_titan.errors import CheckpointError, NonFiniteError
from dmuon_titan.mesh import build_mesh
from dmuon_titan.optimizer import build_optimizer
from dmuon_titan.parallelize import build_model
from dmuon_titan.seeding import random_state
from models.llama.sizes import LlamaSize
from tests.distributed.pool import RankPool

SMALL = LlamaSize(64, 2, 4, 2, 256, None, 16, 10000.0)
CPU = torch.device("cpu")


def options(folder: Path, keep_latest_k: int = 0, load_step: int = -1) -> Checkpoint:
    return Checkpoint(enable=True, folder=str(folder), keep_latest_k=keep_latest_k, load_step=load_step)


def checkpointer(folder: Path, *, size: LlamaSize = SMALL, keep_latest_k: int = 0, **state: Any) -> Checkpointer:
    config = build(
        {
            "training.seq_len": 32,
            "training.mixed_precision_param": "float32",
            "activation_checkpoint.mode": "none",
            "optimizer.name": "Muon" if state.pop("muon", True) else "AdamW",
        }
    )
    model, _ = build_model(config, size, build_mesh(CPU, (1, dist.get_world_size(), 1)))
    optimizer = build_optimizer(Optimizer(name=config.optimizer.name), model)
    known = {"seed": 0, "seq_len": 32, "data": "d", "tokenizer": "t", "global_batch_size": 8, "num_threads": 1}
    train_state = TrainState(**{**known, "num_ranks": dist.get_world_size(), **state})
    return Checkpointer(options(folder, keep_latest_k), model, optimizer, train_state, CPU)


def make_step(saver: Checkpointer) -> None:
    generator = torch.Generator().manual_seed(saver.train_state.step)
    tokens = torch.randint(SMALL.vocab_size, (1, 32), generator=generator)
    saver.model(tokens).float().square().mean().backward()
    saver.optimizer.step()
    saver.optimizer.zero_grad()
    saver.train_state.step += 1


def save(saver: Checkpointer) -> None:
    saver.write()
    saver.publish()


def refusal_of(action: Callable[[], object], error_type: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error_type) as error:
        action()
    return str(error.value)


def save_and_load(folder: Path, muon: bool) -> None:
    saver = checkpointer(folder, muon=muon)
    make_step(saver)
    save(saver)
    loader = checkpointer(folder, muon=muon)
    before = held(loader)
    found = find_checkpoint(loader_options := options(folder))
    assert found == Path(loader_options.folder) / "step-1"
    loader.load(found)
    assert loader.train_state.step == 1
    after, expected = held(loader), held(saver)
    assert after.keys() == expected.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in after)
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name


def held(saver: Checkpointer) -> dict[str, torch.Tensor]:
    """A copy of every tensor that this rank holds."""
    state = dmuon.get_state_dict(saver.model, saver.optimizer)
    found = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, slots in state["optimizer"]["state"].items():
        found |= {f"{name}.{slot}": tensor for slot, tensor in slots.items()}
    return {name: (t.to_local() if hasattr(t, "to_local") else t).clone() for name, t in found.items()}


@pytest.mark.parametrize("muon", [True, False], ids=["muon", "adamw"])
def test_b04_all_state_comes_back(muon: bool, tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(save_and_load, tmp_path, muon)


def keep_two(folder: Path) -> list[str]:
    saver = checkpointer(folder, keep_latest_k=2)
    for step in (1, 2, 10, 11):
        saver.train_state.step = step
        saver.write()
        if dist.get_rank() == 0:  # who publishes
            assert (folder / f"step-{step}.tmp").is_dir()
            assert not (folder / f"step-{step}").exists()
        saver.publish()
    return sorted(path.name for path in folder.iterdir())


def test_only_the_newest_are_kept_and_none_counts_before_it_is_published(
    tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    assert ranks(2).run(keep_two, tmp_path)[0] == ["step-10", "step-11"]


def save_twice(folder: Path) -> None:
    saver = checkpointer(folder)
    saver.train_state.step = 4
    save(saver)


def test_b05_files_of_an_earlier_run_never_mix_with_a_new_save(
    tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    ranks(2).run(save_twice, tmp_path)
    assert len(list((tmp_path / "step-4").glob("*.distcp"))) == 2
    ranks(1).run(save_twice, tmp_path)
    assert len(list((tmp_path / "step-4").glob("*.distcp"))) == 1
    assert (tmp_path / "step-4.replaced" / ".metadata").is_file()


@contextlib.contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_with_a_full_disk_on_rank_1(folder: Path) -> str:
    saver = checkpointer(folder)
    save(saver)
    saver.train_state.step = 5
    limit = files_at_most(64 << 10) if dist.get_rank() == 1 else contextlib.nullcontext()
    with limit:
        message = refusal_of(saver.write)
    found = find_checkpoint(options(folder))
    assert found is not None
    assert found.name == "step-0"
    return message


def test_b08_a_rank_that_cannot_write_fails_the_save_on_all(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(save_with_a_full_disk_on_rank_1, tmp_path):
        assert "step 5" in message
        assert "rank 1" in message
        assert str(tmp_path) in message


def save_not_finite(folder: Path) -> str:
    saver = checkpointer(folder)
    if dist.get_rank() == 1:
        state = next(iter(saver.optimizer.state.values()))
        next(iter(state.values())).view(-1)[0] = torch.inf
    return refusal_of(saver.write, NonFiniteError)


def test_b21_what_is_not_finite_is_not_saved(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(save_not_finite, tmp_path):
        assert "step 0" in message
    assert not list(tmp_path.iterdir())


WIDE = LlamaSize(128, 2, 4, 2, 256, None, 16, 10000.0)


def load_another(folder: Path, change: dict[str, Any]) -> str:
    if not folder.exists():
        save(checkpointer(folder))
    dist.barrier()
    return refusal_of(lambda: checkpointer(folder, **change).load(folder / "step-0"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": WIDE}, ("tok_embeddings.weight", "[256, 128]", "[256, 64]")),
        ({"seed": 1}, ("debug.seed", "0", "1")),
        ({"tokenizer": "u"}, ("tokenizer", " t,", " u")),
        ({"data": "e"}, ("training data", " d,", " e")),
        ({"muon": False}, ("optimizer.name = Muon", "this run has AdamW")),
    ],
    ids=["model", "seed", "tokenizer", "data", "optimizer"],
)
def test_what_belongs_to_another_run_is_refused_with_both_sides(
    change: dict[str, Any], said: tuple[str, ...], tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    for message in ranks(2).run(load_another, tmp_path / "saved", change):
        assert all(part in message for part in said), message


def load_adamw_with_muon(folder: Path) -> str:
    save(checkpointer(folder, muon=False))
    return refusal_of(lambda: checkpointer(folder).load(folder / "step-0"))


def test_a_checkpoint_of_adamw_is_refused_for_muon(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(load_adamw_with_muon, tmp_path)
    assert "made with optimizer.name = AdamW, this run has Muon" in first
    assert first == second


def warnings_of(folder: Path, change: dict[str, Any]) -> list[str]:
    """What this rank says about a checkpoint of 1 rank and a global batch of 8."""
    loader = checkpointer(folder, **change)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        loader.load(folder / "step-4")
    finally:
        logger.removeHandler(handler)
    assert loader.train_state.step == 4
    return records


def test_other_ranks_and_another_global_batch_are_said_once(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    ranks(1).run(save_twice, tmp_path)
    assert ranks(1).run(warnings_of, tmp_path, {}) == [[]]
    first, second = ranks(2).run(warnings_of, tmp_path, {"global_batch_size": 16})
    assert second == []
    batch, num_ranks = first
    assert "saved with a global batch of 8 sequences, this run has 16" in batch
    assert "saved with 1 ranks, this run has 2" in num_ranks
    ((degree,),) = ranks(1).run(warnings_of, tmp_path, {"tp_degree": 2})
    assert "saved with 1 tensor-parallel ranks, this run has 2" in degree


def save_like_an_early_version(folder: Path, left_out: str) -> None:
    """Saves without one name of the train state."""
    saver = checkpointer(folder)
    state = dmuon.get_state_dict(saver.model, saver.optimizer)
    state["train_state"] = asdict(saver.train_state) | {"step": 4}
    del state["train_state"][left_out]
    state["random_state_rank_0"] = random_state(CPU)
    dcp.save(state, checkpoint_id=folder / "step-4")


@pytest.mark.parametrize("left_out", ["global_batch_size", "tp_degree"])
def test_a_checkpoint_that_does_not_say_what_came_later_is_loaded(
    left_out: str, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    ranks(1).run(save_like_an_early_version, tmp_path, left_out)
    assert ranks(1).run(warnings_of, tmp_path, {}) == [[]]


def load_step_4(folder: Path) -> str:
    return refusal_of(lambda: checkpointer(folder).load(folder / "step-4"))


def test_a_checkpoint_that_says_too_little_is_refused(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    ranks(1).run(save_like_an_early_version, tmp_path, "seed")
    (message,) = ranks(1).run(load_step_4, tmp_path)
    assert message.endswith("it has no seed")


def test_what_failed_alike_on_several_ranks_is_said_once() -> None:
    full, gone = OSError("disk full"), ValueError("gone")
    stack = traceback.StackSummary()
    error = CheckpointException("save", {2: (full, stack), 0: (full, stack), 1: (gone, stack)})
    assert failed_ranks(error) == "ranks 0, 2: OSError: disk full; rank 1: ValueError: gone"


def test_a_step_asked_for_is_found_or_the_others_are_named(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    ranks(1).run(save_twice, tmp_path)
    shutil.copytree(tmp_path / "step-4", tmp_path / "step-7")
    assert ranks(2).run(find_checkpoint, options(tmp_path, load_step=4)) == [tmp_path / "step-4"] * 2
    for message in ranks(2).run(look_for_step_5, tmp_path):
        assert "checkpoint.load_step = 5" in message
        assert "step-7, step-4" in message


def look_for_step_5(folder: Path) -> str:
    return refusal_of(lambda: find_checkpoint(options(folder, load_step=5)))
