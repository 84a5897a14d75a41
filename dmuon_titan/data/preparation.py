"""From documents to a prepared folder: sample, train a tokenizer, encode, write shards.

Memory does not grow with the text.
"""

import logging
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dmuon_titan.data.cache import staged_folder
from dmuon_titan.data.documents import DocumentReader, Piece
from dmuon_titan.data.manifest import SPLITS, Boundary, FileEntry, Manifest, sha256_of_file, write_manifest
from dmuon_titan.data.progress import Progress
from dmuon_titan.data.shards import SplitWriter, token_bytes_for
from dmuon_titan.data.tokenizer import Tokenizer, train_tokenizer
from dmuon_titan.errors import DataError

logger = logging.getLogger(__name__)

TOKENIZER_NAME = "tokenizer.model"

_SENTENCE_CHARS = 2000
_BATCH_CHARS = 1 << 19


@dataclass(frozen=True)
class PreparationSettings:
    """How text becomes tokens. The same settings and text give the same bytes."""

    tokenizer: Path | None = None
    """A sentencepiece model. None: train one."""
    vocab_size: int = 32000
    """Pieces of a tokenizer to train."""
    sample_bytes: int = 16 << 20
    """A tokenizer is trained on about so much of the text, spread evenly."""
    boundary: str = "eos"
    """Every document gets one separator: "eos" after it, or "bos" before it."""
    validation_fraction: float = 0.0
    """Part of the documents, spread evenly, that is held out of training."""
    shard_tokens: int = 1 << 28
    """Tokens in one shard."""


def prepare(reader: DocumentReader, folder: Path, settings: PreparationSettings) -> Manifest:
    """Write the reader's documents as a prepared folder, which appears complete or not at all.

    Raises DataError for text that cannot be read, a tokenizer that does not fit, or a folder that exists.
    """
    start = time.monotonic()
    try:
        with staged_folder(folder) as partial:
            manifest = _prepare_into(partial, reader, settings)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror or error}") from error
    train, validation = (manifest.splits[name] for name in SPLITS)
    logger.info(
        "%s: %d documents, %d tokens for training and %d documents, %d tokens for validation, in %.1f s",
        folder,
        train.num_documents,
        train.num_tokens,
        validation.num_documents,
        validation.num_tokens,
        time.monotonic() - start,
    )
    if manifest.num_skipped_lines:
        logger.warning("%s: %d lines with invalid UTF-8 were left out", folder, manifest.num_skipped_lines)
    if settings.validation_fraction and not validation.num_documents:
        logger.warning("%s: too few documents to hold any out for validation", folder)
    return manifest


def _prepare_into(folder: Path, reader: DocumentReader, settings: PreparationSettings) -> Manifest:
    model_path = folder / TOKENIZER_NAME
    if settings.tokenizer is None:
        with Progress("sampling text", reader.total_bytes) as progress:
            sentences = list(_sample(reader.pieces(progress), settings.sample_bytes / max(1, reader.total_bytes)))
        logger.info("training a tokenizer of %d pieces on %d samples", settings.vocab_size, len(sentences))
        train_tokenizer(sentences, settings.vocab_size, model_path)
        del sentences
    else:
        shutil.copyfile(settings.tokenizer, model_path)
    tokenizer = Tokenizer(model_path)
    writer = _DocumentWriter(folder, tokenizer, settings)
    with Progress("encoding text", reader.total_bytes) as progress:
        writer.write(reader.pieces(progress))
    if not writer.num_documents:
        raise DataError(
            f"{', '.join(map(str, reader.files[:3]))}: no document in {reader.total_bytes} bytes "
            f"({reader.num_skipped_lines} lines left out for invalid UTF-8); give text"
        )
    manifest = Manifest(
        vocab_size=tokenizer.vocab_size,
        token_bytes=token_bytes_for(tokenizer.vocab_size),
        splits={name: split.close() for name, split in writer.splits.items()},
        boundary=writer.boundary,
        tokenizer=FileEntry(TOKENIZER_NAME, model_path.stat().st_size, sha256_of_file(model_path)),
        num_skipped_lines=reader.num_skipped_lines,
    )
    write_manifest(folder, manifest)
    return manifest


def _sample(pieces: Iterator[Piece], fraction: float) -> Iterator[str]:
    draw = random.Random(0).random
    for piece in pieces:
        for start in range(0, len(piece.text), _SENTENCE_CHARS):
            if draw() < fraction:
                yield piece.text[start : start + _SENTENCE_CHARS]


class _DocumentWriter:
    """Encodes pieces, puts the separators in, and deals the documents out to the splits."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, settings: PreparationSettings) -> None:
        separator = {"eos": tokenizer.eos_id, "bos": tokenizer.bos_id}[settings.boundary]
        if separator is None:
            raise DataError(
                f"{settings.tokenizer}: this tokenizer has no {settings.boundary.upper()} id to separate documents; "
                "choose the other --boundary or another tokenizer"
            )
        self.boundary = Boundary(settings.boundary, separator)
        self.splits = {name: SplitWriter(folder, name, tokenizer.vocab_size, settings.shard_tokens) for name in SPLITS}
        self._tokenizer = tokenizer
        self._validation_fraction = settings.validation_fraction
        self.num_documents = 0
        self._inside = False

    def write(self, pieces: Iterator[Piece]) -> None:
        num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for batch in _batches(pieces):
            texts = self._texts(batch)
            for piece, ids in zip(batch, self._tokenizer.encode_batch(texts, num_threads), strict=True):
                self._add(ids, piece.ends_document)

    def _texts(self, batch: list[Piece]) -> list[str]:
        if not self._tokenizer.adds_prefix:
            return [piece.text for piece in batch]
        # Such a tokenizer puts a space before every text, the one that a piece inside a document begins with.
        inside = [self._inside, *(not piece.ends_document for piece in batch[:-1])]
        return [p.text.removeprefix(" ") if goes_on else p.text for p, goes_on in zip(batch, inside, strict=True)]

    def _add(self, ids: list[int], ends_document: bool) -> None:
        split = self.splits["validation" if self._is_held_out() else "train"]
        if not self._inside and self.boundary.token == "bos":
            ids = [self.boundary.id, *ids]
        if ends_document and self.boundary.token == "eos":
            ids = [*ids, self.boundary.id]
        split.append(np.array(ids, np.int64))
        if ends_document:
            split.end_document()
            self.num_documents += 1
        self._inside = not ends_document

    def _is_held_out(self) -> bool:
        fraction, index = self._validation_fraction, self.num_documents
        return int((index + 1) * fraction) > int(index * fraction)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text) + 1  # so that empty documents fill a batch, too
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch
