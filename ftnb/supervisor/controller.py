"""ipyparallel's controller: started, asked, and started again with the same ports and keys when it was killed.

It is told by the supervisor when an engine has died. ipyparallel leaves that to the engine's nanny; but the nanny may
be dead, too, and a late word of it would sign off the replacement, which has the same engine id.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from ftnb.errors import ClusterError
from ftnb.wire import paths, proc

log = logging.getLogger("ftnb.controller")

START_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 1.0
# ZeroMQ tries to connect again every 0.1 to 0.2 s; what is sent to an engine before it is there is lost.
RECONNECT_S = 0.5
POLL_S = 0.02
# The hub lets an engine in on its heartbeat tick: a short period makes that quick. Deaths are reported by the
# supervisor, so the number of misses is generous: a busy machine must not cost an engine its registration.
_ARGS = [
    "--HeartMonitor.period=100", "--HeartMonitor.max_heartmonitor_misses=600", "--IPController.enable_curve=True",
    "--IPController.reuse_files=True", "--Session.packer=json", "--Session.unpacker=json",
]

Watch = Callable[[proc.ProcessId, Callable[[int, "int | None"], None]], None]


class Controller:
    """One controller, which may be several processes one after the other, and its registration socket."""

    def __init__(
        self, cluster_id: str, profile_dir: Path, private_dir: Path, environment: dict[str, str], watch: Watch,
        on_exit: Callable[[str], None], args: list[str],
    ) -> None:
        self.cluster_id, self.profile_dir = cluster_id, profile_dir
        self.process: proc.ProcessId | None = None
        self.output = private_dir / "controller.log"
        self._keys = private_dir / "controller-keys.json"
        self._environment, self._watch, self._on_exit, self._args = environment, watch, on_exit, args
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._asking = asyncio.Lock()
        self._being_replaced = False
        self._description: dict[str, Any] = {}

    # --- files

    def file(self, kind: str) -> Path:
        """ipyparallel's connection file for `kind`: "client" or "engine"."""
        return self.profile_dir / "security" / f"ipcontroller-{self.cluster_id}-{kind}.json"

    @property
    def _state_file(self) -> Path:
        return self.profile_dir / "log" / f"engines{self.cluster_id}.json"

    def remove_files(self) -> None:
        for path in (self.file("client"), self.file("engine"), self._state_file, self._keys, self.output):
            path.unlink(missing_ok=True)

    # --- life

    async def start(self) -> None:
        """Start it and wait until engines and clients can connect; raises `ClusterError`."""
        await self._launch([])

    async def restart(self) -> None:
        """Start another in its place; engines and clients that are connected come back by themselves.

        It listens on the same ports (ipyparallel's `reuse_files`), with the same keys, and knows the engines from the
        file in which the old one kept their list (`restore_engines`). ZeroMQ connects again without being asked.
        """
        self._being_replaced = True
        try:
            if self.process is not None:
                # Its children (the schedulers) live on when it is killed alone, and hold the ports.
                deadline = time.monotonic() + START_TIMEOUT_S
                old = self.process
                # Another start time: the pid is another process's by now, and nothing of the session is left.
                while proc.start_time(old.pid) in (None, old.started) and proc.kill_session(old.pid):
                    if time.monotonic() > deadline:
                        raise ClusterError(f"The old controller (pid {old.pid}) cannot be ended.")
                    await asyncio.sleep(POLL_S)
        finally:
            self._being_replaced = False
        await self._launch(["--IPController.restore_engines=True"])
        await asyncio.sleep(RECONNECT_S)

    def adopt(self, process: proc.ProcessId) -> None:
        """Take over a controller that an earlier supervisor has started."""
        self.process = process
        self._watch(process, self._ended)

    async def _launch(self, more_args: list[str]) -> None:
        command = [sys.executable, "-P", "-m", "ipyparallel.controller", *_ARGS, *self._args, *more_args]
        environment = {
            **os.environ, **self._environment, **self._curve_keys(),
            "IPP_CLUSTER_ID": self.cluster_id, "IPP_PROFILE_DIR": str(self.profile_dir),
        }
        for folder in ("", "log", "security", "pid", "startup"):
            (self.profile_dir / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.output, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )
        self.process = proc.identify(child.pid)
        assert self.process is not None

        def on_exit(pid: int, status: int | None) -> None:
            child.returncode = status if status is not None else 0
            self._ended(pid, status)

        self._watch(self.process, on_exit)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (self._read_files() and (not more_args or await self.engine_ids() is not None)):
            if not self.process.is_alive():
                raise ClusterError(f"ipyparallel's controller ended while it was starting.\n{self.last_output()}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"ipyparallel's controller was not ready within {START_TIMEOUT_S:g} s.\n{self.last_output()}"
                )
            await asyncio.sleep(POLL_S)

    def _ended(self, pid: int, status: int | None) -> None:
        if self.process is not None and pid == self.process.pid and not self._being_replaced:
            self._on_exit(proc.describe_exit(status)[1])

    def _curve_keys(self) -> dict[str, str]:
        """The controller's own key pair, kept for a successor: engines and clients know the public half."""
        if not self._keys.exists():
            public, secret = zmq.curve_keypair()
            keys = {"IPP_CURVE_PUBLICKEY": public.decode(), "IPP_CURVE_SECRETKEY": secret.decode()}
            paths.write_private(self._keys, json.dumps(keys))
        return json.loads(self._keys.read_text())

    def _read_files(self) -> bool:
        """Whether both connection files are there and complete."""
        try:
            for kind in ("client", "engine"):
                self._description[kind] = json.loads(self.file(kind).read_text())
        except (OSError, ValueError):  # not written yet, or just being written
            return False
        return True

    def for_engines(self) -> str:
        """What an engine must know to connect, for its environment (IPP_CONNECTION_INFO)."""
        if "engine" not in self._description:
            self._read_files()
        return json.dumps(self._description["engine"])

    def last_output(self, chars: int = 2000) -> str:
        with contextlib.suppress(OSError):
            return self.output.read_text(errors="replace")[-chars:]
        return ""

    # --- questions

    async def engine_ids(self) -> dict[int, str] | None:
        """The engines that the controller knows: {id: uuid}; None when it does not answer."""
        answer = await self._ask("connection_request", {}, "connection_reply")
        return None if answer is None else {int(k): v for k, v in answer["engines"].items()}

    async def sign_off(self, engine_id: int, limit_s: float = 3.0) -> bool:
        """Make the controller forget an engine that has died; whether its id is free then."""
        deadline = time.monotonic() + limit_s
        while True:
            await self._ask("unregistration_request", {"id": engine_id}, None)
            known = await self.engine_ids()
            if known is not None and engine_id not in known:
                return True
            if known is None or time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)

    async def _ask(self, kind: str, content: dict[str, Any], reply: str | None) -> dict[str, Any] | None:
        """Send one message of Jupyter's protocol to the hub; the content of its answer if there is to be one."""
        if self.process is None or not self.process.is_alive() or not (self._description or self._read_files()):
            return None
        async with self._asking:
            sock = self._connect()
            number = uuid.uuid4().hex
            parts = [
                json.dumps(part).encode()
                for part in ({"msg_id": number, "msg_type": kind, "username": "ftnb", "session": self.cluster_id,
                              "date": "1970-01-01T00:00:00Z", "version": "5.3"}, {}, {}, content)
            ]  # fmt: skip
            key = self._description["client"].get("key", "").encode()
            signature = hmac.new(key, b"".join(parts), hashlib.sha256).hexdigest().encode() if key else b""
            await sock.send_multipart([b"<IDS|MSG>", signature, *parts])
            deadline = time.monotonic() + ANSWER_TIMEOUT_S
            while reply is not None and await sock.poll(max(0.0, deadline - time.monotonic()) * 1000):
                frames = await sock.recv_multipart()
                header, parent, _, answer = (json.loads(f) for f in frames[frames.index(b"<IDS|MSG>") + 2 :][:4])
                if parent.get("msg_id") == number:  # else it is the answer to a question that nobody waits for any more
                    return answer if header["msg_type"] == reply else None
        return None

    def _connect(self) -> zmq.asyncio.Socket:
        if self._socket is None:
            about = self._description["client"]
            self._context = zmq.asyncio.Context()
            sock = self._socket = self._context.socket(zmq.DEALER)
            sock.linger = 0
            sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
            sock.curve_serverkey = about["curve_serverkey"].encode()
            sock.connect(f"{about['interface']}:{about['registration']}")
        return self._socket

    def close(self) -> None:
        if self._context is not None:
            self._context.destroy(0)
            self._context = self._socket = None
