"""The text of `--help`: every key with its meaning, legal values and default."""

from __future__ import annotations

import textwrap

from dmuon_titan.config.schema import KEYS, SECTIONS, Key
from dmuon_titan.config.torchtitan import INERT
from dmuon_titan.config.values import legal, to_toml

_USAGE = """\
usage: ./run_train.sh [--config NAME_OR_PATH] [--section.key VALUE]...

Trains a Llama. The configuration is a TOML file, found by path or by name in train_configs/; without --config it is
that of the variable CONFIG_FILE, else debug_model.toml. The command line wins over the file, the file over the one it
names by base = "other.toml", that one over the defaults below. A boolean flag without a value means true; a list is
written a,b,c. Relative data paths count from the file they are written in (on the command line, from the working
directory), output folders from the working directory, folders of the run from job.dump_folder. ~ and ${VARIABLE} are
replaced. Sections and keys are those of TorchTitan v0.2.2; docs/configuration.md lists the differences.
"""
_WIDTH = 112


def help_text() -> str:
    """What `--help` prints."""
    parts = [_USAGE]
    for name, section in SECTIONS.items():
        parts.append(f"[{name}]  {section.__doc__}")
        parts += [_describe(key) for key in KEYS.values() if key.section == name]
        parts.append("")
    parts.append(_inert_keys())
    return "\n".join(parts)


def _describe(key: Key) -> str:
    default = "none" if key.default is None else to_toml(key.default)
    text = f"{key.doc} ({legal(key)}; default {default})"
    return f"  --{key.name}\n{textwrap.fill(text, _WIDTH, initial_indent=' ' * 8, subsequent_indent=' ' * 8)}"


def _inert_keys() -> str:
    lines = [
        f"  --{name} {' | '.join(map(to_toml, inert.accepted))}  ({inert.reason})" for name, inert in INERT.items()
    ]
    return "\n".join(["Keys of TorchTitan without an effect here, accepted at the values shown:", *lines, ""])
