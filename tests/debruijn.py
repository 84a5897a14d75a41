"""DEBRUIJN of FIELD_CASES: a corpus in which the first two ids of any window name its exact offset."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from dmuon_titan.data.manifest import Manifest, write_manifest
from dmuon_titan.data.shards import SplitWriter, token_bytes_for

NUM_SYMBOLS = 256
NUM_TOKENS = NUM_SYMBOLS**2


def debruijn_tokens(num_symbols: int = NUM_SYMBOLS) -> npt.NDArray[np.int64]:
    """A de Bruijn sequence of order 2: num_symbols ** 2 ids, of which no ordered pair of neighbours occurs twice.

    It is the Lyndon words of length 1 and 2 in order: 0 01 02 .. 1 12 13 .. (Fredricksen, Kessler, Maiorana).
    """
    words = ([a, *(x for b in range(a + 1, num_symbols) for x in (a, b))] for a in range(num_symbols))
    return np.array([symbol for word in words for symbol in word], np.int64)


def debruijn_offset(first: int, second: int, num_symbols: int = NUM_SYMBOLS) -> int:
    """Where in the sequence the pair (first, second) begins."""

    def start(symbol: int) -> int:
        return symbol * (2 * num_symbols - symbol)  # each earlier symbol s begins 1 + 2 * (num_symbols - 1 - s) ids

    if first == num_symbols - 1:
        return start(second) - 1  # the last word of one symbol, then the first of the next
    if first > second:
        return start(second) + 2 * (first - second)  # between two words of `second`
    return start(first) + max(0, 2 * (second - first) - 1)


def write_tokens(
    folder: Path, tokens: npt.NDArray[np.int64], vocab_size: int, num_shards: int = 1, validation_tokens: int = 0
) -> Path:
    """Write ids as a prepared folder without tokenizer or separators, the last validation_tokens held out."""
    folder.mkdir(parents=True)
    splits = {}
    num_train = len(tokens) - validation_tokens
    for name, part in (("train", tokens[:num_train]), ("validation", tokens[num_train:])):
        writer = SplitWriter(folder, name, vocab_size, shard_tokens=max(1, -(-len(part) // num_shards)))
        writer.append(part)
        splits[name] = writer.close()
    write_manifest(folder, Manifest(vocab_size, token_bytes_for(vocab_size), splits))
    return folder


def write_debruijn(
    folder: Path, num_shards: int = 1, num_tokens: int = NUM_TOKENS, num_symbols: int = NUM_SYMBOLS
) -> Path:
    """Write the first num_tokens ids of the sequence as a prepared folder of num_shards shards."""
    return write_tokens(folder, debruijn_tokens(num_symbols)[:num_tokens], num_symbols, num_shards)
