"""Micro-batches in an order that is a function of the seed and a count of samples, the same on any number of ranks.

Global sample n belongs to epoch n // num_windows and is that epoch's permutation at n % num_windows. A step that
starts at `consumed` takes samples [consumed, consumed + global batch); micro-batch m of rank r takes local_batch_size
of them, from consumed + (m * dp_world + r) * local_batch_size on. That count is the whole state; the trainer keeps it.

Shape legend: B sequences, S tokens of a sequence.
"""

import atexit
import hashlib
import warnings
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.errors import DataError
from dmuon_titan.signals import ignore_stop_signals


class Sample(NamedTuple):
    """A global sample, and where in the data it lies."""

    id: int
    epoch: int
    window: int


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank: int64 tensors on the CPU. epoch: that of its first sample."""

    input_BS: Tensor  # noqa: N815
    label_BS: Tensor  # noqa: N815
    sample_ids: list[int]
    epoch: int


class SampleOrder:
    """Which window a global sample is. Every epoch is a permutation of all windows, drawn from (seed, epoch)."""

    def __init__(self, num_windows: int, seed: int, shuffle: bool = True) -> None:
        self._num_windows = num_windows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def __getitem__(self, sample_id: int) -> Sample:
        """sample_id: 0 or more, without an upper end."""
        epoch, position = divmod(sample_id, self._num_windows)
        if not self._shuffle:
            return Sample(sample_id, epoch, position)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self._draw(epoch)
        return Sample(sample_id, epoch, int(self._permutation[position]))

    def _draw(self, epoch: int) -> Tensor:
        digest = hashlib.sha256(f"sample order {self._seed} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randperm(self._num_windows, generator=generator)


def epochs_begun(num_consumed: int, num_samples: int, num_windows: int) -> range:
    """The epochs after the first whose first sample is one of the num_samples that follow num_consumed."""
    first, end = (-(-consumed // num_windows) for consumed in (num_consumed, num_consumed + num_samples))
    return range(max(1, first), end)


class MicroBatchSampler(Sampler[list[Sample]]):
    """Yields the samples of one rank's micro-batches, step after step, without end."""

    def __init__(
        self,
        order: SampleOrder,
        *,
        local_batch_size: int,
        dp_rank: int,
        dp_world: int,
        num_consumed: int,
        num_microbatches: int,
    ) -> None:
        self._order = order
        self._local_batch_size = local_batch_size
        self._dp_rank = dp_rank
        self._dp_world = dp_world
        self._num_consumed = num_consumed
        self._num_microbatches = num_microbatches

    def __iter__(self) -> Iterator[list[Sample]]:
        consumed = self._num_consumed
        while True:
            for micro in range(self._num_microbatches):
                first = consumed + (micro * self._dp_world + self._dp_rank) * self._local_batch_size
                yield [self._order[first + slot] for slot in range(self._local_batch_size)]
            consumed += self._num_microbatches * self._dp_world * self._local_batch_size


class _Batches(Dataset[Batch]):
    """What the loader's workers fetch from. An error travels as a value: raised there, it would lose its one line."""

    def __init__(self, dataset: TokenDataset) -> None:
        self._dataset = dataset

    def __getitems__(self, samples: list[Sample]) -> Batch | DataError:
        try:
            windows = self._dataset.__getitems__([sample.window for sample in samples])
        except DataError as error:
            return error
        return Batch(*windows, [sample.id for sample in samples], samples[0].epoch)


def build_loader(
    dataset: TokenDataset,
    *,
    seed: int,
    seq_len: int,
    local_batch_size: int,
    dp_rank: int,
    dp_world: int,
    num_consumed: int,
    num_microbatches: int,
    num_workers: int = 0,
    shuffle: bool = True,
) -> Iterator[Batch]:
    """The endless micro-batches of one data-parallel rank: those of a step in order, then those of the next.

    num_consumed: global samples that all ranks together have consumed before. num_microbatches: of a rank in a step.
    num_workers: processes that read ahead; the batches are the same. A step can hold more samples than an epoch.
    Raises DataError from the iterator if the data are damaged.
    """
    if seq_len != dataset.seq_len:
        raise ValueError(f"seq_len is {seq_len}, the data set was opened with {dataset.seq_len}")
    sampler = MicroBatchSampler(
        SampleOrder(dataset.num_windows, seed, shuffle),
        local_batch_size=local_batch_size,
        dp_rank=dp_rank,
        dp_world=dp_world,
        num_consumed=num_consumed,
        num_microbatches=num_microbatches,
    )
    with warnings.catch_warnings():
        # torchdata 0.11 still calls what torch 2.13 warns of.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        loader: StatefulDataLoader[Batch | DataError] = StatefulDataLoader(
            _Batches(dataset),
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=_as_fetched,
            worker_init_fn=ignore_stop_signals,
            # Without one of its own the loader draws from torch's global generator, whose state the trainer saves.
            generator=torch.Generator(),
        )
    batches = _raising(loader)
    _open.add(batches)
    return batches


def _as_fetched(batch: Batch | DataError) -> Batch | DataError:
    return batch


def _raising(loader: StatefulDataLoader[Batch | DataError]) -> Generator[Batch, None, None]:
    try:
        for batch in loader:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    finally:
        del loader  # and so its processes: the traceback of an error would keep them


_open: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()


@atexit.register
def _close() -> None:
    """Ends the processes that still read: `multiprocessing` would send them a signal, which they ignore, and then wait
    for them for ever."""
    for batches in list(_open):
        batches.close()
