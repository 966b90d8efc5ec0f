"""Messages, rings, process identities and the lock on the door."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from ftnb.errors import CellError, NoClusterError, UsageError, from_wire
from ftnb.wire import client, messages, paths, proc, ring

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=8).filter(lambda k: k != "_frames"), plain | st.binary(max_size=50), max_size=6))
def test_a_message_comes_out_as_it_went_in(message):
    assert messages.decode(messages.encode(message)) == message


@pytest.mark.parametrize("frames", [[], [b""], [b"\xff"], [b"[1]"], [b"3"], [b'{"_frames": ["a"]}'], [b"{}", b"x"]])
def test_rubbish_is_a_bad_message_and_nothing_else(frames):
    with pytest.raises(messages.BadMessage):
        messages.decode(frames)


def test_an_error_crosses_the_wire_as_its_own_class():
    error = CellError("boom", ranks=[1], lineno=3)
    again = from_wire(json.loads(json.dumps(error.to_wire())))
    assert type(again) is CellError and str(again) == "boom" and again.details == {"ranks": [1], "lineno": 3}


@pytest.fixture
def pair(tmp_path):
    reader = ring.RingReader(tmp_path / "r.ring")
    writer = ring.RingWriter(tmp_path / "r.ring")
    yield writer, reader
    writer.close()
    reader.close()


def read(reader):
    """All records that are there, freed at once."""
    found = []
    for position, record in reader.read():
        found.append(record)
        reader.free(position)
    return found


def test_a_ring_gives_every_record_once_and_in_order_many_times_around(pair):
    writer, reader = pair
    sent, got = [], []
    for number in range(200):
        record = bytes([number]) * (number * 1777 % 60_000)
        writer.write(record)
        sent.append(record)
        if number % 3 == 0:
            got += read(reader)
    got += read(reader)
    assert sum(map(len, sent)) > ring.DATA_BYTES  # it did go around
    assert got == sent
    assert read(reader) == [] and reader.is_empty


def test_the_next_reader_of_a_ring_finds_what_was_read_but_not_freed(pair):
    writer, reader = pair
    for record in (b"one", b"two", b"three"):
        writer.write(record)
    positions = [position for position, _ in reader.read()]
    reader.free(positions[0])
    assert not reader.is_empty
    successor = ring.RingReader(reader.path, create=False)
    assert read(successor) == [b"two", b"three"]


def test_what_a_killed_process_wrote_into_its_ring_is_still_there(tmp_path):
    reader = ring.RingReader(tmp_path / "r.ring")
    code = (
        "import os, signal, sys; from pathlib import Path; from ftnb.wire.ring import RingWriter\n"
        "w = RingWriter(Path(sys.argv[1])); w.write(b'last words'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(reader.path)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert read(reader) == [b"last words"]
    assert stat.S_IMODE(reader.path.stat().st_mode) == 0o600
    reader.close()
    assert not reader.path.exists()


def test_a_ring_has_its_room_on_the_disk_from_the_start(pair, tmp_path, monkeypatch):
    """Else a disk that is full later would end both processes by a signal."""
    _, reader = pair
    assert reader.path.stat().st_blocks * 512 >= ring.DATA_BYTES

    def full(*_):
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*full\.ring'"):
        ring.RingReader(tmp_path / "full.ring")
    assert not (tmp_path / "full.ring").exists()


def test_a_record_larger_than_the_ring_is_refused(pair):
    with pytest.raises(ValueError, match="does not fit"):
        pair[0].write(bytes(ring.DATA_BYTES))


def test_a_process_is_known_by_pid_and_start_time():
    me = proc.identify(os.getpid())
    assert me is not None and me.is_alive()
    stranger = proc.ProcessId(os.getpid(), "another start time")
    assert not stranger.is_alive()
    assert not stranger.signal(signal.SIGKILL)  # or this test would be its own victim


def test_a_zombie_counts_as_gone_and_a_stopped_process_can_be_killed():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    process = proc.identify(child.pid)
    child.send_signal(signal.SIGSTOP)
    assert process.is_alive()
    assert proc.kill_session(child.pid) == 1
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, not yet waited for
    assert not process.is_alive()
    assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("status", "failure", "words"),
    [(0, "exit", "clean exit"), (3, "exit", "code 3"), (-9, "kill", "SIGKILL"), (-11, "crash", "SIGSEGV"),
     (-6, "crash", "SIGABRT"), (None, "unknown", "unknown")],
)  # fmt: skip
def test_exit_statuses_in_words(status, failure, words):
    assert proc.describe_exit(status)[0] == failure
    assert words in proc.describe_exit(status)[1]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65, "a b", "a..b"])
def test_names_that_cannot_be_directories_are_refused(name):
    with pytest.raises(UsageError):
        paths.check_name(name)


GOOD = {
    "name": "x", "pid": 1, "pid_started": "1", "host": "127.0.0.1", "client_port": 1, "rank_port": 2, "server_key": "k" * 40,
    "peer_public_key": "k" * 40, "peer_secret_key": "k" * 40, "version": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", "3", '{"name": "x"}', json.dumps({**GOOD, "client_port": "no"}), json.dumps({**GOOD, "server_key": "k"})],
)
def test_a_damaged_connection_file_says_what_to_do(tmp_path, monkeypatch, content):
    monkeypatch.setenv("FTNB_RUNTIME_DIR", str(tmp_path))
    path = paths.connection_file("default")
    paths.make_private_dir(path.parent)
    paths.write_private(path, content)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(NoClusterError, match="damaged"):
        client.load("default")


def test_without_a_cluster_the_message_says_how_to_start_one(tmp_path, monkeypatch):
    monkeypatch.setenv("FTNB_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(NoClusterError, match="%ft_cluster start --name blue"):
        client.load("blue")


def test_a_stranger_without_the_key_gets_no_answer(tmp_path, monkeypatch):
    """A real supervisor: somebody with the right port and server key, but not the peers' key, is not let in."""
    monkeypatch.setenv("FTNB_RUNTIME_DIR", str(tmp_path))
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "ftnb.supervisor", "--name", "door", "--num-ranks", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )
    context = zmq.Context()
    try:
        path = paths.connection_file("door")
        while not path.exists():
            assert supervisor.poll() is None
        connection = client.load("door")
        friend = client.connect("door")
        assert friend.request("hello")["supervisor_pid"] == supervisor.pid
        for keys in (zmq.curve_keypair(), None):
            stranger = context.socket(zmq.DEALER)
            stranger.linger = 0
            if keys:
                stranger.curve_serverkey = connection.server_key.encode()
                stranger.curve_publickey, stranger.curve_secretkey = keys
            stranger.connect(connection.url(connection.client_port))
            stranger.send_multipart(messages.encode({"id": 1, "op": "hello"}))
            assert stranger.poll(400) == 0  # a friend is answered in milliseconds
            stranger.close()
        friend.request("stop_cluster")
        friend.close()
        assert supervisor.wait(20) == 0
    finally:
        context.destroy(linger=0)
        if supervisor.poll() is None:
            supervisor.terminate()
            supervisor.wait(20)
