"""Random fault schedules on real engines: whatever happens, the run ends in one of the three ways, and says which."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_tools import CELL, NUM_RANKS, Reference
from shared_cluster import SharedCluster
from stories import KINDS, LONGEST, Stage, draw, judge, put_back

import ftnb

# Chosen so that every kind of fault, every option and every command is among them.
SAMPLE = (3, 7, 13, 15, 17, 22, 23, 26, 47, 49, 52, 54, 56, 69, 100)
ALL = range(300)


@pytest.fixture(scope="module")
def undisturbed() -> Reference:
    return Reference(CELL, LONGEST)


@pytest.fixture(scope="module")
def spared(shared: SharedCluster) -> Iterator[list[ftnb.Session]]:
    """A second cluster, with a warm spare; started when it is needed."""
    started: list[ftnb.Session] = []
    yield started
    for session in started:
        if session.alive:
            session.stop()


def play(seed: int, cluster: SharedCluster, spared: list[ftnb.Session], undisturbed: Reference) -> None:
    story = draw(seed)
    session = cluster.session()
    if story.spares:
        if not spared or not spared[-1].alive:
            spared.append(ftnb.Session.start(NUM_RANKS, 1, name="spared", show=lambda text: None))
        session = spared[-1]
    print(story)
    stage = Stage(session, story)
    try:
        run = stage.play()
        print("\n".join(stage.refused))
        judge(stage, undisturbed)
        print(f"{run.state}: {run.report().reason}")
    finally:
        if stage.run is not None and stage.run.state not in ("finished", "stopped", "failed"):
            stage.run.stop(save=False)
        put_back(session)


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_story(cluster: SharedCluster, spared: list[ftnb.Session], undisturbed: Reference, seed: int) -> None:
    play(seed, cluster, spared, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("seed", ALL)
def test_many_stories(cluster: SharedCluster, spared: list[ftnb.Session], undisturbed: Reference, seed: int) -> None:
    play(seed, cluster, spared, undisturbed)


def test_the_sample_has_everything() -> None:
    stories = [draw(seed) for seed in SAMPLE]
    assert set().union(*(story.kinds for story in stories)) == set(KINDS)
    assert {story.options["recovery"] for story in stories} == {"replace", "shrink", "restart"}
    assert {story.options["on_nan"] for story in stories} == {"stop", "skip", "rollback"}
    assert {act.do for story in stories for act in story.acts} == {"inject", "pause", "unpause", "resize", "stop"}
    assert {story.spares for story in stories} == {0, 1}
