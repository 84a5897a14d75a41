"""The trace of consumed batches: one line each, readable at any time, appended to by a restarted run."""

import hashlib
import json
from pathlib import Path

from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.loader import build_loader
from dmuon_titan.data.trace import BatchTrace
from tests.debruijn import debruijn_offset, write_debruijn


def test_trace_names_every_window_and_grows_on_restart(tmp_path: Path) -> None:
    dataset = TokenDataset(write_debruijn(tmp_path / "d", 3), 32)
    batches = build_loader(
        dataset,
        seed=0,
        seq_len=32,
        local_batch_size=3,
        dp_rank=1,
        dp_world=2,
        num_consumed=0,
        num_microbatches=2,
        shuffle=False,
    )
    taken = [next(batches) for _ in range(4)]
    for start in (0, 2):
        trace = BatchTrace(tmp_path, dp_rank=1)
        for micro in (0, 1):
            trace.append(start // 2 + 1, micro, taken[start + micro])
    lines = [json.loads(line) for line in (tmp_path / "trace" / "rank-1.jsonl").read_text().splitlines()]
    assert [(line["step"], line["micro"]) for line in lines] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for line, batch in zip(lines, taken, strict=True):
        assert line["sample_ids"] == batch.sample_ids
        assert [debruijn_offset(*row[:2]) for row in line["first8"]] == [32 * n for n in batch.sample_ids]
        assert {len(row) for row in line["first8"]} == {8}
        content = batch.input_BS.numpy().tobytes() + batch.label_BS.numpy().tobytes()
        assert line["sha1"] == hashlib.sha1(content).hexdigest()
        assert (line["dp_rank"], line["tp_rank"], line["epoch"]) == (1, 0, 0)


def test_ranks_of_one_tensor_parallel_group_write_files_of_their_own(tmp_path: Path) -> None:
    for tp_rank in (0, 1):
        BatchTrace(tmp_path, dp_rank=0, tp_rank=tp_rank).close()
    assert {path.name for path in (tmp_path / "trace").iterdir()} == {"rank-0.jsonl", "rank-0-tp-1.jsonl"}
