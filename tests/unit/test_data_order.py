"""The order of samples: every window once an epoch, whatever the number of ranks, stops and shards."""

import multiprocessing
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.loader import Batch, SampleOrder, build_loader, epochs_begun
from dmuon_titan.errors import DataError
from tests.debruijn import debruijn_offset, debruijn_tokens, write_debruijn, write_tokens

SEQ_LEN = 32


def consume(
    dataset: TokenDataset,
    num_ranks: int,
    steps: range,
    *,
    global_batch: int,
    num_microbatches: int = 1,
    num_workers: int = 0,
    shuffle: bool = True,
) -> list[list[list[Batch]]]:
    """What each rank gets in each step: [step][rank][micro]. `steps` counts from 0; a resumed run starts above it."""
    per_rank = [
        build_loader(
            dataset,
            seed=7,
            seq_len=dataset.seq_len,
            local_batch_size=global_batch // num_ranks // num_microbatches,
            dp_rank=rank,
            dp_world=num_ranks,
            num_consumed=steps.start * global_batch,
            num_microbatches=num_microbatches,
            num_workers=num_workers,
            shuffle=shuffle,
        )
        for rank in range(num_ranks)
    ]
    return [[list(islice(batches, num_microbatches)) for batches in per_rank] for _ in steps]


def offsets(batches: list[list[Batch]]) -> list[int]:
    """Corpus offsets of the windows of one step, in the order of samples, read from the tokens themselves."""
    rows = [
        (sample_id, row)
        for rank in batches
        for batch in rank
        for sample_id, row in zip(batch.sample_ids, batch.input_BS.tolist(), strict=True)
    ]
    return [debruijn_offset(row[0], row[1]) for _, row in sorted(rows)]


@pytest.mark.parametrize(("num_shards", "seq_len"), [(1, 32), (3, 32), (4, 33), (4, 30000)])
def test_window_is_its_stretch_of_the_stream_across_shards(tmp_path: Path, num_shards: int, seq_len: int) -> None:
    dataset = TokenDataset(write_debruijn(tmp_path / "d", num_shards), seq_len)
    stream = debruijn_tokens()
    assert len(dataset) == (len(stream) - 1) // seq_len
    for window in {0, 1, len(dataset) // 2, len(dataset) - 1}:
        begin = window * seq_len
        input_BS, label_BS = dataset[window]
        np.testing.assert_array_equal(input_BS[0].numpy(), stream[begin : begin + seq_len])
        np.testing.assert_array_equal(label_BS[0].numpy(), stream[begin + 1 : begin + seq_len + 1])
        assert input_BS.dtype == label_BS.dtype == torch.int64
        assert input_BS.is_contiguous()
        assert label_BS.is_contiguous()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2), (2, 4), (1, 4)])
def test_b01_other_number_of_ranks_continues_the_same_samples(tmp_path: Path, before: int, after: int) -> None:
    dataset = TokenDataset(write_debruijn(tmp_path / "d", 4), SEQ_LEN)
    whole = [offsets(step) for step in consume(dataset, 1, range(12), global_batch=4)]
    resumed = [
        offsets(step)
        for ranks, steps in ((before, range(6)), (after, range(6, 12)))
        for step in consume(dataset, ranks, steps, global_batch=4)
    ]
    assert resumed == whole
    assert len({offset for step in resumed for offset in step}) == 48


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 3), (2, 1), (1, 3), (1, 1), (3, 2)])
def test_b02_resume_counts_samples_not_micro_batches(tmp_path: Path, num_ranks: int, num_microbatches: int) -> None:
    dataset = TokenDataset(write_debruijn(tmp_path / "d", 3), SEQ_LEN)
    whole, resumed = (
        consume(dataset, num_ranks, range(first, 8), global_batch=12, num_microbatches=num_microbatches)
        for first in (0, 4)
    )
    for step, again in zip(whole[4:], resumed, strict=True):
        for rank, rank_again in zip(step, again, strict=True):
            for batch, batch_again in zip(rank, rank_again, strict=True):
                assert torch.equal(batch.input_BS, batch_again.input_BS)
                assert torch.equal(batch.label_BS, batch_again.label_BS)
                assert batch.sample_ids == batch_again.sample_ids


def test_b02_accumulation_does_not_change_the_samples_of_a_step(tmp_path: Path) -> None:
    dataset = TokenDataset(write_debruijn(tmp_path / "d"), SEQ_LEN)
    plain = [offsets(step) for step in consume(dataset, 1, range(5), global_batch=12)]
    for num_ranks, num_microbatches in ((1, 3), (2, 3), (4, 3), (6, 2)):
        steps = consume(dataset, num_ranks, range(5), global_batch=12, num_microbatches=num_microbatches)
        assert [offsets(step) for step in steps] == plain


@pytest.mark.parametrize("saved_at", [6, 8, 9, 16])
def test_b03_every_epoch_covers_all_batches_after_a_resume(tmp_path: Path, saved_at: int) -> None:
    # Exactly 8 global batches of 4 windows an epoch; saved within, at the end of, and behind an epoch.
    dataset = TokenDataset(write_debruijn(tmp_path / "d", 3, num_tokens=32 * SEQ_LEN + 1), SEQ_LEN)
    steps = consume(dataset, 2, range(saved_at), global_batch=4)
    steps += consume(dataset, 2, range(saved_at, 24), global_batch=4)
    epochs = [steps[start : start + 8] for start in (0, 8, 16)]
    for number, epoch in enumerate(epochs):
        assert sorted(o for step in epoch for o in offsets(step)) == list(range(0, 32 * SEQ_LEN, SEQ_LEN))
        assert {batch.epoch for step in epoch for rank in step for batch in rank} == {number}
    orders = [[o for step in epoch for o in offsets(step)] for epoch in epochs]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("num_tokens", [0, 1, SEQ_LEN - 1, SEQ_LEN])
def test_b11_too_small_corpus_is_refused_with_both_counts(tmp_path: Path, num_tokens: int) -> None:
    folder = write_debruijn(tmp_path / "d", num_tokens=num_tokens)
    with pytest.raises(DataError, match=f"has {num_tokens} tokens, one window needs {SEQ_LEN + 1} "):
        TokenDataset(folder, SEQ_LEN)


@pytest.mark.parametrize("num_tokens", [SEQ_LEN + 1, 2 * SEQ_LEN, 2 * SEQ_LEN + 1, 5 * SEQ_LEN + 7])
def test_b11_corpus_smaller_than_a_batch_wraps_within_it(tmp_path: Path, num_tokens: int) -> None:
    dataset = TokenDataset(write_debruijn(tmp_path / "d", num_tokens=num_tokens), SEQ_LEN)
    num_windows = (num_tokens - 1) // SEQ_LEN
    seen = [o for step in consume(dataset, 2, range(5), global_batch=4) for o in offsets(step)]
    assert len(seen) == 20
    everything = [window * SEQ_LEN for window in range(num_windows)]
    for start in range(0, 20 - num_windows, num_windows):
        assert sorted(seen[start : start + num_windows]) == everything


@pytest.mark.parametrize(("num_shards", "num_ranks"), [(1, 2), (3, 2), (2, 4), (1, 8), (5, 3)])
def test_b12_fewer_shards_than_ranks_gives_every_rank_its_part(tmp_path: Path, num_shards: int, num_ranks: int) -> None:
    dataset = TokenDataset(write_debruijn(tmp_path / "d", num_shards), SEQ_LEN)
    global_batch = 4 * num_ranks
    num_steps = dataset.num_windows // global_batch
    steps = consume(dataset, num_ranks, range(num_steps), global_batch=global_batch)
    per_rank = [{o for step in steps for o in offsets([step[rank]])} for rank in range(num_ranks)]
    assert all(len(part) == num_steps * 4 for part in per_rank)
    union = set().union(*per_rank)
    assert len(union) == num_steps * global_batch
    assert dataset.num_windows - len(union) < global_batch


def test_workers_deliver_the_same_batches(tmp_path: Path) -> None:
    dataset = TokenDataset(write_debruijn(tmp_path / "d", 3, num_tokens=20 * SEQ_LEN), SEQ_LEN)
    plain, worked = (
        consume(dataset, 2, range(3, 9), global_batch=8, num_microbatches=2, num_workers=num_workers)
        for num_workers in (0, 2)
    )
    for step, again in zip(plain, worked, strict=True):
        for rank, rank_again in zip(step, again, strict=True):
            for batch, batch_again in zip(rank, rank_again, strict=True):
                assert torch.equal(batch.input_BS, batch_again.input_BS)
                assert torch.equal(batch.label_BS, batch_again.label_BS)
                assert (batch.sample_ids, batch.epoch) == (batch_again.sample_ids, batch_again.epoch)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    order = SampleOrder(100, seed=1)
    first = [order[n].window for n in range(300)]
    assert [SampleOrder(100, seed=1)[n].window for n in reversed(range(300))] == first[::-1]
    assert [SampleOrder(100, seed=2)[n].window for n in range(300)] != first
    assert [SampleOrder(100, seed=1, shuffle=False)[n].window for n in range(300)] == [*range(100)] * 3
    assert first[:100] != first[100:200] != first[200:]


@pytest.mark.parametrize("num_windows", [1, 2, 3, 4, 5, 12, 100])
@pytest.mark.parametrize("global_batch", [1, 4, 6])
def test_b11_every_epoch_begins_in_exactly_one_step(num_windows: int, global_batch: int) -> None:
    for consumed in range(0, 60, global_batch):
        begun = [n // num_windows for n in range(consumed, consumed + global_batch) if n and n % num_windows == 0]
        assert list(epochs_begun(consumed, global_batch, num_windows)) == begun


def test_loader_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    # The trainer saves and restores this state: a loader that draws from it would make a restart differ.
    dataset = TokenDataset(write_debruijn(tmp_path / "d"), SEQ_LEN)
    for num_workers in (0, 1):
        before = torch.get_rng_state()
        consume(dataset, 1, range(2), global_batch=4, num_workers=num_workers)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damaged_id_is_one_line_naming_shard_and_place(tmp_path: Path, num_workers: int) -> None:
    folder = write_tokens(tmp_path / "d", np.arange(1000) % 100, vocab_size=100, num_shards=2)
    with (folder / "tokens-00001.bin").open("r+b") as stream:
        stream.seek(2 * 123)
        stream.write((4000).to_bytes(2, "little"))
    dataset = TokenDataset(folder, SEQ_LEN)
    processes_before = set(multiprocessing.active_children())
    with pytest.raises(DataError, match=r"tokens-00001\.bin: token id 4000 at token 123, legal are 0 to 99") as caught:
        consume(dataset, 1, range(8), global_batch=4, num_workers=num_workers, shuffle=False)
    assert "\n" not in str(caught.value)
    # Those that read have ended, although the error's traceback is kept.
    assert set(multiprocessing.active_children()) <= processes_before


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("1 / 0", 1),
        ("other = iter(batches); del batches", 0),
        ("import multiprocessing; multiprocessing.Process(target=print, daemon=True).start()", 0),
    ],
)
def test_readers_end_with_a_script(tmp_path: Path, ending: str, status: int) -> None:
    write_debruijn(tmp_path / "d")
    code = f"""
import sys
from pathlib import Path
from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.loader import build_loader
dataset = TokenDataset(Path(sys.argv[1]), 32)
sizes = {{"seq_len": 32, "local_batch_size": 2, "dp_rank": 0, "dp_world": 1, "num_consumed": 0, "num_microbatches": 1}}
batches = build_loader(dataset, seed=7, num_workers=2, **sizes)
never_begun = build_loader(dataset, seed=7, num_workers=2, **sizes)
next(batches)
{ending}
"""
    command = [sys.executable, "-c", code, str(tmp_path / "d")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == status, result.stderr
    assert result.stderr == "" or status == 1


def test_loader_refuses_another_sequence_length_than_the_data_set(tmp_path: Path) -> None:
    dataset = TokenDataset(write_debruijn(tmp_path / "d"), SEQ_LEN)
    with pytest.raises(ValueError, match="seq_len is 64"):
        build_loader(
            dataset,
            seed=0,
            seq_len=64,
            local_batch_size=1,
            dp_rank=0,
            dp_world=1,
            num_consumed=0,
            num_microbatches=1,
        )
