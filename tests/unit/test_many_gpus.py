"""`benchmarks.many_gpus`: what is planned, and what counts as a difference."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import performance_page
from benchmarks.many_gpus.__main__ import plan, run, run_all
from benchmarks.many_gpus.collectives import shares
from benchmarks.many_gpus.exactness import DEBUG, OTHER, SAME, Comparison, Run, comparisons_of_bits, line_of
from benchmarks.many_gpus.histories import Differences, hash_of
from benchmarks.many_gpus.lines import append, read
from benchmarks.many_gpus.parts import Part, meshes, parts
from benchmarks.record import record


def test_meshes_have_as_many_ranks_as_there_are() -> None:
    assert meshes(2) == ["1x2x1", "2x1x1", "1x1x2"]
    assert meshes(4) == ["1x4x1", "2x2x1", "1x2x2", "2x1x2"]
    assert meshes(8) == ["1x8x1", "2x4x1", "1x4x2", "2x2x2"]


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_parts_run_on_the_gpus_there_are_and_have_names_of_their_own(num_gpus: int) -> None:
    found = parts(num_gpus)
    assert len({part.name for part in found}) == len(found)
    assert max(part.num_ranks for part in found) == num_gpus


def test_two_gpus_are_done_within_nine_minutes() -> None:
    """All but 8B with a few layers, which is measured as a job."""
    *fitting, last = parts(2)
    assert sum(part.estimate_s for part in fitting) <= 540
    assert last.name == "steps, 8B, 2"
    assert {part.kind for part in fitting} == {"exactness", "collectives", "steps", "speed"}
    assert [line.endswith("no time left |") for line in plan(parts(2), 540).splitlines()[2:]] == [False] * 8 + [True]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_part_that_fails_or_hangs_does_not_end_the_others(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run(python("print('told')"), {}, log, 60) == "done"
    assert log.read_text() == "told\n"
    assert run(python("raise ValueError"), {}, log, 60) == "failed"
    assert run(python("import time; time.sleep(600)"), {}, log, 0.2) == "stopped at its limit"


def test_a_part_without_time_left_is_told_and_not_begun(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    run_all([Part("steps", "steps, 1B, 2", 2, (), 60)], out, 0.0, on_cpu=True)
    (line,) = read(out)
    assert (line["part"], line["status"]) == ("steps, 1B, 2", "no time left")
    assert not list(tmp_path.glob("*.log"))


def test_shares_are_uneven_by_turns_and_aligned() -> None:
    assert shares(4000, 4, is_even=True) == [1000] * 4
    assert shares(4000, 4, is_even=False) == [800, 1200, 800, 1200]
    assert all(size % 8 == 0 for size in shares(4001, 3, is_even=False))


def test_a_hash_sees_every_bit_and_where_it_lies() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    same = hash_of(tensor)
    assert hash_of(tensor.clone().view(10, 100)) == same
    assert hash_of(tensor.flip(0)) != same
    bits = tensor.view(torch.int32)
    for bit in range(32):
        changed = bits.clone()
        changed[7] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert hash_of(changed.view(torch.float32)) != same, bit
    swapped = tensor.clone()
    swapped[[3, 4]] = tensor[[4, 3]]
    assert hash_of(swapped) != same


def test_hashes_in_chunks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = hash_of(tensor)
    monkeypatch.setattr("benchmarks.many_gpus.histories._CHUNK", 64)
    assert hash_of(tensor) == whole


def comparison(wanted: str) -> Comparison:
    run = Run(DEBUG, (1, 2, 1), "float32")
    return Comparison("a = b", run, run, wanted)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_one_bit_or_a_parameter_at_rest_fails_a_comparison() -> None:
    names = ["a", "b"]
    assert line_of(comparison(SAME), Differences(True, names))["passed"]
    assert not line_of(comparison(SAME), Differences(False, names))["passed"]
    one = Differences(True, names, found={3: ["b"]})
    line = line_of(comparison(SAME), one)
    assert (line["passed"], line["first_difference"]) == (False, "step 3: b")
    assert not line_of(comparison(OTHER), one)["passed"]
    every = Differences(True, names, found={1: ["loss", "norm", "a", "b"]})
    assert line_of(comparison(OTHER), every)["passed"]


def test_on_four_ranks_both_axes_communicate_in_every_comparison_but_the_control() -> None:
    for found in comparisons_of_bits(DEBUG, "float32", 4)[:-1]:
        assert found.run.degrees == (2, 2, 1)


def test_the_page_shows_every_result_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance_page, "RESULTS", tmp_path)
    assert performance_page.many_gpus() == "Not measured yet."
    figures = {"broadcasts": {"ms": 0.5, "gb_per_s": 8.0}}
    measured = record("many_gpus.collectives", num_ranks=2, megabytes=8, shares="even", figures=figures)
    part = {"benchmark": "many_gpus", "part": "collectives, 2", "status": "done", "seconds": 20.0, "estimate_s": 25}
    for line in (measured, part | {"command": "python -m benchmarks.many_gpus --out many_gpus_two.jsonl"}):
        append(tmp_path / "many_gpus_two.jsonl", line)
    text = performance_page.many_gpus()
    assert "| 2 | 8 | even | 0.500 (8) |" in text
    assert "| collectives, 2 | done | 20 | 25 |" in text
    assert text.endswith("\n\n    python -m benchmarks.many_gpus --out many_gpus_two.jsonl")
