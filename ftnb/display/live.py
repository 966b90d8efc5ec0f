"""A display that follows something: one output under the cell, renewed at most five times a second.

The work is done by a daemon thread, so that the cell returns at once. Where there is no front end that can
replace an output (a script, IPython in a terminal), nothing is shown behind the user's back.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from ftnb.display.table import Shown
from ftnb.errors import FtnbError

MIN_INTERVAL_S = 0.2
_log = logging.getLogger(__name__)


def has_front_end() -> bool:
    """Whether outputs can be replaced later: true in a notebook kernel only."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class Output:
    """One place under the cell whose content can be replaced; silent without a front end."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._last: Shown | None = None

    def show(self, content: Shown) -> None:
        if self._last is not None and content.bundle() == self._last.bundle():
            return
        first, self._last = self._last is None, content
        if not has_front_end():
            return
        if first:
            from IPython.display import display

            self._handle = display(content.bundle(), raw=True, display_id=True)
        elif self._handle is not None:
            self._handle.update(content.bundle(), raw=True)


class Live:
    """Follow `fetch()` until `ended(...)` says so, showing `render(...)` of what it returned.

    A failing `fetch` is shown in the output (an exception in a thread would land nowhere) and ends it.
    """

    def __init__(
        self,
        fetch: Callable[[], Any],
        render: Callable[[Any], Shown],
        ended: Callable[[Any], bool],
        output: Output | None = None,
        interval_s: float = MIN_INTERVAL_S,
    ) -> None:
        self._fetch, self._render, self._ended = fetch, render, ended
        self._output = output or Output()
        self._interval_s = max(interval_s, MIN_INTERVAL_S)
        self._stop = threading.Event()
        self._last: Any = None
        self._over = False
        self._thread = threading.Thread(target=self._follow, name="ftnb-live", daemon=True)

    def start(self) -> Live:
        """Show the first state now, in the cell that is running, and follow from there."""
        if not self._once():
            self._thread.start()
        return self

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the last state has been shown."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def finish(self) -> None:
        """Show the present state once more, as the last one (or what it is by now, if it has ended)."""
        self._stop.set()
        self.join(2)
        if not self._over:
            self._once()

    def _follow(self) -> None:
        while not self._stop.wait(self._interval_s):
            if self._once():
                return

    def _once(self) -> bool:
        """Show the present state; whether it was the last one."""
        try:
            state = self._fetch()
            content = self._render(state)
            self._over = self._ended(state)
            self._last = state
        except FtnbError as error:
            self._over = True
            content = self._farewell(str(error))
        except Exception as error:  # a bug of ours: it must be seen, and it must not look like training
            _log.exception("the live status has ended")
            self._over = True
            content = self._farewell(f"The live status has ended: {type(error).__name__}: {error}")
        self._output.show(content)
        return self._over

    def _farewell(self, message: str) -> Shown:
        from html import escape

        note = Shown(message, f"<div><i>{escape(message)}</i></div>")
        if self._last is None:
            return note
        last = self._render(self._last)
        return Shown(f"{last.text}\n\n{note.text}", last.html + note.html)


class Terminal:
    """The same in a terminal: redrawn in place, or, when the output goes to a file, a line now and then."""

    def __init__(self, stream: TextIO | None = None, parts: int = 10) -> None:
        self._stream = stream or sys.stdout
        self._redraw = self._stream.isatty()
        self._parts = parts
        self._height = 0
        self._said: Any = None

    def show(self, text: str, share_done: float = 0.0, line: str = "") -> None:
        """`text` where it can be redrawn; else `line`, whenever a further tenth is done or it has changed."""
        if self._redraw:
            up = f"\x1b[{self._height}F\x1b[J" if self._height else ""
            self._stream.write(up + text + "\n")
            self._height = text.count("\n") + 1
        else:
            mark = int(share_done * self._parts + 1e-9)
            if line and mark != self._said:
                self._said = mark
                self._stream.write(line + "\n")
        self._stream.flush()

    def say(self, line: str) -> None:
        """A line that stays, above whatever is drawn next."""
        self._height = 0
        self._stream.write(line + "\n")
        self._stream.flush()
