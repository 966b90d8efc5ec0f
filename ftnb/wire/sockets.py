"""Encrypted, authenticated sockets (CurveZMQ).

The supervisor's public key proves the supervisor; one key pair, kept in the connection file that only its
owner can read, proves everybody else. Without that pair a stranger on the same machine gets no word in.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq

# ZeroMQ's I/O thread answers these even while Python holds the interpreter lock.
HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 5000
RECONNECT_MS = 20, 200


@dataclass(frozen=True)
class Connection:
    """Contents of a connection file: where the supervisor listens, and the keys to be let in."""

    name: str
    pid: int
    pid_started: str
    host: str
    client_port: int
    rank_port: int
    server_key: str
    peer_public_key: str
    peer_secret_key: str
    version: str
    term: int = 1  # counts the supervisors of one cluster; whoever has the highest is in charge

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def load(cls, path: Path) -> Connection:
        """Read the file; raises ValueError or TypeError when it is damaged."""
        connection = cls(**json.loads(path.read_text(encoding="utf-8")))
        ports_ok = all(isinstance(n, int) for n in (connection.client_port, connection.rank_port, connection.term))
        keys = (connection.server_key, connection.peer_public_key, connection.peer_secret_key)
        if not ports_ok or not all(isinstance(key, str) and len(key) == 40 for key in keys):
            raise ValueError("a port or a key is not one")
        return connection

    def url(self, port: int) -> str:
        return f"tcp://{self.host}:{port}"


def server_socket(
    context: zmq.Context, kind: int, secret_key: bytes, public_key: bytes,
    heartbeat_ms: tuple[int, int] = (HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS),
) -> zmq.Socket:
    """`heartbeat_ms`: how often a peer is asked for a sign of life, and how long it may owe the answer."""
    sock = context.socket(kind)
    _common(sock)
    sock.heartbeat_ivl, sock.heartbeat_timeout = heartbeat_ms
    if kind == zmq.ROUTER:
        # A peer that connects again while its old connection still counts (a supervisor that was stopped for some
        # seconds has noticed nothing) would be ignored for ever, and answers to what it had asked be lost.
        sock.router_handover = True
    sock.curve_server = True
    sock.curve_secretkey = secret_key
    sock.curve_publickey = public_key
    sock.zap_domain = b"ftnb"
    return sock


def bind(sock: zmq.Socket, host: str, port: int | None) -> int:
    """Listen on `port` if that is possible, so that those who were connected to a predecessor come by themselves."""
    if port is not None:
        for _ in range(10):
            try:
                sock.bind(f"tcp://{host}:{port}")
                return port
            except zmq.ZMQError:  # the predecessor's socket may take a moment to go
                time.sleep(0.02)
    return sock.bind_to_random_port(f"tcp://{host}")


def peer_socket(context: zmq.Context, kind: int, connection: Connection, port: int, identity: bytes = b""):
    """A socket of `kind` connected to the supervisor's `port`."""
    sock = context.socket(kind)
    _common(sock)
    if identity:
        sock.identity = identity
    sock.curve_serverkey = connection.server_key.encode()
    sock.curve_publickey = connection.peer_public_key.encode()
    sock.curve_secretkey = connection.peer_secret_key.encode()
    # Soon, then less and less often: a supervisor that is back finds its ranks at once, one that is gone costs nothing.
    sock.reconnect_ivl, sock.reconnect_ivl_max = RECONNECT_MS
    sock.connect(connection.url(port))
    return sock


def _common(sock: zmq.Socket) -> None:
    sock.linger = 0
    sock.sndhwm = 0
    sock.rcvhwm = 0
    sock.heartbeat_ivl = HEARTBEAT_INTERVAL_MS
    sock.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
    sock.tcp_keepalive = 1
