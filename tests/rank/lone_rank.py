"""A rank without an engine: the real agent and training thread in a process of their own; see `desk`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell

from ftnb.rank import agent, cut, engine
from ftnb.wire import sockets


def main(environment: dict[str, str], output: str, constants: dict[str, float]) -> None:
    """As in an engine; `constants` of ftnb.rank.agent, ftnb.rank.cut and ftnb.wire.sockets have other values."""
    fd = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(environment)
    os.chdir(Path(output).parent)
    for name, value in constants.items():
        (module,) = [module for module in (agent, cut, sockets) if hasattr(module, name)]
        setattr(module, name, value)
    InteractiveShell.instance()
    connection = sockets.Connection.load(Path(os.environ["FTNB_CONNECTION"]))
    engine.agent = agent.Agent(connection, int(os.environ["FTNB_RANK"]), float(os.environ["FTNB_LINGER_S"]))
    engine.agent.start()
    while True:
        signal.pause()
