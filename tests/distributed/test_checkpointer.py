"""A checkpoint is complete, sound and of this run, or it doesn't count; and all ranks think so together."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dmuon
from dmuon_titan.checkpoint import Checkpointer, Start, TrainState, checkpoint_group, find_start
from dmuon_titan.checkpoint import manifest as manifests
from dmuon_titan.checkpoint.folder import examine
from dmuon_titan.checkpoint.keys import MEANING
from dmuon_titan.checkpoint.saving import failed_ranks
from dmuon_titan.config.schema import Checkpoint, build
from dmuon_titan.console import logger
from dmuon_titan.errors import CheckpointError, NonFiniteError
from dmuon_titan.mesh import build_mesh
from dmuon_titan.optimizer import build_optimizer
from dmuon_titan.parallelize import build_model
from models.llama.sizes import LlamaSize
from tests.distributed.pool import RankPool

SMALL = LlamaSize(64, 2, 4, 2, 256, None, 16, 10000.0)
CPU = torch.device("cpu")
Ranks = Callable[[int], RankPool]


def checkpointer(
    folder: Path, *, size: LlamaSize = SMALL, state: dict[str, Any] | None = None, **options: Any
) -> Checkpointer:
    """On all ranks of the pool, sharded. state: of TrainState. options: checkpoint__x for checkpoint.x and so on."""
    config = build(
        {
            "training.seq_len": 32,
            "training.mixed_precision_param": "float32",
            "activation_checkpoint.mode": "none",
            "checkpoint.folder": str(folder),
            "checkpoint.keep_latest_k": 0,
            **{name.replace("__", "."): value for name, value in options.items()},
        }
    )
    folder.mkdir(parents=True, exist_ok=True)  # as a job does before it begins
    model, _ = build_model(config, size, build_mesh(CPU, (1, dist.get_world_size(), 1)))
    optimizer = build_optimizer(config.optimizer, model)
    known = {"seed": 0, "seq_len": 32, "data": "d", "tokenizer": "t", "global_batch_size": 8, "num_threads": 1}
    train_state = TrainState(**{**known, "num_ranks": dist.get_world_size(), **(state or {})})
    return Checkpointer(config, size, model, optimizer, train_state, CPU)


def found(folder: Path, *, num_steps: int = 1000, **options: Any) -> Start | None:
    return find_start(Checkpoint(folder=str(folder), **options), num_steps, checkpoint_group())


def load(loader: Checkpointer, step: int) -> None:
    loader.load(Start(examine(loader.folder / f"step-{step}"), own=True))


def make_step(saver: Checkpointer) -> None:
    generator = torch.Generator().manual_seed(saver.state.step)
    tokens = torch.randint(SMALL.vocab_size, (1, 32), generator=generator)
    saver.model(tokens).float().square().mean().backward()
    saver.optimizer.step()
    saver.optimizer.zero_grad()
    saver.state.step += 1


def refusal_of(action: Callable[[], object], error_type: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error_type) as error:
        action()
    return str(error.value)


def held(saver: Checkpointer) -> dict[str, torch.Tensor]:
    """A copy of every tensor that this rank holds."""
    state = dmuon.get_state_dict(saver.model, saver.optimizer)
    found = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, slots in state["optimizer"]["state"].items():
        found |= {f"{name}.{slot}": tensor for slot, tensor in slots.items()}
    return {name: (t.to_local() if hasattr(t, "to_local") else t).clone() for name, t in found.items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_and_load(folder: Path, optimizer: str, async_mode: str) -> None:
    """The step after the save is made while it may still be under way: it must not get into the checkpoint."""
    saver = checkpointer(folder, optimizer__name=optimizer, checkpoint__async_mode=async_mode)
    make_step(saver)
    expected = held(saver)
    saver.save()
    make_step(saver)
    saver.finish()
    loader = checkpointer(folder, optimizer__name=optimizer)
    before = held(loader)
    start = found(folder)
    assert start is not None
    assert (start.path, start.own) == (folder / "step-1", True)
    loader.load(start)
    assert loader.state.step == 1
    after = held(loader)
    assert after.keys() == expected.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in after)
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name
    moved = held(saver)
    assert any(not torch.equal(moved[name], expected[name]) for name in moved)


@pytest.mark.parametrize("async_mode", ["disabled", "async", "async_with_pinned_mem"])
@pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])
def test_b04_all_state_comes_back(optimizer: str, async_mode: str, tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(save_and_load, tmp_path, optimizer, async_mode)


def pattern_of(key: str) -> str:
    """The entry of MEANING that a key in a checkpoint of SMALL falls under."""
    parts = key.split(".")
    if key.startswith("model."):
        return "model.<parameter>"
    if key.startswith("optimizer.state."):
        return f"optimizer.state.<parameter>.{parts[-1]}"
    if key.startswith("optimizer.param_groups."):
        return "optimizer.param_groups.<index>.<option>"
    return key


def save_once(folder: Path) -> list[str]:
    saver = checkpointer(folder)
    saver.save(wait=True)
    return [name for name, _ in saver.model.named_parameters()]


def test_the_keys_of_a_checkpoint_are_those_that_are_explained(tmp_path: Path, ranks: Ranks) -> None:
    """The same on one rank and on two, and none names a rank. Plain torch reads them, without a process group."""
    keys = {}
    for num_ranks in (1, 2):
        parameters = ranks(num_ranks).run(save_once, tmp_path / f"on-{num_ranks}")[0]
        metadata = dcp.FileSystemReader(tmp_path / f"on-{num_ranks}" / "step-0").read_metadata()
        keys[num_ranks] = sorted(metadata.state_dict_metadata)
    assert keys[1] == keys[2]
    assert {pattern_of(key) for key in keys[1]} == MEANING.keys() - {"random_state.cuda"}
    assert sorted(key.removeprefix("model.") for key in keys[1] if key.startswith("model.")) == sorted(parameters)
    state = {"model.norm.weight": torch.zeros(64), "train_state.step": None}
    dcp.load(state, checkpoint_id=tmp_path / "on-2" / "step-0", no_dist=True)
    assert torch.equal(state["model.norm.weight"], torch.ones(64))
    assert state["train_state.step"] == 0


def keep_two(folder: Path, resumed_from: int | None) -> list[str]:
    """After saves at 1, 2, 10, 11, each but the last followed by a sound step."""
    if resumed_from is not None:
        (saver := checkpointer(folder)).state.step = resumed_from
        saver.save(wait=True)
    saver = checkpointer(folder, checkpoint__keep_latest_k=2)
    if resumed_from is not None:
        load(saver, resumed_from)
    if dist.get_rank() == 0:
        for other in ("step-foo", "step-3.tmp", "step-4.mine", "notes"):
            (folder / other).mkdir(parents=True)
            (folder / other / "notes.txt").touch()
        (folder / "step-5.tmp").mkdir()
        (folder / "step-5.tmp" / ".unfinished").touch()
    dist.barrier()
    for step in (1, 2, 10):
        saver.state.step = step
        saver.save()
        assert f"step-{step}" in names(folder)
        dist.barrier()
        saver.proved()
    saver.state.step = 11
    saver.save()
    dist.barrier()
    kept = names(folder)
    saver.proved()
    dist.barrier()
    return [*kept, "|", *names(folder)]


def test_only_the_newest_are_kept_once_the_next_step_is_sound(tmp_path: Path, ranks: Ranks) -> None:
    """What was saved last stays beside them until then; folders of others are left alone, cut-off saves are not."""
    others = ["notes", "step-3.tmp", "step-4.mine", "step-foo"]
    found = ranks(2).run(keep_two, tmp_path, None)[0]
    kept, after = found[: found.index("|")], found[found.index("|") + 1 :]
    assert sorted({*kept} - {*others}) == ["step-10", "step-11", "step-2"]
    assert sorted({*after} - {*others}) == ["step-10", "step-11"]
    assert {*others} <= {*after}


def test_the_one_resumed_from_is_kept(tmp_path: Path, ranks: Ranks) -> None:
    after = ranks(2).run(keep_two, tmp_path, 0)[0]
    assert {"step-0", "step-10", "step-11"} == {name for name in after[after.index("|") :] if name[5:].isdigit()}


def keep_two_of_slow_saves(folder: Path, async_mode: str) -> list[str]:
    """No save is complete when the step after it is; the next one waits for it. The last two are loaded again."""
    saver = checkpointer(folder, checkpoint__keep_latest_k=2, checkpoint__async_mode=async_mode)
    expected = {}
    for step in range(1, 5):
        make_step(saver)
        expected[step] = held(saver)
        saver.save()
        saver.proved()
    saver.finish()
    dist.barrier()
    for step in (3, 4):
        load(loader := checkpointer(folder), step)
        for name, tensor in held(loader).items():
            assert torch.equal(tensor, expected[step][name]), name
    return names(folder)


@pytest.mark.parametrize("async_mode", ["async", "async_with_pinned_mem"])
def test_saves_that_outlast_the_next_step_make_room_too(async_mode: str, tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(keep_two_of_slow_saves, tmp_path, async_mode)[0] == ["step-3", "step-4"]


def go_back(folder: Path) -> list[tuple[int, list[str]]]:
    """From step 2 of 2, 4, 6: what is the newest, and what is kept of two, after steps 3 and 4 of the second branch."""
    saver = checkpointer(folder)
    for step in (2, 4, 6):
        saver.state.step = step
        saver.save(wait=True)
    again = checkpointer(folder, checkpoint__keep_latest_k=2)
    load(again, 2)
    seen = []
    for step in (3, 4):
        again.state.step = step
        again.save(wait=True)
        dist.barrier()
        start = found(folder)
        assert start is not None
        seen.append((start.saved.step, names(folder)))
    return seen


def test_a_run_that_went_back_continues_from_its_own_saves(tmp_path: Path, ranks: Ranks) -> None:
    """The newest is the one saved last, not the one with the highest number; and it is not the one to be removed."""
    (first, kept), (second, _) = ranks(2).run(go_back, tmp_path)[0]
    assert first == 3
    assert {"step-2", "step-3"} <= {*kept}
    assert second == 4


def save_twice(folder: Path) -> None:
    saver = checkpointer(folder)
    saver.state.step = 4
    saver.save(wait=True)


def test_b05_files_of_an_earlier_run_never_mix_with_a_new_save(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(save_twice, tmp_path)
    assert len(list((tmp_path / "step-4").glob("*.distcp"))) == 2
    ranks(1).run(save_twice, tmp_path)
    assert len(list((tmp_path / "step-4").glob("*.distcp"))) == 1
    assert (tmp_path / "step-4.replaced" / "manifest.json").is_file()


def test_b05_a_kill_between_two_names_loses_neither(tmp_path: Path, ranks: Ranks) -> None:
    """The old checkpoint is put aside and the new one has not its name yet: the old one is found, and goes on."""
    ranks(2).run(save_twice, tmp_path)
    (tmp_path / "step-4").rename(tmp_path / "step-4.replaced")
    shutil.copytree(tmp_path / "step-4.replaced", tmp_path / "step-4.tmp")
    (tmp_path / "step-4.tmp" / ".unfinished").touch()
    assert [name for name, _ in ranks(2).run(look, tmp_path)] == ["step-4"] * 2
    assert names(tmp_path) == ["step-4", "step-4.tmp"]
    # Without a successor it was put aside for good.
    (tmp_path / "step-4").rename(tmp_path / "step-4.replaced")
    shutil.rmtree(tmp_path / "step-4.tmp")
    assert [name for name, _ in ranks(2).run(look, tmp_path)] == ["nothing"] * 2


def damage(checkpoint: Path, how: str) -> None:
    shard = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif how == "short":
        shard.write_bytes(content[:-1])
    elif how == "missing":
        shard.unlink()
    elif how == "no manifest":
        (checkpoint / "manifest.json").unlink()
    elif how == "torn manifest":
        (checkpoint / "manifest.json").write_bytes((checkpoint / "manifest.json").read_bytes()[:100])
    elif how == "wrong types":
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "sequence": "x"}))
    elif how == "metadata flipped":
        metadata = checkpoint / ".metadata"
        content = bytearray(metadata.read_bytes())
        content[len(content) // 2] ^= 1
        metadata.write_bytes(content)


DAMAGES = ("flipped", "metadata flipped", "short", "missing", "no manifest", "torn manifest", "wrong types")


def look(folder: Path, load_step: int = -1, num_steps: int = 1000) -> tuple[str, str]:
    """The name of what is found, or the refusal, and what was said."""
    with heard() as records:
        try:
            start = found(folder, load_step=load_step, num_steps=num_steps)
        except CheckpointError as mistake:
            return str(mistake), ""
    return start.path.name if start is not None else "nothing", "\n".join(records)


@pytest.mark.parametrize("how", DAMAGES)
def test_b05_what_is_damaged_is_named_and_passed_over(how: str, tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(save_twice, tmp_path)
    shutil.copytree(tmp_path / "step-4", tmp_path / "step-8")
    manifest = json.loads((tmp_path / "step-8" / "manifest.json").read_text())
    (tmp_path / "step-8" / "manifest.json").write_text(json.dumps({**manifest, "step": 8, "sequence": 2}))
    assert ranks(2).run(look, tmp_path) == [("step-8", "")] * 2
    damage(tmp_path / "step-8", how)
    (name, said), (other, _) = ranks(2).run(look, tmp_path)
    assert name == other == "step-4"
    assert "step-8" in said
    assert ranks(2).run(look, tmp_path, -1, 8)[0][0] == "step-4", "the run is not finished: its last step is lost"
    # Asked for by name it is refused instead.
    for refusal, _ in ranks(2).run(look, tmp_path, 8):
        assert "checkpoint.load_step = 8" in refusal
        assert "step-4" in refusal or "is broken: " in refusal
    assert (tmp_path / "step-8").is_dir()


def test_where_nothing_can_be_used_the_run_does_not_begin_anew(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(save_twice, tmp_path)
    (tmp_path / "step-8").mkdir()
    damage(tmp_path / "step-4", "flipped")
    for refusal, _ in ranks(2).run(look, tmp_path):
        assert refusal.startswith(f"none of the checkpoints in {tmp_path} can be used (step-4): repair one")
    shutil.rmtree(tmp_path / "step-4")
    assert [name for name, _ in ranks(2).run(look, tmp_path)] == ["nothing"] * 2, "an empty folder is nothing lost"


def go_back_by_configuration(folder: Path) -> list[str]:
    """Where a job with `load_step` starts: at first, once it has saved since, and when it has saved its last step."""
    saver = checkpointer(folder)
    for step in (2, 4, 6):
        saver.state.step = step
        saver.save(wait=True)
    starts = [look(folder, 2, 6)[0]]
    again = checkpointer(folder, checkpoint__load_step=2)
    load(again, 2)
    for step in (3, 5, 6):
        again.state.step = step
        again.save(wait=True)
        starts.append(look(folder, 2, 6)[0])
    return starts


def test_a_job_that_goes_back_does_so_once(tmp_path: Path, ranks: Ranks) -> None:
    """Started again, by a scheduler for one, it goes on; finished, it is asked for anew."""
    assert ranks(2).run(go_back_by_configuration, tmp_path)[0] == ["step-2", "step-3", "step-5", "step-2"]


@contextlib.contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_with_a_full_disk_on_rank_1(folder: Path, async_mode: str) -> str:
    saver = checkpointer(folder, checkpoint__async_mode=async_mode)
    saver.save(wait=True)
    saver.state.step = 5
    limit = files_at_most(64 << 10) if dist.get_rank() == 1 else contextlib.nullcontext()
    with limit:
        if async_mode == "disabled":
            message = refusal_of(saver.save)
        else:
            saver.save()
            message = refusal_of(saver.finish)
            assert not saver.failed()
    start = found(folder)
    assert start is not None
    assert start.path.name == "step-0"
    assert names(folder) == ["step-0"]
    return message


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_b08_a_rank_that_cannot_write_fails_the_save_on_all(async_mode: str, tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks(2).run(save_with_a_full_disk_on_rank_1, tmp_path, async_mode)
    assert first == second
    for part in ("step 5", "rank 1: File too large", str(tmp_path), "__1_0.distcp", "MiB are free"):
        assert part in first


def save_that_fails_on_one_rank(folder: Path) -> tuple[bool, str]:
    """By an error that torch's saving doesn't pass on, so that the other rank waits for this one."""
    saver = checkpointer(folder, checkpoint__async_mode="async")
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr("dmuon_titan.checkpoint.checkpointer._GRACE_S", 1.0)
        if dist.get_rank() == 1:

            def out_of_memory(*_: object) -> None:
                raise MemoryError("no room")

            changes.setattr("dmuon_titan.checkpoint.saving._write", out_of_memory)
        saver.save()
        while dist.get_rank() == 1 and not saver.failed():
            pass
        dist.barrier()
        return saver.failed(), refusal_of(saver.give_up)


def test_a_save_that_fails_on_one_rank_keeps_no_other_waiting(tmp_path: Path) -> None:
    """In a pool of its own: its other rank is left in a save that never ends."""
    pool = RankPool(2)
    try:
        (waits, first), (failed, second) = pool.run(save_that_fails_on_one_rank, tmp_path)
    finally:
        pool.stop()
    assert (waits, failed) == (False, True)
    assert first.endswith("another rank failed")
    assert second.endswith("MemoryError: no room")


def save_into_what_vanishes(folder: Path) -> list[str]:
    """A file has the folder's name; then the folder vanishes before its files are verified."""
    said = []
    saver = checkpointer(folder)
    saver.save(wait=True)
    saver.state.step = 5
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        folder.touch()
    dist.barrier()
    said.append(refusal_of(saver.save))
    if dist.get_rank() == 0:
        folder.unlink()
    dist.barrier()
    said.append(refusal_of(saver.save))  # nothing is there: no folder is made where a disk may be missing
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    with pytest.MonkeyPatch.context() as changes:
        if dist.get_rank() == 0:  # what an operator's rm does in that moment

            def lost(path: Path) -> manifests.StoredFile:
                shutil.rmtree(folder)
                return manifests.store(path)

            changes.setattr("dmuon_titan.checkpoint.saving.store", lost)
        said.append(refusal_of(saver.save))
    folder.mkdir(exist_ok=True)
    dist.barrier()
    saver.save(wait=True)
    assert names(folder) == ["step-5"]
    return said


def test_a_folder_that_vanishes_is_named_on_all_ranks(tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks(2).run(save_into_what_vanishes, tmp_path / "checkpoint")
    assert first == second
    assert all(f"step 5 could not be saved in {tmp_path}/checkpoint" in said for said in first)


def save_not_finite(folder: Path) -> str:
    saver = checkpointer(folder)
    if dist.get_rank() == 1:
        state = next(iter(saver.optimizer.state.values()))
        next(iter(state.values())).view(-1)[0] = torch.inf
    return refusal_of(saver.save, NonFiniteError)


def test_b21_what_is_not_finite_is_not_saved(tmp_path: Path, ranks: Ranks) -> None:
    for message in ranks(2).run(save_not_finite, tmp_path):
        assert "step 0" in message
    assert not list(tmp_path.iterdir())


WIDE = LlamaSize(128, 2, 4, 2, 256, None, 16, 10000.0)
SHALLOW = LlamaSize(64, 1, 4, 2, 256, None, 16, 10000.0)
DEEP = LlamaSize(64, 3, 4, 2, 256, None, 16, 10000.0)


def load_another(folder: Path, change: dict[str, Any]) -> str:
    checkpointer(folder).save(wait=True)
    return refusal_of(lambda: load(checkpointer(folder, **change), 0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": WIDE}, ("tok_embeddings.weight", "[256, 128]", "[256, 64]")),
        ({"size": SHALLOW}, ("it has layers.1.", "the configured model has no such parameter")),
        ({"size": DEEP}, ("layers.2.", "no such parameter in the checkpoint")),
        ({"state": {"seed": 1}}, ("debug.seed", "0", "1", 'exclude_from_loading = ["dataloader"]')),
        ({"state": {"tokenizer": "u"}}, ("tokenizer", " t,", " u")),
        ({"state": {"data": "e"}}, ("training data", " d,", " e")),
        ({"optimizer__name": "AdamW"}, ("optimizer.name = Muon", "this run has AdamW")),
        (
            {"state": {"global_batch_size": 16}, "training__local_batch_size": 3},
            (
                "global_batch_size = 8 with training.local_batch_size = 2 to keep it",
                "or training.global_batch_size = 16",
            ),
        ),
    ],
    ids=["wide", "shallow", "deep", "seed", "tokenizer", "data", "optimizer", "batch"],
)
def test_what_belongs_to_another_run_is_refused_with_both_sides(
    change: dict[str, Any], said: tuple[str, ...], tmp_path: Path, ranks: Ranks
) -> None:
    for message in ranks(2).run(load_another, tmp_path / "saved", change):
        assert all(part in message for part in said), message


def load_adamw_with_muon(folder: Path) -> str:
    checkpointer(folder, optimizer__name="AdamW").save(wait=True)
    return refusal_of(lambda: load(checkpointer(folder), 0))


def test_a_checkpoint_of_adamw_is_refused_for_muon(tmp_path: Path, ranks: Ranks) -> None:
    first, second = ranks(2).run(load_adamw_with_muon, tmp_path)
    assert "made with optimizer.name = AdamW, this run has Muon" in first
    assert first == second


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What this rank says meanwhile: warnings, and on a pool's ranks nothing else."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


def warnings_of(folder: Path, change: dict[str, Any]) -> list[str]:
    """What this rank says about a checkpoint of 1 rank and a global batch of 8."""
    loader = checkpointer(folder, **change)
    with heard() as records:
        load(loader, 4)
    assert loader.state.step == 4
    return records


def test_what_breaks_exactness_is_said_once(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(save_twice, tmp_path)
    assert ranks(1).run(warnings_of, tmp_path, {}) == [[]]
    assert ranks(1).run(warnings_of, tmp_path, {"metrics__log_freq": 3, "checkpoint__interval": 7}) == [[]]
    batch = {"state": {"global_batch_size": 16}, "training__global_batch_size": 16}
    (said,), none = ranks(2).run(warnings_of, tmp_path, batch)
    assert none == []
    assert "but not bit for bit: " in said
    assert "sequences in a step = 16, was 8" in said
    assert "ranks, whose random state begins anew = 2, was 1" in said
    for change, expected in (
        ({"parallelism__tensor_parallel_degree": 2}, "parallelism.tensor_parallel_degree = 2, was 1"),
        ({"state": {"num_threads": 2}}, "threads a rank = 2, was 1"),
        ({"optimizer__lr": 1.0}, "optimizer.lr = 1.0, was 0.0008"),
        ({"lr_scheduler__warmup_steps": 9}, "lr_scheduler.warmup_steps = 9, was 200"),
    ):
        ((said,),) = ranks(1).run(warnings_of, tmp_path, change)
        assert said.endswith(expected)


def leave_out(folder: Path, excluded: tuple[str, ...]) -> dict[str, bool]:
    """Which parts came back, and which did in a restart of the run that left some out."""
    saver = checkpointer(folder, state={"consumed_samples": 40, "tokens_seen": 1280})
    for _ in range(5):
        make_step(saver)
    saver.save(wait=True)
    expected = held(saver)

    def came_back(loader: Checkpointer) -> dict[str, bool]:
        after = held(loader)
        state = [name for name in after if not name.startswith("model.")]
        return {
            "model": all(torch.equal(after[name], expected[name]) for name in after if name.startswith("model.")),
            "optimizer": all(torch.equal(after[name], expected[name]) for name in state),
            "train_state": (loader.state.step, loader.state.tokens_seen) == (5, 1280),
            "dataloader": loader.state.consumed_samples == 40,
            "lr_scheduler": loader.state.schedule_start == 0,
        }

    loader = checkpointer(folder, checkpoint__exclude_from_loading=excluded)
    load(loader, 5)
    first = came_back(loader)
    if "train_state" not in excluded:
        expected, start = held(loader), loader.state.schedule_start
        loader.state.step = 6
        loader.save(wait=True)
        again = checkpointer(folder, checkpoint__exclude_from_loading=excluded)
        load(again, 6)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in held(again).items())
        assert again.state.schedule_start == start
    return first


@pytest.mark.parametrize("part", ["model", "optimizer", "lr_scheduler", "dataloader", "train_state"])
def test_parts_are_left_out_once(part: str, tmp_path: Path, ranks: Ranks) -> None:
    """A checkpoint of the run that left a part out is loaded whole: its restarts are restarts."""
    for came_back in ranks(2).run(leave_out, tmp_path, (part,)):
        # A schedule counts from the step where the run begins without it.
        assert came_back == {name: name != part for name in came_back}


def weights_only(folder: Path, dtype: str) -> tuple[str, str, list[str]]:
    saver = checkpointer(folder, checkpoint__last_save_model_only=True, checkpoint__export_dtype=dtype)
    make_step(saver)
    saver.save()
    make_step(saver)
    expected = held(saver)
    saver.save(last=True)
    start, finished = found(folder), found(folder, num_steps=2)
    assert start is not None
    assert finished is not None
    assert (start.saved.step, finished.saved.step, finished.saved.full) == (1, 2, False)
    initial = {"checkpoint__initial_load_path": str(folder / "step-2")}
    loader = checkpointer(folder / "new", **initial)
    loader.load(Start(finished.saved, own=False))
    assert (loader.state.step, loader.state.consumed_samples) == (0, 0)
    for name, tensor in held(loader).items():
        if name.startswith("model."):
            assert torch.equal(tensor, expected[name].to(getattr(torch, dtype)).float()), name
    whole = checkpointer(folder / "new", checkpoint__initial_load_model_only=False, **initial)
    refused = refusal_of(lambda: whole.load(Start(finished.saved, own=False)))
    metadata = dcp.FileSystemReader(folder / "step-2").read_metadata()
    return refused, refusal_of(lambda: found(folder, load_step=2)), sorted(metadata.state_dict_metadata)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_alone_are_never_taken_for_a_full_checkpoint(dtype: str, tmp_path: Path, ranks: Ranks) -> None:
    for refused, asked, keys in ranks(2).run(weights_only, tmp_path, dtype):
        assert "holds weights only: set checkpoint.initial_load_model_only = true" in refused
        assert asked.endswith("step-2 holds weights only")
        assert all(key.startswith("model.") for key in keys)


def too_large_weights(folder: Path) -> list[str]:
    saver = checkpointer(folder, checkpoint__last_save_model_only=True, checkpoint__export_dtype="float16")
    if dist.get_rank() == 1:
        next(iter(saver.model.parameters())).detach().to_local().view(-1)[0] = 1e6  # type: ignore[attr-defined]
    with heard() as records:
        saver.save(last=True)
    stored = dcp.FileSystemReader(folder / "step-0").read_metadata().state_dict_metadata
    assert {entry.properties.dtype for entry in stored.values()} == {torch.float32}  # type: ignore[union-attr]
    return records


def test_weights_too_large_for_their_format_are_saved_all_the_same(tmp_path: Path, ranks: Ranks) -> None:
    (said,), none = ranks(2).run(too_large_weights, tmp_path)
    assert said.startswith("checkpoint.export_dtype = float16: a weight of step 0 is too large for it")
    assert none == []


def schedule_without_steps(folder: Path) -> int:
    saver = checkpointer(folder, state={"step": 5, "schedule_start": 4})
    saver.save(wait=True)
    loader = checkpointer(folder, checkpoint__exclude_from_loading=("train_state",))
    load(loader, 5)
    assert loader.state.step == 0
    return loader.state.schedule_start


def test_a_schedule_never_begins_after_the_steps_made(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(schedule_without_steps, tmp_path) == [0, 0]


def test_what_failed_alike_on_several_ranks_is_said_once() -> None:
    full, gone = OSError("disk full"), ValueError("gone")
    stack = traceback.StackSummary()
    error = CheckpointException("save", {2: (full, stack), 0: (full, stack), 1: (gone, stack)})
    assert failed_ranks(error) == "ranks 0, 2: OSError: disk full; rank 1: ValueError: gone"


def test_a_step_asked_for_is_found_or_the_others_are_named(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(save_twice, tmp_path)
    assert ranks(2).run(look, tmp_path, 4) == [("step-4", "")] * 2
    for refusal, _ in ranks(2).run(look, tmp_path, 5):
        assert refusal == f"checkpoint.load_step = 5: {tmp_path} has step-4"
    for refusal, _ in ranks(2).run(look, tmp_path / "none", 5):
        assert refusal == f"checkpoint.load_step = 5: {tmp_path / 'none'} has no complete checkpoint"


def initial(folder: Path, path: Path) -> str:
    return refusal_of(lambda: found(folder, initial_load_path=str(path)))


def test_what_to_start_from_is_a_complete_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    ranks(1).run(save_twice, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path / "run", "name one of the checkpoints in it: step-4"),
        (tmp_path / "empty", "has no manifest.json"),
        (tmp_path / "none", "no such folder"),
    ):
        for refusal in ranks(2).run(initial, tmp_path / "new", path):
            assert refusal.startswith(f"checkpoint.initial_load_path = {path}: ")
            assert refusal.endswith(said)
