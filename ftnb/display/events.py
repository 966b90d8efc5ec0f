"""The events of a run as a table in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftnb.display.table import Shown, html_table, text_table

_HEADER = ("time", "event", "rank", "step", "what happened")


def events_table(events: Sequence[Mapping[str, Any]]) -> Shown:
    """Times count from the run's first event."""
    if not events:
        return Shown("No events yet.", "<div>No events yet.</div>")
    began = events[0]["time"]
    rows = [
        [
            f"{event['time'] - began:+.3f} s",
            event["kind"].replace("_", " "),
            event.get("rank"),
            event.get("step"),
            " ".join(str(event.get("reason") or "").split()),
        ]
        for event in events
    ]
    return Shown("\n".join(text_table(_HEADER, rows)), html_table(_HEADER, rows))
