"""Preparing a person's own text: every document survives, and what cannot be read is said with its line."""

import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dmuon_titan.data import documents
from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.documents import DocumentReader, cut
from dmuon_titan.data.manifest import read_manifest, verify
from dmuon_titan.data.preparation import PreparationSettings, prepare
from dmuon_titan.data.progress import Progress
from dmuon_titan.data.shards import TokenStream, read_documents
from dmuon_titan.data.tokenizer import Tokenizer, train_tokenizer
from dmuon_titan.errors import DataError, ExitStatus
from dmuon_titan.tools.prepare import main

LIBRARY_TEXT = Path(json.__file__).read_text() + Path(logging.__file__).read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that keeps all text."""
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    train_tokenizer(LIBRARY_TEXT.splitlines(keepends=True), 400, path)
    return path


@pytest.fixture
def prepared(tmp_path: Path, model: Path) -> Callable[..., Path]:
    """Prepares files with the small model."""

    def run(*files: Path, **settings: object) -> Path:
        folder = tmp_path / "prepared"
        reader = DocumentReader(files, skip_invalid=bool(settings.pop("skip_invalid", False)))
        prepare(reader, folder, PreparationSettings(**{"tokenizer": model, **settings}))  # type: ignore[arg-type]
        return folder

    return run


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def decoded_documents(folder: Path, split: str = "train") -> list[str]:
    """Every document, decoded by the recorded boundaries alone; checks that each has its one separator."""
    manifest = read_manifest(folder)
    assert manifest.boundary is not None
    entry = manifest.splits[split]
    tokens = TokenStream(folder, manifest, entry).read([0], entry.num_tokens)[0].tolist()
    ends = read_documents(folder, entry).tolist()
    assert (ends[0], ends[-1], len(ends)) == (0, entry.num_tokens, entry.num_documents + 1)
    tokenizer = Tokenizer(folder / "tokenizer.model")
    texts = []
    for begin, end in itertools.pairwise(ends):
        document = tokens[begin:end]
        separator = document.pop(-1 if manifest.boundary.token == "eos" else 0)
        assert separator == manifest.boundary.id
        assert manifest.boundary.id not in document
        texts.append(tokenizer.decode(document))
    return texts


@pytest.mark.parametrize("boundary", ["eos", "bos"])
@pytest.mark.parametrize(
    "texts",
    [
        ["", "a", " ", "\n", "b", ""],
        ["", "", ""],
        ["a", "", "", "b c  d"],
        ["\r\n", "</s>", "<s></s>", "", "\t"],
    ],
)
def test_b09_documents_return_by_recorded_boundaries(
    tmp_path: Path, prepared: Callable[..., Path], texts: list[str], boundary: str
) -> None:
    folder = prepared(write_jsonl(tmp_path / "d.jsonl", texts), boundary=boundary, shard_tokens=3)
    assert decoded_documents(folder) == texts
    assert verify(folder).splits["train"].num_documents == len(texts)


ODD_TEXTS = [
    *("a\nb", "a\r\nb", "a  b", " a", "\ufeffa", "a\x00b", "\U0001f600", "x</s>y"),
    *("\u2581", "a\u2581 \u2581\u2581b", "\u2585\u2047", "<0x0A><unk>", "a ", "\t\ta", "\ufb01e\u0301", "\r", " \n \n"),
]


def test_b13_text_returns_character_by_character(tmp_path: Path, model: Path, prepared: Callable[..., Path]) -> None:
    tokenizer = Tokenizer(model)
    for text in ODD_TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_id not in ids
    assert decoded_documents(prepared(write_jsonl(tmp_path / "d.jsonl", ODD_TEXTS))) == ODD_TEXTS


def test_b13_training_on_odd_text_loses_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    train_tokenizer(ODD_TEXTS * 20 + LIBRARY_TEXT.splitlines(keepends=True), 400, path)
    tokenizer = Tokenizer(path)
    assert tokenizer.vocab_size == 400
    assert [tokenizer.decode(tokenizer.encode(text)) for text in ODD_TEXTS] == ODD_TEXTS


def test_b13_model_with_default_settings_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import sentencepiece

    path = tmp_path / "lossy.model"
    with path.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LIBRARY_TEXT.splitlines()), model_writer=stream, vocab_size=400, minloglevel=2
        )
    text = write_jsonl(tmp_path / "d.jsonl", ["a  b"])
    prepare(DocumentReader([text]), tmp_path / "prepared", PreparationSettings(tokenizer=path))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "does not keep all text" in warnings[0]


def test_b13_model_that_keeps_text_does_not_warn(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    Tokenizer(model)
    assert not caplog.records


def test_b13_byte_order_mark_is_stripped_once_at_the_start_of_a_file(
    tmp_path: Path, prepared: Callable[..., Path]
) -> None:
    text, twice, jsonl = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.jsonl"
    text.write_bytes(b"\xef\xbb\xbfa\xef\xbb\xbfb")
    twice.write_bytes(b"\xef\xbb\xbf\xef\xbb\xbfa")
    jsonl.write_bytes(b'\xef\xbb\xbf{"text": "\xef\xbb\xbfa"}\n{"text": "\\ufeffb"}\n')
    assert decoded_documents(prepared(text, twice, jsonl)) == ["a\ufeffb", "\ufeffa", "\ufeffa", "\ufeffb"]


INVALID = [
    ("a.txt", b"one\ntwo\nth\xffree\nfour", 3, "one\ntwo\nfour"),
    ("a.txt", b"\x80\n" + b"x\n" * 5, 1, "x\n" * 5),
    ("a.txt", b"ok\nends early \xe2\x82", 2, "ok\n"),
    ("a.txt", "latin caf\xe9\n".encode("latin-1") + b"ok", 1, "ok"),
    ("a.jsonl", b'{"text": "one"}\n\n{"text": "t\xc3("}\n{"text": "three"}\n', 3, "one|three"),
    ("a.jsonl", b'{"text": "one"}\n{"text": "\\ud83d"}\n', 2, "one"),
]


@pytest.mark.parametrize(("name", "content", "line", "rest"), INVALID)
def test_b13_invalid_utf8_is_an_error_with_its_line_or_a_counted_skip(
    tmp_path: Path, prepared: Callable[..., Path], name: str, content: bytes, line: int, rest: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name}:{line}: invalid UTF-8"):
        prepared(path)
    assert not (tmp_path / "prepared").exists()
    folder = prepared(path, skip_invalid=True)
    assert "|".join(decoded_documents(folder)) == rest
    assert read_manifest(folder).num_skipped_lines == 1


def test_b13_invalid_line_far_into_a_file_is_counted_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_BLOCK_BYTES", 64)
    path = tmp_path / "a.txt"
    lines = ["\u20ac" * 50 + f"{i}\n" for i in range(100)]  # longer than a block, and cut inside of characters
    path.write_text("".join(lines))
    assert read_text(path) == "".join(lines)
    content = path.read_bytes().split(b"\n")
    content[77] = b"\xff"
    path.write_bytes(b"\n".join(content))
    with pytest.raises(DataError, match=r"a\.txt:78: invalid UTF-8, byte 0xff at column 1"):
        read_text(path)


def read_text(path: Path) -> str:
    return "".join(piece.text for piece in DocumentReader([path]).pieces(Progress("reading", 0)))


def test_pieces_of_a_long_document_have_the_ids_of_the_whole(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_PIECE_CHARS", 200)
    tokenizer = Tokenizer(model)
    pieces = list(cut([LIBRARY_TEXT[:5000], LIBRARY_TEXT[5000:]]))
    assert len(pieces) > 300
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [i for piece in pieces for i in tokenizer.encode(piece.text)] == tokenizer.encode(LIBRARY_TEXT)
    for text in ("x" * 1050, " " * 1050, "x" * 150 + " " * 150, "x " * 300):
        assert "".join(piece.text for piece in cut([text])) == text


def test_tokenizer_that_adds_a_space_adds_one_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sentencepiece

    monkeypatch.setattr(documents, "_PIECE_CHARS", 100)
    path = tmp_path / "llama2_like.model"
    with path.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LIBRARY_TEXT.splitlines(keepends=True)),
            model_writer=stream,
            model_type="bpe",
            vocab_size=400,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            minloglevel=2,
        )
    assert Tokenizer(path).adds_prefix
    texts = [LIBRARY_TEXT[:3000], LIBRARY_TEXT[3000:5000]]
    folder = tmp_path / "prepared"
    prepare(DocumentReader([write_jsonl(tmp_path / "d.jsonl", texts)]), folder, PreparationSettings(tokenizer=path))
    assert decoded_documents(folder) == texts


def test_documents_are_held_out_evenly(tmp_path: Path, prepared: Callable[..., Path]) -> None:
    texts = [f"document {i}" for i in range(100)]
    folder = prepared(write_jsonl(tmp_path / "d.jsonl", texts), validation_fraction=0.1)
    held_out = decoded_documents(folder, "validation")
    assert held_out == texts[9::10]
    assert sorted(decoded_documents(folder) + held_out) == sorted(texts)


def test_command_prepares_files_and_folders_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in", tmp_path / "out" / "deep"
    (source / "b").mkdir(parents=True)
    (source / "b" / "z.txt").write_text(LIBRARY_TEXT)
    (source / "a.md").write_text("# Title\n")
    (source / ".hidden.txt").write_text("not this")
    (source / "image.png").write_bytes(b"\x89PNG\xff")
    extra = write_jsonl(tmp_path / "x.jsonl", ["last"], key="content")
    arguments = [str(source), str(extra), "--output", str(output), "--vocab-size", "400", "--text-key", "content"]
    assert main([*arguments, "--include", "*.txt", "--include", "*.md"]) == 0
    assert decoded_documents(output) == ["# Title\n", LIBRARY_TEXT, "last"]
    assert TokenDataset(output, 64).vocab_size == 400
    assert main(["--verify", str(output)]) == 0
    assert {path.name for path in output.parent.iterdir()} == {"deep"}
    (output / "tokens-00000.bin").write_bytes(b"")
    capsys.readouterr()
    assert main(["--verify", str(output)]) == ExitStatus.DATA
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("lines", "arguments", "status", "message"),
    [
        ("x", ["--output", "."], 2, "exists already"),
        ("x", [], 2, "--output are needed"),
        ("x", ["--output", "o", "--validation-fraction", "1"], 2, "--validation-fraction is 1.0, legal is 0 <="),
        ("x", ["--output", "o", "--shard-tokens", "0"], 2, "--shard-tokens is 0, legal is 1 or more"),
        ("x", ["--output", "o", "--vocab-size", "400"], 3, "in.jsonl:1: not JSON"),
        ("[1]", ["--output", "o"], 3, "in.jsonl:1: a JSON object is needed, found list"),
        ('{"body": "x"}', ["--output", "o"], 3, "in.jsonl:1: no key 'text', found 'body'"),
        ('\n{"text": 3}', ["--output", "o"], 3, "in.jsonl:2: 'text' must be a string, found int"),
        ('{"text": "abc"}', ["--output", "o"], 3, "no tokenizer of 32000 pieces can be trained on this text"),
        ('{"text": "abc"}', ["--output", "o", "--vocab-size", "9"], 3, "no tokenizer of 9 pieces"),
        ("", ["--output", "o"], 3, "there is no text"),
        ('{"text": "a"}', ["--output", "o", "--tokenizer", "absent"], 3, "absent: No such file"),
        ('{"text": "a"}', ["--output", "o", "--tokenizer", "in.jsonl"], 3, "not a sentencepiece model"),
        ("x", ["absent", "--output", "o"], 3, "absent: no such file or folder"),
        ("x", [".", "--include", "*.txt", "--output", "o"], 3, "no file in this folder matches *.txt"),
    ],
)
def test_command_refuses_in_one_line_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: str,
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(lines)
    assert main(["in.jsonl", *arguments]) == status
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_peak_memory_does_not_grow_with_the_corpus(tmp_path: Path, model: Path) -> None:
    # As one document without an end, and as many.
    line = json.dumps({"text": LIBRARY_TEXT[:20000]}) + "\n"
    peaks = {}
    for name, content in (("a.txt", LIBRARY_TEXT), ("a.jsonl", line)):
        for num_mb in (2, 12):
            path = tmp_path / name
            path.write_text(content * (num_mb * 1_000_000 // len(content)))
            command = [sys.executable, "-c", PEAK_OF_MAIN, str(path), "--tokenizer", str(model)]
            done = subprocess.run(
                [*command, "--output", str(tmp_path / f"{name}-{num_mb}")], capture_output=True, text=True, check=True
            )
            peaks[name, num_mb] = int(done.stdout.splitlines()[-1])
        assert peaks[name, 12] - peaks[name, 2] < 5_000_000


# Where the kernel tells it, its own mark: getrusage starts a child at the size of its parent.
PEAK_OF_MAIN = r"""
import pathlib, re, resource, sys
from dmuon_titan.tools.prepare import main
assert main(sys.argv[1:]) == 0
status = pathlib.Path("/proc/self/status")
if status.exists():
    print(int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024)
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, model: Path) -> None:
    text = write_jsonl(tmp_path / "d.jsonl", [LIBRARY_TEXT] * 10)
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000));"
        "from dmuon_titan.tools.prepare import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, str(text), "--tokenizer", str(model), "--output", str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == ExitStatus.DATA
    assert "File too large" in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]
