"""`resize` against a scripted supervisor: what is refused before anything is asked, what is waited for."""

from __future__ import annotations

import pytest
from client_fakes import FakeConnection, run_info

from ftnb.client import container
from ftnb.client import resize as resize_module
from ftnb.client.container import Container
from ftnb.client.run import Run, WaitInterrupted, WaitTimeout
from ftnb.client.session import Session
from ftnb.errors import ClusterError, RunError, UsageError


def status(*states: str, wanted: int | None = None, problem: str | None = None, spares: int = 1) -> dict:
    ranks = [{"rank": k, "state": state} for k, state in enumerate(states)]
    ranks += [{"rank": None, "state": "spare"}] * spares
    return {"state": "running", "ranks": ranks, "num_ranks": wanted or len(states), "wanted_ranks": wanted or len(states),
            "world_size": len(states),
            "resize_problem": problem}  # fmt: skip


def cluster(*then: dict, before: dict | None = None, **answers) -> FakeConnection:
    """A cluster of two ranks whose status, once it has been asked to resize, is that of `then`, one after the other."""
    left = list(then)
    connection = FakeConnection(num_ranks=2, **answers)

    def answer() -> dict:
        if "resize" not in connection.ops():
            return before or status("idle", "idle")
        return left.pop(0) if len(left) > 1 else left[0]

    connection.answers = {"resize": {"num_ranks": 3, "was": 2}} | connection.answers | {"status": answer}
    return connection


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(resize_module, "POLL_S", 0.0)
    monkeypatch.setattr(container, "look", lambda: Container(cores=2, memory_bytes=8 * 10**9, free_bytes=2 * 10**9))


def test_it_waits_until_all_ranks_work_and_shows_how_far_it_is():
    connection = cluster(
        status("training", "training", wanted=3), status("training", "training", "starting", wanted=3),
        status("training", "training", "joining", wanted=3), status("training", "training", "training", wanted=3),
    )  # fmt: skip
    session, said, seen = Session(connection), [], []
    session.resize(3, progress=seen.append, show=said.append)
    assert connection.sent("resize") == {"num_ranks": 3}
    assert [entry["num_ranks"] for entry in seen] == [3, 3, 3, 3] and "elapsed_s" in seen[0]
    assert said[0] == "Cluster default: 2 ranks before, 3 ranks wanted."
    assert said[1].startswith("Cluster default: 3 ranks, after ")
    assert session.num_ranks == 3


def test_fewer_ranks_are_waited_for_until_the_others_are_gone():
    connection = cluster(status("training", "training", wanted=1), status("training", wanted=1))
    Session(connection).resize(1, show=lambda text: None)
    assert connection.ops().count("status") >= 3


def test_the_number_it_has_is_said_and_nothing_is_asked():
    connection, said = cluster(status("idle", "idle")), []
    Session(connection).resize(2, show=said.append)
    assert said == ["The cluster 'default' has 2 ranks already."] and "resize" not in connection.ops()


def test_the_number_it_should_have_but_has_not_is_asked_for():
    connection = cluster(status("idle", "idle"), before=status("idle", "failed"))
    Session(connection).resize(2, show=lambda text: None)
    assert "resize" in connection.ops()


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [(0, "at least 1, not 0"), (-2, "at least 1"), ("3", "whole number"), (2.5, "whole number"), (None, "How many ranks"),
     (True, "whole number"), (7, r"5 ranks more need about 1.5 GB, but only 1.2 GB.*At most 6 are possible: -n 6")],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_asked(num_ranks, words):
    connection = cluster(status("idle", "idle"))
    with pytest.raises(UsageError, match=words):
        Session(connection).resize(num_ranks)
    assert "resize" not in connection.ops()


def test_what_the_supervisor_refuses_is_raised():
    connection = cluster(status("idle", "idle"), resize=UsageError("global_batch 2 is smaller than 3"))
    with pytest.raises(UsageError, match="global_batch 2"):
        Session(connection).resize(3)


def test_a_problem_while_resizing_and_somebody_elses_wish_end_the_waiting():
    with pytest.raises(ClusterError, match=r"could not be resized to 3 ranks: Rank 2 did not start"):
        Session(cluster(status("idle", "idle", wanted=3, problem="Rank 2 did not start."))).resize(3)
    with pytest.raises(ClusterError, match=r"resized to 4 ranks by now, not to 3"):
        Session(cluster(status("idle", "idle", wanted=4))).resize(3)


def test_whoever_is_lost_meanwhile_and_not_replaced_is_not_waited_for():
    lost = status("training", "failed", "training", wanted=3) | {"not_replaced": [1]}
    with pytest.raises(ClusterError, match=r"rank 1 was lost meanwhile.*resize -n 3 .*session\.resize\(3\)"):
        Session(cluster(status("training", "training", wanted=3), lost)).resize(3, show=lambda text: None)


def test_ctrl_c_and_the_deadline_end_the_waiting_only(monkeypatch):
    def interrupted(entry):
        raise KeyboardInterrupt

    connection = cluster(status("idle", "idle", wanted=3))
    with pytest.raises(WaitInterrupted, match=r"still being resized to 3 ranks.*%ft_cluster status"):
        Session(connection).resize(3, progress=interrupted)
    assert connection.ops().count("resize") == 1
    monkeypatch.setattr(resize_module, "LIMIT_S", 0.0)
    with pytest.raises(WaitTimeout, match=r"2 of 3 ranks of cluster 'default' work"):
        Session(cluster(status("idle", "idle", wanted=3))).resize(3)


def test_a_run_is_resized_with_its_cluster_while_it_goes_on():
    connection = cluster(status("training", "training", "training", wanted=3), run_info=run_info("running"))
    run = Run(Session(connection), "run", "ftnb_runs/run")
    run.resize(3, show=lambda text: None)
    assert connection.sent("resize") == {"num_ranks": 3}
    connection.answers["run_info"] = run_info("finished")
    with pytest.raises(RunError, match=r"is over \(finished\).*%ft_cluster resize"):
        run.resize(2)
    with pytest.raises(UsageError, match="has no option 'ranks'"):
        run.resize(2, ranks=3)


def test_the_number_of_ranks_follows_the_cluster_without_a_question_each_time(monkeypatch):
    connection = cluster(status("idle", "idle"))
    session = Session(connection)
    assert [session.num_ranks for _ in range(100)] == [2] * 100
    assert connection.ops().count("status") == 0
    connection.answers["status"] = status("idle", "idle", "idle")
    session._num_ranks_at -= 10
    assert session.num_ranks == 3 and session.num_ranks == 3
    assert connection.ops().count("status") == 1
    connection.alive = False
    session._num_ranks_at -= 10
    assert session.num_ranks == 3  # the last that was heard
