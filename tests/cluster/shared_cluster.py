"""The cluster that most tests share."""

from __future__ import annotations

from pathlib import Path

from cluster_tools import NUM_RANKS, Census

import ftnb
from ftnb.client.run import ENDED


class SharedCluster:
    """Starts the cluster when a test asks for it, and keeps count of its processes."""

    name = "shared"

    def __init__(self, runtime_dir: Path, directory: Path) -> None:
        self.directory = directory
        self.census = Census(runtime_dir)
        self._session: ftnb.Session | None = None

    def session(self, num_ranks: int = NUM_RANKS) -> ftnb.Session:
        if self._session is not None and (not self._session.alive or self._session.num_ranks != num_ranks):
            self.stop()
        if self._session is None:
            self._session = ftnb.Session.start(num_ranks, name=self.name, show=lambda text: None)
            self.census.take()
        return self._session

    def end_run(self) -> None:
        """A test that failed may have left its training behind."""
        if self._session is None or not self._session.alive:
            return
        run = self._session.run
        if run is not None and run.state not in ENDED:
            run.stop(save=False)

    def stop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self.census.take()
            session.stop()
