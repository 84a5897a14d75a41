"""Paths as people write them: ~, ${VARIABLE} and relative ones; and where a configuration is found by name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN_CONFIGS = REPOSITORY / "train_configs"

_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|(\w+))")


def expand(text: str, environ: Mapping[str, str]) -> str:
    """The path with ~, ${VARIABLE} and $VARIABLE replaced.

    Raises:
        ValueError: empty, an undefined variable or an unknown user.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2] or ""
        if name not in environ:
            raise ValueError(f"the environment variable {name} is not set")
        return environ[name]

    text = _VARIABLE.sub(value_of, text)
    if not text:
        raise ValueError("an empty path")
    head, slash, rest = text.partition("/")
    if head == "~" and "HOME" in environ:
        return environ["HOME"] + slash + rest
    text = os.path.expanduser(text)
    if text.startswith("~"):
        raise ValueError(f"there is no user {head[1:]}")
    return text


def absolute(text: str, base: Path, environ: Mapping[str, str]) -> str:
    """The expanded path; a relative one counts from `base`.

    Raises:
        ValueError: see `expand`.
    """
    return os.path.normpath(base / expand(text, environ))


def find_config(text: str, base: Path, environ: Mapping[str, str]) -> Path:
    """A configuration file by path, relative to `base`, or by name in train_configs/, with or without ".toml".

    Raises:
        ValueError: neither exists.
    """
    path = Path(absolute(text, base, environ))
    candidates = [path]
    if os.sep not in text:
        candidates += [TRAIN_CONFIGS / text, TRAIN_CONFIGS / f"{text}.toml"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = ", ".join(sorted(known.stem for known in TRAIN_CONFIGS.glob("*.toml")))
    raise ValueError(f"no file {path}, and no such name in {TRAIN_CONFIGS}: {names}")
