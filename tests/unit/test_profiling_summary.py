"""What a page beside a trace says, on events whose sums are known: overlaps, nesting, threads, streams, nothing."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from benchmarks.step_time import but_the_last_step
from dmuon.torch_internals import RecordedEvent, profiler_is_running
from dmuon_titan.config.schema import Profiling
from dmuon_titan.profiling.intervals import difference, innermost, intersection, length, union
from dmuon_titan.profiling.profiler import Profiler, recording_begins_or_ends
from dmuon_titan.profiling.summary import headline, page, summarize

MS = 1_000_000
TRAINING, BACKWARD, COMPUTE, NCCL = 11, 12, 7, 20  # two threads of the host, two streams of the GPU


def event(activity: str, name: str, begin: float, end: float, thread: int = TRAINING, number: int = 0) -> RecordedEvent:
    """Begin and end in milliseconds."""
    return RecordedEvent(activity, name, int(begin * MS), int(end * MS), thread, number)


def note(name: str, begin: float, end: float, thread: int = TRAINING) -> RecordedEvent:
    return event("annotation", name, begin, end, thread)


def launched(
    name: str, at: float, begin: float, end: float, *, thread: int = TRAINING, kind: str = "kernel"
) -> list[RecordedEvent]:
    """A kernel, or a copy, and the call that launches it."""
    number = random.randrange(1 << 60)
    stream = NCCL if name.startswith("nccl") else COMPUTE
    return [
        event("launch", "cudaLaunchKernel", at, at + 0.01, thread, number),
        event(kind, name, begin, end, stream, number),
    ]


BROADCAST = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_Reduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

GPU_STEP = [
    note("ProfilerStep#4", 100, 200),
    note("titan::forward", 102, 110),
    note("dmuon::unshard layers.0", 103, 104),
    *launched(BROADCAST, 103.5, 105, 125),  # beside the product from 115 on
    *launched("gemm", 108, 115, 130),
    note("FSDP::all_gather (layers.0)", 105, 106),
    *launched(ALL_GATHER, 105.5, 120, 127),  # hidden
    note("titan::backward", 110, 150),
    note("dmuon::reduce layers.0", 120, 121, BACKWARD),
    *launched(REDUCE, 120.5, 130, 140, thread=BACKWARD),  # exposed from 135 on
    *launched("gemm", 121.5, 130, 135, thread=BACKWARD),
    note("dmuon::wait reduce layers.0", 141, 149, BACKWARD),
    note("titan::clip", 150, 152),
    *launched(ALL_REDUCE, 151, 152, 153),
    *launched("Memcpy HtoD", 151.5, 153, 154, kind="copy"),
    note("titan::optimizer", 160, 170),
    note("dmuon::newton_schulz 6x64x128", 160, 165),
    *launched("gemm", 161, 162, 170),
    *launched("gemm", 162, 170, 172),
    note("dmuon::adamw", 166, 167),
    *launched("adam", 166.5, 172, 173),
    *launched("of the step after", 199, 200, 210),
]


def test_the_time_of_a_gpu_is_all_accounted_for() -> None:
    summary = summarize(GPU_STEP)
    assert (summary.device, summary.steps) == ("GPU", {4: 100 * MS})
    assert summary.computing == (15 + 5 + 10 + 1) * MS
    assert summary.exposed == (10 + 5 + 1) * MS
    assert summary.copies == 1 * MS
    assert summary.computing + summary.exposed + summary.copies + summary.idle == 100 * MS


def test_each_transfer_is_counted_as_what_it_is_for() -> None:
    """Also one that the thread of the backward issues, while another thread says that this is the backward."""
    assert summarize(GPU_STEP).communication == {
        "unshard": (20 * MS, 10 * MS),
        "FSDP all-gather": (7 * MS, 0),
        "reduce": (10 * MS, 5 * MS),
        "all-reduce": (1 * MS, 1 * MS),
    }


def test_phases_of_host_and_gpu() -> None:
    summary = summarize(GPU_STEP)
    assert summary.phases["forward"] == (8 * MS, 25 * MS)  # with what it sends
    assert summary.phases["backward"] == (40 * MS, 10 * MS)
    assert summary.phases["optimizer"] == (10 * MS, 11 * MS)
    assert summary.newton_schulz == {"6x64x128": 10 * MS}
    assert summary.adamw == 1 * MS


def test_idle_stretches_name_what_the_host_did() -> None:
    gaps = [(gap.begin / MS, gap.length / MS, gap.where) for gap in summarize(GPU_STEP).gaps]
    assert gaps == [
        (73, 27, "between phases"),
        (40, 12, "backward, dmuon::wait reduce layers.0"),
        (54, 8, "between phases"),
        (0, 5, "forward"),
    ]


def test_a_page_has_every_number_by_step() -> None:
    step = GPU_STEP[:-2]
    again = [e._replace(begin=e.begin + 100 * MS, end=e.end + 100 * MS, correlation=-e.correlation) for e in step]
    events = [*step, *(e._replace(name=e.name.replace("#4", "#5")) for e in again)]
    summary = summarize(events)
    text = page(summary, first_step=11)
    assert text.startswith("steps 15 to 16: 100.0, 100.0 ms\n")
    for row in ("unshard 20.000 10.000", "optimizer 10.000 11.000", "Newton-Schulz 6x64x128 10.000", "AdamW 1.000"):
        assert row in [" ".join(line.split()) for line in text.splitlines()]
    assert headline(summary).startswith("100.0 ms a step: computing 31 %, exposed communication 16 %")


CPU_STEPS = [
    note("ProfilerStep#0", 0, 50),
    note("ProfilerStep#1", 50, 100),
    note("titan::forward", 1, 40),
    note("dmuon::unshard layers.0", 2, 4),
    event("operator", "c10d::broadcast_", 3, 3.5),
    note("gloo:broadcast", 5, 20, 99),
    event("operator", "aten::linear", 6, 16),
    event("operator", "aten::mm", 7, 15),
    note("dmuon::wait unshard layers.0", 16, 21),
    event("operator", "autograd::engine::evaluate_function: MulBackward0", 50, 90),  # in which a hook waits
    note("titan::backward", 50, 90),
    note("dmuon::wait reduce layers.0", 60, 80),  # issued by a thread that no profiler sees
    note("dmuon::newton_schulz 2x8x8", 90, 95),
    event("operator", "aten::bmm", 90, 94),
]


def test_on_the_cpu_a_transfer_lasts_from_issue_to_completion_and_a_wait_is_one() -> None:
    summary = summarize(CPU_STEPS)
    assert summary.device == "CPU"
    assert summary.communication == {"unshard": (18 * MS, 8 * MS), "reduce": (20 * MS, 20 * MS)}
    assert summary.computing == 14 * MS
    assert summary.exposed == 28 * MS
    assert summary.idle == (100 - 14 - 28) * MS
    assert summary.newton_schulz == {"2x8x8": 5 * MS}
    assert summary.kernels["aten::linear"] == (2 * MS, 1)  # without the product in it
    assert "GPU" not in page(summary, first_step=1)


def test_a_transfer_under_way_at_the_end_takes_nothing_from_the_others() -> None:
    events = [*CPU_STEPS, note("dmuon::publish layers.0", 96, 98), event("operator", "c10d::broadcast_", 97, 97.5)]
    assert summarize(events).communication == summarize(CPU_STEPS).communication


def test_where_more_is_completed_than_issued_an_operation_keeps_its_own_name() -> None:
    summary = summarize([*CPU_STEPS, note("gloo:broadcast", 30, 31, 99)])
    assert summary.communication["broadcast"] == (16 * MS, 6 * MS)


@pytest.mark.parametrize("events", [[], [note("titan::forward", 0, 1)], launched("gemm", 0, 1, 2)])
def test_without_a_whole_step_nothing_is_said(events: list[RecordedEvent]) -> None:
    summary = summarize(events)
    assert summary.total == 0
    assert "no whole step" in page(summary, first_step=1)


def covered(spans: list[tuple[float, float]]) -> set[int]:
    return {unit for begin, end in spans for unit in range(int(begin), int(end))}


def test_intervals_are_sets_of_moments() -> None:
    draw = random.Random(0)
    for _ in range(200):
        raw = [[(b, b + draw.randrange(8)) for b in draw.choices(range(40), k=draw.randrange(8))] for _ in range(2)]
        ours, theirs = map(union, raw)
        assert covered(ours) == covered(raw[0])
        assert length(ours) == len(covered(ours))
        assert covered(intersection(ours, theirs)) == covered(ours) & covered(theirs)
        assert covered(difference(ours, theirs)) == covered(ours) - covered(theirs)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ours))


def test_the_innermost_span_has_the_moment() -> None:
    spans = [(0, 10, "a"), (2, 5, "b"), (3, 4, "c"), (5, 6, "d"), (12, 13, "e"), (12, 13, "f")]
    assert innermost(spans) == [
        *((0, 2, "a"), (2, 3, "b"), (3, 4, "c"), (4, 5, "b"), (5, 6, "d"), (6, 10, "a"), (12, 13, "f"))
    ]
    assert innermost([]) == []


def test_the_edges_of_a_recording_are_where_the_profiler_starts_and_stops() -> None:
    """There a GPU is waited for: what a recorded step launches runs within the recording."""
    edges = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profiler:
        for _ in range(8):
            edges.append(recording_begins_or_ends(profiler))
            profiler.step()
    assert edges == 2 * [False, True, False, True]


def test_nothing_is_on_its_way_where_a_recording_begins_or_ends(tmp_path: Path) -> None:
    """Gloo's threads crash if they see the beginning of a transfer recorded, and its end after the recording."""
    options = Profiling(
        enable_profiling=True,
        save_traces_folder=str(tmp_path),
        profile_freq=3,
        profiler_warmup=1,
        profiler_active=1,
    )
    running: list[bool] = []
    profiler = Profiler(options, torch.device("cpu"), 0, 0, settle=lambda: running.append(profiler_is_running()))
    with profiler.running():
        for _ in range(5):  # up to where the second recording begins
            with torch.profiler.record_function("titan::forward"):
                torch.ones(2).sum()
            profiler.step()
    assert running == [False, True, False, True]
    # Of the second one, in which there is no step, nothing is said.
    assert {path.parent.name for path in tmp_path.glob("step-*/*")} == {"step-3"}


def test_the_last_step_is_left_out_with_what_the_gpu_does_for_it() -> None:
    """The host is a step ahead. On a CPU steps are the host's."""
    events = [
        note("ProfilerStep#0", 0, 10),
        note("titan::forward", 0, 10),
        *launched("a", 1, 2, 30),
        note("ProfilerStep#1", 10, 20),
        note("titan::forward", 10, 20),
        *launched("b", 12, 30, 60),
        *launched(BROADCAST, 13, 35, 70),
        note("ProfilerStep#2", 20, 90),
        note("titan::forward", 20, 90),
        *launched("c", 21, 60, 85),
    ]
    summary = summarize(but_the_last_step(events))
    assert summary.steps == {0: 28 * MS, 1: 30 * MS}
    assert summary.computing == 58 * MS
    assert summary.communication == {"broadcast": (25 * MS, 0)}
    assert summarize(but_the_last_step(CPU_STEPS)).steps == {0: 50 * MS}
