"""A rank without an engine: the real agent and training thread in a process of their own; see `desk`.

    python lone_rank.py [NAME=NUMBER …]      sets constants of ftnb.rank.agent, or of ftnb.wire.sockets

Environment as the supervisor gives it to an engine.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell

from ftnb.rank import agent, engine
from ftnb.wire import sockets


def main() -> None:
    for setting in sys.argv[1:]:
        name, value = setting.split("=")
        (module,) = [module for module in (agent, sockets) if hasattr(module, name)]
        setattr(module, name, type(getattr(module, name))(value))
    InteractiveShell.instance()
    connection = sockets.Connection.load(Path(os.environ["FTNB_CONNECTION"]))
    engine.agent = agent.Agent(connection, int(os.environ["FTNB_RANK"]), float(os.environ["FTNB_LINGER_S"]))
    engine.agent.start()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
