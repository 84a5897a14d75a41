"""A record of what each rank consumed, so that repeated, lost and overlapping data can be seen from outside."""

import hashlib
import json
from pathlib import Path

from dmuon_titan.data.loader import Batch


class BatchTrace:
    """Appends one JSON object a micro-batch to <dump_folder>/trace/rank-<dp_rank>.jsonl (and -tp-<tp_rank>, if not 0).

    The object holds step, micro, dp_rank, tp_rank, sha1 (of the inputs, then the labels, as little-endian int64),
    first8 (the first 8 input ids of every sequence), sample_ids and epoch. A killed process loses no line it wrote.
    """

    def __init__(self, dump_folder: Path, dp_rank: int, tp_rank: int = 0) -> None:
        folder = Path(dump_folder) / "trace"
        folder.mkdir(parents=True, exist_ok=True)
        self._ranks = {"dp_rank": dp_rank, "tp_rank": tp_rank}
        suffix = f"-tp-{tp_rank}" if tp_rank else ""
        self._stream = (folder / f"rank-{dp_rank}{suffix}.jsonl").open("ab", buffering=0)

    def append(self, step: int, micro: int, batch: Batch) -> None:
        """Record micro-batch `micro` of step `step`."""
        digest = hashlib.sha1(usedforsecurity=False)
        for tokens_BS in (batch.input_BS, batch.label_BS):
            digest.update(tokens_BS.numpy().astype("<i8", copy=False).tobytes())
        line = {
            "step": step,
            "micro": micro,
            **self._ranks,
            "sha1": digest.hexdigest(),
            "first8": batch.input_BS[:, :8].tolist(),
            "sample_ids": batch.sample_ids,
            "epoch": batch.epoch,
        }
        self._stream.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
