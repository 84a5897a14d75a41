"""The manifest of a prepared folder: which files hold the tokens, and what each of them must look like.

Imports the standard library only, so that a configuration can be checked against a data set at once.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmuon_titan.errors import DataError

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
PREPARE_COMMAND = "python -m dmuon_titan.tools.prepare"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class FileEntry:
    """A file of the folder, and what it must contain."""

    file: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard(FileEntry):
    """A file of raw little-endian token ids."""

    num_tokens: int


@dataclass(frozen=True)
class Split:
    """One stream of tokens. `documents` holds num_documents + 1 int64 offsets into it, or is absent."""

    num_tokens: int
    num_documents: int
    shards: tuple[Shard, ...]
    documents: FileEntry | None = None


@dataclass(frozen=True)
class Boundary:
    """The separator that every document has exactly once: "eos" after it or "bos" before it."""

    token: str
    id: int


@dataclass(frozen=True)
class Manifest:
    """What a prepared folder holds. Says nothing of times and places: equal data has an equal manifest."""

    vocab_size: int
    token_bytes: int
    splits: dict[str, Split]
    boundary: Boundary | None = None
    tokenizer: FileEntry | None = None
    num_skipped_lines: int = 0
    format_version: int = FORMAT_VERSION

    def files(self) -> Iterator[FileEntry]:
        """Every file the manifest answers for."""
        if self.tokenizer:
            yield self.tokenizer
        for split in self.splits.values():
            yield from split.shards
            if split.documents:
                yield split.documents


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, last of all files: a folder without one counts for nothing."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1, sort_keys=True)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a prepared folder, without looking at the other files.

    Raises DataError if there is none, or if it is not one of this format.
    """
    path = folder / MANIFEST_NAME
    try:
        fields = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder}: not a prepared folder, it has no {MANIFEST_NAME}; "
            f"make one with `{PREPARE_COMMAND} FILE_OR_FOLDER... --output FOLDER`"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); prepare the data again") from None
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: format_version is {version!r}, this program reads {FORMAT_VERSION}; prepare the data again"
        )
    try:
        manifest = _parse(fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a manifest ({error!r}); prepare the data again") from None
    _check_consistent(path, manifest)
    return manifest


def num_windows(folder: Path, manifest: Manifest, split: str, seq_len: int) -> int:
    """Windows of seq_len + 1 tokens, of which neighbours share one, in a split. Raises DataError if there is none."""
    num_tokens = manifest.splits[split].num_tokens if split in manifest.splits else 0
    if num_tokens <= seq_len:
        raise DataError(
            f"{folder}: split {split!r} has {num_tokens} tokens, one window needs {seq_len + 1} "
            f"(seq_len {seq_len} + 1); shorten seq_len or prepare more text with `{PREPARE_COMMAND}`"
            + (" --validation-fraction" if split == "validation" else "")
        )
    return (num_tokens - 1) // seq_len


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Compare the size of every file with the manifest. Raises DataError naming file and byte counts."""
    for entry in manifest.files():
        path = folder / entry.file
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DataError(
                f"{path}: {error.strerror}; {MANIFEST_NAME} lists it with {entry.size_bytes} bytes. "
                "Copy or prepare the data again"
            ) from None
        if found != entry.size_bytes:
            raise DataError(
                f"{path}: {found} bytes found, {MANIFEST_NAME} says {entry.size_bytes}. Copy or prepare the data again"
            )


def verify(folder: Path) -> Manifest:
    """Compare the content of every file with the manifest. Raises DataError naming the first that differs."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    for entry in manifest.files():
        found = sha256_of_file(folder / entry.file)
        if found != entry.sha256:
            raise DataError(
                f"{folder / entry.file}: sha256 {found} found, {MANIFEST_NAME} says {entry.sha256} "
                f"(same size, {entry.size_bytes} bytes). Copy or prepare the data again"
            )
    return manifest


def sha256_of_file(path: Path) -> str:
    """The sha256 of a file in hexadecimal, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _parse(fields: dict[str, Any]) -> Manifest:
    splits = {}
    for name, split in fields["splits"].items():
        documents = split["documents"]
        shards = tuple(Shard(**shard) for shard in split["shards"])
        splits[name] = Split(**{**split, "shards": shards, "documents": documents and FileEntry(**documents)})
    boundary, tokenizer = fields["boundary"], fields["tokenizer"]
    parsed = {
        "splits": splits,
        "boundary": boundary and Boundary(**boundary),
        "tokenizer": tokenizer and FileEntry(**tokenizer),
    }
    return Manifest(**{**fields, **parsed})


def _check_consistent(path: Path, manifest: Manifest) -> None:
    if manifest.token_bytes not in (2, 4):
        raise DataError(f"{path}: token_bytes is {manifest.token_bytes!r}, legal are 2 and 4")
    for name, split in manifest.splits.items():
        for shard in split.shards:
            if shard.size_bytes != shard.num_tokens * manifest.token_bytes:
                raise DataError(
                    f"{path}: {shard.file} has {shard.size_bytes} bytes for {shard.num_tokens} tokens "
                    f"of {manifest.token_bytes} bytes; prepare the data again"
                )
        total = sum(shard.num_tokens for shard in split.shards)
        if total != split.num_tokens:
            raise DataError(
                f"{path}: the shards of split {name!r} hold {total} tokens, num_tokens is {split.num_tokens}; "
                "prepare the data again"
            )
