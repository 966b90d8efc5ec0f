"""An agent without an engine: heartbeats over a real connection, as told by a file of the scenario.

    python fake_agent.py CONNECTION_FILE

SIGUSR1: hold the interpreter lock for 3 s, in native code.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import zmq

from ftnb.wire import messages, sockets

HOLD_S = 3.0
BEAT_S = 0.1


def main() -> None:
    connection = sockets.Connection.load(Path(sys.argv[1]))
    sock = sockets.peer_socket(
        zmq.Context(), zmq.DEALER, connection, connection.rank_port, f"agent-{os.getpid()}".encode()
    )
    # PyDLL keeps the lock during the call; ZeroMQ's I/O thread needs none.
    signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).poll(None, 0, int(HOLD_S * 1000)))
    beats, term = 0, 0
    place: tuple[str | None, int | None, float] = (None, None, time.monotonic())

    def tell(op: str, **fields: Any) -> None:
        sock.send_multipart(messages.encode({"op": op, "rank": None, **fields}))

    tell("hello", host="here", key="", pid=os.getpid(), started="")
    next_beat = time.monotonic()
    while True:
        if sock.poll(max(0.0, next_beat - time.monotonic()) * 1000):
            message = messages.decode(sock.recv_multipart())
            term = message.get("term", term)
            if message["op"] == "exit":
                return
            if message["op"] == "stacks":
                tell("stacks", id=message["id"], place=place[0], step=place[1], stack=["File \"x.py\", line 1, in f"])
            if message["op"] == "regroup":
                tell("ready", generation=message["generation"], committed=0, in_flight=None, failure=None)
                place = ("wait", None, time.monotonic())
            if message["op"] == "go":
                tell("formed", generation=message["generation"], formed_at=time.time(), restored_at=time.time())
                place = ("collective", 1, time.monotonic())
            continue
        now = time.monotonic()
        beats, next_beat = beats + 1, max(next_beat + BEAT_S, now)
        tell("beat", phase="idle" if place[0] is None else "training", step=place[1], term=term, n=beats, at=now,
             place=place[0], place_step=place[1], place_s=now - place[2], rss_mb=50.0)  # fmt: skip


if __name__ == "__main__":
    main()
