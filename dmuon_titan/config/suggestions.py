"""What a person meant by a key or section that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

from dmuon_titan.config.schema import KEYS, SECTIONS

# What a key of the same section is ahead of a key elsewhere with an equally similar name.
_SAME_SECTION = 0.2


def _similarity(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most similar to `name`."""
    return max(known, key=lambda other: _similarity(name, other))


def meant_keys(name: str) -> list[str]:
    """The keys of this last name in other sections; if there are none, the nearest key."""
    section, _, leaf = name.rpartition(".")
    homes = [key.name for key in KEYS.values() if key.leaf == leaf]
    if homes:
        return homes

    def score(candidate: str) -> float:
        key = KEYS[candidate]
        same = _SAME_SECTION if key.section == section else 0.0
        return same + max(_similarity(leaf, alias) for alias in (key.leaf, *key.aliases))

    return [max(KEYS, key=score)]


def explain_unknown_key(name: str) -> str:
    """Why a dotted key is not one, with the key it belongs to or the nearest known one."""
    section, _, leaf = name.rpartition(".")
    meant = meant_keys(name)
    if KEYS[meant[0]].leaf != leaf:
        return f"unknown key; nearest: {meant[0]}"
    where = f"no key of [{section}]" if section else "stands outside every section"
    return f"{where}; {leaf} is a key elsewhere: {', '.join(meant)}"


def meant_section(name: str) -> str:
    """The nearest section."""
    return nearest(name, SECTIONS)


def explain_unknown_section(name: str) -> str:
    """Why a section is not one, with the nearest known one."""
    return f"unknown section; nearest: [{meant_section(name)}]"
