"""One cluster of four real engines, shared by the tests; a test that stops it leaves the next one a fresh start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_tools import NUM_RANKS, Census, wait_until

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


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    runtime_dir = tmp_path_factory.mktemp("runtime")
    before = os.environ.get("FTNB_RUNTIME_DIR")
    os.environ["FTNB_RUNTIME_DIR"] = str(runtime_dir)
    cluster = SharedCluster(runtime_dir, tmp_path_factory.mktemp("notebook"))
    try:
        yield cluster
        cluster.stop()
        # The final check: nothing that any of these tests started is left.
        assert cluster.census.left() == []
    finally:
        cluster.census.end_all()
        wait_until(lambda: not cluster.census.left(), "the processes of the clusters are gone")
        if before is None:
            os.environ.pop("FTNB_RUNTIME_DIR", None)
        else:
            os.environ["FTNB_RUNTIME_DIR"] = before


@pytest.fixture
def cluster(shared: SharedCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedCluster]:
    """The shared cluster, with its notebook's directory as the current one; no run is left behind."""
    monkeypatch.chdir(shared.directory)
    try:
        yield shared
    finally:
        shared.census.take()
        with contextlib.suppress(ftnb.FtnbError):
            shared.end_run()


@pytest.fixture
def session(cluster: SharedCluster) -> ftnb.Session:
    return cluster.session()
