"""Results as JSON lines: each is in the file as soon as it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
