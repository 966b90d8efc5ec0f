"""A process that is a supervisor to its clients and has no ranks: real sockets, keys, lock and files, scripted answers.

`python scripted_supervisor.py NAME [--adopt PID:STARTED] [--exit CODE] [--new-ports]`. With --adopt it takes over from the one in
the connection file, as a successor does. Requests: `status`, `wait` and `train` answer after `hold_s`; `stop_cluster`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

import ftnb
from ftnb.wire import messages, paths, proc, reaper, records, sockets
from ftnb.wire.once import OnceOnly


class OnlyKey:
    def __init__(self, key: bytes) -> None:
        self.key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.key


def main() -> int:
    name = sys.argv[1]
    directory = paths.make_private_dir(paths.cluster_dir(name))
    me = proc.identify(os.getpid())
    with (directory / "spawned").open("a") as stream:
        stream.write(f"{me.pid}\n")
    if "--exit" in sys.argv:
        return int(sys.argv[sys.argv.index("--exit") + 1])
    adopt = "--adopt" in sys.argv
    if adopt:
        if not (directory / "cluster.json").exists():
            return paths.EXIT_CANNOT_ADOPT
        before = sockets.Connection.load(directory / "connection.json")
        present = proc.ProcessId(before.pid, before.pid_started)
        if sys.argv[sys.argv.index("--adopt") + 1] != f"{present.pid}:{present.started}" and present.is_alive():
            return paths.EXIT_NAME_TAKEN  # another successor
        present.signal(signal.SIGKILL)
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(50 if adopt else 1):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.02)
    else:
        return paths.EXIT_NAME_TAKEN
    token = os.environ.get(records.TOKEN_VARIABLE) or "0123456789abcdef"
    records.ProcessRecords(directory / records.FILE_NAME, token).note(records.SUPERVISOR, me)
    if adopt:
        keys = json.loads((directory / "cluster.json").read_text())
        public, secret = keys["public"].encode(), keys["secret"].encode()
        connection = replace(before, pid=me.pid, pid_started=me.started)
    else:
        public, secret = zmq.curve_keypair()
        peer_public, peer_secret = zmq.curve_keypair()
        paths.write_private(
            directory / "cluster.json", json.dumps({"public": public.decode(), "secret": secret.decode()})
        )
        given = {"name": name, "pid": me.pid, "pid_started": me.started, "host": "127.0.0.1", "client_port": 0,
                 "rank_port": 1, "server_key": public.decode(), "peer_public_key": peer_public.decode(),
                 "peer_secret_key": peer_secret.decode(), "version": ftnb.__version__}  # fmt: skip
        connection = sockets.Connection(**given)
    context = zmq.Context()
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="ftnb", credentials_provider=OnlyKey(connection.peer_public_key.encode()))
    sock = sockets.server_socket(context, zmq.ROUTER, secret, public)
    if adopt and "--new-ports" not in sys.argv:
        sock.bind(connection.url(connection.client_port))
    else:
        connection = replace(connection, client_port=sock.bind_to_random_port("tcp://127.0.0.1"))
    paths.write_private(directory / "connection.json", json.dumps(asdict(connection)))
    serve(sock, directory)
    authenticator.stop()
    context.destroy(linger=100)
    return 0


def serve(sock: zmq.Socket, directory) -> None:
    held: list[tuple[float, bytes, int]] = []
    known = OnceOnly()
    asked = (directory / "asked").open("a", buffering=1)
    while True:
        held.sort()
        timeout_s = 0.5 if not held else max(0.0, min(0.5, held[0][0] - time.monotonic()))
        if sock.poll(int(timeout_s * 1000)):
            sender, *frames = sock.recv_multipart()
            message = messages.decode(frames)
            if not known.is_new(sender, message["id"]):
                if (before := known.answer(sender, message["id"])) is not None:
                    sock.send_multipart([sender, *messages.encode(before)])
                continue
            asked.write(f"{os.getpid()} {message['op']}\n")
            if message["op"] == "stop_cluster":
                (directory / "connection.json").unlink(missing_ok=True)
                (directory / reaper.BEAT_NAME).unlink(missing_ok=True)
                answer(sock, known, sender, message["id"])
                return
            held.append((time.monotonic() + message.get("hold_s", 0.0), sender, message["id"]))
        while held and held[0][0] <= time.monotonic():
            _, sender, number = held.pop(0)
            answer(sock, known, sender, number)


def answer(sock: zmq.Socket, known: OnceOnly, sender: bytes, number: int) -> None:
    result = {"name": sys.argv[1], "supervisor_pid": os.getpid(), "num_ranks": 2, "state": "idle", "ranks": []}
    reply = known.answered(sender, number, {"id": number, "ok": True, "result": result})
    sock.send_multipart([sender, *messages.encode(reply)])


if __name__ == "__main__":
    sys.exit(main())
