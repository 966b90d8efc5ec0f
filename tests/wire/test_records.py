"""The record of what a cluster has started: it survives torn lines, full disks, and a move to another machine."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from ftnb.wire import proc, reaper, records

TOKEN = "0123456789abcdef"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / records.FILE_NAME


def me() -> proc.ProcessId:
    process = proc.identify(os.getpid())
    assert process is not None
    return process


def ended() -> proc.ProcessId:
    """A process that has been."""
    popen = subprocess.Popen(["sleep", "60"])
    process = proc.identify(popen.pid)
    popen.kill()
    popen.wait()
    assert process is not None
    return process


def test_what_was_noted_is_read_in_order_by_anybody(path: Path) -> None:
    book = records.ProcessRecords(path, TOKEN)
    gone = ended()
    book.note(records.CONTROLLER, gone)
    book.note(records.RANK, me(), rank=3)
    assert records.read(path) == [
        records.Recorded(records.CONTROLLER, gone), records.Recorded(records.RANK, me(), 3)
    ]  # fmt: skip
    assert records.read_header(path).token == TOKEN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert reaper.living(path.parent) == [records.Recorded(records.RANK, me(), 3)]
    assert str(records.read(path)[1]) == f"rank 3 (pid {os.getpid()})"


def test_the_last_word_on_a_process_counts_unless_it_is_only_a_find(path: Path) -> None:
    book = records.ProcessRecords(path, TOKEN)
    for what in (records.OTHER, records.SPARE, records.RANK, records.OTHER):
        book.note(what, me())
    assert [recorded.what for recorded in reaper.living(path.parent)] == [records.RANK]


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_line_torn_by_a_killed_writer_costs_itself_alone(path: Path, cut: int) -> None:
    book = records.ProcessRecords(path, TOKEN)
    book.note(records.RANK, me(), rank=0)
    book.note(records.RANK, me(), rank=1)
    os.truncate(path, path.stat().st_size - cut)
    # Without its line end a line may be whole, but is not taken for torn then.
    before = records.read(path)
    assert [recorded.rank for recorded in before] == ([0, 1] if cut == 1 else [0])
    successor = records.ProcessRecords(path, TOKEN)
    successor.note(records.RANK, me(), rank=2)
    assert [recorded.rank for recorded in records.read(path)] == [recorded.rank for recorded in before] + [2]


@pytest.mark.parametrize("rubbish", [b"\xff\xfe\n", b"[1]\n", b'{"what": "rank"}\n', b'{"what": "rank", "pid": "x", "started": 1}\n'])
def test_rubbish_in_it_is_passed_over(path: Path, rubbish: bytes) -> None:
    records.ProcessRecords(path, TOKEN)
    with path.open("ab") as stream:
        stream.write(rubbish)
    records.ProcessRecords(path, TOKEN).note(records.RANK, me())
    assert records.read(path) == [records.Recorded(records.RANK, me())]


def test_a_successor_goes_on_and_another_cluster_begins_anew(path: Path) -> None:
    records.ProcessRecords(path, TOKEN).note(records.RANK, me())
    assert len(records.read(path)) == 1
    records.ProcessRecords(path, TOKEN)
    assert len(records.read(path)) == 1
    records.ProcessRecords(path, "another")
    assert records.read(path) == []
    assert records.read_header(path).token == "another"


def test_a_record_from_before_the_machine_was_started_again_names_nobody(path: Path) -> None:
    records.ProcessRecords(path, TOKEN).note(records.RANK, me())
    lines = path.read_text().splitlines(keepends=True)
    lines[0] = json.dumps({"what": "cluster", "token": TOKEN, "machine": "another"}) + "\n"
    path.write_text("".join(lines))
    assert reaper.living(path.parent) == []
    records.ProcessRecords(path, TOKEN)
    assert records.read(path) == []


def test_a_note_that_cannot_be_written_raises_nothing_and_comes_with_the_next(path: Path) -> None:
    book = records.ProcessRecords(path, TOKEN)
    away = path.with_name("away")
    path.rename(away)
    book.note(records.RANK, me(), rank=0)
    assert isinstance(book.problem, OSError)
    assert not path.exists()  # the directory of a cluster that was stopped is not filled again
    away.rename(path)
    book.note(records.RANK, me(), rank=1)
    assert book.problem is None
    assert [recorded.rank for recorded in records.read(path)] == [0, 1]


def test_a_long_record_is_rewritten_without_the_dead(path: Path) -> None:
    book = records.ProcessRecords(path, TOKEN)
    gone = ended()
    book.note(records.CONTROLLER, me())
    other = records.ProcessRecords(path, TOKEN, compacting=False)
    largest = 0
    for number in range(1500):
        (other if number % 3 else book).note(records.RANK, gone, rank=number)
        largest = max(largest, path.stat().st_size)
    book.note(records.RANK, me(), rank=0)
    assert path.stat().st_size <= largest < records._COMPACT_AT_BYTES + 1000 < 1500 * 50
    assert records.read(path)[0] == records.Recorded(records.CONTROLLER, me())
    assert records.read(path)[-1] == records.Recorded(records.RANK, me(), 0)


def test_a_dead_leader_stays_recorded_while_its_session_lives(path: Path) -> None:
    leader = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE)
    member = proc.identify(int(leader.stdout.readline()))
    try:
        process = proc.identify(leader.pid)
        book = records.ProcessRecords(path, TOKEN)
        book.note(records.RANK, process)
        leader.kill()
        leader.wait()
        book.compact()
        assert records.read(path) == [records.Recorded(records.RANK, process)]
    finally:
        member.signal(9)
    while member.is_alive():
        pass
    book.compact()
    assert records.read(path) == []
