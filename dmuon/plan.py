"""What `dedicate_params` decided, for people to read and for programs to ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dmuon.assignment import Assignment, Owner

# Float32 master weights and momentum.
OWNED_BYTES_PER_ELEMENT = 8


@dataclass(frozen=True)
class PlanEntry:
    """One dedicated parameter in a plan.

    Attributes:
        shape: the logical shape. split: rows of each fused matrix, empty if it is one matrix or a stack.
        unit: name of the hook boundary; several, joined by " + ", for a tied parameter.
        flops: of its Newton-Schulz iteration, once a step; on each owner.
        num_owners: ranks that own it jointly, `owner` and those that follow on the shard axis.
    """

    name: str
    shape: tuple[int, ...]
    split: tuple[int, ...]
    unit: str
    owner: Owner
    flops: int
    num_owners: int = 1


@dataclass(frozen=True)
class Plan:
    """Who owns what. `str(plan)` is a table for people.

    Attributes:
        entries: the dedicated parameters, in the model's order.
        symmetric: names and shapes of all others; FSDP2 shards them and AdamW updates those that are trainable.
    """

    entries: tuple[PlanEntry, ...]
    symmetric: dict[str, tuple[int, ...]]
    assignment: Assignment

    def __str__(self) -> str:
        rows = [("parameter", "role", "shape", "owner", "unit", "GFLOP a step")]
        for entry in self.entries:
            shape = " x ".join(map(str, entry.shape)) + (f" as {entry.split}" if entry.split else "")
            owner = _place(entry.owner, entry.num_owners)
            rows.append((entry.name, "dedicated", shape, owner, entry.unit, f"{entry.flops / 1e9:.1f}"))
        for name, dims in self.symmetric.items():
            rows.append((name, "symmetric", " x ".join(map(str, dims)), "", "", ""))
        loads = [("owner", "GFLOP a step", "masters and momentum")]
        for slot, flops in self.assignment.flops.items():
            num_bytes = OWNED_BYTES_PER_ELEMENT * self.assignment.numel[slot]
            loads.append((_place(slot), f"{flops / 1e9:.1f}", f"{num_bytes / 2**20:.1f} MiB"))
        longest = f"longest load: {self.assignment.imbalance:.3f} of the least possible"
        num_joint = len(self.assignment.num_owners)
        if num_joint:
            longest += f" with one owner each; {num_joint} of {len(self.entries)} are owned jointly"
        return "\n".join([*_aligned(rows), "", *_aligned(loads), longest])


def _place(owner: Owner, num_owners: int = 1) -> str:
    shard = f"{owner.shard}" if num_owners == 1 else f"{owner.shard}-{owner.shard + num_owners - 1}"
    return f"({owner.replicate}, {shard})"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
