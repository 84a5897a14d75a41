"""From files and the command line to one configuration, with the source of every value and all mistakes at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from dmuon_titan.config import torchtitan
from dmuon_titan.config.paths import absolute, find_config
from dmuon_titan.config.schema import KEYS, SECTIONS, JobConfig, Key, build
from dmuon_titan.config.suggestions import explain_unknown_key, explain_unknown_section, meant_keys, meant_section
from dmuon_titan.config.values import from_text, from_toml, to_toml
from dmuon_titan.errors import ConfigError, DataError

DEFAULT_CONFIG = "debug_model"
_CONFIG_FLAGS = ("config", "job.config_file")


# Finds mistakes in a configuration, one line each.
Check = Callable[[JobConfig], Iterable[str]]


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and where it came from.

    sources: for each dotted key "default", "file <absolute path>" or "command line".
    config_path: the file that was loaded; its base, if it has one, shows in the sources.
    notes: lines worth logging, each about a value that has no effect.
    """

    config: JobConfig
    sources: dict[str, str]
    config_path: Path
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Origin:
    """Where a value is written, and the folder that its relative data paths count from."""

    source: str
    folder: Path

    @property
    def is_text(self) -> bool:
        return self.source == "command line"

    def __str__(self) -> str:
        return "on the command line" if self.is_text else f"in {self.source.removeprefix('file ')}"


@dataclass
class _Merge:
    """Values and sources so far, later assignments over earlier ones, and every mistake on the way.

    unread: keys whose values aren't known for a mistake; no further mistake is to be derived from their defaults.
    """

    cwd: Path
    environ: Mapping[str, str]
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def assign(self, name: str, written: Any, origin: _Origin) -> None:
        """Takes one written value, or notes what is wrong with it. `written` None is a flag without a value."""
        value = written if origin.is_text else to_toml(written)
        shown = f"{name} = {value} ({origin})" if value is not None else f"{name} ({origin})"
        try:
            if name in KEYS:
                self.unread.add(name)
                self.values[name] = self._read(KEYS[name], written, origin)
                self.sources[name] = origin.source
                self.unread.discard(name)
            elif name in torchtitan.INERT:
                self._read_inert(name, written, origin, shown)
            elif name in torchtitan.RENAMED:
                self.unread.add(torchtitan.RENAMED[name])
                raise ValueError(f"renamed to {torchtitan.RENAMED[name]}")
            elif name in torchtitan.REFUSED:
                raise ValueError(torchtitan.REFUSED[name])
            else:
                self.unread.update(meant_keys(name))
                raise ValueError(explain_unknown_key(name))
        except ValueError as mistake:
            self.mistakes.append(f"{shown}: {mistake}")

    def _read(self, key: Key, written: Any, origin: _Origin) -> Any:
        if not origin.is_text:
            value = from_toml(key, written)
        elif written is None and key.type is not bool:
            raise ValueError("needs a value")
        else:
            value = from_text(key, "true" if written is None else written)
        if value is not None and key.path in ("data", "output"):
            value = absolute(value, origin.folder if key.path == "data" else self.cwd, self.environ)
        return value

    def _read_inert(self, name: str, written: Any, origin: _Origin, shown: str) -> None:
        inert = torchtitan.INERT[name]
        neutral = inert.accepted[0]
        value = self._read(Key(name, type(neutral), False, neutral, inert.reason), written, origin)
        if value not in inert.accepted and not inert.any_value:
            legal = " or ".join(map(to_toml, inert.accepted))
            raise ValueError(f"accepted as {legal} only: {inert.reason}")
        if value != neutral:
            self.notes.append(f"{shown}: has no effect: {inert.reason}")

    def finish(self, check: Check | None) -> JobConfig:
        """The configuration, with defaults filled in and every path absolute.

        Raises:
            ConfigError: there were mistakes, or `check` found some; one line each.
        """
        for key in KEYS.values():
            self.sources.setdefault(key.name, "default")
            if key.path == "output":
                self.values.setdefault(key.name, os.path.normpath(self.cwd / key.default))
        for key in KEYS.values():
            if key.path == "run":
                self._place_in_run(key)
        config = build(self.values, self.unread)
        try:
            self.mistakes += check(config) if check is not None else ()
        except DataError as mistake:
            if not self.mistakes:
                raise
            self.mistakes.append(str(mistake))
        if self.mistakes:
            raise ConfigError("\n".join(self.mistakes))
        self._note_keys_without_effect()
        return config

    def _place_in_run(self, key: Key) -> None:
        folder = self.values.get(key.name, key.default)
        try:
            self.values[key.name] = absolute(folder, Path(self.values["job.dump_folder"]), self.environ)
        except ValueError as mistake:
            self.mistakes.append(f'{key.name} = "{folder}" ({self.sources[key.name]}): {mistake}')
            self.unread.add(key.name)

    def _note_keys_without_effect(self) -> None:
        optimizer = self.values.get("optimizer.name", KEYS["optimizer.name"].default)
        idle = [
            key.name
            for key in KEYS.values()
            if key.only_for not in ("", optimizer) and self.sources[key.name] != "default"
        ]
        if idle:
            self.notes.append(f'{", ".join(idle)}: no effect with optimizer.name = "{optimizer}"')
        if "model.hf_assets_path" in self.values:
            self.notes.append("model.hf_assets_path: no effect: the tokenizer comes with the prepared data")


def load_config(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    check: Check | None = None,
) -> LoadedConfig:
    """The configuration that a command line asks for.

    The file is that of `--config NAME_OR_PATH` or `--job.config_file`, else of the variable CONFIG_FILE, else
    train_configs/debug_model.toml. The command line wins over the file, the file over its `base`, that over defaults.

    Args:
        argv: the command line without the program.
        cwd: what output paths and paths on the command line count from; default: the working directory.
        environ: default: os.environ.
        check: finds further mistakes, such as `validate`; they are told together with those of single values. Values
            that are wrong raise UnreadValue when it asks for them.

    Raises:
        ConfigError: the message holds one line for each mistake.
        DataError: raised by `check`, and nothing else was wrong.
    """
    cwd = Path.cwd() if cwd is None else Path(cwd).absolute()
    environ = os.environ if environ is None else environ
    merge = _Merge(cwd, environ)
    flags, config_names = _split_command_line(argv, merge.mistakes)
    path = _choose_file(config_names, merge)
    if path is None:
        merge.unread.update(KEYS)
    else:
        _merge_file(path, merge)
    for name, text in flags:
        merge.assign(name, text, _Origin("command line", cwd))
    config = merge.finish(check)
    assert path is not None, "a missing file is a mistake, which finish() raises"
    return LoadedConfig(config, merge.sources, path, tuple(merge.notes))


def wants_help(argv: Sequence[str]) -> bool:
    """Whether the command line asks for help."""
    return any(argument in ("--help", "-h") for argument in argv)


def _split_command_line(argv: Sequence[str], mistakes: list[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """(key, text) of each flag in order, None for a bare one, and the configurations asked for."""
    flags: list[tuple[str, str | None]] = []
    configs: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            mistakes.append(f"{argument}: unexpected argument; keys are given as --section.key value")
            continue
        name, equals, text = argument[2:].partition("=")
        name = name.replace("-", "_")
        has_value = bool(equals) or (bool(rest) and not rest[0].startswith("--"))
        value = text if equals else rest.pop(0) if has_value else None
        if name not in _CONFIG_FLAGS:
            flags.append((name, value))
        elif value is None:
            mistakes.append(f"--{name}: needs the name or path of a configuration")
        else:
            configs.append(value)
    return flags, configs


def _choose_file(asked: list[str], merge: _Merge) -> Path | None:
    """The file to load; None after a mistake."""
    if len(set(asked)) > 1:
        merge.mistakes.append(f"--config: several configurations, {', '.join(asked)}; give one")
        return None
    from_environment = merge.environ.get("CONFIG_FILE")
    name = asked[0] if asked else from_environment or DEFAULT_CONFIG
    flag = "CONFIG_FILE" if not asked and from_environment else "--config"
    try:
        return find_config(name, merge.cwd, merge.environ)
    except ValueError as mistake:
        merge.mistakes.append(f"{flag} {name}: {mistake}")
        return None


def _merge_file(path: Path, merge: _Merge) -> None:
    """Assigns what the file's base and then the file hold."""
    tables = _read_toml(path, merge)
    base = tables.pop("base", None)
    if base is not None:
        base_tables, base_path = _read_base(base, path, merge)
        _assign_tables(base_tables, base_path, merge)
    _assign_tables(tables, path, merge)


def _read_base(base: Any, path: Path, merge: _Merge) -> tuple[dict[str, Any], Path]:
    shown = f"base = {to_toml(base)} (in {path})"
    try:
        if not isinstance(base, str):
            raise ValueError("is not a string")
        base_path = find_config(base, path.parent, merge.environ)
    except ValueError as mistake:
        merge.mistakes.append(f"{shown}: {mistake}")
        merge.unread.update(KEYS)
        return {}, path
    tables = _read_toml(base_path, merge)
    if tables.pop("base", None) is not None:
        merge.mistakes.append(f"{shown}: that file has a base itself; only one level is allowed")
    return tables, base_path


def _read_toml(path: Path, merge: _Merge) -> dict[str, Any]:
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, not TOML, or a number of too many digits
        merge.mistakes.append(f"{path}: not readable as TOML: {error}")
        merge.unread.update(KEYS)
        return {}


def _assign_tables(tables: dict[str, Any], path: Path, merge: _Merge) -> None:
    origin = _Origin(f"file {path}", path.parent)
    for name, written in _leaves(tables, "", origin, merge):
        merge.assign(name, written, origin)


def _leaves(table: dict[str, Any], prefix: str, origin: _Origin, merge: _Merge) -> Iterator[tuple[str, Any]]:
    """The dotted keys of a file with their values; an unknown section is one mistake, whatever it holds."""
    for part, written in table.items():
        name = prefix + part
        is_section = name in SECTIONS or name in torchtitan.SECTIONS
        if is_section and isinstance(written, dict):
            yield from _leaves(written, f"{name}.", origin, merge)
        elif is_section:
            merge.mistakes.append(f"{name} = {to_toml(written)} ({origin}): is a section: [{name}]")
            merge.unread.update(_keys_of(name))
        elif isinstance(written, dict) and name not in KEYS:
            merge.mistakes.append(f"[{name}] ({origin}): {explain_unknown_section(name)}")
            merge.unread.update(_keys_of(meant_section(name)))
        else:
            yield name, written


def _keys_of(section: str) -> Iterator[str]:
    return (name for name in KEYS if name.startswith(f"{section}."))
