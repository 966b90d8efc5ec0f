"""Deaths in words, the last output, the pace of a run, and stacks put together."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ftnb.supervisor import lastwords, stacks
from ftnb.supervisor.pace import Pace
from ftnb.wire import memory, proc


def test_memory_that_has_grown_is_told_after_a_kill() -> None:
    samples = [(float(t), 200.0) for t in range(20)] + [(20.0, 700.0), (21.0, 1450.0)]
    failure, words = lastwords.describe(-signal.SIGKILL, samples, None)
    assert failure == "kill"
    assert "by somebody, or by the kernel" in words and "from 200 to 1450 MB in its last 10 s" in words
    _, words = lastwords.describe(-signal.SIGSEGV, samples, None)
    assert "memory had grown" not in words


@pytest.mark.parametrize("samples", [
    [], [(1.0, 300.0)],
    [(0.0, 100.0), (1.0, 190.0)],  # less than 100 MB
    [(0.0, 1000.0), (1.0, 1400.0)],  # less than half
    [(0.0, 100.0), (15.0, 1000.0), (16.0, 1000.0)],  # long ago
])  # fmt: skip
def test_memory_that_has_not_grown_is_not_mentioned(samples: list) -> None:
    assert lastwords.growth(samples) is None
    assert "memory had grown" not in lastwords.describe(-signal.SIGKILL, samples, None)[1]


def test_the_kernels_count_of_kills_is_told() -> None:
    _, words = lastwords.describe(-signal.SIGKILL, [], (3, 4))
    assert "by the kernel because memory ran out" in words and "risen from 3 to 4" in words


@pytest.mark.parametrize(("status", "parts"), [
    (0, ["clean exit"]), (1, ["code 1", "exception"]), (2, ["code 2", "called wrongly"]), (126, ["cannot be executed"]),
    (127, ["not found"]), (137, ["128 + 9", "SIGKILL"]), (139, ["SIGSEGV"]), (5, ["code 5"]), (250, ["code 250"]),
    (-4, ["SIGILL"]), (-6, ["SIGABRT"]), (-7, ["SIGBUS", "/dev/shm"]), (-9, ["SIGKILL"]), (-11, ["SIGSEGV"]),
])  # fmt: skip
def test_exit_statuses_are_put_into_words(status: int, parts: list[str]) -> None:
    words = proc.describe_exit(status)[1]
    assert all(part in words for part in parts), words


def test_counts_of_kills_for_memory(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert memory.oom_kills(tmp_path) is None
    write("proc/vmstat", "nr_free_pages 5\noom_kill 1\n")
    assert memory.oom_kills(tmp_path) == 1
    write("proc/self/cgroup", "4:memory:/a/b\n0::/c/d\n")
    write("sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert memory.oom_kills(tmp_path) == 2
    write("sys/fs/cgroup/c/memory.events", "low 0\noom 9\noom_kill 3\noom_group_kill 0\n")
    assert memory.oom_kills(tmp_path) == 3
    assert (memory.oom_kills() or 0) >= 0


def test_last_lines() -> None:
    text = "\n".join(["", "one", "", *map(str, range(7)), "x" * 1000, "  "])
    lines = lastwords.last_lines(text)
    assert lines == ["3", "4", "5", "6", "x" * lastwords.CHARS_KEPT]
    assert lastwords.last_lines("a\n2026-12-01 15:39:00.511 [IPEngine.1.1] Completed registration with id 1\nb") == ["a", "b"]
    assert lastwords.last_lines("a\nb\nc", but_not=["b"]) == ["a", "c"]


def test_the_pace_of_a_run() -> None:
    pace = Pace()
    assert pace.median_step_s is None and pace.steps_per_s(0.0) is None
    pace.committed(10.1, 1, 25.0)  # compiled
    assert pace.median_step_s == 25.0, "from the first step on: the second one may take as long"
    assert pace.steps_per_s(10.2) is None
    for step in range(2, 11):
        pace.committed(10 + step * 0.1, step, 0.09)
    assert pace.median_step_s == 0.09
    assert pace.steps_per_s(11.5) == pytest.approx(10)
    assert pace.steps_per_s(14.5) is None, "nothing moves"
    pace.committed(20.0, 5, 0.09)  # rolled back
    assert pace.steps_per_s(20.0) is None and pace.median_step_s == 0.09
    successor = Pace()
    successor.recall([0.2, None, 0.2])
    assert successor.median_step_s == 0.2 and successor.steps_per_s(20.0) is None
    slow = Pace()
    for step in range(1, 4):
        slow.committed(step * 2.0, step, 2.0)
    assert slow.steps_per_s(6.0 + 19.0) == pytest.approx(0.5), "ten typical steps are not over"


def test_equal_stacks_are_put_together() -> None:
    waits = {"place": "collective", "step": 41, "stack": ["a", "b"]}
    works = {"place": "forward", "step": 41, "stack": ["c"]}
    groups = stacks.grouped({3: waits, 0: dict(waits), 2: works, 1: dict(waits), 4: None})
    assert groups == [
        {"ranks": [0, 1, 3], "place": "collective", "step": 41, "stack": ["a", "b"]},
        {"ranks": [2], "place": "forward", "step": 41, "stack": ["c"]},
        {"ranks": [4], "place": None, "step": None, "stack": []},
    ]
