"""A table, as text and as HTML, and an object that shows itself as either."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any


def show(content: Any) -> None:
    """Display `content` now, wherever in the cell this is: the HTML twin, or the whole text without a browser."""
    from IPython.display import display

    display(content)


class Shown:
    """Something with a text and an HTML twin; the front end takes the one that it can show."""

    def __init__(self, text: str, html: str) -> None:
        self.text = text
        self.html = html

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html

    def bundle(self) -> dict[str, str]:
        return {"text/plain": self.text, "text/html": self.html}


def text_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [list(header), *([cell_text(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join(value.ljust(width) for value, width in zip(row, widths)).rstrip() for row in cells]


def html_table(header: Sequence[str], rows: Sequence[Sequence[Any]], states: int | None = None) -> str:
    """`states`: the column whose words are coloured as states of ranks."""
    head = "".join(f"<th style='{_CELL}'>{escape(name)}</th>" for name in header)
    body = []
    for row in rows:
        cells = []
        for column, value in enumerate(row):
            text = escape(cell_text(value))
            if column == states:
                text = f"<span style='color:{COLOURS.get(text, 'inherit')}'>{text}</span>"
            cells.append(f"<td style='{_CELL}'>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f"<table style='border-collapse:collapse;margin:4px 0'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def cell_text(value: Any) -> str:
    return "–" if value is None else str(value)


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def count(amount: int, noun: str) -> str:
    return f"{amount} {noun}{'' if amount == 1 else 's'}"


def seconds(value: float | None) -> str:
    """A length of time as people read it: 35 ms, 4.2 s, 3 min 20 s, 2 h 5 min."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


_CELL = "text-align:left;padding:1px 14px 1px 0"

_GOOD = "var(--jp-success-color1, #2e7d32)"
_BUSY = "var(--jp-brand-color1, #1976d2)"
_WARN = "var(--jp-warn-color1, #b26a00)"
_BAD = "var(--jp-error-color1, #c62828)"
COLOURS = {
    "starting": _BUSY, "running": _BUSY, "training": _BUSY, "joining": _BUSY, "finished": _GOOD,
    "idle": _GOOD, "spare": _GOOD, "recovering": _WARN, "suspect": _WARN, "paused": _WARN, "stopped": _WARN,
    "failed": _BAD, "fenced": _BAD,
}  # fmt: skip
