"""Tokens a second that one process loads, shuffled and collated as the trainer receives them."""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.record import record
from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.loader import build_loader
from dmuon_titan.data.manifest import Manifest, write_manifest
from dmuon_titan.data.shards import SplitWriter, token_bytes_for


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--local-batch-size", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--corpus-tokens", type=int, default=1 << 26)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _write_corpus(Path(folder), arguments.corpus_tokens, arguments.vocab_size)
        rates = _rates(Path(folder), arguments)
    names = ("seq_len", "local_batch_size", "vocab_size", "num_workers")
    rate = {"median": round(statistics.median(rates)), "min": round(min(rates)), "max": round(max(rates))}
    print(json.dumps(record("loader", **{name: getattr(arguments, name) for name in names}, tokens_per_s=rate)))


def _write_corpus(folder: Path, num_tokens: int, vocab_size: int) -> None:
    """Random ids in four shards, so that windows cross borders as they do in a large corpus."""
    writer = SplitWriter(folder, "train", vocab_size, shard_tokens=-(-num_tokens // 4))
    draw = np.random.default_rng(0)
    for start in range(0, num_tokens, 1 << 22):
        writer.append(draw.integers(0, vocab_size, min(1 << 22, num_tokens - start)))
    writer.end_document()
    write_manifest(folder, Manifest(vocab_size, token_bytes_for(vocab_size), {"train": writer.close()}))


def _rates(folder: Path, arguments: argparse.Namespace) -> list[float]:
    batches = build_loader(
        TokenDataset(folder, arguments.seq_len),
        seed=0,
        seq_len=arguments.seq_len,
        local_batch_size=arguments.local_batch_size,
        dp_rank=0,
        dp_world=1,
        num_consumed=0,
        num_microbatches=1,
        num_workers=arguments.num_workers,
    )
    num_batches = max(1, (1 << 24) // (arguments.seq_len * arguments.local_batch_size))
    rates = []
    for _ in range(arguments.repeats + 1):
        start = time.perf_counter()
        for _ in range(num_batches):
            next(batches)
        num_tokens = num_batches * arguments.local_batch_size * arguments.seq_len
        rates.append(num_tokens / (time.perf_counter() - start))
    return rates[1:]  # the first one starts the loader


if __name__ == "__main__":
    main()
