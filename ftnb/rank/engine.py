"""Entry point of an engine: `python -m ftnb.rank.engine`, then ipyparallel's own arguments.

The agent starts first, so that the supervisor hears from the rank, and torch is being imported, while
ipyparallel still registers with its controller.
"""

from __future__ import annotations

import os
from pathlib import Path

from ftnb.wire.sockets import Connection

agent = None


def main() -> None:
    global agent
    from ftnb.rank import engine  # the module as others import it, not this `__main__` twin
    from ftnb.rank.agent import Agent

    connection = Connection.load(Path(os.environ["FTNB_CONNECTION"]))
    rank = int(os.environ["FTNB_RANK"])  # -1: a spare, which has no rank yet
    engine.agent = Agent(connection, rank if rank >= 0 else None, float(os.environ.get("FTNB_LINGER_S", "60")))
    engine.agent.start()

    from ipyparallel.engine.app import main as engine_main

    engine_main()


if __name__ == "__main__":
    main()
