"""The process from which engines are forked: `python -P -m ftnb.rank.forkserver FD`, started by the supervisor.

It imports once what every engine needs, torch above all, and then makes an engine in milliseconds, whose memory is
shared with it as long as nobody writes to it. What makes that safe: this process has one thread, opens no ZeroMQ
context, no process group and no GPU, and does nothing but fork.

A request is one JSON line (id, argv, environment, cwd, output), the answer another one. The engine is forked twice, so
that it becomes a child of the supervisor (a child subreaper), which is told of its end like of any other child's. It
does nothing before its answer has been sent: an engine that nobody knows of cannot come to be.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import pickle
import random
import socket
import sys
from pathlib import Path
from typing import Any

_IMPORTS = [
    "torch", "torch._dynamo", "torch.distributed", "torch.utils.data", "cloudpickle", "IPython",
    "ipyparallel.engine.app", "ipyparallel.engine.nanny", "ftnb.rank.agent", "ftnb.rank.engine", "ftnb.rank.export",
    "ftnb.rank.loop", "ftnb.rank.output", "ftnb.rank.worker",
]
# A variable that the supervisor fills with nothing of meaning: engines have more to show than this process, `show_as`.
ROOM = "FTNB_ROOM"


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    del os.environ[ROOM]
    os.environ.update(dict(os.environ))  # the C library's copies of them move to where `show_as` does not write
    show_as([sys.executable, "-P", "-m", "ftnb.rank.forkserver"], dict(os.environ))
    problem = _import_all()
    if problem is None:
        gc.collect()
        gc.freeze()  # or the first collection in a child would write to, and so copy, every object there is
        gc.disable()
    link.sendall(json.dumps({"ready": problem is None, "problem": problem}).encode() + b"\n")
    request = None if problem else _serve(link)
    link.close()
    if request is not None:  # in an engine
        _become_engine(request)


def _import_all() -> str | None:
    """Import what engines need; returns why forking would not be safe afterwards, None when it is."""
    for name in _IMPORTS:
        importlib.import_module(name)
    import torch
    import zmq

    # A lock that another thread holds while this one forks is held for ever in the child.
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        return f"it has {threads} threads after its imports; only a process with one can be forked safely"
    if zmq.Context._instance is not None:
        return "one of its imports has made a ZeroMQ context, which does not survive a fork"
    if torch.cuda.is_initialized():
        return "one of its imports has initialised CUDA, which does not survive a fork"
    return None


def _serve(link: socket.socket) -> dict[str, Any] | None:
    """Fork an engine for each request until the supervisor's end is closed. In the engine, returns its request."""
    lines = link.makefile("rb")
    while line := lines.readline():
        request = json.loads(line)
        try:
            pid, go = _fork_engine()
        except OSError as error:
            answer: dict[str, Any] = {"id": request["id"], "error": f"fork: {error.strerror}"}
            link.sendall(json.dumps(answer).encode() + b"\n")
            continue
        if pid == 0:
            lines.detach()
            if not os.read(go, 1):
                os._exit(0)  # the server has died before it could say that this engine is there
            os.close(go)
            return request
        try:
            link.sendall(json.dumps({"id": request["id"], "pid": pid}).encode() + b"\n")
            os.write(go, b"g")
        finally:
            os.close(go)
    return None


def _fork_engine() -> tuple[int, int]:
    """Fork twice. Here: (the engine's pid, a pipe to let it go on); in the engine: (0, the pipe it has to wait at)."""
    pid_read, pid_write = os.pipe()
    go_read, go_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(pid_write, str(pid).encode())
            os._exit(0)
        for fd in (pid_read, pid_write, go_write):
            os.close(fd)
        return 0, go_read
    os.close(pid_write)
    os.close(go_read)
    os.waitpid(middle, 0)
    said = os.read(pid_read, 32)
    os.close(pid_read)
    if not said:
        os.close(go_write)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return int(said), go_write


def _become_engine(request: dict[str, Any]) -> None:
    """Make this fork what `Popen(argv, …)` would have made, and run the engine."""
    os.setsid()
    with open(os.devnull, "rb") as nothing, open(request["output"], "ab") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    show_as(request["argv"], request["environment"])
    os.chdir(request["cwd"])
    from ftnb.rank import engine

    sys.argv = [engine.__file__, *request["argv"][request["argv"].index(engine.__name__) + 1 :]]
    _new_seeds()
    gc.enable()
    nanny = _fork_nanny(request)
    if nanny is not None:  # else this is the nanny, and its work is done
        engine.main(nanny)


def _new_seeds() -> None:
    """Unseeded random numbers must differ between engines, as they do in processes started one by one."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.seed()


class Nanny:
    """The engine's nanny (it tells the controller of the engine's death), forked while the engine has one thread.

    ipyparallel starts a Python of its own for it when the engine registers: 0.3 s, and 27 MB for each engine.
    """

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers = to, answers

    def start(self, **kwargs: Any) -> tuple[str, Any]:
        """In the place of `ipyparallel.engine.nanny.start_nanny`, and with its result."""
        with os.fdopen(self._to, "wb") as stream:
            stream.write(pickle.dumps({**kwargs, "pid": os.getpid()}))
        pipe = os.fdopen(self._answers, "rb")
        url = pipe.readline().decode().strip()
        if not url:
            raise RuntimeError("the engine's nanny ended at once; the engine's output has more")
        return url, pipe  # the nanny notices the engine's end by the end of this pipe


def _fork_nanny(request: dict[str, Any]) -> Nanny | None:
    """The nanny's handle in the engine; None in the nanny, when it has finished."""
    to_read, to_write = os.pipe()
    answers_read, answers_write = os.pipe()
    if os.fork():
        os.close(to_read)
        os.close(answers_write)
        return Nanny(to_write, answers_read)
    os.close(to_write)
    os.close(answers_read)
    os.setsid()
    os.dup2(to_read, 0)
    os.dup2(answers_write, 1)
    os.close(to_read)
    os.close(answers_write)
    show_as([sys.executable, "-m", "ipyparallel.engine.nanny"], request["environment"])
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    from ipyparallel.engine import nanny

    with contextlib.suppress(EOFError):  # the engine has ended before it registered
        nanny.main()
    return None


def show_as(argv: list[str], environment: dict[str, str]) -> None:
    """Let `/proc/PID/cmdline` and `environ` (and so `ps`) tell what this process is, not what it was forked from.

    The supervisor finds what a dead rank has left by a mark in the environment. `os.environ` must have been set anew
    before, since the kernel reads the very memory in which the C library found its variables at the start.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    if not 0 < arg_start < arg_end <= env_start < env_end:
        return
    # Marks first: whatever does not fit is left out.
    entries = sorted(environment.items(), key=lambda entry: not entry[0].startswith("FTNB_"))
    for start, end, texts in (
        (arg_start, arg_end, argv), (env_start, env_end, [f"{k}={v}" for k, v in entries])
    ):
        data = b""
        for text in texts:
            if len(data) + len(entry := os.fsencode(text) + b"\0") <= end - start:
                data += entry
        ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
