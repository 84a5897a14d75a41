"""A run's figures on the disk: metrics.jsonl and TensorBoard, and what a start that goes on finds of them."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dmuon_titan.disk import sync
from dmuon_titan.errors import CheckpointError

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

VALIDATION_LOSS = "validation_metrics/loss"


def forget_after(dump_folder: Path, step: int) -> None:
    """Drops what metrics.jsonl and traces say of steps after this one: the run that goes on from it makes them anew."""
    for path in (dump_folder / "metrics.jsonl", *sorted(dump_folder.glob("trace/*.jsonl"))):
        if path.exists():
            kept = [line + b"\n" for line in path.read_bytes().split(b"\n") if _is_until(line, step)]
            partial = path.with_name(path.name + ".tmp")
            try:
                partial.write_bytes(b"".join(kept))
                sync(partial)
                os.replace(partial, path)
            except OSError as error:
                partial.unlink(missing_ok=True)
                raise CheckpointError(f"{path} can't be written: {error.strerror}") from None


def _is_until(line: bytes, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, LookupError, TypeError):  # torn, by a job or a machine that died: not text, or no record
        return False


def owes_validation(dump_folder: Path, step: int) -> bool:
    """Whether metrics.jsonl, which ends with this step, has something but not the step's validation."""
    path = dump_folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in reversed(lines):
        record = json.loads(line)
        if record["step"] < step:
            break
        if VALIDATION_LOSS in record:
            return False
    return bool(lines)


class JsonLines:
    """metrics.jsonl: one object a logged step, unrounded."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """One file a start; where it continues a run, TensorBoard forgets what came after that step.

    Written as it comes: tensorboard's own writer has a thread, which says that a disk is full by a traceback, later.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        # Slow to import, and needed on one rank only.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(self.path.open("wb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if start_step:
            begun = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=start_step + 1, session_log=begun))

    def write(self, step: int, values: dict[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()
