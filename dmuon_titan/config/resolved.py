"""The resolved configuration as a TOML file that can be loaded again: every value, its source, and the versions."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from dmuon_titan.config.loading import LoadedConfig
from dmuon_titan.config.paths import REPOSITORY
from dmuon_titan.config.schema import KEYS, SECTIONS, JobConfig, get
from dmuon_titan.config.values import to_toml

_PACKAGES = ("torch", "torchdata", "sentencepiece")


def write_resolved(loaded: LoadedConfig, path: Path) -> None:
    """Writes the configuration to `path`, replacing a file there at once, and making its folder.

    Folders inside `job.dump_folder` are written relative to it, so that a copy started with another
    `--job.dump_folder` writes nothing into this run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text("\n".join(_lines(loaded)) + "\n", encoding="utf-8")
    os.replace(partial, path)


def flat(config: JobConfig) -> dict[str, Any]:
    """Every value by its dotted key, as JSON holds them."""
    values = {name: get(config, name) for name in KEYS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python, of the packages that shape a run, and the commit of this repository."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {"commit": _commit()}


def _commit() -> str:
    """The checked-out commit, with "-dirty" after it where files differ; "unknown" outside a checkout."""
    if not (REPOSITORY / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _lines(loaded: LoadedConfig) -> Iterator[str]:
    yield f"# The configuration of this run, resolved from {loaded.config_path}; the comments are the sources."
    yield f"# {', '.join(f'{name} {version}' for name, version in versions().items())}"
    for section in SECTIONS:
        yield f"\n[{section}]"
        for key in KEYS.values():
            if key.section != section:
                continue
            value = get(loaded.config, key.name)
            if key.path == "run":
                value = _inside(value, loaded.config.job.dump_folder)
            yield f"{_assignment(key.leaf, value)}  # {loaded.sources[key.name]}"


def _assignment(leaf: str, value: Any) -> str:
    """TOML has no null: a key that is None is written as a comment."""
    return f"# {leaf} = none" if value is None else f"{leaf} = {to_toml(value)}"


def _inside(folder: str, dump_folder: str) -> str:
    path = Path(folder)
    return str(path.relative_to(dump_folder)) if path.is_relative_to(dump_folder) else folder
