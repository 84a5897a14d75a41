"""Token shards: files of raw little-endian ids that together are one stream, written once and then mapped.

Shape legend: B rows, L tokens of a row, N tokens.
"""

import functools
import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from dmuon_titan.data.manifest import PREPARE_COMMAND, FileEntry, Manifest, Shard, Split
from dmuon_titan.errors import DataError

Tokens = npt.NDArray[np.integer]

_SHARD_PREFIX = {"train": "tokens", "validation": "validation"}


def token_bytes_for(vocab_size: int) -> int:
    """Width of a stored id: 2 bytes if every id of the vocabulary fits, else 4."""
    return 2 if vocab_size <= 1 << 16 else 4


def _dtype(token_bytes: int) -> np.dtype[np.integer]:
    return np.dtype(f"<u{token_bytes}")


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._digest = hashlib.sha256()
        self._stream: BinaryIO = path.open("wb")

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self.size_bytes += len(data)

    def close(self) -> FileEntry:
        self._stream.close()
        return FileEntry(self.path.name, self.size_bytes, self._digest.hexdigest())


class SplitWriter:
    """Writes one split, shard after shard, and the offsets of its documents. Holds nothing back in memory."""

    def __init__(self, folder: Path, name: str, vocab_size: int, shard_tokens: int) -> None:
        """shard_tokens: capacity of one shard, in tokens."""
        self.num_tokens = 0
        self.num_documents = 0
        self._folder = folder
        self._name = name
        self._vocab_size = vocab_size
        self._dtype = _dtype(token_bytes_for(vocab_size))
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._shard: _HashedFile | None = None
        self._index = _HashedFile(folder / f"documents-{name}.bin")
        self._index.write(np.zeros(1, "<i8").tobytes())

    def append(self, ids_N: Tokens) -> None:
        """Append ids of the current document. Raises DataError if one is outside [0, vocab_size)."""
        if not ids_N.size:
            return
        low, high = int(ids_N.min()), int(ids_N.max())
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise DataError(
                f"token id {bad} after {self.num_tokens} tokens of split {self._name!r}: legal are "
                f"0 to {self._vocab_size - 1} (vocab_size {self._vocab_size}); the tokenizer does not fit the data"
            )
        self.num_tokens += ids_N.size
        ids_N = ids_N.astype(self._dtype)
        while ids_N.size:
            if self._shard is None:
                name = f"{_SHARD_PREFIX[self._name]}-{len(self._shards):05d}.bin"
                self._shard = _HashedFile(self._folder / name)
            room = self._shard_tokens - self._shard.size_bytes // self._dtype.itemsize
            self._shard.write(ids_N[:room].tobytes())
            if ids_N.size >= room:
                self._close_shard()
            ids_N = ids_N[room:]

    def end_document(self) -> None:
        """Record that the current document ends here, its separator included."""
        self.num_documents += 1
        self._index.write(np.array([self.num_tokens], "<i8").tobytes())

    def close(self) -> Split:
        """Finish the files and return their part of the manifest."""
        if self._shard is not None:
            self._close_shard()
        return Split(self.num_tokens, self.num_documents, tuple(self._shards), self._index.close())

    def _close_shard(self) -> None:
        assert self._shard is not None
        entry = self._shard.close()
        num_tokens = entry.size_bytes // self._dtype.itemsize
        self._shards.append(Shard(entry.file, entry.size_bytes, entry.sha256, num_tokens))
        self._shard = None


# An open map holds a file descriptor, and a corpus can have more shards than a process may open files.
@functools.lru_cache(maxsize=128)
def _mapped(path: Path, dtype: np.dtype[np.integer], num_tokens: int, _sha256: str) -> Tokens:
    return np.memmap(path, dtype=dtype, mode="r", shape=(num_tokens,))


class TokenStream:
    """The shards of a split as one array that stays on disk. Cheap to pickle: maps are opened where they are read."""

    def __init__(self, folder: Path, manifest: Manifest, split: Split) -> None:
        self.num_tokens = split.num_tokens
        self._folder = folder
        self._shards = split.shards
        self._starts = list(itertools.accumulate((s.num_tokens for s in split.shards), initial=0))
        self._dtype = _dtype(manifest.token_bytes)
        self._vocab_size = manifest.vocab_size

    def read(self, starts: Sequence[int], length: int) -> Tokens:
        """Read `length` tokens from each offset, across the borders of shards.

        Returns an array [B, L] of the stored dtype. Raises DataError if an id is outside the vocabulary.
        """
        tokens_BL = np.empty((len(starts), length), self._dtype)
        for row_L, start in zip(tokens_BL, starts, strict=True):
            self._copy(start, row_L)
        if tokens_BL.size and tokens_BL.max() >= self._vocab_size:
            row, column = np.argwhere(tokens_BL >= self._vocab_size)[0].tolist()
            self._raise_corrupt(starts[row] + column, int(tokens_BL[row, column]))
        return tokens_BL

    def _copy(self, start: int, row_L: Tokens) -> None:
        index = bisect_right(self._starts, start) - 1
        begin = start - self._starts[index]
        filled = 0
        while filled < len(row_L):
            shard = self._shards[index]
            shard_N = _mapped(self._folder / shard.file, self._dtype, shard.num_tokens, shard.sha256)
            part = shard_N[begin : begin + len(row_L) - filled]
            row_L[filled : filled + len(part)] = part
            filled += len(part)
            index, begin = index + 1, 0

    def _raise_corrupt(self, offset: int, token: int) -> None:
        index = bisect_right(self._starts, offset) - 1
        raise DataError(
            f"{self._folder / self._shards[index].file}: token id {token} at token {offset - self._starts[index]}, "
            f"legal are 0 to {self._vocab_size - 1}; the file is damaged "
            f"(check the folder with `{PREPARE_COMMAND} --verify {self._folder}`)"
        )


def read_documents(folder: Path, split: Split) -> npt.NDArray[np.int64]:
    """Offsets of the documents in the split's stream: document i is tokens [offsets[i], offsets[i + 1])."""
    if split.documents is None:
        raise DataError(f"{folder}: these tokens were prepared without document offsets")
    return np.fromfile(folder / split.documents.file, "<i8")
