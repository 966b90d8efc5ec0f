"""A process that lets a fault of ftnb.rank.faults happen to itself.

    python afflicted.py strike KIND DURATION     (DURATION: seconds, or - for none)
    python afflicted.py cut FD                   obeys commands that come over the Unix socket FD

It imports no torch, so it is there at once. With FTNB_CONNECTION it has a ZeroMQ socket to that supervisor, too.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from ftnb.rank import faults
from ftnb.rank.cut import Cut
from ftnb.rank.orders import Fault
from ftnb.wire import messages, sockets

TICK_S = 0.02


def strike(kind: str, duration: str) -> None:
    """Tick in one thread, and be struck in another; exit with 7 when that is over (a partition is not)."""
    if (path := os.environ.get("FTNB_CONNECTION")) is not None:
        connection = sockets.Connection.load(Path(path))
        context = zmq.Context()
        threading.Thread(target=_beat, args=(context, connection), daemon=True).start()
    threading.Thread(target=_tick, daemon=True).start()
    sys.stdin.readline()
    print("struck", flush=True)
    sys.stdout.write("not flushed")  # by us
    fault = Fault(1, kind, None, None if duration == "-" else float(duration))
    try:
        faults.strike(fault, 0, 12)
    except faults.InjectedFault as error:
        print(f"raised {error}", flush=True)
    print("over", flush=True)
    if kind == "partition":  # that goes on, and so does the process
        time.sleep(1000)
    os._exit(7)


def _tick() -> None:
    for number in range(1_000_000):
        os.write(2, b"%d\n" % number)
        time.sleep(TICK_S)


def _beat(context: zmq.Context, connection: sockets.Connection) -> None:
    sock = sockets.peer_socket(context, zmq.DEALER, connection, connection.rank_port, f"agent-{os.getpid()}".encode())
    while True:
        sock.send_multipart(messages.encode({"op": "beat", "rank": 0}))
        time.sleep(0.1)


class Talk:
    """Numbered lines to the other side, and what comes from there."""

    def __init__(self, sock: socket.socket) -> None:
        self.heard: list[int] = []
        self.sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._say, daemon=True).start()
        threading.Thread(target=self._hear, daemon=True).start()

    def _say(self) -> None:
        for number in range(1_000_000):
            try:
                self.sock.sendall(b"%d\n" % number)
            except OSError:
                return
            time.sleep(TICK_S)

    def _hear(self) -> None:
        with self.sock.makefile("rb") as lines:
            try:
                for line in lines:
                    self.heard.append(int(line))
            except OSError:
                return


def obey(fd: int) -> None:
    """One JSON command a line, one JSON answer for each."""
    cut = Cut()
    talks: list[Talk] = []
    listener = socket.create_server(("127.0.0.1", 0))
    ours = os.open("own-file", os.O_RDWR | os.O_CREAT)
    stream = socket.socket(fileno=fd).makefile("rw")
    for line in stream:
        command = json.loads(line)
        answer: Any = None
        if command["do"] == "connect":
            talks.append(Talk(socket.create_connection(("127.0.0.1", command["port"]))))
        elif command["do"] == "port":
            answer = listener.getsockname()[1]
        elif command["do"] == "accept":
            talks.append(Talk(listener.accept()[0]))
        elif command["do"] == "cut":
            cut.start(command["duration_s"])
        elif command["do"] == "heal":
            cut.heal()
        elif command["do"] == "heard":
            answer = [talk.heard for talk in talks]
        elif command["do"] == "file":
            os.write(ours, b"x")
            answer = os.fstat(ours).st_size
        elif command["do"] == "is on":
            answer = cut.is_on
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


if __name__ == "__main__":
    if sys.argv[1] == "strike":
        strike(*sys.argv[2:])
    else:
        obey(int(sys.argv[2]))
