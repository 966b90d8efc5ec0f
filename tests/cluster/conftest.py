"""One cluster of four real engines, shared by the tests; a test that stops it leaves the next one a fresh start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import comings
import pytest
from cluster_tools import Reference, wait_until
from comings import Gate
from shared_cluster import SharedCluster

import ftnb


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


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return comings.reference()
