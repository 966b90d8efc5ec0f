"""The training thread's own line to the supervisor.

ZeroMQ sockets belong to one thread each; a socket of its own saves the training thread a hand-over to the
agent thread (and the interpreter lock) in every step.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import zmq

from ftnb.rank.orders import Orders, Superseded
from ftnb.wire import messages, sockets
from ftnb.wire.ring import RingWriter

ASK_AGAIN_S = 1.0
MAX_LOG_CHARS = 20_000  # of one line

__all__ = ["Superseded", "WorkLink"]


class WorkLink:
    """Control messages and store requests over a socket, step reports through shared memory. Training thread only."""

    def __init__(self, context: zmq.Context, agent: Any, orders: Orders) -> None:
        self._agent = agent
        self._orders = orders
        self._ids = itertools.count(1)
        self._owner_pid = os.getpid()
        self._connection = agent.connection
        identity = f"work-{os.getpid()}".encode()
        self._control = sockets.peer_socket(
            context, zmq.DEALER, self._connection, self._connection.rank_port, identity
        )
        self._ring = RingWriter(Path(os.environ["FTNB_RING"]))

    @property
    def rank(self) -> int | None:
        return self._agent.rank

    def _follow(self) -> None:
        """A new supervisor may listen on other ports."""
        before, self._connection = self._connection, self._agent.connection
        if self._connection.rank_port != before.rank_port:
            self._control.disconnect(before.url(before.rank_port))
            self._control.connect(self._connection.url(self._connection.rank_port))

    def tell(self, op: str, **fields: Any) -> None:
        if self._connection is not self._agent.connection:
            self._follow()
        message = {"op": op, "rank": self.rank, **fields}
        self._control.send_multipart(messages.encode(self._agent.sent["work"].numbered(message, time.monotonic())))

    def report(self, record: list[Any]) -> None:
        """One record about a step; see `Supervisor._report` for its fields."""
        self._ring.write(json.dumps(record).encode())

    def log(self, text: str) -> None:
        if os.getpid() == self._owner_pid:  # a forked DataLoader worker has no business here
            cut = "" if len(text) <= MAX_LOG_CHARS else f" … ({len(text) - MAX_LOG_CHARS} more characters cut)"
            self.report(["log", self.rank, time.time(), text[:MAX_LOG_CHARS] + cut])

    def ask_store(self, generation: int, command: str, **args: Any) -> dict[str, Any]:
        """One store request of `generation`; raises `Superseded` as soon as a newer one is wanted.

        Asked again now and then: a request or an answer may be lost with a connection. The store does it only once.
        """
        number, asked = next(self._ids), -math.inf
        while True:
            self._orders.check(generation)
            if time.monotonic() - asked > ASK_AGAIN_S:
                asked = time.monotonic()
                self.tell("store", id=number, generation=generation, command=command, **args)
            if not self._control.poll(20):
                continue
            reply = messages.decode(self._control.recv_multipart())
            if reply.get("id") != number:
                continue  # the answer to a request that was given up
            if not reply.get("ok"):
                raise Superseded(generation)
            return reply

    def close(self) -> None:
        self._control.close(0)
