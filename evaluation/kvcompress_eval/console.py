"""What commands show and leave behind: tables, bars of what is done, numbers beside a picture."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def counted(console: "Console") -> "Progress":
    """Bars that say how many of how many are done, and since when."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeElapsedColumn(), console=console)


def show_table(console: "Console", title: str, rows: Sequence[Sequence[str]]) -> None:
    """A table; the first row is its heading."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in rows[0]:
        table.add_column(heading, overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table, markup=False)


def save_numbers(picture: Path, record: Mapping[str, Any], console: "Console") -> None:
    """Write a record beside its picture, and say where both are."""
    numbers = picture.with_suffix(".json")
    numbers.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    console.print(f"picture: {picture}   numbers: {numbers}", highlight=False, soft_wrap=True)
