"""Words that come too late, said by hand: whoever has the cluster's keys can play the agent of a rank."""

from __future__ import annotations

import threading
import time
from typing import Any

import zmq

from ftnb.wire import messages, paths, sockets


class Ghost:
    """Speaks as the process `pid`, over connections of its own: of the supervisor's, nobody's is disturbed."""

    def __init__(self, cluster: str, rank: int, pid: int, started: str) -> None:
        self.rank, self.pid, self.started = rank, pid, started
        self._context = zmq.Context()
        connection = sockets.Connection.load(paths.cluster_dir(cluster) / "connection.json")
        # Whose process it is, is read from the number; the names are free as long as no living rank has them.
        self._sockets = [
            sockets.peer_socket(self._context, zmq.DEALER, connection, connection.rank_port, f"{name}-{pid}".encode())
            for name in ("late-agent", "late-work")
        ]

    def say(self, op: str, socket: int = 1, **fields: Any) -> None:
        self._sockets[socket].send_multipart(messages.encode({"op": op, "rank": self.rank, **fields}))

    def hear(self, socket: int, limit_s: float) -> dict[str, Any] | None:
        if not self._sockets[socket].poll(limit_s * 1000):
            return None
        return messages.decode(self._sockets[socket].recv_multipart())

    def close(self) -> None:
        self._context.destroy(linger=0)

    # --- what a rank says

    def hello(self) -> None:
        self.say("hello", 0, key="engine1", pid=self.pid, started=self.started, host="here", python="3")

    def beat(self) -> None:
        """As if it stood in a step that is over long since."""
        self.say(
            "beat", 0, phase="training", step=2, term=1, n=3, at=1.0, place="forward", place_step=2, place_s=1000.0,
            rss_mb=1.0, heard=0, told={},
        )  # fmt: skip

    def all_of(self, generation: int) -> None:
        """Everything that could change what a generation does."""
        now, common = time.time(), {"generation": generation}
        self.say("ready", **common, committed=10**6, in_flight=None, failure=None, anchor=10**6)
        self.say("formed", **common, formed_at=now, restored_at=now)
        for cause in ("user", "collective", "nan", "divergence"):
            error = {"ename": "ValueError", "evalue": "late", "traceback": "late", "digests": {"0": "a"}, "source": True}
            failure = {"cause": cause, "step": 3, "time": now, "error": {**error, "where": "loss", "anchor": 0}}
            self.say("step_failed", **common, failure=failure)
        self.say("held", **common, step=3)
        self.say("hold_answer", hold_id=0, accepted=True, step=3)
        self.say("finished", **common, digest="0" * 64)
        self.say("store", id=1, **common, command="set", key="late", value=b"late")
        self.say("fault_due", fault_id=10**6, step=3)


class Storm:
    """Says all that a generation is told, again and again, until it is over."""

    def __init__(self, ghost: Ghost, generation: int, *, with_hello: bool) -> None:
        self._ghost, self._generation, self._with_hello = ghost, generation, with_hello
        self._over = threading.Event()
        self.rounds = 0
        self._thread = threading.Thread(target=self._rage)

    def _rage(self) -> None:
        while not self._over.wait(0.02):
            if self._with_hello:
                self._ghost.hello()
                self._ghost.beat()
            self._ghost.all_of(self._generation)
            self.rounds += 1

    def __enter__(self) -> Storm:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
