"""A peer on an encrypted ZeroMQ socket that cuts itself off for a while: python zeromq_peer.py CONNECTION SECONDS

It says a number every 10 ms, and in the end what it has heard.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import zmq

from ftnb.rank.cut import Cut
from ftnb.wire import sockets

connection = sockets.Connection.load(Path(sys.argv[1]))
sock = sockets.peer_socket(zmq.Context(), zmq.DEALER, connection, connection.rank_port, b"peer")
heard: list[int] = []


def say(numbers: range) -> None:
    for number in numbers:
        sock.send_multipart([b"said", b"%d" % number])
        if sock.poll(10):
            heard.append(int(sock.recv()))


def hear(until: int) -> None:
    while len(heard) < until:
        heard.append(int(sock.recv()))


say(range(20))
hear(20)
cut = Cut()
cut.start(float(sys.argv[2]))
say(range(20, 50))
assert len(heard) == 20, "it has heard something in the cut"
while cut.is_on:
    time.sleep(0.01)
say(range(50, 80))
hear(80)
sock.send_multipart([b"end", json.dumps(heard).encode()])
time.sleep(10)
