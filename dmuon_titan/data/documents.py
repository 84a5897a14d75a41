"""Documents from text files, JSONL files and folders, in pieces of bounded size: files may be larger than memory."""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dmuon_titan.data.progress import Progress
from dmuon_titan.errors import DataError

_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 1 << 20
_PIECE_CHARS = 1 << 14
_JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a document. The pieces up to and including one that ends_document make up the document."""

    text: str
    ends_document: bool


def list_files(inputs: Sequence[Path], include: Sequence[str] = ("*",)) -> list[Path]:
    """The files named, and those under the folders named whose name matches a pattern, sorted, hidden ones left out.

    Raises DataError for an input that does not exist, a pipe or device, or a folder without a matching file.
    """
    files: list[Path] = []
    for given in inputs:
        if not given.is_dir():
            if not given.exists():
                raise DataError(f"{given}: no such file or folder")
            if not given.is_file():
                raise DataError(f"{given}: a pipe or device, but text is read more than once; save it to a file first")
            files.append(given)
            continue
        found = {path for pattern in include for path in given.rglob(pattern) if path.is_file()}
        visible = [p for p in found if not any(part.startswith(".") for part in p.relative_to(given).parts)]
        if not visible:
            raise DataError(f"{given}: no file in this folder matches {' or '.join(include)}")
        files += sorted(visible)
    return files


class DocumentReader:
    """Reads documents one piece at a time.

    A text file is one document. In a JSONL file (.jsonl, .ndjson) every line that is not blank is one document: the
    string under text_key. A byte order mark at the start of a file is no text. Text is otherwise kept as it is.
    """

    def __init__(self, files: Sequence[Path], *, text_key: str = "text", skip_invalid: bool = False) -> None:
        """skip_invalid: leave out lines that are not valid UTF-8, and count them, instead of raising."""
        self.files = files
        self.total_bytes = sum(path.stat().st_size for path in files)
        self.num_skipped_lines = 0
        self._text_key = text_key
        self._skip_invalid = skip_invalid

    def pieces(self, progress: Progress) -> Iterator[Piece]:
        """All documents in order. Raises DataError with file and line for a line that cannot be read."""
        self.num_skipped_lines = 0
        for path in self.files:
            if path.suffix.lower() in _JSONL_SUFFIXES:
                for text in self._jsonl_texts(path, progress):
                    yield from cut([text])
            else:
                yield from cut(self._text_blocks(path, progress))

    def _text_blocks(self, path: Path, progress: Progress) -> Iterator[str]:
        rest, line = b"", 1
        with path.open("rb") as stream:
            _skip_bom(stream)
            while block := stream.read(_BLOCK_BYTES):
                progress.advance(len(block))
                block = rest + block
                end = block.rfind(b"\n") + 1 or _start_of_last_character(block)
                yield self._decode_block(block[:end], path, line)
                line += block.count(b"\n", 0, end)
                rest = block[end:]
        yield self._decode_block(rest, path, line)

    def _decode_block(self, block: bytes, path: Path, line: int) -> str:
        try:
            return block.decode()
        except UnicodeDecodeError:
            lines = [self._decode_line(raw, path, line + i) for i, raw in enumerate(io.BytesIO(block))]
            return "".join(text for text in lines if text is not None)

    def _decode_line(self, raw: bytes, path: Path, line: int) -> str | None:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self._refuse_or_count(path, line, f"byte 0x{raw[error.start]:02x} at column {error.start + 1}")
            return None

    def _jsonl_texts(self, path: Path, progress: Progress) -> Iterator[str]:
        with path.open("rb") as stream:
            _skip_bom(stream)
            for line, raw in enumerate(stream, start=1):
                progress.advance(len(raw))
                decoded = self._decode_line(raw, path, line)
                if decoded is None or not decoded.strip():
                    continue
                text = _text_of(decoded, self._text_key, path, line)
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    # JSON can name half of a surrogate pair, which no UTF-8 can hold.
                    self._refuse_or_count(path, line, f"lone surrogate U+{ord(text[error.start]):04X}")
                else:
                    yield text

    def _refuse_or_count(self, path: Path, line: int, found: str) -> None:
        if not self._skip_invalid:
            raise DataError(
                f"{path}:{line}: invalid UTF-8, {found}; mend or convert the file, "
                "or leave such lines out with --invalid-utf8 skip"
            )
        self.num_skipped_lines += 1


def cut(blocks: Iterable[str]) -> Iterator[Piece]:
    """Cut one document, given in blocks, into pieces that encode to the same ids as the whole.

    BPE as trained here never joins a character with a space after it, so the cut is there. A stretch without any space
    is cut anywhere: its ids can differ from those of the whole, its text cannot.
    """
    held = ""
    for block in blocks:
        held += block
        start = 0
        while len(held) - start > _PIECE_CHARS:
            end = _before_last_spaces(held, start, start + _PIECE_CHARS)
            yield Piece(held[start:end], ends_document=False)
            start = end
        held = held[start:]
    yield Piece(held, ends_document=True)


def _before_last_spaces(text: str, start: int, end: int) -> int:
    at = text.rfind(" ", start, end)
    while at > start and text[at - 1] == " ":
        at -= 1
    return at if at > start else end


def _start_of_last_character(block: bytes) -> int:
    """Where the last, perhaps incomplete, UTF-8 character begins; the end if it begins at 0."""
    at = len(block) - 1
    while at > 0 and block[at] & 0xC0 == 0x80 and len(block) - at < 4:
        at -= 1
    return at or len(block)


def _skip_bom(stream: io.BufferedReader) -> None:
    if stream.peek(3)[:3] == _BOM:
        stream.read(3)


def _text_of(line: str, text_key: str, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{path}:{number}: a JSON object is needed, found {type(record).__name__}")
    if text_key not in record:
        keys = ", ".join(repr(key) for key in list(record)[:8]) or "none"
        raise DataError(f"{path}:{number}: no key {text_key!r}, found {keys}; name the right one with --text-key")
    text = record[text_key]
    if not isinstance(text, str):
        raise DataError(f"{path}:{number}: {text_key!r} must be a string, found {type(text).__name__}")
    return text
