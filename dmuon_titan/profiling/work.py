"""From a profiler's events to what ran when, and for what.

On a GPU kernels say what ran, and each belongs to the annotations around the call that launched it. On the CPU
operators count as computing, and a collective of gloo as a transfer from its issue to its completion.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dmuon.torch_internals import RecordedEvent
from dmuon_titan.profiling.intervals import Interval, difference, innermost, length, union

PHASE, STEP = "titan::", "ProfilerStep#"
NEWTON_SCHULZ, ADAMW = "dmuon::newton_schulz", "dmuon::adamw"
_LABELS = ("dmuon::", "FSDP::")
_NCCL = re.compile("nccl.*?_(AllGather|AllReduce|ReduceScatter|Broadcast|Reduce|SendRecv)")
# A compiled graph is one node of autograd. In other nodes hooks may wait: they don't count as computing.
_COMPUTING = ("aten::", "CompiledFunction")
# What c10d issues: what gloo runs for it, and its name here.
_GLOO = {
    "c10d::broadcast_": ("gloo:broadcast", "broadcast"),
    "c10d::reduce_": ("gloo:reduce", "reduce"),
    "c10d::allreduce_": ("gloo:all_reduce", "all-reduce"),
    "c10d::_reduce_scatter_base_": ("gloo:all_reduce", "reduce-scatter"),
    "c10d::allgather_": ("gloo:all_gather", "all-gather"),
    "c10d::_allgather_base_": ("gloo:all_gather", "all-gather"),
    "c10d::gather_": ("gloo:gather", "gather"),
    "c10d::alltoall_base_": ("gloo:all_to_all", "all-to-all"),
}


class Labels:
    """Annotations, cut so that at every moment of a thread there is the innermost one."""

    def __init__(self, events: Iterable[RecordedEvent]) -> None:
        by_thread: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            by_thread[event.thread].append((event.begin, event.end, event.name))
        self._pieces = {thread: innermost(spans) for thread, spans in by_thread.items()}
        self._begins = {thread: [begin for begin, _, _ in pieces] for thread, pieces in self._pieces.items()}

    def at(self, time: float, thread: int) -> str:
        """Empty where there is none."""
        index = bisect_right(self._begins.get(thread, []), time) - 1
        if index < 0 or self._pieces[thread][index][1] <= time:
            return ""
        return self._pieces[thread][index][2]

    def during(self, begin: float, end: float) -> str:
        """The one that fills most of a span on some thread; empty if none fills half of it."""
        shares: Counter[str] = Counter()
        for name, spans in self.spans().items():
            shares[name] = int(sum(max(0, min(b, end) - max(a, begin)) for a, b in spans))
        name, share = max(shares.items(), key=lambda item: item[1], default=("", 0))
        return name if 2 * share >= end - begin else ""

    def spans(self) -> dict[str, list[Interval]]:
        """By name, on all threads."""
        found: dict[str, list[Interval]] = defaultdict(list)
        for pieces in self._pieces.values():
            for begin, end, name in pieces:
                found[name].append((begin, end))
        return found


@dataclass(frozen=True)
class Work:
    """What ran: spans of time in nanoseconds, in any order.

    Attributes:
        device: "GPU" or "CPU".
        steps: by the profiler's own count.
        phases, labels: of the host. Phases are on one thread and disjoint; labels are all other annotations.
        transfers: by what they are for.
        of_phase, of_label: what the GPU ran for them; on the CPU they are their own time.
        time_of, num_calls: of kernels, or of operators without what they call.
    """

    device: str
    steps: dict[int, Interval]
    phases: Labels
    labels: Labels
    computing: list[Interval] = field(default_factory=list)
    copies: list[Interval] = field(default_factory=list)
    transfers: dict[str, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    of_phase: dict[str, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    of_label: dict[str, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    time_of: Counter[str] = field(default_factory=Counter)
    num_calls: Counter[str] = field(default_factory=Counter)


def is_step(event: RecordedEvent) -> bool:
    """Whether it says where a step of training began and ended on the host."""
    return event.activity == "annotation" and event.name.startswith(STEP)


def work_in(events: Sequence[RecordedEvent]) -> Work:
    annotations = [event for event in events if event.activity == "annotation"]
    steps = filter(is_step, annotations)
    on_gpu = any(event.activity == "kernel" for event in events)
    work = Work(
        "GPU" if on_gpu else "CPU",
        {int(step.name.removeprefix(STEP)): (step.begin, step.end) for step in steps},
        # Backward has a thread of its own, beside the one that says which phase it is.
        Labels(event._replace(thread=0) for event in annotations if event.name.startswith(PHASE)),
        Labels(event for event in annotations if event.name.startswith(_LABELS)),
    )
    if on_gpu:
        _add_gpu_work(work, events)
    else:
        _add_cpu_work(work, events)
    return work


def _add_gpu_work(work: Work, events: Sequence[RecordedEvent]) -> None:
    launches = {event.correlation: event for event in events if event.activity == "launch"}
    for event in events:
        if event.activity not in ("kernel", "copy"):
            continue
        span = (event.begin, event.end)
        launch = launches.get(event.correlation)
        label = work.labels.at(launch.begin, launch.thread) if launch else ""
        if event.activity == "copy":
            work.copies.append(span)
        elif "nccl" in event.name:
            work.transfers[_kind(_nccl_operation(event.name), label)].append(span)
        else:
            work.computing.append(span)
        work.of_label[label].append(span)
        work.of_phase[work.phases.at(launch.begin, 0) if launch else ""].append(span)
        work.time_of[event.name] += event.end - event.begin
        work.num_calls[event.name] += 1


def _add_cpu_work(work: Work, events: Sequence[RecordedEvent]) -> None:
    operators: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.activity == "operator" and event.name.startswith(_COMPUTING):
            operators[event.thread].append((event.begin, event.end, event.name))
            work.num_calls[event.name] += 1
    for calls in operators.values():
        for begin, end, name in innermost(calls):
            work.computing.append((begin, end))
            work.time_of[name] += int(end - begin)
    work.of_phase.update(work.phases.spans())
    work.of_label.update(work.labels.spans())
    for kind, span in _gloo_transfers(events, work.labels):
        work.transfers[kind].append(span)
    # What a thread of its own issues, a profiler of this one sees nothing of but the wait.
    seen = union(span for spans in work.transfers.values() for span in spans)
    for name, spans in work.labels.spans().items():
        unseen = difference(union(spans), seen) if name.startswith("dmuon::wait ") else []
        if length(unseen) > 0:
            work.transfers[_kind("", name)] += unseen


def _gloo_transfers(events: Sequence[RecordedEvent], labels: Labels) -> Iterator[tuple[str, Interval]]:
    """(kind, from issue to completion) of each collective: those of one operation begin in the order of issue."""
    issued: dict[str, list[RecordedEvent]] = defaultdict(list)
    run: dict[str, list[RecordedEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.begin):
        if event.name in _GLOO:
            issued[_GLOO[event.name][0]].append(event)
        elif event.name.startswith("gloo:"):
            run[event.name].append(event)
    for name, found in run.items():
        if len(issued[name]) < len(found):  # some were issued past c10d, by functional collectives
            yield from ((name.removeprefix("gloo:").replace("_", "-"), (event.begin, event.end)) for event in found)
            continue
        # The last ones may be under way when the recording ends.
        for issue, event in zip(issued[name], found, strict=False):
            kind = _kind(_GLOO[issue.name][1], labels.at(issue.begin, issue.thread))
            yield kind, (issue.begin, event.end)


def _nccl_operation(kernel: str) -> str:
    """`all-reduce` of `ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)`."""
    found = _NCCL.search(kernel)
    return re.sub("(?<=[a-z])(?=[A-Z])", "-", found[1]).lower() if found else "other"


def _kind(operation: str, label: str) -> str:
    """What a collective is for, as far as the annotation around it says."""
    if label.startswith(NEWTON_SCHULZ):
        return "Newton-Schulz over tp"
    if label.startswith("dmuon::"):
        return label.removeprefix("dmuon::").removeprefix("wait ").split()[0]
    return f"FSDP {operation}" if label.startswith("FSDP::") else operation
