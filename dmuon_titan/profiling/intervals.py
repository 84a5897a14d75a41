"""Arithmetic on intervals of time. What `union` returns, sorted and disjoint, is what the others take and return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

Interval = tuple[float, float]
Label = TypeVar("Label")


def union(spans: Iterable[Interval]) -> list[Interval]:
    """What any of them covers."""
    merged: list[Interval] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def intersection(spans: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What both cover."""
    return list(_intersection(spans, others))


def _intersection(spans: Sequence[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    i = j = 0
    while i < len(spans) and j < len(others):
        begin, end = max(spans[i][0], others[j][0]), min(spans[i][1], others[j][1])
        if begin < end:
            yield begin, end
        if spans[i][1] < others[j][1]:
            i += 1
        else:
            j += 1


def difference(spans: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What `spans` cover and `others` don't."""
    ends = [end for _, end in others]
    begins = [begin for begin, _ in others]
    gaps = list(zip([float("-inf"), *ends], [*begins, float("inf")], strict=True))
    return intersection(spans, gaps)


def length(spans: Iterable[Interval]) -> float:
    """Of disjoint ones together."""
    return sum(end - begin for begin, end in spans)


def innermost(spans: Iterable[tuple[float, float, Label]]) -> list[tuple[float, float, Label]]:
    """Cuts nested spans (begin, end, label) into disjoint ones, each labelled by the shortest span that covers it."""
    pieces: list[tuple[float, float, Label]] = []
    open_spans: list[tuple[float, Label]] = []
    now = float("-inf")

    def close_until(time: float) -> None:
        nonlocal now
        while open_spans and open_spans[-1][0] <= time:
            end, label = open_spans.pop()
            if end > now:
                pieces.append((now, end, label))
                now = end

    for begin, end, label in sorted(spans, key=lambda span: (span[0], -span[1])):
        close_until(begin)
        if open_spans and begin > now:
            pieces.append((now, begin, open_spans[-1][1]))
        now = begin
        open_spans.append((end, label))
    close_until(float("inf"))
    return pieces
