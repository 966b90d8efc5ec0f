"""The socket that ranks talk to: read in batches, sent without waiting, each agent's connection watched.

Read without asyncio's futures: one of them per message costs more than everything that is done with a heartbeat.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from ftnb.supervisor.links import Links
from ftnb.wire import sockets

# So many messages are read in a row before others get their turn.
BATCH = 500
# A rank that is stopped or cut off does not answer for so long before its connection counts as gone. With very many
# ranks these questions and answers are asked less often, or they would cost more than all else.
LINK_INTERVAL_MS, LINK_TIMEOUT_INTERVALS = 100, 4


class RankSocket:
    """`hear(sender, frames)` is called for each message. To be made while the event loop runs."""

    def __init__(
        self, context: zmq.Context, secret_key: bytes, public_key: bytes, num_ranks: int,
        hear: Callable[[bytes, list[bytes]], None],
    ) -> None:
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self.links = Links()
        interval_ms = max(LINK_INTERVAL_MS, num_ranks)
        self._socket = sockets.server_socket(
            zmq.Context.shadow(context.underlying), zmq.ROUTER, secret_key, public_key,
            heartbeat_ms=(interval_ms, LINK_TIMEOUT_INTERVALS * interval_ms),
        )
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._reading = self._will_read = False
        # ZeroMQ tells of messages once (edge-triggered), and also by way of sending: see `_read_soon`.
        for sock in (self._socket, self._monitor):
            self._loop.add_reader(sock.fileno(), self.read)

    def bind(self, host: str, port: int | None) -> int:
        return sockets.bind(self._socket, host, port)

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart(frames)
        self._read_soon()

    def reaches(self, identity: bytes, frames: Sequence[bytes]) -> bool:
        """Send it; whether there is a connection on which it can go, although nothing may have come over it yet."""
        self._socket.router_mandatory = True
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        else:
            return True
        finally:
            self._socket.router_mandatory = False
            self._read_soon()

    def read(self) -> bool:
        """Some of what has come up to now; whether that was all."""
        if self._reading:
            return False
        self._reading = True
        try:
            self._read_monitor()
            all_read = self._read_messages()
        finally:
            self._reading = False
        if all_read:
            self.links.all_read()
        else:
            self._read_soon()
        return all_read

    def read_all(self, limit_s: float) -> bool:
        """All that has come up to now; False when that takes longer."""
        deadline = time.monotonic() + limit_s
        while not self.read():
            if time.monotonic() > deadline:
                return False
        return True

    def close(self, linger_ms: int) -> None:
        for sock in (self._socket, self._monitor):
            self._loop.remove_reader(sock.fileno())
        self._socket.disable_monitor()
        self._socket.close(linger_ms)

    def _read_soon(self) -> None:
        """Sending may have taken note of messages that came, and nobody is told of them again."""
        if not self._will_read and not self._reading:
            self._will_read = True
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._will_read = False
        if not self._socket.closed:
            self.read()

    def _read_monitor(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.links.accepted(event["value"])
            else:
                self.links.disconnected(event["value"], time.monotonic())

    def _read_messages(self) -> bool:
        """Whether all have been read."""
        receive, links, hear = self._socket.recv_multipart, self.links, self._hear
        for _ in range(BATCH):
            try:
                if links.wants_descriptors:
                    parts = receive(zmq.NOBLOCK, copy=False)
                    frames = [part.bytes for part in parts]
                    links.heard(parts[-1].get(zmq.SRCFD), frames[0], time.monotonic())
                else:
                    frames = receive(zmq.NOBLOCK)
            except zmq.Again:
                return True
            hear(frames[0], frames[1:])
        return False
