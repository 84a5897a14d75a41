"""What a training went through, and how two of them differ.

Of every step loss, gradient norm and a hash of each parameter; the parameters themselves after the last one. All in
full: a tensor that is spread over ranks is gathered first, so that meshes compare.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon.state_dict import get_state_dict

_CHUNK = 2**24  # elements that are hashed at once: eight bytes each, a few times


@dataclass(frozen=True)
class Seen:
    """After a step. Of what a history begins with loss and norm are 0."""

    loss: float
    norm: float
    hashes: dict[str, int]


@dataclass
class Differences:
    """Between two histories.

    Attributes:
        found: what has other bits, by how many steps were made; before the first of them parameters alone.
        largest: relative differences of loss and norm over all steps, and of a parameter after the last.
        moved: every parameter changed in every step.
        names: of the parameters.
    """

    moved: bool
    names: list[str]
    found: dict[int, list[str]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=lambda: {"loss": 0.0, "norm": 0.0, "parameter": 0.0})

    @property
    def first(self) -> str:
        """Where bits differ first; empty where they never do."""
        if not self.found:
            return ""
        step, names = min(self.found.items())
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"step {step}: {', '.join(names[:3])}{more}"

    @property
    def all_differ(self) -> bool:
        """Loss, norm and every parameter do, once a step was made."""
        return bool(self.found) and set(self.found[max(self.found)]) == {"loss", "norm", *self.names}


class Recording:
    """Of one model. Every method is called by all ranks together."""

    def __init__(self, model: nn.Module, first_step: int = 0) -> None:
        """`first_step`: how many steps were made before."""
        self._model, self._first_step = model, first_step
        self._seen = [Seen(0.0, 0.0, self._hashes())]

    def add(self, loss: float, norm: float) -> None:
        self._seen.append(Seen(loss, norm, self._hashes()))

    def keep(self, folder: Path) -> None:
        """Writes the history, and the parameters as they are now."""
        folder.mkdir(parents=True, exist_ok=True)
        rank = dist.get_rank()
        writers = self._writers()
        mine = {name: tensor.cpu() for name, tensor in self._whole() if writers[name] == rank}
        torch.save(mine, folder / f"parameters-{rank}.pt")
        if rank == 0:
            (folder / "history.json").write_text(json.dumps([asdict(seen) for seen in self._seen]))
        dist.barrier()

    def differences(self, folder: Path) -> Differences:
        """From what was kept there. It must have been made by as many steps."""
        kept = [Seen(**seen) for seen in json.loads((folder / "history.json").read_text())][self._first_step :]
        pairs = zip(self._seen, self._seen[1:], strict=False)
        moved = all(before.hashes[name] != after.hashes[name] for before, after in pairs for name in after.hashes)
        found = Differences(moved, list(self._seen[0].hashes))
        for step, (seen, expected) in enumerate(zip(self._seen, kept, strict=True), self._first_step):
            assert seen.hashes.keys() == expected.hashes.keys()
            names = [name for name in seen.hashes if seen.hashes[name] != expected.hashes[name]]
            if step > self._first_step:
                for name in ("norm", "loss"):
                    now, then = getattr(seen, name), getattr(expected, name)
                    found.largest[name] = max(found.largest[name], abs(now - then) / abs(then))
                    names = [name, *names] if now != then else names
            if names:
                found.found[step] = names
        found.largest["parameter"] = self._largest_error(folder)
        return found

    def _largest_error(self, folder: Path) -> float:
        """Of a parameter, relative to its norm."""
        parts = (torch.load(path, mmap=True) for path in sorted(folder.glob("parameters-*.pt")))
        kept = {name: tensor for part in parts for name, tensor in part.items()}
        largest = 0.0
        for name, tensor in self._whole():
            expected = kept[name].to(tensor.device)
            error = torch.linalg.vector_norm(tensor - expected, dtype=torch.float64)
            norm = torch.linalg.vector_norm(expected, dtype=torch.float64)
            largest = max(largest, (error / norm).item())
        return max(_of_all_ranks(largest))

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that this rank holds, or a part of which it holds, one after the other."""
        for name, tensor in get_state_dict(self._model)["model"].items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _hashes(self) -> dict[str, int]:
        """Of all parameters; ranks that hold the same one must have the same."""
        joint: dict[str, int] = {}
        for hashes in _of_all_ranks({name: hash_of(tensor) for name, tensor in self._whole()}):
            for name, value in hashes.items():
                if joint.setdefault(name, value) != value:
                    raise RuntimeError(f"ranks hold different values of {name}")
        return dict(sorted(joint.items()))

    def _writers(self) -> dict[str, int]:
        """Of each parameter, the first rank that holds it."""
        held = _of_all_ranks(list(get_state_dict(self._model)["model"]))
        return {name: rank for rank, names in reversed(list(enumerate(held))) for name in names}


def _of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def hash_of(tensor: Tensor) -> int:
    """Of a float32 tensor's bits and where they lie, in 64 bits: SplitMix64 of each (index, bits), summed. Integers
    wrap around and add up to the same in any order."""
    bits = tensor.detach().contiguous().view(torch.int32).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, bits.numel(), _CHUNK):
        part = bits[begin : begin + _CHUNK].long() & 0xFFFFFFFF
        part |= torch.arange(begin, begin + part.numel(), device=tensor.device) << 32
        part = (part ^ (part >> 30)) * -0x40A7B892E31B1A47
        part = (part ^ (part >> 27)) * -0x6B2FB644ECCEEE15
        total += (part ^ (part >> 31)).sum()
    return int(total.item())
