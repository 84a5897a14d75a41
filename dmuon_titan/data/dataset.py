"""Windows over a prepared token stream.

Shape legend: B sequences, S tokens of a sequence.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmuon_titan.data.manifest import MANIFEST_NAME, check_sizes, num_windows, read_manifest
from dmuon_titan.data.shards import TokenStream


class Windows(NamedTuple):
    """Inputs and the labels one token ahead of them: int64, contiguous, on the CPU."""

    input_BS: Tensor  # noqa: N815
    label_BS: Tensor  # noqa: N815


class TokenDataset:
    """A split of a prepared folder, cut into windows of seq_len + 1 tokens, of which neighbours share one.

    Window w is tokens [w * seq_len, (w + 1) * seq_len], so every token but the first of the stream is a label once.
    The last up to seq_len - 1 tokens of the stream fill no window and are left out.
    """

    def __init__(self, folder: Path, seq_len: int, split: str = "train") -> None:
        """Open a folder and compare the sizes of its files with the manifest.

        Raises DataError if a file is missing or has another size, or if the split holds less than one window.
        """
        self.folder = Path(folder)
        self.seq_len = seq_len
        self.manifest = read_manifest(self.folder)
        self.manifest_hash = hashlib.sha256((self.folder / MANIFEST_NAME).read_bytes()).hexdigest()
        check_sizes(self.folder, self.manifest)
        self.num_windows = num_windows(self.folder, self.manifest, split, seq_len)
        tokens = self.manifest.splits[split]
        self.num_tokens = tokens.num_tokens
        self._stream = TokenStream(self.folder, self.manifest, tokens)

    @property
    def vocab_size(self) -> int:
        """Ids are below this. The model's vocabulary may be larger."""
        return self.manifest.vocab_size

    @property
    def tokenizer_path(self) -> Path | None:
        """The sentencepiece model the text was encoded with, if the folder holds one."""
        return self.folder / self.manifest.tokenizer.file if self.manifest.tokenizer else None

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, window: int) -> Windows:
        """One window, with B = 1."""
        return self.__getitems__([window])

    def __getitems__(self, windows: Sequence[int]) -> Windows:
        """Several windows at once. Raises DataError if they hold an id outside the vocabulary."""
        tokens = self._stream.read([window * self.seq_len for window in windows], self.seq_len + 1)
        return Windows(
            torch.from_numpy(tokens[:, :-1].astype(np.int64)), torch.from_numpy(tokens[:, 1:].astype(np.int64))
        )
