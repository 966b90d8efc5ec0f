"""Entry point of an engine: `python -m ftnb.rank.engine`, then ipyparallel's own arguments.

The agent starts first, so that the supervisor hears from the rank, and torch is being imported, while
ipyparallel still registers with its controller.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ftnb.wire.sockets import Connection

agent = None


def main(nanny: Any = None) -> None:
    """Run an engine; `nanny` (of `ftnb.rank.forkserver`) is there already when this process was forked."""
    from ftnb.rank import engine  # the module as others import it, not this `__main__` twin
    from ftnb.rank.agent import Agent

    connection = Connection.load(Path(os.environ["FTNB_CONNECTION"]))
    rank = int(os.environ["FTNB_RANK"])  # -1: a spare, which has no rank yet
    engine.agent = Agent(connection, rank if rank >= 0 else None, float(os.environ.get("FTNB_LINGER_S", "60")))
    engine.agent.start()

    from ipyparallel.engine import app

    if nanny is not None:
        app.start_nanny = nanny.start
    app.main()


if __name__ == "__main__":
    main()
