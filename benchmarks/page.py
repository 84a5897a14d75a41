"""Pages whose tables are made from results: what lies between a table's marks is replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def replace_marked(page: Path, name: str, text: str) -> None:
    """Puts `text` between `<!-- name -->` and the next `<!-- end -->`.

    Raises:
        ValueError: the page has no such marks.
    """
    marked = re.compile(rf"(<!-- {re.escape(name)} -->)\n\n.*?(<!-- end -->)", re.DOTALL)
    whole, count = marked.subn(lambda match: f"{match[1]}\n\n{text}\n\n{match[2]}", page.read_text())
    if count != 1:
        raise ValueError(f"{page} has {count} tables marked {name}: must have one")
    page.write_text(whole)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)
