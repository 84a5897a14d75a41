"""manifest.json: what a complete checkpoint consists of, and who made it. Imports no torch.

It is written last, when every file lies on the disk, and a folder without it is no checkpoint. The checksums are
CRC-32: they find what disks, networks and interrupted writes do to a file, and cost a seventh of reading it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dmuon_titan.disk import sync
from dmuon_titan.errors import CheckpointError

NAME = "manifest.json"
VERSION = 1
FULL, WEIGHTS_ONLY = "full", "weights-only"  # kinds
DCP, HUGGING_FACE = "torch.distributed.checkpoint", "hugging-face"  # layouts

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class StoredFile:
    """size: bytes. crc32: of the whole file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says.

    kind: FULL, or WEIGHTS_ONLY, from which no run can be continued.
    layout: DCP, or HUGGING_FACE for safetensors with a config.json.
    step: optimizer steps made.
    sequence: counts the saves of a folder: the highest is the newest, also where a run went back to an earlier step.
    files: every file but the manifest, by its name.
    model: name, flavor and the fields of `LlamaSize`.
    config: the configuration that the run had, by dotted key.
    run: what exact repetition depends on beside the configuration: ranks, threads and the like.
    versions: of Python, torch and this program.
    """

    kind: str
    layout: str
    step: int
    sequence: int
    files: Mapping[str, StoredFile]
    model: Mapping[str, Any]
    config: Mapping[str, Any]
    run: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def write(self, folder: Path) -> None:
        """Writes manifest.json so that it is on the disk when this returns. Raises OSError."""
        partial = folder / f"{NAME}.tmp"
        with partial.open("w", encoding="utf-8") as stream:
            json.dump({"version": VERSION, **asdict(self)}, stream, indent=1)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(folder / NAME)
        sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """What a folder's manifest.json says.

    Raises:
        CheckpointError: there is none, it can't be read, or it is of a later version.
    """
    path = folder / NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found.pop("version")
        if version != VERSION:
            raise CheckpointError(f"{path} is of version {version}, this program reads {VERSION}")
        files = {name: StoredFile(**entry) for name, entry in found.pop("files").items()}
        manifest = Manifest(files=files, **found)
        _check_types(manifest)
        return manifest
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {NAME}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None


def _check_types(manifest: Manifest) -> None:
    """Raises ValueError where a value is none that this program writes."""
    legal = {"kind": (FULL, WEIGHTS_ONLY), "layout": (DCP, HUGGING_FACE)}
    for name, values in legal.items():
        if getattr(manifest, name) not in values:
            raise ValueError(f"{name} = {getattr(manifest, name)!r}")
    sizes = [number for file in manifest.files.values() for number in (file.size, file.crc32)]
    if not all(type(number) is int and number >= 0 for number in (manifest.step, manifest.sequence, *sizes)):
        raise ValueError("a step, sequence, size or checksum is no whole number")
    for name in ("model", "config", "run", "versions"):
        if not isinstance(getattr(manifest, name), dict):
            raise ValueError(f"{name} is no table")
    if not manifest.files:
        raise ValueError("it lists no files")


def store(path: Path) -> StoredFile:
    """Size and checksum of a file as it lies there now. Raises OSError."""
    crc32, size = 0, 0
    for chunk in _chunks(path):
        crc32 = zlib.crc32(chunk, crc32)
        size += len(chunk)
    return StoredFile(size, crc32)


def missing_or_short(folder: Path, manifest: Manifest) -> str | None:
    """The first file that is not there in full, and how so; None if all are. Contents are not looked at."""
    for name, stored in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != stored.size:
            return f"{name} has {path.stat().st_size} bytes instead of {stored.size}"
    return None


def _chunks(path: Path) -> Iterator[memoryview]:
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while num_read := stream.readinto(buffer):
            yield view[:num_read]
