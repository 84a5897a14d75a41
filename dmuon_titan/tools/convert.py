"""Convert between checkpoints and Hugging Face folders: `python -m dmuon_titan.tools.convert to-hf|from-hf ...`."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from dmuon_titan.checkpoint.folder import scan
from dmuon_titan.checkpoint.manifest import DCP, Manifest, missing_or_short, read_manifest, store
from dmuon_titan.checkpoint.manifest import NAME as MANIFEST
from dmuon_titan.data.tokenizer import Tokenizer
from dmuon_titan.disk import sync, why_not_writable
from dmuon_titan.errors import CheckpointError, ConfigError, ExitStatus, TitanError
from dmuon_titan.hugging_face import export, read_size
from dmuon_titan.hugging_face.files import COMPANIONS, DTYPES
from dmuon_titan.hugging_face.importing import import_folder
from models.llama.sizes import LlamaSize, size_from_dict

_PROGRAM = "python -m dmuon_titan.tools.convert"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_UNIT_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_NUM_READERS = 8


def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit status: 0, 2 for wrong arguments, 3 for a wrong tokenizer, 4 for a wrong
    checkpoint or folder, and for one that can't be read or written."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.convert(arguments)
    except TitanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        print(f"error: {error.filename or arguments.output}: {error.strerror}", file=sys.stderr)
        return ExitStatus.CHECKPOINT
    return ExitStatus.FINISHED


def _to_hf(arguments: argparse.Namespace) -> None:
    checkpoint, max_file_bytes = arguments.source, _num_bytes(arguments.max_file_size)
    with _appearing(arguments.output) as folder:
        tokenizer = Tokenizer(arguments.tokenizer) if arguments.tokenizer else None
        manifest = _manifest(checkpoint)
        size = _size(checkpoint, manifest)
        _check_contents(checkpoint, manifest)
        _copy_companions(checkpoint, folder)
        if tokenizer:
            shutil.copyfile(arguments.tokenizer, folder / "tokenizer.model")
        export(
            checkpoint,
            folder,
            size,
            dtype=_DTYPES[arguments.dtype],
            max_file_bytes=max_file_bytes,
            bos_id=tokenizer.bos_id if tokenizer else None,
            eos_id=tokenizer.eos_id if tokenizer else None,
        )
    print(f"{arguments.output}: {size.num_parameters():,} parameters in {arguments.dtype}, of step {manifest.step}")


def _from_hf(arguments: argparse.Namespace) -> None:
    with _appearing(arguments.output) as folder:
        size = read_size(arguments.source)
        _copy_companions(arguments.source, folder)
        import_folder(arguments.source, folder)
    print(
        f"{arguments.output}: {size.num_parameters():,} parameters in float32; to train from them: "
        f"--checkpoint.initial_load_path {arguments.output.resolve()}"
    )


@contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `output` by one rename at the end, and vanishes after a mistake.

    Raises:
        ConfigError: `output` is there already, or another conversion has left or is writing its folder.
        CheckpointError: `output` can't be written.
    """
    if output.exists():
        raise ConfigError(f"{output}: exists already; name another folder or delete this one")
    folder = output.with_name(output.name + ".tmp")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder}: a conversion is writing it or was cut off there; if so, delete it") from None
    except OSError as error:
        raise CheckpointError(f"{output} can't be written: {error.strerror}; name another folder") from None
    try:
        yield folder
        sync(folder)
        folder.rename(output)
    except BaseException as error:
        # Asked before what is there makes room: torch's writer says "unexpected pos" of a full disk.
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime, default=folder / "empty")
        failed = isinstance(error, (OSError, CheckpointError))
        why = why_not_writable(newest) if failed else None
        shutil.rmtree(folder, ignore_errors=True)
        if why is None:
            raise
        raise CheckpointError(f"{output} can't be written: {why}; make room, or name another folder") from None
    sync(output.parent)


def _manifest(checkpoint: Path) -> Manifest:
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: no such folder")
    for folder in (checkpoint, checkpoint / "checkpoint"):  # of all checkpoints, or of the run
        inside = [] if (checkpoint / MANIFEST).exists() else [saved.path.name for saved in scan(folder)[0]]
        if inside:
            raise CheckpointError(
                f"{checkpoint} is no checkpoint, {folder} has {', '.join(inside)}; the newest is {folder / inside[0]}"
            )
    return read_manifest(checkpoint)


def _size(checkpoint: Path, manifest: Manifest) -> LlamaSize:
    if manifest.layout != DCP:
        raise CheckpointError(f"{checkpoint} is of the layout {manifest.layout!r}, legal is {DCP!r}")
    try:
        return size_from_dict(manifest.model)
    except (ValueError, TypeError) as mistake:
        raise CheckpointError(f"the manifest of {checkpoint} has no legal model: {mistake}") from None


def _check_contents(checkpoint: Path, manifest: Manifest) -> None:
    """Reads everything once more: a flipped bit would be a weight that nobody notices."""
    broken = missing_or_short(checkpoint, manifest)
    if broken is None:
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            found = pool.map(lambda name: store(checkpoint / name), manifest.files)
            changed = [name for name, file in zip(manifest.files, found, strict=True) if file != manifest.files[name]]
        if changed:
            broken = f"{changed[0]} has other contents than were saved"
    if broken is not None:
        raise CheckpointError(f"{checkpoint}: {broken}")


def _copy_companions(source: Path, folder: Path) -> None:
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _num_bytes(text: str) -> int:
    found = re.fullmatch(r"([1-9]\d*)([KMG]B|)", text)
    if not found:
        raise ConfigError(f"--max-file-size is {text}, legal is a whole number of KB, MB, GB, or of bytes without unit")
    return int(found[1]) * _UNIT_BYTES[found[2]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="to-hf|from-hf")
    to_hf = commands.add_parser("to-hf", help="make a folder that transformers reads of a checkpoint")
    to_hf.add_argument("source", type=Path, metavar="CHECKPOINT", help="a folder step-N")
    to_hf.add_argument("--dtype", choices=sorted(_DTYPES), default="float32", help="of weights (default: %(default)s)")
    to_hf.add_argument("--max-file-size", default="5GB", metavar="SIZE", help="of one file (default: %(default)s)")
    to_hf.add_argument(
        "--tokenizer", type=Path, metavar="MODEL", help="sentencepiece model, for BOS and EOS; is copied"
    )
    to_hf.set_defaults(convert=_to_hf)
    from_hf = commands.add_parser("from-hf", help="make a checkpoint to start training from of such a folder")
    from_hf.add_argument("source", type=Path, metavar="FOLDER", help="config.json and safetensors of a Llama")
    from_hf.set_defaults(convert=_from_hf)
    for command in (to_hf, from_hf):
        command.add_argument("output", type=Path, metavar="OUTPUT", help="must not exist")
    return parser


if __name__ == "__main__":
    sys.exit(main())
