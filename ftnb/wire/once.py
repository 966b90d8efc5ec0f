"""Requests that are done once, however often they arrive.

An answer can be lost with the connection on which it was sent: ZeroMQ makes a new one when the other side has been
stopped for some seconds. So a client asks again, under the same number, and must not make anything happen twice.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

_KEPT = 256  # answers, of all clients together


class OnceOnly:
    """What a supervisor remembers of the requests of its clients, by sender and number."""

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[bytes, Any], dict[str, Any] | None] = OrderedDict()

    def is_new(self, sender: bytes, number: Any) -> bool:
        """Whether this request is to be done; False when it is being done, or was. One without a number always is."""
        if not number:
            return True
        if (sender, number) in self._answers:
            return False
        self._answers[sender, number] = None
        if len(self._answers) > 2 * _KEPT:  # the oldest go, except those that are still being worked on
            done = [key for key, answer in self._answers.items() if answer is not None]
            for key in done[:-_KEPT]:
                del self._answers[key]
        return True

    def answer(self, sender: bytes, number: Any) -> dict[str, Any] | None:
        """The answer that was given, to be sent again; None while there is none (it will come by itself)."""
        return self._answers.get((sender, number))

    def answered(self, sender: bytes, number: Any, reply: dict[str, Any]) -> dict[str, Any]:
        """Remember `reply`, and return it marked so that the client knows that it may ask again."""
        reply = {**reply, "once": True}
        if number:
            self._answers[sender, number] = reply
        return reply
