"""Annotations reach a trace, and where nothing records they do not get in the way."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from dmuon.annotation import annotate, annotated
from dmuon.torch_internals import recorded_events


@annotated(lambda rows, **_: f"dmuon::product of {rows} rows")
def product(rows: int, *, cols: int) -> tuple[int, ...]:
    with annotate("dmuon::inside"):
        return tuple((torch.ones(rows, 2) @ torch.ones(2, cols)).shape)


def test_names_are_recorded_around_what_they_name() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert product(3, cols=4) == (3, 4)
    spans = {event.name: event for event in recorded_events(profiler)}
    outer, inner = spans["dmuon::product of 3 rows"], spans["dmuon::inside"]
    assert outer.begin <= inner.begin <= spans["aten::mm"].begin < inner.end <= outer.end


def test_without_a_profiler_nothing_is_made() -> None:
    assert annotate("dmuon::inside") is annotate("dmuon::other")
    assert product(3, cols=4) == (3, 4)
    assert product.__name__ == "product"
