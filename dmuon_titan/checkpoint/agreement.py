"""All ranks come to the same verdict, over a process group of their own: a save may run beside the training's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from dmuon_titan.errors import CheckpointError, TitanError

T = TypeVar("T")


def gathered(value: T, group: dist.ProcessGroup) -> list[T]:
    """The value of each rank, in their order."""
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def agree(mistake: str | None, group: dist.ProcessGroup, what: str) -> None:
    """Raises on all ranks what any of them met.

    Raises:
        CheckpointError: "{what}: rank 1: {mistake}"; the same on all ranks, each mistake once.
    """
    ranks: dict[str, list[str]] = {}
    for rank, met in enumerate(gathered(mistake, group)):
        if met is not None:
            ranks.setdefault(met, []).append(str(rank))
    if ranks:
        raise CheckpointError(f"{what}: {told(ranks)}")


def reason(error: Exception) -> str:
    """An error in words: what the system has against which file, or the message of one of ours."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, TitanError) else f"{type(error).__name__}: {error}"


def told(ranks: dict[str, list[str]]) -> str:
    """Each mistake once, with the ranks that met it."""
    return "; ".join(f"rank{'s' * (len(met) > 1)} {', '.join(met)}: {text}" for text, met in ranks.items())


def first_rank_does(action: Callable[[], T], group: dist.ProcessGroup, what: str) -> T:
    """Has rank 0 do something with files and tells all ranks the outcome.

    Raises:
        CheckpointError: "{what}: ..." on all ranks, where rank 0 met an error.
    """
    outcome: list[tuple[T | None, str | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            outcome = [(action(), None)]
        except Exception as error:  # whatever it is: the others wait for it
            outcome = [(None, reason(error))]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    result, mistake = outcome[0]
    if mistake is not None:
        raise CheckpointError(f"{what}: {mistake}")
    return result  # type: ignore[return-value]
