"""Prepare text for training: `python -m dmuon_titan.tools.prepare FILE_OR_FOLDER... --output FOLDER`."""

import argparse
import logging
import sys
from pathlib import Path

from dmuon_titan.data.documents import DocumentReader, list_files
from dmuon_titan.data.manifest import PREPARE_COMMAND, verify
from dmuon_titan.data.preparation import PreparationSettings, prepare
from dmuon_titan.errors import ConfigError, ExitStatus, TitanError


def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit status: 0, 2 for wrong arguments, 3 for wrong data."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = _parser().parse_args(argv)
    try:
        if arguments.verify:
            manifest = verify(arguments.verify)
            num_bytes = sum(entry.size_bytes for entry in manifest.files())
            print(f"{arguments.verify}: every file is as it was written, {num_bytes} bytes")
        else:
            _prepare(arguments)
    except TitanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    return ExitStatus.FINISHED


def _prepare(arguments: argparse.Namespace) -> None:
    if not arguments.inputs or arguments.output is None:
        raise ConfigError(f"inputs and --output are needed: `{PREPARE_COMMAND} FILE_OR_FOLDER... --output FOLDER`")
    if not 0 <= arguments.validation_fraction < 1:
        raise ConfigError(f"--validation-fraction is {arguments.validation_fraction}, legal is 0 <= fraction < 1")
    for flag in ("vocab_size", "shard_tokens"):
        if getattr(arguments, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} is {getattr(arguments, flag)}, legal is 1 or more")
    output = arguments.output.expanduser()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: exists already; name another folder or delete this one")
    files = list_files([path.expanduser() for path in arguments.inputs], arguments.include or ["*"])
    reader = DocumentReader(files, text_key=arguments.text_key, skip_invalid=arguments.invalid_utf8 == "skip")
    settings = PreparationSettings(
        tokenizer=arguments.tokenizer and arguments.tokenizer.expanduser(),
        vocab_size=arguments.vocab_size,
        boundary=arguments.boundary,
        validation_fraction=arguments.validation_fraction,
        shard_tokens=arguments.shard_tokens,
    )
    prepare(reader, output, settings)
    print(f"to train on it: ./run_train.sh --training.dataset_path {output.resolve()}")


def _parser() -> argparse.ArgumentParser:
    defaults = PreparationSettings()
    parser = argparse.ArgumentParser(prog=PREPARE_COMMAND, description=__doc__)
    add = parser.add_argument
    add("inputs", nargs="*", type=Path, metavar="FILE_OR_FOLDER", help="text, .jsonl, or folders of them")
    add("--output", type=Path, metavar="FOLDER", help="the prepared folder; must not exist, or be empty")
    add("--include", action="append", metavar="GLOB", help="names of files to take from folders (default: all)")
    add("--text-key", default="text", metavar="KEY", help="key of the text in JSONL (default: %(default)s)")
    add("--tokenizer", type=Path, metavar="MODEL", help="a sentencepiece model (default: train one)")
    add("--vocab-size", type=int, default=defaults.vocab_size, metavar="N", help="pieces of the tokenizer to train")
    add("--boundary", choices=("eos", "bos"), default=defaults.boundary, help="EOS after, or BOS before, a document")
    add("--validation-fraction", type=float, default=0.0, metavar="F", help="part of the documents to hold out")
    add("--invalid-utf8", choices=("error", "skip"), default="error", help="what to do with such lines")
    add("--shard-tokens", type=int, default=defaults.shard_tokens, metavar="N", help="tokens in one shard")
    add("--verify", type=Path, metavar="FOLDER", help="only check the files of a prepared folder, by content")
    return parser


if __name__ == "__main__":
    sys.exit(main())
