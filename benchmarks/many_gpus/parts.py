"""What is run with how many GPUs, and for how long. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass

KINDS = ("exactness", "collectives", "steps", "speed")
RANKS = (2, 4, 8)


@dataclass(frozen=True)
class Part:
    """One program with its ranks.

    Attributes:
        kind: of KINDS. name: the kind, what is measured and the number of ranks.
        estimate_s: from starting it to its end, on H200.
    """

    kind: str
    name: str
    num_ranks: int
    arguments: tuple[str, ...]
    estimate_s: int

    @property
    def limit_s(self) -> int:
        """A first run on a machine may compile for as long again as it runs."""
        return 2 * self.estimate_s + 30

    def command(self, out: str, work: str) -> list[str]:
        module = ["-m", f"benchmarks.many_gpus.{self.kind}", *self.arguments, "--out", out]
        if self.kind == "exactness":
            module += ["--work", work]
        if self.kind == "speed":  # it starts the ranks of its job itself
            return [sys.executable, *module]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.num_ranks)]
        return [sys.executable, *launcher, *module]


def parts(num_gpus: int) -> list[Part]:
    """Of a machine with so many GPUs, what matters most first. Up to two GPUs all of it takes nine minutes."""
    worlds = [ranks for ranks in RANKS if ranks <= num_gpus]
    if not worlds:
        return [*_speed(1), _steps("1B", 1, ["1x1x1"], 45)]
    most = worlds[-1]
    # AdamW's state of 3B and more needs a shard axis.
    large = meshes(most) if most > 2 else ["1x2x1"]
    return [
        Part("exactness", "exactness, one rank", 1, (), 25),
        *(_exactness(ranks, with_bits=ranks == min(most, 4)) for ranks in worlds),
        _collectives(most),
        _steps("1B", most, meshes(most), 45 + 22 * len(meshes(most))),
        *_speed(most),
        # Weak scaling: each GPU has as much to do whatever their number.
        *(_steps("1B", ranks, [f"1x{ranks}x1"], 50) for ranks in (1, *worlds[:-1])),
        _steps("3B", most, large, 25 + 65 * len(large)),
        _steps("8B", most, large, 25 + 90 * len(large)),
        *map(_collectives, worlds[:-1]),
    ]


def rehearsal(num_ranks: int) -> list[Part]:
    """The same programs on a CPU, with a tiny model; but for jobs of 8B."""
    tiny = ("--rehearse",)
    on_meshes = ("--flavor", "debugmodel", "--meshes", *meshes(num_ranks), "--rounds", "1")
    return [
        Part("exactness", "exactness, one rank", 1, tiny, 30),
        Part("exactness", f"exactness, {num_ranks}", num_ranks, tiny, 60),
        Part("collectives", f"collectives, {num_ranks}", num_ranks, tiny, 30),
        Part("steps", f"steps, debugmodel, {num_ranks}", num_ranks, (*tiny, *on_meshes), 60),
    ]


def meshes(num_ranks: int) -> list[str]:
    """(replicate, shard, tp): one shard axis, replicate rows, tensor parallelism, and all of them."""
    n = num_ranks
    degrees = [(1, n, 1), (2, n // 2, 1), (1, n // 2, 2), (2, n // 4, 2)]
    return ["x".join(map(str, mesh)) for mesh in degrees if min(mesh) > 0]


def _exactness(num_ranks: int, *, with_bits: bool) -> Part:
    """Bits are compared on two ranks, or on four where there are as many."""
    options, estimate_s = ((), 110) if with_bits else (("--no-bits",), 35)
    return Part("exactness", f"exactness, {num_ranks}", num_ranks, options, estimate_s)


def _collectives(num_ranks: int) -> Part:
    return Part("collectives", f"collectives, {num_ranks}", num_ranks, (), 25)


def _steps(flavor: str, num_ranks: int, on_meshes: list[str], estimate_s: int) -> Part:
    contenders = ["muon", "adamw", "naive"] if flavor == "1B" or num_ranks > 2 else ["muon", "adamw"]
    arguments = ("--flavor", flavor, "--contenders", *contenders, "--meshes", *on_meshes)
    return Part("steps", f"steps, {flavor}, {num_ranks}", num_ranks, arguments, estimate_s)


def _speed(num_gpus: int) -> list[Part]:
    return [
        Part(
            "speed",
            f"speed, {optimizer}, {num_gpus}",
            num_gpus,
            ("--optimizer", optimizer, "--gpus", str(num_gpus)),
            60 if num_gpus == 2 else 75,
        )
        for optimizer in ("Muon", "AdamW")
    ]
