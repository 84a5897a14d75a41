"""One value of one key: its type and range, read from TOML or from the command line, and written back as TOML."""

from __future__ import annotations

import contextlib
import json
import math
import re
from typing import Any

import tomli

from dmuon_titan.config.schema import Key

_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "a section",
}
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")


def to_toml(value: Any) -> str:
    """The value as TOML text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {to_toml(item)}' for name, item in value.items())}}}"
    return str(value)


def legal(key: Key) -> str:
    """Which values the key takes, in words."""
    words = "true, false" if key.type is bool else _KINDS[key.type].partition(" ")[2]
    if key.choices:
        words = ("list of " if key.type is tuple else "") + ", ".join(map(to_toml, key.choices))
    bounds = [
        f"{relation} {bound:g}" if abs(bound) < 1e6 else f"{relation} {bound}"
        for relation, bound in (
            ("at least", key.at_least),
            ("above", key.above),
            ("at most", key.at_most),
            ("below", key.below),
        )
        if bound is not None
    ]
    words = ", ".join([words, *bounds])
    if key.or_value is not None:
        words += f", or {key.or_value}"
    return words


def from_toml(key: Key, value: object) -> Any:
    """The value as the key's type: an integer serves as a number, a list as a tuple, nothing else is converted.

    Raises:
        ValueError: of the wrong type or out of range; the message says what is legal.
    """
    if key.type is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"too large; legal: {legal(key)}") from None
    if key.type is tuple and type(value) is list:
        value = tuple(value)
    if type(value) is not key.type:
        hint = "; write it without quotes" if type(value) is str and key.type in (bool, int, float) else ""
        got = _KINDS.get(type(value), f"a {type(value).__name__}")
        raise ValueError(f"is {got}, not {_KINDS[key.type]}{hint}")
    _check_range(key, value)
    return value


def from_text(key: Key, text: str) -> Any:
    """The value that a command line means by a text, read as the key's type.

    A list is given as TOML or as words between commas; "none" is None where the key knows it.

    Raises:
        ValueError: not of that type or out of range; the message says what is legal.
    """
    if key.optional and text.lower() == "none":
        return None
    value: Any = text
    if key.type is bool and text.lower() in ("true", "false"):
        value = text.lower() == "true"
    elif key.type is int and _INTEGER.fullmatch(text):
        value = int(text)
    elif key.type is float:
        with contextlib.suppress(ValueError):
            value = float(text)
    elif key.type is tuple:
        value = _tuple_from_text(text)
    if type(value) is not key.type:
        raise ValueError(f"is not {_KINDS[key.type]}; legal: {legal(key)}")
    _check_range(key, value)
    return value


def _tuple_from_text(text: str) -> Any:
    if not text.startswith("["):
        return tuple(item.strip() for item in text.split(",") if item.strip())
    try:
        return tuple(tomli.loads(f"value = {text}")["value"])
    except tomli.TOMLDecodeError:
        return text


def _check_range(key: Key, value: Any) -> None:
    if key.type is tuple and not all(type(item) is str for item in value):
        raise ValueError("is not a list of strings")
    if key.choices:
        strangers = [item for item in (value if key.type is tuple else [value]) if item not in key.choices]
        if strangers:
            raise ValueError(f"{to_toml(strangers[0])} is unknown; legal: {legal(key)}")
    if key.type not in (int, float) or value == key.or_value:
        return
    inside = (
        (key.at_least is None or value >= key.at_least)
        and (key.above is None or value > key.above)
        and (key.at_most is None or value <= key.at_most)
        and (key.below is None or value < key.below)
        and (key.infinite or value != math.inf)
    )
    if not inside:
        raise ValueError(f"out of range; legal: {legal(key)}")
