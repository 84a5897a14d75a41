"""What holds training back: exposed communication, Newton-Schulz, idle time. A page of text beside each trace.

A transfer is exposed while nothing computes beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dmuon.torch_internals import RecordedEvent
from dmuon_titan.profiling.intervals import Interval, difference, intersection, length, union
from dmuon_titan.profiling.work import ADAMW, NEWTON_SCHULZ, PHASE, Labels, work_in

_NUM_GAPS, _NUM_KERNELS = 5, 10
_MS = 1e-6  # of a nanosecond
_NAME_WIDTH = 100


@dataclass(frozen=True)
class Gap:
    """A stretch in which nothing ran: from when in which step, how long, and what the host was doing. Nanoseconds."""

    step: int
    begin: float
    length: float
    where: str


@dataclass(frozen=True)
class Summary:
    """Nanoseconds, of all recorded steps together.

    Attributes:
        device: "GPU" or "CPU".
        steps: the length of each, by the profiler's own count.
        computing, exposed, copies, idle: they make up the steps' time. copies: beside which nothing else runs.
        communication: all and exposed, by kind.
        phases: of the host, and of what the GPU ran for them.
        newton_schulz: by shape of the batch; on a GPU, as `adamw`, what ran there for it.
        gaps: the longest in which nothing ran.
        kernels: time and number of those with the most time; on the CPU of operators, without what they call.
    """

    device: str
    steps: dict[int, float] = field(default_factory=dict)
    computing: float = 0
    exposed: float = 0
    copies: float = 0
    idle: float = 0
    communication: dict[str, tuple[float, float]] = field(default_factory=dict)
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)
    newton_schulz: dict[str, float] = field(default_factory=dict)
    adamw: float = 0
    gaps: list[Gap] = field(default_factory=list)
    kernels: dict[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.steps.values())


def summarize(events: Sequence[RecordedEvent]) -> Summary:
    """Of what a profiler has recorded of whole steps; all zero if there are none."""
    work = work_in(events)
    window = union(work.steps.values())

    def inside(spans: Iterable[Interval]) -> list[Interval]:
        return intersection(union(spans), window)

    computing = inside(work.computing)
    transfers = {kind: inside(spans) for kind, spans in work.transfers.items()}
    communicating = union(span for spans in transfers.values() for span in spans)
    copies = difference(inside(work.copies), union([*computing, *communicating]))
    idle = difference(window, union([*computing, *communicating, *copies]))
    return Summary(
        device=work.device,
        steps={number: end - begin for number, (begin, end) in sorted(work.steps.items())},
        computing=length(computing),
        exposed=length(difference(communicating, computing)),
        copies=length(copies),
        idle=length(idle),
        communication={
            kind: (length(spans), length(difference(spans, computing))) for kind, spans in sorted(transfers.items())
        },
        phases={
            name.removeprefix(PHASE): (length(inside(spans)), length(inside(work.of_phase.get(name, []))))
            for name, spans in work.phases.spans().items()
        },
        newton_schulz={
            name.removeprefix(NEWTON_SCHULZ).strip(): length(inside(spans))
            for name, spans in work.of_label.items()
            if name.startswith(NEWTON_SCHULZ)
        },
        adamw=length(inside(work.of_label.get(ADAMW, []))),
        gaps=[
            _gap(span, work.steps, work.phases, work.labels)
            for span in sorted(idle, key=lambda span: span[0] - span[1])[:_NUM_GAPS]
        ],
        kernels={name: (time, work.num_calls[name]) for name, time in work.time_of.most_common(_NUM_KERNELS)},
    )


def _gap(span: Interval, steps: dict[int, Interval], phases: Labels, labels: Labels) -> Gap:
    step, (begin, _) = max((item for item in steps.items() if item[1][0] <= span[0]), key=lambda item: item[1])
    phase = phases.during(*span).removeprefix(PHASE) or "between phases"
    return Gap(step, span[0] - begin, span[1] - span[0], ", ".join(filter(None, (phase, labels.during(*span)))))


def headline(summary: Summary) -> str:
    """The page in a line."""
    if not summary.steps:
        return "no whole step was recorded"
    share = {name: 100 * time / summary.total for name, time in _parts(summary)}
    parts = ", ".join(f"{name} {percent:.0f} %" for name, percent in share.items())
    return f"{summary.total * _MS / len(summary.steps):.1f} ms a step: {parts}"


def page(summary: Summary, *, first_step: int) -> str:
    """`first_step`: the number of the step that the profiler counts as 0."""
    return "\n".join(_lines(summary, first_step)) + "\n"


def _parts(summary: Summary) -> list[tuple[str, float]]:
    copies = [("copies", summary.copies)] if summary.copies else []
    return [
        ("computing", summary.computing),
        ("exposed communication", summary.exposed),
        *copies,
        ("idle" if summary.device == "GPU" else "neither", summary.idle),
    ]


def _lines(summary: Summary, first_step: int) -> Iterator[str]:
    if not summary.steps:
        yield headline(summary)
        return
    gpu, num_steps = summary.device == "GPU", len(summary.steps)

    def row(name: str, *times: float) -> str:
        return f"  {name:<28}" + "".join(f"{time * _MS / num_steps:12.3f}" for time in times)

    numbers = [first_step + number for number in summary.steps]
    lengths = ", ".join(f"{length * _MS:.1f}" for length in summary.steps.values())
    yield f"steps {numbers[0]} to {numbers[-1]}: {lengths} ms"
    yield "times below are in ms a step"
    yield ""
    yield "what ran on the GPU" if gpu else "what ran (operators compute; Python between them is neither)"
    for name, time in (*_parts(summary), ("together", summary.total)):
        yield f"{row(name, time)}{100 * time / summary.total:8.1f} %"
    yield ""
    yield f"  {'communication':<28}{'total':>12}{'exposed':>12}"
    for kind, (total, exposed) in summary.communication.items():
        yield row(kind, total, exposed)
    yield ""
    yield f"  {'phase':<28}{'host':>12}" + (f"{'GPU':>12}" if gpu else "")
    for name, (host, device) in summary.phases.items():
        yield row(name, host, device) if gpu else row(name, host)
    yield ""
    if summary.newton_schulz:
        yield f"  {'optimizer, by batch':<28}{summary.device:>12}"
        for shape, time in summary.newton_schulz.items():
            yield row(f"Newton-Schulz {shape}", time)
        yield row("Newton-Schulz, all", sum(summary.newton_schulz.values()))
        yield row("AdamW", summary.adamw)
        yield ""
    yield f"longest stretches in which {'the GPU was idle' if gpu else 'neither ran'}, and where the host was"
    for gap in summary.gaps:
        at = f"{gap.length * _MS:.3f} ms at {gap.begin * _MS:.1f} ms of step {first_step + gap.step}"
        yield f"  {at}: {gap.where}"
    yield ""
    yield "kernels" if gpu else "operators, without what they call"
    for name, (time, number) in summary.kernels.items():
        yield f"  {time * _MS / num_steps:10.3f}  {number / num_steps:8.0f} x  {name[:_NAME_WIDTH]}"
